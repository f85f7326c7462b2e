"""Streams: whole or nothing, busy, ends, two full pipes.  WIRE-4, WIRE-5, WIRE-7, WIRE-12, WIRE-13."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest
import trio
import trio.testing

from tests.wire.net.worlds import World, held, member
from wire.errors import Code, LocalProtocolError, StreamReset
from wire.net import ByteStream, Kind, MessageStream, Net, Peer

Clock = trio.testing.MockClock
Handler = Callable[[Peer, MessageStream | ByteStream], Awaitable[None]]


@asynccontextmanager
async def served(handler: Handler, capacity: int = 1 << 20) -> AsyncIterator[tuple[Net, Net, Peer]]:
    world = World(capacity=capacity)
    async with member(world, "10.0.0.1") as a, member(world, "10.0.0.2") as b:
        b.serve("p", handler)
        peer = await a.dial(b.addresses[0])
        yield a, b, peer
        await trio.sleep(5)
        assert held(a, b) == {}
    assert world.open_pipes() == 0


async def echo(peer: Peer, stream: MessageStream | ByteStream) -> None:
    if isinstance(stream, MessageStream):
        async for message in stream:
            await stream.send(message)
    else:
        while data := await stream.receive_some():
            await stream.send_all(data)
    await stream.send_eof()


async def test_messages_keep_their_boundaries_and_end(autojump_clock: Clock) -> None:
    async with served(echo) as (_, _, peer), await peer.open("p") as stream:
        for size in (1, 64, 65536):
            await stream.send(bytes([size % 251]) * size)
            assert await stream.receive() == bytes([size % 251]) * size
        await stream.send_eof()
        with pytest.raises(trio.EndOfChannel):
            await stream.receive()
        with pytest.raises(trio.EndOfChannel):  # and again
            await stream.receive()
        with pytest.raises(trio.ClosedResourceError):
            await stream.send(b"late")


@pytest.mark.parametrize("message", [b"", bytes(65537)])
async def test_a_message_that_does_not_fit_is_our_mistake_and_changes_nothing(message: bytes, autojump_clock: Clock) -> None:
    async with served(echo) as (_, _, peer), await peer.open("p") as stream:
        with pytest.raises(LocalProtocolError):
            await stream.send(message)
        await stream.send(b"good")
        assert await stream.receive() == b"good"
        await stream.send_eof()


async def test_a_second_sender_or_receiver_is_busy_and_the_first_message_arrives_whole(autojump_clock: Clock) -> None:
    """WIRE-5."""
    go = trio.Event()
    got: list[bytes] = []

    async def slow(peer: Peer, stream: MessageStream | ByteStream) -> None:
        assert isinstance(stream, MessageStream)
        await go.wait()
        got.extend([message async for message in stream])

    async with served(slow) as (_, _, peer), await peer.open("p") as stream:
        async with trio.open_nursery() as nursery:
            await stream.send(bytes(65536))
            nursery.start_soon(stream.send, b"\1" * 65536)  # waits for credit
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(trio.BusyResourceError):
                await stream.send(b"\2")
            go.set()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.receive)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(trio.BusyResourceError):
                await stream.receive()
            nursery.cancel_scope.cancel()
        await stream.send_eof()
        await trio.sleep(1)
    assert got == [bytes(65536), b"\1" * 65536]


async def test_a_cancelled_send_has_sent_nothing_and_a_cancelled_receive_lost_nothing(autojump_clock: Clock) -> None:
    go = trio.Event()

    async def slow(peer: Peer, stream: MessageStream | ByteStream) -> None:
        await go.wait()
        await echo(peer, stream)

    async with served(slow) as (_, _, peer), await peer.open("p") as stream:
        await stream.send(bytes(65536))
        with trio.move_on_after(1) as cancelled:
            await stream.send(b"x" * 65536)
        assert cancelled.cancelled_caught
        with trio.move_on_after(1):
            await stream.receive()
        go.set()
        assert await stream.receive() == bytes(65536)
        with trio.move_on_after(0):
            await stream.receive()
        await stream.send(b"next")
        assert await stream.receive() == b"next"
        await stream.send_eof()


async def test_wire_7_a_reset_is_never_an_end(autojump_clock: Clock) -> None:
    """WIRE-7: unread data are gone, the code arrives, on both kinds and in both directions."""

    async def resets(peer: Peer, stream: MessageStream | ByteStream) -> None:
        if isinstance(stream, MessageStream):
            await stream.receive()
        else:
            await stream.receive_some()
        stream.reset(Code.TOO_LARGE, "no more")

    async with served(resets) as (_, _, peer):
        for kind in (Kind.MESSAGE, Kind.BYTE):
            stream = await peer.open("p", kind, 1 if kind is Kind.MESSAGE else 3)
            with suppress(StreamReset):  # a byte stream waits for its buffer to leave: the reset may come first
                await (stream.send(b"a") if isinstance(stream, MessageStream) else stream.send_all(b"a"))
            for _ in range(2):
                with pytest.raises(StreamReset) as reset:
                    await (stream.receive() if isinstance(stream, MessageStream) else stream.receive_some())
                assert (reset.value.code, reset.value.detail) == (Code.TOO_LARGE, "no more")
            with pytest.raises(StreamReset):
                await (stream.send(b"a") if isinstance(stream, MessageStream) else stream.send_all(b"a"))
            stream.reset()


async def test_what_was_sent_before_a_close_arrives(autojump_clock: Clock) -> None:
    """WIRE-12: data, then FIN, then the sender is gone: all of it is delivered."""
    got: list[bytes] = []

    async def listen(peer: Peer, stream: MessageStream | ByteStream) -> None:
        assert isinstance(stream, MessageStream)
        await trio.sleep(1)
        got.extend([message async for message in stream])

    async with served(listen) as (_, _, peer):
        async with await peer.open("p") as stream:
            for number in range(10):
                await stream.send(bytes([number]))
        await trio.sleep(5)
    assert got == [bytes([number]) for number in range(10)]


async def test_a_closed_reader_drains_a_little_and_then_resets_the_talker(autojump_clock: Clock) -> None:
    outcome: list[BaseException] = []

    async def talker(peer: Peer, stream: MessageStream | ByteStream) -> None:
        assert isinstance(stream, MessageStream)
        try:
            while True:
                await stream.send(bytes(10_000))
        except StreamReset as error:
            outcome.append(error)
            raise

    async with served(talker) as (_, _, peer):
        async with await peer.open("p") as stream:
            await stream.send(b"go")
        await trio.sleep(1)
        assert len(outcome) == 1


@pytest.mark.parametrize("kind", [Kind.BYTE, Kind.MESSAGE])
@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("later", range(4))
async def test_wire_7_data_and_a_reset_that_come_together_end_a_closed_stream_and_nothing_else(
    autojump_clock: Clock, kind: Kind, pieces: int, later: int
) -> None:
    closed = trio.Event()

    async def talker(peer: Peer, stream: MessageStream | ByteStream) -> None:
        await closed.wait()
        for _ in range(pieces):
            await (stream.send(bytes(1000)) if isinstance(stream, MessageStream) else stream.send_all(bytes(1000)))
        for _ in range(later):
            await trio.lowlevel.checkpoint()
        stream.reset()

    async with served(talker) as (_, _, peer):
        async with await peer.open("p", kind) as stream:
            await stream.send_eof()
        closed.set()
        await trio.sleep(1)
        assert not peer.closed


async def test_an_exception_in_the_block_resets(autojump_clock: Clock) -> None:
    outcome: list[object] = []

    async def listen(peer: Peer, stream: MessageStream | ByteStream) -> None:
        assert isinstance(stream, MessageStream)
        try:
            outcome.extend([message async for message in stream])
            outcome.append("end")
        except StreamReset as error:
            outcome.append(error.code)
            raise

    async with served(listen) as (_, _, peer):
        with pytest.raises(ZeroDivisionError):
            async with await peer.open("p") as stream:
                await stream.send(b"half of a conversation")
                await trio.sleep(1)
                raise ZeroDivisionError
        await trio.sleep(1)
        assert outcome == [Code.INTERNAL] or outcome == [b"half of a conversation", Code.INTERNAL]


@pytest.mark.parametrize("capacity", [1 << 20, 10 << 10])
async def test_eight_writers_of_all_sizes_stay_exact(capacity: int, autojump_clock: Clock) -> None:
    """WIRE-4, WIRE-13: byte-exact over a pipe of 10 KiB, in both directions at once."""

    async def one(peer: Peer, seed: int) -> None:
        rng = random.Random(seed)
        data = rng.randbytes(rng.choice((1, 1000, 70_000, 400_000)))
        stream = await peer.open("p", Kind.BYTE, rng.choice((1, 2, 3, 4)))
        assert isinstance(stream, ByteStream)
        async with stream:

            async def write() -> None:
                at = 0
                while at < len(data):
                    size = rng.choice((1, 100, 5000, 300_000))
                    await stream.send_all(data[at : at + size])
                    at += size
                await stream.send_eof()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(write)
                got = bytearray()
                buffer = memoryview(bytearray(100_000))
                while True:
                    if rng.random() < 0.5:
                        count = await stream.receive_into(buffer, at_least=rng.choice((1, 100, 100_000)))
                        piece = bytes(buffer[:count])
                    else:
                        piece = await stream.receive_some(rng.choice((1, 5000, None)))
                    if not piece:
                        break
                    got += piece
                assert bytes(got) == data

    async with served(echo, capacity) as (_, _, peer):
        with trio.fail_after(600):
            async with trio.open_nursery() as nursery:
                for seed in range(8):
                    nursery.start_soon(one, peer, seed)


async def test_thirty_two_streams_echo_over_a_tiny_pipe(autojump_clock: Clock) -> None:
    """WIRE-13: both ends write much; ends within the virtual deadline."""
    block = os.urandom(64 << 10)

    async def one(peer: Peer) -> None:
        stream = await peer.open("p", Kind.BYTE, 3)
        assert isinstance(stream, ByteStream)
        async with stream, trio.open_nursery() as nursery:

            async def write() -> None:
                for _ in range(2):
                    await stream.send_all(block)
                await stream.send_eof()

            nursery.start_soon(write)
            got = b""
            while piece := await stream.receive_some():
                got += piece
            assert got == block * 2

    async with served(echo, 10 << 10) as (_, _, peer):
        with trio.fail_after(600):
            async with trio.open_nursery() as nursery:
                for _ in range(32):
                    nursery.start_soon(one, peer)


async def test_a_cancelled_receive_into_loses_no_byte(autojump_clock: Clock) -> None:
    async def talker(peer: Peer, stream: MessageStream | ByteStream) -> None:
        assert isinstance(stream, ByteStream)
        await stream.receive_some()
        for number in range(20):
            await stream.send_all(bytes([number]) * 50)
            await trio.sleep(1)

    async with served(talker) as (_, _, peer):
        stream = await peer.open("p", Kind.BYTE, 3)
        assert isinstance(stream, ByteStream)
        async with stream:
            await stream.send_all(b"go")
            got = b""
            buffer = memoryview(bytearray(4000))
            while len(got) < 1000:
                with trio.move_on_after(0.7):
                    count = await stream.receive_into(buffer, at_least=120)
                    assert count
                    got += bytes(buffer[:count])
                    continue
                got += await stream.receive_some(60)
            assert got == b"".join(bytes([number]) * 50 for number in range(20))


async def test_a_cancelled_receive_into_gives_back_what_it_had_taken(autojump_clock: Clock) -> None:
    """Bytes that were there when it began, bytes that came while it waited: all are read again, in order."""
    data = bytes(range(250))

    async def talker(peer: Peer, stream: MessageStream | ByteStream) -> None:
        assert isinstance(stream, ByteStream)
        await stream.receive_some()
        await stream.send_all(data[:100])
        await trio.sleep(2)
        await stream.send_all(data[100:200])
        await trio.sleep(2)
        await stream.send_all(data[200:])

    async with served(talker) as (_, _, peer):
        stream = await peer.open("p", Kind.BYTE, 3)
        assert isinstance(stream, ByteStream)
        async with stream:
            await stream.send_all(b"go")
            await trio.sleep(1)
            buffer = memoryview(bytearray(1000))
            for _ in range(2):
                with trio.move_on_after(1) as cancelled:
                    await stream.receive_into(buffer, at_least=240)
                assert cancelled.cancelled_caught
            got = await stream.receive_some(30)
            with trio.move_on_after(0.1) as cancelled:
                await stream.receive_into(buffer, at_least=240)
            assert cancelled.cancelled_caught
            count = await stream.receive_into(buffer, at_least=250 - len(got))
            assert got + bytes(buffer[:count]) == data


async def test_the_buffer_of_send_all_is_free_afterwards_and_after_a_cancel(autojump_clock: Clock) -> None:
    got = bytearray()
    go = trio.Event()

    async def listen(peer: Peer, stream: MessageStream | ByteStream) -> None:
        assert isinstance(stream, ByteStream)
        await go.wait()
        try:
            while piece := await stream.receive_some():
                got.extend(piece)
        except StreamReset:
            pass

    async with served(listen, 10 << 10) as (_, _, peer):
        stream = await peer.open("p", Kind.BYTE, 3)
        assert isinstance(stream, ByteStream)
        async with stream:
            data = bytearray(b"a" * 100_000)
            await stream.send_all(data)
            data[:] = b"b" * 100_000
            with trio.move_on_after(0.5) as cancelled:
                await stream.send_all(bytearray(b"c" * (9 << 20)))
            assert cancelled.cancelled_caught
            data[:] = b"d" * 100_000
            go.set()
            await trio.sleep(5)
    assert bytes(got[:100_000]) == b"a" * 100_000
    assert set(got[100_000:]) <= {ord("c")}


async def test_trio_accepts_a_byte_stream_as_one_of_its_own(autojump_clock: Clock) -> None:
    async def echo_trio(peer: Peer, stream: MessageStream | ByteStream) -> None:
        assert isinstance(stream, trio.abc.HalfCloseableStream)
        async for piece in stream:
            await stream.send_all(piece)

    async with served(echo_trio) as (_, _, peer), await peer.open("p", Kind.BYTE, 3) as stream:
        assert isinstance(stream, trio.abc.HalfCloseableStream)
        await stream.wait_send_all_might_not_block()
        await stream.send_all(b"x" * 1000)
        await stream.send_eof()
        assert b"".join([piece async for piece in stream]) == b"x" * 1000
