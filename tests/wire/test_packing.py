"""Packed chunks between the two halves of a channel: what is packed, where it lies, and what a hostile one gets (wire 11, 12)."""

from __future__ import annotations

import dataclasses
import itertools
import tracemalloc

import numpy as np
import pytest

from tests.wire.test_compression import Clock
from tests.wire.test_planes import bomb, chunk_of, frame, gaussian
from wire.chunks import PACKED_CHUNK, PLAIN_CHUNK, OutChunk
from wire.delivered import DeliveredKeys
from wire.errors import Code, RemoteProtocolError
from wire.limits import DEFAULT_LIMITS
from wire.messages import Begin
from wire.packing import Packing, PackingStats
from wire.planes import FEATURE, HEAD, HEAD_BYTES, Planes, raw_size
from wire.sending import LaneSource, SendEnded, SenderChannel
from wire.slots import ChunkReady, LaneSink, ReceiverChannel, TensorDropped, TensorReceived
from wire.tensor import BF16, INT8_BLOCKS, PLAIN, DType, Expectation

CHUNK = 4096
SIZE = 5 * CHUNK // 2  # three chunks, the last short
LIMITS = dataclasses.replace(DEFAULT_LIMITS, chunk_bytes=CHUNK, tensor_max_bytes=10 * CHUNK)
KEY = (0, 7)
DATA = gaussian(SIZE)
MB = 1e6


def packed(index: int, data: memoryview = DATA) -> memoryview:
    result = Planes(CHUNK).pack(data[index * CHUNK : (index + 1) * CHUNK])
    assert result is not None
    return result


class Pair:
    """A sender that packs and a receiver that has posted slot 0; nothing moves unless a test says so."""

    def __init__(self, features: tuple[str, ...] = (FEATURE,), rate: float = MB, listed: tuple[str, ...] = (FEATURE,)) -> None:
        tokens = itertools.count(1)
        self.packing = Packing(Clock(400 * MB), LIMITS)
        self.packing.meets(features)
        self.packing.rate(rate)
        self.sender = SenderChannel(lambda n: next(tokens).to_bytes(n, "big"), LIMITS, packing=self.packing)
        self.expected = Expectation(DType.bf16, (SIZE // 2,), PLAIN, SIZE)
        self.receiver = ReceiverChannel(lambda _key: self.expected, DeliveredKeys(), LIMITS, features=listed)
        self.buffer = bytearray(3 * CHUNK)
        self.receiver.post(memoryview(self.buffer))
        self.attach()

    def attach(self) -> None:
        self.receiver.attach()
        self.sender.attach()
        self.sources: list[LaneSource] = [self.sender.lane(n) for n in range(2)]
        self.sinks: list[LaneSink] = [self.receiver.lane(n) for n in range(2)]
        for sink in self.sinks:
            sink.divert = self.diverted

    def diverted(self, view: memoryview) -> None:
        raise AssertionError("scratch need not be diverted")

    def begin(self, data: memoryview = DATA, dtype: DType = DType.bf16, codec: int = PLAIN) -> None:
        self.slots()
        self.sender.begin(KEY, data, dtype=dtype, shape=(len(data) // dtype.itemsize,), codec=codec)

    def slots(self) -> None:
        for message in self.receiver.messages():
            self.sender.on_message(message)

    def begins(self) -> None:
        for message in self.sender.messages():
            self.receiver.on_message(message)

    def take(self, lane: int = 0) -> OutChunk:
        chunk = self.sources[lane].next_chunk()
        assert chunk is not None
        return chunk

    def place(self, chunk: OutChunk, lane: int = 0) -> memoryview:
        place = self.sinks[lane].place(chunk.slot, chunk.index, len(chunk.data), chunk.flags)
        assert len(place) == len(chunk.data)
        return place

    def arrives(self, index: int, data: memoryview | bytes, flags: int = PACKED_CHUNK, lane: int = 0) -> None:
        """A chunk of a sender of any kind."""
        self.place(OutChunk(0, index, memoryview(data), flags), lane)[:] = data
        self.sinks[lane].placed(0, index)

    def carry(self, lane: int = 0) -> OutChunk:
        chunk = self.take(lane)
        self.arrives(chunk.index, chunk.data, chunk.flags, lane)
        return chunk

    def delivered(self) -> bool:
        received = [event for event in self.receiver.events() if isinstance(event, TensorReceived)]
        return len(received) == 1 and received[0].buffer == DATA


def begun() -> Pair:
    """The receiver has heard of the tensor; its chunks are up to the test."""
    pair = Pair()
    pair.begin()
    pair.begins()
    return pair


# -- what honest halves do


@pytest.mark.parametrize("begin_first", [True, False])
def test_chunks_travel_packed_and_the_tensor_is_exact(begin_first: bool) -> None:
    pair = Pair()
    pair.begin()
    if begin_first:
        pair.begins()
    chunks = [pair.carry() for _ in range(3)]
    assert [chunk.flags for chunk in chunks] == [PACKED_CHUNK] * 3
    assert pair.delivered() is begin_first
    pair.begins()
    assert begin_first or pair.delivered()
    stats = pair.packing.stats()
    assert (stats.raw_bytes, stats.packed_chunks, stats.on) == (SIZE, 3, True)
    assert stats.wire_bytes == sum(len(packed(index)) for index in range(3)) < SIZE / 1.3


@pytest.mark.parametrize(
    "dtype, codec, packs",
    [
        (DType.bf16, PLAIN, True),
        (DType.fp32, BF16, True),
        (DType.uint16, PLAIN, False),
        (DType.fp16, PLAIN, False),
        (DType.fp32, PLAIN, False),
        (DType.bf16, INT8_BLOCKS, False),
    ],
)
def test_only_what_is_bf16_is_packed(dtype: DType, codec: int, packs: bool) -> None:
    pair = Pair()
    pair.begin(dtype=dtype, codec=codec)
    chunk = pair.take()
    assert (chunk.flags == PACKED_CHUNK) is packs
    assert packs or (chunk.data == DATA[:CHUNK] and chunk.data.obj is DATA.obj), "no copy"


def test_not_for_a_receiver_that_did_not_list_it_nor_on_a_fast_link_nor_without_gain() -> None:
    for pair in (Pair(features=("other/1",)), Pair(rate=100 * MB)):
        pair.begin()
        assert [pair.carry().flags for _ in range(3)] == [PLAIN_CHUNK] * 3
        assert pair.packing.stats() == PackingStats(SIZE, SIZE, 0, False)
    pair = Pair()
    pair.begin(memoryview(np.random.default_rng(1).bytes(SIZE)))
    assert [pair.take().flags for _ in range(3)] == [PLAIN_CHUNK] * 3


def test_an_odd_length_goes_plain_at_its_end_only() -> None:
    pair = Pair()
    pair.begin(DATA[: CHUNK + 101])
    assert [pair.take().flags for _ in range(2)] == [PACKED_CHUNK, PLAIN_CHUNK]


def test_each_lane_has_its_own_memory() -> None:
    """The chunk of one lane must not change while another takes its own."""
    pair = begun()
    first = pair.take(0)
    before = bytes(first.data)
    second = pair.take(1)
    assert bytes(first.data) == before == packed(0) and second.data == packed(1)


def test_the_buffer_is_kept_until_the_lane_has_read_its_chunk_and_its_answer() -> None:
    pair = begun()
    pair.take()
    pair.sender.cancel(0)
    assert not any(isinstance(event, SendEnded) for event in pair.sender.events())
    assert pair.sources[0].next_chunk() is None
    assert any(isinstance(event, SendEnded) for event in pair.sender.events())


def test_a_chunk_is_announced_when_it_is_unpacked_and_not_before() -> None:
    pair = begun()
    chunk = pair.take()
    pair.place(chunk)[:] = chunk.data
    assert pair.receiver.events() == [] and not any(pair.buffer), "nothing of it is in the slot"
    pair.sinks[0].placed(0, 0)
    (ready,) = pair.receiver.events()
    assert isinstance(ready, ChunkReady) and (ready.start, ready.end) == (0, CHUNK) and pair.buffer[:CHUNK] == DATA[:CHUNK]


@pytest.mark.parametrize("first, then", [(1, 1), (1, 0), (0, 1)], ids=["packed both", "packed, plain", "plain, packed"])
def test_another_lane_takes_a_chunk_over_in_either_form(first: int, then: int) -> None:
    pair = begun()
    forms = {PACKED_CHUNK: packed(0), PLAIN_CHUNK: DATA[:CHUNK]}
    diverted: list[memoryview] = []
    pair.sinks[0].divert = diverted.append
    older = pair.place(OutChunk(0, 0, forms[first], first), 0)
    newer = pair.place(OutChunk(0, 0, forms[then], then), 1)
    assert [len(view) for view in diverted] == ([] if first else [CHUNK]), "only what is written in the slot"
    newer[:] = forms[then]
    for view in diverted or [older]:
        view[:] = b"\xff" * len(view)
    pair.sinks[1].placed(0, 0)
    pair.sinks[0].placed(0, 0)
    assert pair.buffer[:CHUNK] == DATA[:CHUNK] and len(pair.receiver.events()) == 1
    assert pair.receiver.duplicate_bytes == len(forms[first])


def test_a_chunk_that_comes_again_in_another_form_changes_nothing() -> None:
    pair = begun()
    pair.arrives(0, packed(0))
    pair.arrives(0, DATA[CHUNK : 2 * CHUNK], PLAIN_CHUNK)
    pair.arrives(0, packed(1), lane=1)
    assert pair.buffer[:CHUNK] == DATA[:CHUNK] and len(pair.receiver.events()) == 1


def test_what_a_lost_lane_carried_packed_is_asked_for_and_sent_again() -> None:
    pair = begun()
    chunk = pair.take(0)
    pair.place(chunk, 0)
    pair.receiver.lane_lost(0)
    pair.sender.lane_lost(0)
    pair.begins()
    pair.slots()
    again = [pair.carry(1) for _ in range(3)]
    assert [chunk.index for chunk in again] == [0, 1, 2] and again[0].flags == PACKED_CHUNK and pair.delivered()
    assert pair.packing.stats().raw_bytes == SIZE + CHUNK, "what is sent again counts again"


def test_after_a_reconnect_the_rest_may_go_in_another_form() -> None:
    pair = begun()
    pair.carry()
    pair.take()
    pair.sender.detach()
    pair.receiver.detach()
    pair.packing.meets(())
    pair.attach()
    pair.slots()
    assert [(chunk.index, chunk.flags) for chunk in (pair.carry(), pair.carry())] == [(1, PLAIN_CHUNK), (2, PLAIN_CHUNK)]
    assert pair.delivered()


def test_a_slot_that_is_withdrawn_is_given_back_without_unpacking() -> None:
    pair = begun()
    place = pair.place(OutChunk(0, 0, packed(0), PACKED_CHUNK))
    pair.receiver.unpost(0)
    assert pair.receiver.events() == []
    place[:] = b"\xff" * len(place)  # not even a violation any more
    pair.sinks[0].placed(0, 0)
    (dropped,) = pair.receiver.events()
    assert isinstance(dropped, TensorDropped) and not any(pair.buffer)


# -- what hostile senders get


def test_a_packed_chunk_that_was_not_agreed_on_is_a_violation() -> None:
    for listed, flags in (((), PACKED_CHUNK), ((FEATURE,), 2), ((FEATURE,), 3), ((FEATURE,), 1 << 31)):
        pair = Pair(listed=listed)
        with pytest.raises(RemoteProtocolError, match="agreed"):
            pair.sinks[0].place(0, 0, 1000, flags)
        assert pair.sinks[0].place(0, 0, CHUNK, PLAIN_CHUNK), "the control"


@pytest.mark.parametrize(
    "index, length",
    [
        (0, CHUNK),
        (0, CHUNK + 1),
        (0, CHUNK * 19 // 20 + 1),  # shrinks by less than 5 %
        (2, CHUNK // 2),  # the last one has that much plain
        (3, 100),  # behind the tensor
        (2**32 - 1, 100),
        (0, 0),
    ],
)
def test_a_length_that_is_not_less_than_the_plain_one_is_a_violation_before_a_byte_came(index: int, length: int) -> None:
    pair = begun()
    with pytest.raises(RemoteProtocolError) as caught:
        pair.sinks[0].place(0, index, length, PACKED_CHUNK)
    assert caught.value.code is Code.PROTOCOL
    for lane, index, most in ((0, 0, CHUNK * 19 // 20), (1, 2, CHUNK // 2 * 19 // 20)):
        assert pair.sinks[lane].place(0, index, most, PACKED_CHUNK), "the controls"


def good(index: int = 0) -> bytes:
    return bytes(packed(index))


PLANE = HEAD.unpack_from(good())[0]
HOSTILE = {
    "truncated plane": HEAD.pack(PLANE - 7) + good()[HEAD_BYTES : HEAD_BYTES + PLANE - 7] + good()[HEAD_BYTES + PLANE :],
    "truncated chunk": good()[:-2],
    "plane_len too large": HEAD.pack(2**32 - 1) + good()[HEAD_BYTES:],
    "plane_len is all": HEAD.pack(len(good()) - HEAD_BYTES) + good()[HEAD_BYTES:],
    "plane_len 0": HEAD.pack(0) + good()[HEAD_BYTES:],
    "no head": b"\x00\x00",
    "bomb": chunk_of(bomb(CHUNK // 2), CHUNK // 2),
    "bomb of 2 GiB": chunk_of(bomb(1 << 31), CHUNK // 2),
    "two frames": chunk_of(frame(bytes(CHUNK // 2)) + frame(bytes(CHUNK // 2)), CHUNK // 2),
    "longer than a chunk": chunk_of(frame(bytes(CHUNK // 2 + 1)), CHUNK // 2 + 1),
    "shorter than the chunk": good(2),
    "damaged": good()[: HEAD_BYTES + 5] + bytes(PLANE - 5) + good()[HEAD_BYTES + PLANE :],
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("begin_first", [True, False])
def test_what_does_not_unpack_to_the_chunk_is_a_violation_that_names_it(name: str, begin_first: bool) -> None:
    pair = Pair()
    pair.begin()
    if begin_first:
        pair.begins()
    elif name == "shorter than the chunk":
        pair.arrives(1, packed(1))  # what lies behind it has come
    with pytest.raises(RemoteProtocolError) as caught:
        pair.arrives(0, HOSTILE[name])
    assert caught.value.code is Code.PROTOCOL and "slot 0, chunk 0" in str(caught.value.detail)
    assert not any(isinstance(event, ChunkReady) and event.index == 0 for event in pair.receiver.events())
    assert not any(pair.buffer[2 * CHUNK :]), "nothing was written behind it"
    pair.receiver.close(Code.PROTOCOL)
    assert [event.buffer.obj for event in pair.receiver.events() if isinstance(event, TensorDropped)] == [pair.buffer]


def test_a_bomb_takes_no_memory() -> None:
    tracemalloc.start()
    try:
        for claimed in (CHUNK // 2, 1 << 20, 1 << 31, 1 << 62):
            pair = begun()
            with pytest.raises(RemoteProtocolError):
                pair.arrives(0, chunk_of(bomb(claimed), CHUNK // 2))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 256 << 10


def test_a_lane_has_one_scratch_no_larger_than_a_chunk() -> None:
    pair = begun()
    places = []
    for index in range(3):
        places.append(pair.place(OutChunk(0, index, packed(index), PACKED_CHUNK)))
        places[-1][:] = packed(index)
        pair.sinks[0].placed(0, index)
    assert len({id(place.obj) for place in places}) == 1
    assert len(begun().sinks[1].place(0, 0, CHUNK * 19 // 20, PACKED_CHUNK).obj) <= CHUNK  # type: ignore[arg-type]  # a bytearray


def test_many_chunk_streams_with_a_byte_each_hold_no_memory() -> None:
    receiver = ReceiverChannel(lambda _key: None, DeliveredKeys(), features=(FEATURE,))
    for _ in range(4):
        receiver.post(memoryview(bytearray(1 << 20)))
    receiver.attach()

    def attack(size: int) -> int:
        lanes = [receiver.lane(number + size) for number in range(256)]
        tracemalloc.start()
        try:
            for at, lane in enumerate(lanes):
                lane.place(at % 4, at // 4 % 4, size, PACKED_CHUNK)
            return tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()

    assert attack(1) < 200 << 10
    with pytest.raises(RemoteProtocolError) as caught:
        attack(200 << 10)
    assert caught.value.code is Code.EXCESSIVE


def test_a_begin_that_contradicts_a_packed_chunk_under_way_is_found_out_at_its_end() -> None:
    """Two tensors of one slot: the chunk that came first was of a longer one than Begin says."""
    pair = Pair()
    place = pair.place(OutChunk(0, 2, packed(0), PACKED_CHUNK))  # full, where the last one of `SIZE` is short
    place[:] = packed(0)
    pair.begin()
    pair.begins()
    with pytest.raises(RemoteProtocolError, match="slot 0, chunk 2"):
        pair.sinks[0].placed(0, 2)


def test_a_begin_that_contradicts_what_was_unpacked_is_a_violation() -> None:
    pair = Pair()
    pair.arrives(2, packed(0))
    with pytest.raises(RemoteProtocolError):
        pair.receiver.on_message(Begin(0, KEY, 0, DType.bf16, (SIZE // 2,), PLAIN, SIZE, bytes(8)))


def test_sizes_that_the_tests_rely_on() -> None:
    assert raw_size(packed(0), CHUNK) == CHUNK and raw_size(packed(2), CHUNK) == CHUNK // 2
