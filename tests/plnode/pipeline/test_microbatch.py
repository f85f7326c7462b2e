"""The life of a microbatch as a table: whole lives by role, and everything that is not in the table."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plnode.pipeline.microbatch import COUNTED_BY, TRANSITIONS, Input, Microbatch, State, era

I = Input  # noqa: E741
LIVES = {
    "first": [I.START_FORWARD, I.ACTIVATION_READY, I.SENT_FORWARD, I.GRADIENT_ARRIVED, I.START_BACKWARD, I.ACCUMULATED_AT_SOURCE],
    "first, gradient before the acknowledgement": [
        I.START_FORWARD, I.ACTIVATION_READY, I.GRADIENT_ARRIVED, I.SENT_FORWARD, I.START_BACKWARD, I.ACCUMULATED_AT_SOURCE,
    ],
    "middle": [
        I.START_FORWARD, I.ACTIVATION_READY, I.SENT_FORWARD, I.GRADIENT_ARRIVED, I.START_BACKWARD, I.ACCUMULATED, I.SENT_BACKWARD,
    ],
    "last": [I.START_FORWARD, I.ACCUMULATED, I.SENT_BACKWARD],
    "lone": [I.START_FORWARD, I.ACCUMULATED_AT_SOURCE],
    "evaluation": [I.START_FORWARD, I.ACTIVATION_READY, I.SENT_EVALUATION],
    "evaluation, last": [I.START_FORWARD, I.EVALUATED],
}


@pytest.mark.parametrize("role", LIVES)
def test_each_role_lives_to_the_end_and_is_counted_once(role: str) -> None:
    state = State.HERE
    for happened in LIVES[role]:
        assert state is not State.DONE
        state = TRANSITIONS[state, happened]
    assert state is State.DONE
    assert sum(1 for happened in LIVES[role] if happened in COUNTED_BY) == 1


@given(st.lists(st.sampled_from(list(Input)), max_size=12))
def test_no_order_of_inputs_counts_a_microbatch_twice(inputs: list[Input]) -> None:
    state, counted = State.HERE, 0
    for happened in inputs:
        after = TRANSITIONS.get((state, happened))
        if after is not None:
            state = after
            counted += happened in COUNTED_BY
    assert counted <= 1
    assert counted == 1 or state not in (State.DONE, State.SENDING_BACKWARD)


def test_nothing_leaves_the_end_and_every_state_can_be_reached() -> None:
    assert not any(state is State.DONE for state, _ in TRANSITIONS)
    assert {State.HERE, *TRANSITIONS.values()} == set(State)
    assert len(TRANSITIONS) < len(list(itertools.product(State, Input))) // 4


def test_keys_survive_the_wire_and_foreign_ones_are_refused() -> None:
    microbatch = Microbatch(7, 3, 1)
    assert Microbatch.from_key(microbatch.key(2, 0, 1)) == (2, 0, 1, microbatch)
    key = microbatch.key(2, 0, 1)
    wrong = [key[:4], (*key, 0), (*key[:4], 2), (-1, *key[1:]), (b"7", *key[1:]), (1 << 60, *key[1:]), (True, *key[1:])]
    for other in wrong:
        with pytest.raises(ValueError, match="not a"):
            Microbatch.from_key(other)


def test_a_new_generation_is_newer_than_every_step_of_the_old_one() -> None:
    assert era(2, 0) > era(1, 2**32 - 1) > era(1, 5)


def test_the_oldest_comes_first() -> None:
    assert sorted([Microbatch(2, 0, 0), Microbatch(1, 9, 0), Microbatch(1, 2, 1)])[0] == Microbatch(1, 2, 1)
