"""Tensors over a relay that gives circuits for signals only: they end with the relay's code, and do not go round and round."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import trio
import trio.testing

from tests.wire.sim.test_relay import Town, meet, town, until
from wire.errors import Code, WireError
from wire.net import Net, Peer
from wire.net.relay import RelayOffer
from wire.tensor import DType, Expectation

Clock = trio.testing.MockClock
KIB = 1024


async def pair(t: Town, circuit_bytes: int) -> tuple[Net, Net, Peer, Peer]:
    """Two that stay relayed; a circuit carries so much each way, at 64 KiB/s."""
    relay = await t.relay(relay=RelayOffer(bulk_rate=0))
    table = relay.access.relay._table
    table._limits = replace(table._limits, relay_signal_bytes=circuit_bytes)
    a, b, peer = await meet(t, ("symmetric", "symmetric"))
    back = b.peer(a.peer_id)
    assert back is not None and peer.relayed
    return a, b, peer, back


async def push(peer: Peer, back: Peer, size: int, name: bytes = b"x") -> None:
    """One tensor; raises what its sender, or its receiver, is told."""
    sender = peer.sender("t", name)
    receiver = back.receiver("t", name, lambda key: Expectation(DType.uint8, (size,), 0, size))
    data = random.Random(size).randbytes(size)
    told: list[WireError] = []

    async def receive() -> None:
        receiver.post(memoryview(bytearray(size)))
        try:
            received = await receiver.receive()
            assert bytes(received.buffer) == data
        except WireError as error:
            told.append(error)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        try:
            await sender.send((name.decode(), 0), memoryview(bytearray(data)), dtype=DType.uint8, shape=(size,))
        except WireError as error:
            told.append(error)
    if told:
        assert {error.code for error in told} == {told[0].code} and len(told) == 2, told
        raise told[-1]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("circuit", "size"), [(128 * KIB, 1_000_000), (1024 * KIB, 4_000_000)])
async def test_a_tensor_that_is_too_large_for_a_signal_circuit_ends_with_the_code_of_the_relay(
    circuit: int, size: int, seed: int, autojump_clock: Clock
) -> None:
    async with town(seed) as t:
        _, _, peer, back = await pair(t, circuit)
        began = trio.current_time()
        with trio.fail_after(120), pytest.raises(WireError) as caught:
            await push(peer, back, size)
        assert caught.value.code is Code.RELAY_LIMIT and "signal" in str(caught.value)
        assert trio.current_time() - began < 2 * circuit / (64 * KIB) + 5


async def test_a_lane_that_is_spent_ends_its_channels_and_not_the_control_connection(autojump_clock: Clock) -> None:
    """The peer is still there to be asked, and to be punched; what was bulky does not begin anew on the next lane."""
    async with town() as t:
        _, _, peer, back = await pair(t, 128 * KIB)
        await push(peer, back, 1000)
        await until(lambda: peer.stats.lanes == 1)
        with trio.fail_after(60), pytest.raises(WireError) as caught:
            await push(peer, back, 4_000_000, b"y")
        assert caught.value.code is Code.RELAY_LIMIT
        assert not peer.closed and peer.relayed and not back.closed
        await push(peer, back, 1000, b"z")


async def test_one_that_is_small_enough_arrives(autojump_clock: Clock) -> None:
    async with town() as t:
        _, _, peer, back = await pair(t, 1024 * KIB)
        with trio.fail_after(60):
            await push(peer, back, 500_000)
        assert await until(lambda: not peer.closed) == 0
