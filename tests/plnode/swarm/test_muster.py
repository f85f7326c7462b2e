"""Beginning a generation: refused proposals, silent members, and two proposals that cross."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio
import trio.testing

from plnode.observe.recorder import Recorder
from plnode.observe.waits import Waits
from plnode.swarm.claims import NodeState, StageClaim
from plnode.swarm.muster import Muster
from plnode.swarm.roster import Roster
from tests.plnode.direct import DirectNet
from wire.identity import Identity

RUN = bytes(32)


class Members:
    """What everybody knows of everybody: one table for all."""

    def __init__(self) -> None:
        self.claims: dict[Any, StageClaim] = {}
        self.event = trio.Event()

    def wake(self) -> None:
        self.event.set()
        self.event = trio.Event()


class View:
    def __init__(self, members: Members, net: DirectNet) -> None:
        self._members, self._net = members, net

    @property
    def own(self) -> StageClaim:
        return self._members.claims[self._net.peer_id]

    def present(self) -> tuple[tuple[Any, StageClaim], ...]:
        return tuple(sorted(self._members.claims.items()))

    def connected(self, peer: Any) -> bool:
        return True

    def changed(self) -> trio.Event:
        return self._members.event

    def wake(self) -> None:
        self._members.wake()


class Swarm:
    def __init__(self, folder: Path, stages: list[int], replicas: int = 1) -> None:
        self.members = Members()
        world: dict[Any, DirectNet] = {}
        identities = sorted((Identity.generate() for _ in stages), key=lambda i: i.peer_id)
        self.nets = [DirectNet(identity, world) for identity in identities]
        self.musters: list[Muster] = []
        for number, (net, stage) in enumerate(zip(self.nets, stages, strict=True)):
            self.members.claims[net.peer_id] = StageClaim(bytes(8), f"n{number}", NodeState.READY, stage, 0, 0, (), 1 << 30, 0)
            data = folder / str(number)
            data.mkdir()
            self.musters.append(
                Muster(
                    net, net.identity, RUN, View(self.members, net), Waits(Recorder()), stages=max(stages) + 1,  # type: ignore[arg-type]
                    replicas=replicas, steps=10, first_snapshot=0, data_dir=data, random=Random(number),
                )
            )  # fmt: skip

    async def begin(self, *numbers: int, until_s: float = 100.0) -> dict[int, Roster]:
        found: dict[int, Roster] = {}

        async def one(number: int) -> None:
            found[number] = await self.musters[number].begin()

        with trio.move_on_after(until_s):
            async with trio.open_nursery() as nursery:
                for number in numbers:
                    nursery.start_soon(one, number)
        return found


async def test_all_begin_the_same_generation(tmp_path: Path, autojump_clock: object) -> None:
    swarm = Swarm(tmp_path, [0, 1, 1])
    found = await swarm.begin(0, 1, 2)
    assert len(found) == 3
    assert len({roster.digest for roster in found.values()}) == 1
    assert found[0].generation == 1
    again = await swarm.begin(0, 1, 2)
    assert {roster.generation for roster in again.values()} == {2}


async def test_the_commit_of_a_second_proposal_is_not_missed(tmp_path: Path, autojump_clock: object) -> None:
    """The first proposal has one refusal; those who signed it must follow the next one at once."""
    swarm = Swarm(tmp_path, [0, 1, 2])
    honest = swarm.nets[2].handlers["muster/1"]
    refused = []

    async def refuse_once(peer: Any, proposal: Any) -> Any:
        from plnode.swarm.messages import Vote

        if not refused:
            refused.append(proposal)
            return Vote(b"", "not yet")
        return await honest(peer, proposal)

    swarm.nets[2].handlers["muster/1"] = refuse_once
    found = await swarm.begin(0, 1, 2)
    assert {roster.generation for roster in found.values()} == {2}
    assert trio.current_time() < 5.0


async def test_one_who_never_signs_is_left_out_where_others_suffice(tmp_path: Path, autojump_clock: object) -> None:
    swarm = Swarm(tmp_path, [0, 1, 1])
    swarm.nets[2].silent = True
    found = await swarm.begin(0, 1)
    assert len(found) == 2
    assert [peer for peer, _ in found[0].members] == [swarm.nets[0].peer_id, swarm.nets[1].peer_id]


async def test_a_generation_that_a_member_does_not_take_is_called_off(tmp_path: Path, autojump_clock: object) -> None:
    swarm = Swarm(tmp_path, [0, 1, 2])
    called_off = []

    async def abort(peer: Any, message: Any) -> Any:
        from plnode.swarm.messages import Answer

        called_off.append(message.reason)
        return Answer(True)

    for net in swarm.nets:
        net.handlers["abort/1"] = abort
    # Number 2 signs, but its process does not wait for the commit.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(swarm.musters[2], "_on_commit", None)
        handler = swarm.nets[2].handlers["muster/1/commit"]

        async def gone(peer: Any, commit: Any) -> Any:
            swarm.musters[2]._signed = None
            return await handler(peer, commit)

        swarm.nets[2].handlers["muster/1/commit"] = gone
        found = await swarm.begin(0, 1, until_s=3.0)
    assert 0 not in found, "the proposer does not begin without it"
    assert any("not every member took the commit" in reason for reason in called_off)
