"""A session: many streams with one peer over one ordered, sealed pipe.  Sans-IO: bytes and the time in, events and bytes out.

    link.read -> receive(view, now) -> events()          calls of the application -> pull(budget, now) -> link.write

What goes wrong in multiplexers, and where it is prevented.  The reader waits for an application, or for the writer, and both ends stand
still for ever: `receive` only fills memory that was granted and queues a bounded number of answers.  A length from the peer allocates:
headers are checked against a table before anything else (records.py).  A reset looks like an end, a cut connection like a reset: the
states are two tables (streams.py for a stream, connection.py for the connection) and nothing outside them decides.  Small frames starve
large ones or the other way round: scheduler.py.  Counters only go up: a stream is taken out of every table in one place, and `gauges`
shows all of them.

Roles of the files: `Connection` is the shared state, `Inbound` and `Outbound` the two directions, this class what the layer above calls.

Two kinds of error.  A misuse by us raises LocalProtocolError and leaves the session as it was.  A violation by the peer raises
RemoteProtocolError out of `receive`, after a GOAWAY was queued (pull once more, then close) and `SessionClosed` was the last event.

Ids: ours are odd if we initiated the connection, ascending by two.  An id that is neither live nor yet to come is closed: frames for it
were under way and are dropped, their credit returned.  So the layer above must keep what it wants to remember of a stream that ended.
"""

from __future__ import annotations

from collections.abc import Callable

from .chunks import ChunkSink, ChunkSource
from .connection import CONNECTION, Connection, ConnectionInput, ConnectionState
from .errors import Code, ConnectionLost, LimitExceeded, LocalProtocolError, WireError, error_for
from .events import Event, Kind
from .flow import MESSAGE_OVERHEAD_BYTES, ReceiveWindow, SendWindow
from .inbound import Inbound
from .limits import Limits
from .messages import AcceptBody, OpenBody, SessionHello, encode
from .outbound import Outbound
from .rates import Bucket
from .records import FrameType, Opener, Sealer
from .replies import GOAWAY, HELLO, RESET_HEAD
from .rtt import Rtt
from .streams import Input, State, Stream, move_local

LARGE_BUFFER_KEPT_S = 5.0  # one ping interval without bulk: the next burst pays one allocation of memory that is zero anyway
SURE_BYTES = 16 << 10  # on a byte stream; below three quarters of the smallest window
OPENS_SHARE = 0.5  # of the peer's burst: what left in 2 s may arrive at once, and a reset costs a token, too
_ORDER_MAX = 2**63 - 1


class Session:
    """One connection after its handshake.  Not thread-safe, never waits, has no clock: `now` is monotonic seconds from the caller."""

    __slots__ = ("_conn", "_guest", "_hello", "_hello_at", "_idle_at", "_in", "_opens", "_out", "_ping_at")

    def __init__(
        self,
        *,
        initiator: bool,
        sealer: Sealer,
        opener: Opener,
        hello: SessionHello,
        limits: Limits,
        now: float,
        guest: bool = False,
        serves: Callable[[str, bool], Code | None],
        wall_offset_s: float = 0.0,
    ) -> None:
        """`hello` is queued as the first frame.  `serves(protocol, guest)` is asked for each OPEN of the peer: None = it becomes a
        `StreamOpened`, a code = refused.  `wall_offset_s`: wall clock minus `now`, for the clock stamps of pings."""
        self._conn = conn = Connection(initiator=initiator, limits=limits, guest=guest, now=now, wall_offset_s=wall_offset_s)
        self._in = Inbound(conn, opener, bulk_window=hello.bulk_window, guest=guest, serves=serves, now=now)
        self._out = Outbound(conn, sealer, now)
        self._guest = guest
        self._hello = hello
        self._opens = Bucket(limits.opens_per_s, limits.opens_burst * OPENS_SHARE, now)
        self._ping_at = now
        self._idle_at: float | None = now
        conn.replies.add(HELLO, 0, encode(hello))
        if conn.recv.size > conn.recv.limit:
            conn.recv.limit = conn.recv.size
            conn.replies.add_credit(0, conn.recv.limit)

    # -- bytes and time

    def receive(self, data: memoryview, now: float) -> int:
        """Take whole records off the front of `data`; returns the bytes consumed (what remains is less than one record).

        Raises RemoteProtocolError on a violation, after queueing a GOAWAY; events of what came before it are still to be drained.
        After the end everything is consumed and ignored.
        """
        conn = self._conn
        if conn.state is ConnectionState.CLOSED:
            return len(data)
        try:
            used = self._in.receive(data, now)
        except WireError as error:
            conn.fail(error, say=True)
            raise
        if conn.state is ConnectionState.DRAINING:
            conn.close_if_drained()
        return used

    def receive_end(self, cause: BaseException | str = "the peer closed the connection without a word") -> None:
        """The pipe ended or broke.  Clean only if a GOAWAY was sent or received and no stream is left; else ConnectionLost."""
        conn = self._conn
        if conn.state is ConnectionState.DRAINING and not conn.streams:
            conn.replies.clear()
            conn.close_if_drained()
        conn.fail(conn.end if conn.end is not None and conn.goaway_received else ConnectionLost(cause), say=False)

    def events(self) -> list[Event]:
        """Take what happened since the last call, in order."""
        conn = self._conn
        events = conn.events
        if events:
            conn.events = []
        return events

    def pull(self, budget: int, now: float) -> list[memoryview]:
        """Sealed records by priority, in all about `budget` bytes, at least one if anything is ready.  They must be sent in order and
        whole, and are overwritten by the next `pull`."""
        return self._out.pull(budget, now)

    @property
    def wants_write(self) -> bool:
        """Whether there is something to pull."""
        return self._out.wants_write

    @property
    def state(self) -> ConnectionState:
        """HELLO, OPEN, DRAINING or CLOSED."""
        return self._conn.state

    @property
    def record_bytes(self) -> int:
        """Plaintext bytes of a bulk record at the rate at which the socket takes bytes now."""
        return self._out.quantum

    @property
    def bytes_in(self) -> tuple[int, ...]:
        """Plaintext bytes received, by class."""
        return tuple(self._conn.bytes_in)

    @property
    def bytes_out(self) -> tuple[int, ...]:
        """Sealed bytes pulled, by class."""
        return tuple(self._conn.bytes_out)

    def tick(self, now: float) -> None:
        """Do what is due: ping, notice that the peer is dead, end the draining or an idle connection, give up a buffer."""
        conn, limits = self._conn, self._conn.limits
        if conn.state is ConnectionState.CLOSED:
            return
        if conn.rtt.open >= limits.ping_open_max and now >= self._dead_at():
            conn.fail(ConnectionLost(error_for(Code.TIMEOUT, detail=f"nothing arrived for {now - conn.last_in:.1f} s")), say=False)
            return
        if conn.drain_until is not None and now >= conn.drain_until:
            conn.fail(conn.end or error_for(Code.SHUTDOWN, local=True), say=False)
            return
        if now >= self._next_ping():
            self.ping(now)
        if self._out.has_large_buffer and now - self._out.last_out >= LARGE_BUFFER_KEPT_S:
            self._out.give_up_buffer()
        if conn.streams:
            self._idle_at = None
        elif self._idle_at is None:
            self._idle_at = now
        conn.close_if_drained()

    def next_timer(self) -> float | None:
        """When `tick` is due next; None after the end."""
        conn = self._conn
        if conn.state is ConnectionState.CLOSED:
            return None
        due = self._next_ping()
        if conn.rtt.open >= conn.limits.ping_open_max:
            due = min(due, self._dead_at())
        if conn.drain_until is not None:
            due = min(due, conn.drain_until)
        if self._out.has_large_buffer:
            due = min(due, self._out.last_out + LARGE_BUFFER_KEPT_S)
        return due

    def idle_since(self) -> float | None:
        """Since when, to the precision of `tick`, there is no stream; the owner ends idle connections that it does not pin."""
        return None if self._conn.streams else self._idle_at

    def _next_ping(self) -> float:
        # With channels their age shows at once that a path is gone; otherwise only silence is worth a ping.
        interval = self._conn.limits.ping_interval_s
        if self._conn.chunk_streams:
            return self._ping_at + interval
        return max(self._conn.last_in, self._ping_at) + interval

    def _dead_at(self) -> float:
        rtt = self._conn.rtt.rtt
        limits = self._conn.limits
        silent = self._conn.last_in + max(limits.dead_after_s, limits.dead_after_rtts * (rtt.ewma if rtt else 0.0))
        # The last ping has had its time, too: 5 s, 10 s, and at 15 s instead of a third one it is over.
        return max(silent, self._ping_at + limits.ping_interval_s)

    # -- the connection

    @property
    def peer_hello(self) -> SessionHello | None:
        """The peer's newest HELLO."""
        return self._conn.hello

    def update_hello(self, hello: SessionHello) -> None:
        """Send a newer HELLO; at most one in `hello_update_interval_s`, else the peer ends the connection."""
        old = self._hello
        if hello.revision <= old.revision or (hello.boot_id, hello.bulk_window) != (old.boot_id, old.bulk_window):
            raise LocalProtocolError("a newer HELLO needs a higher revision and keeps boot_id and bulk_window")
        self._alive()
        self._conn.replies.add(HELLO, 0, encode(hello))
        self._hello = hello

    def goaway(self, code: Code, *, retry_ms: int = 0, detail: str = "", now: float) -> None:
        """Open and take no new streams; live ones have `draining_timeout_s` to finish.  Idempotent."""
        conn = self._conn
        if conn.goaway_sent or conn.state is ConnectionState.CLOSED:
            return
        conn.goaway_sent = True
        conn.replies.add(GOAWAY, 0, conn.goaway_body(code, retry_ms, detail))
        if conn.state is ConnectionState.HELLO:
            conn.fail(error_for(code, local=True, detail=detail), say=True)
            return
        conn.move(ConnectionInput.SEND_GOAWAY)
        if conn.drain_until is None:
            conn.drain_until = now + conn.limits.draining_timeout_s

    def abort(self, error: WireError) -> None:
        """End now: every stream and waiter gets `error`, the peer a GOAWAY with its code."""
        self._conn.fail(error, say=True)

    def ping(self, now: float) -> None:
        """Queue a PING; `RttMeasured` follows."""
        self._alive()
        self._ping_at = now
        self._conn.replies.add_ping()

    @property
    def rtt(self) -> Rtt | None:
        """Round trip: last, minimum of 60 s, EWMA, median and p99 of the last 64, in seconds."""
        return self._conn.rtt.rtt

    @property
    def rtt_s(self) -> float | None:
        """EWMA of the round trip in seconds, None before the first answer."""
        rtt = self._conn.rtt.rtt
        return None if rtt is None else rtt.ewma

    @property
    def clock_offset(self) -> float | None:
        """The peer's wall clock minus ours, in seconds."""
        return self._conn.rtt.clock_offset_s

    # -- streams

    def open_delay_s(self, now: float) -> float:
        """Seconds until `open_stream` may be called again without the peer taking it for a flood; 0 = now."""
        bucket = self._opens
        return max(0.0, (1.0 - bucket.tokens) / bucket.per_s - (now - bucket.last))

    def open_stream(self, kind: Kind, protocol: str, cls: int, *, meta: bytes = b"", order: int = 0, now: float) -> int:
        """Open a stream and return its id; data may be sent at once.

        `cls` 1..4 (chunks: 2..4); `order` sorts within class 2.  Raises LimitExceeded if the peer has as many of our streams as it
        keeps, or we open faster than it allows (see `open_delay_s`), LocalProtocolError if the connection takes no new streams.
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
        conn.replies.add(FrameType.ACCEPT, stream, encode(AcceptBody(s.recv.limit)))

    def refuse(self, stream: int, code: Code) -> None:
        """Refuse a stream that the peer opened and that was not accepted."""
        if self._conn.stream(stream).state not in (State.PENDING, State.PENDING_REMOTE):
            raise LocalProtocolError(f"stream {stream} is not waiting to be accepted")
        self.reset(stream, code)

    def sendable(self, stream: int, need: int = 0) -> int:
        """Bytes that `send` takes now.  A message needs its whole size.

        If that is less than `need`, `Writable` comes as soon as it is not (on a byte stream at the latest when 16 KiB fit); with `need`
        0, as soon as it is any more than now, unless a largest message fits already.
        """
        conn = self._conn
        s = conn.streams.get(stream) or conn.stream(stream)
        available = conn.available(s)
        if available < need or (need == 0 and available < conn.limits.message_max_bytes):
            # Of a window that is all read three quarters are sure to be announced, so more than that must not be waited for.
            s.need = min(need, SURE_BYTES) if need and s.kind is Kind.BYTE else need or available + 1
            conn.blocked[stream] = s
        elif s.need:
            s.need = 0
            del conn.blocked[stream]
        return available

    def send(self, stream: int, data: bytes | bytearray | memoryview, *, fin: bool = False, now: float) -> None:
        """Queue one message, or bytes of a byte stream; `fin` ends our direction behind them.

        All or nothing: raises LocalProtocolError, with nothing changed, if `sendable` is less, the direction has ended, or a message
        is empty or too large.  On a byte stream pieces from 4 KiB on are not copied and must not change until they have left
        (`unsent` is 0); a message is copied unless it is `bytes`.  Chunk streams take only `fin`.
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
        """Copy what has not left, so that the caller may reuse its buffer: for a sender that is cancelled."""
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
                conn.replies.add_credit(stream, s.recv.limit)
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
        """Take the posted buffer back: the bytes from its front that are filled (0: look with `read_into` for what did not fit)."""
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

    def source_ready(self, stream: int) -> None:
        """The source has chunks again, or older ones than before."""
        s = self._conn.stream(stream)
        if s.source is None:
            raise LocalProtocolError(f"stream {stream} has no chunk source")
        if s.accepted and s.sending and s.chunk is None:
            self._conn.scheduler.push(s, s.cls, s.source.order)

    def gauges(self) -> dict[str, int]:
        """What is held now; all 0 when idle (but `queued_frames`, which the next pull sends) and after the end."""
        conn = self._conn
        streams = conn.streams.values()
        return {
            "streams": len(conn.streams),
            "streams_inbound": conn.inbound_live,
            "streams_outbound": conn.outbound_live,
            "streams_pending": conn.pending,
            "streams_chunks": conn.chunk_streams,
            "streams_blocked": len(conn.blocked),
            "streams_ready": len(conn.scheduler),
            "queued_bytes": sum(s.queued for s in streams),
            "unread_bytes": conn.recv.unread,
            "queued_frames": len(conn.replies),
        }

    # -- inside

    def _alive(self) -> None:
        if self._conn.state is ConnectionState.CLOSED:
            raise LocalProtocolError("the session has ended")

    def _may_read(self, s: Stream, kind: Kind) -> None:
        if s.kind is not kind or not s.reading:
            raise LocalProtocolError(f"read as {kind.name} on stream {s.id}, {s.kind.name} in state {s.state.name}")

    def _read(self, s: Stream, size: int) -> None:
        if s.recv.read(size) and s.receiving:
            self._conn.replies.add_credit(s.id, s.recv.limit)
        self._conn.consumed(size)

    def _end_or_nothing(self, s: Stream) -> bytes | None:
        if not s.fin_received:
            return None
        s.eof_read = True
        self._conn.forget_if_done(s)
        return b""
