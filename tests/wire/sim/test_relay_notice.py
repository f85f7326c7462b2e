"""A relay that is told to stop says so first: its clients go round it, and what is under way goes on."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from itertools import pairwise

import pytest
import trio
import trio.testing

from tests.wire.sim.rooms import collect
from tests.wire.sim.test_relay import QUESTION, Town, meet, town, until
from wire.errors import Code
from wire.messages import Want
from wire.net import DialFailed, Net, Peer
from wire.net.netevents import NetEvent, PathChanged, PeerLost
from wire.net.network import GOODBYE_S
from wire.net.relay import RelayOffer
from wire.relayrefusals import Refusal, Why
from wire.tensor import DType, Expectation

Clock = trio.testing.MockClock
SIZE = 16_000  # small, so that whole tensors show when bytes come
COUNT = 1250  # 20 MB
EXPECTED = Expectation(DType.uint8, (SIZE,), 0, SIZE)
RATE = RelayOffer(bulk_rate=5_000_000)
RTT_S = 8 * 0.01  # house to relay to house, and back: each line is crossed four times
# Stream, handshake and HELLO through two hops; then both hops start slowly, as connections that carried nothing for long.
MAKING_S = 0.2


class Flow:
    """20 MB from one house to the other; `at` is when each tensor was whole."""

    def __init__(self, peer: Peer, back: Peer) -> None:
        self.peer, self.back = peer, back
        self.at: list[float] = []

    async def run(self) -> None:
        sender, receiver = self.peer.sender("t", b"x"), self.back.receiver("t", b"x", lambda key: EXPECTED)
        data = [random.Random(n).randbytes(SIZE) for n in range(COUNT)]

        async def send(number: int) -> None:
            await sender.send(("x", number), memoryview(bytearray(data[number])), dtype=DType.uint8, shape=(SIZE,), order=number)

        async with trio.open_nursery() as nursery:
            for number in range(COUNT):
                nursery.start_soon(send, number)
            got = await collect(receiver, COUNT, SIZE, ahead=16, came=lambda so_far: self.at.append(trio.current_time()))
        assert got == data

    def gap_s(self, since: float, until: float = 1e9) -> float:
        """The longest time after `since` in which nothing came."""
        times = [since, *(at for at in self.at if since < at < until)]
        return max(later - earlier for earlier, later in pairwise(times))


async def stop(relay: Net) -> float:
    """End a net as leaving its block does; the seconds that it took."""
    began = trio.current_time()
    with trio.CancelScope(shield=True):
        await relay._stop()
    assert relay._nursery is not None
    relay._nursery.cancel_scope.cancel()
    return trio.current_time() - began


def relay_of(town: Town, peer: Peer) -> Net:
    assert peer.primary is not None
    return next(relay for relay in town.relays if relay.peer_id == peer.primary.relay)


async def between(
    town: Town, act: Callable[[Net], Awaitable[None]], watch: Callable[[Net], Awaitable[None]] | None = None
) -> tuple[Flow, Net, Net, float]:
    """Transfer, with `act(relay in use)` after a third of it; gives the flow, the houses, and when that was."""
    for _ in range(2):
        await town.relay(relay=RATE)
    a, b, peer = await meet(town, ("symmetric", "symmetric"))
    await until(lambda: len(a.access.relays.places) == len(b.access.relays.places) == 2)
    back = b.peer(a.peer_id)
    assert back is not None and peer.relayed
    for net in (a, b):
        net.access.punch._peers = lambda: ()  # no further attempt: one under way would be finished on the old circuit
    await trio.sleep(10)  # what every two nodes say to each other is said
    flow = Flow(peer, back)
    when: list[float] = []
    with trio.fail_after(120):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(flow.run)
            if watch is not None:
                assert a._nursery is not None
                a._nursery.start_soon(watch, a)
            await until(lambda: len(flow.at) >= COUNT // 3)
            when.append(trio.current_time())
            nursery.start_soon(act, relay_of(town, peer))
            acted = when[0]
    return flow, a, b, acted


@pytest.mark.parametrize("seed", range(2))
async def test_a_transfer_goes_on_through_the_other_relay(seed: int, autojump_clock: Clock) -> None:
    took: list[float] = []

    async def act(relay: Net) -> None:
        took.append(await stop(relay))

    async with town(seed) as t:
        flow, a, b, when = await between(t, act)
        assert flow.gap_s(flow.at[20], when) < RTT_S < flow.gap_s(when) < 2 * RTT_S + MAKING_S
        assert took and took[0] < 2.0, "it does not wait when nobody is left"
        assert not a.counts["internal-error"] + b.counts["internal-error"]


async def test_without_the_notice_there_is_a_gap(autojump_clock: Clock) -> None:
    """The negative control: the same relay, gone without a word (its kernel says it)."""
    async with town() as t:

        async def act(relay: Net) -> None:
            host = t.relay_hosts[t.relays.index(relay)]
            for pipe in list(host.connections.values()):
                t.net.reset(pipe)
            t.net.cut(host)

        flow, _, _, when = await between(t, act)
        assert flow.gap_s(when) > 2 * (2 * RTT_S + MAKING_S)


async def test_whose_relay_it_is_not_moves_nobody(autojump_clock: Clock) -> None:
    """Anyone may say goodbye: only what goes through that peer moves."""
    moved: list[float] = []
    async with town() as t:

        async def act(relay: Net) -> None:
            await stop(next(other for other in t.relays if other is not relay))

        async def watch(net: Net) -> None:
            async for event in net.events():
                if isinstance(event, PathChanged):
                    moved.append(trio.current_time())

        flow, a, b, when = await between(t, act, watch)
        assert not moved and flow.gap_s(when) < RTT_S
        await until(lambda: len(a.access.relays.places) == len(b.access.relays.places) == 1, 3)  # its place is named no more


async def test_a_relay_that_says_so_and_stays_moves_a_pair_once(autojump_clock: Clock) -> None:
    """It says goodbye to everybody who comes, for twenty minutes, and serves on."""
    moved: list[float] = []
    asked = 0
    async with town() as t:

        async def lie(relay: Net) -> None:
            nonlocal asked
            real = relay.access.relay._place

            def place(peer: Peer, *rest: object) -> object:
                nonlocal asked
                asked += 1
                relay._nursery.start_soon(goodbye, peer)
                return real(peer, *rest)

            relay.access.relay._place = place
            for peer in relay.peers():
                peer.goaway(Code.SHUTDOWN, retry_ms=1)

        async def goodbye(peer: Peer) -> None:
            await trio.sleep(1)
            peer.goaway(Code.SHUTDOWN, retry_ms=1)

        async def watch(net: Net) -> None:
            async for event in net.events():
                if isinstance(event, PathChanged):
                    moved.append(trio.current_time())

        flow, a, b, when = await between(t, lie, watch)
        assert flow.gap_s(when) < 2 * RTT_S + MAKING_S
        await trio.sleep(1200)
        assert len(moved) == 1 and moved[0] - when < 1
        assert (peer := a.peer(b.peer_id)) is not None and await peer.call("echo", QUESTION, Want, deadline_s=5) == QUESTION
        assert 2 <= asked <= 2 * 8, "ever more rarely"


@pytest.mark.parametrize(("notice_s", "longest_s"), [(7.0, 7.0), (0.5, 0.5), (300.0, 30.0)])
async def test_the_notice_has_an_end(notice_s: float, longest_s: float, autojump_clock: Clock) -> None:
    """The only relay: nobody can go round it.  New places and circuits it gives none meanwhile, and what stands works."""
    async with town() as t:
        relay = await t.relay(relay=RATE)
        relay._notice_s = lambda: notice_s
        a, b, peer = await meet(t, ("symmetric", "symmetric"))
        await trio.sleep(10)
        heard = a.events()
        took: list[float] = []

        async def act() -> None:
            took.append(await stop(relay))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(act)
            await trio.sleep(longest_s / 2)
            assert not took
            assert await peer.call("echo", QUESTION, Want, deadline_s=1) == QUESTION
            for net in (a, b):
                assert not net.access.relays.places and net.peer(relay.peer_id) is None
            table = relay.access.relay._table
            now = trio.current_time()
            place = table.reserve(a.peer_id, 2, "9.9.9.9", member=True, over_circuit=False, connection="new", now=now)
            assert isinstance(place, Refusal) and place.why is Why.STOPPING and place.retry_s
            assert relay.gauges()["relay_circuits_bulk"] == 1
            with pytest.raises(DialFailed):
                await a.dial(relay.addresses[0], deadline_s=1)
        assert longest_s <= took[0] <= longest_s + GOODBYE_S + 0.1
        await until(lambda: a.manager.peers.get(relay.peer_id) is None)
        lost = [event for event in _waiting(heard) if isinstance(event, PeerLost) and event.peer_id == relay.peer_id]
        assert len(lost) == 1 and lost[0].reason.code is Code.SHUTDOWN, "it is told once, when it was said"


def _waiting(channel: trio.MemoryReceiveChannel[NetEvent]) -> Iterator[NetEvent]:
    with suppress(trio.WouldBlock, trio.EndOfChannel):
        while True:
            yield channel.receive_nowait()


async def test_a_relay_without_circuits_does_not_wait(autojump_clock: Clock) -> None:
    async with town() as t:
        relay = await t.relay(relay=RATE)
        a, b = await t.house(1), await t.house(2)
        await until(lambda: len(a.access.relays.places) == len(b.access.relays.places) == 1)
        assert await stop(relay) <= GOODBYE_S + 0.1
