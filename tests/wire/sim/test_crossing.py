"""Calls that cross the goodbye of a connection which a better one replaces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import trio
import trio.testing

from tests.wire.sim.test_punch import meet
from tests.wire.sim.test_relay import LINE, QUESTION, Town, send_all, town, until
from wire.errors import ConnectionLost, WireError
from wire.messages import Want
from wire.net import Net, Peer
from wire.net.link import Link
from wire.net.manager import Manager
from wire.path import PathKind

Clock = trio.testing.MockClock


async def far_relay(t: Town) -> None:
    """One through which the way is so long that a goodbye, though said a round trip later, is there before what crosses it."""
    await t.relay()
    t.relay_hosts[0].link = replace(LINE, delay_s=0.1)


def at_the_hole(
    monkeypatch: pytest.MonkeyPatch, nets: tuple[Net, Net], act: Callable[[Net, Peer, Link], None], *, late_s: float = 0.001
) -> None:
    """Call `act(net, its peer, the circuit)` just before a hole replaces the circuit, at the end that did not dial through the hole."""
    honest = Manager.adopt

    async def adopt(manager: Manager, link: Link) -> Peer:
        net = next((net for net in nets if net.manager is manager), None)
        peer = None if net is None else net.peer(link.peer_id)
        if net is not None and peer is not None and peer.relayed and link.relay is None and not link.initiator:
            circuit = peer.primary
            assert circuit is not None
            act(net, peer, circuit)
            await trio.sleep(late_s)
        return await honest(manager, link)

    monkeypatch.setattr(Manager, "adopt", adopt)


@pytest.mark.parametrize("seed", range(20))
async def test_the_circuit_stays_until_both_ends_have_the_hole(seed: int, autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last packet of a handshake is lost, so one end has the new connection half a second after the other: what is asked and sent
    meanwhile goes over the circuit."""
    async with town(seed) as t:
        await t.relay()
        a, b, peer = await meet(t, ("cone", "cone"))
        back = b.peer(a.peer_id)
        assert back is not None
        answers: list[Want | WireError] = []
        async with trio.open_nursery() as nursery:

            async def call(at: Peer) -> None:
                for _ in range(10):
                    try:
                        answers.append(await at.call("echo", QUESTION, Want, deadline_s=5))
                    except WireError as error:
                        answers.append(error)
                    await trio.sleep(0.04)

            async def send(at: Peer) -> None:
                await trio.sleep(0.2)
                await send_all(t, at, back if at is peer else peer, 3)

            def act(net: Net, at: Peer, circuit: Link) -> None:
                nursery.start_soon(call, at)
                nursery.start_soon(send, at)

            at_the_hole(monkeypatch, (a, b), act, late_s=0.5)
            await until(lambda: peer.path.kind is PathKind.PUNCHED and back.path.kind is PathKind.PUNCHED)
        assert answers == [QUESTION] * 10
        await until(lambda: len(peer.links) == len(back.links) == 1, 40)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("broken", [False, True])
async def test_a_call_that_the_peer_never_looked_at_is_asked_again_over_the_hole(
    broken: bool, seed: int, autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the circuit breaks instead, nobody knows what the peer has done: the caller is told, as of any loss."""
    async with town(seed) as t:
        await far_relay(t)
        a, b, peer = await meet(t, ("cone", "cone"))
        asked: list[Want] = []
        answers: list[Want | WireError] = []

        async def count(peer: Peer, want: Want) -> Want:
            asked.append(want)
            return want

        for net in (a, b):
            net.serve_calls("count", Want, count)
        async with trio.open_nursery() as nursery:

            async def call(at: Peer, circuit: Link) -> None:
                if broken:
                    nursery.start_soon(end, circuit)
                try:
                    answers.append(await at.call("count", QUESTION, Want, deadline_s=5))
                except WireError as error:
                    answers.append(error)

            async def end(circuit: Link) -> None:
                await trio.sleep(0.01)
                circuit.fail(ConnectionLost("the relay is gone"))

            at_the_hole(monkeypatch, (a, b), lambda net, at, circuit: nursery.start_soon(call, at, circuit))
            await until(lambda: answers)
        if broken:
            assert isinstance(answers[0], ConnectionLost)
        else:
            assert answers == [QUESTION] and asked == [QUESTION], "once, and done once"
        await until(lambda: peer.path.kind is PathKind.PUNCHED, 5)
        assert not peer.closed
