"""The split against trying all of them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plnode.model import ModelConfig, explicit_split, plan_split
from plnode.model.split import balance


def all_splits(n: int, parts: int) -> list[tuple[int, ...]]:
    cuts = itertools.combinations(range(1, n), parts - 1)
    return [tuple(b - a for a, b in itertools.pairwise((0, *cut, n))) for cut in cuts]


def sums(costs: list[float], lengths: tuple[int, ...]) -> list[float]:
    ends = list(itertools.accumulate(lengths))
    return [sum(costs[e - n : e]) for e, n in zip(ends, lengths, strict=True)]


@given(st.data(), st.lists(st.integers(1, 20), min_size=1, max_size=9))
def test_no_split_is_better_than_the_planned_one(data: st.DataObject, whole_costs: list[int]) -> None:
    costs = [float(c) for c in whole_costs]
    parts = data.draw(st.integers(1, len(costs)))

    def rank(lengths: tuple[int, ...]) -> tuple[float, float, tuple[int, ...]]:
        each = sums(costs, lengths)
        return max(each), sum(s * s for s in each), tuple(-n for n in lengths)

    assert balance(costs, parts) == min(all_splits(len(costs), parts), key=rank)


def test_the_head_is_counted() -> None:
    """128 wide with 2,048 tokens the head costs 1.3 layers: the last stage gets fewer."""
    config = ModelConfig(vocab=2048, dim=128, layers=5, heads=4, kv_heads=2, ffn_dim=344, seq_len=128)
    assert [span.layers for span in plan_split(config, 3)] == [2, 2, 1]
    small = ModelConfig(vocab=16, dim=128, layers=6, heads=4, kv_heads=2, ffn_dim=344, seq_len=128)
    assert [span.layers for span in plan_split(small, 3)] == [2, 2, 2]


def test_spans_cover_the_model_and_only_the_ends_have_ends() -> None:
    config = ModelConfig(vocab=64, dim=16, layers=7, heads=2, kv_heads=1, ffn_dim=32, seq_len=8)
    for stages in range(1, 8):
        spans = plan_split(config, stages)
        assert [s.stage for s in spans] == list(range(stages))
        assert [s.first_layer for s in spans] == [0, *(s.end_layer for s in spans[:-1])]
        assert spans[-1].end_layer == 7
        assert [s.embed for s in spans] == [i == 0 for i in range(stages)]
        assert [s.head for s in spans] == [i == stages - 1 for i in range(stages)]
        assert sum(s.params for s in spans) == config.params


def test_an_explicit_split_is_taken_as_it_is() -> None:
    config = ModelConfig(vocab=64, dim=16, layers=7, heads=2, kv_heads=1, ffn_dim=32, seq_len=8)
    assert [(s.first_layer, s.end_layer) for s in explicit_split(config, [1, 5, 1])] == [(0, 1), (1, 6), (6, 7)]


@pytest.mark.parametrize("layers", [[], [3, 0, 4], [3, 3], [8]])
def test_an_explicit_split_that_does_not_add_up_is_refused(layers: list[int]) -> None:
    config = ModelConfig(vocab=64, dim=16, layers=7, heads=2, kv_heads=1, ffn_dim=32, seq_len=8)
    with pytest.raises(ValueError, match="at least one layer a stage and 7 in all"):
        explicit_split(config, layers)


@pytest.mark.parametrize("stages", [0, 8])
def test_more_stages_than_layers_are_refused(stages: int) -> None:
    config = ModelConfig(vocab=64, dim=16, layers=7, heads=2, kv_heads=1, ffn_dim=32, seq_len=8)
    with pytest.raises(ValueError, match="cannot be cut"):
        plan_split(config, stages)
