"""What a node concludes about itself: old sights fade, and hostile words take no memory."""

from __future__ import annotations

import pytest

from wire.address import Address
from wire.identity import Identity
from wire.limits import DEFAULT_LIMITS
from wire.reachability import ADDRESSES_MAX, WITNESSES_MAX, Reach, Reachability

PEERS = [Identity(n.to_bytes(32, "big")).peer_id for n in range(1, 100)]
LIFE_S = DEFAULT_LIMITS.reach_verdict_life_s
BOUND = Address("0.0.0.0", 4100)


def seen_by_two(later_s: float) -> Reach:
    known = Reachability(DEFAULT_LIMITS)
    known.listening = (BOUND,)
    known.observed(PEERS[0], "198.51.100.1", Address("203.0.113.1", 4100), 0.0)
    known.observed(PEERS[1], "192.0.2.1", Address("203.0.113.2", 4100), later_s)
    candidate = Address("203.0.113.2", 4100)
    known.verdict(PEERS[1], "192.0.2.1", candidate, False, "no answer", biased=False, now=later_s)
    return known.finding((candidate,), later_s).state


def test_an_outside_address_that_was_another_an_hour_ago_makes_no_router_symmetric() -> None:
    assert seen_by_two(LIFE_S + 1.0) is Reach.NAT
    assert seen_by_two(1.0) is Reach.SYMMETRIC  # negative control: both stand


def test_the_memory_of_words_is_bounded() -> None:
    known = Reachability(DEFAULT_LIMITS)
    for number in range(3 * ADDRESSES_MAX):
        known.silent(PEERS[0], "192.0.2.1", Address("203.0.113.1", 1000 + number), 0.0)
    assert len(known._words) == ADDRESSES_MAX
    for peer in PEERS:
        known.silent(peer, "192.0.2.1", BOUND, 0.0)
    assert len(known._words[BOUND]) == WITNESSES_MAX


OUTSIDE = Address("203.0.113.1", 4100)
HOSTS = ["192.0.2.1", "198.51.100.1", "203.0.114.1"]  # in three networks


def told(*words: bool, biased: bool = False, hosts: list[str] | None = None, seen: tuple[str, ...] = ("203.0.113.1",)) -> Reachability:
    """Checkers that said so of OUTSIDE, one after the other, and observers that see our port at these hosts."""
    known = Reachability(DEFAULT_LIMITS)
    known.listening = (BOUND,)
    for number, host in enumerate(seen):
        known.observed(PEERS[number], HOSTS[number], Address(host, 4100), 0.0)
    for number, (ok, host) in enumerate(zip(words, hosts or HOSTS, strict=False)):
        known.verdict(PEERS[number], host, OUTSIDE, ok, "" if ok else "no answer", biased=biased, now=float(number))
    return known


@pytest.mark.parametrize(
    ("words", "state", "weak"),
    [
        ((), Reach.UNKNOWN, False),
        ((True,), Reach.PUBLIC, True),
        ((True, True), Reach.PUBLIC, False),
        ((True, False), Reach.NAT, True),
        ((True, True, False), Reach.PUBLIC, False),
        ((True, False, False), Reach.NAT, False),
        ((False,), Reach.NAT, True),
    ],
)
def test_two_of_three_networks_decide_and_with_fewer_all_must_agree(words: tuple[bool, ...], state: Reach, weak: bool) -> None:
    finding = told(*words).finding((OUTSIDE,), 10.0)
    assert (finding.state, finding.weak) == (state, weak)
    assert finding.addresses == ((OUTSIDE,) if state is Reach.PUBLIC else ())


def test_one_network_has_one_word() -> None:
    """A liar with three machines at one hoster counts once, and the last that was said there counts."""
    same = ["192.0.2.1", "192.0.2.2", "192.0.2.3"]
    assert told(True, True, True, hosts=same).finding((OUTSIDE,), 10.0).weak
    assert told(True, True, False, hosts=same).finding((OUTSIDE,), 10.0).state is Reach.NAT


def test_a_yes_of_whom_the_router_lets_in_anyway_shows_only_how_it_maps() -> None:
    finding = told(True, True, biased=True).finding((OUTSIDE,), 10.0)
    assert finding.state is Reach.NAT and not finding.addresses and "dialled before" in finding.reason
    symmetric = told(True, True, biased=True, seen=("203.0.113.1", "203.0.113.2")).finding((OUTSIDE,), 10.0)
    assert symmetric.state is Reach.SYMMETRIC


def test_a_yes_counts_from_anybody_where_no_router_is() -> None:
    known = Reachability(DEFAULT_LIMITS)
    known.listening, known.interfaces = (BOUND,), frozenset({OUTSIDE.host})
    known.verdict(PEERS[0], HOSTS[0], OUTSIDE, True, "", biased=True, now=0.0)
    assert known.finding((OUTSIDE,), 1.0).state is Reach.PUBLIC
    known.forget()
    assert known.finding((OUTSIDE,), 1.0).state is Reach.UNKNOWN


def test_a_firewall_without_a_router_is_outbound_only() -> None:
    known = told(False)
    known.interfaces = frozenset({OUTSIDE.host})
    finding = known.finding((OUTSIDE,), 10.0)
    assert finding.state is Reach.OUTBOUND and "firewall" in finding.reason


def test_two_observers_of_one_network_make_no_router_symmetric() -> None:
    known = told(False)
    known.observed(PEERS[5], "192.0.2.77", Address("203.0.113.9", 4100), 1.0)
    assert known.finding((OUTSIDE,), 10.0).state is Reach.NAT


def test_words_fade() -> None:
    assert told(True, True).finding((OUTSIDE,), LIFE_S + 5.0).state is Reach.UNKNOWN
