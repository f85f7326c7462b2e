"""The job of the link bench for everything that is a pipe of bytes: messages of a known size one way, or there and back.

The client begins each batch with 9 bytes: what to do, the size of a message, how many.  The server receives each message whole
into one buffer that it uses again and again.  One byte says that all are there.

A pipe is two methods, so that each contestant can use what it has: `receive` decrypts or copies into the given place.  Two awaits
more a message are below one microsecond.
"""

from __future__ import annotations

import struct
import time
from typing import Protocol

import trio

from bench.link.competitor import ROUND_TRIP_BYTES

__all__ = ["BytePipe", "EndOfPipe", "PipeClient", "answer", "answer_stream"]

_REQUEST = struct.Struct("<BII")
_SINK, _ECHO = 1, 2
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


async def answer_stream(pipe: BytePipe, stream: trio.abc.AsyncResource) -> None:
    """`answer`, then close; a client that is killed in mid-batch is no error of the server."""
    try:
        await answer(pipe)
    except (EndOfPipe, trio.BrokenResourceError):
        pass
    finally:
        await trio.aclose_forcefully(stream)
