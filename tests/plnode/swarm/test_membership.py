"""Claims reach every connected peer, also when calls fail on connections that are just being replaced.

Production nets on the in-memory internet; a call fails by a refusal that the test makes, with its connection, or because it crosses
the goodbye of a circuit that gave way to a hole.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import trio
import trio.testing

from plnode.swarm.claims import NodeState, StageClaim
from plnode.swarm.membership import Membership
from plnode.swarm.messages import CLAIMS
from tests.wire.net.worlds import RUN
from tests.wire.sim.rooms import member
from tests.wire.sim.test_crossing import at_the_hole, far_relay
from tests.wire.sim.test_punch import meet
from tests.wire.sim.test_relay import Town, town, until
from wire.envelope import SequenceClock
from wire.errors import Code, ConnectionLost, error_for
from wire.identity import Identity
from wire.net import Net, Peer
from wire.net.link import Link as Connection
from wire.path import PathKind
from wire.sim import Internet, Link, seed_tasks

Clock = trio.testing.MockClock
LINE = Link(0.02, 0.002, 50e6, 50e6, 0.0)


def membership_of(net: Net, seed: int, wall: Callable[[], float]) -> Membership:
    identity: Identity = net.manager._local.identity
    rng = random.Random(seed)
    claim = StageClaim(rng.randbytes(8), f"n{seed}", NodeState.STARTING, None, 0, 0, (), 1 << 30, 0)
    return Membership(net, identity, RUN, SequenceClock(None), claim, wall=wall, random=rng)


async def live(net: Net, membership: Membership) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(membership.run)
        async for event in net.events():
            membership.on_event(event)


@dataclass
class Pair:
    net: Internet
    nets: tuple[Net, Net]
    members: tuple[Membership, Membership]

    def known(self) -> bool:
        """Whether each has the other's newest claim."""
        (a, b), (one, other) = self.nets, self.members
        return one.claim_of(b.peer_id) == other.own and other.claim_of(a.peer_id) == one.own


@asynccontextmanager
async def pair(seed: int = 1) -> AsyncIterator[Pair]:
    """Two that have not met yet."""
    seed_tasks(seed)
    net = Internet(seed)
    hosts = [net.host(f"10.0.0.{number}", link=LINE) for number in (1, 2)]
    async with net.running(), member(hosts[0]) as a, member(hosts[1]) as b, trio.open_nursery() as nursery:
        one, other = membership_of(a, 1, hosts[0].wall_time), membership_of(b, 2, hosts[1].wall_time)
        nursery.start_soon(live, a, one)
        nursery.start_soon(live, b, other)
        yield Pair(net, (a, b), (one, other))
        nursery.cancel_scope.cancel()


class Calls:
    """Counts the calls with claims of each node, and has the first of each fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fail: int, error: Callable[[], Exception], callers: tuple[Net, ...]) -> None:
        self.count: Counter[str] = Counter()
        self.times: list[float] = []
        honest = Peer.call
        owns = {str(net.peer_id) for net in callers}

        async def call(peer: Peer, protocol: str, *arguments: Any, **settings: Any) -> Any:
            own = str(peer._own)
            if protocol == CLAIMS and own in owns:
                self.count[own] += 1
                self.times.append(trio.current_time())
                if self.count[own] <= fail:
                    await trio.sleep(0.05)
                    raise error()
            return await honest(peer, protocol, *arguments, **settings)

        monkeypatch.setattr(Peer, "call", call)


@pytest.mark.parametrize("fail", [1, 3])
@pytest.mark.parametrize("error", [lambda: error_for(Code.SHUTDOWN), lambda: ConnectionLost(), lambda: error_for(Code.PROTOCOL_UNKNOWN)])
async def test_two_whose_first_calls_fail_on_both_sides_know_each_other_soon(
    fail: int, error: Callable[[], Exception], autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair() as p:
        calls = Calls(monkeypatch, fail, error, p.nets)
        await p.nets[0].dial(p.nets[1].addresses[0])
        await until(p.known, 5)
        assert min(calls.count.values()) >= 1
        before = calls.count.total()
        await trio.sleep(120)
        assert calls.count.total() <= before + 2, "what was answered is not told again"


async def test_one_who_always_refuses_costs_a_call_a_minute(autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair() as p:
        calls = Calls(monkeypatch, 10**9, lambda: error_for(Code.PROTOCOL_UNKNOWN), p.nets[:1])
        await p.nets[0].dial(p.nets[1].addresses[0])
        await trio.sleep(240)
        assert len([at for at in calls.times if at > 180]) <= 2
        before = calls.count.total()
        assert 5 <= before <= 16
        p.members[0].say(replace(p.members[0].own, state=NodeState.READY))
        await trio.sleep(1)
        assert calls.count.total() == before + 1, "news are told once, and then with the next greeting"


async def test_who_is_gone_is_not_called_any_more(autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair() as p:
        calls = Calls(monkeypatch, 10**9, lambda: error_for(Code.REFUSED), p.nets)
        peer = await p.nets[0].dial(p.nets[1].addresses[0])
        await trio.sleep(20)
        peer.goaway(Code.BANNED)
        monkeypatch.setattr(Net, "connect", _no_connect)
        await trio.sleep(1)
        before = calls.count.total()
        assert not p.nets[0].peers() and before
        await trio.sleep(300)
        assert calls.count.total() == before
        assert not any(m._greetings._under_way or m._greetings._unheard for m in p.members)


async def test_who_bans_this_node_is_not_dialled_any_more(autojump_clock: Clock) -> None:
    async with pair() as p:
        (a, b), _ = p.nets, p.members
        await a.dial(b.addresses[0])
        await until(p.known, 5)
        p.members[1]._dial_known = lambda: None  # type: ignore[method-assign]
        back = b.peer(a.peer_id)
        assert back is not None
        back.goaway(Code.BANNED)
        await until(lambda: not a.peers(), 5)
        before = sum(entry[1] == "dial" for entry in p.net.log)
        await trio.sleep(120)
        assert not a.peers() and sum(entry[1] == "dial" for entry in p.net.log) == before


async def _no_connect(net: Net, peer_id: object, *, deadline_s: float = 0.0) -> Peer:
    await trio.lowlevel.checkpoint()
    raise error_for(Code.REFUSED)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("how", ["refused", "reset"])
async def test_a_claim_told_over_a_circuit_that_gives_way_to_a_hole_is_told_again(
    how: str, seed: int, autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever dialled through the hole knows last that it stands, and tells the circuit goodbye.  The way through the relay is the
    longer one: what the other end opened on it just before arrives behind that goodbye, or the circuit has ended by then."""
    async with town(seed) as t:
        await far_relay(t)
        a, b, peer = await meet(t, ("cone", "cone"))
        members = membership_of(a, 1, _wall(t)), membership_of(b, 2, _wall(t))
        pair = Pair(t.net, (a, b), members)
        told: list[Membership] = []

        def say(net: Net, peer: Peer, circuit: Connection) -> None:
            told.append(members[pair.nets.index(net)])
            told[0].say(replace(told[0].own, state=NodeState.READY, stage=0))
            if how == "reset":
                a._nursery.start_soon(end, circuit)  # type: ignore[union-attr]

        async def end(circuit: Connection) -> None:
            await trio.sleep(0.005)
            circuit.fail(ConnectionLost("the relay is gone"))

        at_the_hole(monkeypatch, pair.nets, say)
        async with trio.open_nursery() as nursery:
            for net, membership in zip(pair.nets, members, strict=True):
                nursery.start_soon(live, net, membership)
            await until(lambda: told)
            await until(pair.known, 5)
            await until(lambda: peer.path.kind is PathKind.PUNCHED, 5)
            assert not peer.closed, "the peer stayed connected"
            nursery.cancel_scope.cancel()


def _wall(t: Town) -> Callable[[], float]:
    return t.net.hosts[0].wall_time


@pytest.mark.parametrize("turns", range(8))
async def test_a_word_while_a_node_leaves_is_not_begun(turns: int, autojump_clock: Clock) -> None:
    """So many turns of the loop after the cancel.  A nursery whose tasks have ended takes no others; whoever still had news for it ended
    the whole node with an error."""
    net = Internet(1)
    hosts = [net.host(f"10.0.0.{number}", link=LINE) for number in (1, 2)]
    async with net.running(), member(hosts[0]) as a, member(hosts[1]) as b, trio.open_nursery() as nursery:
        one = membership_of(a, 1, hosts[0].wall_time)
        membership_of(b, 2, hosts[1].wall_time)  # answers
        await a.dial(b.addresses[0])
        scope = trio.CancelScope()

        async def run() -> None:
            with scope:
                await one.run()

        nursery.start_soon(run)
        await trio.sleep(1)
        scope.cancel()
        for _ in range(turns):
            await trio.lowlevel.checkpoint()
        one.say(replace(one.own, step=1))
        await trio.sleep(1)
        assert one._nursery is None
