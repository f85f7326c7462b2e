"""The links of the channel machine (test_slots_stateful.py): both halves of a channel, its lanes and all that is under way.

Every other chunk that a sender hands out goes packed, so that the same chunk is plain on one lane and packed on another.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque

from wire.chunks import PACKED_CHUNK, OutChunk
from wire.delivered import DeliveredKeys
from wire.limits import DEFAULT_LIMITS
from wire.messages import Ask, Begin, Done, Drop, Have, Posted, Slot, Unslot
from wire.packing import Packing
from wire.planes import FEATURE, Planes
from wire.sending import LaneSource, SenderChannel
from wire.slots import LaneSink, ReceiverChannel
from wire.tensor import DType, Expectation

CHUNK = 64  # a packed one has 14 bytes of head and frame beside its low bytes
LIMITS = dataclasses.replace(DEFAULT_LIMITS, chunk_bytes=CHUNK, tensor_max_bytes=4 * CHUNK, slots_open_max=4)
SENT, GIVEN_BACK = 0xDD, 0xEE  # what the owners write into buffers that are theirs again; never part of a tensor
POISON = 0xDB  # what a session leaves in a place that it has not filled


def size_of(key: tuple[int, ...]) -> int:
    return (41, 104, 64, 250, 256, 0)[(key[1] * 3 + key[2]) % 6]


def data_of(key: tuple[int, ...]) -> bytes:
    # High bytes of a chunk are all the same, so that it shrinks; low ones tell where they belong.
    return bytes((key[1] * 31 + key[2] * 17 + (i // CHUNK if i % 2 else i // 2)) % 200 for i in range(size_of(key)))


class EveryOther(Packing):
    """Packs without regard to rates."""

    __slots__ = ("count", "planes")

    def __init__(self) -> None:
        super().__init__(lambda: 0.0, LIMITS)
        self.count = 0
        self.planes = Planes(CHUNK)

    def pack(self, begin: Begin, chunk: OutChunk, lane: LaneSource) -> OutChunk:
        self.count += 1
        lane.scratch = lane.scratch or memoryview(bytearray(CHUNK))
        packed = self.planes.pack(chunk.data, lane.scratch) if self.count % 2 else None
        return chunk if packed is None else dataclasses.replace(chunk, data=packed, flags=PACKED_CHUNK)


def expect(key: tuple[int, ...]) -> Expectation | None:
    # Step 4 is unknown to the application.
    return None if key[1] == 4 else Expectation(DType.uint8, (size_of(key),), 0, size_of(key))


class Lane:
    """One lane of a channel: the session's ends and the chunks between them."""

    def __init__(self, number: int, source: LaneSource, sink: LaneSink) -> None:
        self.number = number
        self.source: LaneSource | None = source  # None: the sender has noticed that the lane is lost
        self.sink: LaneSink | None = sink
        sink.divert = self.divert
        self.sealing: OutChunk | None = None  # the chunk that the sender's session has taken
        self.sealed = False  # and read
        self.wire: list[tuple[int, int, bytes, int]] = []  # slot, index, data, flags
        self.filling: tuple[int, int, bytes, int] | None = None  # placed by CHUNK, DATA to come
        self.place = memoryview(b"")
        self.taken_over = False  # another lane carries the chunk; what this one still writes belongs nowhere

    def divert(self, view: memoryview) -> None:
        assert self.filling is not None and len(view) >= len(self.place)
        self.place = view[: len(self.place)]

    def receiving_ends(self) -> None:
        """The receiver's session ends; what it was writing is left half-way."""
        if self.filling is not None:
            self.place[:] = bytes([POISON]) * len(self.place)
        self.sink = self.filling = None
        self.wire.clear()


class Link:
    """One channel: both halves and all that is under way between them."""

    def __init__(self, delivered: DeliveredKeys) -> None:
        self.delivered = delivered
        self.tokens = itertools.count()
        self.new_receiver()
        self.new_sender()
        self.slots: dict[int, bytearray] = {}  # buffers that the receiver's application has posted
        self.transfers: dict[int, tuple[tuple[int, ...], bytearray, set[int]]] = {}
        self.announced: dict[int, list[tuple[int, int, tuple[int, ...]]]] = {}
        self.numbers = itertools.count()
        self.attach()

    def new_receiver(self) -> None:
        self.receiver = ReceiverChannel(expect, self.delivered, LIMITS, features=(FEATURE,))
        self.doubled: set[tuple[int, int]] = set()  # once in the life of a slot: that much more than honest is allowed

    def new_sender(self) -> None:
        self.sender = SenderChannel(lambda n: next(self.tokens).to_bytes(n, "big"), LIMITS, packing=EveryOther())

    def attach(self) -> None:
        self.attached = True
        self.to_receiver: deque[Begin | Drop | Ask] = deque()
        self.to_sender: deque[Slot | Unslot | Done | Have | Posted] = deque()
        self.lanes: list[Lane] = []
        self.receiver.attach()
        self.sender.attach()
        self.open_lane()

    def open_lane(self) -> None:
        number = next(self.numbers)
        self.lanes.append(Lane(number, self.sender.lane(number), self.receiver.lane(number)))

    def control_lost(self) -> None:
        if self.attached:
            self.attached = False
            for lane in self.lanes:
                lane.receiving_ends()
            self.to_receiver.clear()
            self.to_sender.clear()
            self.lanes.clear()
            self.sender.detach()
            self.receiver.detach()

    def sender_notices(self, lane: Lane) -> None:
        if lane.source is not None:
            lane.source = lane.sealing = None
            self.sender.lane_lost(lane.number)
            assert not self.sender.in_doubt(lane.number)

    def receiver_notices(self, lane: Lane) -> None:
        lane.receiving_ends()
        self.receiver.lane_lost(lane.number)
        if lane.source is None and lane in self.lanes:
            self.lanes.remove(lane)
