"""Raw TCP with trio: what the kernel and the event loop alone cost.  Nothing is encrypted, nobody is authenticated.

`send_all` of `trio.SocketStream`, and `recv_into` of its socket instead of `receive_some`, which allocates each piece.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio

from bench.link import sockets
from bench.link.bytepipe import PipeClient, answer_stream
from bench.link.child import TRIO, main

__all__ = ["TrioTcp"]


class SocketPipe:
    """A `BytePipe`."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.send = stream.send_all
        self.receive = stream.socket.recv_into


class TrioTcpClient(PipeClient):
    def __init__(self, stream: trio.SocketStream, port: int) -> None:
        super().__init__(SocketPipe(stream))
        self.congestion = sockets.congestion_of(stream)
        self._port = port

    async def handshake(self) -> float | None:
        began = time.perf_counter()
        stream = await sockets.dial(self._port)
        took = time.perf_counter() - began
        await stream.aclose()
        return took


class TrioTcp:
    name = "trio-tcp"
    loop = TRIO

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[dict[str, Any]]:
        async with trio.open_nursery() as nursery:
            yield {"port": await sockets.listen(nursery, lambda stream: answer_stream(SocketPipe(stream), stream))}
            nursery.cancel_scope.cancel()

    @asynccontextmanager
    async def connect(self, where: dict[str, Any]) -> AsyncIterator[TrioTcpClient]:
        async with await sockets.dial(where["port"]) as stream:
            yield TrioTcpClient(stream, where["port"])


if __name__ == "__main__":
    main(TrioTcp())
