"""The row `plnode`: a seed and one node a stage, as real processes, exactly as people start them.

A node is `plnode join`, bound to a core of its own and computing with one thread: its event loop, its encryption and its device
thread share that core, as they do on a contributor's machine.  The seed is idle once they have met and is not bound.

What is measured is read from the events on their stdout.  A step is over when the last stage has said so; the time between two
such moments is the step's, whatever happens in it.  The first step has no moment before it and is dropped, as for all rows.  The
event loop's figures are those of each second in which the node trained (`NodeStatus.loop_blocked_p99_ms`).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

from bench.children import BenchFailed, environment, pinned, python
from bench.others import Others
from plnode.demo.launcher import Exited, Launcher, Said, open_launcher
from plnode.observe import events as e
from wire.address import Address

__all__ = ["Tally", "train_swarm"]

SEED = "seed"
# From process start to the first step, or from step to step, on a machine that is busy with other things.
PATIENCE_S = 180.0


@dataclass(slots=True)
class Tally:
    """What the nodes told, in the order in which it came.  Pure: lines in, figures out."""

    nodes: int
    ends: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    tokens: dict[int, int] = field(default_factory=dict)
    loop_p99_ms: list[float] = field(default_factory=list)
    last_words: dict[str, str] = field(default_factory=dict)
    others_cores: float = 0.0
    """What other programs used from the first step to the last, in cores."""

    def take(self, name: str, document: dict[str, Any]) -> None:
        """One event of a node.  Raises BenchFailed for a run that did not go through undisturbed."""
        match e.event_from_json(document):
            case e.StepDone(step, _, tokens, _, _, skipped):
                if skipped:
                    raise BenchFailed(f"plnode: step {step} was left out for a gradient that is not finite")
                self.ends[step].append(float(document["time"]))
                self.tokens[step] = tokens
            case e.RunAborted(step, reason):
                raise BenchFailed(f"plnode: step {step} was given up: {reason}")
            case e.NodeStatus(state="training", loop_blocked_p99_ms=p99) if self.steps_done:
                self.loop_p99_ms.append(p99)
            case e.Waiting(what, detail):
                self.last_words[name] = f"waits for {what} ({detail})"
            case e.NodeStopped(reason):
                self.last_words[name] = f"stopped: {reason}"

    @property
    def steps_done(self) -> int:
        """Steps that all nodes have ended."""
        return sum(len(times) == self.nodes for times in self.ends.values())

    def tokens_per_s(self) -> list[float]:
        """Of each step but the first."""
        whole = sorted(step for step, times in self.ends.items() if len(times) == self.nodes)
        ends = [max(self.ends[step]) for step in whole]
        return [
            self.tokens[step] / (end - before) for step, before, end in zip(whole[1:], ends[:-1], ends[1:], strict=True)
        ]


async def train_swarm(folder: Path, manifest: Path, cores: Sequence[int], steps: int) -> Tally:
    """Train `steps` steps with one node a core; `folder` is new.  Raises BenchFailed.  No process is left, whatever happens."""
    tally = Tally(nodes=len(cores))
    common = ["--scope", "host", "--listen", "127.0.0.1:0", "--json", "--exit-with-stdin"]
    seeds = folder / "seeds.txt"
    async with open_launcher() as launcher:
        argv = python("plnode", "seed", "--name", SEED, "--data", str(folder / SEED), *common)
        await launcher.start(SEED, argv, log=folder / "seed.log", env=environment())
        await trio.Path(seeds).write_text(f"{await _seed_entry(launcher)}\n")
        pids = []
        for number, core in enumerate(cores):
            name = f"node-{number}"
            own = ["--name", name, "--data", str(folder / name), "--threads", "1"]
            argv = python("plnode", "join", *own, "--seeds", str(seeds), "--manifest", str(manifest), *common)
            pids.append(await launcher.start(name, pinned([core], argv), log=folder / f"{name}.log", env=environment()))
        others = None
        while tally.steps_done < steps:
            if tally.steps_done and others is None:
                others = Others(pids)
            done = tally.steps_done
            with trio.move_on_after(PATIENCE_S):
                while tally.steps_done == done:
                    await _hear(launcher, tally)
            if tally.steps_done == done:
                said = "".join(f"\n  {name} {words}" for name, words in sorted(tally.last_words.items()))
                raise BenchFailed(f"plnode: no step within {PATIENCE_S:g} s after {done} steps{said}")
        tally.others_cores = others.cores() if others is not None else 0.0
    return tally


async def _hear(launcher: Launcher, tally: Tally) -> None:
    message = await launcher.messages.receive()
    if isinstance(message, Exited):
        raise _died(message)
    if message.name != SEED and (document := _document(message)) is not None:
        tally.take(message.name, document)


async def _seed_entry(launcher: Launcher) -> str:
    """The seed's line for a seed list, from its first words."""
    with trio.move_on_after(PATIENCE_S):
        while True:
            message = await launcher.messages.receive()
            if isinstance(message, Exited):
                raise _died(message)
            if (document := _document(message)) is not None:
                event = e.event_from_json(document)
                if isinstance(event, e.NodeStarted) and event.addresses:
                    address = Address.parse(event.addresses[0])
                    return f"{event.peer_id}@{address.host}:{address.port}"
    raise BenchFailed(f"plnode: the seed did not say its address within {PATIENCE_S:g} s")


def _document(message: Said) -> dict[str, Any] | None:
    """The event in a line of stdout; a line that is none (a gap) is in the log."""
    if message.stream != "stdout":
        return None
    try:
        document = json.loads(message.text)
    except ValueError:
        return None
    return document if isinstance(document, dict) and document.get("kind") in e.KINDS else None


def _died(exited: Exited) -> BenchFailed:
    said = "".join(f"\n  | {line}" for line in exited.last_lines) or " (it said nothing)"
    return BenchFailed(f"plnode: {exited.name} ended with code {exited.code}{said}")
