"""What the tests of cases on the in-memory internet share: the sweep, members that have met, a peer that keeps no rule.

A case holds for a sweep of seeds, not for one lucky order of events: 20 in the ordinary run, as many as `CASE_SEEDS` says in a
long one (`make cases CASE_SEEDS=1000`).  A seed decides the order of tasks, delays, sizes and faults.
"""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
import trio
import trio.testing

from tests.wire.net.worlds import RUN, held
from tests.wire.sim.rooms import member
from wire.hello import Purpose
from wire.identity import Identity
from wire.limits import DEFAULT_LIMITS
from wire.messages import SessionHello
from wire.net import ByteStream, MessageStream, Net, Peer
from wire.net.link import Link as Connection
from wire.net.transport import send_all
from wire.net.upgrade import Local, upgrade
from wire.noise import Cipher
from wire.sim import Host, Internet, Link, seed_tasks

Clock = trio.testing.MockClock
SEEDS = range(int(os.environ.get("CASE_SEEDS", "20")))
every_seed = pytest.mark.parametrize("seed", SEEDS)
HOUSE = Link(0.01, 0.002, 100e6, 100e6)
Handler = Callable[[Peer, MessageStream | ByteStream], Awaitable[None]]
CONTROL = Purpose.CONTROL


@dataclass
class Met:
    """A hub and those that have dialled it; `peers[i]` is the hub as `members[i]` sees it."""

    net: Internet
    rng: random.Random
    hosts: list[Host]
    hub: Net
    members: list[Net]
    peers: list[Peer]

    @property
    def a(self) -> Net:
        return self.members[0]

    @property
    def peer(self) -> Peer:
        return self.peers[0]

    def held(self) -> dict[str, int]:
        """Gauges that are not zero, connections aside."""
        return held(self.hub, *self.members)


@asynccontextmanager
async def met(
    seed: int, *, count: int = 1, line: Link = HOUSE, serve: Callable[[Net], object] = lambda hub: None, **settings: object
) -> AsyncIterator[Met]:
    """A hub at 10.0.0.1 and `count` members at 10.0.1.x that have dialled it.  At the end nobody holds anything."""
    seed_tasks(seed)
    net, rng = Internet(seed), random.Random(seed)
    center = net.host("10.0.0.1", link=line, **settings)
    others = [net.host(f"10.0.1.{number}", link=line, **settings) for number in range(count)]
    async with net.running(), member(center) as hub:
        serve(hub)
        async with several(others) as members:
            peers = [await each.dial(hub.addresses[0]) for each in members]
            yield Met(net, rng, [center, *others], hub, members, peers)
            await trio.sleep(5)
            assert held(hub, *members) == {}
    for host in net.hosts:
        assert not host.dialling and not host.listeners


@asynccontextmanager
async def several(hosts: Sequence[Host]) -> AsyncIterator[list[Net]]:
    if not hosts:
        yield []
        return
    async with member(hosts[0]) as first, several(hosts[1:]) as rest:
        yield [first, *rest]


class Hostile:
    """An authenticated peer that says whatever the test wants, as fast as its line takes it."""

    def __init__(self, link: Connection) -> None:
        self.link = link
        self.pipe = link.pipe
        self.sealer = link.session._out._sealer
        self._out = memoryview(bytearray(1 << 19))

    @classmethod
    async def dial(cls, host: Host, hub: Net, name: str = "hostile") -> Hostile:
        identity = Identity(name.encode().ljust(32, b"-"))
        local = Local(
            identity=identity,
            run=RUN,
            ciphers=(Cipher.AES256GCM, Cipher.CHACHA20POLY1305),
            limits=DEFAULT_LIMITS,
            hello=lambda peer_id, guest, info: SELF,
            serves=lambda protocol, guest: None,
        )
        pipe = await host.transport.dial(hub.addresses[0])
        return cls(await upgrade(pipe, local, initiator=True))

    def record(self, kind: int, stream: int, body: bytes, flags: int = 0) -> bytes:
        return bytes(self._out[: self.sealer.seal_into(stream, kind, flags, body, self._out)])

    async def say(self, data: bytes) -> None:
        """Raises `trio.BrokenResourceError` when the other side has closed."""
        await send_all(self.pipe, data)


SELF = SessionHello(
    revision=1,
    boot_id=bytes(8),
    agent="hostile",
    features=(),
    peer_record=b"",
    observed="",
    bulk_window=DEFAULT_LIMITS.stream_window_min_bytes,
    max_streams=DEFAULT_LIMITS.inbound_streams_max,
    generation=0,
)


async def echo(peer: Peer, stream: MessageStream | ByteStream) -> None:
    if isinstance(stream, MessageStream):
        async for message in stream:
            await stream.send(message)
    else:
        while data := await stream.receive_some():
            await stream.send_all(data)
    await stream.send_eof()
