"""Which job the device does next: a pure function of the queued jobs and the moment.

The device is one; jobs come from many peers in any order.  What can go wrong:

* A forward of step t+1 that runs before step t was applied uses old weights, silently.  So a microbatch job runs only while its
  step is the open one; a later one waits, an earlier one is refused as stale (its gradient could only land in the wrong update).
* A step, an export, an import or a snapshot must see whole work: the microbatch jobs of the open step that were submitted before
  it run first, those submitted after it run after it.  Such a job is a *barrier*; barriers keep their order among themselves.
* A barrier must not wait for what cannot come: a forward of step t+1 submitted before the barrier of step t does not hold it up.
* Forwards before backwards pile up graphs until memory ends.  Running a backward frees a graph and lets every stage upstream go
  on, so by default backwards go first (one-forward-one-backward; Narayanan et al. 2021, "PipeDream-Flush", arXiv:2104.04473);
  ``BackwardFirst.WHEN_TIGHT`` goes by age alone until the budget says that one more graph would not fit.
* Within a kind the oldest microbatch goes first: ``(step, index)``, then the order of submission.  A late microbatch is what the
  whole swarm waits for at the end of a step.

Floating-point sums depend on their order.  A lone replica of its stage owns every microbatch of a step and can be equal to one
process to the bit if it adds contributions in index order: ``in_index_order`` holds an accumulating job back until its
predecessor has been added.  When a barrier is queued the gap cannot fill any more (later submissions wait for the barrier), so
the hold ends there; a wrong order costs the last bits of a sum, a wait would cost the run.  For the same reason it is only for
runs with one replica a stage: there everything comes in index order anyhow, save for a race now and then.  With several
replicas upstream, younger microbatches could hold the slots that the awaited one needs to come through.

``DISCARD`` is the barrier that aborts a step: microbatch jobs before it are refused instead of run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto


class Kind(Enum):
    """What a job does.  The first four belong to a microbatch, the others are barriers."""

    FORWARD = auto()
    BACKWARD = auto()
    EVALUATE = auto()
    FORGET = auto()
    EXPORT = auto()
    IMPORT = auto()
    STEP = auto()
    DISCARD = auto()
    SNAPSHOT = auto()
    RESTORE = auto()
    DIGEST = auto()


MICROBATCH_KINDS = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.EVALUATE, Kind.FORGET})

# Rank within the open step.  FORGET frees memory and costs nothing; EVALUATE is wanted by people, not by other stages' gradients.
_BACKWARD_FIRST = {Kind.FORGET: 0, Kind.BACKWARD: 1, Kind.FORWARD: 2, Kind.EVALUATE: 3}
_BY_AGE = {Kind.FORGET: 0, Kind.BACKWARD: 1, Kind.FORWARD: 1, Kind.EVALUATE: 3}
_TIE = {Kind.FORGET: 0, Kind.BACKWARD: 1, Kind.FORWARD: 2, Kind.EVALUATE: 3}


class BackwardFirst(Enum):
    """When a backward overtakes an older forward."""

    ALWAYS = auto()
    WHEN_TIGHT = auto()


class Verdict(Enum):
    """What becomes of the chosen job."""

    RUN = auto()
    STALE = auto()  # its step was applied before
    DISCARDED = auto()  # its step is being discarded


@dataclass(frozen=True, slots=True)
class JobView:
    """What the policy sees of a job.  ``sequence`` ascends with submission; ``step`` and ``index`` are 0 for barriers."""

    sequence: int
    kind: Kind
    step: int = 0
    index: int = 0

    @property
    def barrier(self) -> bool:
        return self.kind not in MICROBATCH_KINDS


@dataclass(frozen=True, slots=True)
class Moment:
    """State of the device that the order depends on."""

    open_step: int  # the step whose gradients are being gathered; number of steps applied if they count from 0
    accumulated: int = 0  # contributions added to the open step; the next one in index order
    tight: bool = False  # one more kept graph would not fit the budget


@dataclass(frozen=True, slots=True)
class Order:
    """Configuration of the order."""

    backward_first: BackwardFirst = BackwardFirst.ALWAYS
    in_index_order: bool = False  # only where every stage has one replica
    forward_accumulates: bool = False  # the last stage runs forward and backward in one job


@dataclass(frozen=True, slots=True)
class Decision:
    job: JobView
    verdict: Verdict = Verdict.RUN


def choose(jobs: Iterable[JobView], moment: Moment, order: Order) -> Decision | None:
    """The next job and what to do with it, or None when every queued job waits for one that is not there yet.  O(jobs)."""
    queued = list(jobs)
    barrier = min((job for job in queued if job.barrier), key=lambda job: job.sequence, default=None)
    ready = []
    for job in queued:
        if job.barrier or (barrier is not None and job.sequence > barrier.sequence):
            continue
        if job.step < moment.open_step and job.kind is not Kind.FORGET:
            return Decision(job, Verdict.STALE)
        if barrier is not None and barrier.kind is Kind.DISCARD and job.step == moment.open_step:
            return Decision(job, Verdict.DISCARDED)
        if job.step <= moment.open_step:
            ready.append(job)
    if order.in_index_order and barrier is None:
        ready = [job for job in ready if not _accumulates(job, order) or job.index <= moment.accumulated]
    if ready:
        return Decision(min(ready, key=lambda job: _age(job, moment, order)))
    return None if barrier is None else Decision(barrier)


def _accumulates(job: JobView, order: Order) -> bool:
    return job.kind is Kind.BACKWARD or (job.kind is Kind.FORWARD and order.forward_accumulates)


def _age(job: JobView, moment: Moment, order: Order) -> tuple[int, int, int, int, int]:
    first = order.backward_first is BackwardFirst.ALWAYS or moment.tight
    rank = (_BACKWARD_FIRST if first else _BY_AGE)[job.kind]
    return (rank, job.step, job.index, _TIE[job.kind], job.sequence)
