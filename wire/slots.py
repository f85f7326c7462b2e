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
send each posted byte twice (an honest sender repeats one chunk for a lost connection), then it is EXCESSIVE.

Chunks that are complete or under way are bitmaps of a slot, which is what a sender that resumes would have to be told.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .delivered import DeliveredKeys
from .errors import Code, LocalProtocolError, RemoteProtocolError, known_code
from .limits import DEFAULT_LIMITS, Limits
from .messages import Begin, Done, Drop, Key, Slot, Unslot, encode
from .tensor import Expectation

SLOT_MAX = 2**32 - 1
# Chunks that nobody waits for: looking at each costs 8 us, a tenth of a chunk's time at 2.5 GB/s; 64 are some kilobytes of events.
GATHERED_MAX = 64

# Where chunks go that nobody wants.  One for the process: it is written, never read, so channels cannot disturb each other in it.
_DUSTBIN = memoryview(bytearray(DEFAULT_LIMITS.chunk_bytes))


@dataclass(frozen=True, slots=True)
class ChunkReady:
    """Bytes start..end of the slot's buffer are final, so a copy to the device may begin.  Only after Begin was accepted."""

    slot: int
    key: Key
    index: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class TensorReceived:
    """Every byte is there and the key was not delivered before.  The buffer is the application's again."""

    slot: int
    key: Key
    begin: Begin
    buffer: memoryview  # the first raw_len bytes of the posted buffer


@dataclass(frozen=True, slots=True)
class TensorDropped:
    """The slot ended without a tensor; what was announced of it is void.  The buffer is the application's again.

    CANCELLED = withdrawn by us, or dropped by the sender (or its code); DUPLICATE, STALE, EXPECTATION, TOO_LARGE = refused by us;
    else the code of ``close``.  ``key`` is None when neither the slot nor a Begin had named one.
    """

    slot: int
    key: Key | None
    code: Code
    buffer: memoryview  # as posted


ReceiverEvent = ChunkReady | TensorReceived | TensorDropped


@dataclass(slots=True)
class _Slot:
    number: int
    key: Key | None
    buffer: memoryview
    begin: Begin | None = None
    complete: int = 0  # bitmap by chunk index
    missing: int = 0  # chunks, known from Begin on
    under_way: int = 0  # bitmap of chunks whose view the session holds
    end: int = 0  # end of the furthest chunk so far
    short_end: int | None = None  # the tensor's length as a short chunk, which can only be the last, has told it
    dropped: Code | None = None  # the slot has ended and waits for a chunk under way


class ReceiverChannel:
    """Sans-IO automaton of the side that receives.  Implements ``ChunkSink``.

    ``expect(key)`` is the application's word on what comes under a key, None = nothing; it is asked once a Begin, synchronously.
    After any call: send what ``messages()`` returns on the channel's message stream and look at ``events()``.
    ``on_change`` is called for those that appear while the session places chunks, where nobody else would look; it may not call
    back into the channel.  Every method that raises LocalProtocolError leaves the channel untouched.  After a RemoteProtocolError
    the connection must end; ``close`` then gives all buffers back, which is true only once the session no longer writes.
    """

    def __init__(
        self,
        expect: Callable[[Key], Expectation | None],
        delivered: DeliveredKeys,
        limits: Limits = DEFAULT_LIMITS,
        *,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._expect = expect
        self._delivered = delivered
        self._limits = limits
        self._on_change = on_change
        self._dustbin = _DUSTBIN if limits.chunk_bytes <= len(_DUSTBIN) else memoryview(bytearray(limits.chunk_bytes))
        self._next_slot = 0
        self._open: dict[int, _Slot] = {}
        self._leaving: dict[int, _Slot] = {}  # ended, with a chunk under way
        self._allowance_bytes = 0
        self._messages: list[Slot | Unslot | Done] = []
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
        self._open[number] = _Slot(number, key, buffer)
        self._allowance_bytes += 2 * len(buffer)
        self._messages.append(message)
        return number

    def unpost(self, slot: int) -> bool:
        """Withdraw a slot; its TensorDropped follows, at once or after the chunk under way.  False if it had ended already."""
        if not 0 <= slot < self._next_slot:
            raise LocalProtocolError(f"slot {slot} was never posted")
        state = self._open.get(slot)
        if state is None:
            return False
        self._messages.append(Unslot(slot))
        self._drop(state, Code.CANCELLED)
        return True

    def close(self, code: Code) -> None:
        """The channel is over and the session writes no more: every slot ends with ``code``.  Idempotent."""
        self._closed = True
        self._messages.clear()
        for state in [*self._leaving.values(), *self._open.values()]:
            self._release(state, code if state.dropped is None else state.dropped)
        self._leaving.clear()
        self._open.clear()

    def messages(self) -> list[Slot | Unslot | Done]:
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

    # -- from the peer: messages

    def on_message(self, message: Begin | Drop) -> None:
        """Take a message of the sender.  Raises RemoteProtocolError when an honest sender could not have sent it."""
        if self._closed:
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

    def _on_begin(self, state: _Slot, begin: Begin) -> None:
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

    def _judge(self, state: _Slot, begin: Begin) -> Code:
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

    def _on_drop(self, state: _Slot, drop: Drop) -> None:
        if state.begin is None or drop.key != state.begin.key:
            raise RemoteProtocolError(detail=f"Drop for slot {state.number} without its Begin")
        self._drop(state, known_code(drop.code)[0] if drop.code else Code.CANCELLED)

    # -- from the peer: chunks (ChunkSink)

    def place(self, slot: int, index: int, length: int, flags: int) -> memoryview:
        """See ``ChunkSink``: memory of the slot if the chunk is wanted, the dustbin if it once was, else RemoteProtocolError."""
        chunk = self._limits.chunk_bytes
        start = index * chunk
        if flags:
            raise RemoteProtocolError(detail=f"chunk flags {flags:#x} were not agreed on")
        if slot >= self._next_slot:
            raise RemoteProtocolError(detail=f"slot {slot} was never posted")
        if not 0 < length <= chunk or start + length > self._limits.tensor_max_bytes:
            raise RemoteProtocolError(detail=f"chunk {index} of {length} bytes cannot be")
        if length > self._allowance_bytes:
            raise RemoteProtocolError(Code.EXCESSIVE, detail="every posted byte was sent twice already")
        state = self._open.get(slot)
        if state is not None:
            self._check_chunk(state, index, start, length)
        self._allowance_bytes -= length
        bit = 1 << index
        if state is None or state.complete & bit:
            return self._dustbin[:length]
        if state.under_way & bit:
            raise RemoteProtocolError(detail=f"chunk {index} of slot {slot} is under way already")
        state.under_way |= bit
        state.end = max(state.end, start + length)
        if length < chunk:
            state.short_end = start + length
        return state.buffer[start : start + length]

    def _check_chunk(self, state: _Slot, index: int, start: int, length: int) -> None:
        total = state.short_end if state.begin is None else state.begin.raw_len
        if total is not None:
            honest = length == min(self._limits.chunk_bytes, total - start)
        else:
            # A short chunk is the last one, so nothing that came may lie behind it.
            after = state.end if length < self._limits.chunk_bytes else 0
            honest = after <= start + length <= len(state.buffer)
        if not honest:
            raise RemoteProtocolError(detail=f"chunk {index} of {length} bytes does not belong into slot {state.number}")

    def placed(self, slot: int, index: int) -> None:
        """See ``ChunkSink``: the chunk is complete and immutable from here on, or its buffer can go back at last."""
        state = self._open.get(slot) or self._leaving.get(slot)
        if state is None or not state.under_way >> index & 1:
            return  # it went to the dustbin
        state.under_way ^= 1 << index
        if state.dropped is not None:
            if state.under_way:
                return
            del self._leaving[slot]
            self._release(state, state.dropped)
        else:
            state.complete |= 1 << index
            if state.begin is None:
                return
            state.missing -= 1
            self._announce(state, state.begin, index)
            if state.missing == 0:
                self._finish(state, state.begin)
        self._on_change()

    # -- inside

    def _announce(self, state: _Slot, begin: Begin, index: int) -> None:
        start = index * self._limits.chunk_bytes
        end = min(start + self._limits.chunk_bytes, begin.raw_len)
        self._events.append(ChunkReady(state.number, begin.key, index, start, end))

    def _finish(self, state: _Slot, begin: Begin) -> None:
        code = self._delivered.deliver(begin.key)
        if code is not Code.OK:
            self._refuse(state, begin.key, code)
            return
        del self._open[state.number]
        self._messages.append(Done(state.number, begin.key, Code.OK))
        self._events.append(TensorReceived(state.number, begin.key, begin, state.buffer[: begin.raw_len]))

    def _refuse(self, state: _Slot, key: Key, code: Code) -> None:
        self._messages.append(Done(state.number, key, code))
        self._drop(state, code)

    def _drop(self, state: _Slot, code: Code) -> None:
        del self._open[state.number]
        if state.under_way:
            state.dropped = code
            self._leaving[state.number] = state
        else:
            self._release(state, code)

    def _release(self, state: _Slot, code: Code) -> None:
        self._events.append(TensorDropped(state.number, state.key, code, state.buffer))
