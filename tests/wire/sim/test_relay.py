"""Nodes behind routers that meet through relays: production nets on the in-memory internet."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import trio
import trio.testing

from tests.wire.net.worlds import RUN
from tests.wire.sim.rooms import collect
from wire.address import Address, Scope
from wire.errors import Code, StreamReset
from wire.identity import Identity
from wire.messages import Want, encode
from wire.net import ByteStream, DialFailed, Kind, Net, Peer, open_net
from wire.net.circuits import OPEN
from wire.net.netevents import RelayDisagrees
from wire.net.relay import RelayOffer
from wire.reachability import Finding, Reach
from wire.relaymessages import CircuitAsk, Purpose, RelayClass
from wire.reservations import RelayTable
from wire.sim import Host, Internet, Link, Nat, seed_tasks
from wire.tensor import DType, Expectation

Clock = trio.testing.MockClock
LINE = Link(0.01, 0.001, 50e6, 50e6, 0.0)
SIZE = 400_000  # two chunks
EXPECTED = Expectation(DType.uint8, (SIZE,), 0, SIZE)
QUESTION = Want(RUN, 3)


async def echo(peer: Peer, want: Want) -> Want:
    return want


async def until(condition: Callable[[], object], deadline_s: float = 30.0) -> float:
    """Virtual seconds until it holds."""
    began = trio.current_time()
    with trio.fail_after(deadline_s):
        while not condition():
            await trio.sleep(0.05)
    return trio.current_time() - began


class Town:
    """Public relays 8.1.0.1, 8.2.0.1, ... and houses behind routers; everybody knows the relays' records."""

    def __init__(self, seed: int) -> None:
        seed_tasks(seed)
        self.net = Internet(seed)
        self.relays: list[Net] = []
        self.relay_hosts: list[Host] = []
        self._stack = AsyncExitStack()

    async def open(self, host: Host, *, public: bool = False, run: bytes | None = RUN, relay: RelayOffer | None = None) -> Net:
        net = await self._stack.enter_async_context(
            open_net(
                Identity(f"{host.name}{host.nat.address if host.nat else ''}".encode().ljust(32, b"-")),
                run=run,
                listen=[Address(host.name, 4001)],
                announce=[Address(host.name, 4001)] if public else [],
                scope=Scope.INTERNET,
                transport=host.transport,
                rng=random.Random(1),
                relay=relay,
            )
        )
        net.serve_calls("echo", Want, echo, guest=True)
        net.serve_channel("t")
        if public:
            found = Finding(Reach.PUBLIC, (Address(host.name, 4001),), (), False, "by decree")
            net.access.reach.known.finding = lambda candidates, now: found  # type: ignore[method-assign]
            net.access.reach._conclude()
        return net

    async def relay(self, **settings: object) -> Net:
        host = self.net.host(f"8.{len(self.relays) + 1}.0.1", link=LINE)
        self.relay_hosts.append(host)
        net = await self.open(host, public=True, **settings)  # type: ignore[arg-type]
        self.relays.append(net)
        return net

    async def house(self, number: int, kind: str = "cone", run: bytes | None = RUN, *, dial: bool = True) -> Net:
        host = self.net.host("192.168.1.2", link=LINE, nat=Nat(kind, f"9.{number}.0.1"))
        net = await self.open(host, run=run)
        for relay in self.relays if dial else ():
            await net.dial(relay.addresses[0])
        return net


@asynccontextmanager
async def town(seed: int = 1) -> AsyncIterator[Town]:
    made = Town(seed)
    async with made.net.running(), made._stack:
        yield made


async def meet(town: Town, kinds: tuple[str, str] = ("cone", "cone")) -> tuple[Net, Net, Peer]:
    """Two houses, the first connected to the second through a relay."""
    a, b = await town.house(1, kinds[0]), await town.house(2, kinds[1])
    await until(lambda: len(b.access.relays.places) == min(2, len(town.relays)))
    await until(lambda: a.book.vouchers(b.peer_id) or not [town.net.rng, a._nursery and a._nursery.start_soon(ask, a)])
    return a, b, await a.connect(b.peer_id)


async def ask(net: Net) -> None:
    for peer in net.peers():
        await net._exchange.ask(peer)


async def test_two_houses_talk_through_a_relay(autojump_clock: Clock) -> None:
    async with town() as t:
        await t.relay()
        a, b, peer = await meet(t)
        assert peer.relayed and peer.peer_id == b.peer_id
        assert await peer.call("echo", QUESTION, Want, deadline_s=5) == QUESTION
        back = b.peer(a.peer_id)
        assert back is not None and back.relayed
        assert await back.call("echo", QUESTION, Want, deadline_s=5) == QUESTION
        assert t.relays[0].gauges()["relay_circuits_bulk"] == 1
        peer.goaway(Code.SHUTDOWN)
        await until(lambda: not t.relays[0].gauges()["relay_circuits_bulk"])


async def send_all(
    town: Town, peer: Peer, back: Peer, count: int, between: Callable[[int], None] = lambda n: None, name: bytes = b"x"
) -> None:
    sender, receiver = peer.sender("t", name), back.receiver("t", name, lambda key: EXPECTED)
    data = [random.Random(n).randbytes(SIZE) for n in range(count)]
    got: list[bytes] = []

    async def receive() -> None:
        got.extend(await collect(receiver, count, SIZE, ahead=2, came=between))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        for number in range(count):
            await sender.send((name.decode(), number), memoryview(bytearray(data[number])), dtype=DType.uint8, shape=(SIZE,), order=number)
    assert got == data


async def test_tensors_go_over_a_circuit_of_their_own(autojump_clock: Clock) -> None:
    async with town() as t:
        relay = await t.relay(relay=RelayOffer(bulk_rate=10_000_000))
        a, b, peer = await meet(t)
        back = b.peer(a.peer_id)
        assert back is not None
        began = trio.current_time()
        await send_all(t, peer, back, 60)
        assert trio.current_time() - began < 60 * SIZE / 2e6
        assert peer.stats.lanes == 1 and relay.gauges()["relay_circuits_bulk"] == 2
        assert relay.counts["internal-error"] == 0
        events = a.events()
        peer.goaway(Code.SHUTDOWN)
        await until(lambda: not relay.gauges()["relay_circuits_bulk"], 60)  # the channel is open while it drains
        await until(lambda: not a.access.metering._sums and not b.access.metering._sums, 10)
        sent, received = a.access.metering.total
        assert sent > 60 * SIZE and received > 0 and b.access.metering.total[1] == sent
        while True:  # both ends agree with the relay, so nobody complains
            try:
                assert not isinstance(events.receive_nowait(), RelayDisagrees)
            except trio.WouldBlock:
                break


async def test_a_relay_that_counts_otherwise_is_told_of(autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    async with town() as t:
        relay = await t.relay(relay=RelayOffer(bulk_rate=50_000_000))
        a, b, peer = await meet(t)
        back = b.peer(a.peer_id)
        assert back is not None
        a.access.punch._busy.add(b.peer_id)
        b.access.punch._busy.add(a.peer_id)  # they stay relayed
        real = RelayTable.forwarded

        def generous(self: RelayTable, number: int, up: bool, size: int, now: float) -> object:
            return real(self, number, up, 3 * size, now)

        monkeypatch.setattr(RelayTable, "forwarded", generous)
        await send_all(t, peer, back, 40, name=b"y")
        events = a.events()
        peer.goaway(Code.SHUTDOWN)
        assert relay is not None
        with trio.fail_after(60):
            async for event in events:
                if isinstance(event, RelayDisagrees):
                    break


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("how", ["closed", "silent"])
async def test_nat_7_the_relay_in_use_fails_and_the_other_carries_on(how: str, seed: int, autojump_clock: Clock) -> None:
    async with town(seed) as t:
        await t.relay(relay=RelayOffer(bulk_rate=4_000_000))
        await t.relay(relay=RelayOffer(bulk_rate=4_000_000))
        a, b, peer = await meet(t)
        back = b.peer(a.peer_id)
        assert back is not None and peer.primary is not None
        used = peer.primary.pipe.info().relay
        (victim,) = [host for host, relay in zip(t.relay_hosts, t.relays, strict=True) if relay.peer_id == used]
        stopped: list[float] = []
        moved: list[float] = []

        def between(count: int) -> None:
            if count == 4:
                stopped.append(trio.current_time())
                if how == "closed":
                    for pipe in list(victim.connections.values()):
                        t.net.reset(pipe)
                t.net.cut(victim)
            elif stopped and not moved:
                moved.append(trio.current_time())

        with trio.fail_after(120):
            await send_all(t, peer, back, 12, between)
        assert moved and moved[0] - stopped[0] <= (5 if how == "closed" else 15)
        assert a.peer(b.peer_id) is peer, "the same peer all along"


async def test_nat_5_a_relay_connects_to_nobody_without_a_place(autojump_clock: Clock) -> None:
    async with town() as t:
        relay = await t.relay()
        a, b, peer = await meet(t)
        peer.goaway(Code.SHUTDOWN)
        await until(lambda: a.peer(b.peer_id) is None and b.peer(a.peer_id) is None)
        host = next(host for host in t.net.hosts if host.nat is not None and host.nat.address == "9.2.0.1")
        for pipe in list(host.connections.values()):
            t.net.reset(pipe)
        t.net.cut(host)
        await until(lambda: relay.gauges()["relay_reservations"] == 1)
        with pytest.raises(DialFailed, match="has just ended") as caught:
            await a.connect(b.peer_id, deadline_s=10)
        assert {cause.code for cause in caught.value.causes.values()} == {Code.REFUSED}
        gauges = relay.gauges()
        assert gauges["relay_circuits_bulk"] == gauges["share_items"] == 0


async def test_a_target_that_is_no_peer_id_is_refused(autojump_clock: Clock) -> None:
    """A stranger's number must not count as a fault of ours, with a traceback each."""
    async with town() as t:
        relay = await t.relay()
        a, _, _ = await meet(t)
        at_relay = a.peer(relay.peer_id)
        assert at_relay is not None
        ask = CircuitAsk(bytes(32), RelayClass.BULK, Purpose.CONTROL, b"")
        async with await at_relay.open(OPEN, Kind.BYTE, meta=encode(ask)) as stream:
            assert isinstance(stream, ByteStream)
            with pytest.raises(StreamReset) as caught:
                await stream.receive_some()
        assert caught.value.code is Code.PROTOCOL
        assert not relay.counts["internal-error"]
