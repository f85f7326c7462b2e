"""What a hostile half of a tensor channel gets: a violation or a burned slot, never memory, never a delivery (wire 11, 23.6)."""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections.abc import Callable

import pytest

from wire.chunks import OutChunk
from wire.delivered import DeliveredKeys
from wire.errors import Code, RemoteProtocolError
from wire.limits import DEFAULT_LIMITS, Limits
from wire.messages import Ask, Begin, Done, Drop, Have, Posted, Slot, Unslot
from wire.sending import SendEnded, SenderChannel
from wire.slots import ReceiverChannel, TensorReceived
from wire.tensor import DType, Expectation

CHUNK = 16
LIMITS = dataclasses.replace(DEFAULT_LIMITS, chunk_bytes=CHUNK, tensor_max_bytes=10 * CHUNK, slots_open_max=3)
KEY = (0, 7, b"origin", 3, "forward")
OTHER = (0, 7, b"origin", 4, "forward")


def bytes_expected(size: int) -> Expectation:
    return Expectation(DType.uint8, (size,), 0, size)


# -- a hostile sender


class Half(ReceiverChannel):
    """A receiver with a control stream and one lane, which a hostile sender drives."""

    def __init__(self, expect: Callable[[tuple], Expectation | None], limits: Limits = LIMITS) -> None:
        super().__init__(expect, DeliveredKeys(), limits)
        self.attach()
        self.sink = self.lane(0)
        self.place, self.placed = self.sink.place, self.sink.placed


def begun(size: int = 5 * CHUNK // 2, room: int = 4 * CHUNK) -> Half:
    """A receiver with slot 0 of 4 chunks begun with 2.5, and slot 1 of 4 not begun."""
    receiver = Half(lambda _key: bytes_expected(size))
    for _ in range(2):
        receiver.post(memoryview(bytearray(room)))
    receiver.on_message(begin(0, size))
    return receiver


def begin(slot: int, raw_len: int, key: tuple = KEY) -> Begin:
    return Begin(slot, key, 0, DType.uint8, (raw_len,), 0, raw_len, b"12345678")


@pytest.mark.parametrize(
    "slot, index, length, flags",
    [
        (2, 0, CHUNK, 0),  # never posted
        (2**32 - 1, 2**32 - 1, CHUNK, 0),
        (0, 0, 0, 0),
        (0, 0, CHUNK + 1, 0),
        (0, 0, 2**31 - 1, 0),
        (0, 0, CHUNK - 1, 0),  # short, but not the last
        (0, 2, CHUNK, 0),  # the last, but full
        (0, 2, CHUNK // 2 - 1, 0),
        (0, 3, 1, 0),  # behind the end
        (0, 2**32 - 1, CHUNK, 0),
        (1, 4, 1, 0),  # behind the buffer
        (1, 3, CHUNK + 1, 0),
        (1, 2**32 - 1, 1, 0),
        (0, 0, CHUNK, 1),  # compression was not agreed on
        (0, 0, CHUNK, 2**31),
    ],
)
def test_impossible_chunks_are_violations(slot: int, index: int, length: int, flags: int) -> None:
    receiver = begun()
    with pytest.raises(RemoteProtocolError) as caught:
        receiver.place(slot, index, length, flags)
    assert caught.value.code is Code.PROTOCOL
    assert receiver.place(0, 0, CHUNK, 0) is not None  # control: this sender could also have been honest


def chunks(receiver: Half, *placed: tuple[int, int]) -> None:
    for index, length in placed:
        receiver.place(1, index, length, 0)
        receiver.placed(1, index)


@pytest.mark.parametrize(
    "first, then",
    [
        ([(1, 5)], (0, 5)),  # two last chunks
        ([(1, 5)], (2, CHUNK)),  # one behind the last
        ([(1, 5)], (1, 6)),
        ([(2, CHUNK)], (1, 5)),  # a last one before another
        ([(0, CHUNK)], (0, 5)),  # another length for a complete one
    ],
)
def test_chunks_that_contradict_each_other_before_begin(first: list[tuple[int, int]], then: tuple[int, int]) -> None:
    receiver = begun()
    chunks(receiver, *first)
    with pytest.raises(RemoteProtocolError):
        receiver.place(1, *then, 0)


@pytest.mark.parametrize(
    "came, raw_len",
    [([(0, CHUNK)], CHUNK - 1), ([(1, 5)], CHUNK + 6), ([(1, 5)], CHUNK + 4), ([(3, CHUNK)], 2 * CHUNK), ([(0, 1)], 0)],
)
def test_a_length_that_contradicts_the_chunks_is_a_violation(came: list[tuple[int, int]], raw_len: int) -> None:
    receiver = begun(raw_len)
    chunks(receiver, *came)
    with pytest.raises(RemoteProtocolError):
        receiver.on_message(begin(1, raw_len, OTHER))
    assert not any(isinstance(e, TensorReceived) and e.slot == 1 for e in receiver.events())


def test_a_length_that_is_not_expected_allocates_and_delivers_nothing() -> None:
    for lie in (0, 1, CHUNK, 4 * CHUNK):
        receiver = begun()
        receiver.on_message(begin(1, lie, OTHER))
        assert [(e.slot, e.code) for e in receiver.events()] == [(1, Code.EXPECTATION)]
    receiver = Half(lambda _key: bytes_expected(5 * CHUNK))
    receiver.post(memoryview(bytearray(4 * CHUNK)))
    receiver.on_message(begin(0, 5 * CHUNK))
    assert [e.code for e in receiver.events()] == [Code.TOO_LARGE]


def test_hostile_messages() -> None:
    for message in (
        begin(0, 40),  # twice
        begin(2, 40),  # never posted
        Drop(2**32 - 1, KEY, 12),
        Drop(1, KEY, 12),  # not begun
        Drop(0, OTHER, 12),
    ):
        with pytest.raises(RemoteProtocolError):
            begun().on_message(message)
    receiver = begun()
    receiver.on_message(Drop(0, KEY, 60_000))  # a code of the future
    receiver.on_message(Drop(0, KEY, 12))  # about a slot that has ended: it may have crossed
    receiver.on_message(begin(0, 40))
    assert [e.code for e in receiver.events()] == [Code.INTERNAL]


def test_a_chunk_of_another_length_on_another_lane_takes_nothing_over() -> None:
    for slot, first, then in ((1, CHUNK, 5), (1, 5, CHUNK), (0, CHUNK, 5)):
        receiver = begun()
        receiver.sink.divert = diverted = lambda _view: pytest.fail("diverted")
        receiver.place(slot, 1, first, 0)
        with pytest.raises(RemoteProtocolError):
            receiver.lane(1).place(slot, 1, then, 0)
        assert receiver.duplicate_bytes == 0 and diverted is receiver.sink.divert


def test_a_question_for_each_lane_and_no_more() -> None:
    receiver = begun()
    for bad in (Ask(0, (0, 0)), Ask(0, (1,)), Ask(0, (2,)), Ask(0, (1, 0))):
        with pytest.raises(RemoteProtocolError):
            begun().on_message(bad)
    receiver.on_message(Ask(0, (0,)))
    with pytest.raises(RemoteProtocolError) as caught:
        receiver.on_message(Ask(0, (0,)))
    assert caught.value.code is Code.EXCESSIVE


def test_cutting_lanes_drains_no_more_than_the_missing_bytes_each() -> None:
    receiver = begun()
    for number in range(1, 4):
        receiver.on_message(Ask(number - 1, (0,)))
        sink = receiver.lane(number)
    drained = 0
    with pytest.raises(RemoteProtocolError) as caught:
        while drained < 1000 * CHUNK:
            sink.place(0, 2, CHUNK // 2, 0)
            sink.placed(0, 2)
            drained += CHUNK // 2
    assert caught.value.code is Code.EXCESSIVE and drained <= 2 * 8 * CHUNK + 3 * 5 * CHUNK // 2


def test_a_complete_chunk_cannot_be_written_again() -> None:
    receiver = begun()
    receiver.place(0, 0, CHUNK, 0)[:] = b"a" * CHUNK
    receiver.placed(0, 0)
    receiver.place(0, 0, CHUNK, 0)[:] = b"b" * CHUNK
    receiver.placed(0, 0)
    for index, length in ((1, CHUNK), (2, CHUNK // 2)):
        receiver.place(0, index, length, 0)[:] = b"a" * length
        receiver.placed(0, index)
    received = receiver.events()[-1]
    assert isinstance(received, TensorReceived) and bytes(received.buffer) == b"a" * 40


def test_rubbish_for_ended_slots_is_drained_within_a_bound_and_no_memory() -> None:
    limits = DEFAULT_LIMITS
    receiver = Half(lambda _key: None, limits)
    memory = memoryview(bytearray(8 << 20))
    for _ in range(40):
        receiver.unpost(receiver.post(memory))
    receiver.messages(), receiver.events()
    drained = 0
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError) as caught:
            while drained < 3 * 40 * len(memory):
                drained += len(receiver.place(drained % 40, drained % 1000, limits.chunk_bytes, 0))
                receiver.placed(0, 0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.code is Code.EXCESSIVE
    assert drained == 2 * 40 * len(memory)
    assert peak < 64 << 10


def test_begins_for_unposted_keys_leave_nothing_behind() -> None:
    """Hostile Begins cost a slot each, and slots are ours to give: memory stays flat."""
    receiver = Half(lambda _key: None)
    memory = memoryview(bytearray(CHUNK))

    def attack(count: int) -> None:
        for number in range(count):
            receiver.on_message(begin(receiver.post(memory), 2**28, (0, number, b"x" * 40)))
            receiver.messages(), receiver.events()

    attack(100)
    tracemalloc.start()
    try:
        attack(3000)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held < 16 << 10 and receiver.open_slots == 0


# -- a hostile receiver


class Sender(SenderChannel):
    """A sender with one lane."""

    def pull(self, lane: int = 0) -> OutChunk | None:
        source = self._lanes[lane] if lane in self._lanes else self.lane(lane)
        return source.next_chunk()


def offered() -> Sender:
    """A sender with slot 0 in use, its two chunks not sent, and slot 1 free."""
    sender = Sender(bytes, LIMITS)
    sender.attach()
    sender.on_message(Posted(0))
    sender.on_message(Slot(0, None, 4 * CHUNK))
    sender.on_message(Slot(1, None, 4 * CHUNK))
    sender.begin(KEY, memoryview(bytes(2 * CHUNK)), dtype=DType.uint8, shape=(32,))
    return sender


def test_a_hostile_receiver() -> None:
    for message in (
        Slot(1, None, 10),  # twice
        Slot(0, None, 10),  # descending
        Done(0, KEY, 0),  # before all was sent
        Done(0, OTHER, 12),
        Done(1, KEY, 12),  # nothing was sent there
        Done(2, KEY, 12),  # never posted
        Unslot(2),
        Posted(2),  # a second time
        Slot(2, KEY, 10, b"12345678", b""),  # a slot in use is said between attach and Posted
        Slot(2, None, 10, None, b""),
        Have(0, bytes(8), b""),  # nobody has asked
        Have(1, bytes(8), b""),
        Have(2, bytes(8), b""),
    ):
        with pytest.raises(RemoteProtocolError):
            offered().on_message(message)
    sender = offered()
    sender.on_message(Slot(2**32 - 1, None, 10))
    with pytest.raises(RemoteProtocolError):  # a fourth open slot, of three; and none could ascend
        sender.on_message(Slot(2**32 - 1, None, 10))
    sender = offered()
    sender.on_message(Slot(5, None, 10))
    with pytest.raises(RemoteProtocolError):
        sender.on_message(Slot(6, None, 10))


def test_messages_that_have_crossed_are_ignored() -> None:
    sender = offered()
    assert sender.cancel(0)
    sender.on_message(Done(0, KEY, 0))
    sender.on_message(Unslot(0))
    sender.on_message(Done(0, KEY, 24))
    assert [e for e in sender.events() if isinstance(e, SendEnded)] == [SendEnded(0, KEY, Code.CANCELLED)]
    assert sender.free_slots() == 1


def test_a_receiver_that_says_done_too_early_cannot_read_the_buffer_after() -> None:
    sender = offered()
    sender.pull(), sender.pull()
    sender.on_message(Done(0, KEY, 0))  # the session may still be sealing the second chunk
    assert not any(isinstance(e, SendEnded) for e in sender.events())
    assert sender.pull() is None
    assert sender.events() == [SendEnded(0, KEY, Code.OK)]


def test_an_unknown_done_code_is_an_end_all_the_same() -> None:
    sender = offered()
    sender.on_message(Done(0, KEY, 60_000))
    assert sender.events()[-1] == SendEnded(0, KEY, Code.INTERNAL)


@pytest.mark.parametrize(
    "said",
    [
        [Slot(0, None, 64), Slot(0, None, 64)],
        [Slot(1, None, 64), Slot(0, None, 64)],
        [Slot(number, None, 64) for number in range(4)],  # of three
        [Slot(0, KEY, 64, b"87654321")],
        [Slot(0, KEY, 64, None, b"")],
        [Slot(0, None, 64, b"87654321", b"")],
        [Slot(0, OTHER, 64, bytes(8), b"")],  # our token under another key
        [Slot(0, KEY, 64, bytes(8), b"\x02")],  # a chunk that never left
        [Slot(0, KEY, 64, bytes(8), b"\x04")],  # that does not exist
        [Slot(0, KEY, 64, bytes(8), b"\x00" * 8 + b"\x01")],
        [Slot(3, None, 64), Posted(3)],
        [Slot(3, None, 64), Posted(0)],
        [Posted(4), Slot(3, None, 64)],
        [Posted(4), Posted(4)],
        [Slot(0, None, 64), Unslot(0)],
        [Slot(0, KEY, 64, bytes(8), b"\x01"), Have(0, bytes(8), b"")],
        [Done(0, KEY, 0)],  # before all was sent
        [Posted(4), Done(5, KEY, 0)],
    ],
)
def test_what_no_honest_receiver_says_after_a_reconnect(said: list[Slot | Posted | Unslot | Have | Done]) -> None:
    sender = offered()
    sender.pull()
    sender.detach()
    sender.attach()
    for message in said[:-1]:
        sender.on_message(message)
    with pytest.raises(RemoteProtocolError):
        sender.on_message(said[-1])


def test_an_answer_with_another_token_or_more_than_left_is_a_violation() -> None:
    for bad in (Have(0, b"87654321", b""), Have(0, bytes(8), b"\x02"), Have(1, bytes(8), b"")):
        sender = offered()
        sender.pull()
        sender.lane_lost(0)
        with pytest.raises(RemoteProtocolError):
            sender.on_message(bad)
        sender.on_message(Have(0, bytes(8), b"\x01"))  # control
