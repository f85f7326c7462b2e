"""Receipts between three neighbours on the in-memory internet: what was applied reaches whom it is about, and nobody can pay himself.

Mutations that were tried, each fails a test here: each line of `_objection` left out; a refusal that is resent; "later" taken as an answer;
`seen` not looked at, or not bounded; `applied` that seals what another generation gathered; a receipt kept by one side only; `settled`
that does not wait.
"""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio
import trio.testing

from plnode.swarm import receiptlog, receiptservice
from plnode.swarm.points import tally
from plnode.swarm.receiptcheck import check_logs
from plnode.swarm.receiptlog import ReceiptLog, segments
from plnode.swarm.receipts import MOST_MICROBATCHES, Kind, Receipt, Terms
from plnode.swarm.receiptservice import RECEIPTS, Deliver, ReceiptService, Taken, Verdict
from plnode.swarm.roster import Roster
from tests.plnode.swarm.receiptworld import IDS, raw
from tests.wire.net.worlds import RUN
from tests.wire.sim.rooms import member
from wire.envelope import SequenceClock
from wire.errors import ConnectionLost
from wire.identity import Identity, PeerId
from wire.net import Net, Peer
from wire.sim import Host, Internet, Link, seed_tasks

Clock = trio.testing.MockClock
LINE = Link(0.02, 0.002, 50e6, 50e6, 0.0)
TERMS = Terms(stages=3, steps=1000, microbatches=4, tokens=128, flops_per_token=(10.0, 30.0, 20.0))
F, B = Kind.FORWARD, Kind.BACKWARD


@dataclass
class Node:
    net: Net
    host: Host
    identity: Identity
    service: ReceiptService
    log: ReceiptLog
    folder: Path
    told: list[str]

    @property
    def id(self) -> PeerId:
        return self.net.peer_id

    def receipts(self) -> list[Receipt]:
        """What is in its log, each envelope once."""
        checked = check_logs(segments(self.folder), run=RUN)
        assert checked.sound
        return [receipt for receipt, _ in checked.receipts]

    async def deliver(self, to: Node, envelope: bytes) -> Taken:
        """As a node would that sends what it likes."""
        peer = self.net.peer(to.id)
        assert peer is not None
        return await peer.call(RECEIPTS, Deliver(envelope), Taken, deadline_s=5.0)


@dataclass
class Row:
    net: Internet
    nodes: list[Node]
    tasks: trio.Nursery

    def begin(self, generation: int = 1, step: int = 0, stages: tuple[int, ...] = (0, 1, 2)) -> Roster:
        members = sorted(((node.id, stage) for node, stage in zip(self.nodes, stages, strict=True)), key=lambda m: (m[1], m[0]))
        roster = Roster(RUN, generation, step, tuple(members))
        for node in self.nodes:
            node.service.began(roster)
        return roster

    def work(self, step: int, indices: range = range(4)) -> None:
        """The microbatches of a step flow through the three."""
        for index in indices:
            for stage, (before, after) in enumerate(pairwise(self.nodes)):
                after.service.received(before.id, stage, step, index, F, 128, 1000, 0.1)
                before.service.received(after.id, stage + 1, step, index, B, 128, 1000, 0.1)

    def apply(self, step: int, generation: int = 1) -> None:
        for node in self.nodes:
            node.service.applied(step, generation)

    async def settled(self, within_s: float = 5.0) -> None:
        with trio.fail_after(within_s):
            for node in self.nodes:
                await node.service.settled()


async def at_once(sync: Callable[[], None]) -> None:
    """No thread: the clock of the tests does not wait for one."""
    sync()


@asynccontextmanager
async def row(folder: Path, *, run: bool = True) -> AsyncIterator[Row]:
    """Three nodes that know each other, their services running."""
    seed_tasks(1)
    net = Internet(1)
    hosts = [net.host(f"10.0.0.{number}", link=LINE) for number in (1, 2, 3)]
    async with net.running(), member(hosts[0]) as a, member(hosts[1]) as b, member(hosts[2]) as c, trio.open_nursery() as nursery:
        nodes = []
        for host, one in zip(hosts, (a, b, c), strict=True):
            identity: Identity = one.manager._local.identity
            place, told = folder / host.name, []  # type: ignore[var-annotated]
            log = ReceiptLog(place)
            service = ReceiptService(
                one, identity, RUN, terms=TERMS, log=log, sequence=SequenceClock(None), tell=told.append, wall=host.wall_time,
                random=Random(1), offload=at_once,
            )  # fmt: skip
            nodes.append(Node(one, host, identity, service, log, place, told))
        for one, other in ((a, b), (b, c), (a, c)):
            await one.dial(other.addresses[0])
        here = Row(net, nodes, nursery)
        if run:
            for node in nodes:
                nursery.start_soon(node.service.run)
        yield here
        nursery.cancel_scope.cancel()
    for node in nodes:
        node.log.close()


async def test_what_was_applied_is_kept_by_both_and_adds_up(autojump_clock: Clock, tmp_path: Path) -> None:
    async with row(tmp_path) as r:
        r.begin()
        for step in range(3):
            r.work(step)
            r.apply(step)
        await r.settled()
        a, b, c = r.nodes
        assert [len(node.receipts()) for node in r.nodes] == [6, 12, 6], "each signed, and got, one from each neighbour and step"
        # All there is to know of the middle one's work is in its own log.
        table = tally([(receipt, "") for receipt in b.receipts()], TERMS)
        assert not table.counts
        assert {peer: row.microbatches for peer, row in table.rows.items()} == {a.id: 12, b.id: 12, c.id: 12}
        assert table.rows[b.id].flops == 3 * 4 * 128 * 30.0
        assert not a.told + b.told + c.told
        assert [node.service.delivered for node in r.nodes] == [3, 6, 3] == [node.service.kept for node in r.nodes]


async def test_only_what_counted_is_attested_after_a_break(autojump_clock: Clock, tmp_path: Path) -> None:
    async with row(tmp_path) as r:
        r.begin(generation=1)
        r.work(0)
        for node in r.nodes:
            node.service.aborted(1)
        assert not r.nodes[1].service.received(r.nodes[0].id, 0, 1, 0, F, 128, 1000, 0.1), "between two generations"
        r.begin(generation=2)
        r.work(0, range(2))
        r.nodes[0].service.voided(r.nodes[1].id, 0)
        r.apply(0, generation=2)
        await r.settled()
        got = r.nodes[1].receipts()
        assert {receipt.generation for receipt in got} == {2} and all(len(receipt) == 2 for receipt in got)
        assert {(receipt.signer, receipt.worker) for receipt in got} == {
            (r.nodes[1].id, r.nodes[0].id), (r.nodes[1].id, r.nodes[2].id), (r.nodes[2].id, r.nodes[1].id)
        }, "stage 0 says nothing of who was out of the step"  # fmt: skip
        with pytest.raises(ValueError, match="generation 1"):
            r.nodes[0].service.applied(1, 1)
        with pytest.raises(ValueError, match="generation 3"):
            r.nodes[0].service.applied(1, 3)


async def test_held_out_microbatches_earn_nothing(autojump_clock: Clock, tmp_path: Path) -> None:
    async with row(tmp_path) as r:
        r.begin()
        assert not r.nodes[1].service.received(r.nodes[0].id, 0, 0, 4, F, 128, 1000, 0.1)
        assert r.nodes[1].service.received(r.nodes[0].id, 0, 0, 3, F, 128, 1000, 0.1)


async def test_a_receipt_waits_for_a_neighbour_that_is_away(autojump_clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with row(tmp_path) as r:
        a, b, _ = r.nodes
        honest, gone = Net.peer, True
        monkeypatch.setattr(Net, "peer", lambda net, who: None if gone and net is a.net else honest(net, who))
        r.begin()
        r.work(0)
        r.apply(0)
        await trio.sleep(30)
        assert a.service.waiting == 1 and b.service.waiting == 0
        gone = False
        await r.settled(90)
        assert sum(receipt.signer == a.id for receipt in b.receipts()) == 1


async def test_a_lost_answer_costs_a_second_delivery_and_no_second_copy(
    autojump_clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with row(tmp_path) as r:
        honest, lost = Peer.call, []

        async def call(peer: Peer, protocol: str, *arguments: Any, **settings: Any) -> Any:
            taken = await honest(peer, protocol, *arguments, **settings)
            if protocol == RECEIPTS and len(lost) < 3:
                lost.append(taken.verdict)
                raise ConnectionLost()
            return taken

        monkeypatch.setattr(Peer, "call", call)
        r.begin()
        r.work(0)
        r.apply(0)
        await r.settled(60)
        assert lost == [Verdict.KEPT] * 3 and [node.service.kept for node in r.nodes] == [1, 2, 1]
        (report,) = check_logs(segments(r.nodes[1].folder), run=RUN).files
        assert (report.envelopes, report.copies) == (4, 0)


async def test_a_full_disk_is_later_and_not_never(autojump_clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with row(tmp_path) as r:
        a, b, _ = r.nodes
        honest, full = b.log.append, True

        def append(envelope: bytes) -> None:
            if full:
                raise OSError(errno.ENOSPC, "No space left on device")
            honest(envelope)

        monkeypatch.setattr(b.log, "append", append)
        r.begin()
        r.work(0)
        r.apply(0)
        await trio.sleep(20)
        assert a.service.waiting == 1 and len(b.told) == 1 and "No space" in b.told[0]
        full = False
        await r.settled(90)
        assert b.service.kept == 2 and [receipt.worker for receipt in b.receipts()] == [b.id, b.id], "its own could not be written"


# -- lies


async def test_what_is_not_a_neighbours_to_say_is_refused(autojump_clock: Clock, tmp_path: Path) -> None:
    async with row(tmp_path, run=False) as r:
        a, b, c = r.nodes
        r.begin(step=100)
        assert (await a.deliver(b, raw(a.identity, b.id, 1, B, [0], step=100))).verdict == Verdict.KEPT
        cases = {
            "signed by": raw(c.identity, b.id, 1, F, [0], step=100),
            "another node": raw(a.identity, c.id, 1, B, [0], step=100),
            "not yours": raw(a.identity, b.id, 1, F, [0], step=100),
            "backward of stage 2": raw(a.identity, b.id, 2, B, [0], step=100),
            "generation 2": raw(a.identity, b.id, 1, B, [0], step=100, generation=2),
            "step 101": raw(a.identity, b.id, 1, B, [0], step=101),
            "step 99": raw(a.identity, b.id, 1, B, [0], step=99),
            "microbatch 4": raw(a.identity, b.id, 1, B, list(range(MOST_MICROBATCHES)), step=100),
            "127 tokens": raw(a.identity, b.id, 1, B, [0], step=100, tokens=127),
            "of run": raw(a.identity, b.id, 1, B, [0], step=100, run=bytes(32)),
            "not an envelope": b"\x90",
            "not signed": raw(a.identity, b.id, 1, B, [0], step=100)[:-1] + b"?",
        }
        for word, envelope in cases.items():
            taken = await a.deliver(b, envelope)
            assert taken.verdict == Verdict.REFUSED and word in taken.reason, (word, taken)
        assert len(b.receipts()) == 1 and b.service.kept == 1
        assert len(b.told) == 2, "once for each kind of complaint, not for each receipt"
        # From its place it could attest a stage that this node does not hold.
        assert "not yours" in (await c.deliver(b, raw(c.identity, b.id, 3, B, [0], step=100))).reason
        # Stage 0 and stage 2 are no neighbours, and two of them who agree cannot pay each other.
        assert "neighbour" in (await a.deliver(c, raw(a.identity, c.id, 2, B, [0], step=100))).reason


async def test_a_node_in_no_generation_takes_nothing(autojump_clock: Clock, tmp_path: Path) -> None:
    async with row(tmp_path, run=False) as r:
        a, b, _ = r.nodes
        assert (await a.deliver(b, raw(a.identity, b.id, 1, B, [0]))).verdict == Verdict.REFUSED
        assert not b.folder.exists() or not b.receipts()
        with pytest.raises(ValueError, match="not in generation"):
            b.service.began(Roster(RUN, 1, 0, ((IDS[0], 0),)))


async def test_a_neighbour_that_signs_more_and_more_fills_no_disk(autojump_clock: Clock, tmp_path: Path) -> None:
    async with row(tmp_path, run=False) as r:
        a, b, _ = r.nodes
        r.begin()
        verdicts = [(await a.deliver(b, raw(a.identity, b.id, 1, B, [0], step=0, size=size))).verdict for size in range(5)]
        assert verdicts == [Verdict.KEPT] * 2 + [Verdict.REFUSED] * 3
        assert len(b.receipts()) == 2 and len(b.told) == 1 and "two receipts for step 0" in b.told[0]
        table = tally([(receipt, "") for receipt in b.receipts()], TERMS)
        assert table.counts == {"two stories": 1}, "the second one is the proof"


async def test_late_receipts_of_the_last_generations_are_taken(autojump_clock: Clock, tmp_path: Path) -> None:
    async with row(tmp_path, run=False) as r:
        a, b, _ = r.nodes
        for generation in range(1, 7):
            r.begin(generation=generation)
        verdicts = [(await a.deliver(b, raw(a.identity, b.id, 1, B, [0], step=0, generation=g))).verdict for g in range(1, 7)]
        assert verdicts == [Verdict.REFUSED] * 2 + [Verdict.KEPT] * 4
        # Of an old generation no step counts that was not open there.
        assert "step 1" in (await a.deliver(b, raw(a.identity, b.id, 1, B, [0], step=1, generation=3))).reason


async def test_memory_of_what_came_is_bounded_by_steps(autojump_clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiptservice, "KEEP_STEPS", 8)
    async with row(tmp_path) as r:
        r.begin()
        for step in range(12):
            r.work(step, range(1))
            r.apply(step)
            await r.settled()
        assert len(r.nodes[1].service._epochs[1].seen) <= 2 * 8
        old = raw(r.nodes[0].identity, r.nodes[1].id, 1, B, [0], step=3)
        assert "step 3" in (await r.nodes[0].deliver(r.nodes[1], old)).reason


async def test_a_refused_receipt_is_told_and_not_sent_again(autojump_clock: Clock, tmp_path: Path) -> None:
    async with row(tmp_path) as r:
        a, b, _ = r.nodes
        roster = r.begin()
        b.service.began(Roster(RUN, 9, 0, ((IDS[0], 0), (b.id, 2))))
        for generation in (5, 6, 7, 8):
            b.service.began(Roster(RUN, generation, 0, roster.members))
        a.service.received(b.id, 1, 0, 0, B, 128, 1000, 0.1)
        a.service.applied(0, 1)
        with trio.fail_after(5):
            await a.service.settled()
        assert a.service.delivered == 0 and len(a.told) == 1 and "refused a receipt" in a.told[0]


# -- cancels and ends


async def test_a_cancel_leaves_the_outbox_and_a_synced_log(autojump_clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with row(tmp_path, run=False) as r:
        a = r.nodes[0]
        monkeypatch.setattr(Net, "peer", lambda net, who: None)
        r.begin()
        r.work(0)
        a.service.applied(0, 1)
        with trio.move_on_after(3):
            await a.service.run()
        assert a.service.waiting == 1 and a.log.unsynced() is None and not a.service._busy
        with trio.move_on_after(3) as scope:
            await a.service.settled()
        assert scope.cancelled_caught
        monkeypatch.undo()
        r.tasks.start_soon(r.nodes[1].service.run)
        r.tasks.start_soon(a.service.run)
        with trio.fail_after(5):
            await a.service.settled()


async def test_the_disk_is_synced_while_it_runs(autojump_clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(receiptlog.os, "fsync", lambda fd: synced.append(os.fstat(fd).st_ino))
    async with row(tmp_path) as r:
        r.begin()
        r.work(0)
        r.apply(0)
        await r.settled()
        files = {segments(node.folder)[0].stat().st_ino for node in r.nodes}
        assert not files & set(synced)
        await trio.sleep(receiptservice.SYNC_S + 1)
        assert sorted(files) == sorted(synced[-3:])
        await trio.sleep(5 * receiptservice.SYNC_S)
        assert sum(inode in files for inode in synced) == 3, "nothing new, nothing to do"


async def test_a_disk_that_cannot_sync_is_told(autojump_clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with row(tmp_path) as r:
        r.begin()
        r.work(0)
        r.apply(0)

        def fail(fd: int) -> None:
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(receiptlog.os, "fsync", fail)
            await trio.sleep(receiptservice.SYNC_S + 1)
        assert [len(node.told) for node in r.nodes] == [1] * 3 and "Input/output" in r.nodes[0].told[0]
