"""TCP on loopback, with one congestion control for every contestant whose sockets we can reach.

A ratio between two congestion controls would measure the kernel.  And bbr, which our node asks for and some kernels have for default,
paces by an estimate of the line; loopback is no line, the estimate differs from connection to connection, and throughput with it
by a factor of two and more.  So all use cubic, which loopback's missing loss and delay leave alone: contestants on trio through
trio's hook for making sockets (an accepted socket has its listener's), our node through its transport.  gRPC makes its sockets in
C++ and keeps the kernel's default; what is in force is read back and reported.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress

import trio

from bench.link import settings

__all__ = ["SteadyFactory", "congestion_of", "dial", "listen", "steady"]

_OPTION = getattr(socket, "TCP_CONGESTION", None)


def steady(sock: socket.socket) -> socket.socket:
    """`sock` with the wanted congestion control, where the system has it."""
    if _OPTION is not None and sock.type == socket.SOCK_STREAM:
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, _OPTION, settings.congestion().encode())
    return sock


class SteadyFactory(trio.abc.SocketFactory):
    """For `trio.socket.set_custom_socket_factory`: libraries on trio get steady sockets without knowing it."""

    def socket(
        self, family: socket.AddressFamily | int = -1, type: socket.SocketKind | int = -1, proto: int = -1
    ) -> trio.socket.SocketType:
        return trio.socket.from_stdlib_socket(steady(socket.socket(family, type, proto)))


def congestion_of(sock: socket.socket | trio.socket.SocketType | trio.SocketStream) -> str:
    """Its congestion control by name, "" if the system does not say."""
    if _OPTION is None:
        return ""
    name = sock.getsockopt(socket.IPPROTO_TCP, _OPTION, 16)
    return name.partition(b"\0")[0].decode("ascii") if isinstance(name, bytes) else ""


async def dial(port: int) -> trio.SocketStream:
    """A connection to a server on loopback (trio sets TCP_NODELAY)."""
    trio.socket.set_custom_socket_factory(SteadyFactory())
    return await trio.open_tcp_stream("127.0.0.1", port)


async def listen(nursery: trio.Nursery, handler: Callable[[trio.SocketStream], Awaitable[None]]) -> int:
    """Serve connections in `nursery`; returns the port."""
    trio.socket.set_custom_socket_factory(SteadyFactory())
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    nursery.start_soon(trio.serve_listeners, handler, listeners)
    port: int = listeners[0].socket.getsockname()[1]
    return port
