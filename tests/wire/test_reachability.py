"""What a node concludes about itself: old sights fade, and hostile words take no memory."""

from __future__ import annotations

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
