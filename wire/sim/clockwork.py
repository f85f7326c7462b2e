"""What happens next: events ordered by (time, counter), run by one task that follows trio's clock.

What goes wrong with the obvious way, a task for each packet that sleeps until it arrives: trio shuffles tasks that wake at one
instant, so two runs of one seed differ, and a gibibyte is a million sleeping tasks.  Here a packet is an entry of one heap, and
one task sleeps until the first is due.  Two events of one instant run in the order in which they were scheduled.

`digest` folds time and number of every event that ran: two runs with equal digests did the same, packet by packet, without a log
of millions of lines.  `log` holds what a person wants to read: connections, losses, faults.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from heapq import heappop, heappush
from typing import Any

import trio


class Clockwork:
    """The heap, the one random generator and the log.  Times are seconds of trio's clock."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.log: list[tuple[Any, ...]] = []
        self.digest = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self._wake: trio.Event | None = None
        self._wakes_at = float("inf")

    def tick(self) -> float:
        """Called by whoever enters from a task: takes over trio's time."""
        self.now = max(self.now, trio.current_time())
        return self.now

    def note(self, kind: str, *what: Any) -> None:
        self.log.append((self.now, kind, *what))

    def at(self, when: float, do: Callable[..., None], *args: Any) -> None:
        """Run `do(*args)` at this time, after everything that was scheduled for it before."""
        self._count += 1
        heappush(self._heap, (when, self._count, do, args))
        if when < self._wakes_at and self._wake is not None:
            self._wake.set()

    def after(self, delay_s: float, do: Callable[..., None], *args: Any) -> None:
        self.at(self.now + delay_s, do, *args)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Events run while this is open.  Nothing moves before and after."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._pump)
            yield
            nursery.cancel_scope.cancel()

    async def _pump(self) -> None:
        heap = self._heap
        while True:
            current = trio.current_time()
            while heap and heap[0][0] <= current:
                when, number, do, args = heappop(heap)
                self.now = max(self.now, when)
                self.digest = hash((self.digest, when, number))
                do(*args)
            self._wake = trio.Event()
            self._wakes_at = heap[0][0] if heap else float("inf")
            with trio.CancelScope(deadline=self._wakes_at):
                await self._wake.wait()
            self._wake, self._wakes_at = None, float("inf")
