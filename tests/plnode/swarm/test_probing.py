"""Failure detection on the in-memory internet: who is declared dead, how soon, and who is not.  Round trips of 80 ms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import trio
import trio.testing

from plnode.swarm import probing, suspicion
from plnode.swarm.claims import NodeState, StageClaim
from plnode.swarm.probemessages import PROBE, ProbeAnswer, ProbeAsk
from plnode.swarm.verdicts import Decision, Seen, Standing
from tests.plnode.swarm.probes import Node, everybody, swarm
from tests.wire.sim.test_relay import until
from wire.identity import Identity
from wire.sim import Link

Clock = trio.testing.MockClock
LOSSY = Link(0.02, 0.002, 50e6, 50e6, 0.025)  # 5 % over the two lines of a way


@pytest.mark.parametrize("count", [2, 3, 5])
async def test_a_process_that_died_is_known_within_5_s(count: int, autojump_clock: Clock) -> None:
    async with swarm(count) as s:
        victim = s.nodes[-1]
        victim.die()
        took = await everybody(s, lambda node: node.found(Standing.DEAD, victim), but=victim)
        assert took <= 5
        assert len(s.verdicts(Standing.DEAD)) == count - 1


async def test_a_member_that_says_it_stops_is_dead_at_once_and_one_that_has_finished_is_not_missed(autojump_clock: Clock) -> None:
    async with swarm(4) as s:
        stays, leaves, finished, _ = s.nodes
        finished.membership.say(_finished(finished))
        await trio.sleep(1)
        leaves.scope.cancel()
        finished.die()
        assert await until(lambda: stays.found(Standing.DEAD, leaves), 5) < 0.2
        await trio.sleep(30)
        assert not stays.found(Standing.DEAD, finished) and not stays.found(Standing.SUSPECT, finished)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("how", ["cut", "power"])
async def test_a_black_hole_is_dead_within_12_s(how: str, seed: int, autojump_clock: Clock) -> None:
    """Nothing says goodbye: a line is cut, or the power is gone."""
    async with swarm(4, seed) as s:
        victim = s.nodes[1]
        await trio.sleep(seed * 1.7)
        if how == "cut":
            s.net.cut(victim.host)
        else:
            s.net.kill(victim.host)
            victim.scope.cancel()
        took = await everybody(s, lambda node: node.found(Standing.DEAD, victim), but=victim)
        assert took <= 12
        honest = [node for node in s.nodes if node is not victim]
        assert sum(len(node.found(Standing.DEAD)) for node in honest) == 3


async def test_two_that_do_not_reach_each_other_are_not_dead_and_the_helper_is_named(autojump_clock: Clock) -> None:
    async with swarm(4) as s:
        one, other, *rest = s.nodes
        s.net.partition(one.host, other.host)
        took = await until(
            lambda: one.found(Standing.UNREACHABLE_FROM_HERE, other) and other.found(Standing.UNREACHABLE_FROM_HERE, one), 60
        )
        assert took <= 13
        (_, _, verdict) = one.found(Standing.UNREACHABLE_FROM_HERE, other)[0]
        assert verdict.helper in {node.peer_id for node in rest}
        await trio.sleep(120)
        assert not s.verdicts(Standing.DEAD)
        s.net.heal()
        await until(lambda: one.probing.standing(other.peer_id) is other.probing.standing(one.peer_id) is Standing.ALIVE, 400)
        assert not any(node.verdicts for node in rest)


async def test_who_is_unreachable_and_then_dies_is_dead(autojump_clock: Clock) -> None:
    async with swarm(4) as s:
        one, other, *_ = s.nodes
        s.net.partition(one.host, other.host)
        await until(lambda: one.found(Standing.UNREACHABLE_FROM_HERE, other), 60)
        other.die()
        assert await until(lambda: one.found(Standing.DEAD, other), 60) <= 12


async def test_an_hour_of_5_percent_loss_kills_nobody(autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    wire = ("interfaces.LOOK_EVERY_S", "watch.LOOK_S", "relays.LOOK_S", "reach.LOOK_S", "punch.LOOK_S")
    for name in ("plnode.swarm.probing.LOOK_S", *(f"wire.net.{each}" for each in wire)):
        monkeypatch.setattr(name, 5.0)  # faster; who may be quiet is looked at all the same
    async with swarm(3, 1, LOSSY) as s:
        await trio.sleep(3600)
        assert not s.verdicts(Standing.DEAD) and not s.verdicts(Standing.UNREACHABLE_FROM_HERE)
        assert s.net.losses > 300
        victim = s.nodes[0]
        victim.die()
        assert await everybody(s, lambda node: node.found(Standing.DEAD, victim), but=victim) <= 5


async def test_a_nervous_detector_at_5_percent_loss_kills_nobody(autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hardly any time for the wire's ping and for ours: every lost packet is a doubt, and many an answer late.  Helpers answer them all."""
    monkeypatch.setattr(suspicion, "QUIET_S", 5.15)
    monkeypatch.setattr(suspicion, "DIRECT_S", 0.05)
    monkeypatch.setattr(suspicion, "DIRECT_RTTS", 1.0)
    doubts: list[object] = []
    honest = suspicion.Detector._doubt

    def doubt(self: suspicion.Detector, *arguments: Any) -> list[Decision]:
        doubts.append(arguments)
        return honest(self, *arguments)

    monkeypatch.setattr(suspicion.Detector, "_doubt", doubt)
    async with swarm(4, 1, LOSSY) as s:
        await trio.sleep(400)
        assert len(doubts) >= 20
        assert not s.verdicts(Standing.DEAD) and not s.verdicts(Standing.UNREACHABLE_FROM_HERE)


async def test_connections_that_are_reset_all_the_time_kill_nobody(autojump_clock: Clock) -> None:
    async with swarm(4, 1, LOSSY) as s:
        for _ in range(40):
            s.net.reset(s.net.rng.choice([pipe for node in s.nodes for pipe in node.host.connections.values()]))
            await trio.sleep(2)
        assert not s.verdicts(Standing.DEAD)


async def test_a_node_that_is_cut_off_accuses_nobody(autojump_clock: Clock) -> None:
    async with swarm(5) as s:
        sick = s.nodes[0]
        s.net.cut(sick.host)
        await everybody(s, lambda node: node.found(Standing.DEAD, sick), but=sick)
        await trio.sleep(90)
        assert not sick.found(Standing.DEAD)
        assert {peer for _, peer, _ in sick.found(Standing.UNREACHABLE_FROM_HERE)} == {node.peer_id for node in s.nodes[1:]}
        assert all(verdict.helper is None for _, _, verdict in sick.found(Standing.UNREACHABLE_FROM_HERE))
        s.net.heal()
        await until(lambda: all(sick.probing.standing(node.peer_id) is Standing.ALIVE for node in s.nodes[1:]), 120)


async def test_a_loop_that_stood_still_accuses_nobody_and_distrusts_itself(autojump_clock: Clock) -> None:
    async with swarm(3) as s:
        autojump_clock.jump(20.0)
        await trio.sleep(2)
        assert max(node.probing.distrust for node in s.nodes) > 0
        await trio.sleep(120)
        assert not any(node.verdicts for node in s.nodes)
        assert not any(node.probing.distrust for node in s.nodes)


async def test_with_tensor_channels_a_broken_connection_is_doubted_before_the_wire_gives_it_up(autojump_clock: Clock) -> None:
    """Such a peer is interrupted, not lost: the wire dials it for a minute.  What waits for a verdict must not wait for that."""
    async with swarm(3) as s:
        victim, *rest = s.nodes
        for node in rest:
            peer, back = node.net.peer(victim.peer_id), victim.net.peer(node.peer_id)
            assert peer is not None and back is not None
            peer.sender("t", b"up")
            back.receiver("t", b"up", lambda key: None)
        await trio.sleep(1)
        s.net.cut(victim.host)
        for pipe in list(victim.host.connections.values()):
            s.net.reset(pipe)
        took = await everybody(s, lambda node: node.found(Standing.DEAD, victim), but=victim)
        assert took <= 6
        assert all(node.net.peer(victim.peer_id) is not None for node in rest), "the wire has not given it up"


async def test_a_process_that_was_started_again_at_once_is_the_death_of_the_first(autojump_clock: Clock) -> None:
    async with swarm(3) as s, trio.open_nursery() as nursery:
        victim = s.nodes[0]
        victim.die()
        await trio.sleep(0.05)
        again = Node(victim.host, 77)
        await nursery.start(again.live)
        for node in s.nodes[1:]:
            await again.net.dial(node.net.addresses[0])
        await everybody(s, lambda node: node.found(Standing.DEAD, victim), but=victim, deadline_s=10)
        await everybody(s, lambda node: node.probing.standing(victim.peer_id) is Standing.ALIVE, but=victim, deadline_s=10)
        nursery.cancel_scope.cancel()


class Asker:
    """Asks one node over and over."""

    def __init__(self, node: Node, target: Node) -> None:
        self.node, self.target = node, target
        self.answers: list[Seen] = []

    async def ask(self, target: bytes, boot_id: bytes = bytes(8)) -> ProbeAnswer:
        peer = self.node.net.peer(self.target.peer_id)
        assert peer is not None
        answer = await peer.call(PROBE, ProbeAsk(target, boot_id), ProbeAnswer, deadline_s=20)
        self.answers.append(Seen(answer.how))
        return answer


async def test_a_hostile_asker_makes_nobody_dial_without_bound(autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers' ids are not dialled at all; of a member that is gone, no more than the wire's back-off lets pass."""
    async with swarm(4) as s:
        hostile, helper, gone, idle = s.nodes
        gone.die()
        await trio.sleep(20)
        reached: list[object] = []
        honest = probing.Probing._reach

        async def reach(self: probing.Probing, *arguments: object) -> object:
            reached.append(arguments)
            return await honest(self, *arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(probing.Probing, "_reach", reach)
        asker = Asker(hostile, helper)
        for number in range(30):
            assert not (await asker.ask(Identity(bytes([number]) * 32).peer_id.raw)).seen
        for junk in (bytes(32), b"\xff" * 32, helper.peer_id.raw, hostile.peer_id.raw):
            assert not (await asker.ask(junk)).seen
        assert not reached and set(asker.answers) == {Seen.UNKNOWN}
        asker.answers.clear()
        dials = _dials(s.net.log)
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for number in range(300):
                nursery.start_soon(asker.ask, gone.peer_id.raw, number.to_bytes(8, "big"))
        assert len(reached) <= probing.ASKS_BURST + probing.ASKS_PER_S * (trio.current_time() - began) + 1
        assert Seen.BUSY in asker.answers and len(asker.answers) == 300
        assert _dials(s.net.log) - dials <= 4
        assert not helper.probing._looks
        # An honest asker is answered all the same.
        boot_id = hostile.net._boot_id
        assert (await Asker(idle, helper).ask(hostile.peer_id.raw, boot_id)).how == Seen.CONNECTED
        assert (await Asker(idle, helper).ask(hostile.peer_id.raw, bytes(8))).how == Seen.RESTARTED


async def test_looks_for_others_are_shared_and_at_most_so_many_at_once(autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "HELPS_AT_ONCE", 5)
    async with swarm(3) as s:
        asking, helper, silent = s.nodes
        s.net.cut(silent.host)
        under_way, most, begun = 0, 0, 0
        honest = probing.Probing._look_at

        async def look_at(self: probing.Probing, *arguments: Any) -> None:
            nonlocal under_way, most, begun
            under_way, begun = under_way + 1, begun + 1
            most = max(most, under_way)
            await honest(self, *arguments)
            under_way -= 1

        monkeypatch.setattr(probing.Probing, "_look_at", look_at)
        asker = Asker(asking, helper)
        boot_id = silent.net._boot_id
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(asker.ask, silent.peer_id.raw, boot_id)
        assert begun == 1 and asker.answers == [Seen.SILENT] * 20
        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(asker.ask, silent.peer_id.raw, number.to_bytes(8, "big"))
        assert most == 5 and asker.answers.count(Seen.BUSY) == 15


async def test_helpers_that_say_nonsense_prove_nothing(autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unknown numbers, and "seen" with a reason that says otherwise: the member is neither kept alive by them nor killed."""

    async def nonsense(self: probing.Probing, *arguments: object) -> ProbeAnswer:
        return ProbeAnswer(True, 200) if self._net.peer_id.raw[0] % 2 else ProbeAnswer(True, Seen.REFUSED)

    monkeypatch.setattr(probing.Probing, "_on_ask", nonsense)
    async with swarm(4) as s:
        victim = s.nodes[0]
        s.net.cut(victim.host)
        await everybody(s, lambda node: node.found(Standing.UNREACHABLE_FROM_HERE, victim), but=victim)
        assert not any(node.found(Standing.DEAD) for node in s.nodes)
        assert all(v.helper is None for node in s.nodes for *_, v in node.found(Standing.UNREACHABLE_FROM_HERE, victim))


async def test_a_suspect_that_signs_a_new_claim_is_not_dead_whatever_helpers_say(
    autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its claims come through others; two in a row, and it is known that it lives and that this node does not reach it."""

    async def deny(self: probing.Probing, *arguments: object) -> ProbeAnswer:
        return ProbeAnswer(False, Seen.SILENT)

    monkeypatch.setattr(probing.Probing, "_on_ask", deny)
    for speaks in (True, False):
        async with swarm(4) as s:
            one, other, *_ = s.nodes
            s.net.partition(one.host, other.host)
            for step in range(60):
                if speaks:
                    other.membership.say(replace(other.membership.own, step=step + 1))
                await trio.sleep(0.5)
            standings = [verdict.standing for _, peer, verdict in one.verdicts if peer == other.peer_id]
            if speaks:
                assert standings == [Standing.SUSPECT, Standing.ALIVE, Standing.SUSPECT, Standing.UNREACHABLE_FROM_HERE]
            else:
                assert standings == [Standing.SUSPECT, Standing.DEAD]


async def test_a_cancelled_node_leaves_nothing_and_its_bounds_are_kept(autojump_clock: Clock) -> None:
    async with swarm(3) as s:
        leaver = s.nodes[0]
        s.net.cut(s.nodes[1].host)
        await trio.sleep(suspicion.QUIET_S + 1.2)  # a round is under way
        leaver.scope.cancel()
        await trio.sleep(3)
        assert leaver.probing._nursery is None and not leaver.probing._looks


def _dials(log: list[tuple[object, ...]]) -> int:
    return sum(entry[1] == "dial" for entry in log)


def _finished(node: Node) -> StageClaim:
    return replace(node.membership.own, state=NodeState.FINISHED)
