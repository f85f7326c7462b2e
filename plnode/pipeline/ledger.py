"""The microbatch ledger of one replica: what is under way, what this replica's account of a step contains.

Sans-IO.  The invariant of exact mode (training.md, section 3) rests on two facts that are kept here and nowhere else: a
microbatch moves only along `microbatch.TRANSITIONS`, and its gradient is counted once, at the moment it was accumulated on the
device.  Losses are kept by index so that the loss of a step is summed in index order, whatever the number of replicas: sums in
arrival order would differ in the last bits between two runs of one seed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from plnode.pipeline.microbatch import COUNTED_BY, TRANSITIONS, Input, Microbatch, State


class LedgerError(Exception):
    """This node broke its own rules; the step cannot be trusted and must be aborted."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The fixed set of one step: `train` microbatches, then `evaluate` held-out ones (indices follow on)."""

    step: int
    train: int
    evaluate: int = 0

    @property
    def total(self) -> int:
        return self.train + self.evaluate

    def is_training(self, index: int) -> bool:
        return index < self.train


@dataclass(slots=True)
class Account:
    """What one replica has done for one step: index -> summed loss (0.0 where this stage has no loss)."""

    losses: dict[int, float] = field(default_factory=dict)

    @property
    def indices(self) -> tuple[int, ...]:
        return tuple(sorted(self.losses))


@dataclass(slots=True)
class Counts:
    """Totals since the node started; `lost` are microbatches whose work a broken generation threw away."""

    done: int = 0
    evaluated: int = 0
    lost: int = 0


class Ledger:
    """All microbatches that this replica has seen in the current generation of the run."""

    def __init__(self) -> None:
        self._states: dict[Microbatch, State] = {}
        self._accounts: dict[int, Account] = {}
        self._committed = -1
        self.counts = Counts()

    def admit(self, microbatch: Microbatch, plan: StepPlan) -> None:
        """Take a leased or received microbatch.  LedgerError: outside the step's set, already here, or step already committed."""
        if microbatch.step != plan.step or not 0 <= microbatch.index < plan.total:
            raise LedgerError(f"microbatch {microbatch} is not in the set of step {plan.step} ({plan.total} microbatches)")
        if microbatch.step <= self._committed:
            raise LedgerError(f"step {microbatch.step} is committed; {microbatch} came too late")
        if microbatch in self._states:
            raise LedgerError(f"{microbatch} is already here ({self._states[microbatch].name})")
        self._states[microbatch] = State.HERE

    def apply(self, microbatch: Microbatch, happened: Input, loss_sum: float = 0.0) -> State:
        """Move a microbatch along the table and count it when `happened` says that its gradient is in the account."""
        state = self._states.get(microbatch)
        after = TRANSITIONS.get((state, happened)) if state is not None else None
        if after is None:
            raise LedgerError(f"{microbatch}: {happened.name} cannot follow {state.name if state else 'nothing'}")
        self._states[microbatch] = after
        if happened in COUNTED_BY:
            account = self._accounts.setdefault(microbatch.step, Account())
            if microbatch.index in account.losses:
                raise LedgerError(f"{microbatch} would be counted twice")
            account.losses[microbatch.index] = loss_sum
        return after

    def state(self, microbatch: Microbatch) -> State | None:
        return self._states.get(microbatch)

    def account(self, step: int) -> Account:
        """This replica's account of `step`; empty when it has done nothing for it."""
        return self._accounts.get(step, Account())

    def under_way(self) -> dict[Microbatch, State]:
        """Every microbatch that is not done, oldest first: what a stuck node says it waits for."""
        return {m: s for m, s in sorted(self._states.items()) if s is not State.DONE}

    def commit(self, plan: StepPlan) -> None:
        """The step is applied: forget its microbatches.  One that is still sending its input gradient may go on; any other is a bug."""
        for microbatch, state in list(self._states.items()):
            if microbatch.step != plan.step:
                continue
            if state not in (State.DONE, State.SENDING_BACKWARD):
                raise LedgerError(f"step {plan.step} was committed with {microbatch} in {state.name}")
            if state is State.DONE:
                del self._states[microbatch]
        for index in self._accounts.pop(plan.step, Account()).losses:
            if plan.is_training(index):
                self.counts.done += 1
            else:
                self.counts.evaluated += 1
        self._committed = plan.step

    def settle(self, microbatch: Microbatch) -> None:
        """Drop a microbatch of a committed step once it is done (its gradient has reached the replica before us)."""
        if microbatch.step <= self._committed and self._states.get(microbatch) is State.DONE:
            del self._states[microbatch]

    def abort(self) -> int:
        """The generation is over: forget everything, return and count how many microbatches' work is thrown away."""
        thrown_away = {(m.step, m.index) for m in self._states if m.step > self._committed}
        thrown_away |= {(step, index) for step, account in self._accounts.items() for index in account.losses}
        lost = len(thrown_away)
        self._states.clear()
        self._accounts.clear()
        self._committed = -1
        self.counts.lost += lost
        return lost
