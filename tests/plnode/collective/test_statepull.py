"""The plan of a pull: shares follow rates, one chunk is what a death or a lie costs, and nothing waits for the slowest."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plnode.collective.statecut import HASH_BYTES, root_of
from plnode.collective.statepull import Failure, Plan, Standing, Verdict, checked_hashes
from tests.plnode.collective.pulling import Donor, Joiner, digest, peers, simulate, table

MIB = 1 << 20
MBIT = 1e6 / 8


def plan_of(count: int, donors: int, *, chunk: int = MIB, size: int = 0, **settings: int) -> Plan:
    return Plan(table(count), size or count * chunk, chunk, peers(donors), **settings)


donor = st.builds(
    Donor,
    rate=st.floats(1e5, 1e8),
    dies_at=st.one_of(st.just(float("inf")), st.floats(0, 60)),
    lies=st.frozensets(st.integers(0, 39), max_size=3),
    lacks=st.frozensets(st.integers(0, 39), max_size=3),
    busy=st.integers(0, 3),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(donor, max_size=5), st.floats(1e5, 1e8), st.integers(1, 40), st.frozensets(st.integers(0, 39)), st.integers(2, 9))
def test_join_2_whatever_donors_do_one_honest_one_is_enough(
    others: list[Donor], rate: float, count: int, had: frozenset[int], most: int
) -> None:
    names = peers(len(others) + 1)
    have = {index for index in had if index < count}
    plan = Plan(table(count), count * MIB - 5, MIB, names, have=have, most_outstanding=most)
    joiner, busy = Joiner(plan), [one.busy for one in others]
    simulate(dict(zip(names, [*others, Donor(rate)], strict=True)), [joiner])
    assert plan.done and plan.verified_bytes == count * MIB - 5
    assert sorted(joiner.good) == sorted(set(range(count)) - have)  # each once
    assert joiner.most_under_way <= most and joiner.copies <= 2
    lies = [name for name, verdict in joiner.verdicts if verdict is Verdict.LIE]
    assert len(lies) == len(set(lies)) and set(plan.named(Standing.LIAR)) == set(lies)
    for name, one, often in zip(names, others, busy, strict=False):
        for index in one.lacks:  # JOIN-10: one request per holder and chunk
            asked = sum(r.donor == name and r.index == index for r in joiner.asked)
            assert asked <= 1 + often


@settings(max_examples=50, deadline=None)
@given(st.lists(donor, min_size=1, max_size=4))
def test_join_4_without_an_honest_donor_it_ends_and_says_so(others: list[Donor]) -> None:
    names = peers(len(others))
    for one in others:
        one.lies |= {0}
        one.rate = min(one.rate, 1e6)
    plan = plan_of(40, len(others))
    joiner = Joiner(plan)
    simulate(dict(zip(names, others, strict=True)), [joiner])
    assert plan.hopeless and not plan.done and 0 not in joiner.good


def test_join_9_a_slow_donor_does_not_hold_up_the_rest() -> None:
    size, chunk = 8_000_000_000, 4 * MIB
    count = -(-size // chunk)
    plan = plan_of(count, 3, chunk=chunk, size=size)
    names = peers(3)
    rates = (100 * MBIT, 100 * MBIT, 5 * MBIT)
    donors = dict(zip(names, (Donor(rate) for rate in rates), strict=True))
    joiner = Joiner(plan)
    simulate(donors, [joiner])
    ideal = size / sum(rates)
    assert joiner.done_at <= 1.02 * ideal
    assert sum(one.sent_bytes for one in donors.values()) <= 1.02 * size
    assert donors[names[2]].sent_bytes < 0.04 * size


def test_join_9_progress_names_the_bottleneck_and_knows_when_it_is_done() -> None:
    plan = plan_of(200, 3)
    names = peers(3)
    rates = dict(zip(names, (8e6, 8e6, 4e5), strict=True))
    simulate({n: Donor(r) for n, r in rates.items()}, [Joiner(plan)], until_s=8.0)
    seen = plan.progress(8.0)
    assert seen.bottleneck == names[2] and seen.total_bytes == 200 * MIB
    assert seen.rate == pytest.approx(sum(rates.values()), rel=0.2)
    assert seen.eta_s == pytest.approx((200 * MIB - seen.verified_bytes) / sum(rates.values()), rel=0.2)


def test_join_9_control_without_the_two_rules_the_slow_one_holds_the_last_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    def last(rules: bool) -> float:
        plan = plan_of(30, 3, chunk=4 * MIB)
        if not rules:
            monkeypatch.setattr(Plan, "_would_delay", lambda *a: False)
            original = Plan._pick
            monkeypatch.setattr(Plan, "_pick", lambda self, d, now: original(self, d, now) if self._fresh else None)
        joiner = Joiner(plan)
        simulate(dict(zip(peers(3), (Donor(100 * MBIT), Donor(100 * MBIT), Donor(2 * MBIT)), strict=True)), [joiner])
        return joiner.done_at

    assert last(True) * 2 < last(False)


def test_join_3_twenty_joiners_share_four_donors() -> None:
    names = peers(4)
    donors = {name: Donor(50 * MBIT) for name in names}
    joiners = [Joiner(plan_of(64, 4, outstanding=4)) for _ in range(20)]
    simulate(donors, joiners)
    sent = [one.sent_bytes for one in donors.values()]
    ideal = 20 * 64 * MIB / (4 * 50 * MBIT)
    took = max(j.done_at for j in joiners)
    mean = sum(sent) / 4
    worst = max(abs(s - mean) for s in sent) / mean
    assert took <= 1.5 * ideal and worst <= 0.25
    assert all(j.most_under_way <= 16 for j in joiners)


@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_join_2_a_donor_that_dies_costs_what_was_under_way(share: float) -> None:
    names = peers(2)
    at = share * 100 * MIB / 2e6
    donors = {names[0]: Donor(1e6, dies_at=at), names[1]: Donor(1e6)}
    plan = plan_of(100, 2)
    joiner = Joiner(plan)
    simulate(donors, [joiner])
    assert plan.done and plan.named(Standing.GONE) == ((names[0],) if share < 0.99 else plan.named(Standing.GONE))
    assert sum(one.sent_bytes for one in donors.values()) <= 102 * MIB


def test_join_2_wrong_bytes_name_the_liar_and_its_other_chunks_go_elsewhere() -> None:
    plan = plan_of(4, 2)
    one, other = peers(2)
    asked = []
    while (request := plan.next(0.0)) is not None:
        asked.append(request)
    mine = [r.index for r in asked if r.donor == one]
    assert len(mine) == 2
    assert plan.received(one, mine[0], digest(3 - mine[0]), 1.0) is Verdict.LIE
    assert plan.named(Standing.LIAR) == (one,) and [r.index for r in plan.take_cancels()] == mine[1:]
    while not plan.done:
        for r in [r for r in asked if r.donor == other]:
            assert plan.received(other, r.index, digest(r.index), 2.0) is Verdict.GOOD
        asked = []
        while (request := plan.next(2.0)) is not None:
            asked.append(request)
        assert all(r.donor == other for r in asked)


def test_a_silent_donor_gets_more_time_and_is_given_up_in_the_end() -> None:
    plan = plan_of(1, 1)
    for time, last in enumerate((False, False, False, True)):
        request = plan.next(100.0)
        assert request is not None and request.deadline_s == 60 * 2**time
        plan.failed(request.donor, request.index, Failure.SILENT, 0.0)
        assert plan.hopeless is last


def test_num_9_a_state_of_5_gib_needs_a_window_of_memory() -> None:
    size, chunk = 5 << 30, 4 * MIB
    plan = plan_of(size // chunk, 3, chunk=chunk, size=size, most_outstanding=8)
    joiner = Joiner(plan)
    simulate({name: Donor(1e9) for name in peers(3)}, [joiner])
    assert plan.done and plan.verified_bytes == size and joiner.most_under_way * chunk <= 32 * MIB


def test_a_table_that_is_not_the_roots_is_refused() -> None:
    hashes = table(3)
    assert checked_hashes(hashes, root_of(hashes), 3 * MIB, MIB)
    assert not checked_hashes(hashes[:-1] + b"x", root_of(hashes), 3 * MIB, MIB)
    assert not checked_hashes(hashes, root_of(hashes), 2 * MIB, MIB)
    with pytest.raises(ValueError, match="bytes of hashes"):
        Plan(hashes[:-HASH_BYTES], 3 * MIB, MIB, peers(1))
