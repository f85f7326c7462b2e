"""What a session does by itself as time goes by: it asks whether the peer is there, and concludes that it is not.

**Nobody waits** (no tensor channel): a ping goes out when nothing arrived for `ping_interval_s`.  The peer is dead when nothing
at all arrived for `dead_after_s` (or `dead_after_rtts` round trips) with two pings open and the second has had its interval, too:
at 5 s, at 10 s, and at 15 s instead of a third one.  A ping that cannot leave because the pipe is stuck is not open; the writer's
own deadline ends that.

**A training step waits.**  Both ends ping every `ping_interval_s`, and every `quiet_ping_s` while nothing comes, so whoever hears nothing
misses the other's pings, whether its own could leave or not.  How long that may last follows from what TCP does with loss: a segment
goes again after 0.28, 0.84, 1.96, 4.2, 8.7 and 17.6 s at 80 ms (RFC 6298).  A silence of T means that so many packets in a row were
lost as fit into T.  At a loss of 5 %, each packet for itself, a connection full of data runs into 6,000 first timeouts an hour (counted on
wire/sim, whose windows are then one or two segments), one with ten small records a second into 1,800:

    8 s, a first loss and four more     0.04 and 0.011 an hour on one connection; that others stand still in that very moment, too: 1e-5
    10 s, and 15 s, one more            2e-3 and 6e-4 an hour on one connection

Hence: with lanes the peer is dead after `quiet_dead_s` in which no byte came over any of the connections, which the control connection
judges; a connection that is all there is has `dead_after_s`, or the time of six packets where the round trip is longer (from 115 ms).
One that is silent while others are not is dead itself after both `dead_after_s` and `ping_interval_s`.  An outage of the whole line of
4 s passes, as does a peer that computes for 5 s.

A loop that was busy has not listened: a tick that comes too late for the verdict asks once more and waits for the answer.
"""

from __future__ import annotations

from .connection import Connection, ConnectionState
from .errors import Code, ConnectionLost, error_for
from .outbound import Outbound

LARGE_BUFFER_KEPT_S = 5.0  # one ping interval without bulk: the next burst pays one allocation of memory that is zero anyway
LATE_S = 0.25  # ticks of a loop that listens are never so late
RTO_LEAST_S = 0.2  # Linux, TCP_RTO_MIN, added to the round trip
TIMEOUTS = 2**5 - 1  # one, two, four, eight and sixteen: after a first repetition that costs a round trip
PACES = 3  # unanswered for so many: two pings, the second with time for its answer


class Timers:
    """`idle_at`: since when, to the precision of `tick`, there is no stream; None while there is one."""

    __slots__ = ("_conn", "_listen_until", "_out", "_ping_at", "idle_at")

    def __init__(self, conn: Connection, out: Outbound, now: float) -> None:
        self._conn = conn
        self._out = out
        self._ping_at = self._listen_until = now
        self.idle_at: float | None = now

    def tick(self, now: float) -> None:
        """Do what is due: ping, notice that the peer is dead, end the draining, give up a buffer."""
        conn = self._conn
        if conn.state is ConnectionState.CLOSED:
            return
        dead_at = self._dead_at()
        if dead_at is not None and now > dead_at + LATE_S:
            self.ping(now)
            self._listen_until = now + self._pace_s()
        elif dead_at is not None and now >= dead_at:
            silence = error_for(Code.TIMEOUT, detail=f"nothing arrived for {now - conn.last_in:.1f} s")
            conn.fail(ConnectionLost(silence), say=False)
            return
        if conn.drain_until is not None and now >= conn.drain_until:
            conn.fail(conn.end or error_for(Code.SHUTDOWN, local=True), say=False)
            return
        if now >= self._next_ping():
            self.ping(now)
        # The same sum as in `next_due`: a difference may round to less when the sum has come.
        if self._out.has_large_buffer and now >= self._out.last_out + LARGE_BUFFER_KEPT_S:
            self._out.give_up_buffer()
        if conn.streams:
            self.idle_at = None
        elif self.idle_at is None:
            self.idle_at = now
        conn.close_if_drained()

    def next_due(self) -> float | None:
        """When `tick` is due next; None after the end."""
        conn = self._conn
        if conn.state is ConnectionState.CLOSED:
            return None
        due = self._next_ping()
        if (dead_at := self._dead_at()) is not None:
            due = min(due, dead_at)
        if conn.drain_until is not None:
            due = min(due, conn.drain_until)
        if self._out.has_large_buffer:
            due = min(due, self._out.last_out + LARGE_BUFFER_KEPT_S)
        return due

    def ping(self, now: float) -> None:
        """Queue a PING."""
        self._ping_at = now
        self._conn.replies.add_ping()

    def _is_awaited(self) -> bool:
        return self._conn.presence.has_channels

    def _rtt_s(self) -> float:
        return self._conn.rtt.ewma_s

    def _six_packets_s(self) -> float:
        """How long TCP takes to send a packet six times and hear of the last; 8.8 s at 80 ms."""
        rtt_s = self._rtt_s()
        return min(2 * rtt_s + TIMEOUTS * (rtt_s + RTO_LEAST_S), self._conn.limits.write_stalled_s)

    def _pace_s(self) -> float:
        """How long after a ping the next one may follow when nothing arrives."""
        limits = self._conn.limits
        if self._is_awaited():
            return min(limits.ping_interval_s, max(limits.quiet_ping_s, limits.quiet_ping_rtts * self._rtt_s()))
        return limits.ping_interval_s

    def _next_ping(self) -> float:
        # With channels their age shows at once that a path is gone; otherwise only silence is worth a ping.
        conn = self._conn
        asked = max(conn.last_in, self._ping_at) + self._pace_s()
        return min(self._ping_at + conn.limits.ping_interval_s, asked) if self._is_awaited() else asked

    def _dead_at(self) -> float | None:
        """When silence is death; None while it is not asked about."""
        conn, limits = self._conn, self._conn.limits
        rtts_s = limits.dead_after_rtts * self._rtt_s()
        if not self._is_awaited():
            if conn.rtt.open < limits.ping_open_max:
                return None
            return max(conn.last_in + max(limits.dead_after_s, rtts_s), self._ping_at + limits.ping_interval_s, self._listen_until)
        asked_s = max(rtts_s, PACES * self._pace_s())
        own_s = max(limits.dead_after_s, asked_s, self._six_packets_s())
        dead_at = conn.heard_at + own_s
        if conn.presence.lanes:
            dead_at = conn.heard_at + max(own_s, limits.dead_after_s + limits.ping_interval_s)
            if conn.lane_since is None:
                dead_at = min(dead_at, conn.presence.heard_at + max(limits.quiet_dead_s, asked_s))
        return max(dead_at, self._listen_until)
