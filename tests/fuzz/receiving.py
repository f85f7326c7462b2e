"""The receiving half of a tensor channel as a target: Begin, Drop, Ask, chunks, lost lanes and connections, as a peer likes them.

Memory is watched from outside.  Every slot lies between guards.  A session writes into the view that it was given, half of it at
once and the rest when the chunk is complete, as decryption does, each time something else: so a write that comes too late shows as
a change of a buffer that was handed over or given back, or of a chunk that was announced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tests.fuzz.engine import Outcome, Target
from tests.fuzz.programs import CHUNK, KEYS, LANES, LIMITS, OPS_MOST, SAID_MOST, SIZES, Program
from wire.delivered import DeliveredKeys
from wire.errors import Code, RemoteProtocolError
from wire.landing import LaneSink
from wire.messages import Ask, Begin, Drop, Key, decode, encode
from wire.slots import ChunkReady, ReceiverChannel, TensorDropped, TensorReceived
from wire.tensor import DType, Expectation

GUARD = 16
TOKENS = tuple(bytes([at]) * 8 for at in range(4))


def size_of(key: Key) -> int:
    return SIZES[KEYS.index(key) % len(SIZES)] if key in KEYS else 0


def expect(key: Key) -> Expectation | None:
    """Of the last step nothing is known."""
    size = size_of(key)
    return Expectation(DType.uint8, (size,), 0, size) if key in KEYS and key[1] != 4 else None


@dataclass
class _Memory:
    """A buffer between guards, and what of it may not change any more."""

    block: bytearray
    size: int
    final: dict[tuple[int, int], bytes] = field(default_factory=dict)

    @property
    def view(self) -> memoryview:
        return memoryview(self.block)[GUARD : GUARD + self.size]

    def freeze(self, start: int, end: int) -> None:
        self.final[start, end] = bytes(self.view[start:end])

    def check(self) -> None:
        guard = bytes(GUARD)
        assert self.block[:GUARD] == guard == self.block[GUARD + self.size :], "a write outside of the slot"
        for (start, end), data in self.final.items():
            assert bytes(self.view[start:end]) == data, f"bytes {start}..{end} of a slot were written when they were final"


class _Lane:
    """A session's end of a lane."""

    def __init__(self, sink: LaneSink) -> None:
        self.sink = sink
        self.filling: tuple[int, int] | None = None
        self.view = memoryview(b"")
        sink.divert = self.divert

    def divert(self, view: memoryview) -> None:
        assert self.filling is not None and len(view) == len(self.view)
        self.view = view


class _Receiving:
    """The receiving half, its application, and a hostile sender."""

    def __init__(self) -> None:
        self.delivered = DeliveredKeys(capacity=8)
        self.channel = ReceiverChannel(expect, self.delivered, LIMITS)
        self.open: dict[int, _Memory] = {}
        self.over: list[_Memory] = []
        self.received: set[Key] = set()
        self.lanes: dict[int, _Lane] = {}
        self.numbers = 0
        self.attached = False
        self.stamp = 0
        self.ended: set[str] = set()

    def step(self, program: Program) -> None:
        STEPS[program.byte() % len(STEPS)](self, program)
        self.look()

    # what we do

    def post(self, program: Program) -> None:
        how = program.byte()
        if self.channel.open_slots < LIMITS.slots_open_max:
            memory = _Memory(bytearray(2 * GUARD + SIZES[how & 7]), SIZES[how & 7])
            key = None if how < 128 else KEYS[(how >> 3) % len(KEYS)]
            self.open[self.channel.post(memory.view, key)] = memory

    def unpost(self, program: Program) -> None:
        if self.open:
            self.channel.unpost(sorted(self.open)[program.byte() % len(self.open)])

    def attach(self, _: Program) -> None:
        if not self.attached:
            self.channel.attach()
            self.attached = True

    def detach(self, _: Program) -> None:
        self.lanes.clear()
        self.channel.detach()
        self.attached = False

    def watermark(self, program: Program) -> None:
        self.delivered.raise_watermark(program.byte() % 5)

    def lane(self, _: Program) -> None:
        if self.attached and len(self.lanes) < LANES:
            self.lanes[self.numbers] = _Lane(self.channel.lane(self.numbers))
            self.numbers += 1

    def lane_lost(self, program: Program) -> None:
        if self.lanes:
            self._cut(sorted(self.lanes)[program.byte() % len(self.lanes)])

    def _cut(self, number: int) -> None:
        """Its session writes once more, as one that ends in the middle of a chunk, and never again."""
        lane = self.lanes.pop(number, None)
        if lane is not None:
            if lane.filling is not None:
                self._write(lane.view)
            self.channel.lane_lost(number)

    # what the peer does

    def begin(self, program: Program) -> None:
        key, how = KEYS[program.byte() % len(KEYS)], program.byte()
        size = SIZES[how >> 3 & 7] if how & 4 else size_of(key)
        token = TOKENS[how & 3]
        self._say(Begin(program.number(), key, 0, how >> 6 if how & 4 else DType.uint8, (size,), 0, size, token))

    def drop(self, program: Program) -> None:
        self._say(Drop(program.number(), KEYS[program.byte() % len(KEYS)], program.byte()))

    def ask(self, program: Program) -> None:
        number, count = program.number(), program.byte() % 6
        self._say(Ask(number, tuple(program.number() for _ in range(count))))

    def raw(self, program: Program) -> None:
        self._say(decode(program.take(program.byte() % 128), Begin, Drop, Ask))

    def _say(self, message: Begin | Drop | Ask) -> None:
        assert encode(message)
        if isinstance(message, Ask):
            self._cut(message.lane)  # our end of a lane that was given up is closed before
        if self.attached:
            self.channel.on_message(message)

    def chunk(self, program: Program) -> None:
        pick, slot, index, length = program.byte(), program.number(), program.number(), program.number()
        free = [lane for lane in self.lanes.values() if lane.filling is None]
        if free:
            lane = free[pick % len(free)]
            view = lane.sink.place(slot, index, length or CHUNK, pick >> 7 and program.byte())
            assert len(view) == (length or CHUNK)
            lane.view, lane.filling = view, (slot, index)
            self._write(view[: len(view) // 2])

    def placed(self, program: Program) -> None:
        busy = [lane for lane in self.lanes.values() if lane.filling is not None]
        if busy:
            lane = busy[program.byte() % len(busy)]
            assert lane.filling is not None
            self._write(lane.view)
            (slot, index), lane.filling = lane.filling, None
            lane.sink.placed(slot, index)

    def whole(self, program: Program) -> None:
        """Chunks of one slot from the first on, with the lengths that they should have."""
        slot, size = program.number(), SIZES[program.byte() & 7]
        for index in range(-(-size // CHUNK)):
            free = [lane for lane in self.lanes.values() if lane.filling is None]
            if free:
                view = free[0].sink.place(slot, index, min(CHUNK, size - index * CHUNK), 0)
                self._write(view)
                free[0].sink.placed(slot, index)

    def _write(self, view: memoryview) -> None:
        self.stamp = self.stamp % 250 + 1
        view[:] = bytes([self.stamp]) * len(view)

    # what must hold

    def look(self) -> None:
        assert self.channel.open_slots <= LIMITS.slots_open_max and len(self.open) <= LIMITS.slots_open_max + LANES
        messages = self.channel.messages()
        assert len(messages) <= SAID_MOST, len(messages)
        for message in messages:
            encode(message)
        events = self.channel.events()
        assert len(events) <= (LIMITS.slots_open_max + LANES) * 10, len(events)
        for event in events:
            self.ended.add(type(event).__name__ + (event.code.name if isinstance(event, TensorDropped) else ""))
            if isinstance(event, ChunkReady):
                self.open[event.slot].freeze(event.start, event.end)
                continue
            memory = self.open.pop(event.slot)  # KeyError: a second final event
            memory.final.clear()
            memory.freeze(0, memory.size)
            self.over.append(memory)
            if isinstance(event, TensorReceived):
                assert event.key not in self.received, "a key was delivered twice"
                assert len(event.buffer) == event.begin.raw_len
                self.received.add(event.key)
            for lane in self.lanes.values():
                assert lane.filling is None or lane.view.obj is not memory.block, "a session still writes into a slot that ended"
        for memory in (*self.open.values(), *self.over):
            memory.check()

    def end(self) -> None:
        """Whatever it was: every buffer comes back."""
        for number in list(self.lanes):
            self._cut(number)
        self.channel.close(Code.PROTOCOL)
        self.attached = False
        self.look()
        assert not self.open and not self.channel.open_slots and not self.channel.messages()

    def __call__(self, data: bytes) -> Outcome:
        program, steps, refused = Program(data), 0, ""
        try:
            while program and steps < OPS_MOST:
                self.step(program)
                steps += 1
        except RemoteProtocolError as error:
            assert error.code in Code
            refused = "".join(char for char in error.detail if not char.isdigit())[:40]
        self.end()
        return Outcome((refused, frozenset(self.ended)), sum(len(memory.block) + 500 for memory in self.over))


STEPS: tuple[Callable[[_Receiving, Program], None], ...] = (
    _Receiving.post, _Receiving.unpost, _Receiving.attach, _Receiving.detach, _Receiving.watermark, _Receiving.lane,
    _Receiving.lane_lost, _Receiving.begin, _Receiving.drop, _Receiving.ask, _Receiving.raw, _Receiving.chunk, _Receiving.placed,
    _Receiving.whole,
)  # fmt: skip
POST, UNPOST, ATTACH, DETACH, WATERMARK, LANE, LANE_LOST, BEGIN, DROP, ASK, RAW, PIECE, PLACED, WHOLE = range(len(STEPS))


def _receiver_seeds() -> list[bytes]:
    ready = bytes([ATTACH, LANE, LANE])
    first = bytes([POST, 4, BEGIN, 4, 0, 0])  # key 4 has 40 bytes: five chunks
    half = ready + first + bytes([PIECE, 0, 0, 0, 0, PLACED, 0, PIECE, 0, 0, 1, 0])
    raw = encode(Begin(0, KEYS[2], 0, DType.uint8, (13,), 0, 13, TOKENS[0]))
    return [
        ready + first + bytes([WHOLE, 0, 4]),
        ready + bytes([POST, 4, WHOLE, 0, 4, BEGIN, 4, 0, 0, DROP, 0, 4, 0]),
        ready + bytes([POST, 2, RAW, len(raw)]) + raw + bytes([WHOLE, 0, 2]) * 3,
        half + bytes([UNPOST, 0, PLACED, 0, WHOLE, 0, 4]),
        half + bytes([DROP, 0, 4, 0, PLACED, 0]),
        half + bytes([PIECE, 1, 0, 1, 0, PLACED, 0, PLACED, 0]),  # taken over
        half + bytes([ASK, 0, 1, 0, LANE, WHOLE, 0, 4]),
        half + bytes([LANE_LOST, 0, DETACH, ATTACH, LANE, WHOLE, 0, 4]),
        half + bytes([DETACH, POST, 140, UNPOST, 1, ATTACH, ASK, 9, 0]),
        ready + bytes([POST, 4, PIECE, 0, 0, 0, 0, DETACH, ATTACH, LANE, BEGIN, 4, 0, 0]),
        ready + bytes([POST, 5, POST, 5, BEGIN, 1, 0, 0, BEGIN, 1, 1, 1, WHOLE, 0, 1, WHOLE, 1, 1]),
        ready + bytes([WATERMARK, 3, POST, 5, BEGIN, 1, 0, 0, POST, 5, BEGIN, 10, 0, 1]),
        ready + bytes([POST, 0, PIECE, 0, 0, 250, 0]) + bytes([PIECE, 128, 0, 0, 0, 1]),
        ready + first + bytes([WHOLE, 0, 4]) * 12,
        ready + bytes([POST, 6, BEGIN, 6, 0, 0]),
    ]


RECEIVER = Target("tensor_receiver", _Receiving, (), _receiver_seeds)
