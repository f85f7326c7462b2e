"""A whole swarm in one process and one event loop: real sockets on loopback, real device threads, tiny models.

Everything that `plnode join` runs is in it except the process: the network, membership, the muster, generations, snapshots.
Weights are read from the snapshots on disk, since that is what a run leaves behind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import trio
from safetensors.torch import load_file

from plnode.exits import Outcome
from plnode.manifest import SignedManifest, sign
from plnode.manifest_text import default_values, render, shipped_values
from plnode.node import run_node, run_seed
from plnode.observe import events as e
from plnode.observe.recorder import Recorder
from plnode.settings import Settings, load_settings
from wire.identity import Identity

TINY: dict[str, Any] = {
    "name": "tiny",
    "steps": 10,
    "model.dim": 16,
    "model.layers": 6,
    "model.heads": 2,
    "model.kv_heads": 1,
    "model.ffn_dim": 24,
    "model.seq_len": 16,
    "batch.microbatches": 6,
    "batch.sequences": 2,
    "evaluation.every": 5,
    "evaluation.microbatches": 2,
    "snapshot.every": 0,
}


def manifest(changes: Mapping[str, Any] = {}) -> SignedManifest:
    """A signed manifest of a tiny run."""
    toml = render(default_values({**shipped_values(), **TINY, **changes})).encode()
    return SignedManifest.open(sign(Identity.generate(), toml))


@dataclass(slots=True)
class Story:
    """What one node told; `seen` is set anew at each event, for tests that wait for one."""

    events: list[e.Event] = field(default_factory=list)
    changed: trio.Event = field(default_factory=trio.Event)

    def take(self, event: e.Event, time_unix: float) -> None:
        self.events.append(event)
        self.changed.set()
        self.changed = trio.Event()

    def of(self, kind: type[e.Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    async def wait_for(self, kind: type[e.Event], **fields: object) -> Any:
        """The first event of this kind with these fields, now or later."""
        seen = 0
        while True:
            changed = self.changed
            for event in self.events[seen:]:
                if isinstance(event, kind) and all(getattr(event, k) == v for k, v in fields.items()):
                    return event
            seen = len(self.events)
            await changed.wait()


@dataclass(slots=True)
class RunningNode:
    name: str
    folder: Path
    story: Story
    scope: trio.CancelScope
    ended: trio.Event
    outcome: Outcome | None = None


class Swarm:
    """Starts nodes of one run; each has a folder below `root`."""

    def __init__(self, root: Path, signed: SignedManifest, nursery: trio.Nursery) -> None:
        self.root = root
        self.signed = signed
        self.nursery = nursery
        self.nodes: list[RunningNode] = []
        self.seed = Story()
        self.seeds_file = root / "seeds.txt"

    async def start_seed(self, run: bytes | None = None) -> None:
        """`run`: it serves that run only, as a seed that also relays for its members."""
        settings = self._settings("seed", None)
        self.nursery.start_soon(run_seed, settings, Identity.generate(), Recorder([self.seed]), run)
        started = await self.seed.wait_for(e.NodeStarted)
        self.seeds_file.write_text(f"{started.addresses[0]}\n")

    def start_node(self, name: str) -> RunningNode:
        """A node with the data folder `name`, new or left by an earlier one."""
        settings = self._settings(name, self.seeds_file)
        settings.data_dir.mkdir(parents=True, exist_ok=True)
        identity = Identity.load_or_create(settings.key_file)
        node = RunningNode(name, settings.data_dir, Story(), trio.CancelScope(), trio.Event())
        self.nodes.append(node)
        self.nursery.start_soon(self._run, node, settings, identity)
        return node

    async def _run(self, node: RunningNode, settings: Settings, identity: Identity) -> None:
        try:
            with node.scope:
                node.outcome = await run_node(settings, self.signed, identity, Recorder([node.story]))
        finally:
            node.ended.set()

    def _settings(self, name: str, seeds: Path | None) -> Settings:
        flags = {"name": name, "data": str(self.root / name), "listen": "127.0.0.1:0", "scope": "host", "memory": "1GiB"}
        return load_settings(flags if seeds is None else {**flags, "seeds": str(seeds)}, {})

    def weights(self) -> dict[str, list[torch.Tensor]]:
        """Every parameter as each replica's last snapshot has it."""
        last = self.signed.manifest.steps
        found: dict[str, list[torch.Tensor]] = {}
        for node in self.nodes:
            for path in (node.folder / "snapshots" / str(last)).glob("stage-*.safetensors"):
                for name, tensor in load_file(path).items():
                    if not name.startswith("optimizer."):
                        found.setdefault(name, []).append(tensor)
        return found

    def losses(self) -> list[float]:
        """The loss of each step, as the last stage told it."""
        told = {event.step: event.loss for node in self.nodes for event in node.story.of(e.StepDone) if event.loss is not None}
        return [told[step] for step in sorted(told)]


async def train(
    root: Path, signed: SignedManifest, count: int, deadline_s: float = 120.0, *, seed_run: bytes | None = None
) -> Swarm:
    """Run `count` nodes until all of them have finished.  Fails when one ends otherwise or the deadline passes."""
    with trio.fail_after(deadline_s):
        async with trio.open_nursery() as nursery:
            swarm = Swarm(root, signed, nursery)
            await swarm.start_seed(seed_run)
            for number in range(count):
                swarm.start_node(f"node-{number}")
            for node in swarm.nodes:
                await node.ended.wait()
            nursery.cancel_scope.cancel()
    for node in swarm.nodes:
        assert node.outcome is not None, f"{node.name} was cancelled"
        assert node.outcome.exit_code == 0, node.outcome
    return swarm
