"""How many lanes: the policy against lines whose capacity is known."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from wire.identity import Identity
from wire.lanecount import LaneCount, Phase
from wire.limits import DEFAULT_LIMITS
from wire.path import DIRECT, PUNCHED, Path, relayed_via

SAMPLE_S = 0.25


def run(count: LaneCount, rate: Callable[[int, float], float], seconds: float, *, start: float = 0.0) -> list[int]:
    """Targets at each sample while chunks wait all the time; a lane that is wanted is there at once."""
    sent, targets, now = 0.0, [], start
    while now < start + seconds:
        now += SAMPLE_S
        sent += rate(count.target, now) * SAMPLE_S
        targets.append(count.sample(now, int(sent), waiting=True, lanes=count.target))
    return targets


@pytest.mark.parametrize(("congestion", "lanes"), [("bbr", 1), ("bbr2", 1), ("cubic", 2), ("", 2)])
def test_the_start_follows_the_congestion_control(congestion: str, lanes: int) -> None:
    assert LaneCount(DEFAULT_LIMITS, congestion=congestion, same_machine=False).target == lanes


def test_none_within_one_machine_and_none_if_there_may_be_none() -> None:
    here = LaneCount(DEFAULT_LIMITS, congestion="cubic", same_machine=True)
    none = LaneCount(replace(DEFAULT_LIMITS, lanes_max=0), congestion="cubic", same_machine=False)
    for count in (here, none):
        assert set(run(count, lambda lanes, now: 1e6 * (1 + lanes), 100)) == {0}


@pytest.mark.parametrize(("path", "most"), [(DIRECT, 4), (PUNCHED, 2), (relayed_via(Identity(bytes(32)).peer_id), 1)])
def test_how_many_a_path_allows(path: Path, most: int) -> None:
    count = LaneCount(DEFAULT_LIMITS, congestion="bbr", same_machine=False, path=path)
    assert count.target == 1
    assert max(run(count, lambda lanes, now: 2.5e6 * lanes, 60)) == most
    few = LaneCount(replace(DEFAULT_LIMITS, lanes_max=1), congestion="cubic", same_machine=False, path=path)
    assert max(run(few, lambda lanes, now: 2.5e6 * lanes, 60)) == 1


def test_a_line_of_which_each_connection_gets_a_share_ends_with_all_lanes() -> None:
    count = LaneCount(DEFAULT_LIMITS, congestion="cubic", same_machine=False)
    targets = run(count, lambda lanes, now: 2.5e6 * lanes, 30)
    assert targets == sorted(targets) and targets[-1] == DEFAULT_LIMITS.lanes_max


def test_the_slow_start_is_not_what_a_trial_is_compared_with() -> None:
    """The first seconds are five times as fast as what the connections settle to."""
    count = LaneCount(DEFAULT_LIMITS, congestion="cubic", same_machine=False)
    assert run(count, lambda lanes, now: 2.5e6 * lanes * (5 if now < 2 else 1), 40)[-1] == DEFAULT_LIMITS.lanes_max


def test_a_full_line_gets_one_trial_a_minute_and_loses_the_lane_again() -> None:
    count = LaneCount(DEFAULT_LIMITS, congestion="bbr", same_machine=False)
    targets = run(count, lambda lanes, now: 24e6, 100)
    trials = sum(1 for before, after in itertools.pairwise(targets) if after > before)
    assert trials == 2 and max(targets) == 2
    assert targets.count(2) * SAMPLE_S <= 2 * (DEFAULT_LIMITS.lane_trial_s + SAMPLE_S)


def test_a_gain_below_the_bound_is_none() -> None:
    just_below = LaneCount(DEFAULT_LIMITS, congestion="bbr", same_machine=False)
    just_above = LaneCount(DEFAULT_LIMITS, congestion="bbr", same_machine=False)
    assert run(just_below, lambda lanes, now: 1e6 * (1 + 0.14 * (lanes - 1)), 20)[-1] == 1
    assert run(just_above, lambda lanes, now: 1e6 * (1 + 0.17 * (lanes - 1)), 14)[-1] == 2


def test_an_idle_pause_judges_nobody() -> None:
    count = LaneCount(DEFAULT_LIMITS, congestion="bbr", same_machine=False)
    run(count, lambda lanes, now: 1e6, 8)
    assert count.phase is Phase.TRIAL
    assert count.sample(8.5, 0, waiting=False, lanes=2) == 2 and count.phase is Phase.STEADY


def test_a_lane_that_is_still_being_dialled_is_not_judged() -> None:
    count = LaneCount(DEFAULT_LIMITS, congestion="bbr", same_machine=False)
    run(count, lambda lanes, now: 1e6, 8)
    for step in range(100):
        assert count.sample(8.0 + step, 8_000_000, waiting=True, lanes=1) == 2


def test_after_failed_dials_there_is_a_pause() -> None:
    count = LaneCount(DEFAULT_LIMITS, congestion="bbr", same_machine=False)
    count.failed(0.0)
    assert set(run(count, lambda lanes, now: 1e6 * lanes, DEFAULT_LIMITS.lane_retry_s - 1)) == {1}
    assert run(count, lambda lanes, now: 1e6 * lanes, 30, start=DEFAULT_LIMITS.lane_retry_s)[-1] > 1
