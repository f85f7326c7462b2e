"""Tensor channels: slots, order, cancels, moves, losses.  In memory and in virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from tests.wire.net.worlds import World, held, member
from wire.errors import Code, ConnectionLost, LocalProtocolError, WireError
from wire.limits import DEFAULT_LIMITS
from wire.net import Dropped, Net, Peer, ReadyBytes, TensorReceiver, TensorSender
from wire.slots import ChunkReady
from wire.tensor import DType, Expectation

Clock = trio.testing.MockClock
COUNT = 200_000  # floats: 800,000 bytes, four chunks, the last one short
SIZE = COUNT * 4
EXPECTED = Expectation(DType.fp32, (COUNT,), 0, SIZE)


def tensor(seed: int) -> memoryview:
    return memoryview(np.random.default_rng(seed).standard_normal(COUNT).astype(np.float32)).cast("B")


def buffer(fill: int = 0) -> memoryview:
    return memoryview(bytearray([fill]) * SIZE)


async def send(sender: TensorSender, step: int, data: memoryview, **settings: object) -> None:
    await sender.send((0, step), data, dtype=DType.fp32, shape=(COUNT,), **settings)  # type: ignore[arg-type]


class Ends:
    """A sender at `a`, a receiver at `b`, and what they live in."""

    def __init__(self, world: World, a: Net, b: Net, peer: Peer, back: Peer) -> None:
        self.world, self.a, self.b, self.peer, self.back = world, a, b, peer, back
        self.sender = peer.sender("t", b"edge")
        self.receiver: TensorReceiver = back.receiver("t", b"edge", lambda key: EXPECTED)
        self.dropped: list[Dropped] = []
        self.receiver.on_dropped = self.dropped.append


@asynccontextmanager
async def ends(capacity: int = 1 << 20, **settings: Any) -> AsyncIterator[Ends]:
    world = World(capacity=capacity)
    async with member(world, "10.0.0.1", **settings) as a, member(world, "10.0.0.2", **settings) as b:
        b.serve_channel("t")
        peer = await a.dial(b.addresses[0])
        back = b.peer(a.peer_id)
        assert back is not None
        both = Ends(world, a, b, peer, back)
        yield both
        both.sender.close()
        both.receiver.close()
        await trio.sleep(1)
        assert held(a, b) == {} and both.receiver.posted == 0 and both.sender.pending == 0
    assert world.open_pipes() == 0


async def test_a_tensor_arrives_exactly_in_the_posted_buffer(autojump_clock: Clock) -> None:
    async with ends() as e:
        target = buffer()
        slot = e.receiver.post(target)
        chunks: list[ChunkReady] = []
        e.receiver.on_chunk = chunks.append
        await send(e.sender, 1, tensor(1), order=7, tags=(3,))
        got = await e.receiver.receive()
        assert (got.slot, got.key, got.begin.order, got.begin.tags) == (slot, (0, 1), 7, (3,))
        assert got.buffer == tensor(1) and got.buffer.obj is target.obj
        assert [(chunk.slot, chunk.index, chunk.start, chunk.end) for chunk in chunks] == [
            (slot, index, index * 262144, min((index + 1) * 262144, SIZE)) for index in range(4)
        ]


async def test_sending_waits_for_slots_and_the_oldest_goes_first(autojump_clock: Clock) -> None:
    async with ends() as e:
        changes: list[int] = []
        e.sender.on_slots = lambda: changes.append(e.sender.free_slots())
        async with trio.open_nursery() as nursery:
            for order in (5, 3, 9, 1):
                nursery.start_soon(lambda order=order: send(e.sender, order, tensor(order), order=order))
            await trio.sleep(1)
            assert e.sender.pending == 4 and not changes
            came = []
            for _ in range(4):
                e.receiver.post(buffer())
                came.append((await e.receiver.receive()).begin.order)
        assert came == [1, 3, 5, 9]
        assert changes and e.sender.free_slots() == 0
        e.receiver.post(buffer())
        await trio.sleep(1)
        assert e.sender.free_slots() == 1


async def test_a_keyed_slot_is_for_its_key_only(autojump_clock: Clock) -> None:
    async with ends() as e:
        e.receiver.post(buffer(), key=(0, 2))
        await trio.sleep(1)
        assert (e.sender.free_slots(), e.sender.free_slots((0, 2)), e.sender.free_slots((0, 1))) == (0, 1, 0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send, e.sender, 1, tensor(1))
            await send(e.sender, 2, tensor(2))
            assert (await e.receiver.receive()).key == (0, 2)
            e.receiver.post(buffer())
            assert (await e.receiver.receive()).key == (0, 1)


async def test_what_the_receiver_refuses_is_raised_and_the_slot_is_posted_again(autojump_clock: Clock) -> None:
    async with ends() as e:
        slot = e.receiver.post(buffer())
        with pytest.raises(WireError) as wrong:
            await e.sender.send((0, 1), tensor(1), dtype=DType.bf16, shape=(COUNT * 2,))
        assert wrong.value.code is Code.EXPECTATION
        await send(e.sender, 1, tensor(1))
        got = await e.receiver.receive()
        assert got.slot == slot and got.buffer == tensor(1)  # an unkeyed slot keeps its number
        e.receiver.post(buffer())
        with pytest.raises(WireError) as twice:
            await send(e.sender, 1, tensor(1))
        assert twice.value.code is Code.DUPLICATE
        e.b.delivered("t").raise_watermark(10)
        with pytest.raises(WireError) as stale:
            await send(e.sender, 9, tensor(1))
        assert stale.value.code is Code.STALE
        await send(e.sender, 10, tensor(3))
        assert (await e.receiver.receive()).buffer == tensor(3)


async def test_chunks_go_as_the_device_delivers_them(autojump_clock: Clock) -> None:
    async with ends() as e:
        target = buffer()
        e.receiver.post(target)
        chunks: list[int] = []
        e.receiver.on_chunk = lambda chunk: chunks.append(chunk.index)
        ready = ReadyBytes()
        data = tensor(4)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: send(e.sender, 1, data, ready=ready))
            seen = []
            for size in (0, 262143, 262144, 600_000, SIZE):
                ready.advance(size)
                await trio.sleep(1)
                seen.append(len(chunks))
        assert seen == [0, 0, 1, 2, 4]
        assert (await e.receiver.receive()).buffer == data
        with pytest.raises(LocalProtocolError):
            ready.advance(1)


async def test_a_cancelled_send_frees_the_channel_for_the_next(autojump_clock: Clock) -> None:
    """Before a slot: nothing was taken.  Afterwards: dropped at both ends, the buffer is posted again."""
    async with ends(capacity=10 << 10) as e:
        with trio.move_on_after(1):
            await send(e.sender, 1, tensor(1))
        assert e.sender.pending == 0
        e.receiver.post(buffer())
        await trio.sleep(1)
        with trio.move_on_after(0) as scope:
            scope.cancel()
            await send(e.sender, 2, tensor(2))
        assert e.sender.free_slots() == 1
        ready = ReadyBytes(300_000)
        with trio.move_on_after(1):
            await send(e.sender, 3, tensor(3), ready=ready)
        await trio.sleep(1)
        assert e.sender.pending == 0 and e.receiver.posted == 1 and not e.dropped
        await send(e.sender, 3, tensor(3))  # the same key: the cancelled one was never delivered
        assert (await e.receiver.receive()).buffer == tensor(3)


@pytest.mark.parametrize("closed", [False, True])
async def test_the_buffer_is_the_callers_at_once_after_a_cancel(closed: bool, autojump_clock: Clock) -> None:
    """A chunk is half sealed and the pipe full: its rest leaves later, and is what it was, whatever the buffer is used for."""
    async with ends(capacity=10 << 10, limits=replace(DEFAULT_LIMITS, lanes_max=0)) as e:
        target, source, data = buffer(), tensor(1), bytes(tensor(1))
        e.receiver.post(target)
        await trio.sleep(1)
        far, gate = e.world.pipes[0][1], trio.Event()
        receive_into = far.receive_into

        async def held_up(view: memoryview) -> int:
            await gate.wait()
            return await receive_into(view)

        far.receive_into = held_up  # type: ignore[method-assign, assignment]

        async def sending() -> None:
            with suppress(WireError):
                await send(e.sender, 1, source)

        started = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sending)
            await trio.sleep(0.5)
            if closed:
                e.sender.close()
            else:
                nursery.cancel_scope.cancel()
        assert trio.current_time() == started + 0.5
        source[:] = bytes([255]) * SIZE
        gate.set()
        await trio.sleep(1)
        assert target[:262_144] == data[:262_144] and target[262_144:] == bytes(SIZE - 262_144)
        assert not e.dropped and e.receiver.posted == 1


async def test_unposting_gives_the_buffer_back_once(autojump_clock: Clock) -> None:
    async with ends() as e:
        target = buffer()
        slot = e.receiver.post(target)
        assert e.receiver.unpost(slot) and not e.receiver.unpost(slot)
        assert [(drop.slot, drop.code) for drop in e.dropped] == [(slot, Code.CANCELLED)]
        assert e.dropped[0].buffer.obj is target.obj
        await trio.sleep(1)
        assert e.sender.free_slots() == 0
        later = e.receiver.post(target)
        assert later != slot
        await send(e.sender, 1, tensor(1))
        assert (await e.receiver.receive()).slot == later


async def test_a_withdrawal_that_crosses_a_begin_makes_the_sender_try_again(autojump_clock: Clock) -> None:
    async with ends() as e:
        slot = e.receiver.post(buffer())
        await trio.sleep(1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send, e.sender, 1, tensor(1))
            await trio.testing.wait_all_tasks_blocked(0)
            e.receiver.unpost(slot)
            await trio.sleep(1)
            if e.sender.pending:
                e.receiver.post(buffer())
        assert (await e.receiver.receive()).buffer == tensor(1)


async def test_the_sender_may_come_first_and_even_before_the_protocol_is_known(autojump_clock: Clock) -> None:
    world = World()
    async with member(world, "10.0.0.1") as a, member(world, "10.0.0.2") as b:
        peer = await a.dial(b.addresses[0])
        sender = peer.sender("late", b"x")
        assert peer.sender("late", b"x") is sender
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send, sender, 1, tensor(1))
            await trio.sleep(20)
            back = b.peer(a.peer_id)
            assert back is not None
            receiver = back.receiver("late", b"x", lambda key: EXPECTED)
            with pytest.raises(LocalProtocolError):
                back.receiver("late", b"x", lambda key: EXPECTED)
            receiver.post(buffer())
            with trio.fail_after(5):
                assert (await receiver.receive()).buffer == tensor(1)
        sender.close()
        receiver.close()
        await trio.sleep(1)
        assert held(a, b) == {}


async def test_channels_that_nobody_claims_are_announced_and_held(autojump_clock: Clock) -> None:
    world = World()
    heard: list[bytes] = []
    async with member(world, "10.0.0.1") as a, member(world, "10.0.0.2") as b:

        async def announce(peer: Peer, name: bytes) -> None:
            heard.append(name)
            receiver = peer.receiver("t", name, lambda key: EXPECTED)
            receiver.post(buffer())
            await receiver.receive()
            receiver.close()

        b.serve_channel("t", announce)
        peer = await a.dial(b.addresses[0])
        for name in (b"one", b"two"):
            sender = peer.sender("t", name)
            await send(sender, len(heard), tensor(1))
            sender.close()
        await trio.sleep(1)
        assert heard == [b"one", b"two"] and held(a, b) == {}


async def test_a_channel_given_up_before_anybody_claims_it_leaves_nothing(autojump_clock: Clock) -> None:
    world = World()
    async with member(world, "10.0.0.1") as a, member(world, "10.0.0.2") as b:
        b.serve_channel("t")
        peer = await a.dial(b.addresses[0])
        for number in range(200):  # more than the backlog of unaccepted streams
            sender = peer.sender("t", str(number).encode())
            await trio.sleep(0.1)
            sender.close()
        await trio.sleep(1)
        assert held(a, b) == {} and not b.peers()[0]._channels.waiting


async def test_a_lost_connection_ends_both_sides_with_the_cause(autojump_clock: Clock) -> None:
    world = World()
    async with member(world, "10.0.0.1") as a, member(world, "10.0.0.2") as b:
        b.serve_channel("t")
        peer = await a.dial(b.addresses[0])
        back = b.peer(a.peer_id)
        assert back is not None
        e = Ends(world, a, b, peer, back)
        outcome: list[WireError] = []

        async def sending(step: int) -> None:
            try:
                await send(e.sender, step, tensor(step), ready=ReadyBytes(300_000))
            except WireError as error:
                outcome.append(error)

        async with trio.open_nursery() as nursery:
            slots = [e.receiver.post(buffer()), e.receiver.post(buffer())]
            for step in (1, 2, 3):
                nursery.start_soon(sending, step)  # two are under way, one waits
            await trio.sleep(1)
            listeners = dict(world.listeners)
            world.listeners.clear()  # both processes are gone: nobody answers when the other dials again
            for near, far in world.pipes:
                near.abort()
                far.abort()
            with pytest.raises(ConnectionLost):
                await e.receiver.receive()
        assert len(outcome) == 3 and all(isinstance(error, ConnectionLost) for error in outcome)
        assert sorted(drop.slot for drop in e.dropped) == slots
        with pytest.raises(ConnectionLost):
            await send(e.sender, 4, tensor(4))
        with pytest.raises(ConnectionLost):
            e.receiver.post(buffer())
        assert e.receiver.posted == e.sender.pending == 0
        await trio.sleep(1)
        world.listeners.update(listeners)
        again = await a.dial(b.addresses[0])
        assert again is not peer
        sender, newer = again.sender("t", b"edge"), b.peers()[0].receiver("t", b"edge", lambda key: EXPECTED)
        newer.post(buffer())
        await send(sender, 1, tensor(1))  # never delivered before
        assert (await newer.receive()).buffer == tensor(1)


@pytest.mark.parametrize("_try", range(4))  # either end may have the lower id
async def test_a_channel_moves_when_another_connection_takes_over(_try: int, autojump_clock: Clock) -> None:
    """FIND-14: nothing handed to the loser is lost: a tensor under way, waiting ones and free slots move."""
    async with ends() as e:
        data = {step: tensor(step) for step in range(6)}
        for _ in range(3):
            e.receiver.post(buffer())
        await trio.sleep(1)
        got: dict[int, bytes] = {}

        async def receiving() -> None:
            while len(got) < 6:
                tensor_ = await e.receiver.receive()
                got[tensor_.key[1]] = bytes(tensor_.buffer)  # type: ignore[index]
                e.receiver.post(buffer())

        async with trio.open_nursery() as nursery:
            ready = ReadyBytes(300_000)
            nursery.start_soon(lambda: send(e.sender, 0, data[0], ready=ready))
            nursery.start_soon(receiving)
            await trio.sleep(1)
            # The lower id dials again: its newer connection wins over the one that exists.
            low, high = (e.a, e.b) if e.a.peer_id < e.b.peer_id else (e.b, e.a)
            await low.dial(high.addresses[0])
            await trio.sleep(1)
            for step in range(1, 6):
                await send(e.sender, step, data[step])
            ready.advance(SIZE)
        assert {step: bytes(value) for step, value in data.items()} == got
        await trio.sleep(1)
        assert len(e.peer.links) == len(e.back.links) == 1


async def test_receive_has_one_task_and_a_cancel_loses_nothing(autojump_clock: Clock) -> None:
    async with ends() as e:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(e.receiver.receive)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(trio.BusyResourceError):
                await e.receiver.receive()
            nursery.cancel_scope.cancel()
        e.receiver.post(buffer())
        await send(e.sender, 1, tensor(1))
        with trio.move_on_after(0):
            await e.receiver.receive()
        assert (await e.receiver.receive()).buffer == tensor(1)


async def test_unfit_buffers_are_our_mistake(autojump_clock: Clock) -> None:
    async with ends() as e:
        with pytest.raises(LocalProtocolError):
            e.receiver.post(memoryview(b"read only"))
        with pytest.raises(LocalProtocolError):
            e.receiver.post(memoryview(bytearray(100))[::2])
        e.receiver.post(buffer())
        with pytest.raises((LocalProtocolError, TypeError)):
            await send(e.sender, 1, memoryview(bytearray(100))[::2])
        assert e.sender.pending == 0


async def test_seventy_posts_are_offered_as_slots_become_free(autojump_clock: Clock) -> None:
    """More buffers than a channel may have open at once wait their turn."""
    async with ends() as e:
        small = Expectation(DType.uint8, (8,), 0, 8)
        e.receiver.expect = lambda key: small
        receiver = e.back.receiver("t", b"small", lambda key: small)
        sender = e.peer.sender("t", b"small")
        for _ in range(70):
            receiver.post(memoryview(bytearray(8)))
        await trio.sleep(1)
        assert sender.free_slots() == 64
        for step in range(70):
            await sender.send((0, step), memoryview(bytes([step] * 8)), dtype=DType.uint8, shape=(8,))
            assert bytes((await receiver.receive()).buffer) == bytes([step] * 8)
        sender.close()
        receiver.close()


async def test_a_tensor_goes_on_where_it_was_after_every_connection_was_cut(autojump_clock: Clock) -> None:
    """Cut in mid-tensor, again and again: each key arrives once and whole, and the sender notices nothing."""
    async with ends(capacity=64 << 10) as e:
        data = {step: tensor(step) for step in range(6)}
        got: list[tuple[int, bytes]] = []

        async def receiving() -> None:
            e.receiver.post(buffer())
            while len(got) < len(data):
                received = await e.receiver.receive()
                got.append((received.key[1], bytes(received.buffer)))  # type: ignore[arg-type]
                if len(got) < len(data):
                    e.receiver.post(buffer())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(receiving)
            for step, value in data.items():
                ready = ReadyBytes(300_000)
                nursery.start_soon(partial(send, e.sender, step, value, ready=ready))
                await trio.sleep(1)
                for near, far in list(e.world.pipes):
                    if not near._closed:
                        near.abort()
                        far.abort()
                await trio.sleep(1)
                ready.advance(SIZE)
                await trio.sleep(1)
        assert sorted(got) == [(step, bytes(value)) for step, value in data.items()]
        assert e.peer is e.a.peers()[0] and e.peer.losses >= len(data)
        assert e.sender.channel.resent_chunks <= 2 * len(data)


async def test_lanes_come_with_the_first_channel_and_carry_its_chunks(autojump_clock: Clock) -> None:
    async with ends() as e:
        await trio.sleep(2)
        assert e.peer.stats.lanes == e.back.stats.lanes == DEFAULT_LIMITS.lanes_start
        control = sum(link.bytes_out for link in e.peer.links)
        for step in range(4):
            e.receiver.post(buffer())
            await send(e.sender, step, tensor(step))
            await e.receiver.receive()
        assert sum(link.bytes_out for link in e.peer.links) - control < SIZE  # Begins and pings
        assert sum(e.peer.stats.class_out_bytes) > 4 * SIZE


async def test_a_lane_that_is_cut_costs_no_tensor(autojump_clock: Clock) -> None:
    async with ends(capacity=64 << 10) as e:
        await trio.sleep(2)
        for step in range(6):
            e.receiver.post(buffer())
            ready = ReadyBytes(300_000)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(send, e.sender, step, tensor(step), ready=ready))
                await trio.sleep(0.5)
                lanes = [link for link in e.peer.all_links if link.lane]
                if lanes:
                    lanes[step % len(lanes)].pipe.abort()
                await trio.sleep(0.5)
                ready.advance(SIZE)
            assert (await e.receiver.receive()).buffer == tensor(step)
        assert len(e.peer.links) == 1 and e.peer.losses == 0


async def test_a_channel_is_closed_though_its_lanes_fail_at_that_moment(autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(views: object) -> int:
        raise trio.BrokenResourceError

    async with ends() as e:
        await trio.sleep(2)
        e.receiver.post(buffer())
        await send(e.sender, 0, tensor(0))
        await e.receiver.receive()
        lanes = [link for link in e.peer.all_links if link.lane]
        assert len(lanes) > 1
        for lane in lanes:
            monkeypatch.setattr(lane.pipe, "send_now", broken)
        e.sender.close()
        assert all(lane.error is not None for lane in lanes), "they have failed within it"
