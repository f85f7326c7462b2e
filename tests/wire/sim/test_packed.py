"""Tensors of bf16 between production nets: packed on a slow line, exact whatever happens to it, plain on a fast one (wire 12)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
import trio
import trio.testing

from tests.wire.sim.rooms import member
from tests.wire.test_planes import gaussian
from wire.net import Net, PackingStats, Peer, TensorReceiver, TensorSender, network
from wire.sim import Host, Internet, Link, seed_tasks
from wire.tensor import BF16, PLAIN, DType, Expectation

Clock = trio.testing.MockClock
SIZE = 4 * (256 << 10) + 1000  # five chunks, the last short
SLOW, FAST = Link(0.01, 0.001, 30e6, 30e6), Link(0.0002, 0.0, 4e9, 4e9)
NOISE = memoryview(np.random.default_rng(1).bytes(SIZE))


class Pair:
    """A channel from `a` to `b`."""

    def __init__(self, net: Internet, hosts: tuple[Host, Host], a: Net, b: Net, peer: Peer, back: Peer, how: Expectation) -> None:
        self.net, self.hosts, self.a, self.b, self.peer = net, hosts, a, b, peer
        self.how = how
        self.sender: TensorSender = peer.sender("t", b"edge")
        self.receiver: TensorReceiver = back.receiver("t", b"edge", lambda key: how)
        self.got: dict[int, bytes] = {}

    async def receive(self, count: int) -> None:
        for _ in range(3):
            self.receiver.post(memoryview(bytearray(SIZE)))
        while len(self.got) < count:
            received = await self.receiver.receive()
            number = received.key[1]
            assert isinstance(number, int) and number not in self.got
            self.got[number] = bytes(received.buffer)
            self.receiver.post(memoryview(bytearray(SIZE)))

    async def send(self, number: int, data: memoryview) -> None:
        how = self.how
        await self.sender.send((0, number), data, dtype=how.dtype, shape=how.shape, codec=how.codec, order=number)

    async def exchange(self, tensors: list[memoryview]) -> float:
        """Seconds until all have arrived, as they were sent."""
        began = trio.current_time()
        with trio.fail_after(300):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.receive, len(tensors))
                for number, data in enumerate(tensors):
                    nursery.start_soon(self.send, number, data)
        assert [self.got[number] for number in range(len(tensors))] == tensors
        return trio.current_time() - began

    @property
    def stats(self) -> PackingStats:
        assert self.sender.packed == self.peer.stats.packed
        return self.sender.packed


@asynccontextmanager
async def pair(line: Link, dtype: DType = DType.bf16, codec: int = PLAIN) -> AsyncIterator[Pair]:
    seed_tasks(1)
    net = Internet(1)
    one, other = (net.host(name, link=line, congestion="cubic") for name in ("10.0.0.1", "10.0.0.2"))
    items = SIZE // (2 if codec == BF16 else dtype.itemsize)
    async with net.running(), member(one) as a, member(other) as b:
        b.serve_channel("t")
        peer = await a.dial(b.addresses[0])
        while (back := b.peer(a.peer_id)) is None:
            await trio.sleep(0.01)
        yield Pair(net, (one, other), a, b, peer, back, Expectation(dtype, (items,), codec, SIZE))


def tensors(count: int) -> list[memoryview]:
    return [gaussian(SIZE, seed) for seed in range(count)]


async def test_on_a_slow_line_fewer_bytes_travel_and_the_tensors_are_exact(autojump_clock: Clock) -> None:
    async with pair(SLOW) as p:
        took_s = await p.exchange(tensors(12))
        stats, out = p.stats, sum(p.peer.stats.class_out_bytes)
        assert stats.on and stats.raw_bytes == 12 * SIZE and stats.packed_chunks > 40
        assert stats.wire_bytes < stats.raw_bytes / 1.35
        assert stats.wire_bytes < out < 1.02 * stats.wire_bytes + 50_000, "what the connections count agrees"
    async with pair(SLOW, DType.uint8) as p:  # the control: the same bytes under a name that says nothing of their form
        plain_s = await p.exchange(tensors(12))
        assert p.stats == PackingStats(12 * SIZE, 12 * SIZE, 0, False)
    assert plain_s > 1.3 * took_s


async def test_what_a_codec_has_made_bf16_is_packed_as_well(autojump_clock: Clock) -> None:
    async with pair(SLOW, DType.fp32, BF16) as p:
        await p.exchange(tensors(4))
        assert p.stats.on and p.stats.wire_bytes < p.stats.raw_bytes / 1.2


async def test_on_a_fast_line_nothing_is_packed_but_a_probe(autojump_clock: Clock) -> None:
    async with pair(FAST) as p:
        await p.exchange(tensors(24))
        assert not p.stats.on and p.stats.packed_chunks <= 1


async def test_data_that_do_not_shrink_go_plain(autojump_clock: Clock) -> None:
    async with pair(SLOW) as p:
        await p.exchange([NOISE] * 4)
        assert not p.stats.on and p.stats.wire_bytes == p.stats.raw_bytes


async def test_a_receiver_that_does_not_list_the_feature_gets_plain_chunks(
    autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "FEATURES", ("other/1",))
    async with pair(SLOW) as p:
        await p.exchange(tensors(4))
        assert p.stats == PackingStats(4 * SIZE, 4 * SIZE, 0, False)


async def test_a_cut_in_mid_transfer_costs_no_tensor_and_no_bit(autojump_clock: Clock) -> None:
    async with pair(SLOW) as p:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(p.exchange, tensors(16))
            await trio.sleep(2)
            had = len(p.got)
            assert had < 16 and p.stats.on
            for pipe in list(p.hosts[0].connections.values()):
                p.net.reset(pipe)
            await trio.sleep(1)
            p.net.cut(p.hosts[0])
            await trio.sleep(10)
            assert len(p.got) < 16
            p.net.heal()
        assert p.stats.on and p.stats.wire_bytes < p.stats.raw_bytes / 1.3
        assert p.peer.stats.resent_chunks > 0 and p.peer.losses > 0


async def test_a_lane_that_falls_silent_leaves_packed_chunks_to_the_others(autojump_clock: Clock) -> None:
    async with pair(SLOW) as p:
        await trio.sleep(2)
        lanes = [link for link in p.peer.all_links if link.lane]
        assert len(lanes) == 2
        async with trio.open_nursery() as nursery:
            nursery.start_soon(p.exchange, tensors(30))
            await trio.sleep(2)
            p.net.half_open(lanes[0].pipe)  # type: ignore[arg-type]  # it is a pipe of this internet
        assert p.stats.packed_chunks > 40 and p.peer.losses == 0 and p.peer.stats.resent_chunks > 0


async def test_tensors_that_come_one_by_one_are_packed_as_well(autojump_clock: Clock) -> None:
    """The line is idle between them, and each begins with what its queue takes at once: that is not the line's speed."""
    async with pair(SLOW) as p:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(p.receive, 20)
            for number in range(20):
                await p.send(number, gaussian(SIZE, number))
                await trio.sleep(1)
        assert p.stats.on and p.stats.wire_bytes < p.stats.raw_bytes / 1.3
