"""How many bytes a second go and come, as a person wants to read it: neither the last packet nor the mean of the whole night.

An exponentially weighted mean whose weights follow time, not the number of looks: a look after `dt` seconds counts with
1 - exp(-dt / `TAU_S`).  So looks may come irregularly, the figure after a silence of a minute is the silence, and two looks in
one instant change nothing.  The first look only says where counting begins.

TAU_S: five seconds show a step of training (bursts a second apart) as one steady figure, and a stop within a few looks.
"""

from __future__ import annotations

import math

TAU_S = 5.0


class ByteRates:
    """Of one peer.  `now` is monotonic seconds; totals never fall."""

    __slots__ = ("_at", "_in", "_out", "in_per_s", "out_per_s")

    def __init__(self) -> None:
        self._at: float | None = None
        self._in = self._out = 0
        self.in_per_s = self.out_per_s = 0.0

    def look(self, now: float, bytes_in: int, bytes_out: int) -> None:
        """These are the totals now."""
        if self._at is not None:
            elapsed = now - self._at
            if elapsed <= 0.0:
                return
            weight = -math.expm1(-elapsed / TAU_S)
            self.in_per_s += weight * ((bytes_in - self._in) / elapsed - self.in_per_s)
            self.out_per_s += weight * ((bytes_out - self._out) / elapsed - self.out_per_s)
        self._at, self._in, self._out = now, bytes_in, bytes_out
