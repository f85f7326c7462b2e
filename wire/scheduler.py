"""Which record goes next.

Five classes: 0 session frames, 1 control messages, 2 boundary tensors, 3 bulk, 4 background.  The writer asks for one record
at a time and only when its socket takes it, so the choice is made as late as possible: a control message overtakes everything
but the record that is being sent.

* 0 and 1 are strict, but while others wait they get at most `control_share` of the bytes of the last
  `control_share_window_s`, else a peer that asks ten thousand questions a second starves the tensors it is asking about.  The
  window slides over buckets of a tenth. Only control bytes sent *while others waited* count: a connection that talked alone
  owes nothing to the first tensor that comes.
* 2, 3 and 4 share by deficit round robin (Shreedhar and Varghese, SIGCOMM 1995) with weights 16 : 4 : 1.  The size of a
  record is not known before it is made, so a class may send while its deficit is above zero and is charged afterwards: the
  same long-term shares, with a debt instead of a saving.  A class that runs empty keeps neither.
* Inside class 2 the lowest `order` goes first: the oldest microbatch holds up the most work.  Elsewhere, and among equal orders,
  streams take turns a record each.

Considered and left: weighted fair queueing with virtual times (the same shares, a heap operation more a record); a timer that
lets control wait (a clock in the core, latency for nothing when the line is idle).

Items are any hashable objects, here streams.  All operations are O(1), in class 2 O(log n).
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from typing import Generic, TypeVar

from .limits import Limits

T = TypeVar("T")

CONTROL, MESSAGES, TENSORS, BULK, BACKGROUND = range(5)
BUCKETS = 10  # of a control window: the share is exact to a tenth of the window
ROUND_BYTES = 16 << 10  # bytes of weight 1 a round; weight 16 is then one largest record of 256 KiB


class Scheduler(Generic[T]):
    """Ready items by class.  An item is in at most one class and at most once."""

    __slots__ = (
        "_control", "_count", "_data", "_deficit", "_heap", "_live", "_queues", "_ratio", "_slot", "_slot_s", "_ticket",
        "_turn", "_weights", "bulk_waiting",
    )  # fmt: skip

    def __init__(self, limits: Limits) -> None:
        self._queues: tuple[deque[T], ...] = tuple(deque() for _ in range(5))
        self._heap: list[tuple[int, int, T]] = []
        self._live: dict[T, int] = {}  # item -> its ticket; entries of queues and heap with another ticket are stale
        self._ticket = 0
        self._count = [0] * 5
        self.bulk_waiting = 0
        self._weights = (0, 0, *(weight * ROUND_BYTES for weight in limits.class_weights))
        self._deficit = [0] * 5
        self._turn = TENSORS
        # A share of one tenth of all is one ninth of the rest.
        self._ratio = (1.0 - limits.control_share) / limits.control_share
        self._slot_s = limits.control_share_window_s / BUCKETS
        self._slot = 0
        # One bucket more than the window has: the current one is not full yet.
        self._control: deque[int] = deque([0] * (BUCKETS + 1), maxlen=BUCKETS + 1)
        self._data: deque[int] = deque([0] * (BUCKETS + 1), maxlen=BUCKETS + 1)

    def __len__(self) -> int:
        return len(self._live)

    def __bool__(self) -> bool:
        return bool(self._live)

    def push(self, item: T, cls: int, order: int = 0) -> None:
        """Add `item` at the end of its turn; in class 2 an item that is there already takes the new order."""
        known = item in self._live
        if cls == TENSORS:
            self._ticket += 1
            self._live[item] = self._ticket
            heappush(self._heap, (order, self._ticket, item))
        elif known:
            return
        else:
            self._live[item] = 0
            self._queues[cls].append(item)
        if not known:
            self._count[cls] += 1
            self.bulk_waiting += cls >= TENSORS

    def discard(self, item: T, cls: int) -> None:
        """Forget an item that will never be pushed again; its queue entry is skipped later."""
        if self._live.pop(item, None) is not None:
            self._count[cls] -= 1
            self.bulk_waiting -= cls >= TENSORS

    def pop(self, cls: int) -> T:
        """Take the item whose turn it is; push it again if it has more.  Raises IndexError if the class is empty."""
        live = self._live
        if cls == TENSORS:
            heap = self._heap
            while True:
                _, ticket, item = heappop(heap)
                if live.get(item) == ticket:
                    break
        else:
            queue = self._queues[cls]
            while True:
                item = queue.popleft()
                if item in live:
                    break
        del live[item]
        self._count[cls] -= 1
        self.bulk_waiting -= cls >= TENSORS
        return item

    def clear(self) -> None:
        """Forget everything that waits."""
        self._live.clear()
        self._heap.clear()
        for queue in self._queues:
            queue.clear()
        self._count = [0] * 5
        self.bulk_waiting = 0

    def next_class(self, now: float, control: bool) -> int:
        """The class that sends the next record, -1 if nothing waits.  `control`: class 0, kept elsewhere, has something."""
        strict = CONTROL if control else MESSAGES if self._count[MESSAGES] else -1
        if not self.bulk_waiting:
            return strict
        if strict >= 0 and self._control_may(now):
            return strict
        return self._next_bulk()

    def charge(self, cls: int, size: int, now: float) -> None:
        """Account a record of `size` bytes that was sealed."""
        if cls >= TENSORS:
            self._advance(now)
            self._data[-1] += size
            self._deficit[cls] -= size
        elif self.bulk_waiting:
            self._advance(now)
            self._control[-1] += size

    def _advance(self, now: float) -> None:
        slot = int(now / self._slot_s)
        gone = slot - self._slot
        if gone > 0:
            self._slot = slot
            for _ in range(min(gone, BUCKETS + 1)):
                self._control.append(0)
                self._data.append(0)

    def _control_may(self, now: float) -> bool:
        self._advance(now)
        control = sum(self._control)
        return control == 0 or control * self._ratio < sum(self._data)

    def _next_bulk(self) -> int:
        count, deficit = self._count, self._deficit
        cls = self._turn
        if count[cls] == self.bulk_waiting:  # alone: nothing to share
            deficit[TENSORS] = deficit[BULK] = deficit[BACKGROUND] = 0
            return cls
        while not (count[cls] and deficit[cls] > 0):
            if not count[cls]:
                deficit[cls] = 0
            cls = TENSORS if cls == BACKGROUND else cls + 1
            if count[cls]:
                deficit[cls] += self._weights[cls]
        self._turn = cls
        return cls
