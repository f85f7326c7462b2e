"""The account of the open step: which contributions the gradients hold, and whether they may be trusted.

A replica's update is only as good as its book-keeping.  What can go wrong, and what each state means:

* A microbatch is counted twice (a replay meets the original): refused, ``AlreadyCounted``.
* A contribution was not finite *before* it was added: it is left out and written down as void; if the same microbatch comes again
  and is finite, the mark is removed.  As long as one is void the step is skipped and an export holds NaN.
* It turned out not to be finite *while* it was added: the sum is spoilt, the same consequence, no remedy but the next step.
* An error (out of memory) came in the middle of a backward: some parameters have the contribution and some do not.  The account
  is torn; nothing may be added, exported or applied before the step is discarded.
* The round's result has replaced the sum: later contributions would be added to a mean.  Refused until the step is applied.
"""

from __future__ import annotations

from .errors import AccountClosed, AlreadyCounted
from .jobs import Microbatch, NonFinite


class GradientAccount:
    """Book-keeping of one step.  Device thread only, except ``counted``, which is replaced as a whole."""

    def __init__(self) -> None:
        self.counted: frozenset[Microbatch] = frozenset()
        self.void: dict[Microbatch, NonFinite] = {}
        self.spoilt: NonFinite | None = None
        self.torn = False
        self.imported = False

    @property
    def seen(self) -> int:
        """Contributions that were added or found void: how far the step is in index order."""
        return len(self.counted.union(self.void))

    @property
    def nonfinite(self) -> NonFinite | None:
        """Why the sum gathered here cannot be applied, if it cannot."""
        return self.spoilt or next(iter(self.void.values()), None)

    def check_open(self, microbatch: Microbatch) -> None:
        """Raise unless a contribution of ``microbatch`` may be added now."""
        self.check_whole()
        if self.imported:
            raise AccountClosed("the gradients of this step were replaced by the result of a round; nothing can be added")
        if microbatch in self.counted:
            raise AlreadyCounted(f"microbatch {microbatch} was added before")

    def check_whole(self) -> None:
        """Raise if an error left part of a contribution in the sum."""
        if self.torn:
            raise AccountClosed("an error interrupted a backward, the gradients are incomplete: discard this step")

    def add(self, microbatch: Microbatch) -> None:
        """A contribution has been added."""
        self.counted |= {microbatch}
        self.void.pop(microbatch, None)

    def leave_out(self, microbatch: Microbatch, why: NonFinite) -> None:
        """A contribution was not finite and has not been added."""
        self.void[microbatch] = why
