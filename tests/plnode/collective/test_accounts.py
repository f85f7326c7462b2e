"""Accounts, terms, shares and deadlines: what a round is built on."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plnode.collective.accounts import AccountBook, AccountError, RoundTerms, covers, pack_account, summed, unpack_account
from plnode.collective.deadline import Deadline
from plnode.collective.shares import PIECE_BYTES, pieces
from plnode.pipeline.ledger import Account, StepPlan
from wire.identity import Identity

A, B = sorted(Identity.generate().peer_id for _ in range(2))
PLAN = StepPlan(3, train=3, evaluate=1)


def test_a_book_is_complete_when_the_accounts_cover_the_set() -> None:
    book = AccountBook(PLAN, [A, B])
    book.report(A, Account({0: 1.0}))
    assert book.missing == (1, 2, 3)
    book.report(B, Account({2: 4.0, 3: 8.0}))
    book.report(A, Account({0: 1.0, 1: 2.0}))
    assert book.missing == ()
    assert book.accounts() == ((0, 1), (2, 3))
    assert covers(PLAN, book.accounts())
    assert summed(book.losses(), range(PLAN.train)) == 7.0


@pytest.mark.parametrize(
    ("reports", "complaint"),
    [
        ([(A, {0: 0.0}), (B, {0: 0.0})], "both report"),
        ([(A, {0: 0.0, 1: 0.0}), (A, {0: 0.0})], "no longer reports"),
        ([(A, {4: 0.0})], "outside the set"),
        ([(Identity.generate().peer_id, {0: 0.0})], "not a member"),
    ],
)
def test_accounts_that_no_round_may_be_built_on(reports: list, complaint: str) -> None:  # type: ignore[type-arg]
    book = AccountBook(PLAN, [A, B])
    with pytest.raises(AccountError, match=complaint):
        for member, losses in reports:
            book.report(member, Account(losses))


@pytest.mark.parametrize("accounts", [[(0, 1), (2,)], [(0, 1, 2), (2, 3)], [(0, 1, 2, 3, 4), ()], [(), ()]])
def test_a_cover_is_exact(accounts: list[tuple[int, ...]]) -> None:
    assert not covers(PLAN, accounts)


def test_every_part_of_the_terms_changes_what_is_signed() -> None:
    terms = RoundTerms(b"r" * 32, 1, 0, 3, 0, (A, B), ((0, 1), (2, 3)))
    others = [
        dataclasses.replace(terms, **change)
        for change in (
            {"run": b"s" * 32}, {"generation": 2}, {"stage": 1}, {"step": 4}, {"attempt": 1}, {"members": (B, A)},
            {"accounts": ((0, 1, 2), (3,))},
        )
    ]  # fmt: skip
    assert len({terms.digest, *(t.digest for t in others)}) == 8
    assert len({terms.round_id, *(t.round_id for t in others)}) == 7, "the accounts are not part of the round's name"


@given(st.dictionaries(st.integers(0, 2**32 - 1), st.floats(allow_nan=False, allow_infinity=False), max_size=50))
def test_accounts_survive_the_wire(losses: dict[int, float]) -> None:
    assert unpack_account(*pack_account(Account(losses))) == Account(losses)


@pytest.mark.parametrize(
    ("indices", "losses", "complaint"),
    [
        (b"\0" * 3, b"", "does not fit"),
        (b"\0" * 4, b"\0" * 16, "does not fit"),
        (b"\0" * 8, b"\0" * 16, "twice"),
        (b"\0" * 4, b"\xff" * 8, "not finite"),
    ],
)
def test_hostile_account_bytes_are_refused(indices: bytes, losses: bytes, complaint: str) -> None:
    with pytest.raises(AccountError, match=complaint):
        unpack_account(indices, losses)


WEIGHTS = st.lists(st.one_of(st.just(0.0), st.floats(1e-3, 1e9)), min_size=1, max_size=16).filter(any)


@given(st.integers(0, 3_000_000), WEIGHTS, st.sampled_from([4, 8]))
def test_pieces_tile_the_vector_in_proportion_to_the_weights(elements: int, weights: list[float], itemsize: int) -> None:
    cut = pieces(elements, weights, itemsize)
    assert [p.number for p in cut] == list(range(len(cut)))
    at = 0
    for piece in cut:
        assert piece.start == at < piece.end
        assert (piece.end - piece.start) * itemsize <= PIECE_BYTES
        at = piece.end
    assert at == elements
    for rank, weight in enumerate(weights):
        share = sum(p.end - p.start for p in cut if p.owner == rank)
        assert share == pytest.approx(elements * weight / sum(weights), abs=1 + elements * len(weights) / (1 << 20))
        assert weight > 0 or share == 0


@given(st.integers(0, 3_000_000), st.integers(1, 16))
def test_equal_weights_cut_equal_shares_whatever_their_unit(elements: int, ranks: int) -> None:
    cut = pieces(elements, [1.0] * ranks, 4)
    assert cut == pieces(elements, [3.7e6] * ranks, 4)
    shares = [sum(p.end - p.start for p in cut if p.owner == r) for r in range(ranks)]
    assert max(shares) - min(shares) <= 1


@pytest.mark.parametrize("weights", [[], [0.0, 0.0], [1.0, -1.0], [1.0, math.nan], [1.0, math.inf]])
def test_weights_that_share_nothing_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="cannot share"):
        pieces(10, weights, 4)


def test_a_deadline_follows_what_was_seen_within_its_bounds() -> None:
    deadline = Deadline(floor_s=1.0, ceiling_s=60.0)
    assert deadline.seconds == 60.0
    for seen in (2.0, 2.0, 2.0, 40.0, 2.0):
        deadline.observe(seen)
    assert deadline.seconds == 8.0, "one stall does not move the median or its spread"
    for _ in range(40):
        deadline.observe(0.001)
    assert deadline.seconds == 1.0
    for _ in range(40):
        deadline.observe(math.pi * 100)
    assert deadline.seconds == 60.0
    with pytest.raises(ValueError, match="floor"):
        Deadline(floor_s=5.0, ceiling_s=1.0)
