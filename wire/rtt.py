"""Round trips and the peer's clock.

RTT = elapsed - what the peer says it held the ping (RFC 9000's ack delay): our own scheduling is not network, and a node that
computes for a second must not look far away.  `hold` is the peer's word, so it can make the link look faster, never slower,
and never below zero.

Kept: the minimum of the last 60 s (a route change must be able to raise it), an EWMA of one eighth (RFC 6298), median and p99
of the last 64.  The clock offset is NTP's (RFC 5905 section 8), taken from the sample with the least RTT among the last 8:
its error is at most half the asymmetry of the path, which is smallest when nothing queued.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from .limits import Limits

MIN_KEPT_S = 60.0
EWMA_WEIGHT = 1 / 8
OFFSET_SAMPLES = 8
OPEN_TOKENS_MAX = 64  # pings whose answer we still know; a peer coalesces answers, so some never come


@dataclass(frozen=True, slots=True)
class Rtt:
    """Seconds; `count` samples so far."""

    count: int
    last: float
    minimum: float
    ewma: float
    median: float
    p99: float


class RttMeter:
    """Pings of one session.  Wall clocks are in microseconds of Unix time."""

    __slots__ = ("_ewma", "_minima", "_next", "_offsets", "_open", "_samples", "count")

    def __init__(self, limits: Limits) -> None:
        self._next = 1
        self._open: dict[int, tuple[float, int]] = {}
        self._samples: deque[float] = deque(maxlen=limits.rtt_samples)
        self._minima: deque[tuple[float, float]] = deque()  # ascending: (time, rtt)
        self._offsets: deque[tuple[float, float]] = deque(maxlen=OFFSET_SAMPLES)
        self._ewma = 0.0
        self.count = 0

    @property
    def open(self) -> int:
        """Pings without an answer."""
        return len(self._open)

    def clear_open(self) -> None:
        """Whatever arrived shows that the peer lives: older pings no longer count as unanswered."""
        self._open.clear()

    def sent(self, now: float, wall_us: int) -> int:
        """A ping is being sealed; returns its token."""
        token = self._next
        self._next += 1
        self._open[token] = (now, wall_us)
        while len(self._open) > OPEN_TOKENS_MAX:
            del self._open[next(iter(self._open))]
        return token

    def answered(self, token: int, hold_us: int, peer_wall_us: int, now: float) -> float | None:
        """A pong came; returns the RTT in seconds, None for a token that we do not wait for."""
        known = self._open.pop(token, None)
        if known is None:
            return None
        for older in [number for number in self._open if number < token]:
            del self._open[older]  # the peer answers the newest only
        sent, wall_us = known
        elapsed = max(0.0, now - sent)
        rtt = max(0.0, elapsed - hold_us / 1e6)
        self.count += 1
        self._ewma = rtt if self.count == 1 else self._ewma + EWMA_WEIGHT * (rtt - self._ewma)
        self._samples.append(rtt)
        while self._minima and self._minima[-1][1] >= rtt:
            self._minima.pop()
        self._minima.append((now, rtt))
        while self._minima[0][0] < now - MIN_KEPT_S:
            self._minima.popleft()
        # The peer's clock was read when the pong left: half a network round trip before now.
        self._offsets.append((rtt, (peer_wall_us - wall_us) / 1e6 - elapsed + rtt / 2))
        return rtt

    def wall_moved(self, by_s: float) -> None:
        """Our wall clock was set: offsets and open pings that were stamped with the old one are as if stamped with the new one."""
        self._offsets = deque(((rtt, offset - by_s) for rtt, offset in self._offsets), maxlen=OFFSET_SAMPLES)
        self._open = {token: (sent, wall_us + round(by_s * 1e6)) for token, (sent, wall_us) in self._open.items()}

    @property
    def rtt(self) -> Rtt | None:
        """What is known, None before the first answer."""
        if not self._samples:
            return None
        ordered = sorted(self._samples)
        last = len(ordered) - 1
        return Rtt(self.count, self._samples[-1], self._minima[0][1], self._ewma, ordered[last // 2], ordered[round(last * 0.99)])

    @property
    def ewma_s(self) -> float:
        """Smoothed round trip in seconds; 0 before the first answer."""
        return self._ewma

    def minimum_s(self, now: float) -> float | None:
        """The least round trip of the last 60 s; None if there was none."""
        oldest = now - MIN_KEPT_S
        return next((rtt for when, rtt in self._minima if when >= oldest), None)

    @property
    def clock_offset_s(self) -> float | None:
        """The peer's wall clock minus ours, in seconds; None before the first answer."""
        return min(self._offsets)[1] if self._offsets else None
