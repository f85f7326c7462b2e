"""The ledger: a step's set, accounts, commit, abort."""

from __future__ import annotations

import pytest

from plnode.pipeline.ledger import Ledger, LedgerError, StepPlan
from plnode.pipeline.microbatch import Input, Microbatch

PLAN = StepPlan(4, train=2, evaluate=1)


def train_last(ledger: Ledger, microbatch: Microbatch, loss: float) -> None:
    ledger.admit(microbatch, PLAN)
    ledger.apply(microbatch, Input.START_FORWARD)
    ledger.apply(microbatch, Input.ACCUMULATED, loss)


def test_a_step_from_admission_to_commit() -> None:
    ledger = Ledger()
    first, second, held_out = (Microbatch(4, i, 0) for i in range(3))
    train_last(ledger, second, 2.0)
    train_last(ledger, first, 1.0)
    ledger.admit(held_out, PLAN)
    ledger.apply(held_out, Input.START_FORWARD)
    ledger.apply(held_out, Input.EVALUATED, 5.0)
    assert ledger.account(4).indices == (0, 1, 2)
    assert ledger.account(4).losses == {0: 1.0, 1: 2.0, 2: 5.0}
    ledger.apply(first, Input.SENT_BACKWARD)
    ledger.commit(PLAN)
    assert list(ledger.under_way()) == [second], "its input gradient is still on its way"
    ledger.apply(second, Input.SENT_BACKWARD)
    ledger.settle(second)
    assert not ledger.under_way()
    assert (ledger.counts.done, ledger.counts.evaluated, ledger.counts.lost) == (2, 1, 0)


@pytest.mark.parametrize("wrong", [Microbatch(5, 0, 0), Microbatch(4, 3, 0), Microbatch(3, 0, 0)])
def test_a_microbatch_outside_the_set_is_refused(wrong: Microbatch) -> None:
    with pytest.raises(LedgerError, match="not in the set"):
        Ledger().admit(wrong, PLAN)


def test_a_microbatch_is_admitted_once_and_counted_once() -> None:
    ledger = Ledger()
    train_last(ledger, Microbatch(4, 0, 0), 1.0)
    with pytest.raises(LedgerError, match="already here"):
        ledger.admit(Microbatch(4, 0, 0), PLAN)
    twin = Microbatch(4, 0, 1)  # the same index from another origin: somebody leased it twice
    ledger.admit(twin, PLAN)
    ledger.apply(twin, Input.START_FORWARD)
    with pytest.raises(LedgerError, match="counted twice"):
        ledger.apply(twin, Input.ACCUMULATED, 1.0)


def test_a_step_is_not_committed_over_unfinished_work_nor_reopened() -> None:
    ledger = Ledger()
    ledger.admit(Microbatch(4, 0, 0), PLAN)
    with pytest.raises(LedgerError, match="committed with"):
        ledger.commit(PLAN)
    ledger.apply(Microbatch(4, 0, 0), Input.START_FORWARD)
    ledger.apply(Microbatch(4, 0, 0), Input.ACCUMULATED)
    ledger.commit(PLAN)
    with pytest.raises(LedgerError, match="came too late"):
        ledger.admit(Microbatch(4, 1, 0), PLAN)


def test_an_input_out_of_order_changes_nothing() -> None:
    ledger = Ledger()
    microbatch = Microbatch(4, 0, 0)
    ledger.admit(microbatch, PLAN)
    before = ledger.state(microbatch)
    with pytest.raises(LedgerError, match="cannot follow"):
        ledger.apply(microbatch, Input.SENT_BACKWARD)
    assert ledger.state(microbatch) is before


def test_abort_counts_what_is_thrown_away_once() -> None:
    ledger = Ledger()
    train_last(ledger, Microbatch(4, 0, 0), 1.0)  # accumulated and still sending: one microbatch, not two
    ledger.admit(Microbatch(4, 1, 0), PLAN)
    assert ledger.abort() == 2
    assert ledger.counts.lost == 2
    assert not ledger.under_way()
    ledger.admit(Microbatch(4, 1, 0), PLAN)  # a new generation starts the step again
