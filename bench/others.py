"""How much of the machine others had while something was measured: the condition that explains most odd figures.

Busy time of all cores, less what the measured processes used.  Time that the hypervisor took (steal) counts as others' too.  The
load average cannot say this: it is a mean over a minute, and counts our own processes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import psutil

__all__ = ["Others"]


class Others:
    """Begins to count when it is made.  `pids` are the measured processes, which must live until `cores` is asked."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = tuple(pids)
        self._began = self._read()

    def cores(self) -> float:
        """Cores' worth of time that others used since; 0.5 is half a core.  Never below 0 (the kernel counts in ticks)."""
        (at, busy, own), (then, busy_then, own_then) = self._read(), self._began
        return max(0.0, ((busy - busy_then) - (own - own_then)) / max(at - then, 1e-3))

    def _read(self) -> tuple[float, float, float]:
        """(monotonic seconds, busy seconds of all cores, seconds that our processes have used)."""
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        # Guests' time is contained in user and nice (proc_stat(5)).
        guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
        own = 0.0
        for pid in self._pids:
            try:
                used = psutil.Process(pid).cpu_times()
            except psutil.NoSuchProcess:
                continue
            own += used.user + used.system
        return time.monotonic(), sum(times) - guests - idle, own
