"""Points: what both neighbours attest counts, once; what a node says of itself, and what contradicts itself, counts nothing.

Mutations that were tried, each fails a test here: `needed` without the forward, without the backward, or the same at the ends; the newest
generation counted although it is not complete; the first of two disputed workers paid; a two-faced signer's word believed; the
self-attestation check left out; places taken into the comparison of two stories; copies of a receipt counted in `attested`.
"""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plnode.swarm import points
from plnode.swarm.points import Row, Table, tally
from plnode.swarm.receipts import Kind, Terms, open_receipt
from tests.plnode.swarm.receiptworld import IDS, PEOPLE, TERMS, honest_step, opened, raw
from tests.wire.net.worlds import RUN
from wire.identity import Identity, PeerId

F, B = Kind.FORWARD, Kind.BACKWARD
BEFORE, WORKER, AFTER, OTHER = PEOPLE[:4]
W = WORKER.peer_id


def counted(table: Table) -> dict[PeerId, tuple[int, float]]:
    return {peer: (row.microbatches, row.flops) for peer, row in table.rows.items() if row.microbatches or row.flops}


def kinds(table: Table) -> set[str]:
    assert set(table.counts) == {finding.kind for finding in table.findings}
    return set(table.counts)


def pair(worker: Identity = WORKER, indices: list[int] | None = None, **changes: object) -> list[bytes]:
    """Both neighbours attest `worker` at stage 1."""
    which = [0] if indices is None else indices
    return [raw(AFTER, worker.peer_id, 1, F, which, **changes), raw(BEFORE, worker.peer_id, 1, B, which, **changes)]  # type: ignore[arg-type]


def test_both_neighbours_make_a_microbatch_count() -> None:
    table = tally(opened(*pair(indices=[0, 3])), TERMS)
    assert counted(table) == {W: (2, 2 * 128 * 30.0)} and not table.counts and table.flops == 2 * 128 * 30.0
    row = table.rows[W]
    assert (row.tokens, row.size_bytes, row.attested) == ({1: 256}, 4000, 0)
    assert table.rows[AFTER.peer_id] == Row(attested=2)


@pytest.mark.parametrize("which", [0, 1])
def test_one_neighbour_of_two_makes_nothing(which: int) -> None:
    table = tally(opened(pair(indices=[0, 3])[which]), TERMS)
    assert counted(table) == {} and table.rows[W].one_sided == 2


def test_at_the_ends_there_is_one_neighbour() -> None:
    first, last = raw(AFTER, W, 0, F, [0]), raw(BEFORE, W, 2, B, [1])
    assert counted(tally(opened(first), TERMS)) == {W: (1, 128 * 10.0)}
    assert counted(tally(opened(last), TERMS)) == {W: (1, 128 * 20.0)}
    two = Terms(stages=2, steps=10, microbatches=4, tokens=128, flops_per_token=(1.0, 2.0))
    assert counted(tally(opened(raw(AFTER, W, 0, F, [0]), raw(BEFORE, OTHER.peer_id, 1, B, [0])), two)) == {
        W: (1, 128.0), OTHER.peer_id: (1, 256.0)
    }  # fmt: skip


def test_a_copy_and_a_second_envelope_of_the_same_change_nothing() -> None:
    again = [raw(AFTER, W, 1, F, [0], seq=2), raw(BEFORE, W, 1, B, [0], seq=3)]
    once, more = tally(opened(*pair()), TERMS), tally(opened(*pair(), *pair(), *again), TERMS)
    assert counted(more) == counted(once) and not more.counts
    assert more.rows[AFTER.peer_id].attested == 2, "two envelopes, one of them twice"


def test_what_a_node_says_of_itself_counts_nothing() -> None:
    table = tally(opened(raw(WORKER, W, 1, F, [0]), raw(WORKER, W, 2, B, [0]), raw(BEFORE, W, 1, B, [0])), TERMS)
    assert counted(table) == {} and kinds(table) == {"self"}
    assert {finding.culprit for finding in table.findings} == {W}
    assert counted(tally(opened(raw(WORKER, W, 0, F, [0])), TERMS)) == {}, "also where one neighbour is enough"


def test_one_accomplice_cannot_be_both_neighbours() -> None:
    table = tally(opened(raw(AFTER, W, 1, F, [0]), raw(AFTER, W, 1, B, [0]), raw(BEFORE, W, 1, B, [1])), TERMS)
    assert counted(table) == {} and kinds(table) == {"two places"}
    (finding,) = table.findings
    assert (finding.culprit, finding.places) == (AFTER.peer_id, ("log:0", "log:1")) and "stage 0 and 2" in finding.what
    assert table.rows[AFTER.peer_id].contradictions == 1
    # In another generation it may stand elsewhere.
    moved = [*pair(), raw(AFTER, OTHER.peer_id, 0, F, [1], generation=2)]
    assert not tally(opened(*moved), TERMS).counts


def test_all_that_one_with_two_places_signed_in_this_generation_is_void() -> None:
    table = tally(opened(*pair(step=4), raw(AFTER, OTHER.peer_id, 1, B, [2], step=5)), TERMS)
    assert counted(table) == {}
    table = tally(opened(*pair(step=4, generation=1), raw(AFTER, OTHER.peer_id, 1, B, [2]), raw(AFTER, OTHER.peer_id, 0, F, [2])), TERMS)
    assert counted(table) == {} and table.counts == {"two places": 1}


@pytest.mark.parametrize("change", [{"tokens": 128, "size": 999}, {"seconds": 0.5}, {"worker": OTHER}])
def test_two_stories_of_one_signer_are_named_and_void(change: dict[str, object]) -> None:
    values = {"worker": W, **{k: v.peer_id if isinstance(v, Identity) else v for k, v in change.items()}}
    worker = values.pop("worker")
    lie = raw(AFTER, worker, 1, F, [0], seq=2, **values)  # type: ignore[arg-type]
    table = tally(opened(*pair(indices=[0, 1]), lie), TERMS)
    assert kinds(table) == {"two stories"} and table.findings[0].culprit == AFTER.peer_id
    assert table.findings[0].places == ("log:0", "log:2")
    assert counted(table) == {W: (1, 128 * 30.0)}, "the other microbatch stands"
    assert table.rows[AFTER.peer_id].contradictions == 1


def test_two_who_are_attested_in_full_are_disputed_and_neither_is_paid() -> None:
    fakes = [raw(PEOPLE[5], OTHER.peer_id, 1, F, [0]), raw(PEOPLE[6], OTHER.peer_id, 1, B, [0])]
    table = tally(opened(*pair(indices=[0, 1]), *fakes), TERMS)
    assert counted(table) == {W: (1, 128 * 30.0)} and kinds(table) == {"disputed"}
    assert table.findings[0].culprit is None and table.rows[W].disputed == table.rows[OTHER.peer_id].disputed == 1
    # Half a story is no dispute.
    assert counted(tally(opened(*pair(), fakes[0]), TERMS)) == {W: (1, 128 * 30.0)}


def test_done_again_counts_once_for_who_did_it_last() -> None:
    again = pair(OTHER, generation=2)
    table = tally(opened(*pair(indices=[0, 1]), *again), TERMS)
    assert counted(table) == {W: (1, 128 * 30.0), OTHER.peer_id: (1, 128 * 30.0)} and not table.counts
    assert table.rows[W].superseded == 1
    # A later generation that was not finished takes nothing away.
    assert counted(tally(opened(*pair(), again[0]), TERMS)) == {W: (1, 128 * 30.0)}
    # Neighbours of two generations do not add up to one.
    assert counted(tally(opened(pair()[0], pair(generation=2)[1]), TERMS)) == {}


@pytest.mark.parametrize(
    "receipt",
    [
        raw(AFTER, W, 2, F, [0]), raw(AFTER, W, 3, B, [0]), raw(AFTER, W, 1, F, [4]), raw(AFTER, W, 1, F, [0], tokens=129),
        raw(AFTER, W, 1, F, [0], step=10),
    ],
)  # fmt: skip
def test_what_the_run_does_not_have_is_named(receipt: bytes) -> None:
    table = tally(opened(receipt, raw(BEFORE, W, 1, B, [0])), TERMS)
    assert counted(table) == {} and kinds(table) == {"unfit"} and table.findings[0].culprit == AFTER.peer_id


def test_receipts_of_two_runs_are_not_added_up() -> None:
    foreign = open_receipt(raw(AFTER, W, 0, F, [0], run=bytes(32)), run=None)
    with pytest.raises(ValueError, match="2 runs"):
        tally([*opened(raw(AFTER, W, 0, F, [0])), (foreign, "x")], TERMS)


def test_findings_are_bounded_and_all_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(points, "MOST_FINDINGS", 3)
    table = tally(opened(*(raw(WORKER, W, 1, F, [0], seq=seq) for seq in range(5))), TERMS)
    assert len(table.findings) == 3 and table.counts == {"self": 5}


# -- whole runs


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), shape=st.lists(st.integers(1, 3), min_size=2, max_size=4), drop=st.integers(0, 4))
def test_honest_receipts_pay_everybody_for_exactly_what_he_did(seed: int, shape: list[int], drop: int) -> None:
    """The referee is the list of who did what.  Lost receipts only ever take away."""
    random = Random(seed)
    stages, people = len(shape), iter(PEOPLE)
    groups = [[next(people) for _ in range(count)] for count in shape]
    terms = Terms(stages=stages, steps=3, microbatches=4, tokens=128, flops_per_token=tuple(10.0**s for s in range(stages)))
    raws, did = [], {}
    for step in range(2):
        got, who = honest_step(groups, random, step=step)
        raws += got
        did |= {(step, *key): worker for key, worker in who.items()}
    random.shuffle(raws)
    table = tally(opened(*raws), terms)
    assert not table.counts
    for group in groups:
        for person in group:
            mine = [stage for (_, _, stage), worker in did.items() if worker == person.peer_id]
            row = table.rows.get(person.peer_id, Row())
            assert row.microbatches == len(mine) and row.flops == pytest.approx(sum(128 * 10.0**s for s in mine))
            assert row.one_sided == row.superseded == row.disputed == row.contradictions == 0
    assert table.flops == pytest.approx(2 * 4 * 128 * math.fsum(terms.flops_per_token))
    fewer = tally(opened(*raws[drop:]), terms)
    for peer, row in fewer.rows.items():
        assert row.microbatches <= table.rows[peer].microbatches


LIES = st.lists(
    st.builds(
        raw,
        st.sampled_from(PEOPLE[:5]), st.sampled_from(IDS[:5]), st.integers(1, 2), st.sampled_from([F, B]),
        st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True).map(sorted),
        step=st.integers(5, 6), generation=st.integers(1, 2), tokens=st.sampled_from([128, 128, 128, 7]), size=st.integers(1, 2),
    ),
    max_size=14,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(lies=LIES, random=st.randoms(use_true_random=False))
def test_whatever_is_signed_nothing_is_paid_twice_or_by_its_worker_alone(lies: list[bytes], random: Random) -> None:
    receipts = opened(*lies)
    table = tally(receipts, TERMS)
    # At most once a microbatch and stage, and never more than the run has.
    assert sum(row.microbatches for row in table.rows.values()) <= 2 * 4 * 2
    # Neither the order nor copies matter.
    shuffled = receipts * 2
    random.shuffle(shuffled)
    other = tally(shuffled, TERMS)
    assert other.rows == table.rows and other.counts == table.counts and other.findings == table.findings
    for peer in IDS[:5]:
        # Without what others signed there is nothing, and its own signatures do not raise its own points.
        assert counted(tally([(r, p) for r, p in receipts if r.signer == peer], TERMS)).get(peer) is None
        for which in (0, 1):  # a signer alone never pays a stage with two neighbours
            alone = tally([(r, p) for r, p in receipts if r.signer == peer and r.stage == 1 and r.generation == which + 1], TERMS)
            assert counted(alone) == {}
        own = {r.raw: len(r) for r, _ in receipts if r.signer == peer}
        assert table.rows.get(peer, Row()).attested == sum(own.values())


def test_receipts_are_of_this_run() -> None:
    assert {r.run for r, _ in opened(*pair())} == {RUN}
