"""The learning rate: where each schedule begins, ends and turns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plnode.optim import OptimConfig, lr_ratio
from plnode.optim.config import SCHEDULES


def make(schedule: str, total: int = 101, warmup: int = 10, floor: float = 0.1) -> OptimConfig:
    return OptimConfig(lr=1.0, schedule=schedule, total_steps=total, warmup_steps=warmup, min_lr_ratio=floor)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warm_up_is_linear_and_reaches_the_peak(schedule: str) -> None:
    config = make(schedule)
    assert [lr_ratio(config, s) for s in (0, 4, 9, 10)] == [0.1, 0.5, 1.0, 1.0]


def test_constant_stays() -> None:
    assert {lr_ratio(make("constant"), s) for s in range(9, 300)} == {1.0}


def test_cosine_is_half_way_in_the_middle_and_ends_at_the_floor() -> None:
    config = make("cosine")
    assert lr_ratio(config, 55) == pytest.approx(0.1 + 0.9 * 0.5)
    assert lr_ratio(config, 100) == pytest.approx(0.1)
    assert lr_ratio(config, 5000) == pytest.approx(0.1)


def test_wsd_is_flat_until_the_last_fifth_and_ends_at_the_floor() -> None:
    config = make("wsd")
    assert {lr_ratio(config, s) for s in range(10, 81)} == {1.0}
    assert lr_ratio(config, 90) == pytest.approx(0.1 + 0.9 * 0.5)
    assert lr_ratio(config, 100) == pytest.approx(0.1)


@given(st.sampled_from(SCHEDULES), st.integers(1, 60), st.data(), st.floats(0, 1))
def test_every_schedule_rises_then_never_rises_again(schedule: str, total: int, data: st.DataObject, floor: float) -> None:
    warmup = data.draw(st.integers(0, total))
    config = make(schedule, total, warmup, floor)
    ratios = [lr_ratio(config, s) for s in range(total + 3)]
    assert all(0.0 <= r <= 1.0 for r in ratios)
    assert ratios[:warmup] == sorted(ratios[:warmup])
    assert ratios[warmup:] == sorted(ratios[warmup:], reverse=True)
    if schedule != "constant" and total > warmup + 1:
        assert ratios[total - 1] == pytest.approx(floor, abs=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "lion"}, "adamw, muon"),
        ({"schedule": "step"}, "cosine, wsd, constant"),
        ({"lr": 0.0}, "lr must be above 0"),
        ({"clip": float("nan")}, "clip must be above 0"),
        ({"betas": (0.9, 1.0)}, "betas must be in"),
        ({"muon_momentum": -0.1}, "muon_momentum must be in"),
        ({"weight_decay": -1.0}, "must not be negative"),
        ({"min_lr_ratio": 1.5}, "min_lr_ratio must be in"),
        ({"warmup_steps": 11}, "within total_steps"),
        ({"total_steps": 0}, "within total_steps"),
    ],
)
def test_values_without_a_meaning_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OptimConfig(**{"lr": 0.1, "total_steps": 10, **change})
