"""Members that misbehave around lanes, generations and reconnecting: in memory and in virtual time.  WIRE-1, WIRE-6."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import trio
import trio.testing

from tests.wire.net.hostile_room import EXPECTED, SIZE, ZEROS, Clock, Deaf, quiet, room
from tests.wire.net.worlds import MemoryListener, World, held, member
from wire.address import Address
from wire.errors import Code, ConnectionLost, RemoteProtocolError
from wire.identity import Identity
from wire.limits import DEFAULT_LIMITS
from wire.messages import LaneAsk, SessionHello, decode, encode
from wire.net.link import Link
from wire.net.services import LANES
from wire.net.upgrade import upgrade
from wire.tensor import DType

__all__ = ["quiet"]


# -- tickets and lanes


async def test_a_lane_without_a_right_ticket_is_turned_away(autojump_clock: Clock) -> None:
    """Made up, of another peer's control connection, and one that was used before."""
    async with room() as r:
        stolen = r.good.primary
        assert stolen is not None
        _, right = r.link.tickets.issue(1)
        for ticket in (os.urandom(16), stolen.tickets.issue(1)[1]):
            lane = await r.dial(ticket)
            await trio.sleep(2)
            assert lane.error is not None and lane.error.code is Code.AUTH
        first, again = await r.dial(right), await r.dial(right)
        await trio.sleep(2)
        assert first.error is None and again.error is not None and again.error.code is Code.AUTH
        back = r.back()
        assert back is not None and back.stats.lanes == 1 and r.link.error is None and r.victim.counts["adopt-auth"] == 3


async def test_a_flood_of_lanes_stops_at_the_limit(autojump_clock: Clock) -> None:
    """Each with a right ticket, and mute: no window of theirs is left when they go."""
    async with room() as r:
        for _ in range(40):
            await r.lane()
        await trio.sleep(2)
        back = r.back()
        assert back is not None and back.stats.lanes == DEFAULT_LIMITS.lanes_max + 1 and r.link.error is None
        assert len(r.victim.manager.peers) == 2


@pytest.mark.parametrize("controls", [2, 6])
async def test_several_control_connections_do_not_multiply_the_lanes(controls: int, autojump_clock: Clock) -> None:
    """Whoever dials ends the loser; an attacker does not.  All its connections count, lanes too."""
    async with room() as r:
        boot = r.attacker._boot_id
        links = [r.link]
        for _ in range(controls - 1):
            links.append(await r.dial(boot_id=boot))
        for link in links:
            for _ in range(6):
                await r.dial(link.tickets.issue(1)[1])
        await trio.sleep(2)
        back = r.back()
        assert back is not None and len(back.all_links) <= 2 * DEFAULT_LIMITS.connections_per_peer


async def test_a_lane_that_is_cut_right_behind_its_ticket_leaves_nothing(autojump_clock: Clock) -> None:
    async with room() as r:
        for _ in range(20):
            lane = await r.lane()
            lane.pipe.abort()
        await trio.sleep(2)
        back = r.back()
        assert back is not None and back.stats.lanes == 0 and r.link.error is None


async def test_a_flood_of_asks_for_lanes_makes_no_flood_of_dials(autojump_clock: Clock) -> None:
    """The victim dialled: it makes at most a lane a look, however often the number changes."""
    async with room() as r:
        peer = r.victim.peer(r.friend.peer_id)
        assert peer is not None
        other = await r.friend.dial(r.attacker.addresses[0])  # the friend is the victim here
        other.sender("t", b"never")
        await trio.sleep(1)
        back = r.attacker.peer(r.friend.peer_id)
        assert back is not None
        dials = len(r.world.dials)
        for at in range(300):
            async with await back.open(LANES) as stream:
                await stream.send(encode(LaneAsk((255, 0)[at % 2])), fin=True)  # type: ignore[call-arg]
            await trio.sleep(0.01)
        assert other.stats.lanes <= DEFAULT_LIMITS.lanes_max and len(r.world.dials) - dials <= 16
        other.fail(ConnectionLost("enough"))


async def test_a_peer_that_has_lost_everything_is_let_in_though_dead_lanes_are_counted(autojump_clock: Clock) -> None:
    async with room() as r:
        for _ in range(6):
            await r.lane()
        await trio.sleep(1)
        back = r.back()
        assert back is not None and len(back.all_links) == DEFAULT_LIMITS.connections_per_peer
        boot = r.attacker._boot_id
        refused, let_in = await r.dial(boot_id=boot), await r.dial(boot_id=boot, generation=1)
        await trio.sleep(2)
        assert refused.error is not None and refused.error.code is Code.RESOURCE_LIMIT and let_in.error is None
        assert len(back.all_links) == 1


# -- generations and reconnecting


@pytest.mark.parametrize("generation", [1, 2**32 - 1])
async def test_a_generation_concerns_the_one_who_says_it_alone(generation: int, autojump_clock: Clock) -> None:
    """It supersedes connections of the same process, an older one is closed, and the counter stays in its field."""
    async with room() as r:
        boot = r.attacker._boot_id
        good = r.victim.peer(r.friend.peer_id)
        assert good is not None
        link = r.link
        newer = await r.dial(boot_id=boot, generation=generation)
        await trio.sleep(1)
        assert link.error is not None and newer.error is None
        older = await r.dial(boot_id=boot, generation=generation - 1)
        await trio.sleep(1)
        # the victim says its own, so that a peer that has lost count cannot fall behind
        assert (older.error is None) == (older.generation == newer.generation)
        assert good.primary is not None and good.primary.generation == 0 and good.stats.connections >= 1
        back = r.back()
        assert back is not None and back.losses <= 2**32 - 1


async def test_a_generation_beyond_its_field_is_refused(autojump_clock: Clock) -> None:
    async with room() as r:
        for number in (2**32, 2**63, 2**64 - 1):
            hello = encode(replace(r.link.hello, generation=2**31))
            assert hello[-5:] == b"\xce\x80\x00\x00\x00"
            with pytest.raises(RemoteProtocolError):
                decode(hello[:-5] + b"\xcf" + number.to_bytes(8, "big"), SessionHello)


async def test_a_storm_of_connections_that_come_and_go(autojump_clock: Clock) -> None:
    """Same process, other processes of the identity, cut at once: one peer at the end, and it is the one that answers."""
    async with room() as r:
        for at in range(60):
            link = await r.dial(boot_id=r.attacker._boot_id if at % 2 else os.urandom(8), generation=at)
            if at % 3:
                link.pipe.abort()
            await trio.sleep(0.05)
        await trio.sleep(10)
        assert len(r.victim.manager.peers) <= 2


# -- lanes that cannot be had


@pytest.mark.parametrize("how", ["mute", "refused", "black hole"])
async def test_a_node_leaves_while_lanes_cannot_be_had(how: str, autojump_clock: Clock) -> None:
    """The peer accepted one connection and takes no other: tensors go over that one, and a node that ends waits for nothing."""
    world = World()
    place = ("10.0.0.1", 4001)
    async with member(world, *place[:1]) as served:
        served.serve_channel("t")
        async with member(world, "10.0.0.2") as asking:
            peer = await asking.dial(served.addresses[0])
            back = served.peer(asking.peer_id)
            assert back is not None
            receiver = back.receiver("t", b"x", lambda key: EXPECTED)
            listener = world.listeners[place]
            if how == "mute":
                world.mutes.add(place)
            elif how == "refused":
                del world.listeners[place]
            else:
                world.black_holes.add(place)
            receiver.post(memoryview(bytearray(SIZE)))
            with trio.fail_after(5):
                await peer.sender("t", b"x").send((0, 1), ZEROS, dtype=DType.uint8, shape=(SIZE,))
            assert peer.stats.lanes == 0 and (await receiver.receive()).buffer == ZEROS
            began = trio.current_time()
        assert trio.current_time() - began < 5
        world.listeners[place] = listener
        await trio.sleep(10)
        assert held(served) == {}
    assert all(near._closed for near, _ in world.pipes)


@pytest.mark.parametrize("how", ["turned away", "cut"])
async def test_a_peer_that_takes_every_lane_and_ends_it_is_not_dialled_without_end(how: str, autojump_clock: Clock) -> None:
    """A handshake each quarter of a second would be the price: an early end is a try that failed, like a dial."""
    world = World()
    place = ("10.0.0.1", 4001)
    identity = Identity.generate()
    async with (
        member(world, place[0], identity=identity) as served,
        member(world, place[0], port=4002, identity=identity),  # the same identity: it knows no ticket
        member(world, "10.0.0.2") as asking,
    ):
        served.serve_channel("t")
        peer = await asking.dial(served.addresses[0])
        back = served.peer(asking.peer_id)
        assert back is not None
        if how == "turned away":
            world.listeners[place] = world.listeners[place[0], 4002]
        receiver = back.receiver("t", b"x", lambda key: EXPECTED)
        sender = peer.sender("t", b"x")
        dials = len(world.dials)
        for _ in range(100):
            await trio.sleep(0.5)
            for link in back.all_links:
                if link.lane:
                    link.pipe.abort()
        assert 2 <= len(world.dials) - dials <= 2 * DEFAULT_LIMITS.lane_dials and peer.stats.lanes == 0
        receiver.post(memoryview(bytearray(SIZE)))
        with trio.fail_after(5):
            await sender.send((0, 1), ZEROS, dtype=DType.uint8, shape=(SIZE,))


async def test_a_lane_that_another_process_of_the_identity_takes_is_none(autojump_clock: Clock) -> None:
    """With a copied key, at the peer's address, and glad to take any ticket: it would read tensors that were not sent to it."""
    world = World()
    place = ("10.0.0.1", 4001)
    identity = Identity.generate()
    async with (
        member(world, place[0], identity=identity) as served,
        member(world, place[0], port=4002, identity=identity) as copy,
        member(world, "10.0.0.2") as asking,
        trio.open_nursery() as nursery,
    ):
        served.serve_channel("t")
        peer = await asking.dial(served.addresses[0])
        back = served.peer(asking.peer_id)
        assert back is not None
        world.listeners[place] = listener = MemoryListener(world, Address(*place))
        taken: list[Link] = []

        async def take() -> None:
            while True:
                link = await upgrade(await listener.accept(), copy.manager._local, initiator=False)
                link.taken = True
                taken.append(link)
                nursery.start_soon(link.run, Deaf())

        nursery.start_soon(take)
        receiver = back.receiver("t", b"x", lambda key: EXPECTED)
        receiver.post(memoryview(bytearray(SIZE)))
        sender = peer.sender("t", b"x")
        await trio.sleep(1)
        await sender.send((0, 1), ZEROS, dtype=DType.uint8, shape=(SIZE,))
        assert taken and peer.stats.lanes == 0 and not any(link.session.bytes_in[2] for link in taken)
        nursery.cancel_scope.cancel()
