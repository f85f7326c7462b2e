"""A session: many streams with one peer over one ordered, sealed pipe.  Sans-IO: bytes and the time in, events and bytes out.

    link.read -> receive(view, now) -> events()          calls of the application -> pull(budget, now) -> link.write

What goes wrong in multiplexers, and where it is prevented.  The reader waits for an application, or for the writer, and both
ends stand still for ever: `receive` only fills memory that was granted and queues a bounded number of answers.  A length from
the peer allocates: headers are checked against a table before anything else (records.py).  A reset looks like an end, a cut
connection like a reset: the states are two tables (streams.py for a stream, connection.py for the connection) and nothing
outside them decides.  Small frames starve large ones or the other way round: scheduler.py.  Counters only go up: a stream is
taken out of every table in one place, and `gauges` shows all of them.

Roles of the files: `Connection` is the shared state, `Inbound` and `Outbound` the two directions, `StreamCalls` what the
layer above does with streams, `Windows` how much the peer may send, `Timers` what happens by itself.

Two kinds of error.  A misuse by us raises LocalProtocolError and leaves the session as it was.  A violation by the peer
raises RemoteProtocolError out of `receive`, after a GOAWAY was queued (pull once more, then close) and `SessionClosed` was
the last event.

Ids: ours are odd if we initiated the connection, ascending by two.  An id that is neither live nor yet to come is closed:
frames for it were under way and are dropped, their credit returned.  So the layer above must keep what it wants to remember
of a stream that ended.
"""

from __future__ import annotations

from collections.abc import Callable

from .budget import Reservation
from .calls import OPENS_SHARE, StreamCalls
from .connection import Connection, ConnectionInput, ConnectionState
from .errors import Code, ConnectionLost, LocalProtocolError, WireError, error_for
from .events import Event
from .inbound import Inbound
from .limits import Limits
from .messages import SessionHello, encode
from .outbound import Outbound
from .rates import Bucket
from .records import Opener, Sealer
from .remembered import RememberedWindows
from .replies import GOAWAY, HELLO
from .rtt import Rtt
from .timers import Timers
from .windows import WindowGauges


class Session(StreamCalls):
    """One connection after its handshake.  Never waits and has no clock: `now` is the caller's monotonic seconds."""

    __slots__ = ("_out", "_timers")

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
        window_bytes: int | None = None,
        reservation: Reservation | None = None,
        remembered: RememberedWindows | None = None,
    ) -> None:
        """`hello` is queued as the first frame.  `serves(protocol, guest)` is asked for each OPEN of the peer: None = it becomes
        a `StreamOpened`, a code = refused.  `wall_offset_s`: wall clock minus `now`, for the clock stamps of pings.

        `window_bytes`: the connection's start window; by default a guest's or a control connection's.  `reservation`: at least
        as much of the process's budget, the session's from now on and released when it ends; without one nothing is counted.
        `remembered`: the peer's table of last windows, read when a stream begins and written when it ends.
        Raises ValueError, with the reservation untouched, if these do not fit together.
        """
        self._conn = conn = Connection(
            initiator=initiator,
            limits=limits,
            guest=guest,
            now=now,
            wall_offset_s=wall_offset_s,
            window_bytes=window_bytes,
            reservation=reservation,
            remembered=remembered,
        )
        self._in = Inbound(conn, opener, bulk_window=hello.bulk_window, guest=guest, serves=serves, now=now)
        self._out = Outbound(conn, sealer, now)
        self._hello = hello
        self._opens = Bucket(limits.opens_per_s, limits.opens_burst * OPENS_SHARE, now)
        self._timers = Timers(conn, self._out, now)
        conn.replies.add(HELLO, 0, encode(hello))

    # -- bytes and time

    def receive(self, data: memoryview, now: float) -> int:
        """Take whole records off the front of `data`; returns the bytes consumed (what remains is less than one record).

        Raises RemoteProtocolError on a violation, after queueing a GOAWAY; events of what came before it are still to be drained.
        After the end everything is consumed and ignored.
        """
        conn = self._conn
        if conn.state is ConnectionState.CLOSED:
            return len(data)
        conn.windows.now = conn.heard_at = now
        conn.presence.heard(now, conn.lane_since)
        try:
            used = self._in.receive(data, now)
        except WireError as error:
            conn.fail(error, say=True)
            raise
        if conn.state is ConnectionState.DRAINING:
            conn.close_if_drained()
        return used

    @property
    def missing_bytes(self) -> int:
        """How much of the record at the end of the last `receive` is still to come; 0 if that is not known."""
        return self._in.missing

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
        """Sealed records by priority, in all about `budget` bytes, at least one if anything is ready.  They must be sent in
        order and whole, and are overwritten by the next `pull`.
        """
        self._conn.windows.now = now
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
    def send_bytes_per_s(self) -> float:
        """How fast the socket took bytes lately while there was bulk to send; 0 before the first measurement."""
        return self._out.bytes_per_s

    @property
    def bytes_in(self) -> tuple[int, ...]:
        """Plaintext bytes received, by class."""
        return tuple(self._conn.bytes_in)

    @property
    def bytes_out(self) -> tuple[int, ...]:
        """Sealed bytes pulled, by class."""
        return tuple(self._conn.bytes_out)

    def tick(self, now: float) -> None:
        """Do what is due: ping, notice that the peer is dead, end the draining, give up a buffer."""
        self._conn.windows.now = now
        self._timers.tick(now)

    def next_timer(self) -> float | None:
        """When `tick` is due next; None after the end.  Other calls may bring it forward: ask again now and then."""
        return self._timers.next_due()

    def idle_since(self) -> float | None:
        """Since when, to the precision of `tick`, there is no stream; the owner ends idle connections that it does not pin."""
        return None if self._conn.streams else self._timers.idle_at

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
        self._timers.ping(now)

    def join(self, control: Session, now: float) -> None:
        """This connection is a lane of that one: what comes over either shows that the peer is there."""
        conn = self._conn
        conn.presence, conn.lane_since = control._conn.presence, now
        conn.presence.lanes.append(conn)

    def leave(self) -> None:
        """This lane has ended."""
        self._conn.presence.lanes.remove(self._conn)

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

    def set_wall_offset(self, wall_offset_s: float) -> None:
        """Wall clock minus the clock of `now`, which is another one since somebody set the wall clock."""
        replies = self._conn.replies
        self._conn.rtt.wall_moved(wall_offset_s - replies.wall_offset_s)
        replies.wall_offset_s = wall_offset_s

    @property
    def wall_offset_s(self) -> float:
        return self._conn.replies.wall_offset_s

    def widen(self, window_bytes: int) -> bool:
        """Raise the connection's start window, for when it turns out what the connection is for; False if the budget is short
        of it (then refuse the connection with RESOURCE_LIMIT), with nothing changed.
        """
        self._alive()
        return self._conn.windows.widen(window_bytes)

    def windows(self) -> WindowGauges:
        """How large the windows are now."""
        conn = self._conn
        largest = max((s.recv.size for s in conn.streams.values()), default=0)
        return WindowGauges(conn.send.available, conn.recv.size, largest, conn.recv.unread)

    def queued_bytes(self) -> tuple[int, ...]:
        """What has credit and no record has carried yet, by class 0..4: it waits for the socket.

        Class 0 is always 0: session frames are made when they leave.  Tensors wait in their channels, not here.
        """
        queued = [0] * 5
        for stream in self._conn.streams.values():
            queued[stream.cls] += stream.queued
        return tuple(queued)

    @property
    def last_in(self) -> float:
        """When the last whole record came."""
        return self._conn.last_in

    @property
    def bulk_waiting(self) -> bool:
        """Whether records of class 2 to 4 wait for the socket."""
        return bool(self._conn.scheduler.bulk_waiting)

    def was_opened(self, stream: int) -> bool:
        """Whether the peer has opened a stream of this id, live or not."""
        return not self._conn.is_own(stream) and stream < self._conn.next_peer

    def is_live(self, stream: int) -> bool:
        """Whether calls for this stream make sense: False once it is forgotten, drained the event that says so or not."""
        return stream in self._conn.streams

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

    def _alive(self) -> None:
        if self._conn.state is ConnectionState.CLOSED:
            raise LocalProtocolError("the session has ended")
