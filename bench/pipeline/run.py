"""`python -m bench pipeline`: tokens a second of four ways to train the same model on the same cores.

    plnode             one node a stage, each on one core, over the encrypted protocol        (swarm.py)
    single-1-thread    one process on one core; two of them would be the most two cores can give (single.py)
    single-all-cores   one process with a thread on each of the cores the pipeline has         (single.py)
    torch-1f1b-gloo    torch.distributed.pipelining, one rank a stage, each on one core        (onefoneb.py)

The rows take turns within each repeat.  The three that are plain programs stay alive, waiting on stdin, while others compute; a
swarm is started anew each time, because a node that is stopped in between would be taken for dead by its peers, rightly.  In each
turn the first step is dropped.  A sample is one step; the requirements compare the medians of the turns.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

from bench.children import Child, Children, open_children, python
from bench.conditions import conditions, usable_cores
from bench.others import Others
from bench.pipeline.job import Size, write_manifest
from bench.pipeline.swarm import train_swarm
from bench.report import Bar, Column, Report, Row, ratios

__all__ = ["Plan", "run_pipeline"]

START_S = 180.0
STEP_S = 180.0
PACKAGES = ("torch", "trio", "cryptography", "numpy")
COLUMNS = (Column("tokens_per_s", "tokens/s"), Column("loop_blocked_p99_ms", "loop blocked p99 ms"))
ROWS = ("plnode", "single-1-thread", "single-all-cores", "torch-1f1b-gloo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`repeats` turns for each row, with `steps` measured steps after a dropped one."""

    stages: int = 2
    repeats: int = 3
    steps: int = 3
    size: Size = field(default_factory=Size)

    @classmethod
    def quick(cls, stages: int) -> Plan:
        """Under 45 s on two free cores: the same model, a quarter of the tokens a step, one turn."""
        return cls(stages=stages, repeats=1, steps=2, size=Size(sequences=1, microbatches=8))


@dataclass(slots=True)
class _Figures:
    """By row: all steps, and one median a turn."""

    steps: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in ROWS})
    turns: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in ROWS})
    others: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in ROWS})
    loop_p99_ms: list[float] = field(default_factory=list)

    def add(self, name: str, tokens_per_s: Sequence[float], others_cores: float) -> None:
        self.others[name].append(others_cores)
        self.steps[name] += tokens_per_s
        self.turns[name].append(statistics.median(tokens_per_s))


async def run_pipeline(plan: Plan) -> Report:
    """Raises BenchFailed if a process dies or is silent."""
    usable = usable_cores()
    cores = tuple(usable[i % len(usable)] for i in range(plan.stages))
    stated = conditions(PACKAGES)
    figures = _Figures()
    with tempfile.TemporaryDirectory(prefix="plnode-bench-") as name:
        folder = Path(name)
        manifest = write_manifest(folder, plan.size, plan.stages)
        async with open_children() as children:
            trainers = await _trainers(children, manifest, cores)
            for repeat in range(plan.repeats):
                print(f"pipeline: repeat {repeat + 1} of {plan.repeats}", file=sys.stderr, flush=True)
                await _turn(plan, figures, trainers, folder / f"swarm-{repeat}", manifest, cores)
    size = plan.size
    stated |= {
        "parameters": trainers.parameters,
        "stages": plan.stages,
        "cores_of_stages": list(cores),
        "torch_threads": {"plnode": 1, "single-1-thread": 1, "single-all-cores": len(set(cores)), "torch-1f1b-gloo": 1},
        "batch": f"{size.microbatches} microbatches x {size.sequences} x {size.seq_len} tokens",
        "repeats": plan.repeats,
        "steps_a_repeat": plan.steps,
        "others_used_cores": {name: round(statistics.median(cores), 2) for name, cores in figures.others.items()},
        "congestion": {"plnode": "bbr where the kernel allows it", "torch-1f1b-gloo": "the kernel's default"},
    }
    notes = []
    if len(usable) < plan.stages:
        notes.append(f"{plan.stages} stages share {len(usable)} cores: no ratio below means anything")
    return Report(
        bench="pipeline", conditions=stated, columns=COLUMNS, rows=_rows(figures), bars=_bars(figures, plan), notes=notes
    )


@dataclass(frozen=True, slots=True)
class _Trainers:
    """The rows that are no nodes, each with the processes that make it up."""

    rows: Mapping[str, Sequence[Child]]
    parameters: int


async def _trainers(children: Children, manifest: Path, cores: Sequence[int]) -> _Trainers:
    given: dict[str, Any] = {"manifest": str(manifest), "threads": 1}
    everywhere = sorted(set(cores))
    one = await children.start("single-1-thread", python("bench.pipeline.single"), cores[:1])
    every = await children.start("single-all-cores", python("bench.pipeline.single"), everywhere)
    ranks = [
        await children.start(f"torch-1f1b-gloo rank {rank}", python("bench.pipeline.onefoneb"), [core])
        for rank, core in enumerate(cores)
    ]
    await one.tell(given)
    await every.tell(given | {"threads": len(everywhere)})
    given["world"] = len(ranks)
    store = await ranks[0].ask(given | {"rank": 0}, START_S)
    for rank, child in enumerate(ranks[1:], start=1):
        await child.tell(given | store | {"rank": rank})
    said = [await child.hear(START_S) for child in (one, every, *ranks)]
    return _Trainers(
        {"single-1-thread": [one], "single-all-cores": [every], "torch-1f1b-gloo": ranks}, said[0]["parameters"]
    )


async def _turn(
    plan: Plan, figures: _Figures, trainers: _Trainers, folder: Path, manifest: Path, cores: Sequence[int]
) -> None:
    """One turn of every row."""
    await trio.Path(folder).mkdir()
    count = plan.steps + 1
    tally = await train_swarm(folder, manifest, cores, count)
    figures.add("plnode", tally.tokens_per_s(), tally.others_cores)
    figures.loop_p99_ms += tally.loop_p99_ms
    tokens = plan.size.microbatches * plan.size.sequences * plan.size.seq_len
    for name, processes in trainers.rows.items():
        others = Others([child.pid for child in processes])
        seconds = await _train(processes, count)
        figures.add(name, [tokens / s for s in seconds[1:]], others.cores())


async def _train(processes: Sequence[Child], count: int) -> list[float]:
    """Seconds of each step: of the slowest process, where there are several."""
    answers: list[list[float]] = []

    async def ask(child: Child) -> None:
        answers.append((await child.ask({"steps": count}, STEP_S * count))["seconds"])

    async with trio.open_nursery() as nursery:
        for child in processes:
            nursery.start_soon(ask, child)
    return [max(step) for step in zip(*answers, strict=True)]


def _rows(figures: _Figures) -> list[Row]:
    loop = {"plnode": figures.loop_p99_ms}
    return [Row(name, {"tokens_per_s": figures.steps[name], "loop_blocked_p99_ms": loop.get(name, [])}) for name in ROWS]


def _bars(figures: _Figures, plan: Plan) -> list[Bar]:
    ours = figures.turns["plnode"]
    single = ratios(ours, figures.turns["single-1-thread"], plan.stages)
    return [
        Bar(f"plnode / ({plan.stages} x single-1-thread)", single, at_least=0.8),
        Bar("plnode / torch-1f1b-gloo", ratios(ours, figures.turns["torch-1f1b-gloo"]), at_least=1.0),
        Bar("event loop blocked, p99 of each second, ms", figures.loop_p99_ms, at_most=5.0),
    ]
