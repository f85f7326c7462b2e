"""Every public coroutine, cancelled at every moment of its life, one after the other.

The harness runs an operation and cancels it just before the n-th time that trio resumes *any* task (its own, those that it
started, the readers and writers at both ends); for n = 1, 2, ... until the operation gets through.  After each try, whatever the
operation held must be back: gauges, tasks, pipes, descriptors, slots.  And the next, uncancelled one must work.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import numpy as np
import pytest
import trio
import trio.testing

from tests.wire.net.worlds import RUN, World, descriptors, held, local, member
from wire.address import Address, Scope
from wire.errors import WireError
from wire.identity import Identity
from wire.messages import Want
from wire.net import ByteStream, Kind, MessageStream, Net, Peer, open_net
from wire.net.transport import TcpTransport
from wire.tensor import DType, Expectation

Clock = trio.testing.MockClock
Operation = Callable[[], Awaitable[object]]
# An operation that has not come through after so many steps loops for ever.
MOST = 1000


class CancelAt(trio.abc.Instrument):
    """Cancels `scope` before the n-th step of any task."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.steps = 0
        self.scope = trio.CancelScope()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.steps += 1
        if self.steps == self.n:
            self.scope.cancel()


async def run_cancelled(operation: Operation, n: int) -> bool:
    """Whether the operation was cut short by a cancel at the n-th step."""
    instrument = CancelAt(n)

    async def task() -> None:
        with instrument.scope:
            await operation()

    trio.lowlevel.add_instrument(instrument)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(task)
    finally:
        trio.lowlevel.remove_instrument(instrument)
    return instrument.scope.cancelled_caught


async def cancel_everywhere(operation: Operation, check: Operation) -> int:
    """Cancel at every step; `check` after each.  Returns how many there were."""
    through = 0
    for n in range(1, MOST):
        cancelled = await run_cancelled(operation, n)
        await check()
        through = 0 if cancelled else through + 1
        if through == 3:  # steps of other tasks may end an operation early now and then
            return n
    raise AssertionError(f"more than {MOST} steps")


@asynccontextmanager
async def meeting(capacity: int = 1 << 20) -> AsyncIterator[tuple[World, Net, Net, Peer]]:
    world = World(capacity=capacity)
    async with member(world, "10.0.0.1") as a, member(world, "10.0.0.2") as b:
        b.serve_calls("echo", Want, _echo_call)
        b.serve("streams", _echo)
        b.serve_channel("t")
        yield world, a, b, await a.dial(b.addresses[0])


async def _echo_call(peer: Peer, want: Want) -> Want:
    return want


async def _echo(peer: Peer, stream: MessageStream | ByteStream) -> None:
    if isinstance(stream, MessageStream):
        async for message in stream:
            await stream.send(message)
    else:
        while data := await stream.receive_some():
            await stream.send_all(data)


def idle(a: Net, b: Net) -> Operation:
    async def check() -> None:
        await trio.sleep(2)
        assert held(a, b) == {}

    return check


async def test_the_harness_finds_a_leak(autojump_clock: Clock) -> None:
    """The negative control: an operation that forgets to give back is caught, one that does is not."""
    held_back: list[int] = []

    async def leaky() -> None:
        held_back.append(1)
        await trio.sleep(1)
        await trio.sleep(1)
        held_back.pop()

    async def check() -> None:
        assert not held_back

    with pytest.raises(AssertionError):
        await cancel_everywhere(leaky, check)

    held_back.clear()

    async def tidy() -> None:
        held_back.append(1)
        try:
            await trio.sleep(1)
            await trio.sleep(1)
        finally:
            held_back.pop()

    assert await cancel_everywhere(tidy, check) >= 3


async def test_dial(autojump_clock: Clock) -> None:
    """Connect and, at the other end, accept: no pipe, no peer, no half-open handshake stays."""
    world = World()
    async with member(world, "10.0.0.1") as a, member(world, "10.0.0.2") as b:

        async def dial() -> None:
            await a.dial(b.addresses[0])

        async def check() -> None:
            for peer in a.peers():
                peer.fail(WireError("the test ends it"))
            await trio.sleep(15)  # longer than the handshake's deadline
            assert not a.peers() and not b.peers() and world.open_pipes() == 0
            assert not a.manager._dialling

        assert await cancel_everywhere(dial, check) > 10
        assert (await a.dial(b.addresses[0])).peer_id == b.peer_id


async def test_connect(autojump_clock: Clock) -> None:
    world = World()
    async with member(world, "10.0.0.1") as a, member(world, "10.0.0.2") as b:
        await a.dial(b.addresses[0])

        async def check() -> None:
            await trio.sleep(15)  # a shared dial that was through when nobody waited any more has made a connection
            for peer in a.peers():
                peer.fail(WireError("the test ends it"))
            await trio.sleep(15)
            assert not a.peers() and not b.peers() and world.open_pipes() == 0 and not a.manager._dialling

        await check()
        await cancel_everywhere(lambda: a.connect(b.peer_id), check)


async def test_dial_on_sockets() -> None:
    """Descriptors are as before, wherever the dial was cut."""
    async with local() as a, local() as b:
        before = descriptors()

        async def dial() -> None:
            await a.dial(b.addresses[0])

        async def check() -> None:
            for peer in a.peers():
                peer.fail(WireError("the test ends it"))
            with trio.fail_after(10):
                while descriptors() > before or a.peers() or b.peers():
                    await trio.sleep(0.002)

        await cancel_everywhere(dial, check)


async def test_listen_and_accept_on_sockets() -> None:
    transport = TcpTransport()
    before = descriptors()

    async def listen() -> None:
        listener = await transport.listen(Address("127.0.0.1", 0))
        try:
            async with trio.open_nursery() as nursery:

                async def dial() -> None:
                    pipe = await transport.dial(listener.address)
                    pipe.close()

                nursery.start_soon(dial)
                pipe = await listener.accept()
                pipe.close()
        finally:
            listener.close()

    async def check() -> None:
        assert descriptors() == before

    await cancel_everywhere(listen, check)


async def test_open_net() -> None:
    before = descriptors()

    async def live() -> None:
        async with open_net(Identity.generate(), run=RUN, listen=[Address("127.0.0.1", 0)], scope=Scope.HOST):
            await trio.lowlevel.checkpoint()

    async def check() -> None:
        assert descriptors() == before

    await cancel_everywhere(live, check)


async def test_call(autojump_clock: Clock) -> None:
    async with meeting() as (_, a, b, peer):
        await trio.sleep(1)
        await cancel_everywhere(lambda: peer.call("echo", Want(RUN, 1), Want, deadline_s=5), idle(a, b))


async def test_open_send_receive(autojump_clock: Clock) -> None:
    async with meeting() as (_, a, b, peer):

        async def converse() -> None:
            async with await peer.open("streams") as stream:
                for size in (10, 65536, 65536):
                    await stream.send(bytes(size))
                for _ in range(3):
                    await stream.receive()
                await stream.send_eof()
                with pytest.raises(trio.EndOfChannel):
                    await stream.receive()

        await trio.sleep(1)
        await cancel_everywhere(converse, idle(a, b))
        assert not peer.closed


@pytest.mark.parametrize("capacity", [1 << 20, 10 << 10])
async def test_byte_streams(capacity: int, autojump_clock: Clock) -> None:
    async with meeting(capacity) as (_, a, b, peer):

        async def converse() -> None:
            stream = await peer.open("streams", Kind.BYTE, 3)
            assert isinstance(stream, ByteStream)
            async with stream:
                await stream.send_all(bytes(30_000))
                buffer = memoryview(bytearray(30_000))
                assert await stream.receive_into(buffer, at_least=30_000) == 30_000
                await stream.send_eof()
                assert await stream.receive_some() == b""

        await trio.sleep(1)
        await cancel_everywhere(converse, idle(a, b))


@pytest.mark.parametrize("capacity", [1 << 20, 10 << 10])
async def test_tensor_send(capacity: int, autojump_clock: Clock) -> None:
    """Dropped at both ends, the slot's buffer offered again, never delivered twice."""
    count = 100_000
    expected = Expectation(DType.fp32, (count,), 0, count * 4)
    data = memoryview(np.arange(count, dtype=np.float32)).cast("B")
    async with meeting(capacity) as (_, a, b, peer):
        back = b.peer(a.peer_id)
        assert back is not None
        sender, receiver = peer.sender("t", b"x"), back.receiver("t", b"x", lambda key: expected)
        receiver.post(memoryview(bytearray(count * 4)))
        await trio.sleep(1)
        step = 0

        async def send() -> None:
            await sender.send((0, step), data, dtype=DType.fp32, shape=(count,))

        async def check() -> None:
            nonlocal step
            await trio.sleep(2)
            assert sender.pending == 0
            if receiver.posted == 0:  # the cancel came after the last byte
                got = await receiver.receive()
                assert got.key == (0, step) and got.buffer == data
                receiver.post(got.buffer)
                await trio.sleep(2)
            assert sender.free_slots() == 1 and receiver.posted == 1
            step += 1

        await cancel_everywhere(send, check)
        sender.close()
        receiver.close()
        await idle(a, b)()


async def test_tensor_receive(autojump_clock: Clock) -> None:
    expected = Expectation(DType.uint8, (8,), 0, 8)
    async with meeting() as (_, a, b, peer):
        back = b.peer(a.peer_id)
        assert back is not None
        sender, receiver = peer.sender("t", b"x"), back.receiver("t", b"x", lambda key: expected)
        step = 0

        async def receive() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(send, step)
                receiver.post(memoryview(bytearray(8)))
                await receiver.receive()

        async def send(step: int) -> None:
            await sender.send((0, step), memoryview(bytes(8)), dtype=DType.uint8, shape=(8,))

        async def check() -> None:
            nonlocal step
            await trio.sleep(2)
            while receiver.posted:
                receiver.unpost(min(receiver._posts))
            while receiver._ready:
                await receiver.receive()
            assert sender.pending == 0 and receiver._task is None
            step += 1

        await cancel_everywhere(receive, check)
        sender.close()
        receiver.close()
        await idle(a, b)()


async def test_wire_8_thousands_of_openings_and_every_gauge_is_zero(autojump_clock: Clock) -> None:
    """WIRE-8: open, close, reset, refusal, cancel; the next one opens."""
    async with meeting() as (_, a, b, peer):
        for number in range(2_000):
            kind = number % 5
            if kind == 0:
                await peer.call("echo", Want(RUN, 1), Want, deadline_s=5)
            elif kind == 1:
                async with await peer.open("streams") as stream:
                    await stream.send(b"x")
            elif kind == 2:
                stream = await peer.open("streams")
                stream.reset()
            elif kind == 3:
                with pytest.raises(WireError):
                    await peer.call("unknown", Want(RUN, 1), Want, deadline_s=5)
            else:
                with trio.move_on_after(0):
                    await peer.call("echo", Want(RUN, 1), Want, deadline_s=5)
        await idle(a, b)()
        assert await peer.call("echo", Want(RUN, 1), Want, deadline_s=5) == Want(RUN, 1)


async def test_a_node_cancelled_while_it_sends_and_dials_lanes(autojump_clock: Clock) -> None:
    """From its birth to its end, with a channel whose lanes are being made: the other node holds nothing of it afterwards."""
    world = World()
    size = 300_000
    data = memoryview(bytearray(size))
    lanes: set[int] = set()
    async with member(world, "10.0.0.2") as b:

        async def hear(peer: Peer, name: bytes) -> None:
            receiver = peer.receiver("t", name, lambda key: Expectation(DType.uint8, (size,), 0, size))
            receiver.post(memoryview(bytearray(size)))

        b.serve_channel("t", hear)
        step = 0

        async def operation() -> None:
            nonlocal step
            step += 1
            async with member(world, "10.0.0.1") as a:
                peer = await a.dial(b.addresses[0])
                await peer.sender("t", b"x").send((0, step), data, dtype=DType.uint8, shape=(size,))
                lanes.add(peer.stats.lanes)
                await trio.sleep(0.1)
                lanes.add(peer.stats.lanes)

        async def check() -> None:
            await trio.sleep(100)
            assert held(b) == {} and not b.peers() and not b.counts["internal-error"]
            assert world.open_pipes() == 0

        assert await cancel_everywhere(operation, check) > 20
        assert lanes >= {1}
