"""The next hop as a table, and the window of an origin."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plnode.pipeline.route import Candidate, choose
from plnode.pipeline.window import Window, cap
from wire.identity import Identity

FAST, SLOW, FAR = (Identity.generate().peer_id for _ in range(3))


def never(among: object) -> None:
    raise AssertionError(f"no tie was expected: {among}")


def test_a_replica_without_a_slot_is_not_chosen() -> None:
    busy = Candidate(FAST, 0, 0, 0.1, 0.001, 1e9)
    free = Candidate(SLOW, 1, 3, 5.0, 0.5, 1e6)
    assert choose([busy, free], 1000, never) == SLOW  # type: ignore[arg-type]
    assert choose([busy], 1000, never) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Candidate(FAST, 1, 0, 0.1, 0.01, 1e8), Candidate(SLOW, 1, 0, 0.2, 0.01, 1e8)),  # computes faster
        (Candidate(FAST, 1, 0, 0.1, 0.01, 1e8), Candidate(SLOW, 1, 1, 0.1, 0.01, 1e8)),  # has less to do
        (Candidate(FAST, 1, 0, 0.1, 0.01, 1e8), Candidate(SLOW, 1, 0, 0.1, 0.20, 1e8)),  # is nearer
        (Candidate(FAST, 1, 0, 0.1, 0.01, 1e8), Candidate(SLOW, 1, 0, 0.1, 0.01, 1e6)),  # has the wider line
    ],
)
def test_each_part_of_the_cost_decides(one: Candidate, other: Candidate) -> None:
    assert choose([one, other], 1 << 20, never) == FAST  # type: ignore[arg-type]
    assert choose([other, one], 1 << 20, never) == FAST  # type: ignore[arg-type]


def test_stragglers_of_ten_to_one_get_a_tenth() -> None:
    random, outstanding, got = Random(1), Counter[object](), Counter[object]()
    free_at = {FAST: 0.0, SLOW: 0.0}
    service = {FAST: 1.0, SLOW: 10.0}
    ends: list[tuple[float, object]] = []
    now = 0.0
    for _ in range(400):
        for end, who in [entry for entry in ends if entry[0] <= now]:
            outstanding[who] -= 1
            ends.remove((end, who))
        candidates = [Candidate(p, 4 - outstanding[p], outstanding[p], service[p], 0.0, None) for p in (FAST, SLOW)]
        chosen = choose(candidates, 1, random.choice)
        if chosen is not None:
            got[chosen] += 1
            outstanding[chosen] += 1
            free_at[chosen] = max(free_at[chosen], now) + service[chosen]
            ends.append((free_at[chosen], chosen))
        now += 0.5
    assert 0.05 < got[SLOW] / got[FAST] < 0.2


def test_equal_candidates_share_by_lot() -> None:
    random = Random(3)
    twins = [Candidate(p, 1, 0, None, None, None) for p in (FAST, SLOW, FAR)]
    got = Counter(choose(twins, 1, random.choice) for _ in range(300))
    assert set(got) == {FAST, SLOW, FAR}
    assert min(got.values()) > 60


@given(st.integers(1, 6), st.integers(1, 64), st.lists(st.floats(0.001, 10.0), max_size=40))
def test_the_window_stays_between_one_and_its_cap(stages: int, most: int, gaps: list[float]) -> None:
    window, now = Window(stages, most), 0.0
    for gap in gaps:
        now += gap
        window.completed(now - 1.0, now)
        assert 1 <= window.size <= min(most, cap(stages))


def test_a_long_route_widens_the_window_and_queueing_does_not() -> None:
    near, far = Window(4, 100), Window(4, 100)
    for number in range(20):
        near.completed(number - 2.0, number + 0.0)
        far.completed(number - 9.0, number + 0.0)
    assert far.size > near.size
    queued = Window(4, 100)
    for number in range(20):
        queued.completed(number - 2.0 - 0.3 * number, number + 0.0)
    assert queued.size == near.size
