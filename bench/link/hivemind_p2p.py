"""hivemind's p2p layer: a Go process (`p2pd`, libp2p with TLS or Noise over TCP) beside each Python process, joined by a Unix socket.

Messages go over a binary stream, which is what the library offers for data of any size.  Its daemons are processes of their own: their
processor time is not the Python process's, so no figure of CPU is given.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from hivemind.p2p import P2P, PeerID  # type: ignore[import-not-found]
from hivemind.utils.multiaddr import Multiaddr  # type: ignore[import-not-found]

from bench.link import settings
from bench.link.child import ASYNCIO, main
from bench.link.competitor import ROUND_TRIP_BYTES, Heard, Job

__all__ = ["Hivemind"]

SINK, ECHO = "bench-sink", "bench-echo"
SIZE_BYTES = 4


async def _sink(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        size = int.from_bytes(await reader.readexactly(SIZE_BYTES), "little")
        while True:
            await reader.readexactly(size)
            writer.write(b"\x01")
            await writer.drain()
    except (asyncio.IncompleteReadError, OSError):
        writer.close()


async def _echo(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            writer.write(await reader.readexactly(ROUND_TRIP_BYTES))
            await writer.drain()
    except (asyncio.IncompleteReadError, OSError):
        writer.close()


class HivemindClient:
    congestion = ""  # the kernel's default: the daemon does not give its socket away

    def __init__(self, p2p: Any, peer_id: Any, echo: Any) -> None:
        self._p2p = p2p
        self._peer_id = peer_id
        _, self._echo_reader, self._echo_writer = echo
        self._turn = asyncio.Lock()

    def flow(self, message_bytes: int, heard: Heard) -> Sequence[Job]:
        opened: asyncio.Future[asyncio.StreamReader] = asyncio.get_running_loop().create_future()

        async def send() -> None:
            _, reader, writer = await self._p2p.call_binary_stream_handler(self._peer_id, SINK)
            opened.set_result(reader)
            message = bytes(message_bytes)
            writer.write(message_bytes.to_bytes(SIZE_BYTES, "little"))
            while True:
                writer.write(message)
                await writer.drain()

        async def hear() -> None:
            reader = await opened
            while True:
                await reader.readexactly(1)
                heard(message_bytes)

        return [send, hear]

    def pull(self, message_bytes: int, heard: Heard) -> Sequence[Job]:
        return []

    async def control(self) -> float | None:
        async with self._turn:
            began = time.perf_counter()
            self._echo_writer.write(bytes(ROUND_TRIP_BYTES))
            await self._echo_reader.readexactly(ROUND_TRIP_BYTES)
            return time.perf_counter() - began

    async def stream(self, message_bytes: int, count: int) -> float:
        _, reader, writer = await self._p2p.call_binary_stream_handler(self._peer_id, SINK)
        message = bytes(message_bytes)
        began = time.perf_counter()
        writer.write(message_bytes.to_bytes(SIZE_BYTES, "little"))
        for _ in range(count):
            writer.write(message)
            await writer.drain()
        await reader.readexactly(count)
        took = time.perf_counter() - began
        writer.close()
        return took

    async def round_trips(self, count: int) -> list[float]:
        return [trip for _ in range(count) if (trip := await self.control()) is not None]

    async def handshake(self) -> float | None:
        return None

    def counts(self) -> dict[str, float]:
        return {}


class Hivemind:
    name = "hivemind"
    loop = ASYNCIO

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[dict[str, Any]]:
        p2p = await P2P.create(host_maddrs=[Multiaddr(f"/ip4/{settings.listen_host()}/tcp/0")], dht_mode="server")
        await p2p.add_binary_stream_handler(SINK, _sink)
        await p2p.add_binary_stream_handler(ECHO, _echo)
        try:
            yield {"addresses": [str(address) for address in await p2p.get_visible_maddrs()], "peer": p2p.peer_id.to_base58()}
        finally:
            await p2p.shutdown()

    @asynccontextmanager
    async def connect(self, where: dict[str, Any]) -> AsyncIterator[HivemindClient]:
        p2p = await P2P.create(initial_peers=where["addresses"])
        peer_id = PeerID.from_base58(where["peer"])
        try:
            yield HivemindClient(p2p, peer_id, await p2p.call_binary_stream_handler(peer_id, ECHO))
        finally:
            await p2p.shutdown()


if __name__ == "__main__":
    main(Hivemind())
