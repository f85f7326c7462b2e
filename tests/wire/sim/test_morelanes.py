"""A punched pair has lanes, each through a hole of its own; where none can be had, what stands carries everything."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio
import trio.testing

from tests.wire.sim.test_punch import meet, neighbours
from tests.wire.sim.test_relay import QUESTION, SIZE, Town, send_all, town, until
from wire.errors import Code, StreamReset
from wire.messages import Want, encode
from wire.net import MessageStream, Net, Peer
from wire.net.morelanes import PORTS, PROTOCOL, MoreLanes
from wire.net.transport import Pipe
from wire.path import PathKind
from wire.punchmessages import Punch

Clock = trio.testing.MockClock


@asynccontextmanager
async def punched(kinds: tuple[str, str], seed: int = 1) -> AsyncIterator[tuple[Town, Net, Net, Peer, Peer]]:
    """Two houses with a hole between them: the one that dials lanes first."""
    async with town(seed) as t:
        await t.relay()
        await t.relay()
        a, b, peer = await meet(t, kinds)
        await until(lambda: peer.path.kind is PathKind.PUNCHED)
        back = b.peer(a.peer_id)
        assert back is not None and peer.primary is not None
        await until(lambda: back.path.kind is PathKind.PUNCHED and len(peer.links) == len(back.links) == 1, 60)
        yield (t, a, b, peer, back) if peer.primary.initiator else (t, b, a, back, peer)


@pytest.mark.parametrize("kinds", [("cone", "cone"), ("cone", "shift"), ("shift", "shift"), ("double", "cone"), ("double", "double")])
async def test_tensors_go_over_lanes_of_a_punched_pair(kinds: tuple[str, str], autojump_clock: Clock) -> None:
    async with punched(kinds) as (t, a, b, peer, back):
        await send_all(t, peer, back, 4)
        await until(lambda: peer.stats.lanes and back.stats.lanes, 10)
        await send_all(t, back, peer, 40, name=b"y")
        assert peer.stats.lanes <= 2
        ports = {link.pipe.info().local[1] for link in peer.all_links if link.lane}
        assert all(port in PORTS for port in ports) and len(ports) == peer.stats.lanes
        assert all(link.pipe.info().path.kind is PathKind.PUNCHED for link in (*peer.all_links, *back.all_links))
        sent = sum(link.session.bytes_in[cls] for link in peer.all_links if link.lane for cls in (2, 3))
        assert sent >= 39 * SIZE, "but for what was under way when the lane came"
        assert not a.counts["internal-error"] + b.counts["internal-error"]


async def test_two_lanes_and_no_more(autojump_clock: Clock) -> None:
    async with punched(("cone", "shift")) as (t, _, _, peer, back):
        assert peer.lanes is not None and back.lanes is not None
        peer.lanes._count.target = 2
        peer.lanes.asked(4)
        await send_all(t, peer, back, 4)
        await until(lambda: peer.stats.lanes == back.stats.lanes == 2, 10)
        await send_all(t, peer, back, 200, name=b"y")
        assert peer.stats.lanes == 2


async def test_neighbours_dial_each_other_as_ever(autojump_clock: Clock) -> None:
    async with town() as t:
        await t.relay()
        await t.relay()
        a, b = await neighbours(t)
        peer = await a.connect(b.peer_id)
        await until(lambda: peer.path.kind is PathKind.PUNCHED and len(peer.links) == 1, 60)
        back = b.peer(a.peer_id)
        assert back is not None
        for net in (a, b):
            net.access.more_lanes._outside = lambda six: []  # type: ignore[method-assign]
        await send_all(t, peer, back, 4)
        await until(lambda: peer.stats.lanes and back.stats.lanes, 10)


@pytest.mark.parametrize("why", ["nobody to ask", "a lie", "another host"])
async def test_without_a_hole_the_connection_carries_everything(why: str, autojump_clock: Clock) -> None:
    """Three tries, then a pause.  The host that was named is never dialled if it is not the peer's."""
    async with punched(("cone", "cone")) as (t, a, b, peer, back):
        said: list[str] = []

        async def seen(self: MoreLanes, pipe: Pipe) -> str:
            said.append({"a lie": "/ip4/9.1.0.1/tcp/7", "another host": "/ip4/8.7.0.1/tcp/80"}[why])
            return said[-1]

        for net in (a, b):
            if why == "nobody to ask":
                net.access.more_lanes._outside = lambda six: []  # type: ignore[method-assign]
            else:
                net.access.more_lanes._seen = partial(seen, net.access.more_lanes)  # type: ignore[method-assign]
        await send_all(t, peer, back, 10)
        await trio.sleep(50)
        await send_all(t, back, peer, 10, name=b"y")
        assert not peer.stats.lanes + back.stats.lanes
        assert peer.lanes is not None and peer.lanes.refused == peer.lanes._limits.lane_dials
        assert len(said) <= 2 * peer.lanes._limits.lane_dials
        assert "8.7.0.1" not in [entry[4][0] for entry in t.net.log if entry[1] == "dial"]
        assert not a.access.more_lanes._busy | b.access.more_lanes._busy
        assert not a.counts["internal-error"] + b.counts["internal-error"]


async def refused(peer: Peer, *words: bytes) -> Code:
    async with await peer.open(PROTOCOL) as stream:
        assert isinstance(stream, MessageStream)
        for word in words:
            await stream.send(word)
        with pytest.raises(StreamReset) as caught:
            await stream.receive()
    return caught.value.code


async def test_who_may_have_us_punch_and_how_often(autojump_clock: Clock) -> None:
    async with punched(("cone", "cone")) as (t, a, _, peer, back):
        ask = encode(Punch(("/ip4/8.7.0.1/tcp/80",), bytes(16)))
        assert await refused(back, ask) is Code.REFUSED, "the other side dials the lanes"
        before = len(t.net.log)
        codes = [await refused(peer, ask) for _ in range(10)]
        assert codes[:6] == [Code.REFUSED] * 6 and codes[6:] == [Code.RATE_LIMITED] * 4
        assert not [entry for entry in t.net.log[before:] if entry[1] == "dial"]
        relay = a.peer(t.relays[0].peer_id)
        assert relay is not None and await refused(relay, ask) is Code.REFUSED, "no punched connection"
        assert await peer.call("echo", QUESTION, Want, deadline_s=5) == QUESTION
