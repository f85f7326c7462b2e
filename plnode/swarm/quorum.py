"""Whether a generation of the run can begin, with whom and from which step: a pure function of the nodes present.

A generation needs `replicas` ready nodes at every stage, all of which can start from one and the same step.  Step 0 can be made
by anybody from the manifest's seed.  But when somebody holds a later snapshot, starting again from 0 would throw work away
without a word: then the greatest step that enough holders of *every* stage share is taken, and if there is none, the run holds
and says which stage lacks a holder of what.  Unless nothing can be lost: if all that anybody holds is the run's first snapshot, a stage
was cut off while it wrote its own, nobody ever had a common one, and the run begins again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wire.identity import PeerId


@dataclass(frozen=True, slots=True)
class Present:
    """A node that is ready: its stage and the steps it has snapshots of (0 needs none)."""

    peer: PeerId
    stage: int
    snapshots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Start:
    """A generation can begin at `step` with these nodes, ordered by stage, then by peer id."""

    step: int
    roster: tuple[tuple[PeerId, int], ...]


@dataclass(frozen=True, slots=True)
class Shortage:
    """It cannot; `reason` says what is missing, for the person who waits."""

    reason: str


def quorum(present: Sequence[Present], stages: int, replicas: int, first_snapshot: int = 0) -> Start | Shortage:
    """Decide on the nodes that are ready.  `first_snapshot`: the first step that the run ever writes; 0 = none before its end."""
    by_stage: dict[int, list[Present]] = {stage: [] for stage in range(stages)}
    for node in present:
        if node.stage in by_stage:
            by_stage[node.stage].append(node)
    short = [(s, len(nodes)) for s, nodes in by_stage.items() if len(nodes) < replicas]
    if short:
        parts = ", ".join(f"stage {s} has {have} of {replicas} replicas" for s, have in short)
        return Shortage(f"not enough nodes yet: {parts}")
    steps = sorted({step for node in present for step in node.snapshots} | {0}, reverse=True)
    for step in steps:
        able = {s: [n for n in nodes if step == 0 or step in n.snapshots] for s, nodes in by_stage.items()}
        if all(len(nodes) >= replicas for nodes in able.values()):
            if step == 0 and steps[0] > first_snapshot:
                break
            roster = tuple(sorted(((n.peer, s) for s, nodes in able.items() for n in nodes), key=lambda e: (e[1], e[0])))
            return Start(step, roster)
    newest = steps[0]
    lacking = tuple(
        s for s, nodes in by_stage.items() if sum(1 for n in nodes if newest in n.snapshots) < replicas
    )
    holders = ", ".join(
        f"stage {s} has {sum(1 for n in by_stage[s] if newest in n.snapshots)} of {replicas}" for s in lacking
    )
    return Shortage(
        f"the run stood at step {newest}, but not every stage has {replicas} nodes with that snapshot on disk ({holders}); "
        "start the nodes that held them with their old data folders"
    )
