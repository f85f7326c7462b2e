"""When a generation begins, who votes for it, and who holds which stage: pure functions, as tables and properties."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plnode.swarm.assignment import Candidate, Need, assign
from plnode.swarm.quorum import Present, Shortage, Start, quorum
from plnode.swarm.roster import GENERATIONS_AHEAD, Roster, Voter, base_generation, next_generation, objection
from wire.identity import Identity, PeerId

PEERS = sorted(Identity.generate().peer_id for _ in range(12))
RUN = b"r" * 32


# -- quorum ---------------------------------------------------------------------------------------------------------------------
def test_a_generation_begins_with_enough_replicas_of_every_stage() -> None:
    present = [Present(PEERS[i], i % 2, ()) for i in range(5)]
    start = quorum(present, stages=2, replicas=2)
    assert isinstance(start, Start)
    assert start.step == 0
    assert [stage for _, stage in start.roster] == [0, 0, 0, 1, 1]
    shortage = quorum(present, stages=2, replicas=3)
    assert isinstance(shortage, Shortage)
    assert "stage 1 has 2 of 3" in shortage.reason
    assert "stage 0" not in shortage.reason


def test_it_goes_on_from_the_newest_step_that_every_stage_holds() -> None:
    present = [Present(PEERS[0], 0, (20, 40)), Present(PEERS[1], 1, (20,)), Present(PEERS[2], 1, ())]
    start = quorum(present, stages=2, replicas=1)
    assert isinstance(start, Start)
    assert (start.step, start.roster) == (20, ((PEERS[0], 0), (PEERS[1], 1)))


def test_work_is_never_thrown_away_by_starting_from_zero() -> None:
    present = [Present(PEERS[0], 0, (40,)), Present(PEERS[1], 1, ())]
    shortage = quorum(present, stages=2, replicas=1)
    assert isinstance(shortage, Shortage)
    assert "step 40" in shortage.reason
    assert "stage 1 has 0 of 1" in shortage.reason


def test_a_run_cut_off_in_its_first_snapshot_begins_again() -> None:
    present = [Present(PEERS[0], 0, (10,)), Present(PEERS[1], 1, ())]
    start = quorum(present, stages=2, replicas=1, first_snapshot=10)
    assert isinstance(start, Start)
    assert start.step == 0
    assert isinstance(quorum([Present(PEERS[0], 0, (10, 20)), present[1]], 2, 1, first_snapshot=10), Shortage)


@given(st.lists(st.tuples(st.integers(0, 2), st.sets(st.integers(1, 4))), max_size=8), st.integers(1, 3))
def test_whoever_begins_can_begin(nodes: list[tuple[int, set[int]]], replicas: int) -> None:
    present = [Present(PEERS[i], stage, tuple(sorted(steps))) for i, (stage, steps) in enumerate(nodes)]
    start = quorum(present, 3, replicas)
    if isinstance(start, Start):
        held = {p.peer: p for p in present}
        assert all(start.step == 0 or start.step in held[peer].snapshots for peer, _ in start.roster)
        assert all(sum(1 for _, s in start.roster if s == stage) >= replicas for stage in range(3))
        assert start.step > 0 or not any(p.snapshots for p in present)


# -- votes ------------------------------------------------------------------------------------------------------------------------
ROSTER = Roster(RUN, 3, 0, ((PEERS[0], 0), (PEERS[1], 1)))
VOTER = Voter(
    me=PEERS[1], ready=True, stage=1, snapshots=(), last_voted=2, newest_step=0, plausible_generation=100, reachable=frozenset(PEERS),
    stages=2, replicas=1,
)  # fmt: skip


def test_a_node_signs_what_it_sees_itself() -> None:
    assert objection(ROSTER, PEERS[0], VOTER) is None


@pytest.mark.parametrize(
    ("roster", "sender", "voter", "reason"),
    [
        (ROSTER, PEERS[1], VOTER, "not the lowest id"),
        (ROSTER, PEERS[0], dataclasses.replace(VOTER, ready=False), "not ready"),
        (ROSTER, PEERS[0], dataclasses.replace(VOTER, me=PEERS[5]), "does not name me"),
        (ROSTER, PEERS[0], dataclasses.replace(VOTER, stage=0), "I hold stage 0"),
        (ROSTER, PEERS[0], dataclasses.replace(VOTER, last_voted=3), "already signed"),
        (dataclasses.replace(ROSTER, generation=101), PEERS[0], VOTER, "far ahead"),
        (dataclasses.replace(ROSTER, step=20), PEERS[0], VOTER, "no snapshot"),
        (ROSTER, PEERS[0], dataclasses.replace(VOTER, newest_step=20), "could go on from step 20"),
        (ROSTER, PEERS[0], dataclasses.replace(VOTER, replicas=2), "short of 2"),
        (dataclasses.replace(ROSTER, members=((PEERS[0], 0), (PEERS[1], 1), (PEERS[2], 7))), PEERS[0], VOTER, "no such stage"),
        (ROSTER, PEERS[0], dataclasses.replace(VOTER, reachable=frozenset()), "no connection"),
    ],
)
def test_every_reason_not_to_sign(roster: Roster, sender: PeerId, voter: Voter, reason: str) -> None:
    assert reason in (objection(roster, sender, voter) or "")


def test_a_liar_cannot_use_the_generation_numbers_up() -> None:
    honest = [7, 7, 7, 6]
    assert next_generation(7, honest) == 8
    assert next_generation(7, [*honest, 2**32 - 1]) == 8
    assert next_generation(7, [*honest, 7 + GENERATIONS_AHEAD]) == 8 + GENERATIONS_AHEAD
    assert base_generation(0, [500, 500, 0]) == 500, "a node that was away catches up"
    assert base_generation(9, []) == 9


def test_a_roster_has_one_form() -> None:
    assert Roster.of(RUN, ROSTER.proposal()) == ROSTER
    proposal = ROSTER.proposal()
    for wrong in (
        dataclasses.replace(proposal, roster=()),
        dataclasses.replace(proposal, roster=tuple(reversed(proposal.roster))),
        dataclasses.replace(proposal, roster=(proposal.roster[0], proposal.roster[0])),
    ):
        with pytest.raises(ValueError, match="the roster"):
            Roster.of(RUN, wrong)
    changed = [dataclasses.replace(ROSTER, generation=4), dataclasses.replace(ROSTER, step=1), dataclasses.replace(ROSTER, run=b"s" * 32)]
    assert len({ROSTER.digest, *(r.digest for r in changed)}) == 4


# -- assignment -------------------------------------------------------------------------------------------------------------------
def needs(stages: int) -> list[Need]:
    return [Need(s, 100) for s in range(stages)]


def fresh(number: int, **changes: object) -> Candidate:
    base = Candidate(PEERS[number], memory_bytes=1000, speed=0, active=False, fixed=None, claimed=None)
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def test_stages_fill_evenly_and_holders_stay() -> None:
    result = assign([fresh(0), fresh(1, fixed=1), fresh(2), fresh(3, fixed=1)], needs(2), 2, RUN)
    assert result == {PEERS[0]: 0, PEERS[1]: 1, PEERS[2]: 0, PEERS[3]: 1}


def test_of_two_that_took_the_last_place_one_moves_to_where_it_is_needed() -> None:
    result = assign([fresh(0, claimed=0), fresh(1, claimed=0)], needs(2), 1, RUN)
    assert result == {PEERS[0]: 0, PEERS[1]: 1}


def test_a_surplus_goes_to_the_slowest_stage_and_small_machines_to_none() -> None:
    slow = [fresh(0, fixed=0, speed=10), fresh(1, fixed=1, speed=1000)]
    assert assign([*slow, fresh(2)], needs(2), 1, RUN)[PEERS[2]] == 0
    assert assign([*slow, fresh(2, memory_bytes=50)], needs(2), 1, RUN)[PEERS[2]] is None


@settings(max_examples=200)
@given(st.integers(1, 4), st.integers(1, 3), st.randoms(use_true_random=False))
def test_nodes_that_see_each_other_late_still_converge(stages: int, replicas: int, random) -> None:  # type: ignore[no-untyped-def]
    """Every node knows a random part of the claims at first; rounds of full exchange follow.  It settles, with every stage filled."""
    count = stages * replicas
    claims: dict[PeerId, int | None] = {}
    for number in range(count):
        seen = [peer for peer in PEERS[:number] if random.random() < 0.5]
        known = [fresh(PEERS.index(p), claimed=claims[p]) for p in seen] + [fresh(number)]
        claims[PEERS[number]] = assign(known, needs(stages), replicas, RUN)[PEERS[number]]
    for _ in range(count + 1):
        everybody = [fresh(i, claimed=claims[PEERS[i]]) for i in range(count)]
        settled = assign(everybody, needs(stages), replicas, RUN)
        mover = random.choice(PEERS[:count])
        claims[mover] = settled[mover]
        for peer in PEERS[:count]:
            if random.random() < 0.7:
                claims[peer] = settled[peer]
    final = assign([fresh(i, claimed=claims[PEERS[i]]) for i in range(count)], needs(stages), replicas, RUN)
    again = assign([fresh(i, claimed=final[PEERS[i]]) for i in range(count)], needs(stages), replicas, RUN)
    assert final == again
    assert [sum(1 for s in final.values() if s == stage) for stage in range(stages)] == [replicas] * stages
