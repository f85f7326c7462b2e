"""Byte streams: a `trio` stream over one stream of a session, for circuits and big downloads.

Bytes are not copied on the way out: the session seals from the caller's memory, so `send_all` returns only when it has let go of
it, and a cancelled one has the rest copied.  On the way in, a waiting `receive_into` posts its buffer, and records are decrypted
straight into it.
"""

from __future__ import annotations

from collections.abc import Sequence

import trio

from wire.events import Kind
from wire.net.link import Link
from wire.net.stream import RECEIVE_BYTES, StreamTask

# One piece of `send_now`: what one caller may seal inline (link.py).
SEND_NOW_BYTES = 64 * 1024


class ByteStream(StreamTask, trio.abc.HalfCloseableStream):
    """Bytes without boundaries: a `trio` stream over one stream of the session, for circuits and big downloads."""

    __slots__ = ("_posted",)
    kind = Kind.BYTE

    def __init__(self, link: Link, number: int, protocol: str) -> None:
        super().__init__(link, number, protocol)
        self._posted = False  # the session holds the buffer of a waiting reader

    def on_readable(self) -> None:
        if self._posted and self._reader is not None:
            self._link.give_way()  # it may be about to post the next
        super().on_readable()

    def on_pipe_end(self) -> None:
        if self._posted:
            self._session.unpost(self.number)
        super().on_pipe_end()

    def pass_on(self, start_bytes: int, most_bytes: int) -> None:
        """What comes here is for somebody else, who may not take it for long: a window of its own, beside the connection's."""
        if self._error is None:
            self._session.pass_on(self.number, start_bytes, most_bytes)
            self._link.kick()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of `data`; the buffer is the caller's again afterwards, also after a cancel.

        Nothing is copied: the session seals from `data` itself.  After a cancel an unknown part was sent, so the only sensible
        next step is `reset` (trio's rule for every stream).
        """
        self._check_sender()
        await trio.lowlevel.checkpoint_if_cancelled()
        session, number = self._session, self.number
        view = memoryview(data).cast("B")
        try:
            while view:
                count = session.sendable(number, 1)
                if count:
                    session.send(number, view[:count], now=trio.current_time())
                    view = view[count:]
                    self._link.kick()
                else:
                    await self._wait_sent()
            while session.unsent(number):
                await self._wait_sent()
        except trio.Cancelled:
            if self._error is None:
                session.copy_unsent(number)
            raise

    def send_now(self, views: Sequence[memoryview]) -> int:
        """Send from the front of `views` what goes without waiting, copied; returns the number of bytes, possibly 0.

        Nothing is taken while a part of the last call waits to be sealed.  Raises as `send_all`.
        """
        self._check_sender()
        session, number = self._session, self.number
        room = 0 if session.unsent(number) else min(session.sendable(number, 1), SEND_NOW_BYTES)
        if not room:
            return 0
        parts, size = [], 0
        for view in views:
            parts.append(view[: room - size])
            size += len(parts[-1])
            if size == room:
                break
        data = b"".join(parts)
        if data:
            session.send(number, memoryview(data), now=trio.current_time())
            self._link.kick()
        return len(data)

    async def wait_send_now(self) -> None:
        """Wait until `send_now` may take more.  Raises as `send_all`; a cancel changes nothing."""
        self._check_sender()
        await trio.lowlevel.checkpoint_if_cancelled()
        session, number = self._session, self.number
        while session.unsent(number) or not session.sendable(number, 1):
            await self._wait_sent()

    async def wait_send_all_might_not_block(self) -> None:
        """Wait until there is credit for a byte."""
        self._check_sender()
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self._session.sendable(self.number, 1):
            await self._wait_sent()

    async def _wait_sent(self) -> None:
        await self._wait_writable()
        if self._error is not None:
            raise self._error

    async def send_eof(self) -> None:
        """No more from us; receiving goes on.  Idempotent."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if not self._fin_sent:
            self._check_sender()
            self._end_sending()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """At least one byte, b"" at the peer's end.  Raises like `MessageStream.receive`.  A cancel loses nothing."""
        self._check_reader()
        await trio.lowlevel.checkpoint_if_cancelled()
        while True:
            data = self._next(max_bytes or RECEIVE_BYTES)
            if data is not None:
                self._link.kick()
                return data
            await self._wait_readable()

    async def receive_into(self, buffer: memoryview, *, at_least: int = 1) -> int:
        """Fill the front of `buffer` with at least so many bytes, unless the peer ends before; returns the number of bytes.

        What arrives while this waits is decrypted straight into `buffer`.  After a cancel nothing is lost: the stream has it.
        """
        self._check_reader()
        await trio.lowlevel.checkpoint_if_cancelled()
        session, number = self._session, self.number
        filled = 0
        while filled < at_least:
            if self._kept or self._error is not None or self._fin_read:
                if filled and not self._kept:
                    break  # what came before the loss first; the next call raises
                data = self._next(len(buffer) - filled)
                if not data:
                    break
                buffer[filled : filled + len(data)] = data
                filled += len(data)
                continue
            count = session.read_into(number, buffer[filled:])
            if count == 0:
                self._finished_reading()
                break
            if count is not None:
                filled += count
                self._link.kick()
                continue
            session.post(number, buffer[filled:], at_least=at_least - filled)
            self._posted = True
            try:
                await self._wait_readable()
            except trio.Cancelled:
                if self._error is None:
                    session.unpost(number)
                if filled:  # what was taken before this wait comes first the next time
                    self._kept.appendleft(bytes(buffer[:filled]))
                raise
            finally:
                self._posted = False
            if self._error is None:
                filled += session.take_posted(number)
                self._link.kick()
        return filled

    def _take(self, max_bytes: int = RECEIVE_BYTES) -> bytes | None:
        data = self._session.read_bytes(self.number, max_bytes)
        if data is None:
            return None
        if not len(data):
            self._finished_reading()
        return bytes(data)
