"""What the runner hands back: results, findings, counters.

All frozen, made on the device thread and read on the loop.  Buffers in them are lent from the runner's pool: whoever awaits the
result owns them and gives them back with ``runner.release`` (``payload`` and ``gradient`` each).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

Microbatch = tuple[int, int]  # (step, index)


class Where(Enum):
    """Where a value that is not finite was seen, which says who produced it."""

    INPUT = auto()  # in the activation received: the stage before us or one before it
    OUTPUT = auto()  # in our activation, from a finite input: this node, its weights or the data
    LOSS = auto()  # in the loss, from a finite input: this node, the last stage
    GRADIENT_IN = auto()  # in the gradient received: a stage after us
    GRADIENT_OUT = auto()  # in our gradient, from finite tensors: this node
    ACCOUNT = auto()  # in the accumulated gradients before the step; names say which parameters


@dataclass(frozen=True, slots=True)
class NonFinite:
    """A NaN or infinity, and where it was first seen here."""

    where: Where
    names: tuple[str, ...] = ()  # of parameters, for ACCOUNT

    def __str__(self) -> str:
        return f"not finite: {self.where.name.lower().replace('_', ' ')} {', '.join(self.names)}".rstrip()


class Ready:
    """How many bytes from the front of a payload are final.  Lives on the loop; the device layer moves it on.

    On the CPU a payload is complete when its job is.  ``watch`` calls back once with what is ready now and then at every advance.
    """

    __slots__ = ("_callbacks", "ready_bytes", "total_bytes")

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.ready_bytes = 0
        self._callbacks: list[Callable[[int], None]] = []

    @property
    def complete(self) -> bool:
        return self.ready_bytes == self.total_bytes

    def watch(self, callback: Callable[[int], None]) -> None:
        """Call ``callback(ready_bytes)`` now and at each advance."""
        self._callbacks.append(callback)
        callback(self.ready_bytes)

    def advance(self, ready_bytes: int) -> None:
        """On the loop: ``ready_bytes`` from the front are final.  Never goes back."""
        if ready_bytes > self.ready_bytes:
            self.ready_bytes = ready_bytes
            for callback in self._callbacks:
                callback(ready_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forwarded:
    """A forward, or on the last stage forward, loss and backward."""

    payload: memoryview | None  # for the stage after us; None on the last one
    ready: Ready | None  # progress of ``payload`` or ``gradient``, whichever there is
    gradient: memoryview | None  # for the stage before us; only the last stage has it here
    loss_sum: float | None  # sum over the tokens; only on the last stage
    seconds: float
    kept_graph: bool
    finite: bool = True
    nonfinite: NonFinite | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward:
    """A backward.  If not finite, nothing was added to the account and ``payload`` holds what came out all the same, so that
    every stage upstream learns of it and the step is skipped by all of them."""

    payload: memoryview | None  # for the stage before us; None on the first one
    ready: Ready | None
    seconds: float
    finite: bool
    recomputed: bool
    nonfinite: NonFinite | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What an export wrote."""

    account: tuple[Microbatch, ...]  # contributions in it, ascending
    nonfinite: NonFinite | None  # if set, the vector holds NaN: no partner can take it for a sum


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """An optimizer step.  If skipped, weights and optimizer state are as before and the step counts as applied."""

    grad_norm: float
    seconds: float
    skipped_nonfinite: bool
    nonfinite: NonFinite | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Totals since the runner opened, and gauges of now."""

    forwards: int = 0
    backwards: int = 0
    evaluations: int = 0
    steps: int = 0
    steps_skipped: int = 0
    graphs_kept: int = 0  # decisions to keep
    graphs_recomputed: int = 0  # backwards that repeated their forward
    live_microbatches: int = 0  # between forward and backward
    live_graph_bytes: int = 0
    graph_estimate_bytes: int = 0  # largest measured graph of one microbatch
    queued_jobs: int = 0
    pool_lent: int = 0
    pool_bytes: int = 0
    busy_s: float = 0.0  # time in jobs
