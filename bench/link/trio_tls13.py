"""TLS 1.3 with trio's `SSLStream` over the standard library's ssl, both sides with certificates.

OpenSSL chooses AES-256-GCM.  A TLS record holds at most 16 KiB (RFC 8446, 5.1), and `receive_some` gives one at a time; that, and
the copies through memory BIOs, is what this design costs.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio

from bench.link import sockets
from bench.link.bytepipe import PipeClient, answer_stream
from bench.link.certificates import context, make_certificates
from bench.link.child import TRIO, main

__all__ = ["TrioTls13"]

class TlsPipe:
    """A `BytePipe`."""

    def __init__(self, stream: trio.SSLStream) -> None:
        self.send = stream.send_all
        self._receive_some = stream.receive_some

    async def receive(self, place: memoryview) -> int:
        data = await self._receive_some(len(place))
        place[: len(data)] = data
        return len(data)


def _tls(stream: trio.SocketStream, own: ssl.SSLContext, *, server_side: bool) -> trio.SSLStream:
    host = None if server_side else "127.0.0.1"
    return trio.SSLStream(stream, own, server_hostname=host, server_side=server_side, https_compatible=True)


class TrioTls13Client(PipeClient):
    def __init__(self, stream: trio.SSLStream, port: int, own: ssl.SSLContext) -> None:
        super().__init__(TlsPipe(stream))
        assert isinstance(stream.transport_stream, trio.SocketStream)
        self.congestion = sockets.congestion_of(stream.transport_stream)
        self._port = port
        self._context = own

    async def handshake(self) -> float | None:
        began = time.perf_counter()
        stream = _tls(await sockets.dial(self._port), self._context, server_side=False)
        await stream.do_handshake()
        took = time.perf_counter() - began
        await stream.aclose()
        return took


class TrioTls13:
    name = "trio-tls13"
    loop = TRIO

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[dict[str, Any]]:
        made = make_certificates()
        own = context(server_side=True, authority=made.authority, own=made.server, own_key=made.server_key)

        async def handle(stream: trio.SocketStream) -> None:
            secure = _tls(stream, own, server_side=True)
            await answer_stream(TlsPipe(secure), secure)

        async with trio.open_nursery() as nursery:
            yield {"port": await sockets.listen(nursery, handle), **made.for_client()}
            nursery.cancel_scope.cancel()

    @asynccontextmanager
    async def connect(self, where: dict[str, Any]) -> AsyncIterator[TrioTls13Client]:
        own = context(server_side=False, authority=where["authority"], own=where["client"], own_key=where["client_key"])
        async with _tls(await sockets.dial(where["port"]), own, server_side=False) as stream:
            await stream.do_handshake()
            yield TrioTls13Client(stream, where["port"], own)


if __name__ == "__main__":
    main(TrioTls13())
