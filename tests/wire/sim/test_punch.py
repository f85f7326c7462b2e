"""Which pairs of routers can be punched: every row of the table ends on the path that it must, and says why (section 23, item 12)."""

from __future__ import annotations

import itertools

import pytest
import trio
import trio.testing

from tests.wire.net.worlds import RUN
from tests.wire.sim.test_relay import QUESTION, Town, ask, send_all, town, until
from wire.messages import Want
from wire.net import Net, Peer
from wire.path import PathKind

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
