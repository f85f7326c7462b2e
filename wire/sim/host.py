"""A machine: its addresses, its line, its ports, and the transport that programs on it are given.

`SimTransport`, `SimListener` and `SimPipe` fit the transport interface of the socket room without knowing it: an interface of
structure needs no import.  Buffers default to Linux's largest (tcp_wmem 4 MiB, tcp_rmem 6 MiB), and with them a connection
carries at most 4 MiB a round trip, however fast the line is.
"""

from __future__ import annotations

import errno
import socket
from collections import deque
from typing import TYPE_CHECKING

import trio

from wire.address import Address
from wire.sim.congestion import congestion_of
from wire.sim.connect import Dialling
from wire.sim.link import Bottleneck, Link
from wire.sim.nat import Nat, Place
from wire.sim.pipe import SimPipe, os_error

if TYPE_CHECKING:
    from wire.sim.internet import Internet

BACKLOG = 512
EPHEMERAL = range(32768, 61000)  # Linux, ip_local_port_range
WILD = ("0.0.0.0", "::")


class Host:
    """congestion: "cubic" or "bbr", of all its connections.  clock_skew_s: what its wall clock is off, for programs that ask."""

    loopback = ("127.0.0.1", "::1")

    def __init__(
        self,
        internet: Internet,
        addresses: tuple[str, ...],
        link: Link,
        nat: Nat | None,
        *,
        congestion: str = "bbr",
        clock_skew_s: float = 0.0,
        send_buffer: int = 4 << 20,
        receive_buffer: int = 6 << 20,
        backlog: int = BACKLOG,
    ) -> None:
        congestion_of(congestion)
        self.internet = internet
        self.name = addresses[0]
        self.addresses = addresses
        self.link = link
        self.nat = nat
        self.congestion = congestion
        self.clock_skew_s = clock_skew_s
        self.send_buffer = send_buffer
        self.receive_buffer = receive_buffer
        self.backlog = backlog
        self.alive = True
        self.is_cut = False
        self.up = Bottleneck(internet, link.up_bps, link.queue_bytes)
        self.down = Bottleneck(internet, link.down_bps, link.queue_bytes)
        self.connections: dict[tuple[Place, Place], SimPipe] = {}
        self.dialling: dict[tuple[Place, Place], Dialling] = {}
        self.listeners: dict[Place, SimListener] = {}
        self.transport = SimTransport(self)
        self._next_port = EPHEMERAL.start

    def wall_time(self, base: float = 1.7e9) -> float:
        """Unix time as this machine believes it to be; `base` at the start of trio's clock."""
        return base + trio.current_time() + self.clock_skew_s

    def listener(self, place: Place) -> SimListener | None:
        wild = WILD[":" in place[0]], place[1]
        return self.listeners.get(place) or self.listeners.get(wild)

    def free_port(self) -> int:
        used = {port for _, port in self.listeners} | {local[1] for local, _ in (*self.connections, *self.dialling)}
        for _ in EPHEMERAL:
            port = self._next_port
            self._next_port = port + 1 if port + 1 in EPHEMERAL else EPHEMERAL.start
            if port not in used:
                return port
        raise os_error(errno.EADDRNOTAVAIL)

    def source(self, remote: str) -> str:
        """Our own address towards a host.  Raises OSError."""
        if remote in self.loopback or remote in self.addresses:
            return remote
        for address in self.addresses:
            if (":" in address) == (":" in remote):
                return address
        raise os_error(errno.ENETUNREACH)


class SimListener:
    """See `wire.net.transport.Listener`."""

    def __init__(self, host: Host, address: Address) -> None:
        self.address: Address = address
        self.closed = False
        self.half = 0  # handshakes that wait for their last packet
        self._host = host
        self._ready: deque[SimPipe] = deque()
        self._lot = trio.lowlevel.ParkingLot()

    def has_room(self) -> bool:
        return self.half + len(self._ready) < self._host.backlog

    def put(self, pipe: SimPipe) -> None:
        self._ready.append(pipe)
        self._lot.unpark()

    async def accept(self) -> SimPipe:
        """The next inbound pipe; a cancel leaves it for the next call.  Raises `trio.ClosedResourceError`."""
        await trio.lowlevel.checkpoint()
        while True:
            if self.closed:
                raise trio.ClosedResourceError("this listener was closed")
            while self._ready:
                pipe = self._ready.popleft()
                if not pipe.gone:
                    return pipe
            await self._lot.park()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._host.listeners.pop((self.address.host, self.address.port), None)
            for pipe in self._ready:  # as a kernel does with connections that nobody accepted
                pipe.abort()
            self._ready.clear()
            self._lot.unpark_all()


class SimTransport:
    """See `wire.net.transport.Transport`."""

    def __init__(self, host: Host) -> None:
        self.host = host

    async def dial(self, address: Address, *, local_port: int = 0) -> SimPipe:
        """Connect to a literal address, from `local_port` if it is not 0 (it may be a listener's).  Raises OSError."""
        await trio.lowlevel.checkpoint()
        host = self.host
        net, remote = host.internet, (address.host.partition("%")[0], address.port)
        net.tick()
        if not host.alive:
            raise os_error(errno.ENETDOWN)
        local = host.source(remote[0]), local_port or host.free_port()
        if (local, remote) in host.connections or (local, remote) in host.dialling:
            raise os_error(errno.EADDRNOTAVAIL)
        if local == remote:  # a port that was asked for is in use: the caller takes another
            raise os_error(errno.EADDRNOTAVAIL if local_port else errno.ECONNREFUSED)
        dialling = host.dialling[local, remote] = Dialling(host, local, remote)
        net.note("dial", host.name, local, remote)
        dialling.syn()
        try:
            await dialling.done.wait()
        except BaseException:
            dialling.leave()
            pipe = dialling.pipe
            if pipe is not None and dialling.done.is_set():
                pipe.abort()
            raise
        if dialling.pipe is None or dialling.error is not None:
            raise dialling.error or os_error(errno.ETIMEDOUT)
        return dialling.pipe

    async def listen(self, address: Address) -> SimListener:
        """Raises OSError: EADDRINUSE for a busy port, EADDRNOTAVAIL for an address that this host has not."""
        await trio.lowlevel.checkpoint()
        host, name = self.host, address.host.partition("%")[0]
        if not host.alive:
            raise os_error(errno.ENETDOWN)
        if name not in (*host.addresses, *host.loopback, *WILD):
            raise os_error(errno.EADDRNOTAVAIL)
        port = address.port or host.free_port()
        for other, busy in host.listeners:
            if busy == port and (other == name or ((":" in other) == (":" in name) and (other in WILD or name in WILD))):
                raise os_error(errno.EADDRINUSE)
        listener = host.listeners[name, port] = SimListener(host, Address(name, port))
        return listener

    async def resolve(self, address: Address) -> tuple[Address, ...]:
        """From `Internet.names`.  Raises `socket.gaierror` for a name that nobody has."""
        await trio.lowlevel.checkpoint()
        if address.is_literal:
            return (address,)
        found = self.host.internet.names.get(address.host, [])
        wanted = {"dns4": False, "dns6": True}.get(address.kind)
        hosts = [each for each in found if wanted is None or (":" in each) == wanted]
        if not hosts:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return tuple(Address(each, address.port) for each in hosts)

    def local_addresses(self) -> tuple[str, ...]:
        return (*self.host.loopback[:1], *self.host.addresses)
