"""Receive windows that fit the path, within what the process may promise.

A window of fixed size is wrong twice: on a long line the sender stands still (16 MiB at 1 Gbit/s and 250 ms is half the rate),
and on five hundred short ones memory is promised that nobody needs.  So windows start small and double while the window is what
holds the sender up: when half of it was read, and as much arrived, in less than two round trips.  A sender that is held up by
its window sends one window a round trip; one that is slower than that needs no larger window.

What goes wrong:

- *A reader that sleeps and then reads everything at once* looks fast: half a window in no time.  But what it reads lay there; in
  that instant nothing arrives.  Therefore both are counted, and the smaller of the two decides.
- *The queue that the window itself makes* lengthens the round trip and would justify itself.  So the minimum of the last minute
  counts.  Without a round trip nothing grows; a ping is asked for, since bulk that arrives all the time leaves no silence to ping.
- *Credit may not fall.*  A window becomes smaller by not being renewed until its reader has caught up.
- *A stream's window above its connection's* is worth nothing, so a stream that outgrows it takes the connection along; if that
  cannot grow, the stream does not.
- *A stream that we only pass on* (a circuit) is read when somebody else reads, who may be dead.  With a window as large as its
  connection's it takes all of the connection's credit, and every other stream stands still with it.  So such windows are kept
  *apart*: the connection's is larger by what they have together, and they end at a bound of their own.

All decisions are made at renewals, once in a quarter of a window; a read or a record in between costs what it cost before.  The
time of a read is the newest `now` that the session was told (`receive`, `pull`, `tick`): what an application reads arrived just
before, and a read that comes later counts as earlier, which the count of arrivals makes harmless.

Only byte streams of class 2 to 4 grow, and connections of members.  A guest keeps its 256 KiB.
"""

from __future__ import annotations

from dataclasses import dataclass

from .budget import Reservation, UnreadBudget
from .errors import LocalProtocolError
from .events import Kind
from .flow import ReceiveWindow
from .limits import Limits
from .remembered import RememberedWindows
from .replies import Replies
from .rtt import RttMeter
from .streams import Stream

ROUND_TRIPS = 2  # wire.md section 8: half a window within this many
UNBOUNDED = 1 << 62  # a session without a budget, as in tests


@dataclass(frozen=True, slots=True)
class WindowGauges:
    """Bytes: what the connection may send now, what it grants beyond what was read, its largest stream's window, and how much of
    the grant lies here unread.
    """

    send_available: int
    receive_size: int
    largest_stream: int
    receive_used: int


class Windows:
    """The receive windows of one session.  `now` is the newest time that the session knows."""

    __slots__ = ("_apart", "_guest", "_limits", "_memory", "_replies", "_reservation", "_rtt", "connection", "now")

    def __init__(
        self,
        limits: Limits,
        rtt: RttMeter,
        replies: Replies,
        *,
        guest: bool,
        window_bytes: int | None,
        reservation: Reservation | None,
        remembered: RememberedWindows | None,
        now: float,
    ) -> None:
        """`window_bytes`: start window of the connection (default: a guest's or a control connection's)."""
        least = limits.connection_window_guest_bytes
        usual = least if guest else limits.connection_window_control_bytes
        start = usual if window_bytes is None else window_bytes
        if not least <= start <= limits.connection_window_max_bytes:
            raise ValueError(f"a start window of {start} bytes, not {least}..{limits.connection_window_max_bytes}")
        if reservation is None:
            reservation = UnreadBudget(UNBOUNDED).reserve(start)
            assert reservation is not None
        if reservation.size < start:
            raise ValueError(f"a start window of {start} bytes with {reservation.size} reserved")
        self._limits = limits
        self._rtt = rtt
        self._replies = replies
        self._guest = guest
        self._reservation = reservation
        self._memory = remembered
        self._apart = 0  # bytes of all windows that are kept apart
        self.now = now
        # Both sides start from the guest's window, the smallest; the first CREDIT raises it, so they need not agree on more.
        self.connection = ReceiveWindow(start, announced=least)
        self.connection.grows = not guest
        self.connection.mark(now)
        if start > least:
            self.connection.limit = start
            replies.add_credit(0, start)

    # -- streams begin and end

    def adopt(self, stream: Stream) -> None:
        """A stream begins: whether its window may grow, and from when that is measured."""
        stream.recv.grows = stream.kind is Kind.BYTE and stream.cls > 1 and not self._guest
        stream.recv.mark(self.now)

    def start_from_memory(self, stream: Stream) -> bool:
        """Enlarge a window that was not announced yet to what the last stream of this protocol had; True if it rose."""
        if self._memory is None or not stream.recv.grows:
            return False
        wanted = min(self._memory.get(stream.protocol), self._limits.stream_window_max_bytes)
        if wanted > self.connection.size and not self._grow_connection(wanted):
            wanted = self.connection.size
        if wanted <= stream.recv.size or not self._reservation.growing:
            return False
        stream.recv.resize(wanted)
        return True

    def pass_on(self, stream: Stream, start: int, most: int) -> bool:
        """What comes on this stream is for somebody else: keep its window apart, `start` bytes that may become `most`; True if it rose.

        Without budget for that it stays smaller.  What was announced before stays announced.
        """
        window = stream.recv
        if window.apart:
            raise LocalProtocolError(f"stream {stream.id} is passed on already")
        window.most = most
        window.grows = window.grows and start < most
        size = min(window.size, start)
        if self._grow_connection(self.connection.start + self._apart + start):
            size = start
        window.apart = True
        self._apart += size
        rose = size > window.size
        window.resize(size)
        window.start = min(window.start, size)
        return rose

    def ended(self, stream: Stream) -> None:
        """A stream ends.  One that was never read says nothing about the path, one that is passed on about ours."""
        if stream.recv.apart:
            self._apart -= stream.recv.size
            return
        if self._memory is not None and stream.recv.grows and stream.recv.consumed:
            self._memory.put(stream.protocol, stream.recv.size)

    # -- renewals: `read` said True

    def renew_stream(self, window: ReceiveWindow) -> bool:
        """A stream's limit rose; whether the new one is to be announced."""
        if not window.grows:
            return True
        if self._reservation.short and window.size > window.start:
            before = window.size
            announce = window.fall_back()
            self._apart -= before - window.size if window.apart else 0
            return announce
        most = window.most or self._limits.stream_window_max_bytes
        if window.size < most and self._held_up(window) and self._reservation.growing:
            size = min(2 * window.size, most)
            more = size - window.size
            need = self.connection.start + self._apart + more if window.apart else size
            if need <= self.connection.size or self._grow_connection(need):
                window.resize(size)
                self._apart += more if window.apart else 0
        return True

    def renew_connection(self) -> None:
        """The connection's limit rose: announce it, larger or not at all if the budget says so."""
        window = self.connection
        if self._reservation.short and window.size > window.start:
            if window.fall_back():
                self._replies.add_credit(0, window.limit)
        else:
            most = self._limits.connection_window_max_bytes
            if window.grows and window.size < most and self._held_up(window):
                self._grow_connection(min(2 * window.size, most))
            self._replies.add_credit(0, window.limit)
        # While it falls back the peer still holds the old credit; what it used up is free.
        self._reservation.shrink(max(window.size, window.limit - window.consumed))

    def widen(self, size: int) -> bool:
        """Raise the connection's start window, when it is known what the connection is for; False if there is no budget."""
        window = self.connection
        size = min(size, self._limits.connection_window_max_bytes)
        if size > window.size:
            if not self._reservation.extend(size):
                return False
            window.resize(size)
            self._replies.add_credit(0, window.limit)
        window.start = max(window.start, size)
        return True

    def release(self) -> None:
        """The session has ended."""
        self._reservation.release()

    # -- inside

    def _held_up(self, window: ReceiveWindow) -> bool:
        now = self.now
        rtt_s = self._rtt.minimum_s(now)
        if rtt_s is None and not self._rtt.open:
            self._replies.add_ping()
        elapsed = now - window.mark_at
        if rtt_s is None or not 0.0 <= elapsed < ROUND_TRIPS * rtt_s:
            window.mark(now)
            return False
        if 2 * min(window.consumed - window.mark_consumed, window.arrived - window.mark_arrived) < window.size:
            return False
        window.mark(now)
        return True

    def _grow_connection(self, size: int) -> bool:
        window = self.connection
        if size <= window.size:
            return True
        if not window.grows or size > self._limits.connection_window_max_bytes:
            return False
        if not self._reservation.growing or not self._reservation.grow(size):
            return False
        window.resize(size)
        self._replies.add_credit(0, window.limit)
        return True
