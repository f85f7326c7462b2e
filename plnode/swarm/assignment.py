"""Who holds which stage before a generation begins: a pure function of the claims that a node has seen.

The swarm is as fast as its poorest stage, so a node goes where the need is greatest (assignment.md, section 2): first to stages
with fewer members than the run starts with, emptiest first; then to the stage whose replicas together do the fewest
microbatches an hour.  Every node evaluates the same function on the claims it knows and takes its own line of the result.  While claims are
still on their way two nodes may pick the same stage; as soon as both claims are known everywhere the function sends exactly one
of them on, so that it converges without a leader and without waiting for quiet.

Nodes that have something to lose stay put, in this order: active ones, holders of a snapshot, then earlier claimants by id.
Ties between stages go to the lower index for the first fill and are otherwise broken by SHA-256(peer id, run, stage), so that
joiners of one moment spread out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from plnode.swarm.claims import NodeState, StageClaim
from wire.identity import PeerId


@dataclass(frozen=True, slots=True)
class Need:
    """One stage and the bytes that a node needs for it."""

    stage: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """One node.  `fixed` is a stage it holds a snapshot of or is active in; `claimed` one that it said it would take.
    `speed` is microbatches an hour, 0 = not measured."""

    peer: PeerId
    memory_bytes: int
    speed: int
    active: bool
    fixed: int | None
    claimed: int | None


def candidates(present: Iterable[tuple[PeerId, StageClaim]]) -> list[Candidate]:
    """The nodes as their claims describe them.  Who is active or holds a snapshot is bound to its stage."""
    return [
        Candidate(
            peer=peer,
            memory_bytes=claim.memory_bytes,
            speed=claim.microbatches_per_hour,
            active=claim.state == NodeState.ACTIVE,
            fixed=claim.stage if claim.snapshots or claim.state == NodeState.ACTIVE else None,
            claimed=claim.stage,
        )
        for peer, claim in present
    ]


def assign(nodes: Sequence[Candidate], needs: Sequence[Need], replicas: int, run: bytes) -> dict[PeerId, int | None]:
    """The stage of every candidate; None for one whose memory fits no stage."""
    members: dict[int, int] = {need.stage: 0 for need in needs}
    speeds: dict[int, float] = {need.stage: 0.0 for need in needs}
    by_stage = {need.stage: need for need in needs}
    usual = sorted(c.speed for c in nodes if c.speed > 0)
    default_speed = float(usual[len(usual) // 2]) if usual else 1.0
    result: dict[PeerId, int | None] = {}

    def put(candidate: Candidate, stage: int | None) -> None:
        result[candidate.peer] = stage
        if stage is not None:
            members[stage] += 1
            speeds[stage] += candidate.speed or default_speed

    def standing(candidate: Candidate) -> tuple[int, PeerId]:
        settled = candidate.fixed is not None
        rank = 0 if settled and candidate.active else 1 if settled else 2 if candidate.claimed is not None else 3
        return rank, candidate.peer

    for candidate in sorted(nodes, key=standing):
        fits = [s for s, need in by_stage.items() if need.memory_bytes <= candidate.memory_bytes]
        if candidate.fixed in by_stage:
            put(candidate, candidate.fixed)
            continue
        short = [s for s in fits if members[s] < replicas]
        if candidate.claimed in fits and (not short or members[candidate.claimed or 0] < replicas):
            put(candidate, candidate.claimed)
        elif short:
            put(candidate, min(short, key=lambda s: (members[s], s)))
        elif fits:
            put(candidate, min(fits, key=lambda s: (speeds[s], _tie(candidate.peer, run, s))))
        else:
            put(candidate, None)
    return result


def _tie(peer: PeerId, run: bytes, stage: int) -> bytes:
    return hashlib.sha256(peer.raw + run + stage.to_bytes(4, "big")).digest()
