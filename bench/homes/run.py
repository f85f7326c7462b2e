"""The same swarm twice on one lab's lines: six nodes with public addresses, then four of the six behind routers of three kinds.

The lines are alike in both (rate and delay of each access line), and so is the machine, so the ratio is what routers, relays and
punched holes cost; the absolute figures are those of six nodes on the cores of one machine.  A step's time is taken from the last
stage's node, from the end of the first `WARM` steps to the end of the run, which leaves out meeting and slow starts; how long meeting
took stands beside it.  The seed belongs to the run and so relays, and so do the two nodes that stay public.

Two runs of a minute on a shared machine differ by a tenth: the swarms take turns, and the ratio is taken within each turn.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import trio

from bench.children import BenchFailed, Child, open_children
from bench.conditions import conditions
from bench.homes.swarm import Swarm, new_run
from bench.lab import Lab, Network, needs, open_lab
from bench.report import Bar, Column, Report, Row, ratios

ROUTERS = ("cone", "shift", "symmetric", "cone")
NODES = 6
WARM = 5
COLUMNS = (
    Column("tokens_per_s", "tokens/s"),
    Column("first_step_s", "to the first step s"),
    Column("punched", "paths punched"),
    Column("relayed", "relayed"),
)


@dataclass(frozen=True, slots=True)
class HomesPlan:
    steps: int = 40
    repeats: int = 2
    rate_mbit: float = 100.0
    rtt_ms: float = 40.0
    settings: tuple[str, ...] = ("stages.count=3", "stages.replicas=2")
    patience_s: float = 300.0

    @classmethod
    def quick(cls) -> HomesPlan:
        return cls(steps=15, repeats=1)


@dataclass(frozen=True, slots=True)
class Measured:
    """One run.  Paths are counted from both ends, at the end of the run, without those to the seed."""

    tokens_per_s: float
    first_step_s: float
    paths: Counter[str]


async def run_homes(plan: HomesPlan) -> Report:
    """Raises BenchFailed with the words of the process that failed."""
    reason = needs()
    if reason is not None:
        raise BenchFailed(reason)
    public: list[Measured] = []
    homes: list[Measured] = []
    for turn in range(plan.repeats):
        for found, routers in ((public, ()), (homes, ROUTERS)):
            what = f"{len(routers)} of {NODES} nodes behind routers" if routers else f"{NODES} nodes with public addresses"
            sys.stderr.write(f"turn {turn + 1} of {plan.repeats}: {what}\n")
            network = Network(
                rate_mbit=plan.rate_mbit, rtt_ms=plan.rtt_ms, public=1 + NODES - len(routers), routers=tuple(routers)
            )
            with open_lab(network) as lab:
                found.append(await _measure(lab, plan, len(routers)))
    rows = [_row("public", public), _row("homes", homes)]
    ratio = ratios([one.tokens_per_s for one in homes], [one.tokens_per_s for one in public])
    stated = {
        **conditions(("torch", "trio")),
        "lines": f"{plan.rate_mbit:g} Mbit/s each way, {plan.rtt_ms:g} ms there and back",
        "routers": ", ".join(ROUTERS),
        "run": f"{plan.steps} steps, {', '.join(plan.settings)}",
    }
    return Report(
        bench="homes",
        conditions=stated,
        columns=COLUMNS,
        rows=rows,
        bars=(Bar("tokens/s behind routers / with public addresses", ratio, at_least=0.8),),
    )


def _row(name: str, runs: Sequence[Measured]) -> Row:
    samples = {
        "tokens_per_s": [run.tokens_per_s for run in runs],
        "first_step_s": [run.first_step_s for run in runs],
        "punched": [float(run.paths["punched"]) for run in runs],
        "relayed": [float(run.paths["relayed"]) for run in runs],
    }
    return Row(name, samples)


async def _measure(lab: Lab, plan: HomesPlan, behind: int) -> Measured:
    root = Path(tempfile.mkdtemp(prefix="bench-homes-"))
    try:
        signed = await new_run(root, *plan.settings, f"steps={plan.steps}", "snapshot.every=1000")
        with trio.fail_after(plan.patience_s):
            async with open_children() as children:
                swarm = Swarm(lab, children, root, signed)
                await swarm.seed("p1", "--relay-rate", "20MB")
                hosts = [f"p{number}" for number in range(2, 2 + NODES - behind)] + [f"h{number}" for number in range(1, 1 + behind)]
                began = time.monotonic()
                nodes = [await swarm.node(host) for host in hosts]
                return await _watch(nodes, plan, began)
    finally:
        shutil.rmtree(root, ignore_errors=True)


async def _watch(nodes: Sequence[Child], plan: HomesPlan, began: float) -> Measured:
    """Read every node's events until the last step."""
    done: dict[int, tuple[float, int]] = {}  # step -> when some node first said that it is done, and its tokens
    paths: dict[str, Counter[str]] = {}

    async def follow(node: Child) -> None:
        while True:
            event = await node.hear(plan.patience_s)
            if event["kind"] == "StepDone":
                done.setdefault(event["step"], (time.monotonic(), event["tokens"]))
                if event["step"] == plan.steps - 1:  # steps count from 0
                    return
            elif event["kind"] == "NodeStatus":
                kinds = (peer["path"].split()[0] for peer in event["peers"] if peer["stage"] is not None)
                paths[node.name] = Counter(kinds)

    async with trio.open_nursery() as nursery:
        for node in nodes:
            nursery.start_soon(follow, node)
    last = plan.steps - 1
    start, (end, _) = min(WARM, last - 1), done[last]
    tokens = sum(count for step, (_, count) in done.items() if step > start)
    return Measured(tokens / (end - done[start][0]), done[min(done)][0] - began, sum(paths.values(), Counter()))
