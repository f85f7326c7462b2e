"""What a session does by itself as time goes by.

A ping goes out when nothing arrived for `ping_interval_s`, and in that rhythm while tensor channels exist.  The peer is dead
when nothing at all arrived for `dead_after_s` (or `dead_after_rtts` round trips) with two pings open and the second has had
its interval, too: at 5 s, at 10 s, and at 15 s instead of a third one.  Every record that verifies counts as life, so a long
write kills nothing; a ping that cannot leave because the pipe is stuck is not open, and the writer's own deadline ends that.
"""

from __future__ import annotations

from .connection import Connection, ConnectionState
from .errors import Code, ConnectionLost, error_for
from .outbound import Outbound

LARGE_BUFFER_KEPT_S = 5.0  # one ping interval without bulk: the next burst pays one allocation of memory that is zero anyway


class Timers:
    """`idle_at`: since when, to the precision of `tick`, there is no stream; None while there is one."""

    __slots__ = ("_conn", "_out", "_ping_at", "idle_at")

    def __init__(self, conn: Connection, out: Outbound, now: float) -> None:
        self._conn = conn
        self._out = out
        self._ping_at = now
        self.idle_at: float | None = now

    def tick(self, now: float) -> None:
        """Do what is due: ping, notice that the peer is dead, end the draining, give up a buffer."""
        conn, limits = self._conn, self._conn.limits
        if conn.state is ConnectionState.CLOSED:
            return
        if conn.rtt.open >= limits.ping_open_max and now >= self._dead_at():
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
        if conn.rtt.open >= conn.limits.ping_open_max:
            due = min(due, self._dead_at())
        if conn.drain_until is not None:
            due = min(due, conn.drain_until)
        if self._out.has_large_buffer:
            due = min(due, self._out.last_out + LARGE_BUFFER_KEPT_S)
        return due

    def ping(self, now: float) -> None:
        """Queue a PING."""
        self._ping_at = now
        self._conn.replies.add_ping()

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
        return max(silent, self._ping_at + limits.ping_interval_s)
