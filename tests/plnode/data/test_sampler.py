"""The sampler: a pure function that draws each window once an epoch, whoever asks and in whatever order."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plnode.data import Corpus, Sampler, load_corpus
from plnode.data.sampler import permutation


def make(train: int = 101, heldout: int = 41) -> Corpus:
    return Corpus("x", np.arange(train, dtype=np.uint16), np.arange(1000, 1000 + heldout, dtype=np.uint16), 2048, "", "")


@given(st.integers(1, 9), st.integers(1, 7), st.integers(1, 5), st.integers(0, 2**64 - 1))
def test_no_window_is_skipped_or_drawn_twice_within_an_epoch(length: int, sequences: int, microbatches: int, seed: int) -> None:
    sampler = Sampler(make(), seed, length, min(sequences, 40 // length), microbatches)
    per_step = sampler.sequences * microbatches
    steps = -(-3 * sampler.windows // per_step)
    drawn = [row for step in range(steps) for index in range(microbatches) for row in sampler.rows(step, index)]
    for epoch in range(3):
        assert Counter(w for e, w in drawn if e == epoch) == Counter(range(sampler.windows))


def test_the_order_of_asking_does_not_matter() -> None:
    asked = [(step, index) for step in range(12) for index in range(3)]
    forward, backward = Sampler(make(), 5, 4, 3, 3), Sampler(make(), 5, 4, 3, 3)
    first = {a: forward.train(*a) for a in asked}
    second = {a: backward.train(*a) for a in reversed(asked)}
    assert all(np.array_equal(first[a], second[a]) for a in asked)


def test_a_row_is_a_run_of_the_corpus_with_one_token_more() -> None:
    ids = Sampler(make(), 1, 4, 3, 2).train(0, 1)
    assert ids.shape == (3, 5)
    assert ids.dtype == np.int64
    assert np.all(np.diff(ids, axis=1) == 1)
    assert np.all(ids[:, 0] % 4 == 0)


def test_epochs_seeds_and_purposes_have_orders_of_their_own() -> None:
    keys = [(1, "train", 0), (1, "train", 1), (2, "train", 0), (1, "heldout", 0)]
    orders = [permutation(*key, 50) for key in keys]
    assert len({tuple(o) for o in orders}) == 4
    assert all(sorted(o) == list(range(50)) for o in orders)


def test_permutation_is_the_same_on_every_machine() -> None:
    assert permutation(7, "train", 3, 10).tolist() == [1, 6, 2, 7, 9, 4, 0, 5, 8, 3]


def test_held_out_rows_are_disjoint_complete_and_do_not_depend_on_the_seed() -> None:
    one, two = (Sampler(make(), seed, 4, 3, 1) for seed in (1, 2))
    assert one.heldout_microbatches == 3
    rows = np.concatenate([one.heldout(i) for i in range(3)])
    assert len({tuple(r) for r in rows}) == 9
    assert rows.min() >= 1000
    assert all(np.array_equal(one.heldout(i), two.heldout(i)) for i in range(3))
    assert not np.array_equal(one.train(0, 0), two.train(0, 0))


@pytest.mark.parametrize(("step", "index"), [(-1, 0), (0, 2), (0, -1)])
def test_a_microbatch_outside_the_step_is_refused(step: int, index: int) -> None:
    with pytest.raises(ValueError, match="no microbatch"):
        Sampler(make(), 1, 4, 3, 2).train(step, index)


def test_a_held_out_microbatch_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="there are 3"):
        Sampler(make(), 1, 4, 3, 2).heldout(3)


def test_a_corpus_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        Sampler(make(train=4), 1, 4, 1, 1)
    with pytest.raises(ValueError, match="too few"):
        Sampler(make(heldout=8), 1, 4, 2, 1)


def test_the_shipped_corpus_has_windows_for_both_parts() -> None:
    sampler = Sampler(load_corpus(), 1, 128, 8, 4)
    assert (sampler.windows, sampler.heldout_microbatches) == (8643, 53)
    assert sampler.train(0, 0).shape == (8, 129)
