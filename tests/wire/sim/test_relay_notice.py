"""A relay that is told to stop says so first: its clients go round it, and what is under way goes on."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing

from tests.wire.sim.test_relay import Town, meet, town, until
from wire.net import Net, Peer
from wire.net.relay import RelayOffer
from wire.tensor import DType, Expectation

Clock = trio.testing.MockClock
SIZE = 16_000  # small, so that whole tensors show when bytes come
COUNT = 1250  # 20 MB
EXPECTED = Expectation(DType.uint8, (SIZE,), 0, SIZE)
RATE = RelayOffer(bulk_rate=5_000_000)
RTT_S = 8 * 0.01  # house to relay to house, and back: each line is crossed four times


class Flow:
    """20 MB from one house to the other; `at` is when each tensor was whole."""

    def __init__(self, peer: Peer, back: Peer) -> None:
        self.peer, self.back = peer, back
        self.at: list[float] = []

    async def run(self) -> None:
        sender, receiver = self.peer.sender("t", b"x"), self.back.receiver("t", b"x", lambda key: EXPECTED)
        data = [random.Random(n).randbytes(SIZE) for n in range(COUNT)]
        got: dict[int, bytes] = {}

        async def send(number: int) -> None:
            await sender.send(("x", number), memoryview(bytearray(data[number])), dtype=DType.uint8, shape=(SIZE,), order=number)

        async with trio.open_nursery() as nursery:
            for number in range(COUNT):
                nursery.start_soon(send, number)
            for _ in range(16):
                receiver.post(memoryview(bytearray(SIZE)))
            while len(got) < COUNT:
                received = await receiver.receive()
                number = received.key[1]
                assert isinstance(number, int) and number not in got
                got[number] = bytes(received.buffer)
                self.at.append(trio.current_time())
                receiver.post(memoryview(bytearray(SIZE)))
        assert [got[n] for n in range(COUNT)] == data

    def gap_s(self, since: float, until: float = 1e9) -> float:
        """The longest time after `since` in which nothing came."""
        times = [since, *(at for at in self.at if since < at < until)]
        return max(later - earlier for earlier, later in zip(times, times[1:], strict=False))


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


async def between(town: Town, act: Callable[[Net], Awaitable[None]], *, relays: int = 2) -> tuple[Flow, Net, Net, float]:
    """Transfer, with `act(relay in use)` after a third of it; gives the flow, the houses, and when that was."""
    for _ in range(relays):
        await town.relay(relay=RATE)
    a, b, peer = await meet(town, ("symmetric", "symmetric"))
    await until(lambda: len(a.access.relays.places) == len(b.access.relays.places) == min(2, relays))
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
            await until(lambda: len(flow.at) >= COUNT // 3)
            when.append(trio.current_time())
            nursery.start_soon(act, relay_of(town, peer))
    return flow, a, b, when[0]


@pytest.mark.parametrize("seed", range(5))
async def test_a_transfer_goes_on_through_the_other_relay(seed: int, autojump_clock: Clock) -> None:
    async with town(seed) as t:
        took: list[float] = []

        async def act(relay: Net) -> None:
            took.append(await stop(relay))

        flow, a, b, when = await between(t, act)
        print(f"gap {flow.gap_s(when):.3f} s, before {flow.gap_s(flow.at[20], when):.3f}; relay gone after {took}")
        assert flow.gap_s(when) < 4 * RTT_S
        assert took and took[0] < 2.0
