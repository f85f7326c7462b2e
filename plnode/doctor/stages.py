"""Which stages of a run fit into this machine's memory.

A node says how much it has, and is only given a stage whose least need fits; so the figure compared with here is the node's own
(`plnode/memory.py`): the setting, or what is available now and what a container's limit leaves.  With the least need a stage works
but repeats forwards, a third more compute; it keeps all graphs only with the whole need.

Two limits can be lower than that figure, and then the stage dies later: the memory of the GPU, and a container's limit below what the
owner has set.

Runs have up to 256 stages, of which the middle ones are alike: neighbours of one fate are one line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby

from plnode.doctor.checks import Check, Verdict
from plnode.doctor.facts import Machine
from plnode.observe.lines import quantity

__all__ = ["Fit", "Need", "fits", "largest", "memory"]


class Fit(StrEnum):
    WHOLE = "whole"
    REPEATING = "repeating"
    NOT = "not"


@dataclass(frozen=True, slots=True)
class Need:
    """Of one stage, in bytes: with all graphs, with one, and what a snapshot of it takes."""

    stage: int
    whole_bytes: int
    least_bytes: int
    snapshot_bytes: int


def _has(machine: Machine) -> int:
    """What a stage may use: the node's figure, less where the GPU or a container has less."""
    free = machine.device.free_bytes if machine.device.kind != "cpu" else None
    figure = machine.available_bytes if machine.allowed_bytes is None else machine.allowed_bytes
    return min(figure, machine.limit_bytes, figure if free is None else free)


def fits(machine: Machine, needs: Sequence[Need]) -> list[Fit]:
    """For each stage."""
    has = _has(machine)
    return [Fit.WHOLE if n.whole_bytes <= has else Fit.REPEATING if n.least_bytes <= has else Fit.NOT for n in needs]


def largest(machine: Machine, needs: Sequence[Need]) -> Need | None:
    """The one that fits and whose snapshots are largest; None if none fits."""
    possible = [need for need, fit in zip(needs, fits(machine, needs), strict=True) if fit is not Fit.NOT]
    return max(possible, key=lambda need: need.snapshot_bytes, default=None)


def memory(machine: Machine, needs: Sequence[Need], held: int | None) -> list[Check]:
    """A line about what there is, then one for each group of stages.  `held`: what a running node here holds already."""
    if held is not None:
        return [Check("memory", Verdict.OK, f"the running node holds stage {held}: it fits")]
    return [_figure(machine), *_groups(needs, fits(machine, needs))]


def _figure(machine: Machine) -> Check:
    has, allowed = _has(machine), machine.allowed_bytes
    if allowed is None:
        found = f"{quantity(machine.available_bytes, 'B')} available now"
    else:
        found = f"{quantity(allowed, 'B')} allowed (--memory), {quantity(machine.available_bytes, 'B')} available now"
        if has == allowed > machine.available_bytes:
            fix = "close other programs, or allow less with --memory: what is not there is taken from the disk, slowly"
            return Check("memory", Verdict.WARNING, found, fix)
    node = machine.available_bytes if allowed is None else allowed
    if has < node:
        fix = f"a node would be killed beyond that; allow it no more: --memory {max(has >> 20, 1)}MiB"
        return Check("memory", Verdict.WARNING, f"{found}, but the device or the container has only {quantity(has, 'B')}", fix)
    return Check("memory", Verdict.OK, found)


def _groups(needs: Sequence[Need], fates: Sequence[Fit]) -> list[Check]:
    nothing = all(fate is Fit.NOT for fate in fates)
    checks = []
    for fate, group in groupby(zip(fates, needs, strict=True), key=lambda pair: pair[0]):
        members = [need for _, need in group]
        name = f"stage {members[0].stage}" if len(members) == 1 else f"stages {members[0].stage}-{members[-1].stage}"
        whole, least = (quantity(max(figures), "B") for figures in zip(*((n.whole_bytes, n.least_bytes) for n in members), strict=True))
        match fate:
            case Fit.WHOLE:
                checks.append(Check(name, Verdict.OK, f"fits: needs {whole}"))
            case Fit.REPEATING:
                fix = f"{whole} would save a quarter of the computing"
                checks.append(Check(name, Verdict.OK, f"fits by repeating forwards: needs {least}, {whole} to keep them", fix))
            case Fit.NOT:
                fix = f"allow {least} or more (--memory), or close other programs" if nothing else ""
                checks.append(Check(name, Verdict.BAD if nothing else Verdict.WARNING, f"does not fit: needs {least} at least", fix))
    return checks
