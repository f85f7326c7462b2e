"""Members of a run on the in-memory internet that watch each other: what the tests of failure detection share."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio

from plnode.swarm.claims import NodeState, StageClaim
from plnode.swarm.membership import Membership
from plnode.swarm.probing import Probing
from plnode.swarm.verdicts import Standing, Verdict
from tests.wire.net.worlds import RUN
from tests.wire.sim.rooms import member
from tests.wire.sim.test_relay import until
from wire.envelope import SequenceClock
from wire.identity import Identity, PeerId
from wire.net import Net
from wire.sim import Host, Internet, Link, seed_tasks

LINE = Link(0.02, 0.002, 50e6, 50e6, 0.0)  # two lines on the way: 80 ms there and back


class Known(Membership):
    """Membership as failure detection needs it."""

    def seq_of(self, peer: PeerId) -> int:
        return self._table.seq_of(peer)


class Node:
    """One member: what it does, and every verdict with its time."""

    def __init__(self, host: Host, seed: int) -> None:
        self.host, self._seed = host, seed
        self.scope = trio.CancelScope()
        self.verdicts: list[tuple[float, PeerId, Verdict]] = []
        self.net: Net
        self.membership: Known
        self.probing: Probing
        self.peer_id = Identity(host.name.encode().ljust(32, b"-")).peer_id

    async def live(self, task_status: trio.TaskStatus[None]) -> None:
        rng = random.Random(self._seed)
        with self.scope:
            async with member(self.host) as self.net, trio.open_nursery() as nursery:
                identity: Identity = self.net.manager._local.identity
                claim = StageClaim(rng.randbytes(8), self.host.name, NodeState.ACTIVE, 0, 1, 0, (), 1 << 30, 0)
                self.membership = Known(self.net, identity, RUN, SequenceClock(None), claim, wall=self.host.wall_time, random=rng)
                self.probing = Probing(self.net, self.membership, rng, self._judged)
                nursery.start_soon(self.membership.run)
                nursery.start_soon(self.probing.run)
                task_status.started()
                async for event in self.net.events():
                    self.membership.on_event(event)
                    self.probing.on_event(event)

    def _judged(self, peer: PeerId, verdict: Verdict) -> None:
        self.verdicts.append((trio.current_time(), peer, verdict))

    def found(self, standing: Standing, peer: Node | None = None) -> list[tuple[float, PeerId, Verdict]]:
        """The verdicts of this kind, about this one or anybody."""
        who = None if peer is None else peer.peer_id
        return [item for item in self.verdicts if item[2].standing is standing and who in (None, item[1])]

    def die(self) -> None:
        """The process is killed: its kernel resets what it had."""
        self.scope.cancel()
        for pipe in list(self.host.connections.values()):
            pipe.abort()
        for listener in list(self.host.listeners.values()):
            listener.close()


class Swarm:
    def __init__(self, net: Internet, nodes: list[Node]) -> None:
        self.net, self.nodes = net, nodes

    def verdicts(self, standing: Standing) -> list[tuple[float, PeerId, Verdict]]:
        return [item for node in self.nodes for item in node.found(standing)]


@asynccontextmanager
async def swarm(count: int, seed: int = 1, line: Link = LINE) -> AsyncIterator[Swarm]:
    """So many members, each connected with all others and knowing their claims."""
    seed_tasks(seed)
    net = Internet(seed)
    nodes = [Node(net.host(f"10.0.0.{number}", link=line), 100 * seed + number) for number in range(1, count + 1)]
    async with net.running(), trio.open_nursery() as nursery:
        for node in nodes:
            await nursery.start(node.live)
        for number, node in enumerate(nodes):
            for other in nodes[:number]:
                await node.net.dial(other.net.addresses[0])
        await until(lambda: all(len(node.membership.present()) == count for node in nodes), 60)
        await trio.sleep(1.5)  # everybody has looked
        yield Swarm(net, nodes)
        nursery.cancel_scope.cancel()


async def everybody(swarm: Swarm, condition: Callable[[Node], object], *, but: Node, deadline_s: float = 60.0) -> float:
    """Seconds until it holds at all nodes but this one."""
    return await until(lambda: all(condition(node) for node in swarm.nodes if node is not but), deadline_s)
