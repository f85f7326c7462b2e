"""The receiving half of a tensor channel under a hostile sender: chunks plain and packed, in any order, on two lanes, with messages.

An input is a list of steps: a chunk begins on a lane, bytes of it come, a Begin, a Drop, an Ask, a lane is lost, a slot is withdrawn.
What must hold whatever comes: nothing is written outside the slots that are open, what was announced never changes, and each buffer
comes back exactly once.
"""

from __future__ import annotations

import struct
from dataclasses import replace

from tests.fuzz.engine import Outcome, Target
from tests.wire.test_planes import bomb, chunk_of, frame
from wire.chunks import PACKED_CHUNK
from wire.delivered import DeliveredKeys
from wire.errors import Code, RemoteProtocolError
from wire.limits import DEFAULT_LIMITS
from wire.messages import Ask, Begin, Drop, Key
from wire.planes import FEATURE, Planes
from wire.slots import ChunkReady, LaneSink, ReceiverChannel, TensorReceived
from wire.tensor import PLAIN, DType, Expectation

CHUNK = 512
LIMITS = replace(DEFAULT_LIMITS, chunk_bytes=CHUNK, tensor_max_bytes=4 * CHUNK, slots_open_max=4)
SIZE = 2 * CHUNK + 100
SLOTS = 3
GUARD = b"\xa5" * 64

PLACE, DATA, BEGIN, DROP, ASK, LOSE, UNPOST = range(7)
HEAD = struct.Struct(">BBBHB")  # lane, slot, index, length, flags
EXPECTED = Expectation(DType.bf16, (SIZE // 2,), PLAIN, SIZE)


class _Half:
    def __init__(self) -> None:
        self.channel = ReceiverChannel(self.expected, DeliveredKeys(), LIMITS, features=(FEATURE,))
        self.memory = [bytearray(GUARD + bytes(3 * CHUNK) + GUARD) for _ in range(SLOTS)]
        for memory in self.memory:
            self.channel.post(memoryview(memory)[len(GUARD) : -len(GUARD)])
        self.channel.attach()
        self.lanes: dict[int, LaneSink] = {}
        self.numbers = 0
        self.under_way: dict[int, tuple[int, int, memoryview, int]] = {}  # by lane: slot, index, place, filled
        self.final: set[int] = set()
        self.announced: dict[int, dict[int, bytes]] = {slot: {} for slot in range(SLOTS)}
        self.given_back: dict[int, bytes] = {}
        for at in range(2):
            self.open_lane(at)

    @staticmethod
    def expected(key: Key) -> Expectation:
        return EXPECTED

    def open_lane(self, at: int) -> None:
        self.lanes[at] = sink = self.channel.lane(self.numbers)
        self.numbers += 1
        self.under_way.pop(at, None)

        def divert(view: memoryview) -> None:
            slot, index, place, filled = self.under_way[at]
            self.under_way[at] = slot, index, view[: len(place)], filled

        sink.divert = divert

    def place(self, body: bytes) -> None:
        if len(body) < HEAD.size:
            return
        lane, slot, index, length, flags = HEAD.unpack_from(body)
        lane %= 2
        if lane not in self.under_way and 0 < length <= CHUNK:  # the session's part
            view = self.lanes[lane].place(slot, index, length, flags)
            assert len(view) == length
            self.under_way[lane] = slot, index, view, 0
            self.data(lane, body[HEAD.size :])

    def data(self, lane: int, body: bytes) -> None:
        if lane not in self.under_way:
            return
        slot, index, view, filled = self.under_way[lane]
        body = body[: len(view) - filled]
        view[filled : filled + len(body)] = body
        self.under_way[lane] = slot, index, view, filled + len(body)
        if filled + len(body) == len(view):
            del self.under_way[lane]
            self.lanes[lane].placed(slot, index)

    def step(self, kind: int, body: bytes) -> None:
        first, second = (*body[:2], 0, 0)[:2]
        if kind == PLACE:
            self.place(body)
        elif kind == DATA:
            self.data(first % 2, body[1:])
        elif kind == BEGIN:
            size = int.from_bytes(body[2:4], "big") or SIZE
            self.channel.on_message(Begin(first, (0, second % 4), 0, DType.bf16, (SIZE // 2,), PLAIN, size, bytes(8)))
        elif kind == DROP:
            self.channel.on_message(Drop(first, (0, second % 4), int(Code.CANCELLED)))
        elif kind == ASK:
            number = self.numbers - 1 - first % 2
            for at, sink in list(self.lanes.items()):
                if sink.number == number:  # the shell closes its end before the answer
                    self.under_way.pop(at, None)
            self.channel.on_message(Ask(number, (second,) if len(body) > 1 else ()))
        elif kind == LOSE:
            self.under_way.pop(first % 2, None)
            self.channel.lane_lost(self.lanes[first % 2].number)
            self.open_lane(first % 2)
        elif kind == UNPOST:
            self.channel.unpost(first % SLOTS)
        for at, sink in list(self.lanes.items()):
            if sink.number not in self.channel._lanes:
                self.open_lane(at)
        self.look()

    def look(self) -> None:
        for event in self.channel.events():
            if isinstance(event, ChunkReady):
                self.announced[event.slot][event.start] = self.bytes_of(event.slot)[event.start : event.end]
                continue
            assert event.slot not in self.final, "a second end"
            self.final.add(event.slot)
            assert not isinstance(event, TensorReceived) or len(event.buffer) == SIZE
            self.given_back[event.slot] = self.bytes_of(event.slot)
        for slot, memory in enumerate(self.memory):
            assert memory.startswith(GUARD) and memory.endswith(GUARD)
            now = self.bytes_of(slot)
            assert all(now[start : start + len(was)] == was for start, was in self.announced[slot].items())
            assert self.given_back.get(slot, now) == now

    def bytes_of(self, slot: int) -> bytes:
        return bytes(self.memory[slot][len(GUARD) : -len(GUARD)])


def _prepared() -> object:
    def run(data: bytes) -> Outcome:
        """Steps: u8 kind, u16 length, body."""
        half = _Half()
        kinds: set[int] = set()
        try:
            while len(data) >= 3:
                kind, size = data[0] % 7, int.from_bytes(data[1:3], "big")
                half.step(kind, data[3 : 3 + size])
                kinds.add(kind)
                data = data[3 + size :]
        finally:
            half.channel.close(Code.PROTOCOL)
            half.look()
            assert half.final == set(range(SLOTS))
        return Outcome((frozenset(kinds), half.channel.duplicate_bytes > 0, len(half.announced[0])))

    return run


def step(kind: int, body: bytes) -> bytes:
    return bytes([kind]) + len(body).to_bytes(2, "big") + body


def chunk(lane: int, slot: int, index: int, data: bytes, flags: int, *, cut: int = 0) -> bytes:
    return step(PLACE, HEAD.pack(lane, slot, index, len(data), flags) + data[: len(data) - cut])


def _seeds() -> list[bytes]:
    tensor = memoryview(b"\x01\x3f" * (SIZE // 2))
    plain = [bytes(tensor[start : start + CHUNK]) for start in range(0, SIZE, CHUNK)]
    planes = Planes(CHUNK)
    packed = [bytes(planes.pack(memoryview(part)) or b"") for part in plain]
    begin = step(BEGIN, bytes([0, 0]))
    whole = b"".join(chunk(index % 2, 0, index, data, PACKED_CHUNK) for index, data in enumerate(packed))
    rest = packed[0][-20:]
    return [
        begin + whole,
        whole + begin,
        begin + chunk(0, 0, 0, packed[0], 1, cut=20) + chunk(1, 0, 0, plain[0], 0) + step(DATA, b"\x00" + rest),
        begin + chunk(0, 0, 0, plain[0], 0, cut=20) + chunk(1, 0, 0, packed[0], 1) + step(DATA, bytes(21)),
        begin + chunk(0, 0, 0, packed[0], 1, cut=20) + step(LOSE, b"\x00") + step(ASK, b"\x00\x00") + whole,
        begin + chunk(0, 0, 0, packed[0], 1, cut=20) + step(UNPOST, b"\x00") + step(DATA, b"\x00" + rest),
        begin + chunk(0, 0, 0, packed[0], 1, cut=20) + step(DROP, b"\x00\x00") + step(DATA, b"\x00" + rest),
        begin + chunk(0, 0, 0, chunk_of(bomb(CHUNK // 2), CHUNK // 2), 1),
        chunk(0, 1, 0, chunk_of(frame(bytes(CHUNK // 2)) + b"\x00", CHUNK // 2), 1),
        chunk(0, 2, 2, packed[2], 1) + chunk(1, 2, 1, packed[1], 1) + step(BEGIN, bytes([2, 1])),
    ]


CHUNKS = Target("chunks", _prepared, (RemoteProtocolError,), _seeds)  # type: ignore[arg-type]
