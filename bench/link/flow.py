"""What a flow carried, second by second, and its rate once it runs.

A flow is a list of marks: at this time, so many more bytes had arrived for certain.  Between two marks bytes are taken to arrive
evenly, so that a mark of 8 MiB does not count wholly for the second in which it falls; a rate by whole marks would err by a mark
at each end, 3 % of ten seconds at 200 Mbit/s.

The rate leaves out the start.  A connection begins fast (slow start, a queue that is still empty) and a lossy one sinks for seconds:
a short run flatters.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise

__all__ = ["Marks", "per_second", "rate"]

Marks = Sequence[tuple[float, int]]  # (seconds since the start, bytes that arrived since the mark before), ascending


def _arrived(marks: Marks, totals: Sequence[int], at_s: float) -> float:
    """Bytes that had arrived at `at_s`."""
    after = bisect_left(marks, at_s, key=lambda mark: mark[0])
    if after == len(marks):
        return totals[-1] if totals else 0
    before_s, before = (marks[after - 1][0], totals[after - 1]) if after else (0.0, 0)
    end_s, size = marks[after]
    return before + size * (at_s - before_s) / (end_s - before_s) if end_s > before_s else before


def rate(marks: Marks, drop_s: float) -> float:
    """Bytes a second from `drop_s` to the last mark; 0.0 if nothing arrived after it."""
    if not marks or marks[-1][0] <= drop_s:
        return 0.0
    totals = list(accumulate(size for _, size in marks))
    return (totals[-1] - _arrived(marks, totals, drop_s)) / (marks[-1][0] - drop_s)


def per_second(marks: Marks, seconds: float) -> list[float]:
    """Bytes that arrived in each whole second of the first `seconds`."""
    totals = list(accumulate(size for _, size in marks))
    curve = [_arrived(marks, totals, float(second)) for second in range(int(seconds) + 1)]
    return [late - early for early, late in pairwise(curve)]
