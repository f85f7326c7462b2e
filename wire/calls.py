"""What the layer above does with streams: open, accept, send, read, reset.

Every call is all or nothing.  A misuse raises LocalProtocolError and leaves the stream, the session and the peer as they
were; so a task that was cancelled before a call has done nothing, and one that was cancelled after it has done all of it.
Nothing here waits: a caller that gets "not yet" is told by an event when to ask again.

Opens are paced on our side by the peer's limit: a limit that only the peer knows would cut an honest client that is busy.
"""

from __future__ import annotations

from .chunks import ChunkSink, ChunkSource
from .connection import CONNECTION, Connection, ConnectionInput
from .errors import Code, LimitExceeded, LocalProtocolError
from .events import Kind
from .flow import MESSAGE_OVERHEAD_BYTES, ReceiveWindow, SendWindow
from .inbound import Inbound
from .messages import AcceptBody, OpenBody, SessionHello, encode
from .rates import Bucket
from .records import FrameType
from .replies import RESET_HEAD
from .streams import Input, State, Stream, move_local

PassedOn = tuple[int, int]  # bytes of a window that is kept apart (windows.py): at first, and at most
OPENS_SHARE = 0.5  # of the peer's burst: what left in 2 s may arrive at once, and a reset costs a token, too
_ORDER_MAX = 2**63 - 1


class StreamCalls:
    """The streams of a session, by id."""

    __slots__ = ("_conn", "_hello", "_in", "_opens")

    _conn: Connection
    _in: Inbound
    _hello: SessionHello  # ours
    _opens: Bucket

    def open_delay_s(self, now: float) -> float:
        """Seconds until `open_stream` may be called again without the peer taking it for a flood; 0 = now."""
        bucket = self._opens
        return max(0.0, (1.0 - bucket.tokens) / bucket.per_s - (now - bucket.last))

    def open_stream(
        self, kind: Kind, protocol: str, cls: int, *, meta: bytes = b"", order: int = 0, now: float, passed_on: PassedOn | None = None
    ) -> int:
        """Open a stream and return its id; data may be sent at once.

        `cls` 1..4 (chunks: 2..4); `order` sorts within class 2.  `passed_on`: as `pass_on`, from the start.  Raises
        LimitExceeded if the peer has as many of our streams as it keeps, or we open faster than it allows (see `open_delay_s`),
        LocalProtocolError if the connection takes no new streams.
        """
        conn = self._conn
        kind = Kind(kind)
        if not 1 <= cls <= 4 or (kind is Kind.CHUNKS and cls < 2):
            raise LocalProtocolError(f"class {cls} for a stream of kind {kind.name}")
        if not 0 <= order <= _ORDER_MAX:
            raise LocalProtocolError(f"order {order} is not in 0..2**63-1")
        if (conn.state, ConnectionInput.SEND_OPEN) not in CONNECTION:
            raise LocalProtocolError(f"no new streams in state {conn.state.name}")
        most = conn.hello.max_streams if conn.hello is not None else conn.limits.inbound_streams_max
        if conn.outbound_live >= most:
            raise LimitExceeded("max_streams", conn.outbound_live + 1, most)
        own, quarter = conn.window_for(kind, cls, self._hello.bulk_window)
        if passed_on is not None:
            own = min(own, passed_on[0])
            quarter = own // 4
        peer_bulk = conn.hello.bulk_window if conn.hello is not None else conn.limits.stream_window_min_bytes
        theirs, _ = conn.window_for(kind, cls, peer_bulk)
        body = encode(OpenBody(kind, protocol, cls, own, meta))
        if not self._opens.take(now):
            raise LimitExceeded("opens_per_s", conn.limits.opens_per_s + 1, conn.limits.opens_per_s, code=Code.RATE_LIMITED)
        number = conn.next_own
        conn.next_own = number + 2
        stream = Stream(number, kind, cls, protocol, order, SendWindow(theirs), ReceiveWindow(own, quarter=quarter))
        move_local(stream, Input.SEND_OPEN)
        conn.add(stream, own=True)
        if conn.windows.start_from_memory(stream) if passed_on is None else conn.windows.pass_on(stream, *passed_on):
            body = encode(OpenBody(kind, protocol, cls, stream.recv.limit, meta))
        conn.replies.add(FrameType.OPEN, number, body)
        return number

    def accept(self, stream: int) -> None:
        """Accept a stream that the peer opened; a chunk stream needs its sink first."""
        conn = self._conn
        s = conn.stream(stream)
        if s.kind is Kind.CHUNKS and s.sink is None:
            raise LocalProtocolError(f"chunk stream {stream} has no sink yet")
        move_local(s, Input.SEND_ACCEPT)
        s.accepted = True
        conn.pending -= 1
        conn.windows.start_from_memory(s)
        conn.replies.add(FrameType.ACCEPT, stream, encode(AcceptBody(s.recv.limit)))

    def pass_on(self, stream: int, start: int, most: int) -> None:
        """What comes on this byte stream, which was accepted, is for somebody else: keep its window of `start` to `most` bytes apart."""
        s = self._conn.stream(stream)
        if not s.accepted:
            raise LocalProtocolError(f"stream {stream} is not accepted")
        if self._conn.windows.pass_on(s, start, most):
            self._conn.replies.add_credit(stream, s.recv.limit)

    def refuse(self, stream: int, code: Code) -> None:
        """Refuse a stream that the peer opened and that was not accepted."""
        if self._conn.stream(stream).state not in (State.PENDING, State.PENDING_REMOTE):
            raise LocalProtocolError(f"stream {stream} is not waiting to be accepted")
        self.reset(stream, code)

    def sendable(self, stream: int, need: int = 0) -> int:
        """Bytes that `send` takes now.  A message needs its whole size.

        If that is less than `need`, `Writable` comes as soon as it is not (on a byte stream at the latest when a quarter of the
        smallest window can go); with `need` 0, as soon as it is any more than now, unless a largest message fits already.
        """
        conn = self._conn
        s = conn.streams.get(stream) or conn.stream(stream)
        available = conn.available(s)
        if available < need or (need == 0 and available < conn.limits.message_max_bytes):
            # Of a window that is all read three quarters are sure to be announced, so more than that must not be waited for.
            s.need = min(need, conn.sure_bytes) if need and s.kind is Kind.BYTE else need or available + 1
            conn.blocked[stream] = s
        elif s.need:
            s.need = 0
            del conn.blocked[stream]
        return available

    def send(self, stream: int, data: bytes | bytearray | memoryview, *, fin: bool = False, now: float) -> None:
        """Queue one message, or bytes of a byte stream; `fin` ends our direction behind them.

        All or nothing: raises LocalProtocolError, with nothing changed, if `sendable` is less, the direction has ended, or a
        message is empty or too large.  On a byte stream pieces from 4 KiB on are not copied and must not change until they
        have left (`unsent` is 0); a message is copied unless it is `bytes`.  Chunk streams take only `fin`.
        """
        conn = self._conn
        s = conn.streams.get(stream) or conn.stream(stream)
        size = len(data)
        if not s.sending:
            raise LocalProtocolError(f"send on stream {stream} in state {s.state.name}")
        if size:
            if s.kind is Kind.CHUNKS or size > conn.available(s):
                raise LocalProtocolError(f"{size} bytes cannot be sent on stream {stream} now")
            conn.send.sent += size
            if s.kind is Kind.MESSAGE:
                s.send.sent += size + MESSAGE_OVERHEAD_BYTES
                s.queue.append(data if type(data) is bytes else bytes(data))
                s.queued += size
            else:
                s.send.sent += size
                s.put(data)
        elif not fin:
            raise LocalProtocolError("nothing to send")
        if fin:
            move_local(s, Input.SEND_FIN)
            s.fin_queued = True
        if s.opened:
            conn.scheduler.push(s, s.cls, s.order)

    def unsent(self, stream: int) -> int:
        """Bytes that `send` took and that have not left; if there are any, `Writable` comes when there are none."""
        s = self._conn.stream(stream)
        s.wants_drained = s.queued > 0
        return s.queued

    def copy_unsent(self, stream: int) -> None:
        """Copy what has not left, so that the caller may reuse its buffer: for a sender that is cancelled.

        Of a chunk stream that is the rest of one chunk; what a source has not handed out is its own.
        """
        self._conn.stream(stream).copy_queued()

    def read_message(self, stream: int) -> bytes | None:
        """The next message; None = nothing now, b"" = the peer has finished (the stream may be forgotten with this answer)."""
        conn = self._conn
        s = conn.streams.get(stream) or conn.stream(stream)
        self._may_read(s, Kind.MESSAGE)
        if s.messages:
            message = s.messages.popleft()
            size = len(message)
            if s.recv.read(size + MESSAGE_OVERHEAD_BYTES) and s.receiving:
                conn.renew(s)
            conn.consumed(size)
            return message
        return self._end_or_nothing(s)

    def read_bytes(self, stream: int, max_bytes: int) -> bytes | memoryview | None:
        """The next bytes, at most `max_bytes` (>= 1), in the memory into which they were decrypted; None and b"" as above."""
        s = self._conn.stream(stream)
        self._may_read(s, Kind.BYTE)
        view = s.take(max_bytes)
        if view is None:
            return self._end_or_nothing(s)
        self._read(s, len(view))
        return view

    def read_into(self, stream: int, view: memoryview) -> int | None:
        """Copy the next bytes into `view`, as many as are here; None = nothing now, 0 = the peer has finished."""
        s = self._conn.stream(stream)
        self._may_read(s, Kind.BYTE)
        filled = 0
        while filled < len(view) and (piece := s.take(len(view) - filled)) is not None:
            view[filled : filled + len(piece)] = piece
            filled += len(piece)
        if filled:
            self._read(s, filled)
            return filled
        return None if self._end_or_nothing(s) is None else 0

    def post(self, stream: int, view: memoryview, *, at_least: int = 1) -> None:
        """Wait with a buffer: what arrives is decrypted straight into `view`.  For when `read_into` said None.

        `Readable` comes when `at_least` bytes are in it, or something arrived that does not fit, or the end.  Then, or when the
        wait is given up, `take_posted` or `unpost`; until then the caller must not touch the buffer.
        """
        s = self._conn.stream(stream)
        self._may_read(s, Kind.BYTE)
        if s.posted is not None or s.has_unread or not 1 <= at_least <= len(view):
            raise LocalProtocolError(f"a buffer cannot be posted on stream {stream} now")
        s.posted, s.posted_filled, s.least = view, 0, at_least

    def take_posted(self, stream: int) -> int:
        """Take the posted buffer back; returns how many bytes of its front are filled (0: `read_into` has what did not fit)."""
        s = self._conn.stream(stream)
        if s.posted is None:
            raise LocalProtocolError(f"no buffer is posted on stream {stream}")
        s.posted = None
        filled, s.posted_filled = s.posted_filled, 0
        return filled

    def unpost(self, stream: int) -> None:
        """Take the posted buffer back and keep what is in it to be read again: a cancelled reader loses nothing."""
        s = self._conn.stream(stream)
        view = s.posted
        filled = self.take_posted(stream)
        if filled and view is not None:
            s.put_back(bytes(view[:filled]))
            s.recv.unread_again(filled)
            self._conn.recv.unread_again(filled)

    def reset(self, stream: int, code: Code, detail: str = "") -> None:
        """End both directions now and forget the stream: unsent and unread data are gone."""
        conn = self._conn
        s = conn.stream(stream)
        ended = s.state is State.CLOSED and s.fin_sealed
        move_local(s, Input.SEND_RESET)
        if s.kind is Kind.CHUNKS:
            self._in.remember_chunks(stream)
        conn.forget(s)
        if not ended:
            text = detail.encode("ascii", "backslashreplace")[: conn.limits.detail_max_bytes]
            conn.replies.add(FrameType.RESET, stream, RESET_HEAD.pack(code) + text)
            if conn.is_own(stream):
                self._opens.tokens -= 1.0

    def attach_source(self, stream: int, source: ChunkSource, cls: int) -> None:
        """Chunks of `source` go out on this chunk stream, in class `cls`, from when the peer has accepted it."""
        s = self._conn.stream(stream)
        if s.kind is not Kind.CHUNKS or not self._conn.is_own(stream) or s.source is not None or cls != s.cls:
            raise LocalProtocolError(f"stream {stream} takes no chunk source of class {cls}")
        s.source = source
        self.source_ready(stream)

    def attach_sink(self, stream: int, sink: ChunkSink) -> None:
        """Chunks that arrive on this chunk stream of the peer's go where `sink` says."""
        s = self._conn.stream(stream)
        if s.kind is not Kind.CHUNKS or self._conn.is_own(stream) or s.sink is not None:
            raise LocalProtocolError(f"stream {stream} takes no chunk sink")
        s.sink = sink

    def divert(self, stream: int, view: memoryview) -> None:
        """The rest of the chunk that is arriving on this chunk stream goes into `view`, which may be longer than the rest.

        `placed` is called all the same.  Nothing to do if the stream is over or in between chunks: then nobody writes there.
        """
        s = self._conn.streams.get(stream)
        if s is None or s.arriving is None:
            return
        slot, index, filled = s.filled
        rest = len(s.arriving) - filled
        if len(view) < rest:
            raise LocalProtocolError(f"{rest} bytes of a chunk on stream {stream} do not fit into {len(view)}")
        s.arriving, s.filled = view[:rest], (slot, index, 0)

    def source_ready(self, stream: int) -> None:
        """The source has chunks again, or older ones than before."""
        s = self._conn.stream(stream)
        if s.source is None:
            raise LocalProtocolError(f"stream {stream} has no chunk source")
        if s.accepted and s.sending and s.chunk is None:
            self._conn.scheduler.push(s, s.cls, s.source.order)

    # -- inside

    def _may_read(self, s: Stream, kind: Kind) -> None:
        if s.kind is not kind or not s.reading:
            raise LocalProtocolError(f"read as {kind.name} on stream {s.id}, {s.kind.name} in state {s.state.name}")

    def _read(self, s: Stream, size: int) -> None:
        if s.recv.read(size) and s.receiving:
            self._conn.renew(s)
        self._conn.consumed(size)

    def _end_or_nothing(self, s: Stream) -> bytes | None:
        if not s.fin_received:
            return None
        s.eof_read = True
        self._conn.forget_if_done(s)
        return b""
