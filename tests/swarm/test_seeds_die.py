"""All seeds die for good: a running swarm does not notice, and a node that was in it comes back through the peers that it remembers.

A seed only introduces.  If anything in a run hung on one that lives (a circuit that is asked for again, a list that is fetched,
a peer book that a seed fills), the death of the last would end the run or lock every node out that restarts.  The processes are
killed without a goodbye, so that nothing is told by a closing message.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import trio

from plnode.manifest import SignedManifest
from plnode.node import STATUS_EVERY_S
from tests.swarm.processes import Process, start
from tests.swarm.test_kill import Run, run, small
from wire.limits import DEFAULT_LIMITS

pytestmark = pytest.mark.processes

STEPS = 40  # a step takes tens of milliseconds; seeds die at the fifth, so most of the run is without them


class TwoSeeds(Run):
    """A run that two seeds introduce."""

    def __init__(self, root: Path, signed: SignedManifest, nursery: trio.Nursery) -> None:
        super().__init__(root, signed, nursery)
        self.seeding: list[Process] = []

    async def seed(self) -> None:
        lines = []
        for name in ("seed-1", "seed-2"):
            seed = await start(self.nursery, name, self.root / name, "seed")
            self.processes.append(seed)
            self.seeding.append(seed)
            lines.append((await seed.wait_for("NodeStarted"))["addresses"][0] + "\n")
        self.seeds.write_text("".join(lines))

    async def kill_seeds(self) -> None:
        for seed in self.seeding:
            seed.kill()
        for seed in self.seeding:
            assert await seed.ended() == -9


def last_status(node: Process) -> dict[str, object]:
    return node.of("NodeStatus")[-1]


async def says_that_no_seed_answers(node: Process, entries: list[str]) -> None:
    notice = await node.wait_for("Notice")
    while "no seed can be reached" not in notice["text"]:
        notice = await node.wait_for("Notice", after=node.events.index(notice) + 1)
    for entry in entries:
        assert entry in notice["text"]


async def longer_than_remembered_peers_take(node: Process) -> None:
    """The node's own clock is its status, one a second: remembered peers are dialled 2 s after the start, when seeds are silent."""
    after = 0
    for _ in range(2 + int(DEFAULT_LIMITS.known_peers_delay_s / STATUS_EVERY_S)):
        after = node.events.index(await node.wait_for("NodeStatus", after=after), after) + 1


async def test_a_run_does_not_notice_that_all_seeds_are_killed(tmp_path: Path) -> None:
    async with run(tmp_path, small(steps=STEPS), TwoSeeds) as swarm:
        nodes = [await swarm.node("a"), await swarm.node("b")]
        for node in nodes:
            await node.wait_for("SnapshotWritten", step=5)
        await swarm.kill_seeds()
        for node in nodes:
            assert not [s for s in node.of("SnapshotWritten") if s["step"] == STEPS], "the seeds outlived the run: it is too short"
        for node in nodes:
            assert await node.ended() == 0
    killed = {seed.of("NodeStarted")[0]["peer_id"] for seed in swarm.seeding}
    for node in nodes:
        lost = [n for n, event in enumerate(node.events) if event["kind"] == "PeerLost" and event["peer_id"] in killed]
        assert len(lost) == 2, "the seeds did not die while the node ran"
        without = [event for event in node.events[lost[-1] :] if event["kind"] == "StepDone"]
        assert len(without) >= STEPS // 4, "most of the run is to be without seeds"
        assert node.of("RunAborted") == []
        assert last_status(node)["lost_microbatches"] == 0
        assert len(node.of("RunStarted")) == 1
    swarm.check_weights()


async def test_a_node_comes_back_by_the_peers_it_remembers_and_not_without_them(tmp_path: Path) -> None:
    async with run(tmp_path, small(steps=STEPS), TwoSeeds) as swarm:
        survivor, leaver = await swarm.node("a"), await swarm.node("b")
        for node in (survivor, leaver):
            await node.wait_for("SnapshotWritten", step=5)
        await swarm.kill_seeds()
        leaver.terminate()
        assert await leaver.ended() == 0
        aborted = survivor.events.index(await survivor.wait_for("RunAborted"))
        await survivor.wait_for("Waiting", after=aborted, what="for the swarm")

        # The same node with all of its folder but this one file stays outside, as a new one would: it is the file that lets it in.
        shutil.copytree(leaver.folder, tmp_path / "forgetful", ignore=shutil.ignore_patterns("known-peers", "*.sock"))
        forgetful = await swarm.node("forgetful")
        await says_that_no_seed_answers(forgetful, swarm.seeds.read_text().split())
        await forgetful.wait_for("Waiting", what="for the swarm")
        await longer_than_remembered_peers_take(forgetful)
        assert forgetful.of("PeerSeen") == []
        forgetful.kill()
        await forgetful.ended()
        assert forgetful.of("NodeStarted")[0]["peer_id"] == leaver.of("NodeStarted")[0]["peer_id"]

        assert (leaver.folder / "known-peers").exists()
        back = await swarm.node("b")
        resumed = await survivor.wait_for("RunStarted", after=aborted)
        assert resumed["step"] >= 5
        assert (await back.wait_for("SnapshotLoaded"))["step"] == resumed["step"]
        for node in (survivor, back):
            assert await node.ended() == 0
    swarm.check_weights()
