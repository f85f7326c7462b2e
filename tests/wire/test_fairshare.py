"""Fair shares on a virtual clock: equal among those who want, nothing lost, nobody above the rate or the cap."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from wire.fairshare import FairShare
from wire.limits import DEFAULT_LIMITS

RATE = 4_000_000.0
WINDOW = 1 << 20
# A rate far above any cap, where the cap is not what a test is about.
NO_CAP = 1e12


class Run:
    """Drives a FairShare as the relay does: sleeps to `next_time`, forwards what is granted, asks again."""

    def __init__(self, rate: float = RATE, cap: float = NO_CAP, **limits: Any) -> None:
        self.now = 1000.0
        self.share: FairShare[Any] = FairShare(rate, cap, now=self.now, limits=replace(DEFAULT_LIMITS, **limits))
        self.demand: dict[Any, int] = {}
        self.got: Counter[Any] = Counter()
        self.log: list[tuple[float, Any, int]] = []

    def add(self, item: Any, a: str, b: str, *, control: bool = False, saturate: bool = True) -> None:
        self.share.add(item, (a, b), control=control, now=self.now)
        self.demand[item] = WINDOW if saturate else 0
        self.share.ask(item, self.demand[item])

    def step(self) -> bool:
        for item, size in self.share.grant(self.now):
            assert size > 0
            self.got[item] += size
            self.log.append((self.now, item, size))
            if self.demand[item]:
                self.share.ask(item, self.demand[item])
        at = self.share.next_time(self.now)
        if at is None:
            return False
        self.now = max(at, self.now + 1e-6)
        return True

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        steps = 0
        while self.now < end and self.step():
            steps += 1
            assert steps < 50_000, "it does not come forward"
        self.now = max(self.now, end)

    def settle(self, seconds: float = 2.0) -> None:
        """Past the burst."""
        self.run(seconds)
        self.got.clear()


def test_nat_5_four_saturating_pairs_get_equal_shares() -> None:
    run = Run()
    for number in range(4):
        run.add(number, f"a{number}", f"b{number}")
    run.settle()
    run.run(10.0)
    for number in range(4):
        assert run.got[number] == pytest.approx(10 * RATE / 4, rel=0.1)
    assert run.got.total() == pytest.approx(10 * RATE, rel=0.01)


def test_a_pair_with_many_circuits_gets_no_more_than_one_with_one() -> None:
    run = Run()
    for number in range(10):
        run.add(("many", number), "a", "b")
    run.add("one", "c", "d")
    run.settle()
    run.run(10.0)
    many = sum(size for item, size in run.got.items() if item != "one")
    assert many == pytest.approx(run.got["one"], rel=0.05)
    # And they share their pair's part.
    assert min(run.got[("many", n)] for n in range(10)) == pytest.approx(many / 10, rel=0.2)


def test_both_directions_and_either_order_of_ends_are_one_pair() -> None:
    run = Run()
    run.add("up", "a", "b")
    run.add("down", "b", "a")
    run.add("other", "c", "d")
    assert run.share.gauges()["share_pairs"] == 2
    run.settle()
    run.run(5.0)
    assert run.got["up"] + run.got["down"] == pytest.approx(run.got["other"], rel=0.05)


def test_what_idle_and_slow_ones_leave_goes_to_the_others() -> None:
    run = Run()
    run.add("busy", "a", "b")
    run.add("busy too", "c", "d")
    run.add("idle", "e", "f", saturate=False)
    run.add("slow", "g", "h", saturate=False)
    run.settle()
    for _ in range(50):  # 200 KB/s, a fifth of its share
        run.share.ask("slow", 20_000)
        run.run(0.1)
    assert run.got["slow"] == 50 * 20_000
    assert run.got["idle"] == 0
    for name in ("busy", "busy too"):
        assert run.got[name] == pytest.approx((5 * RATE - 1_000_000) / 2, rel=0.05)


def test_an_idle_pair_saves_nothing_up() -> None:
    run = Run()
    run.add("busy", "a", "b")
    run.add("late", "c", "d", saturate=False)
    run.run(60.0)
    run.got.clear()
    run.demand["late"] = WINDOW
    run.share.ask("late", WINDOW)
    run.run(2.0)
    assert run.got["late"] == pytest.approx(run.got["busy"], rel=0.1)


def test_nat_5_the_control_circuit_of_a_pair_goes_before_its_bulk() -> None:
    run = Run()
    run.add("bulk", "a", "b")
    run.add("other", "c", "d")
    run.add("control", "a", "b", control=True, saturate=False)
    run.settle()
    run.log.clear()
    asked = run.now
    run.share.ask("control", 10_000)
    while run.got["control"] < 10_000:
        assert run.step()
    # One turn of the other pair and its own may lie before it, no more.
    assert run.now - asked <= 2 * DEFAULT_LIMITS.relay_quantum_bytes / RATE + 0.005
    order = [item for _, item, _ in run.log if item != "other"]
    assert order.index("control") <= 4


def test_nat_5_a_second_lane_waits_where_control_does_not() -> None:
    """Negative control of the test above: what decides is `control`, not the size or the time of asking."""
    for control, before in ((True, True), (False, False)):
        run = Run(rate=1e6)
        run.add("bulk", "a", "b")
        run.settle()
        run.add("small", "a", "b", control=control, saturate=False)
        while run.share._pairs[frozenset("ab")].deficit <= 40_000:  # early in a turn of the lane
            assert run.step()
        run.got.clear()
        run.share.ask("small", 10_000)
        while not run.got:
            assert run.step()
        assert (run.got["small"] > 0) is before


def test_control_that_saturates_takes_from_its_own_pair_only() -> None:
    run = Run()
    run.add("control", "a", "b", control=True)
    run.add("bulk", "a", "b")
    run.add("other", "c", "d")
    run.settle()
    run.run(5.0)
    assert run.got["bulk"] == 0
    assert run.got["control"] == pytest.approx(run.got["other"], rel=0.05)


def test_a_peer_is_capped_over_all_its_pairs_and_the_rest_goes_to_others() -> None:
    run = Run(rate=10e6, cap=2e6)
    for number in range(3):
        run.add(number, "hub", f"b{number}")
    run.add("other", "c", "d")
    run.add("third", "e", "f")
    run.settle()
    run.run(10.0)
    hub = [run.got[number] for number in range(3)]
    assert sum(hub) == pytest.approx(20e6, rel=0.02)
    assert min(hub) == pytest.approx(max(hub), rel=0.1)  # nobody starves behind the cap
    assert run.got["other"] == pytest.approx(20e6, rel=0.02)
    assert run.got["third"] == pytest.approx(20e6, rel=0.02)


def test_a_capped_pair_does_not_hold_up_the_others() -> None:
    run = Run(rate=4e6, cap=1e6)
    run.add("capped", "a", "b")
    for number in range(3):
        run.add(number, f"c{number}", f"d{number}")
    run.settle()
    run.run(10.0)
    assert all(run.got[item] == pytest.approx(10e6, rel=0.05) for item in ("capped", 0, 1, 2))


def test_pairs_behind_a_cap_take_turns_of_a_quantum_in_their_order() -> None:
    run = Run(rate=10e6, cap=1e6)
    for number in range(4):
        run.add(number, "hub", f"b{number}")
    run.settle()
    run.log.clear()
    run.run(5.0)
    turns: list[tuple[int, int]] = []
    for _, item, size in run.log:
        if turns and turns[-1][0] == item:
            turns[-1] = item, turns[-1][1] + size
        else:
            turns.append((item, size))
    assert len(turns) > 60
    for (item, size), (following, _) in pairwise(turns[1:]):
        assert size == DEFAULT_LIMITS.relay_quantum_bytes and following == (item + 1) % 4


def test_who_left_in_the_middle_of_a_turn_comes_back_to_a_whole_one() -> None:
    run = Run()
    run.add("busy", "a", "b")
    run.add("comes", "c", "d", saturate=False)
    run.settle()
    run.share.ask("comes", 60_000)
    run.run(1.0)
    assert run.got["comes"] == 60_000
    run.log.clear()
    run.demand["comes"] = WINDOW
    run.share.ask("comes", WINDOW)
    run.run(0.2)
    first = [size for _, item, size in run.log if item == "comes"]
    turn = 0
    for _, item, size in run.log:
        if item == "comes":
            turn += size
        elif turn:
            break
    assert first and turn == DEFAULT_LIMITS.relay_quantum_bytes


@pytest.mark.parametrize("rate", [1e6 / 3, 2.7182818e6, 1e7 / 7, 99_999_989.0])
def test_at_the_moment_that_next_time_names_something_is_granted(rate: float) -> None:
    """Else a relay would wake up and sleep again for nothing, under a virtual clock for ever."""
    now = 987_654.321
    share: FairShare[str] = FairShare(rate, rate / 3, now=now)
    share.add("a", ("a", "b"), control=False, now=now)
    share.add("c", ("c", "d"), control=False, now=now)
    for item in ("a", "c"):
        share.ask(item, 1 << 40)
    share.grant(now)
    for _ in range(3000):
        at = share.next_time(now)
        assert at is not None and at > now
        now = at
        assert share.grant(now)


def test_coming_anew_gives_no_new_burst() -> None:
    run = Run(rate=100e6, cap=1e6)
    total = 0
    for number in range(20):
        run.add(number, "a", "b")
        run.run(0.05)
        total += run.got[number]
        run.share.remove(number, run.now)
    assert total <= 1e6 * (1 + 20 * 0.05) + WINDOW


def test_peers_that_are_gone_are_forgotten() -> None:
    run = Run(cap=1e6)
    for number in range(100):
        run.add(number, f"a{number}", f"b{number}")
        run.share.remove(number, run.now)
    assert not any(run.share.gauges().values())
    run.share.grant(run.now + 1.1)
    assert not run.share._peers and not run.share._idle and not run.share._pairs


def test_a_burst_of_one_second_passes_at_once_and_then_the_rate() -> None:
    run = Run()
    run.add("a", "a", "b")
    run.demand["a"] = int(10 * RATE)
    run.share.ask("a", run.demand["a"])
    run.step()
    assert run.got["a"] == pytest.approx(RATE, rel=0.02)
    run.run(5.0)
    assert run.got["a"] <= 6 * RATE + DEFAULT_LIMITS.relay_quantum_bytes


def test_pieces_are_worth_a_wake_up() -> None:
    run = Run(rate=256 * 1024)
    run.add("a", "a", "b")
    run.add("c", "c", "d")
    run.settle()
    run.log.clear()
    run.run(10.0)
    assert len({at for at, _, _ in run.log}) <= 10 * 256 * 1024 / (16 << 10) + 1


def test_throttled_is_said_once_and_only_over_the_rate() -> None:
    run = Run()
    run.add("big", "a", "b")
    run.add("small", "c", "d", saturate=False)
    assert not run.share.throttled("big")  # it waits, but nothing was short yet
    run.share.ask("small", 1000)
    run.step()
    run.run(2.0)
    assert run.share.throttled("big") and not run.share.throttled("big")
    assert not run.share.throttled("small")  # nothing of it waits
    assert not run.share.throttled("unknown")
    run.share.ask("small", 1000)
    assert not run.share.throttled("small")  # it has only just begun to wait


def test_throttled_by_a_peers_cap_alone() -> None:
    run = Run(rate=100e6, cap=1e6)
    run.add("capped", "a", "b")
    run.add("free", "c", "d", saturate=False)
    for _ in range(20):
        run.share.ask("free", 1000)
        run.run(0.1)
    assert run.share.throttled("capped")
    run.share.ask("free", 1000)
    assert not run.share.throttled("free")


def test_no_rate_grants_nothing_until_there_is_one() -> None:
    run = Run(rate=0.0)
    run.add("a", "a", "b")
    assert run.share.grant(run.now) == [] and run.share.next_time(run.now) is None
    run.share.set_rate(RATE, run.now)
    run.settle()
    run.run(5.0)
    assert run.got["a"] == pytest.approx(5 * RATE, rel=0.02)
    run.share.set_rate(RATE / 4, run.now)
    run.settle()
    run.run(5.0)
    assert run.got["a"] == pytest.approx(5 * RATE / 4, rel=0.02)


def test_ask_is_of_all_that_waits_and_can_be_taken_back() -> None:
    run = Run()
    run.add("a", "a", "b", saturate=False)
    run.share.ask("a", 500)
    run.share.ask("a", 700)
    assert run.share.grant(run.now) == [("a", 700)]
    assert run.share.grant(run.now) == []
    run.share.ask("a", 500)
    run.share.ask("a", 0)
    assert run.share.grant(run.now) == [] and run.share.next_time(run.now) is None
    with pytest.raises(ValueError, match="already"):
        run.add("a", "a", "b")
    run.share.remove("a", run.now)
    run.share.remove("a", run.now)
    assert not any(run.share.gauges().values())
