"""Both halves of a tensor channel by example, and what a hostile other half gets (wire 11; ROUND-5; NUM-9 in small)."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from wire.delivered import DeliveredKeys
from wire.errors import Code, LocalProtocolError
from wire.limits import DEFAULT_LIMITS
from wire.messages import Ask, Begin, Done, Drop, Have, Posted, Slot, Unslot, decode, encode
from wire.sending import NO_ORDER, SendEnded, SenderChannel, SlotsChanged
from wire.slots import ChunkReady, ReceiverChannel, TensorDropped, TensorReceived
from wire.tensor import DType, Expectation, from_bytes, to_bytes

CHUNK = 16
LIMITS = dataclasses.replace(DEFAULT_LIMITS, chunk_bytes=CHUNK, tensor_max_bytes=10 * CHUNK, slots_open_max=3)
KEY = (0, 7, b"origin", 3, "forward")
OTHER = (0, 7, b"origin", 4, "forward")


def bytes_expected(size: int) -> Expectation:
    return Expectation(DType.uint8, (size,), 0, size)


class Pair:
    """A sender and a receiver joined by hand: nothing moves unless a test says so."""

    def __init__(self, expected: dict[tuple, Expectation] | None = None, delivered: DeliveredKeys | None = None) -> None:
        self.expected = expected if expected is not None else {}
        self.changes = 0
        self.delivered = DeliveredKeys() if delivered is None else delivered
        self.receiver = ReceiverChannel(self.expected.get, self.delivered, LIMITS, on_change=self.change)
        self.sender = SenderChannel(lambda n: b"t" * n, LIMITS, on_change=self.change)
        self.receiver.attach()
        self.sender.attach()
        self.source, self.sink = self.sender.lane(0), self.receiver.lane(0)

    def change(self) -> None:
        self.changes += 1

    def post(self, size: int, key: tuple | None = None) -> memoryview:
        buffer = memoryview(bytearray(size))
        self.receiver.post(buffer, key)
        return buffer

    def begin(self, key: tuple, data: bytes | bytearray, **how: object) -> int:
        self.expected.setdefault(key, bytes_expected(len(data)))
        how = {"dtype": DType.uint8, "shape": (len(data),), **how}
        return self.sender.begin(key, memoryview(data), **how)

    def slots(self) -> None:
        for message in self.receiver.messages():
            self.sender.on_message(decode(encode(message), Slot, Unslot, Done, Have, Posted))

    def begins(self) -> None:
        for message in self.sender.messages():
            self.receiver.on_message(decode(encode(message), Begin, Drop, Ask))

    def chunk(self) -> bool:
        chunk = self.source.next_chunk()
        if chunk is None:
            return False
        self.sink.place(chunk.slot, chunk.index, len(chunk.data), chunk.flags)[:] = chunk.data
        self.sink.placed(chunk.slot, chunk.index)
        return True

    def settle(self) -> None:
        self.slots()
        self.begins()
        while self.chunk():
            pass
        self.slots()

    def ended(self) -> list[Code]:
        return [event.code for event in self.sender.events() if isinstance(event, SendEnded)]

    def outcome(self) -> list[object]:
        return [event for event in self.receiver.events() if not isinstance(event, ChunkReady)]


def data_of(size: int, salt: int = 0) -> bytearray:
    return bytearray((7 * i + salt) % 251 + 1 for i in range(size))


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 10 * CHUNK])
@pytest.mark.parametrize("begin_last", [False, True])
def test_a_tensor_arrives_and_is_announced_chunk_by_chunk(size: int, begin_last: bool) -> None:
    pair = Pair()
    buffer = pair.post(10 * CHUNK)
    pair.slots()
    data = data_of(size)
    pair.begin(KEY, data)
    if begin_last:
        while pair.chunk():
            pass
        assert pair.receiver.events() == []  # nothing is announced before Begin has passed
        pair.begins()
    pair.settle()
    *ready, received = pair.receiver.events()
    assert [(e.start, e.end) for e in ready] == [(i, min(i + CHUNK, size)) for i in range(0, size, CHUNK)]
    assert isinstance(received, TensorReceived) and received.key == KEY and received.buffer == data
    assert buffer[:size] == data and not any(buffer[size:])
    assert pair.ended() == [Code.OK]
    assert (pair.receiver.open_slots, pair.sender.transfers, pair.sender.free_slots()) == (0, 0, 0)


def test_chunks_that_nobody_waits_for_are_looked_at_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """`due`: a chunk for whoever waits for chunks, the end of a slot for everybody, and never more than a few kept."""
    pair = Pair()
    pair.post(3 * CHUNK)
    pair.slots()
    pair.begin(KEY, data_of(3 * CHUNK))
    pair.begins()
    assert not pair.receiver.due(chunks=True)
    pair.chunk()
    assert pair.receiver.due(chunks=True) and not pair.receiver.due(chunks=False)
    pair.chunk()
    pair.chunk()
    assert pair.receiver.due(chunks=False)
    pair.receiver.events()
    assert not pair.receiver.due(chunks=True)
    monkeypatch.setattr("wire.slots.GATHERED_MAX", 2)
    pair.post(3 * CHUNK)
    pair.slots()
    pair.begin(OTHER, data_of(3 * CHUNK))
    pair.begins()
    pair.chunk()
    assert not pair.receiver.due(chunks=False)
    pair.chunk()
    assert pair.receiver.due(chunks=False)


def test_the_sender_hands_out_views_not_copies() -> None:
    pair = Pair()
    pair.post(2 * CHUNK)
    pair.slots()
    data = data_of(2 * CHUNK)
    pair.begin(KEY, data)
    chunk = pair.source.next_chunk()
    assert chunk is not None
    data[3] ^= 0xFF
    assert chunk.data[3] == data[3]


def test_one_slot_takes_one_type_after_another() -> None:  # ROUND-5
    for dtype in (DType.int64, DType.bf16, DType.fp32):
        pair = Pair({KEY: Expectation(dtype, (3, 2), 0, 6 * dtype.itemsize)})
        memory = memoryview(bytearray(b"\xff" * 64))
        for key in (KEY, OTHER):
            pair.expected[key] = pair.expected[KEY]
            pair.receiver.post(memory)
            pair.slots()
            array = (np.arange(6).reshape(3, 2) + len(key[4])).astype(dtype.numpy)
            pair.sender.begin(key, to_bytes(array), dtype=dtype, shape=(3, 2))
            pair.settle()
            (received,) = pair.outcome()
            assert isinstance(received, TensorReceived)
            assert np.array_equal(from_bytes(received.buffer, dtype, (3, 2)), array)


def test_a_keyed_slot_is_taken_first_and_by_its_key_only() -> None:
    pair = Pair()
    pair.post(CHUNK)
    pair.post(CHUNK, KEY)
    pair.slots()
    assert (pair.sender.free_slots(), pair.sender.free_slots(KEY), pair.sender.free_slots(OTHER)) == (1, 2, 1)
    assert pair.sender.free_slots(KEY, CHUNK + 1) == 0
    pair.begin(KEY, data_of(4))
    pair.begin(OTHER, data_of(4))
    begins = pair.sender.messages()
    assert [(b.slot, b.key) for b in begins] == [(1, KEY), (0, OTHER)]
    with pytest.raises(LocalProtocolError):
        pair.begin(KEY, data_of(4))
    # Unkeyed slots are used in the order of posting.
    for _ in range(2):
        pair = Pair()
        pair.post(CHUNK)
        pair.post(2 * CHUNK)
        pair.slots()
        pair.begin(KEY, data_of(4))
        assert pair.sender.messages()[0].slot == 0
    pair.begin(OTHER, data_of(4))
    assert pair.sender.messages()[0].slot == 1


def test_the_oldest_microbatch_goes_first_and_waits_for_nobody() -> None:
    pair = Pair()
    for _ in range(3):
        pair.post(2 * CHUNK)
    pair.slots()
    young = pair.begin((0, 7, 1), data_of(2 * CHUNK), order=9)
    old = pair.begin((0, 7, 2), data_of(2 * CHUNK), order=4, ready_bytes=CHUNK)
    pair.begin((0, 7, 3), data_of(2 * CHUNK), order=9)
    assert pair.source.order == 4
    seen = []
    for step in range(6):
        if step == 3:
            pair.sender.advance(old, 2 * CHUNK - 1)  # not yet a whole chunk
            assert pair.source.order == 9
        if step == 4:
            pair.sender.advance(old, 2 * CHUNK)
        chunk = pair.source.next_chunk()
        assert chunk is not None
        seen.append((chunk.slot, chunk.index))
    assert seen == [(1, 0), (0, 0), (0, 1), (2, 0), (1, 1), (2, 1)]
    assert pair.source.next_chunk() is None and pair.source.order == NO_ORDER and not pair.sender.has_chunk
    with pytest.raises(LocalProtocolError):
        pair.sender.advance(old, CHUNK)
    with pytest.raises(LocalProtocolError):
        pair.sender.advance(young, 2 * CHUNK + 1)
    with pytest.raises(LocalProtocolError):
        pair.sender.advance(3, 0)


def test_a_cancelled_tensor_never_arrives_even_if_its_buffer_is_used_again() -> None:
    pair = Pair()
    pair.post(2 * CHUNK)
    pair.slots()
    data = data_of(2 * CHUNK)
    transfer = pair.begin(KEY, data)
    pair.begins()
    assert pair.chunk()
    last = pair.source.next_chunk()  # the session holds the last chunk and has not sealed it
    assert last is not None and last.index == 1
    assert pair.sender.cancel(transfer) and not pair.sender.cancel(transfer)
    assert pair.ended() == [] and pair.sender.transfers == 1  # so the buffer is not the caller's yet
    assert pair.source.next_chunk() is None
    assert pair.ended() == [Code.CANCELLED] and pair.sender.transfers == 0 and pair.changes > 0
    # The chunk may still come before the Drop; it holds the right bytes, so either end is a true one.
    pair.begins()
    (dropped,) = pair.outcome()
    assert isinstance(dropped, TensorDropped) and dropped.code is Code.CANCELLED and dropped.key == KEY
    assert pair.sink.place(0, 1, CHUNK, 0).obj is not dropped.buffer.obj
    pair.sink.placed(0, 1)
    assert pair.receiver.events() == [] and KEY not in pair.delivered._by_step.get(7, ())


def test_a_cancelled_key_may_be_sent_again() -> None:
    pair = Pair()
    pair.post(CHUNK)
    pair.post(CHUNK)
    pair.slots()
    pair.sender.cancel(pair.begin(KEY, data_of(CHUNK)))
    pair.begin(KEY, data_of(CHUNK, 5))
    pair.settle()
    dropped, received = pair.outcome()
    assert isinstance(dropped, TensorDropped) and isinstance(received, TensorReceived) and received.buffer == data_of(CHUNK, 5)
    assert pair.ended() == [Code.CANCELLED, Code.OK]


def test_a_withdrawn_slot_keeps_its_buffer_until_the_chunk_under_way_is_through() -> None:
    pair = Pair()
    pair.post(2 * CHUNK)
    pair.slots()
    pair.begin(KEY, data_of(2 * CHUNK))
    pair.begins()
    pair.sink.place(0, 0, CHUNK, 0)
    assert pair.receiver.unpost(0) and not pair.receiver.unpost(0)
    assert pair.receiver.events() == [] and pair.receiver.open_slots == 0
    pair.sink.placed(0, 0)
    (dropped,) = pair.receiver.events()
    assert isinstance(dropped, TensorDropped) and dropped.code is Code.CANCELLED and pair.changes == 1
    pair.slots()
    assert pair.ended() == [Code.REFUSED]  # retryable: another slot will do


def test_an_unused_slot_is_withdrawn_at_once() -> None:
    pair = Pair()
    pair.post(CHUNK)
    pair.slots()
    assert pair.receiver.unpost(0)
    assert [type(e) for e in pair.receiver.events()] == [TensorDropped]
    pair.slots()
    assert pair.sender.free_slots() == 0 and pair.sender.events() == [SlotsChanged(), SlotsChanged()]
    with pytest.raises(LocalProtocolError):
        pair.receiver.unpost(1)


def test_a_key_is_delivered_once_whoever_sends_it() -> None:
    delivered = DeliveredKeys()
    pairs = [Pair(delivered=delivered) for _ in range(3)]
    for pair in pairs[:2]:
        pair.post(CHUNK)
        pair.slots()
        pair.begin(KEY, data_of(CHUNK))
        pair.begins()  # both were under way when the first became whole
    for pair in pairs[:2]:
        pair.settle()
    pairs[2].post(CHUNK)
    pairs[2].slots()
    pairs[2].begin(KEY, data_of(CHUNK))
    pairs[2].begins()
    pairs[2].slots()
    assert [pair.ended() for pair in pairs] == [[Code.OK], [Code.DUPLICATE], [Code.DUPLICATE]]
    assert pairs[2].source.next_chunk() is None  # told by its Begin, it sends nothing
    assert [type(pair.outcome()[0]) for pair in pairs] == [TensorReceived, TensorDropped, TensorDropped]


def test_a_step_that_is_over_is_stale() -> None:
    pair = Pair()
    pair.delivered.raise_watermark(8)
    pair.post(CHUNK)
    pair.slots()
    pair.begin(KEY, data_of(CHUNK))
    pair.expected.clear()  # the application does not know it any more
    pair.settle()
    assert pair.ended() == [Code.STALE]


@pytest.mark.parametrize("wrong", [{"shape": (4, 4)}, {"dtype": DType.int8}, {"codec": 2}])
def test_another_header_than_expected_burns_the_slot(wrong: dict[str, object]) -> None:
    pair = Pair()
    pair.post(CHUNK)
    pair.slots()
    pair.begin(KEY, data_of(CHUNK), **wrong)
    pair.settle()
    assert pair.ended() == [Code.EXPECTATION]
    (dropped,) = pair.outcome()
    assert isinstance(dropped, TensorDropped) and dropped.code is Code.EXPECTATION


@pytest.mark.parametrize("key", [OTHER, ("no step",), (0, "seven", b"", 0, 0)])
def test_an_unknown_key_burns_the_slot(key: tuple) -> None:
    pair = Pair()
    pair.post(CHUNK)
    pair.slots()
    pair.begin(key, data_of(CHUNK))
    del pair.expected[key]
    pair.settle()
    assert pair.ended() == [Code.EXPECTATION] and len(pair.delivered) == 0


def test_close_gives_every_buffer_back_once() -> None:
    pair = Pair()
    for _ in range(3):
        pair.post(2 * CHUNK)
    pair.slots()
    pair.begin(KEY, data_of(2 * CHUNK))
    pair.begins()
    pair.sink.place(0, 0, CHUNK, 0)
    pair.receiver.unpost(0)
    pair.source.next_chunk()
    for _ in range(2):
        pair.receiver.close(Code.SHUTDOWN)
        pair.sender.close(Code.SHUTDOWN)
    assert [(e.slot, e.code) for e in pair.outcome()] == [(0, Code.CANCELLED), (1, Code.SHUTDOWN), (2, Code.SHUTDOWN)]
    assert pair.ended() == [Code.SHUTDOWN]
    assert pair.sender.messages() == [] and pair.receiver.messages() == [] and pair.source.next_chunk() is None
    with pytest.raises(LocalProtocolError):
        pair.begin(KEY, b"")
    with pytest.raises(LocalProtocolError):
        pair.post(1)


def test_misuse_leaves_the_channel_as_it_was() -> None:
    pair = Pair()
    pair.post(CHUNK)
    pair.slots()
    pair.sender.events()
    whole = memoryview(data_of(2 * CHUNK))
    bad: list[tuple[tuple, memoryview, dict[str, object]]] = [
        ((1.5,), whole[:4], {}),
        ((b"x" * 64,), whole[:4], {}),
        (KEY, whole[:8:2], {}),
        (KEY, whole[:4], {"order": -1}),
        (KEY, whole[:4], {"order": NO_ORDER}),
        (KEY, whole[:4], {"tags": (1, 2, 3, 4, 5)}),
        (KEY, whole[:4], {"ready_bytes": 5}),
        (KEY, whole[:4], {"shape": (1,) * 9}),
        (KEY, whole, {}),
        (KEY, memoryview(bytes(11 * CHUNK)), {}),
    ]
    for key, data, how in bad:
        with pytest.raises(LocalProtocolError):
            pair.sender.begin(key, data, **{"dtype": DType.uint8, "shape": (len(data),), **how})
    readonly, too_large = memoryview(bytes(4)), memoryview(bytearray(10 * CHUNK + 1))
    for buffer, slot_key in ((readonly, None), (too_large, None), (whole[:8:2], None), (whole, (True,))):
        with pytest.raises(LocalProtocolError):
            pair.receiver.post(buffer, slot_key)
    assert pair.sender.free_slots() == 1 and pair.sender.messages() == [] and pair.sender.events() == []
    assert pair.receiver.open_slots == 1 and pair.receiver.messages() == [] and pair.receiver.post(whole) == 1
    pair.post(1)
    with pytest.raises(LocalProtocolError):
        pair.post(1)
