"""The life of one microbatch at one replica, as a table.

Everything that changes a microbatch's state is in `TRANSITIONS`; it does not know which stage we are.  The four roles differ
only in which inputs they ever give: the first stage leases instead of receiving, the last stage computes forward, loss and
backward in one job, a lone node is both, and an evaluation microbatch ends after its forward.

Two orders look odd and are real.  The gradient may be here before our own bookkeeping has seen the acknowledgement of the
activation that caused it: both come from the same peer, on streams of different priority.  And a microbatch counts in the
replica's account as soon as its gradient is accumulated, also while the input gradient is still on its way upstream: the
account says what *this* stage's update contains, nothing more.

A missing entry is a bug of this node, never of a peer: peers' lies are refused at the channel, before the ledger.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

FORWARD, BACKWARD = 0, 1
STEP_BITS = 32


class State(Enum):
    """Where a microbatch is at this replica."""

    HERE = auto()  # leased, or its activation has arrived
    FORWARD_RUNS = auto()
    SENDING_FORWARD = auto()  # waits for a slot downstream, or its activation is being sent
    AWAITS_GRADIENT = auto()
    GRADIENT_EARLY = auto()  # the gradient is here, the send is not yet acknowledged
    GRADIENT_HERE = auto()
    BACKWARD_RUNS = auto()
    SENDING_BACKWARD = auto()  # accumulated; the input gradient goes upstream
    DONE = auto()


class Input(Enum):
    """What can happen to a microbatch."""

    START_FORWARD = auto()
    ACTIVATION_READY = auto()  # forward done, there is a stage after us
    SENT_FORWARD = auto()
    GRADIENT_ARRIVED = auto()
    START_BACKWARD = auto()
    ACCUMULATED = auto()  # backward done (on the last stage: forward, loss and backward), there is a stage before us
    ACCUMULATED_AT_SOURCE = auto()  # the same, on the first stage: nothing goes upstream
    EVALUATED = auto()  # the forward of an evaluation microbatch ended on the last stage
    SENT_BACKWARD = auto()
    SENT_EVALUATION = auto()


S, I = State, Input  # noqa: E741 - the table below is read as a table
TRANSITIONS: dict[tuple[State, Input], State] = {
    (S.HERE, I.START_FORWARD): S.FORWARD_RUNS,
    (S.FORWARD_RUNS, I.ACTIVATION_READY): S.SENDING_FORWARD,
    (S.FORWARD_RUNS, I.ACCUMULATED): S.SENDING_BACKWARD,
    (S.FORWARD_RUNS, I.ACCUMULATED_AT_SOURCE): S.DONE,
    (S.FORWARD_RUNS, I.EVALUATED): S.DONE,
    (S.SENDING_FORWARD, I.SENT_FORWARD): S.AWAITS_GRADIENT,
    (S.SENDING_FORWARD, I.SENT_EVALUATION): S.DONE,
    (S.SENDING_FORWARD, I.GRADIENT_ARRIVED): S.GRADIENT_EARLY,
    (S.GRADIENT_EARLY, I.SENT_FORWARD): S.GRADIENT_HERE,
    (S.AWAITS_GRADIENT, I.GRADIENT_ARRIVED): S.GRADIENT_HERE,
    (S.GRADIENT_HERE, I.START_BACKWARD): S.BACKWARD_RUNS,
    (S.BACKWARD_RUNS, I.ACCUMULATED): S.SENDING_BACKWARD,
    (S.BACKWARD_RUNS, I.ACCUMULATED_AT_SOURCE): S.DONE,
    (S.SENDING_BACKWARD, I.SENT_BACKWARD): S.DONE,
}
COUNTED_BY = frozenset({I.ACCUMULATED, I.ACCUMULATED_AT_SOURCE, I.EVALUATED, I.SENT_EVALUATION})
"""The inputs that put a microbatch into the replica's account for its step."""


@dataclass(frozen=True, slots=True, order=True)
class Microbatch:
    """The unit that flows: number `index` of step `step`, drawn by the origin of rank `origin`.

    Ordered by age: older steps and lower indices first.  `index` below the manifest's microbatches a step is training;
    from there on it is held-out evaluation `index - microbatches`.
    """

    step: int
    index: int
    origin: int

    def key(self, generation: int, boundary: int, direction: int) -> tuple[int, ...]:
        """The at-most-once key on the wire (wire.md, section 11): (era, boundary, index, origin, direction)."""
        return (era(generation, self.step), boundary, self.index, self.origin, direction)

    @staticmethod
    def from_key(key: tuple[object, ...]) -> tuple[int, int, int, Microbatch]:
        """`(generation, boundary, direction, microbatch)` of a key, or ValueError when it is not one of ours."""
        if len(key) != 5:
            raise ValueError(f"not a microbatch key: {key!r}")
        numbers = [part for part in key if type(part) is int and 0 <= part < 1 << 53]
        if len(numbers) != 5:
            raise ValueError(f"not a microbatch key: {key!r}")
        when, boundary, index, origin, direction = numbers
        if direction not in (FORWARD, BACKWARD):
            raise ValueError(f"not a direction: {direction}")
        return when >> STEP_BITS, boundary, direction, Microbatch(when & (1 << STEP_BITS) - 1, index, origin)


def era(generation: int, step: int) -> int:
    """Generation and step as one number that only grows: a new generation may go back to an older step, and the table of delivered
    keys forgets by the lowest number.  32 bits of step, 21 of generation, as one exact integer of 53 bits."""
    return generation << STEP_BITS | step
