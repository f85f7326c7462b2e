"""How long the event loop is blocked: the time of each task step, measured by a trio instrument.

Everything on the loop shares one thread.  A step that computes for 50 ms delays every ping, credit and timer of every peer by
50 ms, and from outside that looks like a bad line.  trio calls an instrument before and after each step (the code between two
awaits), so the step's length is the time for which nobody else could run; a blocking call hides nowhere.

The figures are quantiles over all steps of a window.  Steps are counted in a histogram with 8 buckets an octave (a quantile
is right to 1/8 = 12.5 %), of fixed size, because a node makes some 10^4 steps a second for weeks.  The two calls cost about a
microsecond a step.  The greatest step keeps its task's name: that is what one has to look for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import trio

__all__ = ["LoopFigures", "LoopWatch"]

_SUB = 3  # 2^3 buckets an octave
_BUCKETS = 48 << _SUB  # up to 2^48 ns, three days


@dataclass(frozen=True, slots=True)
class LoopFigures:
    """Of one window: steps, and how long they held the loop, in milliseconds; `slowest` is the task of the longest step."""

    steps: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    slowest: str


class LoopWatch(trio.abc.Instrument):
    """Give it to `trio.run(..., instruments=[watch])` or `trio.lowlevel.add_instrument(watch)`."""

    def __init__(self, *, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock_ns = clock_ns
        self._begun = 0
        self._reset()

    def _reset(self) -> None:
        self._counts = [0] * _BUCKETS
        self._max_ns = 0
        self._slowest = ""

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._begun = self._clock_ns()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if not self._begun:
            return  # installed in the middle of this very step
        spent = self._clock_ns() - self._begun
        self._counts[_bucket(spent)] += 1
        if spent > self._max_ns:
            self._max_ns = spent
            self._slowest = task.name

    def take(self) -> LoopFigures:
        """The figures since the last `take`, and a new window."""
        figures = self.read()
        self._reset()
        return figures

    def read(self) -> LoopFigures:
        """The figures of the window so far."""
        steps = sum(self._counts)
        return LoopFigures(
            steps, self._quantile(steps, 0.50), self._quantile(steps, 0.99), round(self._max_ns / 1e6, 6), self._slowest
        )

    def _quantile(self, steps: int, share: float) -> float:
        """Upper edge, in ms, of the bucket in which the quantile lies, but never above the greatest step."""
        seen = 0
        for index, count in enumerate(self._counts):
            seen += count
            if count and seen >= share * steps:
                return round(min(_upper_edge(index), self._max_ns) / 1e6, 6)
        return 0.0


def _bucket(ns: int) -> int:
    """Exact below 2^(SUB+1), then the leading SUB+1 bits: monotonic and without gaps."""
    shift = max(ns.bit_length() - _SUB - 1, 0)
    return min((shift << _SUB) + (ns >> shift), _BUCKETS - 1)


def _upper_edge(bucket: int) -> int:
    """The greatest number of nanoseconds that falls into `bucket`."""
    shift = max((bucket >> _SUB) - 1, 0)
    return (((bucket - (shift << _SUB)) + 1) << shift) - 1
