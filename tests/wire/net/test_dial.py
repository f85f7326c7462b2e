"""Dial plans and races, in virtual time.  FIND-2, FIND-5, FIND-6, FIND-11."""

from __future__ import annotations

import errno
import itertools
import os

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from wire.address import Address, Scope
from wire.errors import Code, error_for
from wire.limits import DEFAULT_LIMITS
from wire.net.causes import NO_HANDSHAKE, SILENT, Cause, HandshakeTimeout, cause_of
from wire.net.dial import Attempt, BackOff, DialFailed, DialRate, interleave, plan_dial, race

V6 = [Address(f"2001:db9::{number}", 4001) for number in range(1, 5)]
V4 = [Address(f"8.0.0.{number}", 4001) for number in range(1, 5)]
REFUSED = OSError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))


def plan(*addresses: Address, backoff: BackOff | None = None, now: float = 0.0) -> list[Address]:
    attempts, _ = plan_dial(addresses, backoff or BackOff(DEFAULT_LIMITS), now, DEFAULT_LIMITS)
    return [attempt.address for attempt in attempts]


def test_families_alternate_and_begin_with_the_first() -> None:
    assert plan(V6[0], V6[1], V6[2], V4[0], V4[1]) == [V6[0], V4[0], V6[1], V4[1], V6[2]]
    assert plan(V4[0], V4[1], V6[0]) == [V4[0], V6[0], V4[1]]
    assert plan() == []


@given(st.lists(st.sampled_from(V6 + V4), unique=True))
def test_interleaving_keeps_everything_and_the_order_within_a_family(addresses: list[Address]) -> None:
    mixed = interleave(addresses)
    assert sorted(map(str, mixed)) == sorted(map(str, addresses))
    for kind in ("ip4", "ip6"):
        assert [item for item in mixed if item.kind == kind] == [item for item in addresses if item.kind == kind]
    kinds = [item.kind for item in mixed]
    fewer = min(kinds.count("ip4"), kinds.count("ip6"))
    assert all(one != other for one, other in itertools.pairwise(kinds[: 2 * fewer]))


def test_the_same_place_is_tried_once() -> None:
    assert len(plan(V4[0], Address.parse(str(V4[0])), V4[0])) == 1


def test_private_addresses_get_30_ms_and_others_250() -> None:
    near = Address("192.168.0.9", 4001)
    attempts, _ = plan_dial([near, V4[0], V4[1]], BackOff(DEFAULT_LIMITS), 0.0, DEFAULT_LIMITS)
    assert attempts == (Attempt(near, 0.0), Attempt(V4[0], 0.03), Attempt(V4[1], 0.25))


def test_back_off_holds_an_address_back_and_then_sorts_it_last() -> None:
    """FIND-2: the dead address is not tried first again.  FIND-11: one success, or a newer record, resets the pause."""
    backoff = BackOff(DEFAULT_LIMITS)
    backoff.failed(V6[0], SILENT, 100.0)
    assert plan(V6[0], V4[0], backoff=backoff, now=100.0) == [V4[0]]
    _, held = plan_dial([V6[0], V4[0]], backoff, 101.0, DEFAULT_LIMITS)
    assert (held[0].address, held[0].wait_s, held[0].cause) == (V6[0], pytest.approx(5.0), SILENT)
    assert plan(V6[0], V4[0], backoff=backoff, now=106.0) == [V4[0], V6[0]]
    backoff.forget([V6[0]])
    assert plan(V6[0], V4[0], backoff=backoff, now=100.0) == [V6[0], V4[0]]


def test_back_off_grows_to_five_minutes_and_not_further() -> None:
    backoff = BackOff(DEFAULT_LIMITS)
    pauses = []
    for _ in range(100):
        backoff.failed(V4[0], SILENT, 0.0)
        held = backoff.held_back(V4[0], 0.0)
        assert held is not None
        pauses.append(held.wait_s)
    assert pauses[:4] == [6.0, 9.0, 14.0, 21.0]
    assert max(pauses) == pauses[-1] == 300.0
    assert backoff.held_back(V4[0], 300.0) is None


def test_the_table_of_failures_is_bounded() -> None:
    backoff = BackOff(DEFAULT_LIMITS)
    for number in range(5000):
        backoff.failed(Address(f"8.1.{number // 250}.{number % 250}", 1), SILENT, float(number))
    assert len(backoff) == 4096
    assert backoff.count(Address("8.1.0.0", 1)) == 0  # the oldest went
    assert backoff.count(Address("8.1.19.249", 1)) == 1


class Net:
    """What each address does: (seconds, outcome)."""

    def __init__(self, behaviour: dict[Address, tuple[float, BaseException | None]]) -> None:
        self.behaviour = behaviour
        self.started: dict[Address, float] = {}
        self.open: set[Address] = set()
        self.most = 0

    async def connect(self, address: Address) -> Address:
        self.started[address] = trio.current_time()
        self.open.add(address)
        self.most = max(self.most, len(self.open))
        try:
            delay, outcome = self.behaviour[address]
            await trio.sleep(delay)
            if outcome is not None:
                raise outcome
        except BaseException:
            self.open.discard(address)
            raise
        return address

    async def race(self, *addresses: Address, at_once: int = 8) -> Address | dict[Address, Cause]:
        attempts, _ = plan_dial(addresses, BackOff(DEFAULT_LIMITS), 0.0, DEFAULT_LIMITS)
        return await race(attempts, self.connect, self.open.discard, at_once=at_once)


async def test_black_holed_v6_closed_port_live_v4(autojump_clock: trio.testing.MockClock) -> None:
    """FIND-2: [black-holed v6, closed port, live v4] is joined in less than 2 s; attempts overlap."""
    net = Net({V6[0]: (1000, None), V4[0]: (0.02, REFUSED), V4[1]: (0.1, None)})
    assert await net.race(V6[0], V4[0], V4[1]) == V4[1]
    assert trio.current_time() == pytest.approx(0.25 + 0.02 + 0.1)
    assert net.open == {V4[1]}  # the hanging attempt is gone


async def test_a_failure_starts_the_next_at_once(autojump_clock: trio.testing.MockClock) -> None:
    net = Net({V4[0]: (0.01, REFUSED), V4[1]: (0.01, REFUSED), V4[2]: (0.01, None)})
    assert await net.race(V4[0], V4[1], V4[2]) == V4[2]
    assert trio.current_time() == pytest.approx(0.03)


async def test_all_failures_end_in_one_error_that_names_each(autojump_clock: trio.testing.MockClock) -> None:
    """FIND-8: refused, silent, mute and foreign are told apart, each with what would help."""
    net = Net(
        {
            V4[0]: (0.0, REFUSED),
            V4[1]: (5.0, trio.TooSlowError()),
            V4[2]: (10.0, HandshakeTimeout("no handshake within 10 s")),
            V6[0]: (0.0, error_for(Code.RUN_MISMATCH, detail="theirs aa, ours bb")),
        }
    )
    causes = await net.race(V4[0], V4[1], V4[2], V6[0])
    assert isinstance(causes, dict)
    assert {address: cause.kind for address, cause in causes.items()} == {
        V4[0]: "refused",
        V4[1]: "silent",
        V4[2]: "no-handshake",
        V6[0]: "run-mismatch",
    }
    text = str(DialFailed("peer X", causes))
    for address, cause in causes.items():
        assert f"{address}: {cause}" in text
    assert causes[V4[2]] is NO_HANDSHAKE
    assert not net.open


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
async def test_every_order_of_mute_late_and_good(order: tuple[int, ...], autojump_clock: trio.testing.MockClock) -> None:
    """FIND-5, FIND-6: joined in less than 2 s after the good one was dialled, in every order."""
    behaviour: list[tuple[float, BaseException | None]] = [(10.0, HandshakeTimeout("")), (20.0, None), (0.1, None)]
    net = Net({V4[index]: behaviour[index] for index in range(3)})
    assert await net.race(*(V4[index] for index in order)) == V4[2]
    assert trio.current_time() - net.started[V4[2]] == pytest.approx(0.1)
    assert net.started[V4[2]] <= 0.5


async def test_at_most_so_many_at_once(autojump_clock: trio.testing.MockClock) -> None:
    net = Net(dict.fromkeys(V4, (60.0, REFUSED)))
    await net.race(*V4, at_once=2)
    assert net.most == 2


async def test_two_winners_in_one_tick_leave_one(autojump_clock: trio.testing.MockClock) -> None:
    net = Net({V4[0]: (0.35, None), V4[1]: (0.1, None)})
    winner = await net.race(V4[0], V4[1])
    assert net.open == {winner}


async def test_cancelled_race_leaves_nothing(autojump_clock: trio.testing.MockClock) -> None:
    """Cancelled at many moments, also in the very tick in which an attempt succeeds."""
    for deadline in (0.0, 0.1, 0.25, 0.3, 0.35, 0.36):
        net = Net({V4[0]: (0.35, None), V4[1]: (0.1, REFUSED), V4[2]: (0.05, None)})
        with trio.move_on_after(deadline) as scope:
            winner = await net.race(V4[0], V4[1], V4[2])
        assert net.open == (set() if scope.cancelled_caught else {winner})


def test_an_empty_plan_says_that_no_address_is_known() -> None:
    error = DialFailed("peer X", {})
    assert "no address of it is known" in str(error) and error.retryable


def test_what_was_held_back_is_named_with_its_wait() -> None:
    backoff = BackOff(DEFAULT_LIMITS)
    backoff.failed(V4[0], cause_of(REFUSED), 0.0)
    _, held = plan_dial([V4[0]], backoff, 1.0, DEFAULT_LIMITS)
    error = DialFailed("peer X", {}, held)
    assert error.retry_after == pytest.approx(5.0)
    assert "not tried again for 5 s (connection refused" in str(error)


def test_causes_differ_in_words_and_in_whether_a_retry_helps() -> None:
    """FIND-8: six causes, six texts, each with advice."""
    errors = [
        error_for(Code.RUN_MISMATCH),
        error_for(Code.VERSION),
        error_for(Code.RESOURCE_LIMIT),
        error_for(Code.BANNED),
        REFUSED,
        trio.TooSlowError(),
    ]
    causes = [cause_of(error) for error in errors]
    assert len({cause.words for cause in causes}) == 6
    assert all(cause.help for cause in causes)
    assert [cause.retryable for cause in causes] == [False, False, True, False, True, True]


def test_three_dials_a_second_to_one_address_whoever_named_it() -> None:
    rate = DialRate(DEFAULT_LIMITS, Scope.INTERNET)
    delays = [rate.delay_s(Address("8.0.0.1", port), 10.0) for port in range(1, 7)]
    assert delays == pytest.approx([0, 1 / 3, 2 / 3, 1, 4 / 3, 5 / 3])
    assert rate.delay_s(Address("8.0.0.2", 1), 10.0) == 0.0
    assert rate.delay_s(Address("8.0.0.1", 1), 20.0) == 0.0
    for scope, free in ((Scope.INTERNET, False), (Scope.LAN, True)):
        rate = DialRate(DEFAULT_LIMITS, scope)
        assert (max(rate.delay_s(Address("10.0.0.1", 1), 0.0) for _ in range(9)) == 0.0) == free
    rate = DialRate(DEFAULT_LIMITS, Scope.INTERNET)
    for number in range(9000):
        rate.delay_s(Address(f"9.{number >> 8}.{number & 255}.1", 1), float(number))
    assert len(rate._free_at) <= 4096
