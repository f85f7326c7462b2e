"""The order of jobs: a table for each rule, and hypothesis for what must hold for every set of jobs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plnode.stage.policy import MICROBATCH_KINDS, BackwardFirst, Decision, JobView, Kind, Moment, Order, Verdict, choose

F, B, E, X, S, D = Kind.FORWARD, Kind.BACKWARD, Kind.EVALUATE, Kind.EXPORT, Kind.STEP, Kind.DISCARD
AGE = Order(backward_first=BackwardFirst.WHEN_TIGHT)
LONE_LAST = Order(in_index_order=True, forward_accumulates=True)
LONE = Order(in_index_order=True)


def jobs(*specs):
    return [JobView(sequence, *spec) for sequence, spec in enumerate(specs)]


@pytest.mark.parametrize(
    ("specs", "moment", "order", "position", "verdict"),
    [
        # the oldest microbatch first, whatever came first
        ([(F, 0, 2), (F, 0, 1)], Moment(0), Order(), 1, Verdict.RUN),
        # a backward before an older forward ...
        ([(F, 0, 1), (B, 0, 2)], Moment(0), Order(), 1, Verdict.RUN),
        # ... by age alone if so configured, until memory is tight; at the same age the backward
        ([(F, 0, 1), (B, 0, 2)], Moment(0), AGE, 0, Verdict.RUN),
        ([(F, 0, 1), (B, 0, 2)], Moment(0, tight=True), AGE, 1, Verdict.RUN),
        ([(F, 0, 1), (B, 0, 1)], Moment(0), AGE, 1, Verdict.RUN),
        # training before evaluation
        ([(E, 0, 0), (F, 0, 5)], Moment(0), Order(), 1, Verdict.RUN),
        # a forward of the next step waits
        ([(F, 1, 0)], Moment(0), Order(), None, None),
        ([(E, 1, 0)], Moment(0), Order(), None, None),
        # and does not hold up the step's barrier, although it came first
        ([(F, 1, 0), (S,)], Moment(0), Order(), 1, Verdict.RUN),
        # the barrier waits for what came before it
        ([(F, 0, 3), (S,)], Moment(0), Order(), 0, Verdict.RUN),
        # and nothing that came after overtakes it
        ([(X,), (B, 0, 0)], Moment(0), Order(), 0, Verdict.RUN),
        # barriers among themselves in order
        ([(X,), (S,)], Moment(0), Order(), 0, Verdict.RUN),
        # too late
        ([(F, 0, 0), (F, 1, 0)], Moment(1), Order(), 0, Verdict.STALE),
        # a discard refuses the step's jobs that came before it, then runs; a later step's job stays
        ([(B, 0, 0), (D,)], Moment(0), Order(), 0, Verdict.DISCARDED),
        ([(F, 1, 0), (D,)], Moment(0), Order(), 1, Verdict.RUN),
        # but an earlier barrier is not refused
        ([(B, 0, 0), (X,), (D,)], Moment(0), Order(), 0, Verdict.RUN),
        # in index order a gap is waited for ...
        ([(B, 0, 1)], Moment(0, accumulated=0), LONE, None, None),
        ([(B, 0, 1)], Moment(0, accumulated=1), LONE, 0, Verdict.RUN),
        ([(F, 0, 1)], Moment(0, accumulated=0), LONE_LAST, None, None),
        # ... while a forward that adds nothing goes on, and no longer than until a barrier is there
        ([(F, 0, 1), (B, 0, 2)], Moment(0), LONE, 0, Verdict.RUN),
        ([(B, 0, 2), (B, 0, 1), (X,)], Moment(0), LONE, 1, Verdict.RUN),
        ([], Moment(0), Order(), None, None),
    ],
)
def test_order(specs, moment, order, position, verdict):
    queued = jobs(*specs)
    expected = None if position is None else Decision(queued[position], verdict)
    assert choose(queued, moment, order) == expected
    assert choose(list(reversed(queued)), moment, order) == expected  # the set counts, not how it is listed


SPECS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(sorted(MICROBATCH_KINDS, key=lambda k: k.name)), st.integers(0, 3), st.integers(0, 3)),
        st.tuples(st.sampled_from([Kind.EXPORT, Kind.IMPORT, Kind.STEP, Kind.SNAPSHOT, Kind.DISCARD])),
    ),
    max_size=14,
)
ORDERS = st.builds(Order, st.sampled_from(BackwardFirst), st.booleans(), st.booleans())


@settings(max_examples=300, deadline=None)
@given(SPECS, ORDERS, st.lists(st.integers(0, 3), max_size=14), st.booleans())
def test_every_run_of_the_policy(specs, order, arrivals, tight):
    """Jobs come in bursts and are worked off; a STEP opens the next step.  Then: nothing runs outside its step, barriers see
    exactly what came before them, and what is left waits for a step that has not come or for an index that has not."""
    coming, queued, ran = jobs(*specs), [], []
    open_step = accumulated = 0
    for burst in [*arrivals, len(coming)]:
        queued, coming = queued + coming[:burst], coming[burst:]
        while (decision := choose(queued, Moment(open_step, accumulated, tight), order)) is not None:
            job = decision.job
            queued.remove(job)
            earlier = [q for q in queued if q.sequence < job.sequence]
            barrier_before = [q for q in earlier if q.barrier]
            assert not barrier_before
            if decision.verdict is Verdict.STALE:
                assert job.step < open_step
            elif decision.verdict is Verdict.DISCARDED:
                assert job.step == open_step and any(q.kind is Kind.DISCARD and q.sequence > job.sequence for q in queued)
            elif job.barrier:
                assert all(q.step > open_step for q in earlier)
            else:
                assert job.step == open_step or job.kind is Kind.FORGET
                if job.kind is not Kind.FORGET:
                    same = [q for q in queued if q.kind is job.kind and q.step == job.step and q.index < job.index]
                    first_barrier = min((q.sequence for q in queued if q.barrier), default=None)
                    assert all(first_barrier is not None and q.sequence > first_barrier for q in same)
                    accumulated += job.kind is Kind.BACKWARD or (job.kind is Kind.FORWARD and order.forward_accumulates)
            if job.kind is Kind.STEP:
                open_step, accumulated = open_step + 1, 0
            if job.kind is Kind.DISCARD:
                accumulated = 0
            ran.append(job)
    assert not any(job.barrier for job in queued)
    for job in queued:
        assert job.step > open_step or (order.in_index_order and job.index > accumulated)
