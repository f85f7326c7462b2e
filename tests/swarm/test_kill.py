"""Real processes that die: the others say why, hold, and go on from the last snapshot when the node is back; nothing is lost or hangs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import pytest
import torch
import trio
from safetensors.torch import load_file

from plnode.manifest import SignedManifest
from plnode.workload.lm import LanguageModel
from plnode.workload.reference import ReferenceTrainer
from tests.swarm.harness import manifest
from tests.swarm.processes import Process, start

pytestmark = pytest.mark.processes
DEADLINE_S = 150.0


class Run:
    def __init__(self, root: Path, signed: SignedManifest, nursery: trio.Nursery) -> None:
        self.root, self.signed, self.nursery = root, signed, nursery
        self.file, self.seeds = root / "run.signed", root / "seeds.txt"
        self.file.write_bytes(signed.raw)
        self.processes: list[Process] = []

    async def seed(self) -> None:
        seed = await start(self.nursery, "seed", self.root / "seed", "seed")
        self.processes.append(seed)
        self.seeds.write_text((await seed.wait_for("NodeStarted"))["addresses"][0] + "\n")

    async def node(self, name: str) -> Process:
        arguments = ("join", "--seeds", str(self.seeds), "--manifest", str(self.file), "--name", name)
        node = await start(self.nursery, name, self.root / name, *arguments)
        self.processes.append(node)
        return node

    def end(self) -> None:
        for process in self.processes:
            if process.process.returncode is None:
                process.kill()

    def check_weights(self) -> None:
        """The result is the one of a run that nobody disturbed, to the bit."""
        torch.set_num_threads(1)
        reference = ReferenceTrainer(LanguageModel(self.signed.manifest))
        list(reference.steps(self.signed.manifest.steps))
        found = {}
        for path in self.root.glob(f"*/snapshots/{self.signed.manifest.steps}/stage-*.safetensors"):
            found.update(load_file(path))
        for name, theirs in reference.weights().items():
            assert torch.equal(found[name], theirs), name


Kind = TypeVar("Kind", bound=Run)


@asynccontextmanager
async def run(root: Path, signed: SignedManifest, kind: type[Kind] = Run) -> AsyncIterator[Kind]:
    """A run of real processes with its seed; all are gone when the block is left."""
    with trio.fail_after(DEADLINE_S):
        async with trio.open_nursery() as nursery:
            swarm = kind(root, signed, nursery)
            try:
                await swarm.seed()
                yield swarm
            finally:
                swarm.end()  # the readers end with their processes, the nursery with them


def small(steps: int) -> SignedManifest:
    changes = {"stages.count": 2, "stages.replicas": 1, "steps": steps, "snapshot.every": 5, "evaluation.every": 0}
    return manifest({**changes, "batch.microbatches": 4})


async def test_a_killed_node_is_named_and_the_run_goes_on_when_it_is_back(tmp_path: Path) -> None:
    signed = small(steps=60)
    async with run(tmp_path, signed) as swarm:
        nodes = [await swarm.node("a"), await swarm.node("b")]
        survivor, victim = nodes
        await victim.wait_for("SnapshotWritten", step=5)
        await survivor.wait_for("SnapshotWritten", step=5)
        identity = victim.of("NodeStarted")[0]["peer_id"]
        victim.kill()
        await victim.ended()
        aborted = await survivor.wait_for("RunAborted")
        assert aborted["peer_id"] == identity
        assert "lost" in aborted["reason"]
        waiting = await survivor.wait_for("Waiting", after=survivor.events.index(aborted), what="for the swarm")
        assert "has 0 of 1 replicas" in waiting["detail"]

        back = await swarm.node("b")
        resumed = await survivor.wait_for("RunStarted", after=survivor.events.index(aborted))
        assert resumed["generation"] > survivor.of("RunStarted")[0]["generation"]
        assert resumed["step"] >= 5, "no step before the snapshot is repeated"
        assert (await back.wait_for("SnapshotLoaded"))["step"] == resumed["step"]
        assert await survivor.ended() == 0
        assert await back.ended() == 0
    swarm.check_weights()


async def test_the_whole_swarm_stops_on_sigterm_and_continues_from_disk(tmp_path: Path) -> None:
    signed = small(steps=25)
    async with run(tmp_path, signed) as swarm:
        first = [await swarm.node("a"), await swarm.node("b")]
        for node in first:
            await node.wait_for("SnapshotWritten", step=5)
        for node in first:
            node.terminate()
        for node in first:
            assert await node.ended() == 0
        second = [await swarm.node("a"), await swarm.node("b")]
        for node in second:
            assert (await node.wait_for("SnapshotLoaded"))["step"] >= 5
        for node in second:
            assert await node.ended() == 0
    swarm.check_weights()
    logs = "".join(path.read_text() for path in tmp_path.glob("*.log"))
    assert "Traceback" not in logs
