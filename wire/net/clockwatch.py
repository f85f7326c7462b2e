"""Is the wall clock of this machine right?  What the peers' clocks say, and when that is worth a word.

Nothing in the protocol runs by wall clocks but the expiry of signed records, which has minutes of grace.  A clock that is off by
more than that makes a node's records look expired to everybody, and everybody's to it: it is alone and does not know why.  So the
operator is told long before.

Each connection knows its peer's offset (wire/rtt.py).  One wrong clock must not blame all the others, so the median over at least
three peers decides; of an even number the two in the middle are averaged.  It is said once, with the number.  After that the
median has to come below half the bound before it can be said again: a clock that is off by just the bound would be complained of
at every look.  While there are fewer peers than three nothing is known, and nothing changes.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from wire.limits import Limits

HEALED_SHARE = 0.5  # of the bound; the path's part in an offset is far smaller than the difference


class ClockWatch:
    """One of a node."""

    __slots__ = ("_least", "_most_s", "said")

    def __init__(self, limits: Limits) -> None:
        self._least = limits.clock_peers_min
        self._most_s = limits.clock_warn_s
        self.said = False

    def look(self, offsets_s: Sequence[float]) -> float | None:
        """The peers' clocks minus ours, one figure a peer.  Returns the median if the operator is to be told of it now."""
        if len(offsets_s) < self._least:
            return None
        median = statistics.median(offsets_s)
        if self.said:
            self.said = abs(median) > self._most_s * HEALED_SHARE
        elif abs(median) > self._most_s:
            self.said = True
            return median
        return None
