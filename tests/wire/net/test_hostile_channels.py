"""Members that misbehave on tensor channels, as senders and as receivers: in memory and in virtual time.  WIRE-1, WIRE-6."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
import trio
import trio.testing

from tests.wire.net.hostile_room import EXPECTED, KEY, SIZE, TOKEN, ZEROS, Chunks, Clock, Room, quiet, room
from wire.chunks import OutChunk
from wire.errors import Code, ConnectionLost, WireError
from wire.events import Kind
from wire.limits import DEFAULT_LIMITS
from wire.messages import Ask, Begin, Done, Drop, Have, LaneAsk, Posted, Slot, Unslot, encode, pack
from wire.net.carrier import CHUNKS_META
from wire.tensor import DType

__all__ = ["quiet"]


# -- tensor channels: the attacker sends


def begin(slot: int, token: bytes = TOKEN, size: int = SIZE) -> Begin:
    return Begin(slot, KEY, 0, DType.uint8, (size,), 0, size, token)


@pytest.mark.parametrize(
    ("messages", "code"),
    [
        ([begin(0), begin(0, bytes([1]) * 8)], Code.PROTOCOL),  # a second one with another token
        ([begin(7)], Code.PROTOCOL),
        ([Ask(2**32 - 1, ())], Code.EXCESSIVE),  # there was no lane
        ([Drop(0, KEY, 0)], Code.PROTOCOL),
        ([Slot(0, None, 5)], Code.PROTOCOL),  # the receiver's word
        ([Have(0, TOKEN, b"")], Code.PROTOCOL),
        ([LaneAsk(1)], Code.PROTOCOL),
    ],
)
async def test_a_lie_of_a_sender_ends_its_connection(messages: list[object], code: Code, autojump_clock: Clock) -> None:
    async with room() as r:
        back = r.back()
        assert back is not None
        receiver = back.receiver("t", b"x", lambda key: EXPECTED)
        slot = memoryview(bytearray(SIZE))
        receiver.post(slot)
        r.say(r.open(Kind.MESSAGE, b"x"), *messages)
        await trio.sleep(2)
        assert r.peer.closed and r.peer.reason is not None and r.peer.reason.code is code
        assert receiver.posted == 0 and not any(slot)


async def test_an_ask_of_more_slots_than_there_can_be_is_no_message(autojump_clock: Clock) -> None:
    async with room() as r:
        stream = r.open(Kind.MESSAGE, b"x")
        back = r.back()
        assert back is not None
        back.receiver("t", b"x", lambda key: EXPECTED)
        r.link.session.send(stream, pack([9, 0, list(range(1000))]), now=trio.current_time())
        r.link.kick()
        await trio.sleep(2)
        assert r.peer.closed and r.peer.reason is not None and r.peer.reason.code is Code.PROTOCOL


@pytest.mark.parametrize("chunk", [(0, 0, 1, 0), (0, 900, 10, 0), (1, 0, 10, 0), (0, 0, 10, 2), (2**32 - 1, 2**32 - 1, 10, 0)])
async def test_a_chunk_that_belongs_nowhere_ends_its_connection(chunk: tuple[int, int, int, int], autojump_clock: Clock) -> None:
    async with room() as r:
        back = r.back()
        assert back is not None
        receiver = back.receiver("t", b"x", lambda key: EXPECTED)
        slot = memoryview(bytearray(SIZE))
        receiver.post(slot)
        control = r.open(Kind.MESSAGE, b"x")
        r.say(control, begin(0))
        stream = r.open(Kind.CHUNKS, CHUNKS_META.pack(control) + b"x")
        number, index, length, flags = chunk
        r.link.session.attach_source(stream, Chunks(OutChunk(number, index, memoryview(b"\x07" * length), flags)), 2)
        r.link.kick()
        await trio.sleep(2)
        assert r.peer.closed and r.peer.reason is not None and r.peer.reason.code is Code.PROTOCOL
        assert receiver.posted == 0 and not any(slot)


async def test_chunk_streams_of_a_foreign_or_no_control_stream_wait_or_are_refused(autojump_clock: Clock) -> None:
    """One that names another channel's control stream, one whose control stream never comes, one without a name, a second one."""
    async with room() as r:
        back = r.back()
        assert back is not None
        receiver = back.receiver("t", b"x", lambda key: EXPECTED)
        slot = memoryview(bytearray(SIZE))
        receiver.post(slot)
        control, other = r.open(Kind.MESSAGE, b"x"), r.open(Kind.MESSAGE, b"y")
        lane = await r.lane()
        r.link.kick()
        await trio.sleep(1)
        session = lane.session
        foreign = r.open(Kind.CHUNKS, CHUNKS_META.pack(other) + b"x", link=lane)
        nobody = r.open(Kind.CHUNKS, CHUNKS_META.pack(2**31 + 1) + b"x", link=lane)
        nameless = r.open(Kind.CHUNKS, CHUNKS_META.pack(control), link=lane)
        right = r.open(Kind.CHUNKS, CHUNKS_META.pack(control) + b"x", link=lane)
        second = r.open(Kind.CHUNKS, CHUNKS_META.pack(control) + b"x", link=lane)
        lane.kick()
        await trio.sleep(2)
        assert [session.is_live(stream) for stream in (foreign, nobody, nameless, right, second)] == [True, True, False, True, False]
        assert receiver.posted == 1 and not any(slot) and lane.error is None
        receiver.close()


# -- tensor channels: the attacker receives


async def victim_sends(r: Room, *messages: object, transfer: bool = True) -> tuple[BaseException | None, int]:
    """The victim sends a tensor to the attacker, who answers with these messages; how the send ended, and what is queued."""
    back = r.back()
    assert back is not None
    r.attacker.serve_channel("v")
    sender = back.sender("v", b"x")
    found: list[BaseException] = []

    async def send() -> None:
        try:
            await sender.send((0, 1), memoryview(bytearray(SIZE)), dtype=DType.uint8, shape=(SIZE,))
        except WireError as error:
            found.append(error)

    with trio.move_on_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            await trio.sleep(1)
            r.say(r.taken(), *messages)
            await trio.sleep(3)
            nursery.cancel_scope.cancel()
    return (found[0] if found else None), len(sender.at._outbox) if sender.at is not None else 0


@pytest.mark.parametrize(
    "messages",
    [
        [Posted(0), Slot(0, None, SIZE), Have(0, TOKEN, b"\x03")],  # an answer without a question
        [Slot(0, (0, 1), SIZE, TOKEN, b"\xff"), Slot(0, None, 5)],  # posted twice
        [Posted(0), *[Slot(at, (0, 9), 5) for at in range(65)]],
        [Posted(0), Slot(0, (0, 9), SIZE), Done(0, (0, 1), 0)],  # an end that nobody began
        [Posted(5), Slot(4, None, SIZE)],
        [Posted(0), Unslot(3)],
        [Posted(0), Begin(0, (0, 1), 0, 0, (), 0, 0, TOKEN)],
    ],
)
async def test_a_lie_of_a_receiver_ends_its_connection(messages: list[object], autojump_clock: Clock) -> None:
    async with room() as r:
        error, _ = await victim_sends(r, *messages)
        assert r.peer.closed and r.peer.reason is not None and r.peer.reason.code is Code.PROTOCOL
        assert isinstance(error, WireError)


# -- a peer that makes us talk and does not read


async def test_a_receiver_that_does_not_read_what_it_makes_us_say_is_cut(autojump_clock: Clock) -> None:
    """It posts and withdraws slots; each pair costs a Begin, which waits for the credit that never comes."""
    async with room() as r:
        back = r.back()
        assert back is not None
        r.attacker.serve_channel("v")
        sender = back.sender("v", b"x")
        async with trio.open_nursery() as nursery:
            for at in range(60):
                nursery.start_soon(sends_in_vain, lambda at=at: sender.send((0, at), ZEROS, dtype=DType.uint8, shape=(SIZE,)))
            await trio.sleep(1)
            stream = r.taken()
            r.say(stream, Posted(0))
            most = await chatter(r, stream, post_and_withdraw, lambda: sender.at)
        assert r.peer.reason is not None and r.peer.reason.code is Code.EXCESSIVE and most <= WAITING_MOST


async def test_a_sender_that_does_not_read_what_it_makes_us_say_is_cut(autojump_clock: Clock) -> None:
    """It begins what nobody expects; each costs a Done and the slot's next number."""
    async with room() as r:
        back = r.back()
        assert back is not None
        receiver = back.receiver("t", b"x", lambda key: None)
        for _ in range(60):
            receiver.post(memoryview(bytearray(10)))
        stream = r.open(Kind.MESSAGE, b"x")
        r.link.kick()
        await trio.sleep(1)
        most = await chatter(r, stream, begin, lambda: receiver.at)
        assert r.peer.reason is not None and r.peer.reason.code is Code.EXCESSIVE and most <= WAITING_MOST


WAITING_MOST = DEFAULT_LIMITS.channel_messages_waiting_max + 240  # and what one batch of them causes


def post_and_withdraw(at: int) -> Slot | Unslot:
    """60 slots, and the same 60 withdrawn."""
    number = at // 120 * 60 + at % 60
    return Slot(number, None, SIZE) if at // 60 % 2 == 0 else Unslot(number)


async def sends_in_vain(send: Callable[[], Awaitable[None]]) -> None:
    with suppress(WireError):
        await send()


async def chatter(r: Room, stream: int, said: Callable[[int], object], at: Callable[[], object]) -> int:
    """Say that again and again, 60 messages at a time; the most messages that waited at the victim."""
    link, most = r.link, 0
    for number in range(12_000):
        message = encode(said(number))
        while link.session.is_live(stream) and link.session.sendable(stream, len(message)) < len(message):
            await trio.sleep(0.01)
        if not link.session.is_live(stream):
            break
        link.session.send(stream, message, now=trio.current_time())
        if number % 60 == 59:
            link.kick()
            await trio.sleep(0.01)
            most = max(most, len(getattr(at(), "_outbox", ())))
    await trio.sleep(5)
    return most


# -- channels opened again and again, and lanes that cannot be had


async def test_a_channel_that_is_opened_again_and_again_keeps_its_slots(autojump_clock: Clock) -> None:
    """Each opening ends the one before and hears of every slot; the buffers stay where they are, and nothing piles up."""
    async with room() as r:
        back = r.back()
        assert back is not None
        receiver = back.receiver("t", b"x", lambda key: EXPECTED)
        slots = [bytearray(SIZE) for _ in range(8)]
        for slot in slots:
            receiver.post(memoryview(slot))
        for at in range(300):
            control = r.open(Kind.MESSAGE, b"x")
            if at < 8:
                r.say(control, begin(at))
            chunks = r.open(Kind.CHUNKS, CHUNKS_META.pack(control) + b"x")
            r.link.session.attach_source(chunks, Chunks(OutChunk(at % 8, 0, ZEROS[: DEFAULT_LIMITS.chunk_bytes], 0)), 2)
            r.link.kick()
            await trio.sleep(0.02)
        assert not r.peer.closed and receiver.posted == 8 and receiver.channel.open_slots == 8
        r.peer.fail(ConnectionLost("the attacker leaves"))
        receiver.close()
        await trio.sleep(2)
        assert receiver.posted == 0
