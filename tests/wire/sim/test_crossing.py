"""Calls that cross the goodbye of a connection which a better one replaces."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio
import trio.testing

from tests.wire.sim.test_punch import meet
from tests.wire.sim.test_relay import QUESTION, town, until
from wire.errors import ConnectionLost, WireError
from wire.messages import Want
from wire.net import Net, Peer
from wire.net.link import Link
from wire.net.manager import Manager
from wire.path import PathKind

Clock = trio.testing.MockClock


def at_the_hole(monkeypatch: pytest.MonkeyPatch, nets: tuple[Net, Net], act: Callable[[Net, Peer, Link], None]) -> None:
    """Call `act(net, its peer, the circuit)` a millisecond before a hole replaces the circuit, at the end that did not dial through the
    hole.  The other end hears of the hole, and says goodbye on the circuit, before what is opened there has come the longer way."""
    honest = Manager.adopt

    async def adopt(manager: Manager, link: Link) -> Peer:
        net = next((net for net in nets if net.manager is manager), None)
        peer = None if net is None else net.peer(link.peer_id)
        if net is not None and peer is not None and peer.relayed and link.relay is None and not link.initiator:
            circuit = peer.primary
            assert circuit is not None
            act(net, peer, circuit)
            await trio.sleep(0.001)
        return await honest(manager, link)

    monkeypatch.setattr(Manager, "adopt", adopt)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("broken", [False, True])
async def test_a_call_that_the_peer_never_looked_at_is_asked_again_over_the_hole(
    broken: bool, seed: int, autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the circuit breaks instead, nobody knows what the peer has done: the caller is told, as of any loss."""
    async with town(seed) as t:
        await t.relay()
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
        assert peer.path.kind is PathKind.PUNCHED and not peer.closed
