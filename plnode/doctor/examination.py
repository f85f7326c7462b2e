"""The order of a visit: what is quick first, then what has to be waited for; each finished check is told at once.

A person who waits half a minute without a line takes the program for hung and the machine for ill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass

from plnode.doctor import checks as c
from plnode.doctor.checks import Check
from plnode.doctor.facts import Network
from plnode.doctor.lines import bandwidth
from plnode.doctor.machine import look_at_machine
from plnode.doctor.report import Conclusion, conclude
from plnode.doctor.stages import Fit, Need, fits, largest, memory
from plnode.doctor.surroundings import entered, lines_to_peers
from plnode.manifest import SignedManifest
from plnode.plan import StagePlan, plan_run
from plnode.settings import Settings
from plnode.stage.snapshots import KEEP
from wire.identity import Identity
from wire.net import SeedList

__all__ = ["Visit"]

SNAPSHOTS = KEEP + 1  # the new one is whole before an old one goes


@dataclass(frozen=True, slots=True)
class Visit:
    """One run of the doctor.  `told(check)` hears of each finished check, `waiting(text)` again and again for what it is waited."""

    settings: Settings
    signed: SignedManifest
    told: Callable[[Check], None]
    waiting: Callable[[str], None]

    def machine(self, held: int | None) -> tuple[list[Check], list[int]]:
        """Without the network: the checks, and which stages fit.  `held`: by a node that runs here."""
        self.waiting("this machine")
        manifest = self.signed.manifest
        facts = look_at_machine(self.settings, manifest)
        needs = [_need(plan) for plan in plan_run(manifest).stages]
        snapshots_of = next((need for need in needs if need.stage == held), largest(facts, needs))
        stages = [need.stage for need, fit in zip(needs, fits(facts, needs), strict=True) if fit is not Fit.NOT]
        found = [
            c.versions(facts.versions),
            c.disk(facts.disk, None if snapshots_of is None else snapshots_of.snapshot_bytes, SNAPSHOTS),
            c.device(facts.device),
            *memory(facts, needs, held),
            c.descriptors(facts.descriptors, facts.connections_most),
            c.congestion(facts.bbr),
            c.relaying(self.settings.relay, self.settings.relay_rate),
        ]
        return self._all(found), stages if held is None else [held]

    def _all(self, found: Iterable[Check]) -> list[Check]:
        kept = list(found)
        for check in kept:
            self.told(check)
        return kept

    def network(self, facts: Network) -> list[Check]:
        """The verdicts about the network, however its facts were found out."""
        peers = len(facts.peers)
        return self._all(
            [
                c.listening(facts),
                c.reachability(facts),
                *c.seeds(facts.seeds, peers),
                c.clock([peer.clock_offset_s for peer in facts.peers]),
            ]
        )

    def beside(self, facts: Network) -> tuple[list[Check], Conclusion]:
        """Beside a node that runs, which has told `facts`: nothing is connected, and its line is left alone."""
        found, stages = self.machine(facts.held_stage)
        found += self.network(facts)
        left = "a node runs here and needs the line; `plnode bench PEER` measures one all the same"
        found += self._all([Check("lines", c.Verdict.SKIPPED, left)])
        return found, conclude(found, stages, "direct" if facts.scope != "internet" else facts.access)

    async def alone(self, identity: Identity, seeds: SeedList | None, seconds: float) -> tuple[list[Check], Conclusion]:
        """The whole visit.  `seconds`: for each direction and number of lanes, 0 to leave lines out."""
        found, stages = self.machine(None)
        async with entered(self.settings, identity, self.signed.run_id, seeds) as surroundings:
            facts = await surroundings.look(self.waiting)
            found += self.network(facts)
            measured = 0
            if seconds:
                per_token = _bytes_per_token(plan_run(self.signed.manifest).stages)
                async with aclosing(lines_to_peers(surroundings.net, seconds, self.waiting)) as lines:
                    async for line in lines:
                        found += self._all([bandwidth(line, per_token)])
                        measured += 1
            if not measured:
                why = "no node that trains in this run is connected" if seconds else "left out (--quick)"
                found += self._all([Check("lines", c.Verdict.SKIPPED, why)])
        return found, conclude(found, stages, facts.access)


def _need(plan: StagePlan) -> Need:
    return Need(plan.stage, plan.memory_bytes, plan.least_bytes, plan.weights_bytes + plan.optimizer_bytes)


def _bytes_per_token(plans: Iterable[StagePlan]) -> float:
    """The most that a stage sends on for a token in one direction; 0 in a run of one stage."""
    ways = [way for plan in plans for way in (plan.forward_bytes_per_token, plan.backward_bytes_per_token)]
    return max((way for way in ways if way is not None), default=0.0)
