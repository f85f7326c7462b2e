"""The job of the link bench for everything that is a pipe of bytes: messages of a known size one way, or there and back.

The client begins each batch with 9 bytes: what to do, the size of a message, how many.  The server receives each message whole
into one buffer that it uses again and again.  One byte says that all are there.  A flow is batch after batch, without waiting for that
byte: its arrival is the mark that so much has gone through.

A pipe is two methods, so that each contestant can use what it has: `receive` decrypts or copies into the given place.  Two awaits
more a message are below one microsecond.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from typing import Protocol

import trio

from bench.link.competitor import ROUND_TRIP_BYTES, Heard, Job

__all__ = ["BytePipe", "EndOfPipe", "PipeClient", "answer", "answer_stream", "drain"]

_REQUEST = struct.Struct("<BII")
_SINK, _ECHO, _SOURCE = 1, 2, 3
# Bytes of a flow that the server confirms at once: 10 ms of a line of 200 Mbit/s, and a byte back costs nothing beside them.
FLOW_BATCH_BYTES = 256 * 1024
_DONE = b"\x01"


class EndOfPipe(Exception):
    """The other side has closed."""


class BytePipe(Protocol):
    async def send(self, data: memoryview) -> None:
        """All of it."""
        ...

    async def receive(self, place: memoryview) -> int:
        """At least one byte and at most what fits into `place`; 0 at the end."""
        ...


async def fill(pipe: BytePipe, place: memoryview) -> None:
    """All of `place`.  Raises EndOfPipe."""
    filled = 0
    while filled < len(place):
        count = await pipe.receive(place[filled:])
        if not count:
            raise EndOfPipe
        filled += count


async def answer(pipe: BytePipe) -> None:
    """The server's half; returns when the client closes between two batches."""
    head = memoryview(bytearray(_REQUEST.size))
    place = memoryview(bytearray(1 << 20))
    while True:
        try:
            await fill(pipe, head)
        except EndOfPipe:
            return
        what, size, count = _REQUEST.unpack(head)
        message = place[:size] if size <= len(place) else memoryview(bytearray(size))
        while what == _SOURCE:  # until the client goes
            await pipe.send(message)
        for _ in range(count):
            await fill(pipe, message)
            if what == _ECHO:
                await pipe.send(message)
        if what == _SINK:
            await pipe.send(memoryview(_DONE))


class PipeClient:
    """`stream` and `round_trips` of a `Client` over a pipe."""

    def __init__(self, pipe: BytePipe) -> None:
        self._pipe = pipe

    async def stream(self, message_bytes: int, count: int) -> float:
        pipe = self._pipe
        message = memoryview(bytes(message_bytes))
        began = time.perf_counter()
        await pipe.send(memoryview(_REQUEST.pack(_SINK, message_bytes, count)))
        for _ in range(count):
            await pipe.send(message)
        await fill(pipe, memoryview(bytearray(1)))
        return time.perf_counter() - began

    async def round_trips(self, count: int) -> list[float]:
        pipe = self._pipe
        message = memoryview(bytes(ROUND_TRIP_BYTES))
        place = memoryview(bytearray(ROUND_TRIP_BYTES))
        await pipe.send(memoryview(_REQUEST.pack(_ECHO, ROUND_TRIP_BYTES, count)))
        trips = []
        for _ in range(count):
            began = time.perf_counter()
            await pipe.send(message)
            await fill(pipe, place)
            trips.append(time.perf_counter() - began)
        return trips

    def flow(self, message_bytes: int, heard: Heard) -> Sequence[Job]:
        pipe = self._pipe
        message = memoryview(bytes(message_bytes))
        count = max(1, FLOW_BATCH_BYTES // message_bytes)

        async def send() -> None:
            head = memoryview(_REQUEST.pack(_SINK, message_bytes, count))
            while True:
                await pipe.send(head)
                for _ in range(count):
                    await pipe.send(message)

        async def hear() -> None:
            place = memoryview(bytearray(1))
            while True:
                await fill(pipe, place)
                heard(count * message_bytes)

        return [send, hear]

    def pull(self, message_bytes: int, heard: Heard) -> Sequence[Job]:
        return []

    async def control(self) -> float | None:
        return None

    def counts(self) -> dict[str, float]:
        return {}


async def drain(pipe: BytePipe, message_bytes: int, heard: Heard) -> None:
    """Have the server send messages without end, and take them; runs until it is cancelled."""
    await pipe.send(memoryview(_REQUEST.pack(_SOURCE, message_bytes, 0)))
    place = memoryview(bytearray(message_bytes))
    while True:
        await fill(pipe, place)
        heard(message_bytes)


async def answer_stream(pipe: BytePipe, stream: trio.abc.AsyncResource) -> None:
    """`answer`, then close; a client that is killed in mid-batch is no error of the server."""
    try:
        await answer(pipe)
    except (EndOfPipe, trio.BrokenResourceError):
        pass
    finally:
        await trio.aclose_forcefully(stream)
