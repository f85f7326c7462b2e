"""A victim, a member that attacks it by hand, and a third one whose channel must go on (test_hostile_lanes, test_hostile_channels).

The attacker is a node of ours whose connection is used by hand: it is authenticated and seals every record rightly.  After each
attack the victim holds nothing, has logged nothing above INFO, and the third member still sends its tensors.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import trio
import trio.testing

from tests.wire.net.worlds import World, held, member
from wire.chunks import OutChunk
from wire.errors import Code, ConnectionLost, error_for
from wire.events import Kind
from wire.limits import DEFAULT_LIMITS
from wire.messages import encode
from wire.net import Net, Peer
from wire.net.link import Link
from wire.net.upgrade import upgrade
from wire.tensor import DType, Expectation

Clock = trio.testing.MockClock
SIZE = 300_000
EXPECTED = Expectation(DType.uint8, (SIZE,), 0, SIZE)
TOKEN = bytes(8)
ZEROS = memoryview(bytearray(SIZE))
KEY = (0, 500)  # none of the friend's, who shares the table of delivered keys


class Deaf:
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
        self.nursery.start_soon(link.run, Deaf())
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


# The attacker's lanes are dialled by the tests: one that his node dials by itself would use up their tickets.
BY_HAND = replace(DEFAULT_LIMITS, lanes_max=0)


@asynccontextmanager
async def room(**settings: object) -> AsyncIterator[Room]:
    world = World()
    async with (
        member(world, "10.0.0.1", **settings) as victim,
        member(world, "10.0.0.2", limits=BY_HAND) as attacker,
        member(world, "10.0.0.3") as friend,
    ):
        victim.serve_channel("t")
        it = Room(world, victim, attacker, friend, await attacker.dial(victim.addresses[0]), await friend.dial(victim.addresses[0]))
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
