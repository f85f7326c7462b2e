"""Relays are not chained, whichever end of a circuit tries: bytes would circle, and one sent byte would cost several lines."""

from __future__ import annotations

import pytest
import trio.testing

from tests.wire.sim.test_relay import meet, town
from wire.errors import Code, StreamReset, WireError
from wire.identity import PeerId
from wire.messages import decode, encode
from wire.net import ByteStream, Kind, MessageStream, Net, Peer
from wire.net.circuits import OPEN, OPENED
from wire.net.relay import PROTOCOL
from wire.relaymessages import CircuitAsk, CircuitIn, Purpose, RelayClass, Reserve, Reserved

Clock = trio.testing.MockClock
REFUSALS = Code.NO_RESERVATION, Code.PEER_MISMATCH, Code.PROTOCOL, Code.SELF


async def reserve(peer: Peer) -> Code:
    async with await peer.open(PROTOCOL) as stream:
        assert isinstance(stream, MessageStream)
        await stream.send(encode(Reserve(RelayClass.SIGNAL)))
        return Code(decode(await stream.receive(), Reserved).code)


async def refused(peer: Peer, protocol: str, meta: bytes) -> Code:
    async with await peer.open(protocol, Kind.BYTE, meta=meta) as stream:
        assert isinstance(stream, ByteStream)
        with pytest.raises(WireError) as caught:
            await stream.send_all(b"PLW1")
            while await stream.receive_some():
                pass
    assert isinstance(caught.value, StreamReset)
    return caught.value.code


def ask(net: Net, relay: PeerId, target: PeerId) -> bytes:
    """What opens a circuit there, as long as nothing else speaks against it."""
    vouchers = net.book.vouchers(target)
    return encode(CircuitAsk(target.raw, RelayClass.SIGNAL, Purpose.CONTROL, vouchers[0] if vouchers else b""))


def stay(a: Net, b: Net) -> None:
    for net in (a, b):
        net.access.punch._peers = lambda: ()


@pytest.mark.parametrize("beside", [False, True])
async def test_no_place_over_a_circuit_even_if_a_direct_connection_stands_beside(
    beside: bool, autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with town() as t:
        relay = await t.relay()
        a, b, peer = await meet(t, ("symmetric", "symmetric"))
        stay(a, b)
        if beside:  # what would be said next goes directly; the stream came through the relay
            monkeypatch.setattr(Peer, "relayed", property(lambda self: False))
        assert await reserve(peer) is Code.PROTOCOL
        assert not b.gauges()["relay_reservations"] and relay.gauges()["relay_reservations"] == 2


async def test_a_circuit_to_the_relay_itself_to_another_relay_and_to_oneself(autojump_clock: Clock) -> None:
    async with town() as t:
        first, second = await t.relay(), await t.relay()
        await first.dial(second.addresses[0])
        a, b, _ = await meet(t, ("symmetric", "symmetric"))
        stay(a, b)
        at_first = a.peer(first.peer_id)
        assert at_first is not None
        before = first.gauges()
        for target in (first.peer_id, second.peer_id, a.peer_id):
            # With the voucher of somebody else, with none, and with one of another relay.
            for voucher in (*b.access.standing.vouchers, b"", *a.access.standing.vouchers):
                meta = encode(CircuitAsk(target.raw, RelayClass.SIGNAL, Purpose.CONTROL, voucher))
                assert await refused(at_first, OPEN, meta) in REFUSALS
        assert first.gauges() == before and not first.counts["internal-error"]


async def test_a_target_that_is_itself_reached_through_a_relay_is_none(autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reserved directly; now the way to it is a circuit.  The same ask is granted while it is not."""
    async with town() as t:
        relay = await t.relay()
        a, b, _ = await meet(t, ("symmetric", "symmetric"))
        stay(a, b)
        at_relay, target = a.peer(relay.peer_id), relay.peer(b.peer_id)
        assert at_relay is not None and target is not None
        meta = ask(a, relay.peer_id, b.peer_id)
        monkeypatch.setattr(Peer, "relayed", property(lambda self: self is target))
        assert await refused(at_relay, OPEN, meta) is Code.PROTOCOL
        monkeypatch.undo()
        before = relay.gauges()["relay_circuits_signal"]
        async with await at_relay.open(OPEN, Kind.BYTE, meta=meta):
            await trio.sleep(1)
            assert relay.gauges()["relay_circuits_signal"] == before + 1


async def test_a_circuit_by_somebody_who_is_no_relay_of_ours(autojump_clock: Clock) -> None:
    async with town() as t:
        relay = await t.relay()
        a, b, peer = await meet(t, ("symmetric", "symmetric"))
        stay(a, b)
        meta = encode(CircuitIn(relay.peer_id.raw, RelayClass.SIGNAL, Purpose.CONTROL))
        assert await refused(peer, OPENED, meta) is Code.REFUSED
        back = relay.peer(a.peer_id)
        assert back is not None
        for bad in (b"", encode(CircuitIn(bytes(32), 1, 0))):
            assert await refused(back, OPENED, bad) is Code.PROTOCOL
        assert not a.access.circuits._seen and not a.counts["internal-error"] + b.counts["internal-error"]
