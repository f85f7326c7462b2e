"""What a node does through relays and routers, cancelled at moments all over its life: nothing stays, here, there, or at the relay."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import trio
import trio.testing

from tests.wire.net.test_cancellation import run_cancelled
from tests.wire.sim.test_morelanes import punched
from tests.wire.sim.test_relay import Town, ask, town, until
from wire.errors import WireError
from wire.messages import encode
from wire.net import MessageStream, Net
from wire.net.detour import go_round
from wire.net.relay import PROTOCOL, RelayOffer
from wire.relaymessages import RelayClass, Reserve

Clock = trio.testing.MockClock
Operation = Callable[[], Awaitable[object]]
MOST = 3000


async def cancel_all_over(operation: Operation, check: Operation, *, every: int) -> int:
    """Cancel at each `every`th step until it gets through; how many cancels there were."""
    for count, n in enumerate(range(1, MOST, every)):
        cancelled = await run_cancelled(operation, n)
        await check()
        if not cancelled:
            return count
    raise AssertionError("it loops")


@asynccontextmanager
async def houses(relays: int = 1) -> AsyncIterator[tuple[Town, Net, Net]]:
    """Two that stay relayed, not connected yet; the first knows the second's record."""
    async with town() as t:
        for _ in range(relays):
            await t.relay(relay=RelayOffer(bulk_rate=10_000_000))
        a, b = await t.house(1, "symmetric"), await t.house(2, "symmetric")
        for net in (a, b):
            net.access.punch._peers = lambda: ()
        await until(lambda: len(a.access.relays.places) == len(b.access.relays.places) == relays)
        await trio.sleep(12)
        await ask(a)
        await until(lambda: len(a.book.vouchers(b.peer_id)) == relays)
        yield t, a, b


def still(*nets: Net) -> dict[str, int]:
    """What is held but for places and the streams that hold them."""
    total = {}
    for net in nets:
        circuits = {name: count for name, count in net.gauges().items() if "circuit" in name or "share" in name or "pair" in name}
        asked = {name: net.gauges()[name] for name in ("punching", "lane_punching", "queued_bytes", "unread_bytes")}
        for name, count in {**circuits, **asked, "seen": len(net.access.circuits._seen), "scopes": len(net.access.relay._scopes)}.items():
            if count:
                total[name] = total.get(name, 0) + count
    return total


async def test_a_relayed_dial(autojump_clock: Clock) -> None:
    async with houses() as (t, a, b):
        (relay,) = t.relays
        before = [net.gauges()["streams"] for net in (a, b, relay)]

        async def dial() -> None:
            await a.manager.dial(b.access.relays.circuits(), expected=b.peer_id, target="b", patient=True)

        async def check() -> None:
            for peer in a.peers():
                if peer.peer_id == b.peer_id:
                    peer.fail(WireError("the test ends it"))
            await trio.sleep(3)
            assert still(a, b, relay) == {}
            assert [net.gauges()["streams"] for net in (a, b, relay)] == before
            assert not any(lock.locked() for lock in a.access._dials.values())

        assert await cancel_all_over(dial, check, every=7) > 5
        assert (await a.connect(b.peer_id)).relayed and not relay.counts["internal-error"]


async def test_a_place(autojump_clock: Clock) -> None:
    """Asked for by hand, by somebody who is cancelled before the answer, and renews in between."""
    async with town() as t:
        relay, a = await t.relay(relay=RelayOffer(bulk_rate=10_000_000)), await t.house(1)
        a.access.relays._wanted = lambda: False
        await until(lambda: not a.access.relays.holders())
        await trio.sleep(5)
        peer = a.peer(relay.peer_id)
        assert peer is not None
        before = a.gauges()["streams"], relay.gauges()["streams"]

        async def reserve() -> None:
            async with await peer.open(PROTOCOL) as stream:
                assert isinstance(stream, MessageStream)
                for _ in range(2):
                    await stream.send(encode(Reserve(RelayClass.SIGNAL)))
                    await stream.receive()

        async def check() -> None:
            await trio.sleep(150)
            assert relay.gauges()["relay_reservations"] == relay.gauges()["relay_networks"] == 0
            assert (a.gauges()["streams"], relay.gauges()["streams"]) == before

        await cancel_all_over(reserve, check, every=15)


async def test_a_keeper_of_places(autojump_clock: Clock) -> None:
    async with town() as t:
        relay = await t.relay(relay=RelayOffer(bulk_rate=10_000_000))
        a = await t.house(1)
        wanted = False
        a.access.relays._wanted = lambda: wanted

        async def hold() -> None:
            nonlocal wanted
            wanted = True
            with trio.fail_after(300):
                while not a.access.relays.places:
                    await trio.sleep(0.2)

        async def check() -> None:
            nonlocal wanted
            wanted = False
            await trio.sleep(200)
            assert not a.access.relays.holders() and not relay.gauges()["relay_reservations"]

        await check()
        await cancel_all_over(hold, check, every=61)
        wanted = True
        await until(lambda: a.access.relays.places, 120)


async def test_a_detour(autojump_clock: Clock) -> None:
    """Around a relay that says goodbye and stays, broken off at any moment: one connection of the pair, one circuit."""
    async with houses(2) as (t, a, b):

        async def detour() -> None:
            peer = await a.connect(b.peer_id)
            link = peer.primary
            assert link is not None
            await go_round(a.manager, peer, link)

        async def check() -> None:
            peer = a.peer(b.peer_id)
            if peer is not None:
                peer.fail(WireError("the test ends it"))
            await trio.sleep(8)
            assert still(a, b, *t.relays) == {} and not a.peer(b.peer_id) and not b.peer(a.peer_id)

        assert await cancel_all_over(detour, check, every=60) > 2
        assert not any(net.counts["internal-error"] for net in (a, b, *t.relays))


async def test_a_lane_through_a_hole(autojump_clock: Clock) -> None:
    async with punched(("cone", "cone")) as (t, a, b, peer, _):
        hosts = [host for host in t.net.hosts if host.nat is not None]
        hosts.sort(key=lambda host: str(host.nat and host.nat.address))
        by_house = sorted((a, b), key=lambda net: str(net.access.reach.finding.outside[0]))
        b.access.more_lanes._may_ask = lambda peer_id: True
        await trio.sleep(120)
        control = peer.primary
        assert control is not None
        async def lane() -> None:
            pipe = await a.access.more_lanes.open(control)
            pipe.close()

        async def check() -> None:
            await trio.sleep(30)
            assert still(a, b) == {} and not a.access.more_lanes._busy | b.access.more_lanes._busy
            pipes = [sum(not pipe.closed for pipe in host.connections.values()) for host in hosts]
            assert pipes == [net.gauges()["connections"] for net in by_house]
            assert peer.primary is control

        assert await cancel_all_over(lane, check, every=40) > 2
        assert not a.counts["internal-error"] + b.counts["internal-error"]


async def test_a_hole_punch(autojump_clock: Clock) -> None:
    async with town() as t:
        relay = await t.relay()
        a, b = await t.house(1), await t.house(2)
        punches = [net.access.punch for net in (a, b)]
        for punch in punches:
            punch._peers = lambda: ()
        await until(lambda: a.access.relays.places and b.access.relays.places)
        await trio.sleep(12)
        await ask(a)
        await until(lambda: a.book.vouchers(b.peer_id))

        async def hole() -> None:
            await a.connect(b.peer_id)
            with trio.fail_after(10):
                while (back := b.peer(a.peer_id)) is None:
                    await trio.sleep(0.05)
            await b.access.punch._attempt(back)

        async def check() -> None:
            for net, other in ((a, b), (b, a)):
                if (peer := net.peer(other.peer_id)) is not None:
                    peer.fail(WireError("the test ends it"))
            await trio.sleep(40)
            assert still(a, b, relay) == {} and not a.peer(b.peer_id) and not b.peer(a.peer_id)
            assert not any(punch._meetings or punch._busy for punch in punches)

        assert await cancel_all_over(hole, check, every=110) > 2
        assert not any(net.counts["internal-error"] for net in (a, b, relay))
