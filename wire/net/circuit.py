"""The inside of a relayed circuit as a pipe: the two ends run their whole handshake through it, so that the relay sees ciphertext only.

A circuit is one byte stream to the relay, spliced there to one byte stream to the other peer.  Above this file nothing knows the
difference, except by `PipeInfo.relay`: a relayed connection is used only while no direct one stands, has one bulk connection beside
it and not four, and its loss says nothing about the peer.

Backpressure goes through: what the peer does not read is not credited, so the relay does not read on, and `send_now` takes nothing.
It takes a copy of at most 64 KiB, and only when what it took before was sealed, so that no queue stands before the queue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import trio

from wire.errors import WireError
from wire.identity import PeerId
from wire.net.bytestream import ByteStream
from wire.path import Path, relayed_via
from wire.pipeinfo import PipeInfo


class CircuitPipe:
    """A `Pipe` over one byte stream through `relay`.  `wait_closed` is for whoever serves the stream."""

    __slots__ = ("_closed", "_ended", "_info", "_over", "_stream", "received", "sent")

    def __init__(
        self, stream: ByteStream, relay: PeerId, congestion: str, ended: Callable[[CircuitPipe], None] = lambda pipe: None
    ) -> None:
        """`congestion`: of our connection to the relay.  `ended(self)` when the pipe is closed."""
        self.sent = self.received = 0  # bytes
        self._ended = ended
        self._stream = stream
        self._closed = False
        self._over = trio.Event()
        self._info = PipeInfo("circuit", ("", 0), ("", 0), congestion, relayed_via(relay))

    def info(self) -> PipeInfo:
        return self._info

    def runs(self, path: Path) -> None:
        self._info = replace(self._info, path=path)

    async def wait_closed(self) -> None:
        """Until `close` or `abort` was called."""
        await self._over.wait()

    def _check(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError("this pipe was closed")

    def _broken(self, error: WireError) -> Exception:
        if self._closed:
            return trio.ClosedResourceError("this pipe was closed")
        broken = trio.BrokenResourceError(f"the circuit through {self._info.relay} broke: {error}")
        broken.__cause__ = error
        return broken

    async def receive_into(self, buffer: memoryview) -> int:
        self._check()
        try:
            count = await self._stream.receive_into(buffer)
        except WireError as error:
            raise self._broken(error) from error
        self.received += count
        return count

    def send_now(self, views: Sequence[memoryview]) -> int:
        self._check()
        try:
            count = self._stream.send_now(views)
        except WireError as error:
            raise self._broken(error) from error
        self.sent += count
        return count

    async def wait_writable(self) -> None:
        self._check()
        try:
            await self._stream.wait_send_now()
        except WireError as error:
            raise self._broken(error) from error

    def taking(self, bytes_per_s: float) -> None:
        """Nothing to set: the connection to the relay has limits of its own."""

    async def send_eof(self) -> None:
        try:
            await self._stream.send_eof()
        except (WireError, trio.BrokenResourceError, trio.ClosedResourceError):
            await trio.lowlevel.checkpoint()  # already broken: the receiving side reports it

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._stream.close()
            self._over.set()
            self._ended(self)

    def abort(self) -> None:
        if not self._closed:
            self._closed = True
            self._stream.reset()
            self._over.set()
            self._ended(self)
