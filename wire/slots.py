"""The receiving half of a tensor channel: slots.

A slot is a buffer of ours that a peer may fill once: "you may send this microbatch (or your next one) of at most n bytes".  Slots
are the only credit for tensors, so memory is planned by whoever owns it; nothing here allocates by a number of the peer.

**The one danger is writing where nobody may write any more**: into a tensor that was handed over, or into a buffer that was given
back and now holds something else.  Two rules exclude it.

1. A chunk is placed into a slot's memory only if the slot is open and the index neither complete nor under way.  Everything else
   goes to a dustbin that nobody reads (chunks of complete, burned and withdrawn slots: they were on their way) or is a violation.
2. The session keeps the view it was given until the chunk's last record has come.  So a slot that ends while a chunk is under way
   (withdrawn by us, dropped by the sender, refused for its header) is closed at once for anything new, but its buffer is given
   back, by its ``TensorDropped``, only after that chunk.  **A buffer belongs to the channel from ``post`` to the slot's one final
   event, TensorReceived or TensorDropped.**  A peer that stalls in mid-chunk holds the buffer until its connection is closed.

Chunks and Begin travel on different streams, so chunks may come first.  Until Begin only the size of the buffer and the form of
chunks (full, but for the last) bound them; Begin then has to agree with every chunk that came.  Nothing is announced before Begin
has passed the expectation, and a chunk, once announced, never changes.

Draining is bounded too, or a peer could make us decrypt rubbish for ever outside any credit: over the life of a channel it may
send each posted byte twice, and what it lacks once more for each lost connection, then it is EXCESSIVE.  A sender may ask once a
lane: a lane costs it a handshake, an answer costs us a bitmap a slot.

**Several lanes fill one slot.**  A lane holds at most one chunk under way, its reception.  A sender whose lane stalls asks another
one to carry the chunk again, so an index may be under way twice: then the newer takes it over, and the session of the older writes
the rest into the dustbin (``LaneSink.divert``) before the newer has written its first byte.  Two writers to one region never are.

A chunk may come packed if we listed that (``features``, as in our HELLO).  It lies in scratch of its lane until it is complete and is
announced only after it was unpacked (landing.py); else it is a chunk like any other, also if it was plain on another lane.

**The channel outlives its connections.**  ``detach`` and ``lane_lost`` are true only once the sessions meant write no more; then
chunks under way are void.  What is complete stays, and ``attach`` says it: the last Dones, for what ended unheard, each open slot
with the token and the bitmap of its Begin, then ``Posted``.  Chunks that came without their Begin are forgotten with the control
connection, for the Begin may be lost, and the next one has another token, that is other bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from .channelevents import ChunkReady, ReceiverEvent, TensorDropped, TensorReceived
from .chunks import PACKED_CHUNK
from .delivered import DeliveredKeys
from .errors import Code, LocalProtocolError, RemoteProtocolError, known_code
from .landing import LaneSink, PostedSlot, Reception, unpack
from .limits import DEFAULT_LIMITS, Limits
from .messages import Ask, Begin, Done, Drop, Have, Key, Posted, Slot, Unslot, encode
from .planes import FEATURE, Planes
from .tensor import Expectation
from .transfers import pack_bitmap

__all__ = ["ChunkReady", "LaneSink", "ReceiverChannel", "ReceiverEvent", "TensorDropped", "TensorReceived"]

SLOT_MAX = 2**32 - 2  # `Posted` names the one after
# Chunks that nobody waits for: looking at each costs 8 us, a tenth of a chunk's time at 2.5 GB/s; 64 are some kilobytes of events.
GATHERED_MAX = 64

# As many as there may be open slots: a sender cannot have missed more.
DONES_REPEATED = 64

# Where chunks go that nobody wants.  One for the process: it is written, never read, so channels cannot disturb each other in it.
_DUSTBIN = memoryview(bytearray(DEFAULT_LIMITS.chunk_bytes))


class ReceiverChannel:
    """Sans-IO automaton of the side that receives.  Starts detached: slots are said when a control stream is there.

    ``expect(key)`` is the application's word on what comes under a key, None = nothing; it is asked once a Begin, synchronously.
    After any call: send what ``messages()`` returns on the channel's message stream and look at ``events()``.
    ``on_change`` is called for those that appear while a session places chunks, where nobody else would look; it may not call
    back into the channel.  Every method that raises LocalProtocolError leaves the channel untouched.  After a RemoteProtocolError
    the connections must end; ``close`` then gives all buffers back, which is true only once no session writes any more.
    """

    def __init__(
        self,
        expect: Callable[[Key], Expectation | None],
        delivered: DeliveredKeys,
        limits: Limits = DEFAULT_LIMITS,
        *,
        on_change: Callable[[], None] = lambda: None,
        features: tuple[str, ...] = (),
    ) -> None:
        self.duplicate_bytes = 0  # placed into the dustbin, or void before they were complete
        self._expect = expect
        self._delivered = delivered
        self._limits = limits
        self._on_change = on_change
        self._planes = Planes(limits.chunk_bytes) if FEATURE in features else None
        self._dustbin = _DUSTBIN if limits.chunk_bytes <= len(_DUSTBIN) else memoryview(bytearray(limits.chunk_bytes))
        self._next_slot = 0
        self._open: dict[int, PostedSlot] = {}
        self._allowance_bytes = 0
        self._lanes: dict[int, LaneSink] = {}
        self._asks_left = 0  # lanes since ``detach`` that were not asked about
        self._dones: deque[Done] = deque(maxlen=DONES_REPEATED)
        self._attached = False
        self._messages: list[Slot | Unslot | Done | Have | Posted] = []
        self._events: list[ReceiverEvent] = []
        self._closed = False

    # -- towards the application

    @property
    def open_slots(self) -> int:
        """Slots that the sender may still fill or is filling: 0 when idle."""
        return len(self._open)

    def post(self, buffer: memoryview, key: Key | None = None) -> int:
        """Offer ``buffer`` (writable, contiguous) for one tensor, of ``key`` if given; returns the slot.

        The buffer is the channel's until the slot's final event.  LocalProtocolError: buffer or key unfit, 64 open slots, closed.
        """
        if self._closed:
            raise LocalProtocolError("the channel is closed")
        if buffer.readonly or not buffer.c_contiguous:
            raise LocalProtocolError("a slot needs writable, contiguous memory")
        if len(self._open) >= self._limits.slots_open_max or self._next_slot > SLOT_MAX:
            raise LocalProtocolError(f"a channel has at most {self._limits.slots_open_max} open slots")
        buffer = buffer.cast("B")
        if len(buffer) > self._limits.tensor_max_bytes:
            raise LocalProtocolError(f"a slot has at most {self._limits.tensor_max_bytes} bytes, not {len(buffer)}")
        number = self._next_slot
        message = Slot(number, key, len(buffer))
        encode(message)  # refuses a key out of bounds while nothing has changed yet
        self._next_slot += 1
        self._open[number] = PostedSlot(number, key, buffer)
        self._allowance_bytes += 2 * len(buffer)
        self._say(message)
        return number

    def unpost(self, slot: int) -> bool:
        """Withdraw a slot; its TensorDropped follows, at once or after the chunk under way.  False if it had ended already."""
        if not 0 <= slot < self._next_slot:
            raise LocalProtocolError(f"slot {slot} was never posted")
        state = self._open.get(slot)
        if state is None:
            return False
        self._say(Unslot(slot))
        self._drop(state, Code.CANCELLED)
        return True

    def close(self, code: Code) -> None:
        """The channel is over and no session writes any more: every slot ends with ``code``.  Idempotent."""
        self._closed = True
        self.detach()
        for state in self._open.values():
            self._release(state, code)
        self._open.clear()

    def messages(self) -> list[Slot | Unslot | Done | Have | Posted]:
        """Take the messages to send, in order."""
        taken, self._messages = self._messages, []
        return taken

    def due(self, *, chunks: bool) -> bool:
        """Whether to look at ``events`` after a chunk: a slot has ended, somebody waits for ``chunks``, or enough have gathered."""
        events = self._events
        return bool(events) and (chunks or len(events) >= GATHERED_MAX or not isinstance(events[-1], ChunkReady))

    def events(self) -> list[ReceiverEvent]:
        """Take what happened, in order."""
        taken, self._events = self._events, []
        return taken

    # -- towards the connections

    def attach(self) -> None:
        """A control stream is there (again): say what ended, what is open and what is here of it."""
        if self._closed or self._attached:
            raise LocalProtocolError("the channel is closed or has a control stream")
        self._attached = True
        self._messages.extend(self._dones)
        for state in self._open.values():
            if state.begin is None:
                state.complete = state.end = 0
                state.short_end = None
                self._messages.append(Slot(state.number, state.key, len(state.buffer)))
                self._allowance_bytes += len(state.buffer)
            else:
                begin = state.begin
                self._messages.append(Slot(state.number, begin.key, len(state.buffer), begin.token, self._bitmap(state, begin)))
                self._allowance_bytes += self._missing_bytes(state, begin)
        self._messages.append(Posted(self._next_slot))

    def detach(self) -> None:
        """The control connection and all lanes are gone, no session writes any more.  Idempotent."""
        self._attached = False
        self._messages.clear()
        for number in list(self._lanes):
            self.lane_lost(number)
        self._asks_left = 0

    def lane(self, number: int) -> LaneSink:
        """A lane was opened; its session asks what this returns where to write.  LocalProtocolError: it is open already."""
        if self._closed or number in self._lanes:
            raise LocalProtocolError(f"the channel is closed or has lane {number}")
        self._asks_left += 1
        lane = self._lanes[number] = LaneSink(number, self._place, self._complete)
        return lane

    def lane_lost(self, number: int) -> None:
        """The session of that lane writes no more: its chunk under way is void.  Idempotent."""
        lane = self._lanes.pop(number, None)
        if lane is None or lane.reception is None:
            return
        reception, lane.reception = lane.reception, None
        self.duplicate_bytes += reception.length
        del reception.state.under_way[reception.index]
        self._release_if_free(reception.state)

    # -- from the peer: messages

    def on_message(self, message: Begin | Drop | Ask) -> None:
        """Take a message of the sender.  Raises RemoteProtocolError when an honest sender could not have sent it."""
        if self._closed or not self._attached:
            return
        if isinstance(message, Ask):
            self._on_ask(message)
            return
        if message.slot >= self._next_slot:
            raise RemoteProtocolError(detail=f"slot {message.slot} was never posted")
        state = self._open.get(message.slot)
        if state is None:
            return  # it has crossed our Unslot or Done
        if isinstance(message, Begin):
            self._on_begin(state, message)
        else:
            self._on_drop(state, message)

    def _on_ask(self, ask: Ask) -> None:
        if self._asks_left == 0:
            raise RemoteProtocolError(Code.EXCESSIVE, detail="more questions than lanes")
        if list(ask.slots) != sorted(set(ask.slots)) or (ask.slots and ask.slots[-1] >= self._next_slot):
            raise RemoteProtocolError(detail="an Ask names slots twice or such as were never posted")
        asked = [state for slot in ask.slots if (state := self._open.get(slot)) is not None]
        if any(state.begin is None for state in asked):
            raise RemoteProtocolError(detail="an Ask names a slot without Begin")
        self._asks_left -= 1
        self.lane_lost(ask.lane)
        for state in asked:
            if state.begin is not None:
                self._messages.append(Have(state.number, state.begin.token, self._bitmap(state, state.begin)))
                self._allowance_bytes += self._missing_bytes(state, state.begin)

    def _on_begin(self, state: PostedSlot, begin: Begin) -> None:
        if state.begin is not None:
            raise RemoteProtocolError(detail=f"a second Begin for slot {state.number}")
        if begin.raw_len < state.end or state.short_end not in (None, begin.raw_len):
            raise RemoteProtocolError(detail=f"slot {state.number} got chunks to byte {state.end}, Begin says {begin.raw_len}")
        code = self._judge(state, begin)
        state.key = begin.key
        if code is not Code.OK:
            self._refuse(state, begin.key, code)
            return
        state.begin = begin
        count = -(-begin.raw_len // self._limits.chunk_bytes)
        state.missing = count - state.complete.bit_count()
        for index in range(count):
            if state.complete >> index & 1:
                self._announce(state, begin, index)
        if state.missing == 0:
            self._finish(state, begin)

    def _judge(self, state: PostedSlot, begin: Begin) -> Code:
        if state.key not in (None, begin.key):
            return Code.EXPECTATION
        if begin.raw_len > self._limits.tensor_max_bytes:
            return Code.TOO_LARGE
        # Before expect(): an application that is done with a step may not know its keys any more, and STALE is the better answer.
        code = self._delivered.verdict(begin.key)
        if code is not Code.OK:
            return code
        expected = self._expect(begin.key)
        if expected is None or expected.difference(begin) is not None:
            return Code.EXPECTATION
        return Code.OK if begin.raw_len <= len(state.buffer) else Code.TOO_LARGE

    def _on_drop(self, state: PostedSlot, drop: Drop) -> None:
        if state.begin is None or drop.key != state.begin.key:
            raise RemoteProtocolError(detail=f"Drop for slot {state.number} without its Begin")
        self._drop(state, known_code(drop.code)[0] if drop.code else Code.CANCELLED)

    # -- from the peer: chunks

    def _place(self, lane: LaneSink, slot: int, index: int, length: int, flags: int) -> memoryview:
        chunk = self._limits.chunk_bytes
        start = index * chunk
        if flags and (flags != PACKED_CHUNK or self._planes is None):
            raise RemoteProtocolError(detail=f"chunk flags {flags:#x} were not agreed on")
        if slot >= self._next_slot:
            raise RemoteProtocolError(detail=f"slot {slot} was never posted")
        if not 0 < length <= chunk or start + length > self._limits.tensor_max_bytes:
            raise RemoteProtocolError(detail=f"chunk {index} of {length} bytes cannot be")
        if length > self._allowance_bytes:
            raise RemoteProtocolError(Code.EXCESSIVE, detail="every posted byte was sent twice already")
        if self._lanes.get(lane.number) is not lane or lane.reception is not None:
            raise LocalProtocolError(f"lane {lane.number} is lost or in the midst of a chunk")
        state = self._open.get(slot)
        if state is not None:
            (state.check_packed if flags else state.check)(index, length, chunk)
        self._allowance_bytes -= length
        if state is None or state.complete >> index & 1:
            self.duplicate_bytes += length
            return self._dustbin[:length]
        if (older := state.under_way.get(index)) is not None:
            self._take_over(older)
        state.under_way[index] = lane
        packed = lane.scratch(length, chunk) if flags else None
        lane.reception = Reception(state, index, length, packed)
        return state.filled(index, length, chunk) if packed is None else packed

    def _take_over(self, older: LaneSink) -> None:
        """After this the older lane's session writes into the slot no more."""
        reception = older.reception
        assert reception is not None  # it is under way
        if reception.packed is None:
            if older.divert is None:
                raise LocalProtocolError(f"lane {older.number} cannot be diverted")
            older.divert(self._dustbin[: reception.length])
        older.reception = None
        self.duplicate_bytes += reception.length

    def _complete(self, reception: Reception) -> None:
        state, index = reception.state, reception.index
        del state.under_way[index]
        if state.dropped is None:
            if reception.packed is not None and self._planes is not None:
                unpack(self._planes, state, index, reception.packed, self._limits.chunk_bytes)
            state.complete |= 1 << index
            if state.begin is None:
                return
            state.missing -= 1
            self._announce(state, state.begin, index)
            if state.missing == 0:
                self._finish(state, state.begin)
        elif not self._release_if_free(state):
            return
        self._on_change()

    # -- inside

    def _announce(self, state: PostedSlot, begin: Begin, index: int) -> None:
        start = index * self._limits.chunk_bytes
        end = min(start + self._limits.chunk_bytes, begin.raw_len)
        self._events.append(ChunkReady(state.number, begin.key, index, start, end))

    def _finish(self, state: PostedSlot, begin: Begin) -> None:
        code = self._delivered.deliver(begin.key)
        if code is not Code.OK:
            self._refuse(state, begin.key, code)
            return
        del self._open[state.number]
        self._say_done(Done(state.number, begin.key, Code.OK))
        self._events.append(TensorReceived(state.number, begin.key, begin, state.buffer[: begin.raw_len]))

    def _refuse(self, state: PostedSlot, key: Key, code: Code) -> None:
        self._say_done(Done(state.number, key, code))
        self._drop(state, code)

    def _drop(self, state: PostedSlot, code: Code) -> None:
        del self._open[state.number]
        state.dropped = code
        self._release_if_free(state)

    def _release_if_free(self, state: PostedSlot) -> bool:
        """Give the buffer of an ended slot back, once no session writes into it."""
        if state.dropped is None or state.under_way:
            return False
        self._release(state, state.dropped)
        return True

    def _release(self, state: PostedSlot, code: Code) -> None:
        self._events.append(TensorDropped(state.number, state.key, code, state.buffer))

    def _say(self, message: Slot | Unslot | Done) -> None:
        if self._attached:  # else ``attach`` says what is still true
            self._messages.append(message)

    def _say_done(self, done: Done) -> None:
        self._dones.append(done)
        self._say(done)

    def _bitmap(self, state: PostedSlot, begin: Begin) -> bytes:
        return pack_bitmap(state.complete, -(-begin.raw_len // self._limits.chunk_bytes))

    def _missing_bytes(self, state: PostedSlot, begin: Begin) -> int:
        return min(state.missing * self._limits.chunk_bytes, begin.raw_len)
