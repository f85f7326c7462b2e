"""TCP on loopback as all trio contestants use it, with the congestion control that our node asks for.

A ratio between two congestion controls would measure the kernel.  Where bbr is not allowed the kernel's default stays, for our
node (wire/net/transport.py) as for these; the name in force is read back and reported.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress

import trio

__all__ = ["WANTED", "congestion_of", "dial", "listen"]

WANTED = b"bbr"
_OPTION = getattr(socket, "TCP_CONGESTION", None)


def _prepare(stream: trio.SocketStream) -> None:
    if _OPTION is not None:
        with suppress(OSError):
            stream.setsockopt(socket.IPPROTO_TCP, _OPTION, WANTED)


def congestion_of(stream: trio.SocketStream) -> str:
    """Its name, "" if the system does not say."""
    if _OPTION is None:
        return ""
    name = stream.getsockopt(socket.IPPROTO_TCP, _OPTION, 16)
    return name.partition(b"\0")[0].decode("ascii") if isinstance(name, bytes) else ""


async def dial(port: int) -> trio.SocketStream:
    """A connection to a server on loopback (trio sets TCP_NODELAY)."""
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    _prepare(stream)
    return stream


async def listen(nursery: trio.Nursery, handler: Callable[[trio.SocketStream], Awaitable[None]]) -> int:
    """Serve connections in `nursery`; returns the port."""
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")

    async def prepared(stream: trio.SocketStream) -> None:
        _prepare(stream)
        await handler(stream)

    nursery.start_soon(trio.serve_listeners, prepared, listeners)
    port: int = listeners[0].socket.getsockname()[1]
    return port
