"""A line: how far, how fast, how reliable, and how much its routers hold.

A `Bottleneck` is one direction of a line.  It serves whole segments, one connection after the other, as the fair queues of today's
routers do.  First in, first out would let one saturating transfer delay everybody by the whole queue, and what a design does
about that would look better than it is.  A full queue drops what comes last, which the sender sees as loss.

The delay from host to host is the sum of the two lines' delays; jitter is drawn evenly up to `jitter_s` from each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from wire.sim.clockwork import Clockwork

PACKET_BYTES = 1448  # payload of an Ethernet frame with TCP timestamps
SEGMENT_BYTES = 16 * 1024  # what is served, lost and repeated as one: a compromise of detail and Python operations
HEADER_BYTES = 40  # an empty packet


@dataclass(frozen=True, slots=True)
class Link:
    """One host's line.  Rates in bits per second, 0 for unlimited; loss is the chance of each packet of 1448 bytes, each way."""

    delay_s: float = 0.005
    jitter_s: float = 0.0
    up_bps: float = 0.0
    down_bps: float = 0.0
    loss: float = 0.0
    queue_bytes: int = 4 << 20


class Bottleneck:
    """One direction of a line."""

    __slots__ = ("_busy", "_clock", "_queues", "_turns", "bps", "queue_bytes", "queued")

    def __init__(self, clock: Clockwork, bps: float, queue_bytes: int) -> None:
        self._clock = clock
        self.bps = bps
        self.queue_bytes = queue_bytes
        self.queued = 0
        self._busy = False
        self._queues: dict[object, deque[tuple[int, Callable[[Any], None], Any]]] = {}
        self._turns: deque[object] = deque()

    def put(self, flow: object, size: int, then: Callable[[Any], None], what: Any) -> bool:
        """Call `then(what)` when these bytes have passed.  False: the queue is full."""
        if not self.bps and not self._busy:
            then(what)
            return True
        if self.queued + size > self.queue_bytes:
            return False
        self.queued += size
        queue = self._queues.get(flow)
        if queue is None:
            queue = self._queues[flow] = deque()
            self._turns.append(flow)
        queue.append((size, then, what))
        if not self._busy:
            self._next()
        return True

    def _next(self) -> None:
        flow = self._turns.popleft()
        queue = self._queues[flow]
        item = queue.popleft()
        if queue:
            self._turns.append(flow)
        else:
            del self._queues[flow]
        self._busy = True
        self._clock.after(item[0] * 8 / self.bps if self.bps else 0.0, self._served, item)

    def _served(self, item: tuple[int, Callable[[Any], None], Any]) -> None:
        size, then, what = item
        self.queued -= size
        self._busy = False
        if self._turns:
            self._next()
        then(what)
