"""How much a connection dares to have under way.  The shape of two algorithms, not their measurement.

`Cubic` doubles each round trip until the first loss, then cuts to 0.7 and grows along the cubic of RFC 9438 or, where that is
more, by the additive growth of its section 4.3.  `Bbr` measures the rate at which bytes arrive and the shortest round trip, keeps
1.25 times their product under way and takes no notice of loss: without a window that is cut, a lossy line stays full.  What TCP
adds beyond (pacing, probing for the round trip, hybrid slow start) is left out.
"""

from __future__ import annotations

from collections import deque

from wire.sim.link import PACKET_BYTES

START_BYTES = 10 * PACKET_BYTES  # RFC 6928
CUT = 0.7  # RFC 9438, 4.6
C = 0.4  # RFC 9438, 5.1: segments per second cubed
FRIENDLY = 3 * (1 - CUT) / (1 + CUT)  # RFC 9438, 4.3: segments a round trip
GAIN = 1.25  # over the product of rate and round trip: finds more of a line that others have left
FULL_GROWTH = 1.25  # a round that brings less than this much more rate is one of three that end the doubling
# A round trip this much longer than the shortest stands in a queue of its own making: doubling ends, or it would drown the line.
QUEUED = 1.5
QUEUED_S = 0.005
ROUNDS = 10  # that a rate is remembered


class Congestion:
    """What both know: the round trip.  Bytes and seconds."""

    def __init__(self) -> None:
        self.window = float(START_BYTES)
        self.rtt_s = 0.0
        self.least_rtt_s = float("inf")

    def acked(self, size: int, rtt_s: float, now: float, limited: bool) -> None:
        """`size` bytes arrived after `rtt_s`.  limited: the window was what limited the sender."""
        self.rtt_s = rtt_s if not self.rtt_s else 0.875 * self.rtt_s + 0.125 * rtt_s  # RFC 6298
        self.least_rtt_s = min(self.least_rtt_s, rtt_s)

    def lost(self, now: float) -> None:
        """A segment was found to be lost."""


class Cubic(Congestion):
    def __init__(self) -> None:
        super().__init__()
        self._threshold = float("inf")
        self._most = 0.0  # segments, at the last loss
        self._since = 0.0
        self._recovered_at = 0.0

    def acked(self, size: int, rtt_s: float, now: float, limited: bool) -> None:
        super().acked(size, rtt_s, now, limited)
        if not limited or now < self._recovered_at:
            return
        if self.window < self._threshold:
            self.window += size
            return
        passed = now - self._since
        k = (self._most * (1 - CUT) / C) ** (1 / 3)
        cubic = C * (passed - k) ** 3 + self._most
        friendly = self._most * CUT + FRIENDLY * passed / self.rtt_s
        target = max(cubic, friendly) * PACKET_BYTES
        if target > self.window:
            self.window += min((target - self.window) * size / self.window, size / 2)

    def lost(self, now: float) -> None:
        if now < self._recovered_at:
            return  # one cut a round trip
        self._most = self.window / PACKET_BYTES
        self.window = self._threshold = max(self.window * CUT, 2 * PACKET_BYTES)
        self._since = now
        self._recovered_at = now + self.rtt_s


class Bbr(Congestion):
    def __init__(self) -> None:
        super().__init__()
        self._rates: deque[float] = deque(maxlen=ROUNDS)
        self._round_at = 0.0
        self._bytes = 0
        self._all_limited = True
        self._filling = True
        self._best = 0.0
        self._poor = 0

    def acked(self, size: int, rtt_s: float, now: float, limited: bool) -> None:
        super().acked(size, rtt_s, now, limited)
        self._bytes += size
        self._all_limited = self._all_limited and limited
        if self._filling and limited:
            self.window += size
        if not self._round_at:
            self._round_at = now
        elif now - self._round_at >= max(self.rtt_s, 1e-4):
            self._end_of_round(now, rtt_s)

    def _end_of_round(self, now: float, rtt_s: float) -> None:
        rate = self._bytes / (now - self._round_at)
        if self._all_limited or rate > max(self._rates, default=0.0):  # a sender without data says nothing of the line
            self._rates.append(rate)
        if self._filling and self._all_limited:
            self._poor = 0 if rate > self._best * FULL_GROWTH else self._poor + 1
            self._best = max(self._best, rate)
            self._filling = self._poor < 3 and rtt_s < QUEUED * self.least_rtt_s + QUEUED_S
        if not self._filling:
            self.window = max(GAIN * max(self._rates, default=0.0) * self.least_rtt_s, 4.0 * PACKET_BYTES)
        self._round_at, self._bytes, self._all_limited = now, 0, True


def congestion_of(name: str) -> Congestion:
    """Raises ValueError for an unknown name."""
    if name not in ("cubic", "bbr"):
        raise ValueError(f"congestion control {name!r} is neither cubic nor bbr")
    return Bbr() if name == "bbr" else Cubic()
