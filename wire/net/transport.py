"""Ordered reliable byte pipes: the seam between the protocol and the socket that carries it.

Everything above this file (link, dialling, listening, the manager) sees a `Transport` that gives `Pipe`s and `Listener`s.
TCP is the implementation for the world; an in-memory internet for tests or the inside of a relayed circuit fit behind the
same three protocols.  They are `typing.Protocol`s and not base classes, so that no implementation imports this file.

What goes wrong with the obvious ways, and what was chosen:

* `trio.SocketStream.send_all` joins nothing and copies nothing, but takes one buffer and always reschedules its task.  A
  record writer has several buffers and wants to know *without a task switch* whether the kernel takes them (`send_now`).
  So plain non-blocking sockets are used with `trio.lowlevel.wait_readable / wait_writable`, which is all trio does inside.
* After a short read the socket is almost surely empty.  Trying again first costs one failed system call a message
  (about 1 us and an exception, 3 % of a small round trip), so a short read is followed by waiting.
* Which options a socket gets, and why, is a theory of its own: sockoptions.py.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

import trio

from wire.address import Address
from wire.net.sockoptions import check_free, congestion_for, set_congestion, set_unsent_most, share_port, socket_name, unsent_most
from wire.path import DIRECT, Path
from wire.pipeinfo import PipeInfo

# Buffers in one sendmsg call: the kernel's IOV_MAX (POSIX asks for >= 16, Linux and the BSDs give 1024).
MAX_BUFFERS = 1024
# Connections that the kernel completes while the accept loop is busy; Linux caps it at net.core.somaxconn (4096).
BACKLOG = 512
_HAS_SENDMSG = hasattr(socket.socket, "sendmsg")


class Pipe(Protocol):
    """An ordered reliable byte pipe.  One task receives and one sends; a third caller is a bug of ours."""

    async def receive_into(self, buffer: memoryview) -> int:
        """Fill the front of `buffer`; returns the number of bytes, 0 at the end of the peer's data.

        Raises `trio.BrokenResourceError` (cause: the OSError) when the pipe broke, `trio.ClosedResourceError` when we
        closed it.  A cancel loses no byte.  Does not yield to other tasks when data is there already.
        """
        ...

    def send_now(self, views: Sequence[memoryview]) -> int:
        """Send from the front of `views` what goes without waiting; returns the number of bytes, possibly 0.  Same errors."""
        ...

    async def wait_writable(self) -> None:
        """Wait until `send_now` may take more.  Same errors; a cancel changes nothing."""
        ...

    def taking(self, bytes_per_s: float) -> None:
        """How fast the pipe takes bytes, 0 for unknown.  It may hold the more unsent, the faster the line is."""
        ...

    async def send_eof(self) -> None:
        """Tell the peer that no more comes; receiving goes on."""
        ...

    def close(self) -> None:
        """Close both directions after what the kernel holds was sent; wakes waiters with `ClosedResourceError`.  Idempotent."""
        ...

    def abort(self) -> None:
        """Close at once and drop unsent data (TCP: RST).  Idempotent."""
        ...

    def info(self) -> PipeInfo: ...

    def runs(self, path: Path) -> None:
        """Whoever made the pipe knows which way it runs: from now on `info` says so."""
        ...


class Listener(Protocol):
    address: Address  # as bound: with the real port

    async def accept(self) -> Pipe:
        """The next inbound pipe.  Raises OSError for trouble that concerns one connection or the machine, not the listener."""
        ...

    def close(self) -> None: ...


class Transport(Protocol):
    async def dial(self, address: Address, *, local_port: int = 0) -> Pipe:
        """Connect to a literal address, from `local_port` if it is not 0: it may be that of a listener.

        Raises OSError: EADDRNOTAVAIL if a connection between these two ports exists already, EADDRINUSE for a port that cannot be
        shared.  A cancel leaves no socket behind; deadlines are the caller's scopes.
        """
        ...

    async def listen(self, address: Address) -> Listener:
        """Bind and listen.  Raises OSError, with EADDRINUSE for a busy port."""
        ...

    async def resolve(self, address: Address) -> tuple[Address, ...]:
        """Literal addresses of a named one, in the resolver's order; a literal gives itself.  Raises OSError."""
        ...

    def local_addresses(self) -> tuple[str, ...]:
        """IP addresses of this machine's interfaces that are up, loopback included."""
        ...


def literal(host: str, port: int) -> Address:
    """The address of a numeric host as the kernel names it; a zone id is cut off, a v4-mapped host becomes IPv4 (FIND-13)."""
    return Address(host.partition("%")[0], port)


def literal_text(host: str, port: int) -> str:
    """The same as text; empty if the host is no numeric address, as on other transports than TCP."""
    try:
        return str(literal(host, port))
    except ValueError:
        return ""


def _plain(name: object) -> tuple[str, int]:
    """(host, port) out of a socket name of two or four parts (FIND-13)."""
    if isinstance(name, tuple) and len(name) >= 2:
        return str(name[0]).partition("%")[0], int(name[1])
    return str(name), 0


class TcpPipe:
    """A connected non-blocking TCP socket as a `Pipe`.  Owns the socket."""

    __slots__ = ("_closed", "_drained", "_info", "_sock", "_unsent_most")

    def __init__(self, sock: socket.socket, congestion: str | None = None, *, path: Path = DIRECT) -> None:
        self._sock = sock
        self._closed = False
        self._drained = False  # the last read took all there was
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._unsent_most = 0
        self.taking(0.0)
        local, remote = _plain(sock.getsockname()), _plain(sock.getpeername())
        in_force = set_congestion(sock, congestion_for(local[0], remote[0]) if congestion is None else congestion)
        self._info = PipeInfo("tcp", local, remote, in_force, path)

    def info(self) -> PipeInfo:
        return self._info

    def runs(self, path: Path) -> None:
        self._info = replace(self._info, path=path)

    def _broken(self, error: OSError) -> Exception:
        if self._closed or error.errno == errno.EBADF:
            return trio.ClosedResourceError("this pipe was closed")
        broken = trio.BrokenResourceError(str(error))
        broken.__cause__ = error
        return broken

    async def receive_into(self, buffer: memoryview) -> int:
        await trio.lowlevel.checkpoint_if_cancelled()
        while True:
            if self._drained:
                self._drained = False
                if self._closed:
                    raise trio.ClosedResourceError("this pipe was closed")
                await trio.lowlevel.wait_readable(self._sock.fileno())
            try:
                count = self._sock.recv_into(buffer)
            except BlockingIOError:
                self._drained = True
            except OSError as error:
                raise self._broken(error) from error
            else:
                self._drained = 0 < count < len(buffer)
                return count

    def send_now(self, views: Sequence[memoryview]) -> int:
        try:
            if _HAS_SENDMSG:
                return self._sock.sendmsg(views if len(views) <= MAX_BUFFERS else views[:MAX_BUFFERS])
            return self._sock.send(b"".join(views))
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._broken(error) from error

    async def wait_writable(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError("this pipe was closed")
        await trio.lowlevel.wait_writable(self._sock.fileno())

    def taking(self, bytes_per_s: float) -> None:
        most = unsent_most(bytes_per_s)
        if most != self._unsent_most:
            self._unsent_most = most
            set_unsent_most(self._sock, most)

    async def send_eof(self) -> None:
        await trio.lowlevel.checkpoint()
        with suppress(OSError):  # already broken: the receiving side reports it
            self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            trio.lowlevel.notify_closing(self._sock.fileno())
            self._sock.close()

    def abort(self) -> None:
        if not self._closed:
            with suppress(OSError):
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            self.close()


async def send_all(pipe: Pipe, data: bytes) -> None:
    """Send all of `data`.  After a cancel an unknown part of it was sent: the pipe is spent."""
    await trio.lowlevel.checkpoint_if_cancelled()
    rest = memoryview(data)
    while rest := rest[pipe.send_now((rest,)) :]:
        await pipe.wait_writable()


def unsent(views: Sequence[memoryview], count: int) -> Sequence[memoryview]:
    """What is left of `views` after their first `count` bytes."""
    for index, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[index + 1 :]]
        count -= len(view)
    return ()


class TcpListener:
    """A listening socket as a `Listener`.  Owns the socket."""

    __slots__ = ("_closed", "_congestion", "_sock", "address")

    def __init__(self, sock: socket.socket, congestion: str | None = None) -> None:
        self._sock = sock
        self._congestion = congestion
        self._closed = False
        self.address = literal(*_plain(sock.getsockname()))

    async def accept(self) -> TcpPipe:
        """See `Listener.accept`.  A cancel leaves the connection in the kernel's queue."""
        await trio.lowlevel.checkpoint()
        while True:
            if self._closed:
                raise trio.ClosedResourceError("this listener was closed")
            try:
                sock, _ = self._sock.accept()
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self._sock.fileno())
                continue
            try:
                sock.setblocking(False)
                return TcpPipe(sock, self._congestion)
            except OSError:  # a scanner that has left already has no name any more: nobody waits for an answer
                sock.close()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            trio.lowlevel.notify_closing(self._sock.fileno())
            self._sock.close()


class TcpTransport:
    """TCP over IPv4 and IPv6.  `congestion`: the congestion control to ask for on every connection; None for the module's choice.

    A name that the kernel does not offer is as none: its default stays, and `PipeInfo.congestion` says so.
    """

    __slots__ = ("_congestion",)

    def __init__(self, congestion: str | None = None) -> None:
        self._congestion = congestion

    async def dial(self, address: Address, *, local_port: int = 0) -> TcpPipe:
        family = socket.AF_INET6 if address.kind == "ip6" else socket.AF_INET
        await trio.lowlevel.checkpoint()
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            if local_port:
                share_port(sock)
                sock.bind(("::" if family == socket.AF_INET6 else "0.0.0.0", local_port))
            code = sock.connect_ex(socket_name(address))
            if code == errno.EINPROGRESS:
                await trio.lowlevel.wait_writable(sock.fileno())
                code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
            if sock.getsockname() == sock.getpeername():
                # TCP's simultaneous open lets a socket that dials a closed port of its own ephemeral range meet itself.
                number = errno.EADDRNOTAVAIL if local_port else errno.ECONNREFUSED
                raise OSError(number, os.strerror(number))
            return TcpPipe(sock, self._congestion)
        except BaseException:
            sock.close()
            raise

    async def listen(self, address: Address) -> TcpListener:
        await trio.lowlevel.checkpoint()
        family = socket.AF_INET6 if address.kind == "ip6" else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # one listener a family: no mapped addresses
            if address.port:
                check_free(family, address)
            share_port(sock)
            sock.bind(socket_name(address))
            sock.listen(BACKLOG)
            return TcpListener(sock, self._congestion)
        except BaseException:
            sock.close()
            raise

    async def resolve(self, address: Address) -> tuple[Address, ...]:
        if address.kind in ("ip4", "ip6"):
            await trio.lowlevel.checkpoint()
            return (address,)
        family = {"dns4": socket.AF_INET, "dns6": socket.AF_INET6}.get(address.kind, socket.AF_UNSPEC)
        found = await trio.socket.getaddrinfo(address.host, address.port, family=family, type=socket.SOCK_STREAM)
        return tuple(dict.fromkeys(literal(str(name[0]), int(name[1])) for *_, name in found))

    def local_addresses(self) -> tuple[str, ...]:
        import psutil  # the only use in wire: the standard library has no portable list of interface addresses

        up = {name for name, state in psutil.net_if_stats().items() if state.isup}
        hosts = (
            entry.address.partition("%")[0]
            for name, entries in psutil.net_if_addrs().items()
            if name in up
            for entry in entries
            if entry.family in (socket.AF_INET, socket.AF_INET6)
        )
        return tuple(dict.fromkeys(hosts))
