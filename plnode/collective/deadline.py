"""Deadlines from what was observed, with a floor and a ceiling (architecture.md, section 5).

`clamp(4 × (median + 4 × spread), floor, ceiling)`; spread is the median absolute deviation, which one stall does not move.  The
ceiling is what a group without history gets: a stranger may be slow, but not for ever.
"""

from __future__ import annotations

import statistics
from collections import deque


class Deadline:
    """An adaptive deadline in seconds; `observe` what happened, read `seconds` for the next wait."""

    def __init__(self, *, floor_s: float, ceiling_s: float, history: int = 32) -> None:
        if not 0 < floor_s <= ceiling_s:
            raise ValueError(f"a deadline needs 0 < floor <= ceiling, got {floor_s} and {ceiling_s}")
        self._floor = floor_s
        self._ceiling = ceiling_s
        self._seen: deque[float] = deque(maxlen=history)

    def observe(self, seconds: float) -> None:
        self._seen.append(seconds)

    @property
    def seconds(self) -> float:
        if len(self._seen) < 3:
            return self._ceiling
        median = statistics.median(self._seen)
        spread = statistics.median(abs(s - median) for s in self._seen)
        return min(max(4 * (median + 4 * spread), self._floor), self._ceiling)
