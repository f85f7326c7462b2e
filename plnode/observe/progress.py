"""How fast the run goes as this node sees it: tokens a second and the time that is left.

Rates are over the last steps only, as walls between one step's end and the next, so that waiting is part of them: a run that
stands still shows it.  The first step of a generation is not counted; it contains the building of the stage.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

_STEPS = 12  # steps that count: a few seconds of a small run, some minutes of a large one


class Progress:
    """Steps done and their pace.  `clock` is monotonic seconds."""

    def __init__(self, tokens_per_step: int, steps: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._tokens = tokens_per_step
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=_STEPS + 1)
        self.steps = steps
        self.step = 0
        self.loss: float | None = None

    def begin(self, step: int) -> None:
        """A generation starts at `step`."""
        self._ends.clear()
        self.step = step

    def done(self, step: int, loss: float | None) -> None:
        """Step number `step` has been applied; `loss` where it is known."""
        self.step = step + 1
        self._ends.append(self._clock())
        if loss is not None:
            self.loss = loss

    @property
    def seconds_per_step(self) -> float | None:
        """Mean over the last steps, the time since the last one included when it is longer than they were."""
        if len(self._ends) < 2:
            return None
        mean = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return max(mean, self._clock() - self._ends[-1])

    @property
    def tokens_per_s(self) -> float:
        pace = self.seconds_per_step
        return self._tokens / pace if pace else 0.0

    @property
    def eta_s(self) -> float | None:
        pace = self.seconds_per_step
        return None if pace is None else pace * max(0, self.steps - self.step)
