"""What the process has promised to hold: bytes that peers may send and that nobody has read.

A window is a promise.  Five hundred connections of 64 MiB promise 32 GiB, and the peers that call it in choose the moment: the
process dies although each connection kept its own limit.  So the promises are added up in one place, and a connection's window
is reserved here before it is announced.  Streams need no reservation of their own: what they hold is counted by the window of
their connection.

Shortage comes in three steps, the mildest first:

1. Above `GROW_BELOW` of the total nothing grows.  The rest stays free for connections that come later: if those that came first
   could grow into all of it, their comfort would cost another peer its connection.
2. Above `SHRINK_ABOVE` a window falls back to its start size as it is renewed (flow.py says why not sooner).
3. `reserve` returns None: the new connection is refused with RESOURCE_LIMIT, which is retryable.

Growth alone never comes to step 2, so windows do not swing between growing and shrinking.

Sans-IO and not thread-safe: one budget belongs to one event loop.  How much memory the machine has is an argument.
"""

from __future__ import annotations

from types import TracebackType

from .limits import Limits

RAM_SHARE = 4  # a quarter of the memory: the rest is for the model, which is what the machine is here for
GROW_BELOW = 0.75
SHRINK_ABOVE = 0.875


def unread_total(ram_bytes: int, limits: Limits) -> int:
    """The total of a process's budget in bytes: a quarter of the memory, or `unread_budget_bytes`, whichever is less."""
    return max(1, min(ram_bytes // RAM_SHARE, limits.unread_budget_bytes))


class UnreadBudget:
    """`total` bytes may be promised, `used` are; `reservations` are open, `refused` could not be made so far."""

    __slots__ = ("refused", "reservations", "total", "used")

    def __init__(self, total_bytes: int) -> None:
        if total_bytes <= 0:
            raise ValueError(f"a budget of {total_bytes} bytes")
        self.total = total_bytes
        self.used = 0
        self.reservations = 0
        self.refused = 0

    def reserve(self, size: int) -> Reservation | None:
        """Promise `size` bytes; None, with nothing changed but the count, if there are not so many left."""
        if size < 0:
            raise ValueError(f"a reservation of {size} bytes")
        if self.used + size > self.total:
            self.refused += 1
            return None
        self.used += size
        self.reservations += 1
        return Reservation(self, size)

    @property
    def growing(self) -> bool:
        """Whether windows may grow at all."""
        return self.used < self.total * GROW_BELOW

    @property
    def short(self) -> bool:
        """Whether windows shall fall back to their start size."""
        return self.used > self.total * SHRINK_ABOVE

    def gauges(self) -> dict[str, int]:
        """Bytes and counts; used and open are 0 when no connection is left."""
        return {
            "unread_total_bytes": self.total,
            "unread_reserved_bytes": self.used,
            "unread_reservations": self.reservations,
            "unread_refused": self.refused,
        }


class Reservation:
    """A part of the budget.  `release` it exactly when nothing can arrive any more; twice is as good as once."""

    __slots__ = ("_budget", "_open", "size")

    def __init__(self, budget: UnreadBudget, size: int) -> None:
        self._budget = budget
        self._open = True
        self.size = size

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()

    @property
    def growing(self) -> bool:
        """Whether the budget lets windows grow."""
        return self._open and self._budget.growing

    @property
    def short(self) -> bool:
        """Whether the budget wants windows back."""
        return self._budget.short

    def grow(self, size: int) -> bool:
        """Enlarge it to `size` bytes, if windows may grow that far; False, with nothing changed, if not."""
        return self._enlarge(size, self._budget.total * GROW_BELOW)

    def extend(self, size: int) -> bool:
        """As `grow`, up to all of the budget: for a start window, not for comfort."""
        return self._enlarge(size, self._budget.total)

    def shrink(self, size: int) -> None:
        """Give back what is above `size` bytes."""
        if self._open and size < self.size:
            self._budget.used -= self.size - size
            self.size = size

    def release(self) -> None:
        """Give everything back."""
        if self._open:
            self._open = False
            self._budget.used -= self.size
            self._budget.reservations -= 1
            self.size = 0

    def _enlarge(self, size: int, most: float) -> bool:
        more = size - self.size
        if not self._open or (more > 0 and self._budget.used + more > most):
            return False
        if more > 0:
            self._budget.used += more
            self.size = size
        return True
