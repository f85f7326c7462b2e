"""Tickets: worth something once, on one control connection."""

from __future__ import annotations

from dataclasses import replace

import pytest

from wire.limits import DEFAULT_LIMITS
from wire.tickets import ATTEMPTS_AHEAD, Tickets

KEY = bytes(range(32))


def test_a_ticket_is_redeemed_once_and_names_lane_and_attempt() -> None:
    ours, theirs = Tickets(KEY, DEFAULT_LIMITS), Tickets(KEY, DEFAULT_LIMITS)
    for lane in (1, 4, 2):
        attempt, ticket = ours.issue(lane)
        assert len(ticket) == 16
        assert theirs.redeem(ticket) == (lane, attempt)
        assert theirs.redeem(ticket) is None, "a ticket that was seen on the way is worth nothing"


def test_an_older_ticket_is_worth_nothing() -> None:
    ours, theirs = Tickets(KEY, DEFAULT_LIMITS), Tickets(KEY, DEFAULT_LIMITS)
    _, first = ours.issue(1)
    _, second = ours.issue(1)
    assert theirs.redeem(second) is not None and theirs.redeem(first) is None


def test_lost_attempts_are_skipped_up_to_a_bound() -> None:
    ours, theirs = Tickets(KEY, DEFAULT_LIMITS), Tickets(KEY, DEFAULT_LIMITS)
    tickets = [ours.issue(1)[1] for _ in range(ATTEMPTS_AHEAD + 1)]
    assert theirs.redeem(tickets[ATTEMPTS_AHEAD]) is None
    assert theirs.redeem(tickets[ATTEMPTS_AHEAD - 1]) == (1, ATTEMPTS_AHEAD)


@pytest.mark.parametrize("bit", range(0, 128, 7))
def test_one_bit_makes_it_worthless(bit: int) -> None:
    ticket = bytearray(Tickets(KEY, DEFAULT_LIMITS).issue(1)[1])
    ticket[bit // 8] ^= 1 << bit % 8
    assert Tickets(KEY, DEFAULT_LIMITS).redeem(bytes(ticket)) is None


def test_another_control_connection_and_no_ticket_are_refused() -> None:
    _, ticket = Tickets(KEY, DEFAULT_LIMITS).issue(1)
    assert Tickets(KEY[::-1], DEFAULT_LIMITS).redeem(ticket) is None
    assert Tickets(KEY, DEFAULT_LIMITS).redeem(b"") is None
    assert Tickets(KEY, replace(DEFAULT_LIMITS, lanes_max=0)).redeem(ticket) is None
