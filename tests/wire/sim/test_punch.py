"""Which pairs of routers can be punched: every row of the table ends on the path that it must, and says why (section 23, item 12)."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import trio
import trio.testing

from tests.wire.net.worlds import RUN
from tests.wire.sim.test_relay import LINE, QUESTION, Town, ask, send_all, town, until
from wire.address import Address
from wire.messages import Want
from wire.net import Net, Peer
from wire.path import PathKind
from wire.reachability import Finding, Reach
from wire.sim import Nat

Clock = trio.testing.MockClock
KINDS = ("cone", "shift", "symmetric", "double")
PUNCHABLE = {"cone", "shift", "double"}


async def arrive(t: Town, number: int, kind: str) -> Net:
    """A house whose node dials the relays as seeds."""
    net = await t.house(number, kind, dial=False)
    for relay in t.relays:
        await net.manager.dial([relay.addresses[0]], expected=None, target="seed", seed=True)
    return net


async def meet(t: Town, kinds: tuple[str, str]) -> tuple[Net, Net, Peer]:
    a, b = await arrive(t, 1, kinds[0]), await arrive(t, 2, kinds[1])
    await until(lambda: b.access.relays.places and a.access.relays.places)

    async def learned() -> None:
        while not a.book.vouchers(b.peer_id):
            await ask(a)
            await trio.sleep(0.2)

    with trio.fail_after(20):
        await learned()
    return a, b, await a.connect(b.peer_id)


@pytest.mark.parametrize("kinds", list(itertools.combinations_with_replacement(KINDS, 2)))
async def test_section_23_12_the_path_of_each_pair_of_routers(kinds: tuple[str, str], autojump_clock: Clock) -> None:
    """NAT-3: behind a symmetric router the relay stays, and that is said."""
    async with town() as t:
        await t.relay()
        await t.relay()
        a, b, peer = await meet(t, kinds)
        assert peer.relayed
        if set(kinds) <= PUNCHABLE:
            took = await until(lambda: peer.path.kind is PathKind.PUNCHED)
            assert took <= 10
            back = b.peer(a.peer_id)
            assert back is not None and back.path.kind is PathKind.PUNCHED
        else:
            await until(lambda: "not tried" in b.access.punch.why(a.peer_id))
            await trio.sleep(20)
            assert peer.relayed and "another port" in b.access.punch.why(a.peer_id)
        assert await peer.call("echo", QUESTION, Want, deadline_s=5) == QUESTION
        assert a.peer(b.peer_id) is peer


@pytest.mark.parametrize("seed", range(20))
async def test_a_transfer_goes_on_while_its_circuit_gives_way_to_a_hole(seed: int, autojump_clock: Clock) -> None:
    async with town(seed) as t:
        await t.relay()
        a, b, peer = await meet(t, ("cone", "shift"))
        back = b.peer(a.peer_id)
        assert back is not None
        await send_all(t, peer, back, 40)
        await until(lambda: peer.path.kind is PathKind.PUNCHED)
        await send_all(t, peer, back, 4, name=b"y")
        # The circuit drains and goes.
        await until(lambda: not t.relays[0].gauges()["relay_circuits_bulk"], 60)
        assert peer.path.kind is PathKind.PUNCHED and len(peer.links) == 1


async def test_one_side_is_late(autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    async with town() as t:
        await t.relay()
        a, b = await arrive(t, 1, "cone"), await arrive(t, 2, "cone")
        slow = a.access.punch._meet

        async def late(*arguments: object) -> str:
            await trio.sleep(0.5)
            return await slow(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(a.access.punch, "_meet", late)
        await until(lambda: b.access.relays.places and a.access.relays.places)
        with trio.fail_after(20):
            while not a.book.vouchers(b.peer_id):
                await ask(a)
                await trio.sleep(0.2)
        peer = await a.connect(b.peer_id)
        assert await until(lambda: peer.path.kind is PathKind.PUNCHED) <= 10


async def test_nat_1_without_a_relay_both_are_told(autojump_clock: Clock) -> None:
    async with town() as t:
        seed = await t.relay(run=None)  # it introduces, but belongs to no run and so relays nothing in bulk
        del seed
        a = await arrive(t, 1, "symmetric")
        assert RUN
        await until(lambda: a.access.verdict.verdict in ("unreachable", "relayed"), 20)
        assert "4001" in a.access.verdict.reason


async def neighbours(t: Town) -> tuple[Net, Net]:
    """Two nodes behind one router that name their addresses in the house only: this router would also carry packets out and in again."""
    nat = Nat("cone", "9.5.0.1")
    a, b = [await t.open(t.net.host(f"192.168.1.{number}", link=LINE, nat=nat)) for number in (2, 3)]
    for net, host in ((a, "192.168.1.2"), (b, "192.168.1.3")):
        net.access.punch._named = partial(tuple, (f"/ip4/{host}/tcp/4001",))  # type: ignore[method-assign]
        for relay in t.relays:
            await net.manager.dial([relay.addresses[0]], expected=None, target="seed", seed=True)
    await until(lambda: b.access.relays.places and a.access.relays.places)
    with trio.fail_after(20):
        while not a.book.vouchers(b.peer_id):
            await ask(a)
            await trio.sleep(0.2)
    return a, b


async def test_two_nodes_behind_one_router_meet_within_the_house(autojump_clock: Clock) -> None:
    async with town() as t:
        await t.relay()
        await t.relay()
        a, b = await neighbours(t)
        peer = await a.connect(b.peer_id)
        assert peer.relayed
        assert await until(lambda: peer.path.kind is PathKind.PUNCHED) <= 10
        assert peer.primary is not None and peer.primary.pipe.info().remote[0].startswith("192.168.1.")


async def test_whoever_claims_to_live_behind_our_router_does_not_make_us_knock_in_the_house(autojump_clock: Clock) -> None:
    """It names our outside address, which we tell in every attempt, and a machine of our house.  The relay sees it elsewhere."""
    async with town() as t:
        await t.relay()
        await t.relay()
        a, b = await arrive(t, 1, "cone"), await arrive(t, 2, "cone")
        a.access.punch._named = lambda: ("/ip4/9.2.0.1/tcp/4001", "/ip4/192.168.1.77/tcp/22")  # type: ignore[method-assign]
        await until(lambda: b.access.relays.places and a.access.relays.places)
        with trio.fail_after(20):
            while not a.book.vouchers(b.peer_id):
                await ask(a)
                await trio.sleep(0.2)
        await a.connect(b.peer_id)
        await until(lambda: b.access.punch.why(a.peer_id) not in ("", "not tried yet"), 60)
        dialled = [entry[4][0] for entry in t.net.log if entry[1] == "dial"]
        assert "192.168.1.77" not in dialled and "9.2.0.1" in dialled


async def test_a_node_that_becomes_reachable_is_dialled_by_those_who_came_through_a_relay(autojump_clock: Clock) -> None:
    """Its places stay until nobody uses them: nobody is cut off, and the peer is the same all the time."""
    async with town() as t:
        await t.relay()
        await t.relay()
        a = await arrive(t, 1, "symmetric")
        b = await arrive(t, 2, "full")
        b.access.punch._named = a.access.punch._named = partial(tuple, ())  # type: ignore[method-assign]
        await until(lambda: len(b.access.relays.places) == 2)
        with trio.fail_after(20):
            while not a.book.vouchers(b.peer_id):
                await ask(a)
                await trio.sleep(0.2)
        peer = await a.connect(b.peer_id)
        back = b.peer(a.peer_id)
        assert peer.relayed and back is not None
        before = len(b.access.relays.places)
        found = Finding(Reach.PUBLIC, (Address("9.2.0.1", 4001),), (), False, "by decree")
        b.access.reach.known.finding = lambda candidates, now: found  # type: ignore[method-assign]
        b.access.reach._conclude()
        await send_all(t, peer, back, 8)
        await until(lambda: not peer.relayed, 60)
        assert not peer.closed and not back.closed and a.peer(b.peer_id) is peer and before == 2
        await until(lambda: not b.access.relays.places, 60)
        assert await peer.call("echo", QUESTION, Want, deadline_s=5) == QUESTION
        assert all(not relay.gauges()["relay_circuits_bulk"] for relay in t.relays)
