"""The connection as a whole: its automaton, as a table, and what its rooms share.

`Inbound` (records in), `Outbound` (records out) and `Session` (the calls of the layer above) work on one `Connection`.  It
owns the streams, the connection's two windows, the queue of session frames, the scheduler and the events; it decides when a
stream is forgotten and how everything ends.

DRAINING: a GOAWAY was sent or received; no new streams, live ones finish.  CLOSED: nothing is received any more and the only
thing still sent is the GOAWAY that says why.
"""

from __future__ import annotations

from enum import IntEnum

from .budget import Reservation
from .errors import Code, LocalProtocolError, WireError
from .events import Event, Kind, SessionClosed, Writable
from .flow import MESSAGE_OVERHEAD_BYTES, SendWindow
from .limits import Limits
from .messages import SessionHello
from .presence import Presence
from .remembered import RememberedWindows
from .replies import GOAWAY, GOAWAY_HEAD, Replies
from .rtt import RttMeter
from .scheduler import MESSAGES, Scheduler
from .streams import State, Stream
from .windows import Windows

# Chunk streams that we reset: data of them may still arrive and must not be counted, for they have no credit.  Resets are limited
# to 100/s, so this many cover five seconds under way; a stream is forgotten by the peer when it sees our RESET.
FORGOTTEN_CHUNK_STREAMS = 512


class ConnectionState(IntEnum):
    """HELLO: the peer's HELLO has not arrived."""

    HELLO = 0
    OPEN = 1
    DRAINING = 2
    CLOSED = 3


class ConnectionInput(IntEnum):
    """FRAME: any but HELLO and GOAWAY.  DRAINED: no stream is left.  FAILED: a violation, a timeout or a lost connection."""

    RECV_HELLO = 0
    RECV_FRAME = 1
    RECV_GOAWAY = 2
    SEND_OPEN = 3
    SEND_GOAWAY = 4
    DRAINED = 5
    FAILED = 6


_S, _I = ConnectionState, ConnectionInput
CONNECTION: dict[tuple[ConnectionState, ConnectionInput], ConnectionState] = {
    (_S.HELLO, _I.RECV_HELLO): _S.OPEN,
    # A newer HELLO; what it may change is checked where it is read.
    **{(s, _I.RECV_HELLO): s for s in (_S.OPEN, _S.DRAINING)},
    **{(s, _I.RECV_FRAME): s for s in (_S.OPEN, _S.DRAINING)},
    **{(s, _I.RECV_GOAWAY): _S.DRAINING for s in (_S.OPEN, _S.DRAINING)},
    # Our first records ride behind the handshake, before the peer's HELLO is here.
    **{(s, _I.SEND_OPEN): s for s in (_S.HELLO, _S.OPEN)},
    **{(s, _I.SEND_GOAWAY): _S.DRAINING for s in (_S.OPEN, _S.DRAINING)},
    (_S.DRAINING, _I.DRAINED): _S.CLOSED,
    **{(s, _I.FAILED): _S.CLOSED for s in _S},
}


class Connection:
    """State that the rooms of one session share; see the module."""

    __slots__ = (
        "_kept_bytes", "_message_most", "_queue_most",
        "blocked", "bytes_in", "bytes_out", "chunk_streams", "drain_until", "end", "events", "forgotten_chunks",
        "goaway_received", "goaway_sent", "heard_at", "hello", "inbound_live", "initiator", "lane_since", "last_in", "limits",
        "message_streams", "next_own", "next_peer", "outbound_live", "pending", "presence", "recv", "replies", "rtt", "scheduler",
        "send", "state", "streams", "sure_bytes", "violation", "windows",
    )  # fmt: skip

    def __init__(
        self,
        *,
        initiator: bool,
        limits: Limits,
        guest: bool,
        now: float,
        wall_offset_s: float,
        window_bytes: int | None,
        reservation: Reservation | None,
        remembered: RememberedWindows | None,
    ) -> None:
        self.limits = limits
        self.initiator = initiator
        self.state = ConnectionState.HELLO
        self.streams: dict[int, Stream] = {}
        self.next_own, self.next_peer = (1, 2) if initiator else (2, 1)
        self.inbound_live = self.outbound_live = self.pending = self.chunk_streams = self.message_streams = 0
        self.forgotten_chunks: dict[int, None] = {}
        self.blocked: dict[int, Stream] = {}  # streams whose sender waits for credit
        self.send = SendWindow(limits.connection_window_guest_bytes)
        self.rtt = RttMeter(limits)
        self.replies = Replies(limits, self.rtt, wall_offset_s)
        self.windows = Windows(
            limits,
            self.rtt,
            self.replies,
            guest=guest,
            window_bytes=window_bytes,
            reservation=reservation,
            remembered=remembered,
            now=now,
        )
        self.recv = self.windows.connection
        self.scheduler: Scheduler[Stream] = Scheduler(limits)
        self.events: list[Event] = []
        self.hello: SessionHello | None = None  # the peer's newest
        self.last_in = self.heard_at = now  # whole records, bytes
        self.presence = Presence(self, now)
        self.lane_since: float | None = None  # None: it is no lane
        self.goaway_sent = False
        self.goaway_received = False
        self.end: WireError | None = None  # why it drains, for whoever is still waiting at the end
        self.drain_until: float | None = None
        self.violation: WireError | None = None
        # What a byte stream's sender may wait for: of a window that is all read up to a quarter is not announced.
        self.sure_bytes = min(limits.stream_window_control_bytes, limits.stream_window_min_bytes) // 4
        self._message_most = limits.message_max_bytes
        self._queue_most = limits.stream_window_bulk_bytes
        # Of the connection's credit bulk leaves so much to message streams, where there are any: else one would wait a round trip
        # behind megabytes (WIRE-4).  Bulk that is alone has all of it: with less, records no longer divide it and the rate is halved.
        self._kept_bytes = min(limits.message_max_bytes, limits.connection_window_guest_bytes // 4)
        self.bytes_in = [0] * 5
        self.bytes_out = [0] * 5

    def move(self, symbol: ConnectionInput) -> bool:
        """Apply an input; False, with nothing changed, if the table has no entry."""
        state = CONNECTION.get((self.state, symbol))
        if state is None:
            return False
        self.state = state
        return True

    # -- windows and streams

    def window_for(self, kind: Kind, cls: int, bulk_window: int) -> tuple[int, int]:
        """(size, quarter) of the start window of a stream; `bulk_window` is what the receiving side's HELLO says."""
        limits = self.limits
        if kind is Kind.CHUNKS:
            return 0, 1  # its credit is the posted slot
        base = limits.stream_window_control_bytes if cls < 2 else min(bulk_window, limits.stream_window_bulk_bytes)
        headroom = limits.message_max_bytes + MESSAGE_OVERHEAD_BYTES if kind is Kind.MESSAGE else 0
        return base + headroom, base // 4

    def add(self, stream: Stream, *, own: bool) -> None:
        """Count a new stream as live."""
        self.streams[stream.id] = stream
        self.windows.adopt(stream)
        if own:
            self.outbound_live += 1
        else:
            self.inbound_live += 1
            self.pending += 1
        self.chunk_streams += stream.kind is Kind.CHUNKS
        self.message_streams += stream.kind is Kind.MESSAGE

    def forget_if_done(self, stream: Stream) -> None:
        """Forget a stream when both directions have ended, our end has left, and the application has read to the end."""
        if stream.state is State.CLOSED and stream.fin_sealed and stream.eof_read:
            self.forget(stream)

    def forget(self, stream: Stream) -> None:
        """Take a stream out of every table.  Credit of what was never sealed or never read goes back."""
        if self.streams.pop(stream.id, None) is None:
            return
        if self.is_own(stream.id):
            self.outbound_live -= 1
        else:
            self.inbound_live -= 1
            self.pending -= not stream.accepted
        self.chunk_streams -= stream.kind is Kind.CHUNKS
        self.message_streams -= stream.kind is Kind.MESSAGE
        self.blocked.pop(stream.id, None)
        self.scheduler.discard(stream, stream.cls)
        self.replies.forget_credit(stream.id)
        self.windows.ended(stream)
        if stream.kind is not Kind.CHUNKS:
            unsent = stream.drop_queued()
            if unsent:
                self.send.give_back(unsent)
                self.wake_writable()
            unread = stream.recv.unread - MESSAGE_OVERHEAD_BYTES * len(stream.messages)
            stream.drop_unread()
            if unread:
                self.consumed(unread)
        else:
            stream.drop_queued()
            stream.drop_unread()

    def is_own(self, number: int) -> bool:
        """Whether this side opened the stream: the initiator's are odd."""
        return (number & 1) == (1 if self.initiator else 0)

    def consumed(self, size: int) -> None:
        """Bytes of the connection's window were read, or dropped."""
        if self.recv.read(size):
            self.windows.renew_connection()

    def renew(self, stream: Stream) -> None:
        """A stream's limit rose by what was read: announce it."""
        if self.windows.renew_stream(stream.recv):
            self.replies.add_credit(stream.id, stream.recv.limit)

    def available(self, stream: Stream) -> int:
        """Bytes that `send` takes now: stream credit, connection credit, and our own bound on what is queued."""
        most, room = self._queue_most - stream.queued, self.send.limit - self.send.sent
        own = stream.send.limit - stream.send.sent
        if stream.kind is Kind.MESSAGE:
            own -= MESSAGE_OVERHEAD_BYTES
            most = min(most, self._message_most)
        elif stream.cls > MESSAGES and self.message_streams:
            room -= self._kept_bytes
        room = min(own, room, most)
        return room if room > 0 else 0

    def wake_if_writable(self, stream: Stream) -> None:
        """Tell a sender that waits for credit, if there is enough now."""
        if stream.need and self.available(stream) >= stream.need:
            stream.need = 0
            self.blocked.pop(stream.id, None)
            self.events.append(Writable(stream.id))

    def wake_writable(self) -> None:
        """The connection's credit rose: look at everybody who waits."""
        for stream in list(self.blocked.values()):
            self.wake_if_writable(stream)

    # -- the end

    def goaway_body(self, code: Code, retry_ms: int, detail: str) -> bytes:
        """Body of a GOAWAY."""
        last = self.next_peer - 2 if self.next_peer > 2 else 0
        text = detail.encode("ascii", "backslashreplace")[: self.limits.detail_max_bytes]
        return GOAWAY_HEAD.pack(code, last, retry_ms) + text

    def fail(self, error: WireError, *, say: bool) -> None:
        """End now: every stream is forgotten, SessionClosed is the last event.  `say`: queue a GOAWAY with the error's code."""
        if self.state is ConnectionState.CLOSED:
            return
        if say:
            self.replies.only(GOAWAY, 0, self.goaway_body(error.code, 0, error.detail))
        else:
            self.replies.clear()
        self.move(ConnectionInput.FAILED)
        self._finish(error)

    def close_if_drained(self) -> None:
        """DRAINING and nothing left to finish or to say: the clean end."""
        drained = self.state is ConnectionState.DRAINING and not self.streams and not self.replies
        if drained and self.move(ConnectionInput.DRAINED):
            self._finish(self.end)

    def _finish(self, error: WireError | None) -> None:
        for stream in self.streams.values():
            self.windows.ended(stream)
            stream.state = State.CLOSED
            stream.drop_queued()
            stream.drop_unread()
        self.streams.clear()
        self.blocked.clear()
        self.forgotten_chunks.clear()
        self.scheduler.clear()
        self.rtt.clear_open()
        self.inbound_live = self.outbound_live = self.pending = self.chunk_streams = self.message_streams = 0
        self.recv.consumed = self.recv.arrived
        self.windows.release()
        self.drain_until = None
        self.events.append(SessionClosed(error))

    def stream(self, number: int) -> Stream:
        """A live stream.  Raises LocalProtocolError for any other id."""
        stream = self.streams.get(number)
        if stream is None:
            raise LocalProtocolError(f"stream {number} is not live")
        return stream
