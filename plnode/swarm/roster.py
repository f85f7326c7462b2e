"""The agreed membership of one generation, and the rule by which a node votes for it.

Sans-IO.  A generation is the time between two agreements on who takes part.  The lowest id of those ready proposes; everybody
checks the proposal against what it sees itself and signs its digest; the generation begins with a full set of signatures only.
A node signs at most one roster per generation number (the number survives a restart on disk), so that two rosters of one
number can never both be complete.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Sequence
from dataclasses import dataclass

import msgpack

from plnode.swarm.messages import Propose, RosterEntry
from wire.identity import PeerId


@dataclass(frozen=True, slots=True)
class Roster:
    """Members of generation `generation`, which starts from `step`; ordered by stage, then by peer id."""

    run: bytes
    generation: int
    step: int
    members: tuple[tuple[PeerId, int], ...]

    @staticmethod
    def of(run: bytes, proposal: Propose) -> Roster:
        """The roster of a proposal.  ValueError when an id is no key, named twice, or the order is not the canonical one."""
        members = tuple((PeerId(e.peer), e.stage) for e in proposal.roster)
        if not members:
            raise ValueError("the roster is empty")
        if len({peer for peer, _ in members}) != len(members):
            raise ValueError("the roster names a peer twice")
        if list(members) != sorted(members, key=lambda e: (e[1], e[0])):
            raise ValueError("the roster is not in canonical order")
        return Roster(run, proposal.generation, proposal.step, members)

    def proposal(self) -> Propose:
        return Propose(self.generation, self.step, tuple(RosterEntry(p.raw, s) for p, s in self.members))

    @property
    def digest(self) -> bytes:
        packed: bytes = msgpack.packb([self.run, self.generation, self.step, [[p.raw, s] for p, s in self.members]])
        return hashlib.sha256(packed).digest()

    @property
    def proposer(self) -> PeerId:
        return min(peer for peer, _ in self.members)

    def stage_of(self, peer: PeerId) -> int | None:
        return next((s for p, s in self.members if p == peer), None)

    @property
    def one_replica_a_stage(self) -> bool:
        """Then the order of all sums is that of one process."""
        return len({stage for _, stage in self.members}) == len(self.members)

    def group(self, stage: int) -> tuple[PeerId, ...]:
        """The replicas of one stage, ascending by id: index = rank."""
        return tuple(p for p, s in self.members if s == stage)


@dataclass(frozen=True, slots=True)
class Voter:
    """What a node knows when it is asked to sign."""

    me: PeerId
    ready: bool
    stage: int | None
    snapshots: tuple[int, ...]
    last_voted: int
    newest_step: int  # the newest step that any node seen ready could restart from
    plausible_generation: int  # no agreement can honestly be further on
    reachable: Container[PeerId]
    stages: int
    replicas: int


GENERATIONS_AHEAD = 64
"""How far beyond what most nodes say a generation number may jump.  There are 2^21 of them (pipeline.microbatch.era): a liar must
not be able to use them up, and a node that was away for long must be able to catch up."""


def base_generation(last_voted: int, claimed: Sequence[int]) -> int:
    """The number of the last agreement as most nodes have it: the median of what they claim, never less than our own vote."""
    return max(last_voted, sorted(claimed)[(len(claimed) - 1) // 2] if claimed else 0)


def next_generation(last_voted: int, claimed: Sequence[int]) -> int:
    """The number to propose: one more than any that is plausible."""
    base = base_generation(last_voted, claimed)
    return max([base, *(number for number in claimed if number <= base + GENERATIONS_AHEAD)]) + 1


def objection(roster: Roster, sender: PeerId, voter: Voter) -> str | None:
    """Why `voter` does not sign, in words, or None."""
    mine = roster.stage_of(voter.me)
    if sender != roster.proposer:
        return f"{sender.short} is not the lowest id of the roster; {roster.proposer.short} proposes"
    if not voter.ready:
        return "not ready"
    if mine is None:
        return "the roster does not name me"
    if mine != voter.stage:
        return f"I hold stage {voter.stage}, not {mine}"
    if roster.generation <= voter.last_voted:
        return f"I have already signed for generation {voter.last_voted}"
    if roster.generation > voter.plausible_generation:
        return f"generation {roster.generation} is far ahead of {voter.last_voted}"
    if roster.step and roster.step not in voter.snapshots:
        return f"I have no snapshot of step {roster.step}"
    if roster.step < voter.newest_step:
        return f"a node that is ready could go on from step {voter.newest_step}"
    short = [s for s in range(voter.stages) if len(roster.group(s)) < voter.replicas]
    if short or any(s >= voter.stages for _, s in roster.members):
        return f"the roster leaves stages {short} short of {voter.replicas} replicas" if short else "the roster names no such stage"
    unseen = [p.short for p, _ in roster.members if p != voter.me and p not in voter.reachable]
    if unseen:
        return f"I have no connection to {', '.join(unseen)}"
    return None
