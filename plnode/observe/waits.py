"""What a node waits for right now, and since when: one cause at a time, said once, also in `plnode status`.

`Recorder` drops repeated complaints; this keeps the *current* one, so that a new cause ends the old one and the screen can say
since when.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from plnode.observe.events import Waiting, WaitingOver
from plnode.observe.recorder import Recorder


class Waits:
    """The current reason why this node is idle.  `clock` is monotonic seconds."""

    def __init__(self, recorder: Recorder, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._recorder = recorder
        self._clock = clock
        self.what: str | None = None
        self.detail = ""
        self._since = 0.0

    @property
    def since_s(self) -> float | None:
        """Seconds since the node waits for this cause."""
        return self._clock() - self._since if self.what is not None else None

    @property
    def text(self) -> str | None:
        return f"{self.what}: {self.detail}" if self.what is not None and self.detail else self.what

    def waiting(self, what: str, detail: str) -> None:
        """The node cannot go on because of `what`; `detail` may change without the time starting anew."""
        if what != self.what:
            self.over()
            self._since = self._clock()
        self.what = what
        self.detail = detail
        self._recorder.emit(Waiting(what, detail))

    def over(self) -> None:
        """Whatever it was, it is over."""
        if self.what is not None:
            self._recorder.emit(WaitingOver(self.what))
        self.what = None
        self.detail = ""
