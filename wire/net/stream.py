"""Streams as tasks see them: wait until the session has something, then take it.

The session keeps queues, credit and states; a stream here adds only the waiting.  Each direction has at most one waiting task,
which the link reschedules directly.  Two tasks in one `send` (or one `receive`) are the caller's mistake:
`trio.BusyResourceError` for the second, because a lock would hide it and interleave their messages (WIRE-5).

What a cancel leaves behind is the point of each method: a message was queued whole or not at all, a receive took
nothing.  To make that true every method waits *first* and acts afterwards without a checkpoint in between.

Methods that need not wait do not yield to other tasks; they still notice a cancel.  That is what makes a small message cheap; a
loop that only sends is held back by credit after at most one window.

How a stream ends (WIRE-7, WIRE-12):

* Data before the peer's FIN are delivered, then `receive` raises `trio.EndOfChannel` (message) or gives b"" (byte).
* After a reset, unread data are gone and `StreamReset` is raised; it never looks like an end.
* A lost connection raises its cause, after what had arrived before was read.
* `aclose` after a complete conversation costs nothing.  If the peer has not finished, we say FIN and drop what still comes, up to
  `DRAIN_BYTES`: a reset right behind our last message would make the peer drop that message unread.
"""

from __future__ import annotations

from collections import deque
from types import TracebackType
from typing import Self

import trio

from wire.errors import Code, LocalProtocolError, StreamReset, WireError
from wire.events import Kind
from wire.net.link import Link

# What the peer may still send on a stream that we have closed, before it is reset: one start window of a control stream.
DRAIN_BYTES = 64 * 1024
# One piece of `receive_some`: a largest record.
RECEIVE_BYTES = 256 * 1024
# What ends a conversation without anybody's fault on this side.
EXPECTED = (trio.Cancelled, trio.EndOfChannel, trio.BrokenResourceError, trio.ClosedResourceError)


class StreamTask:
    """The waiting half that both kinds share.  One place for a reader, one for a sender."""

    __slots__ = (
        "_error", "_fin_read", "_fin_sent", "_kept", "_link", "_over", "_reader", "_sender", "_session", "meta", "number", "protocol",
    )  # fmt: skip

    def __init__(self, link: Link, number: int, protocol: str) -> None:
        self._link = link
        self._session = link.session
        self.number = number
        self.protocol = protocol
        self.meta = b""  # what a peer that opened it said with that
        self._reader: trio.lowlevel.Task | None = None
        self._sender: trio.lowlevel.Task | None = None
        self._error: WireError | None = None
        self._over: trio.Event | None = None  # of who waits for a reset
        self._fin_sent = False
        self._fin_read = False
        self._kept: deque[bytes] = deque()  # what had arrived when the connection ended; b"" is the peer's end
        link.attach(number, self)

    @property
    def chained(self) -> bool:
        """Whether it came through a relay, whatever way the peer's next one takes."""
        return self._link.relay is not None

    # -- StreamEnd: called by the link

    def on_readable(self) -> None:
        task, self._reader = self._reader, None
        if task is not None:
            trio.lowlevel.reschedule(task)

    def on_writable(self) -> None:
        task, self._sender = self._sender, None
        if task is not None:
            trio.lowlevel.reschedule(task)

    def on_accepted(self) -> None:
        """Nothing waits for it: what is sent before is within the start credit."""

    def on_pipe_end(self) -> None:
        while not self._fin_read and (data := self._take()) is not None:
            self._kept.append(data)
            if not data:
                break

    def on_reset(self, error: WireError) -> None:
        self._error = error
        self.on_readable()
        self.on_writable()
        if self._over is not None:
            self._over.set()

    # -- waiting

    async def wait_reset(self) -> WireError:
        """Until the stream was ended in both directions, for whoever neither reads nor sends at the moment; gives what ended it."""
        if self._over is None:
            self._over = trio.Event()
        if self._error is None:
            await self._over.wait()
        else:
            await trio.lowlevel.checkpoint()
        assert self._error is not None
        return self._error

    async def _wait_readable(self) -> None:
        self._reader = trio.lowlevel.current_task()

        def aborted(_: object) -> trio.lowlevel.Abort:
            self._reader = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(aborted)

    async def _wait_writable(self) -> None:
        self._sender = trio.lowlevel.current_task()

        def aborted(_: object) -> trio.lowlevel.Abort:
            self._sender = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(aborted)

    def _check_sender(self) -> None:
        if self._sender is not None:
            raise trio.BusyResourceError("another task is sending on this stream")
        if self._error is not None:
            raise self._error
        if self._fin_sent:
            raise trio.ClosedResourceError("the end of this stream was sent already")

    def _check_reader(self) -> None:
        if self._reader is not None:
            raise trio.BusyResourceError("another task is receiving on this stream")

    # -- ending

    def reset(self, code: Code = Code.CANCELLED, detail: str = "") -> None:
        """End both directions now; the peer gets `code`, our own waiters and later calls get `StreamReset`.  Idempotent."""
        if self._error is not None or (self._fin_sent and self._fin_read):
            self._forget()
            return
        self._link.reset(self.number, code, detail)
        self.on_reset(StreamReset(code, detail or "this stream was reset here"))

    def close(self) -> None:
        """End the stream without a wait; see the module for what becomes of the peer's data.  Idempotent."""
        if self._error is not None or (self._fin_sent and self._fin_read):
            self._forget()
            return
        if not self._fin_sent:
            self._send_fin()
        self.on_reset(StreamReset(Code.CANCELLED, "this stream was closed here"))
        if self._fin_read:
            self._forget()
        else:
            drain = _Drain(self._link, self.number, self)
            self._link.attach(self.number, drain)
            drain.on_readable()
        self._link.kick()

    def _send_fin(self) -> None:
        self._session.send(self.number, b"", fin=True, now=trio.current_time())
        self._fin_sent = True

    def _end_sending(self) -> None:
        self._send_fin()
        if self._fin_read:
            self._forget()
        self._link.kick()

    def _forget(self) -> None:
        if self._link.ends.get(self.number) is self:
            del self._link.ends[self.number]

    def _finished_reading(self) -> None:
        self._fin_read = True
        if self._fin_sent:
            self._forget()

    async def aclose(self) -> None:
        """`close`, as a checkpoint.  A cancel changes nothing of it: the stream is closed."""
        self.close()
        await trio.lowlevel.checkpoint()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """A clean exit closes; an exception resets, so that the peer does not take half a conversation for a whole one."""
        if error is None:
            self.close()
        elif isinstance(error, WireError):
            self.reset(error.code, error.detail)
        else:
            self.reset(Code.CANCELLED if isinstance(error, EXPECTED) else Code.INTERNAL)

    def _next(self, max_bytes: int = RECEIVE_BYTES) -> bytes | None:
        """The next piece for a reader, b"" at the end, None if it has to wait.  Raises what ended the stream."""
        if self._kept:
            data = self._kept.popleft()
            if len(data) > max_bytes:
                self._kept.appendleft(data[max_bytes:])
            return data[:max_bytes]
        if self._fin_read:
            return b""
        if self._error is not None:
            raise self._error
        return self._take(max_bytes)

    def _take(self, max_bytes: int = RECEIVE_BYTES) -> bytes | None:
        """Whatever the session has; None if nothing, b"" at the peer's end."""
        raise NotImplementedError


class _Drain:
    """Stands in for a closed stream until the peer has finished."""

    __slots__ = ("_bytes", "_link", "_number", "_stream")

    def __init__(self, link: Link, number: int, stream: StreamTask) -> None:
        self._link = link
        self._number = number
        self._stream = stream
        self._bytes = 0

    def on_readable(self) -> None:
        # Data and a reset may have come together: the session has forgotten the stream by the time it tells of the data.
        while self._link.session.is_live(self._number) and (data := self._stream._take()) is not None:
            self._bytes += len(data)
            if not data:
                self._link.ends.pop(self._number, None)
                return
            if self._bytes > DRAIN_BYTES:
                self._link.reset(self._number, Code.CANCELLED, "closed by the receiver")
                return

    def on_writable(self) -> None: ...

    def on_accepted(self) -> None: ...

    def on_pipe_end(self) -> None: ...

    def on_reset(self, error: WireError) -> None: ...


class MessageStream(StreamTask):
    """Whole messages, each at most 64 KiB.  Safe to cancel everywhere; one sending and one receiving task."""

    __slots__ = ()
    kind = Kind.MESSAGE

    async def send(self, message: bytes, *, fin: bool = False) -> None:
        """Queue one message, and the end of our side with it if `fin`.

        Waits for credit.  After a cancel the message was not sent.  Returns before the peer has it.  Raises `WireError` of
        whatever ended the stream, `trio.ClosedResourceError` after our own end, `LocalProtocolError` for a message that is
        empty or too large.
        """
        self._check_sender()
        await trio.lowlevel.checkpoint_if_cancelled()
        session, number = self._session, self.number
        size = len(message)
        most = self._link.limits.message_max_bytes
        if not 0 < size <= most:
            raise LocalProtocolError(f"a message has 1 to {most} bytes, not {size}", code=Code.TOO_LARGE)
        while session.sendable(number, size) < size:
            await self._wait_writable()
            if self._error is not None:
                raise self._error
        session.send(number, message, fin=fin, now=trio.current_time())
        if fin:
            self._fin_sent = True
            if self._fin_read:
                self._forget()
        self._link.kick()

    async def send_eof(self) -> None:
        """No more from us; receiving goes on.  Idempotent."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if not self._fin_sent:
            self._check_sender()
            self._end_sending()

    async def receive(self) -> bytes:
        """The next message.  Raises `trio.EndOfChannel` at the peer's end, the `WireError` of a reset or of a lost connection."""
        self._check_reader()
        await trio.lowlevel.checkpoint_if_cancelled()
        while True:
            message = self._next()
            if message is None:
                await self._wait_readable()
            elif message:
                self._link.kick()  # reading may have made credit to give
                return message
            else:
                raise trio.EndOfChannel

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        try:
            return await self.receive()
        except trio.EndOfChannel:
            raise StopAsyncIteration from None

    def _take(self, max_bytes: int = RECEIVE_BYTES) -> bytes | None:
        message = self._session.read_message(self.number)
        if message == b"":
            self._finished_reading()
        return message
