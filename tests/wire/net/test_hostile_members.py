"""Members that misbehave around lanes, tensor channels and reconnecting: in memory and in virtual time.  WIRE-1, WIRE-6.

The attacker is a node of ours whose connection is used by hand: it is authenticated and seals every record rightly.  After each
attack the victim holds nothing, has logged nothing above INFO, and a third member, whose channel was open all the while, still
sends its tensors.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest
import trio
import trio.testing

from tests.wire.net.worlds import MemoryListener, World, held, member
from wire.address import Address
from wire.chunks import OutChunk
from wire.errors import Code, ConnectionLost, RemoteProtocolError, WireError, error_for
from wire.events import Kind
from wire.identity import Identity
from wire.limits import DEFAULT_LIMITS
from wire.messages import Ask, Begin, Done, Drop, Have, LaneAsk, Posted, SessionHello, Slot, Unslot, decode, encode, pack
from wire.net import Net, Peer
from wire.net.carrier import CHUNKS_META
from wire.net.link import Link
from wire.net.services import LANES
from wire.net.upgrade import upgrade
from wire.tensor import DType, Expectation

Clock = trio.testing.MockClock
SIZE = 300_000
EXPECTED = Expectation(DType.uint8, (SIZE,), 0, SIZE)
TOKEN = bytes(8)
KEY = (0, 500)  # none of the friend's, who shares the table of delivered keys


class _Deaf:
    """Owner of a connection that the attacker made by hand."""

    def on_opened(self, link: Link, event: object) -> None: ...
    def on_hello(self, link: Link, event: object) -> None: ...
    def on_goaway(self, link: Link, event: object) -> None: ...


class Chunks:
    """A `ChunkSource` that offers what the attacker likes."""

    order = 0

    def __init__(self, *chunks: OutChunk) -> None:
        self.chunks = list(chunks)

    def next_chunk(self) -> OutChunk | None:
        return self.chunks.pop(0) if self.chunks else None


class Room:
    """A victim, an attacker that has dialled it, and a third member with a channel to the victim."""

    def __init__(self, world: World, victim: Net, attacker: Net, friend: Net, peer: Peer, good: Peer) -> None:
        self.world, self.victim, self.attacker, self.friend, self.peer, self.good = world, victim, attacker, friend, peer, good
        self.sent = 0
        self.mine: list[Link] = []  # connections that the attacker made by hand
        self.nursery: trio.Nursery

    @property
    def link(self) -> Link:
        """The attacker's control connection."""
        link = self.peer.primary
        assert link is not None
        return link

    def back(self) -> Peer | None:
        """The attacker, as the victim sees it."""
        return self.victim.peer(self.attacker.peer_id)

    async def dial(self, ticket: bytes = b"", **hello: object) -> Link:
        """A connection by hand, with this ticket and these fields of its HELLO; its session runs, what it is told is ignored."""
        local = self.attacker.manager._local
        mine = replace(local, hello=lambda *what: replace(local.hello(*what), **hello))  # type: ignore[arg-type]
        pipe = await self.attacker._transport.dial(self.victim.addresses[0])
        link = await upgrade(pipe, mine, initiator=True, expected=self.victim.peer_id, ticket=ticket)
        link.taken = True
        self.mine.append(link)
        self.nursery.start_soon(link.run, _Deaf())
        return link

    async def lane(self) -> Link:
        """A true lane."""
        number, ticket = self.link.tickets.issue(1)
        link = await self.dial(ticket)
        link.lane, link.home = number, self.link
        return link

    def open(self, kind: Kind, meta: bytes, protocol: str = "t", link: Link | None = None) -> int:
        link = link or self.link
        return link.session.open_stream(kind, protocol, 1 if kind is Kind.MESSAGE else 2, meta=meta, now=trio.current_time())

    def say(self, stream: int, *messages: object) -> None:
        for message in messages:
            self.link.session.send(stream, encode(message), now=trio.current_time())
        self.link.kick()

    def taken(self) -> int:
        """The control stream of a channel that the victim has opened, accepted; nobody reads it."""
        (waiting,) = (item for item in self.peer._channels.waiting if item.control is None)
        self.peer._channels.waiting.remove(waiting)
        stream = waiting.event.stream
        self.link.ends.pop(stream)
        self.link.session.accept(stream)
        return stream

    async def good_sends(self) -> None:
        """The friend's tensor arrives."""
        with trio.fail_after(30):
            self.sent += 1
            receiver = self.receiver
            receiver.post(memoryview(bytearray(SIZE)))
            async with trio.open_nursery() as nursery:
                data = memoryview(bytearray([self.sent]) * SIZE)
                nursery.start_soon(lambda: self.sender.send((0, self.sent), data, dtype=DType.uint8, shape=(SIZE,)))
                received = await receiver.receive()
            assert received.key == (0, self.sent) and received.buffer == data

    def start_friend(self) -> None:
        self.sender = self.good.sender("t", b"friend")
        back = self.victim.peer(self.friend.peer_id)
        assert back is not None
        self.receiver = back.receiver("t", b"friend", lambda key: EXPECTED)


@asynccontextmanager
async def room(**settings: object) -> AsyncIterator[Room]:
    world = World()
    async with (
        member(world, "10.0.0.1", **settings) as victim,
        member(world, "10.0.0.2") as attacker,
        member(world, "10.0.0.3") as friend,
    ):
        victim.serve_channel("t")
        it = Room(
            world, victim, attacker, friend, await attacker.dial(victim.addresses[0]), await friend.dial(victim.addresses[0])
        )
        it.start_friend()
        await it.good_sends()
        async with trio.open_nursery() as it.nursery:
            yield it
            for link in it.mine:
                link.fail(ConnectionLost("the attacker leaves"))
        await it.good_sends()
        it.sender.close()
        it.receiver.close()
        it.peer.fail(error_for(Code.SHUTDOWN, local=True))
        await trio.sleep(100)
        assert held(victim) == {} and it.back() is None
    assert world.open_pipes() == 0


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> object:
    yield
    assert [record.message for record in caplog.records if record.levelno > logging.INFO] == []


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


# -- tensor channels: the attacker sends


def begin(slot: int, token: bytes = TOKEN, size: int = SIZE) -> Begin:
    return Begin(slot, KEY, 0, DType.uint8, (size,), 0, size, token)


@pytest.mark.parametrize(
    ("messages", "code"),
    [
        ([begin(0), begin(0, bytes([1]) * 8)], Code.PROTOCOL),  # a second one with another token
        ([begin(7)], Code.PROTOCOL),
        ([Ask(2**32 - 1, ())], Code.EXCESSIVE),  # there was no lane
        ([Drop(0, KEY, 0)], Code.PROTOCOL),
        ([Slot(0, None, 5)], Code.PROTOCOL),  # the receiver's word
        ([Have(0, TOKEN, b"")], Code.PROTOCOL),
        ([LaneAsk(1)], Code.PROTOCOL),
    ],
)
async def test_a_lie_of_a_sender_ends_its_connection(messages: list[object], code: Code, autojump_clock: Clock) -> None:
    async with room() as r:
        back = r.back()
        assert back is not None
        receiver = back.receiver("t", b"x", lambda key: EXPECTED)
        slot = memoryview(bytearray(SIZE))
        receiver.post(slot)
        r.say(r.open(Kind.MESSAGE, b"x"), *messages)
        await trio.sleep(2)
        assert r.peer.closed and r.peer.reason is not None and r.peer.reason.code is code
        assert receiver.posted == 0 and not any(slot)


async def test_an_ask_of_more_slots_than_there_can_be_is_no_message(autojump_clock: Clock) -> None:
    async with room() as r:
        stream = r.open(Kind.MESSAGE, b"x")
        back = r.back()
        assert back is not None
        back.receiver("t", b"x", lambda key: EXPECTED)
        r.link.session.send(stream, pack([9, 0, list(range(1000))]), now=trio.current_time())
        r.link.kick()
        await trio.sleep(2)
        assert r.peer.closed and r.peer.reason is not None and r.peer.reason.code is Code.PROTOCOL


@pytest.mark.parametrize("chunk", [(0, 0, 1, 0), (0, 900, 10, 0), (1, 0, 10, 0), (0, 0, 10, 2), (2**32 - 1, 2**32 - 1, 10, 0)])
async def test_a_chunk_that_belongs_nowhere_ends_its_connection(chunk: tuple[int, int, int, int], autojump_clock: Clock) -> None:
    async with room() as r:
        back = r.back()
        assert back is not None
        receiver = back.receiver("t", b"x", lambda key: EXPECTED)
        slot = memoryview(bytearray(SIZE))
        receiver.post(slot)
        control = r.open(Kind.MESSAGE, b"x")
        r.say(control, begin(0))
        stream = r.open(Kind.CHUNKS, CHUNKS_META.pack(control) + b"x")
        number, index, length, flags = chunk
        r.link.session.attach_source(stream, Chunks(OutChunk(number, index, memoryview(b"\x07" * length), flags)), 2)
        r.link.kick()
        await trio.sleep(2)
        assert r.peer.closed and r.peer.reason is not None and r.peer.reason.code is Code.PROTOCOL
        assert receiver.posted == 0 and not any(slot)


async def test_chunk_streams_of_a_foreign_or_no_control_stream_wait_or_are_refused(autojump_clock: Clock) -> None:
    """One that names another channel's control stream, one whose control stream never comes, one without a name, a second one."""
    async with room() as r:
        back = r.back()
        assert back is not None
        receiver = back.receiver("t", b"x", lambda key: EXPECTED)
        slot = memoryview(bytearray(SIZE))
        receiver.post(slot)
        control, other = r.open(Kind.MESSAGE, b"x"), r.open(Kind.MESSAGE, b"y")
        lane = await r.lane()
        r.link.kick()
        await trio.sleep(1)
        session = lane.session
        foreign = r.open(Kind.CHUNKS, CHUNKS_META.pack(other) + b"x", link=lane)
        nobody = r.open(Kind.CHUNKS, CHUNKS_META.pack(2**31 + 1) + b"x", link=lane)
        nameless = r.open(Kind.CHUNKS, CHUNKS_META.pack(control), link=lane)
        right = r.open(Kind.CHUNKS, CHUNKS_META.pack(control) + b"x", link=lane)
        second = r.open(Kind.CHUNKS, CHUNKS_META.pack(control) + b"x", link=lane)
        lane.kick()
        await trio.sleep(2)
        assert [session.is_live(stream) for stream in (foreign, nobody, nameless, right, second)] == [True, True, False, True, False]
        assert receiver.posted == 1 and not any(slot) and lane.error is None
        receiver.close()


# -- tensor channels: the attacker receives


async def victim_sends(r: Room, *messages: object, transfer: bool = True) -> tuple[BaseException | None, int]:
    """The victim sends a tensor to the attacker, who answers with these messages; how the send ended, and what is queued."""
    back = r.back()
    assert back is not None
    r.attacker.serve_channel("v")
    sender = back.sender("v", b"x")
    found: list[BaseException] = []

    async def send() -> None:
        try:
            await sender.send((0, 1), memoryview(bytearray(SIZE)), dtype=DType.uint8, shape=(SIZE,))
        except WireError as error:
            found.append(error)

    with trio.move_on_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            await trio.sleep(1)
            r.say(r.taken(), *messages)
            await trio.sleep(3)
            nursery.cancel_scope.cancel()
    return (found[0] if found else None), len(sender.at._outbox) if sender.at is not None else 0


@pytest.mark.parametrize(
    "messages",
    [
        [Posted(0), Slot(0, None, SIZE), Have(0, TOKEN, b"\x03")],  # an answer without a question
        [Slot(0, (0, 1), SIZE, TOKEN, b"\xff"), Slot(0, None, 5)],  # posted twice
        [Posted(0), *[Slot(at, (0, 9), 5) for at in range(65)]],
        [Posted(0), Slot(0, (0, 9), SIZE), Done(0, (0, 1), 0)],  # an end that nobody began
        [Posted(5), Slot(4, None, SIZE)],
        [Posted(0), Unslot(3)],
        [Posted(0), Begin(0, (0, 1), 0, 0, (), 0, 0, TOKEN)],
    ],
)
async def test_a_lie_of_a_receiver_ends_its_connection(messages: list[object], autojump_clock: Clock) -> None:
    async with room() as r:
        error, _ = await victim_sends(r, *messages)
        assert r.peer.closed and r.peer.reason is not None and r.peer.reason.code is Code.PROTOCOL
        assert isinstance(error, WireError)


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


# -- a peer that makes us talk and does not read


async def test_a_receiver_that_does_not_read_what_it_makes_us_say_is_cut(autojump_clock: Clock) -> None:
    """It posts and withdraws slots; each pair costs a Begin, which waits for the credit that never comes."""
    async with room() as r:
        back = r.back()
        assert back is not None
        r.attacker.serve_channel("v")
        sender = back.sender("v", b"x")
        async with trio.open_nursery() as nursery:
            for at in range(60):
                nursery.start_soon(sends_in_vain, lambda at=at: sender.send((0, at), ZEROS, dtype=DType.uint8, shape=(SIZE,)))
            await trio.sleep(1)
            stream = r.taken()
            r.say(stream, Posted(0))
            most = await chatter(r, stream, post_and_withdraw, lambda: sender.at)
        assert r.peer.reason is not None and r.peer.reason.code is Code.EXCESSIVE and most <= WAITING_MOST


async def test_a_sender_that_does_not_read_what_it_makes_us_say_is_cut(autojump_clock: Clock) -> None:
    """It begins what nobody expects; each costs a Done and the slot's next number."""
    async with room() as r:
        back = r.back()
        assert back is not None
        receiver = back.receiver("t", b"x", lambda key: None)
        for _ in range(60):
            receiver.post(memoryview(bytearray(10)))
        stream = r.open(Kind.MESSAGE, b"x")
        r.link.kick()
        await trio.sleep(1)
        most = await chatter(r, stream, begin, lambda: receiver.at)
        assert r.peer.reason is not None and r.peer.reason.code is Code.EXCESSIVE and most <= WAITING_MOST


ZEROS = memoryview(bytearray(SIZE))
WAITING_MOST = DEFAULT_LIMITS.channel_messages_waiting_max + 240  # and what one batch of them causes


def post_and_withdraw(at: int) -> Slot | Unslot:
    """60 slots, and the same 60 withdrawn."""
    number = at // 120 * 60 + at % 60
    return Slot(number, None, SIZE) if at // 60 % 2 == 0 else Unslot(number)


async def sends_in_vain(send: Callable[[], Awaitable[None]]) -> None:
    with suppress(WireError):
        await send()


async def chatter(r: Room, stream: int, said: Callable[[int], object], at: Callable[[], object]) -> int:
    """Say that again and again, 60 messages at a time; the most messages that waited at the victim."""
    link, most = r.link, 0
    for number in range(12_000):
        message = encode(said(number))
        while link.session.is_live(stream) and link.session.sendable(stream, len(message)) < len(message):
            await trio.sleep(0.01)
        if not link.session.is_live(stream):
            break
        link.session.send(stream, message, now=trio.current_time())
        if number % 60 == 59:
            link.kick()
            await trio.sleep(0.01)
            most = max(most, len(getattr(at(), "_outbox", ())))
    await trio.sleep(5)
    return most


# -- channels opened again and again, and lanes that cannot be had


async def test_a_channel_that_is_opened_again_and_again_keeps_its_slots(autojump_clock: Clock) -> None:
    """Each opening ends the one before and hears of every slot; the buffers stay where they are, and nothing piles up."""
    async with room() as r:
        back = r.back()
        assert back is not None
        receiver = back.receiver("t", b"x", lambda key: EXPECTED)
        slots = [bytearray(SIZE) for _ in range(8)]
        for slot in slots:
            receiver.post(memoryview(slot))
        for at in range(300):
            control = r.open(Kind.MESSAGE, b"x")
            if at < 8:
                r.say(control, begin(at))
            chunks = r.open(Kind.CHUNKS, CHUNKS_META.pack(control) + b"x")
            r.link.session.attach_source(chunks, Chunks(OutChunk(at % 8, 0, ZEROS[: DEFAULT_LIMITS.chunk_bytes], 0)), 2)
            r.link.kick()
            await trio.sleep(0.02)
        assert not r.peer.closed and receiver.posted == 8 and receiver.channel.open_slots == 8
        r.peer.fail(ConnectionLost("the attacker leaves"))
        receiver.close()
        await trio.sleep(2)
        assert receiver.posted == 0


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
                nursery.start_soon(link.run, _Deaf())

        nursery.start_soon(take)
        receiver = back.receiver("t", b"x", lambda key: EXPECTED)
        receiver.post(memoryview(bytearray(SIZE)))
        sender = peer.sender("t", b"x")
        await trio.sleep(1)
        await sender.send((0, 1), ZEROS, dtype=DType.uint8, shape=(SIZE,))
        assert taken and peer.stats.lanes == 0 and not any(link.session.bytes_in[2] for link in taken)
        nursery.cancel_scope.cancel()
