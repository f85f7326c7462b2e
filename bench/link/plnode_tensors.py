"""Our own, as a pipeline uses it: tensors over a channel, which fill posted slots and use every lane there is.

Three tensors are under way at a time, as at a boundary between stages: with one, each would wait a round trip for its Done, and the
line would be measured empty.  A mark of the flow is a chunk that the receiver has, told on a stream of its own: whole tensors are too
coarse a mark on a line that needs ten seconds for one.

Of bf16 (`settings.dtype`) they hold Gaussian numbers, always the same: a chunk is packed anew each time, so nothing is gained by that.

The channel's name carries the size of its tensors: the receiver has to know what comes, since it takes nothing else.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import trio

from bench.link import settings
from bench.link.child import TRIO, main
from bench.link.competitor import Heard, Job
from bench.link.plnode_net import CALL, PATIENCE_S, TENSOR_CLASS, Question, answer_call, call, congestion_of, counts, open_node
from wire.address import Address
from wire.net import ByteStream, Kind, MessageStream, Peer
from wire.tensor import DType, Expectation, bf16_from_fp32, to_bytes

__all__ = ["PlnodeTensors"]

TENSORS = "bench/tensors/1"
PROGRESS = "bench/progress/1"
BACK = "bench/tensors-back/1"
UNDER_WAY = 3


def _tensor(size: int) -> memoryview:
    if settings.dtype() is not DType.bf16:
        return memoryview(bytes(size))
    return to_bytes(bf16_from_fp32(np.random.default_rng(1).standard_normal(size // 2, np.float32)))


def _shape(size: int) -> tuple[int, ...]:
    return (size // settings.dtype().itemsize,)


async def _take(peer: Peer, name: bytes, heard: Heard) -> None:
    """Receive the tensors of one channel until it ends."""
    size = int(name)
    expected = Expectation(settings.dtype(), _shape(size), 0, size)
    receiver = peer.receiver(TENSORS, name, lambda key: expected)
    receiver.on_chunk = lambda chunk: heard(chunk.end - chunk.start)
    for _ in range(UNDER_WAY):
        receiver.post(memoryview(bytearray(size)))
    while True:
        got = await receiver.receive()
        receiver.post(got.buffer)


def _sending(peer: Peer, numbers: Iterator[int], size: int) -> Sequence[Job]:
    sender = peer.sender(TENSORS, b"%d" % size, cls=TENSOR_CLASS)
    tensor = _tensor(size)

    async def send() -> None:
        while True:
            number = next(numbers)
            await sender.send((0, number), tensor, dtype=settings.dtype(), shape=_shape(size), order=number)

    return [send] * UNDER_WAY


class PlnodeTensorsClient:
    def __init__(self, peer: Peer, arrived: list[Heard]) -> None:
        self.congestion = congestion_of(peer)
        self._peer = peer
        self._arrived = arrived
        self._numbers = itertools.count()  # a key is delivered once

    def flow(self, message_bytes: int, heard: Heard) -> Sequence[Job]:
        async def hear() -> None:
            async with await self._peer.open(PROGRESS, Kind.MESSAGE) as stream:
                assert isinstance(stream, MessageStream)
                await stream.send(b"tell")
                async for told in stream:
                    heard(int(told))

        return [hear, *_sending(self._peer, self._numbers, message_bytes)]

    def pull(self, message_bytes: int, heard: Heard) -> Sequence[Job]:
        async def ask() -> None:
            self._arrived.append(heard)
            async with await self._peer.open(BACK, Kind.MESSAGE) as stream:
                assert isinstance(stream, MessageStream)
                await stream.send(b"%d" % message_bytes)
                await stream.receive()  # the server never answers: this is until the cancel

        return [ask]

    async def control(self) -> float | None:
        return await call(self._peer)

    def counts(self) -> dict[str, float]:
        return counts(self._peer)

    async def stream(self, message_bytes: int, count: int) -> float:
        began, left = time.perf_counter(), iter(range(count))
        sender = self._peer.sender(TENSORS, b"%d" % message_bytes, cls=TENSOR_CLASS)
        tensor = _tensor(message_bytes)

        async def send() -> None:
            for _ in left:
                number = next(self._numbers)
                await sender.send((0, number), tensor, dtype=settings.dtype(), shape=_shape(message_bytes), order=number)

        async with trio.open_nursery() as nursery:
            for _ in range(UNDER_WAY):
                nursery.start_soon(send)
        return time.perf_counter() - began

    async def round_trips(self, count: int) -> list[float]:
        return [await call(self._peer) for _ in range(count)]

    async def handshake(self) -> float | None:
        return None


class PlnodeTensors:
    name = "plnode-tensors"
    loop = TRIO

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[dict[str, Any]]:
        put, got = trio.open_memory_channel[int](math.inf)

        async def take(peer: Peer, name: bytes) -> None:
            await _take(peer, name, put.send_nowait)

        async def progress(peer: Peer, stream: ByteStream | MessageStream) -> None:
            assert isinstance(stream, MessageStream)
            async for count in got:
                await stream.send(b"%d" % count)

        async def give(peer: Peer, stream: ByteStream | MessageStream) -> None:
            assert isinstance(stream, MessageStream)
            size = int(await stream.receive())
            await TRIO.beside(_sending(peer, itertools.count(), size), float("inf"))

        async with open_node((Address(settings.listen_host(), 0),)) as net:
            net.serve_channel(TENSORS, take)
            net.serve(BACK, give)
            net.serve(PROGRESS, progress)
            net.serve_calls(CALL, Question, answer_call)
            yield {"address": str(net.addresses[0].with_peer(net.peer_id))}

    @asynccontextmanager
    async def connect(self, where: dict[str, Any]) -> AsyncIterator[PlnodeTensorsClient]:
        arrived: list[Heard] = []

        async def take(peer: Peer, name: bytes) -> None:
            await _take(peer, name, lambda count: arrived[0](count))

        async with open_node() as net:
            net.serve_channel(TENSORS, take)
            yield PlnodeTensorsClient(await net.dial(Address.parse(where["address"]), deadline_s=PATIENCE_S), arrived)


if __name__ == "__main__":
    main(PlnodeTensors())
