"""A tensor channel over several lanes and beyond its connections, by example (wire 10, 11)."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from wire.chunks import OutChunk
from wire.delivered import DeliveredKeys
from wire.errors import Code, LocalProtocolError, RemoteProtocolError
from wire.limits import DEFAULT_LIMITS
from wire.messages import Ask, Begin, Done, Drop, Have, Posted, Slot, decode, encode
from wire.sending import LaneSource, SendEnded, SenderChannel
from wire.slots import ChunkReady, LaneSink, ReceiverChannel, TensorDropped, TensorReceived
from wire.tensor import DType, Expectation

CHUNK = 16
LIMITS = dataclasses.replace(DEFAULT_LIMITS, chunk_bytes=CHUNK, tensor_max_bytes=10 * CHUNK, slots_open_max=3)
KEY = (0, 7, b"origin", 3, "forward")
OTHER = (0, 7, b"origin", 4, "forward")
DATA = bytes(range(1, 4 * CHUNK + 1))


class Pair:
    """A sender and a receiver with lanes; nothing moves unless a test says so."""

    def __init__(self) -> None:
        self.tokens = itertools.count(1)
        self.delivered = DeliveredKeys()
        self.new_receiver()
        self.sender = SenderChannel(lambda n: next(self.tokens).to_bytes(n, "big"), LIMITS)
        self.attach()

    def new_receiver(self) -> None:
        self.receiver = ReceiverChannel(lambda _key: Expectation(DType.uint8, (len(DATA),), 0, len(DATA)), self.delivered, LIMITS)

    def attach(self, lanes: int = 2) -> None:
        self.receiver.attach()
        self.sender.attach()
        self.sources: list[LaneSource] = [self.sender.lane(n) for n in range(lanes)]
        self.sinks: list[LaneSink] = [self.receiver.lane(n) for n in range(lanes)]

    def detach(self) -> None:
        self.sender.detach()
        self.receiver.detach()

    def send(self, key: tuple = KEY, data: bytes = DATA, **how: object) -> int:
        return self.sender.begin(key, memoryview(data), **{"dtype": DType.uint8, "shape": (len(data),), **how})

    def slots(self) -> list[object]:
        said = self.receiver.messages()
        for message in said:
            self.sender.on_message(decode(encode(message), type(message)))
        return said

    def begins(self) -> list[object]:
        said = self.sender.messages()
        for message in said:
            self.receiver.on_message(decode(encode(message), type(message)))
        return said

    def take(self, lane: int) -> OutChunk:
        chunk = self.sources[lane].next_chunk()
        assert chunk is not None
        return chunk

    def place(self, lane: int, chunk: OutChunk) -> memoryview:
        return self.sinks[lane].place(chunk.slot, chunk.index, len(chunk.data), chunk.flags)

    def carry(self, lane: int) -> int:
        chunk = self.take(lane)
        self.place(lane, chunk)[:] = chunk.data
        self.sinks[lane].placed(chunk.slot, chunk.index)
        return chunk.index

    def settle(self) -> None:
        for _ in range(3):
            self.slots()
            self.begins()
            while self.sender.has_chunk:
                self.carry(0)

    def ended(self) -> list[tuple[int, Code]]:
        for source in self.sources:
            source.next_chunk()
        return [(event.transfer, event.code) for event in self.sender.events() if isinstance(event, SendEnded)]

    def outcome(self) -> list[object]:
        return [event for event in self.receiver.events() if not isinstance(event, ChunkReady)]


def begun(slots: int = 1) -> Pair:
    pair = Pair()
    for _ in range(slots):
        pair.receiver.post(memoryview(bytearray(len(DATA))))
    pair.slots()
    pair.send()
    pair.begins()
    return pair


def test_one_tensor_uses_all_lanes_and_the_faster_one_carries_more() -> None:
    pair = begun()
    assert [pair.carry(lane) for lane in (0, 1, 1, 1)] == [0, 1, 2, 3]
    (received,) = pair.outcome()
    assert isinstance(received, TensorReceived) and received.buffer == DATA
    pair.slots()
    assert pair.ended() == [(0, Code.OK)] and pair.sender.resent_chunks == 0 and pair.receiver.duplicate_bytes == 0


def test_what_a_lost_lane_carried_is_asked_for_and_only_what_is_missing_goes_again_first() -> None:
    pair = begun()
    assert pair.carry(1) == 0  # arrived over the lane that will be lost
    pair.take(1)  # did not
    pair.take(1)
    assert pair.sender.in_doubt(1) and not pair.sender.in_doubt(0)
    pair.sender.lane_lost(1)
    pair.sender.lane_lost(1)
    assert not pair.sender.in_doubt(1) and pair.sources[1].next_chunk() is None
    assert pair.carry(0) == 3 and not pair.sender.has_chunk  # 1 and 2 wait for the answer
    assert pair.begins() == [Ask(1, (0,))]
    assert pair.slots() == [Have(0, (1).to_bytes(8, "big"), b"\x09")]
    assert [pair.carry(0), pair.carry(0)] == [1, 2] and pair.sender.resent_chunks == 2
    pair.slots()
    assert pair.ended() == [(0, Code.OK)] and pair.receiver.duplicate_bytes == 0
    assert isinstance(pair.outcome()[0], TensorReceived)


def test_two_lanes_lost_before_the_first_answer() -> None:
    pair = begun()
    pair.take(0)
    pair.take(1)
    pair.sender.lane_lost(0)
    pair.sender.lane_lost(1)
    pair.begins()
    one, two = pair.receiver.messages()
    pair.sender.on_message(one)
    source = pair.sender.lane(2)
    chunk = source.next_chunk()
    assert chunk is not None and chunk.index == 0
    pair.sender.on_message(two)
    chunk = source.next_chunk()
    assert chunk is not None and chunk.index == 1


def test_nothing_in_doubt_nothing_asked() -> None:
    pair = begun()
    pair.sender.lane_lost(1)
    assert pair.sender.messages() == []


def test_an_index_under_way_twice_is_taken_over_by_the_newer() -> None:
    pair = begun()
    diverted: list[memoryview] = []
    pair.sinks[0].divert = diverted.append
    chunk = pair.take(0)
    old = pair.place(0, chunk)
    old[:4] = chunk.data[:4]
    new = pair.place(1, chunk)
    assert len(diverted) == 1 and len(diverted[0]) == CHUNK and diverted[0].obj is not old.obj
    assert new.obj is old.obj
    diverted[0][:] = b"\xff" * CHUNK  # what the older session still writes
    pair.sinks[0].placed(chunk.slot, chunk.index)  # counts for nothing
    assert pair.receiver.events() == []
    new[:] = chunk.data
    pair.sinks[1].placed(chunk.slot, chunk.index)
    (ready,) = pair.receiver.events()
    assert isinstance(ready, ChunkReady) and ready.index == 0 and old == DATA[:CHUNK]
    assert pair.receiver.duplicate_bytes == CHUNK


def test_a_lane_that_cannot_be_diverted_keeps_its_place() -> None:
    pair = begun()
    chunk = pair.take(0)
    pair.place(0, chunk)
    with pytest.raises(LocalProtocolError):
        pair.place(1, chunk)
    pair.sinks[0].placed(chunk.slot, chunk.index)
    assert len(pair.receiver.events()) == 1


def test_a_withdrawn_slot_waits_for_every_lane_that_writes_into_it() -> None:
    pair = begun()
    chunks = [pair.take(lane) for lane in (0, 1)]
    for lane in (0, 1):
        pair.place(lane, chunks[lane])
    pair.receiver.unpost(0)
    pair.sinks[0].placed(0, chunks[0].index)
    assert pair.receiver.events() == []
    pair.receiver.lane_lost(1)
    assert [type(event) for event in pair.receiver.events()] == [TensorDropped]
    pair.slots()
    assert not any(isinstance(event, SendEnded) for event in pair.sender.events())
    assert pair.sources[0].next_chunk() is None
    assert not any(isinstance(event, SendEnded) for event in pair.sender.events())  # lane 1 may still be sealing
    pair.sender.lane_lost(1)
    assert pair.sender.events() == [SendEnded(0, KEY, Code.REFUSED)]


def test_after_a_reconnect_only_the_missing_chunks_go() -> None:
    pair = begun(slots=2)
    pair.carry(0)
    pair.take(1)
    pair.detach()
    assert pair.sender.free_slots() == 0 and not pair.sender.has_chunk and pair.sender.transfers == 1
    pair.attach()
    assert pair.slots() == [Slot(0, KEY, 64, (1).to_bytes(8, "big"), b"\x01"), Slot(1, None, 64), Posted(2)]
    assert pair.sender.messages() == [] and pair.sender.free_slots() == 1
    assert [pair.carry(0) for _ in range(3)] == [1, 2, 3] and pair.sender.resent_chunks == 1
    pair.slots()
    assert pair.ended() == [(0, Code.OK)] and isinstance(pair.outcome()[0], TensorReceived)


def test_a_question_that_was_lost_with_its_connection_is_not_waited_for() -> None:
    pair = begun()
    pair.take(0)
    pair.take(1)
    pair.sender.lane_lost(1)  # its Ask is lost
    pair.detach()
    assert not pair.sender.in_doubt(0)
    pair.attach()
    assert not pair.sender.in_doubt(0) and not pair.sender.in_doubt(1)
    pair.slots()
    assert [pair.take(0).index, pair.take(1).index, pair.take(1).index] == [0, 1, 2]
    pair.sender.lane_lost(1)
    assert pair.begins() == [Ask(1, (0,))]
    pair.slots()
    assert [pair.carry(0) for _ in range(3)] == [1, 2, 3]  # what that lane had, and not what the lost question was about


def test_an_honest_sender_on_a_bad_network_is_not_excessive() -> None:
    """Each cut costs a chunk under way; twenty of them are more than twice the slot."""
    pair = begun()
    for _ in range(20):
        pair.place(0, pair.take(0))
        pair.detach()
        pair.attach()
        pair.slots()
    for number in range(2, 22):
        source, sink = pair.sender.lane(number), pair.receiver.lane(number)
        chunk = source.next_chunk()
        assert chunk is not None
        sink.place(chunk.slot, chunk.index, CHUNK, 0)
        pair.sender.lane_lost(number)
        pair.begins()
        pair.slots()
    pair.settle()
    assert pair.ended() == [(0, Code.OK)] and pair.receiver.duplicate_bytes == 40 * CHUNK and pair.sender.resent_chunks == 40


def test_a_begin_that_was_lost_is_said_again_with_another_token_and_from_zero() -> None:
    pair = Pair()
    pair.receiver.post(memoryview(bytearray(len(DATA))))
    pair.slots()
    pair.send()
    pair.carry(0)  # came before its Begin, which never comes
    pair.detach()
    pair.attach()
    assert pair.slots() == [Slot(0, None, 64), Posted(1)]
    (begin,) = pair.begins()
    assert isinstance(begin, Begin) and begin.token == (2).to_bytes(8, "big")
    with pytest.raises(RemoteProtocolError):  # chunk 0 counts as never sent under this token
        pair.sender.on_message(Done(0, KEY, Code.OK))
    assert [pair.carry(0) for _ in range(4)] == [0, 1, 2, 3]
    pair.slots()
    assert pair.ended() == [(0, Code.OK)]


def test_a_done_that_was_lost_is_repeated() -> None:
    pair = begun()
    for _ in range(4):
        pair.carry(0)
    assert pair.receiver.messages() == [Done(0, KEY, 0)]  # and lost
    for _ in range(2):
        pair.detach()
        pair.attach()
        assert pair.slots() == [Done(0, KEY, 0), Posted(1)]
    assert pair.ended() == [(0, Code.OK)]


def test_a_drop_that_was_lost_is_said_again() -> None:
    pair = begun(slots=2)
    pair.carry(0)
    pair.detach()
    assert pair.sender.cancel(0) and pair.sender.messages() == []
    pair.attach()
    pair.slots()
    assert pair.begins() == [Drop(0, KEY, Code.CANCELLED)]
    assert [type(event) for event in pair.outcome()] == [TensorDropped] and pair.receiver.open_slots == 1


def test_a_slot_withdrawn_meanwhile_is_refused_and_the_tensor_goes_elsewhere() -> None:
    pair = begun()
    pair.detach()
    pair.receiver.unpost(0)
    assert pair.receiver.post(memoryview(bytearray(len(DATA)))) == 1
    assert pair.receiver.messages() == []
    pair.attach()
    assert pair.slots() == [Slot(1, None, 64), Posted(2)]
    assert pair.ended() == [(0, Code.REFUSED)]
    pair.send(moved=True)
    pair.settle()
    assert pair.ended() == [(1, Code.OK)]


@pytest.mark.parametrize("moved, code", [(True, Code.OK), (False, Code.DUPLICATE)])
def test_a_moved_tensor_that_was_delivered_has_arrived(moved: bool, code: Code) -> None:
    pair = Pair()
    pair.delivered.deliver(KEY)
    pair.receiver.post(memoryview(bytearray(len(DATA))))
    pair.slots()
    pair.send(moved=moved)
    pair.settle()
    assert pair.ended() == [(0, code)]


def test_a_new_receiver_has_other_slots_under_the_old_numbers() -> None:
    pair = begun()
    pair.carry(0)
    pair.detach()
    pair.receiver.close(Code.SHUTDOWN)
    pair.new_receiver()
    pair.receiver.post(memoryview(bytearray(len(DATA))), OTHER)
    pair.attach()
    pair.slots()
    assert pair.ended() == [(0, Code.REFUSED)] and pair.sender.free_slots(OTHER) == 1
    assert pair.sender.begin(OTHER, memoryview(DATA), dtype=DType.uint8, shape=(len(DATA),)) == 1
    pair.settle()
    assert pair.ended() == [(1, Code.OK)]


def test_misuse_of_lanes_and_attach() -> None:
    pair = Pair()
    for half in (pair.sender, pair.receiver):
        with pytest.raises(LocalProtocolError):
            half.attach()
        with pytest.raises(LocalProtocolError):
            half.lane(1)
        half.lane_lost(7)
        half.close(Code.SHUTDOWN)
        with pytest.raises(LocalProtocolError):
            half.attach()
        with pytest.raises(LocalProtocolError):
            half.lane(5)
    pair = begun()
    pair.receiver.lane_lost(0)
    with pytest.raises(LocalProtocolError):
        pair.sinks[0].place(0, 0, CHUNK, 0)


def test_a_lost_lane_is_asked_about_in_the_order_of_slots_whatever_the_order_of_sends() -> None:
    """An Ask that names slots in another order is a violation, and slots posted for a key are taken in the order of the sends."""
    pair = Pair()
    for key in (KEY, OTHER):
        pair.receiver.post(memoryview(bytearray(len(DATA))), key)
    pair.settle()
    pair.send(OTHER)
    pair.send(KEY)
    pair.begins()
    for _ in range(8):
        pair.carry(1)
    pair.receiver.lane_lost(1)
    pair.sender.lane_lost(1)
    assert pair.begins() == [Ask(1, (0, 1))]
