"""A relay whose every guest but two is one stranger with a /24: the two find a place there and each other."""

from __future__ import annotations

import trio.testing

from tests.wire.sim.test_relay import LINE, QUESTION, meet, town, until
from wire.limits import DEFAULT_LIMITS
from wire.messages import Want, encode
from wire.net import MessageStream, Peer
from wire.net.relay import PROTOCOL, RelayOffer
from wire.relaymessages import RelayClass, Reserve

Clock = trio.testing.MockClock
SYBILS = 12


async def test_sybils_of_one_network_leave_room_for_others(autojump_clock: Clock) -> None:
    async with town() as t:
        relay = await t.relay(relay=RelayOffer(bulk_rate=10_000_000))
        offer = RelayOffer(signal=False)
        mine = [await t.open(t.net.host(f"7.7.7.{number}", link=LINE), relay=offer) for number in range(1, SYBILS + 1)]
        for sybil in mine:
            sybil.access.relays._wanted = lambda: True
            await sybil.dial(relay.addresses[0])
        await until(lambda: relay.gauges()["relay_reservations"] == DEFAULT_LIMITS.relay_reservations_per_network)

        async def nag(peer: Peer) -> None:
            """Ask for places as fast as answers come."""
            async with await peer.open(PROTOCOL) as stream:
                assert isinstance(stream, MessageStream)
                for _ in range(50):
                    await stream.send(encode(Reserve(RelayClass.BULK)))
                    await stream.receive()

        async with trio.open_nursery() as nursery:
            for sybil in mine[8:]:
                at_relay = sybil.peer(relay.peer_id)
                assert at_relay is not None
                nursery.start_soon(nag, at_relay)
        a, b, peer = await meet(t, ("symmetric", "symmetric"))
        assert peer.relayed and await peer.call("echo", QUESTION, Want, deadline_s=5) == QUESTION
        gauges = relay.gauges()
        assert gauges["relay_reservations"] == DEFAULT_LIMITS.relay_reservations_per_network + 2 and gauges["relay_networks"] == 3
        assert relay.counts["relay-rate"] > 100 and relay.counts["relay-network"] >= SYBILS - 8
        assert not any(net.counts["internal-error"] for net in (a, b, relay))
