"""How many microbatches an origin keeps under way.

Little's law: to keep this stage busy it takes (latency of the route) / (time between two completions) microbatches.  The
latency that counts is the *least* seen lately: the usual one contains the queues that a too large window makes itself, and a
window computed from it would only ever grow (the reason why BBR filters its RTT by the minimum).  Until something is measured
the window is one more than the number of stages: enough to fill the pipeline once.  It never exceeds twice the number of
stages plus two, which is the memory that `plnode run plan` promises, and never the step's own microbatches.
"""

from __future__ import annotations

import math
from collections import deque


class Window:
    """Bounded, measured in-flight window of one origin over a route of `stages` stages."""

    def __init__(self, stages: int, most: int) -> None:
        self._start = stages + 1
        self._cap = max(1, min(most, cap(stages)))
        self._latencies: deque[float] = deque(maxlen=32)
        self._gaps: deque[float] = deque(maxlen=32)
        self._last_done: float | None = None

    def started_step(self) -> None:
        """A step begins: the gap to the last completion of the step before is no measurement of this pipeline's pace."""
        self._last_done = None

    def completed(self, started_s: float, now_s: float) -> None:
        """One microbatch came back: it left at `started_s` (monotonic seconds)."""
        self._latencies.append(now_s - started_s)
        if self._last_done is not None:
            self._gaps.append(now_s - self._last_done)
        self._last_done = now_s

    @property
    def size(self) -> int:
        if not self._latencies or not self._gaps:
            return min(self._start, self._cap)
        gap = sorted(self._gaps)[len(self._gaps) // 2]
        wanted = math.ceil(min(self._latencies) / gap) + 1 if gap > 0 else self._cap
        return max(1, min(self._cap, max(wanted, min(self._start, self._cap))))


def cap(stages: int) -> int:
    """The most microbatches that one origin ever has under way; the plan's memory figures use the same number."""
    return 2 * stages + 2
