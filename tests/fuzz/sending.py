"""The sending half of a tensor channel as a target: slots, answers and lost connections, as a receiver likes them.

A buffer is watched from outside: a chunk is handed out only of a transfer that has not ended, within what is ready, and what is
given back (SendEnded) is scribbled over and in no session's hands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.fuzz.engine import Outcome, Target
from tests.fuzz.programs import CHUNK, KEYS, LANES, LIMITS, OPS_MOST, SAID_MOST, SIZES, Program
from wire.errors import Code, RemoteProtocolError
from wire.messages import Ask, Begin, Done, Have, Key, Posted, Slot, Unslot, decode, encode
from wire.sending import SendEnded, SenderChannel, SlotsChanged
from wire.tensor import DType
from wire.transfers import LaneSource


@dataclass
class _Sent:
    """A transfer of ours."""

    key: Key
    size: int
    ready: int
    data: bytearray


class _Sending:
    """The sending half, its application, and a hostile receiver."""

    def __init__(self) -> None:
        self.tokens = 0
        self.channel = SenderChannel(self._token, LIMITS)
        self.transfers: dict[int, _Sent] = {}
        self.slots: dict[int, int] = {}  # the transfer that was begun last in a slot
        self.lanes: dict[int, LaneSource] = {}
        self.held: dict[int, int] = {}  # by lane: the transfer whose chunk its session has
        self.numbers = 0
        self.attached = False
        self.ended: set[object] = set()

    def _token(self, count: int) -> bytes:
        self.tokens += 1
        return bytes([self.tokens & 255]) * count

    # what we do

    def begin(self, program: Program) -> None:
        how, pick = program.byte(), program.byte()
        key = KEYS[how % len(KEYS)]
        size = SIZES[pick & 7]
        if self.channel.free_slots(key, size) and len(self.transfers) < 8:
            sent = _Sent(key, size, size // 2 if pick & 8 else size, bytearray([7]) * size)
            number = self.channel.begin(
                key, memoryview(sent.data), dtype=DType.uint8, shape=(size,), order=pick >> 4, ready_bytes=sent.ready,
                moved=how >= 128,
            )  # fmt: skip
            assert number not in self.transfers
            self.transfers[number] = sent

    def _picked(self, program: Program) -> int | None:
        return sorted(self.transfers)[program.byte() % len(self.transfers)] if self.transfers else None

    def advance(self, program: Program) -> None:
        number = self._picked(program)
        if number is not None:
            sent = self.transfers[number]
            sent.ready = sent.size
            self.channel.advance(number, sent.size)

    def cancel(self, program: Program) -> None:
        number = self._picked(program)
        if number is not None:
            self.channel.cancel(number)

    def attach(self, _: Program) -> None:
        if not self.attached:
            self.channel.attach()
            self.attached = True

    def detach(self, _: Program) -> None:
        self.lanes.clear()
        self.held.clear()
        self.channel.detach()
        self.attached = False

    def lane(self, _: Program) -> None:
        if self.attached and len(self.lanes) < LANES:
            self.lanes[self.numbers] = self.channel.lane(self.numbers)
            self.numbers += 1

    def lane_lost(self, program: Program) -> None:
        if self.lanes:
            number = sorted(self.lanes)[program.byte() % len(self.lanes)]
            lane = self.lanes.pop(number)
            self.held.pop(number, None)
            self.channel.lane_lost(number)
            assert lane.next_chunk() is None

    def pause(self, program: Program) -> None:
        if self.lanes:
            lane = self.lanes[sorted(self.lanes)[program.byte() % len(self.lanes)]]
            lane.paused = not lane.paused

    def pull(self, program: Program) -> None:
        if not self.lanes:
            return
        how = program.byte()
        number = sorted(self.lanes)[how % len(self.lanes)]
        for _ in range(1 + how // 16):
            self.held.pop(number, None)
            chunk = self.lanes[number].next_chunk()
            if chunk is None:
                return
            transfer = self.slots[chunk.slot]
            sent = self.transfers[transfer]  # KeyError: of one that has ended
            start, end = chunk.index * CHUNK, chunk.index * CHUNK + len(chunk.data)
            assert 0 < len(chunk.data) <= CHUNK and end <= sent.ready and (len(chunk.data) == CHUNK or end == sent.size)
            assert chunk.data.obj is sent.data and bytes(chunk.data) == bytes(sent.data[start:end])
            self.held[number] = transfer

    # what the peer does

    def slot(self, program: Program) -> None:
        number, how, more = program.number(), program.byte(), program.byte()
        key = None if how < 128 else KEYS[(how >> 3) % len(KEYS)]
        token = bytes([more & 63]) * 8 if more & 64 else None
        bitmap = program.take(1) if more & 128 else None
        self._say(Slot(number, key, SIZES[how & 7], token, bitmap))

    def unslot(self, program: Program) -> None:
        self._say(Unslot(program.number()))

    def done(self, program: Program) -> None:
        self._say(Done(program.number(), KEYS[program.byte() % len(KEYS)], program.byte()))

    def done_rightly(self, program: Program) -> None:
        """Done for a transfer that is there, as far as one can say."""
        if self.slots:
            slot = sorted(self.slots)[program.byte() % len(self.slots)]
            sent = self.transfers.get(self.slots[slot])
            if sent is not None:
                self._say(Done(slot, sent.key, program.byte() & 3))

    def have(self, program: Program) -> None:
        self._say(Have(program.number(), bytes([program.byte()]) * 8, program.take(program.byte() % 4)))

    def posted(self, program: Program) -> None:
        self._say(Posted(program.number()))

    def raw(self, program: Program) -> None:
        self._say(decode(program.take(program.byte() % 128), Slot, Unslot, Done, Have, Posted))

    def _say(self, message: Slot | Unslot | Done | Have | Posted) -> None:
        assert encode(message)
        if self.attached:
            self.channel.on_message(message)

    # what must hold

    def look(self) -> None:
        channel = self.channel
        assert channel.transfers <= LIMITS.slots_open_max + LANES and channel.free_slots() <= LIMITS.slots_open_max
        messages = channel.messages()
        assert len(messages) <= SAID_MOST
        for message in messages:
            encode(message)
            if isinstance(message, Begin):
                owners = [at for at, sent in self.transfers.items() if sent.key == message.key]
                assert owners
                self.slots[message.slot] = self._owner(message, owners)
            elif isinstance(message, Ask):
                assert list(message.slots) == sorted(set(message.slots)) and message.slots
        events = channel.events()
        assert len(events) <= LIMITS.slots_open_max * 3
        for event in events:
            if isinstance(event, SlotsChanged):
                continue
            assert isinstance(event, SendEnded)
            self.ended.add(event.code)
            sent = self.transfers.pop(event.transfer)  # KeyError: a second final event
            assert event.transfer not in self.held.values(), "a session still reads from a buffer that was given back"
            sent.data[:] = b"\xee" * sent.size
        assert len(self.transfers) == channel.transfers

    def _owner(self, message: Begin, owners: list[int]) -> int:
        """Which transfer a Begin is of: the newest of that key that is in no other slot, or the one that was in this slot."""
        before = self.slots.get(message.slot)
        if before in owners:
            return before  # type: ignore[return-value]
        taken = {at for slot, at in self.slots.items() if slot != message.slot}
        return max(at for at in owners if at not in taken)

    def end(self) -> None:
        self.lanes.clear()
        self.held.clear()
        self.channel.close(Code.PROTOCOL)
        self.attached = False
        self.look()
        assert not self.transfers and not self.channel.transfers and not self.channel.has_chunk

    def __call__(self, data: bytes) -> Outcome:
        program, steps, refused = Program(data), 0, ""
        try:
            while program and steps < OPS_MOST:
                SENDING[program.byte() % len(SENDING)](self, program)
                self.look()
                steps += 1
        except RemoteProtocolError as error:
            assert error.code in Code
            refused = "".join(char for char in error.detail if not char.isdigit())[:40]
        self.end()
        return Outcome((refused, frozenset(self.ended)), 300 * steps)


SENDING: tuple[Callable[[_Sending, Program], None], ...] = (
    _Sending.begin, _Sending.advance, _Sending.cancel, _Sending.attach, _Sending.detach, _Sending.lane, _Sending.lane_lost,
    _Sending.pause, _Sending.pull, _Sending.slot, _Sending.unslot, _Sending.done, _Sending.done_rightly, _Sending.have,
    _Sending.posted, _Sending.raw,
)  # fmt: skip
(S_BEGIN, S_ADVANCE, S_CANCEL, S_ATTACH, S_DETACH, S_LANE, S_LANE_LOST, S_PAUSE, S_PULL, S_SLOT, S_UNSLOT, S_DONE, S_RIGHT, S_HAVE,
 S_POSTED, S_RAW) = range(len(SENDING))  # fmt: skip


def _sender_seeds() -> list[bytes]:
    ready = bytes([S_ATTACH, S_SLOT, 0, 5, 0, S_SLOT, 1, 5, 0, S_POSTED, 2, S_LANE, S_LANE])
    keyed = bytes([S_ATTACH, S_SLOT, 0, 133, 0, S_SLOT, 1, 141, 0, S_POSTED, 2, S_LANE])
    two = ready + bytes([S_BEGIN, 0, 4, S_BEGIN, 1, 4, S_PULL, 32, S_PULL, 17])
    all_of = ready + bytes([S_BEGIN, 0, 4, S_PULL, 80])
    again = bytes([S_DETACH, S_ATTACH])
    raw = encode(Slot(2, KEYS[0], 64))
    return [
        all_of + bytes([S_RIGHT, 0, 0, S_PULL, 0]),
        all_of + bytes([S_DONE, 0, 0, 6, S_DONE, 0, 0, 6]),
        two + bytes([S_CANCEL, 0, S_PULL, 0, S_UNSLOT, 1, S_PULL, 1]),
        two + bytes([S_LANE_LOST, 0, S_HAVE, 0, 1, 1, 1, S_PULL, 80]),
        two + bytes([S_LANE_LOST, 0, S_LANE_LOST, 0, S_HAVE, 0, 1, 1, 3, S_HAVE, 0, 1, 1, 0, S_LANE, S_PULL, 80]),
        two + again + bytes([S_SLOT, 0, 133, 193, 3, S_SLOT, 1, 5, 0, S_POSTED, 9, S_LANE, S_PULL, 80, S_PULL, 80]),
        two + again + bytes([S_POSTED, 2]),
        two + again + bytes([S_SLOT, 0, 133, 200, 3, S_CANCEL, 0, S_POSTED, 1]),
        two + again + bytes([S_SLOT, 0, 0, 0, S_BEGIN, 5, 0, S_DETACH, S_ATTACH]),
        ready + bytes([S_BEGIN, 3, 12, S_PULL, 80, S_ADVANCE, 0, S_PULL, 80, S_PAUSE, 0, S_PULL, 0]),
        keyed + bytes([S_BEGIN, 5, 4, S_BEGIN, 4, 4, S_PULL, 80, S_LANE_LOST, 0]),  # taken in another order than posted
        bytes([S_ATTACH, S_SLOT, 250, 5, 0, S_POSTED, 255, S_SLOT, 255, 0, 0]),
        bytes([S_ATTACH, S_RAW, len(raw)]) + raw + bytes([S_BEGIN, 0, 0, S_UNSLOT, 2]),
        ready + bytes([S_SLOT, 2, 0, 0, S_SLOT, 3, 0, 0, S_SLOT, 4, 0, 0]),
        ready + bytes([S_HAVE, 0, 0, 0, S_UNSLOT, 9]),
    ]


SENDER = Target("tensor_sender", _Sending, (), _sender_seeds)
