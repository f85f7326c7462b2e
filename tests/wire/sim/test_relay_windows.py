"""What a relay holds of a circuit, and what a circuit gets of a line: the windows of the streams that it copies."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import trio
import trio.testing

from tests.wire.sim import test_relay
from tests.wire.sim.test_relay import Town, meet, town
from wire.limits import DEFAULT_LIMITS, KIB, MIB
from wire.net import ByteStream, Kind, MessageStream, Net, Peer
from wire.net.relay import RelayOffer
from wire.sim import Link
from wire.streams import Stream

Clock = trio.testing.MockClock
PIECE = bytes(256 * KIB)


def held(relay: Net) -> list[Stream]:
    """The relay's ends of all circuits."""
    links = [link for peer in relay.peers() for link in peer.all_links]
    return [stream for link in links for stream in link.session._conn.streams.values() if stream.protocol.startswith("circuit")]


@dataclass
class Pushed:
    """One house pushes as fast as it can to the other; `got` bytes so far."""

    town: Town
    relay: Net
    target: Net
    peer: Peer
    got: list[int] = field(default_factory=lambda: [0])
    largest: int = 0
    unread: int = 0

    async def over(self, seconds: float) -> float:
        """Bytes per second that came."""
        before, until_s = self.got[0], trio.current_time() + seconds
        while trio.current_time() < until_s:
            self.largest = max([self.largest, *(stream.recv.size for stream in held(self.relay))])
            self.unread = max([self.unread, *(stream.recv.unread for stream in held(self.relay))])
            await trio.sleep(0.02)
        return (self.got[0] - before) / seconds


@asynccontextmanager
async def pushing(line: Link, monkeypatch: pytest.MonkeyPatch, bulk_rate: int) -> AsyncIterator[Pushed]:
    monkeypatch.setattr(test_relay, "LINE", line)
    async with town() as t:
        relay = await t.relay(relay=RelayOffer(bulk_rate=bulk_rate))
        a, b, peer = await meet(t, ("symmetric", "symmetric"))
        for net in (a, b):
            net.access.punch._peers = lambda: ()  # they stay relayed
        pushed = Pushed(t, relay, b, peer)
        room = memoryview(bytearray(len(PIECE)))

        async def sink(_: Peer, stream: ByteStream | MessageStream) -> None:
            assert isinstance(stream, ByteStream)
            while count := await stream.receive_into(room):
                pushed.got[0] += count

        async def push() -> None:
            async with await peer.open("sink", Kind.BYTE, 3) as stream:
                assert isinstance(stream, ByteStream)
                while True:
                    await stream.send_all(PIECE)

        b.serve("sink", sink)
        await trio.sleep(10)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(push)
            yield pushed
            nursery.cancel_scope.cancel()


async def test_one_bulk_circuit_fills_a_hundred_megabit_at_eighty_milliseconds(
    autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pushing(Link(0.01, 0.0, 100e6, 100e6), monkeypatch, 50_000_000) as pushed:
        first = await pushed.over(1.0)
        rate = await pushed.over(5.0)
        assert first * 8 > 0.5 * 100e6 and rate * 8 > 0.95 * 100e6
        assert pushed.largest <= 4 * MIB


async def test_a_relay_holds_four_mebibytes_a_direction_and_no_more(autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gigabit over half a second would like 32 MiB; then the far house's line goes silent, and its bytes stay at the relay."""
    async with pushing(Link(0.0625, 0.0, 1e9, 1e9), monkeypatch, 50_000_000) as pushed:
        await pushed.over(8.0)
        (house,) = [host for host in pushed.town.net.hosts if host.nat is not None and host.nat.address == "9.2.0.1"]
        pushed.town.net.cut(house)
        await pushed.over(6.0)
        assert 2 * MIB <= pushed.unread <= pushed.largest == DEFAULT_LIMITS.relay_bulk_window_max_bytes


async def test_a_signal_circuit_has_a_small_window(autojump_clock: Clock) -> None:
    async with town() as t:
        relay = await t.relay(relay=RelayOffer(bulk_rate=0))
        await meet(t, ("symmetric", "symmetric"))
        assert relay.gauges()["relay_circuits_signal"] == 1
        ends = held(relay)
        assert [stream.recv.size for stream in ends] == [64 * KIB] * 2
        (far,) = [stream for stream in ends if stream.protocol == "circuit-in/1"]
        assert far.recv.limit - far.recv.consumed <= 64 * KIB, "the target was never told of more"
