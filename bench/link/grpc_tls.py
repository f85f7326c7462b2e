"""gRPC over TLS, Python's usual way to talk between machines: `grpc.aio`, client-streaming calls, both sides with certificates.

Messages are plain bytes (no protobuf), so that only the transport is measured.  The asyncio stack is the one its documentation
recommends for streams in Python (grpc.io, performance guide).  The TLS and HTTP/2 work is done by C++ threads beside Python's, so
this contestant may use more than one core a side.  Round trips go over one standing bidirectional stream, which is faster than a
unary call each.  A handshake is a new channel with a connection pool of its own, until it says READY.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]

from bench.link import settings
from bench.link.certificates import make_certificates
from bench.link.child import ASYNCIO, main
from bench.link.competitor import ROUND_TRIP_BYTES, Heard, Job

__all__ = ["GrpcTls"]

OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.ssl_target_name_override", "127.0.0.1"),  # what the certificates say, wherever the server is
)


async def _sink(requests: AsyncIterator[bytes], context: Any) -> bytes:
    count = 0
    async for _ in requests:
        count += 1
    return count.to_bytes(8, "little")


async def _echo(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request


async def _count(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for _ in requests:
        yield b"\x01"


async def _call(request: bytes, context: Any) -> bytes:
    return request


class GrpcTlsClient:
    congestion = ""  # the kernel's default: gRPC does not give its socket away

    def __init__(self, channel: grpc.aio.Channel, target: str, credentials: grpc.ChannelCredentials) -> None:
        self._sink = channel.stream_unary("/bench/sink")
        self._echo = channel.stream_stream("/bench/echo")
        self._count = channel.stream_stream("/bench/count")
        self._call = channel.unary_unary("/bench/call")
        self._target = target
        self._credentials = credentials

    async def stream(self, message_bytes: int, count: int) -> float:
        message = bytes(message_bytes)
        began = time.perf_counter()
        call = self._sink()
        for _ in range(count):
            await call.write(message)
        await call.done_writing()
        got = int.from_bytes(await call, "little")
        took = time.perf_counter() - began
        if got != count:
            raise RuntimeError(f"{count} messages sent, {got} received")
        return took

    async def round_trips(self, count: int) -> list[float]:
        message = bytes(ROUND_TRIP_BYTES)
        call = self._echo()
        trips = []
        for _ in range(count):
            began = time.perf_counter()
            await call.write(message)
            await call.read()
            trips.append(time.perf_counter() - began)
        await call.done_writing()
        return trips

    async def handshake(self) -> float | None:
        began = time.perf_counter()
        channel = grpc.aio.secure_channel(self._target, self._credentials, options=OPTIONS)
        await channel.channel_ready()
        took = time.perf_counter() - began
        await channel.close()
        return took


    def flow(self, message_bytes: int, heard: Heard) -> Sequence[Job]:
        call = self._count()
        message = bytes(message_bytes)

        async def send() -> None:
            while True:
                await call.write(message)

        async def hear() -> None:
            while True:
                await call.read()
                heard(message_bytes)

        return [send, hear]

    def pull(self, message_bytes: int, heard: Heard) -> Sequence[Job]:
        return []

    async def control(self) -> float | None:
        began = time.perf_counter()
        await self._call(bytes(ROUND_TRIP_BYTES))
        return time.perf_counter() - began

    def counts(self) -> dict[str, float]:
        return {}


class GrpcTls:
    name = "grpc-tls"
    loop = ASYNCIO

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[dict[str, Any]]:
        made = make_certificates()
        server = grpc.aio.server(options=OPTIONS)
        handlers = {
            "sink": grpc.stream_unary_rpc_method_handler(_sink),
            "echo": grpc.stream_stream_rpc_method_handler(_echo),
            "count": grpc.stream_stream_rpc_method_handler(_count),
            "call": grpc.unary_unary_rpc_method_handler(_call),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", handlers),))
        credentials = grpc.ssl_server_credentials(
            [(made.server_key.encode(), made.server.encode())], made.authority.encode(), require_client_auth=True
        )
        port = server.add_secure_port(f"{settings.listen_host()}:0", credentials)
        await server.start()
        yield {"target": f"{settings.listen_host()}:{port}", **made.for_client()}
        await server.stop(0)

    @asynccontextmanager
    async def connect(self, where: dict[str, Any]) -> AsyncIterator[GrpcTlsClient]:
        credentials = grpc.ssl_channel_credentials(
            where["authority"].encode(), where["client_key"].encode(), where["client"].encode()
        )
        target = where["target"]
        async with grpc.aio.secure_channel(target, credentials, options=OPTIONS) as channel:
            await channel.channel_ready()
            yield GrpcTlsClient(channel, target, credentials)


if __name__ == "__main__":
    main(GrpcTls())
