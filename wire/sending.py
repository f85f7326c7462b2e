"""The sending half of a tensor channel.

The receiver posts slots, and only a posted slot may be filled: memory at the other end is planned by its owner, never asked for.
``begin`` takes a slot (one posted for this key first, else the oldest that is open to any), says ``Begin`` and makes the chunks
of the caller's buffer available to the session, which pulls them one by one.  Nothing is copied: a chunk is a view of that
buffer, so the buffer must stay as it is until the transfer has ended.  ``advance`` opens chunks as the device delivers bytes; a
tensor can be half on the network while its second half is still being computed.

Several transfers may be under way.  Chunks go lowest ``order`` first (the oldest microbatch unblocks the most work), and among
equals in the order of ``begin``; a transfer whose next chunk is not ready does not hold up the others.

A slot is used once.  Whatever ends a transfer (Done, Unslot, our own cancel) ends the slot for good, and messages about it that
were already on their way are ignored.  A cancelled transfer says ``Drop``; chunks not yet handed out never are.

**The buffer is the channel's until SendEnded**, the one final event of every transfer.  The reason is the chunk that the session
may just be sealing.  It is sent to its end, and if its memory were used again meanwhile, a cancelled tensor could still arrive
whole, with foreign bytes in its last chunk, before the receiver reads the Drop: it would be delivered.  So a transfer that ends
while the session holds a chunk of it says SendEnded when the session asks for the next one.

Resuming after a lost connection would need the token, a bitmap from the receiver and a queue of the missing chunks; the token is
already said in Begin, and the cursor of a transfer is the place where a bitmap would go.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .chunks import OutChunk
from .errors import Code, LocalProtocolError, RemoteProtocolError, known_code
from .limits import DEFAULT_LIMITS, Limits
from .messages import Begin, Done, Drop, Key, Slot, Unslot, encode
from .tensor import PLAIN, DType, check_shape

NO_ORDER = 2**63 - 1


@dataclass(frozen=True, slots=True)
class SlotsChanged:
    """Slots were posted or withdrawn: whoever waits for one may look again."""


@dataclass(frozen=True, slots=True)
class SendEnded:
    """A transfer has ended and its buffer is the caller's again.

    OK = the receiver has every byte and handed the tensor over.  REFUSED = it withdrew the slot meanwhile: send into another.
    CANCELLED = by us.  Any other code is the receiver's word (DUPLICATE, STALE, EXPECTATION, TOO_LARGE), or that of ``close``.
    """

    transfer: int
    key: Key
    code: Code


SenderEvent = SlotsChanged | SendEnded


@dataclass(slots=True)
class _OpenSlot:
    key: Key | None
    max_bytes: int

    def takes(self, key: Key | None, size_bytes: int) -> bool:
        return self.max_bytes >= size_bytes and self.key in (None, key)


@dataclass(slots=True)
class _Transfer:
    number: int
    slot: int
    key: Key
    data: memoryview
    order: int
    ready_bytes: int
    next_index: int = 0
    ended: Code | None = None  # it has ended, the session holds its chunk


class SenderChannel:
    """Sans-IO automaton of the side that sends.  Implements ``ChunkSource``.

    After any call: send what ``messages()`` returns on the channel's message stream, look at ``events()``, and tell the session
    ``source_ready`` if ``has_chunk``.  ``on_change`` is called for events that appear while the session asks for a chunk, where
    nobody else would look; it may not call back into the channel.  Every method that raises LocalProtocolError leaves the channel
    untouched; after a RemoteProtocolError the connection must end, and ``close`` tells the waiting transfers.
    """

    def __init__(
        self,
        random_bytes: Callable[[int], bytes],
        limits: Limits = DEFAULT_LIMITS,
        *,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._random_bytes = random_bytes
        self._limits = limits
        self._on_change = on_change
        self._last_slot = -1
        self._open: dict[int, _OpenSlot] = {}  # posted and unused, in order of posting
        self._by_slot: dict[int, _Transfer] = {}
        self._by_number: dict[int, _Transfer] = {}
        self._best: _Transfer | None = None  # what `_next` found, if it has looked
        self._looked = False
        self._held: _Transfer | None = None  # of which the session has the chunk handed out last
        self._next_number = 0
        self._messages: list[Begin | Drop] = []
        self._events: list[SenderEvent] = []
        self._closed = False

    # -- towards the application

    def free_slots(self, key: Key | None = None, size_bytes: int = 0) -> int:
        """How many posted slots would take a tensor of this key and size now; without a key only those open to any key count."""
        return sum(slot.takes(key, size_bytes) for slot in self._open.values())

    @property
    def transfers(self) -> int:
        """Transfers that have not ended: 0 when idle."""
        return len(self._by_number) + (self._held is not None and self._held.ended is not None)

    def begin(
        self,
        key: Key,
        data: memoryview,
        *,
        dtype: DType,
        shape: tuple[int, ...],
        codec: int = PLAIN,
        order: int = 0,
        tags: tuple[int, ...] = (),
        ready_bytes: int | None = None,
    ) -> int:
        """Begin to send ``data`` (contiguous, unchanged until the transfer ends) under ``key``; returns the transfer's number.

        ``ready_bytes``: how many bytes from the front may go now, None = all.  Raises LocalProtocolError when no posted slot
        takes it (ask ``free_slots`` before), when the buffer is not contiguous or too large, a key or tag is
        out of bounds, or the channel is closed.
        """
        if self._closed:
            raise LocalProtocolError("the channel is closed")
        check_shape(shape)
        if not data.c_contiguous:
            raise LocalProtocolError("only contiguous memory can be sent")
        data = data.cast("B")
        if len(data) > self._limits.tensor_max_bytes:
            raise LocalProtocolError(f"a tensor has at most {self._limits.tensor_max_bytes} bytes, not {len(data)}")
        if order >= NO_ORDER:
            raise LocalProtocolError(f"an order is below 2**63 - 1, which says that nothing is ready, not {order}")
        ready = len(data) if ready_bytes is None else ready_bytes
        if not 0 <= ready <= len(data):
            raise LocalProtocolError(f"{ready} of {len(data)} bytes cannot be ready")
        slot = self._choose(key, len(data))
        if slot is None:
            raise LocalProtocolError(f"no slot for {len(data)} bytes under {key!r} is posted")
        message = Begin(slot, key, order, dtype, shape, codec, len(data), self._random_bytes(8), tags)
        encode(message)  # refuses a key, order or tag out of bounds while nothing has changed yet
        del self._open[slot]
        transfer = _Transfer(self._next_number, slot, key, data, order, ready)
        self._next_number += 1
        self._by_slot[slot] = self._by_number[transfer.number] = transfer
        self._looked = False
        self._messages.append(message)
        return transfer.number

    def advance(self, transfer: int, ready_bytes: int) -> None:
        """Allow the chunks within the first ``ready_bytes`` to go.  Ignored for a transfer that has ended; it may not fall."""
        state = self._by_number.get(transfer)
        if state is None:
            self._check_number(transfer)
            return
        if not state.ready_bytes <= ready_bytes <= len(state.data):
            raise LocalProtocolError(f"{ready_bytes} ready bytes after {state.ready_bytes}, of {len(state.data)}")
        state.ready_bytes = ready_bytes
        self._looked = False

    def cancel(self, transfer: int) -> bool:
        """Stop sending; the slot is burned at both ends and SendEnded follows.  False if the transfer had ended already."""
        state = self._by_number.get(transfer)
        if state is None:
            self._check_number(transfer)
            return False
        self._messages.append(Drop(state.slot, state.key, Code.CANCELLED))
        self._end(state, Code.CANCELLED)
        return True

    def close(self, code: Code) -> None:
        """The channel is over and the session reads no more: every transfer ends with ``code``, no slot is left.  Idempotent."""
        self._closed = True
        self._open.clear()
        self._messages.clear()
        self._let_go()
        for state in list(self._by_number.values()):
            self._end(state, code)

    def messages(self) -> list[Begin | Drop]:
        """Take the messages to send, in order."""
        taken, self._messages = self._messages, []
        return taken

    def events(self) -> list[SenderEvent]:
        """Take what happened, in order."""
        taken, self._events = self._events, []
        return taken

    # -- towards the session (ChunkSource)

    @property
    def order(self) -> int:
        """Lowest order of a chunk that is ready; ``NO_ORDER`` if none is."""
        state = self._next()
        return NO_ORDER if state is None else state.order

    @property
    def has_chunk(self) -> bool:
        """Whether ``next_chunk`` would return one."""
        return self._next() is not None

    def next_chunk(self) -> OutChunk | None:
        """The next chunk by (order, age); None if none is ready.  Asking says that the chunk before has been read."""
        if self._let_go():
            self._on_change()
        state = self._next()
        if state is None:
            return None
        self._held = state
        index = state.next_index
        state.next_index += 1
        self._looked = False
        start = index * self._limits.chunk_bytes
        return OutChunk(state.slot, index, state.data[start : start + self._limits.chunk_bytes], 0)

    # -- from the peer

    def on_message(self, message: Slot | Unslot | Done) -> None:
        """Take a message of the receiver.  Raises RemoteProtocolError when an honest receiver could not have sent it."""
        if self._closed:
            return
        if isinstance(message, Slot):
            self._on_slot(message)
        elif isinstance(message, Unslot):
            self._on_unslot(message)
        else:
            self._on_done(message)

    def _on_slot(self, message: Slot) -> None:
        if message.slot <= self._last_slot:
            raise RemoteProtocolError(detail=f"slot {message.slot} after {self._last_slot}: slots ascend and are used once")
        if len(self._open) + len(self._by_slot) >= self._limits.slots_open_max:
            raise RemoteProtocolError(detail=f"more than {self._limits.slots_open_max} open slots")
        self._last_slot = message.slot
        self._open[message.slot] = _OpenSlot(message.key, message.max_bytes)
        self._events.append(SlotsChanged())

    def _on_unslot(self, message: Unslot) -> None:
        self._check_posted(message.slot)
        if self._open.pop(message.slot, None) is not None:
            self._events.append(SlotsChanged())
        elif (state := self._by_slot.get(message.slot)) is not None:
            # Our Begin and its Unslot have crossed.
            self._end(state, Code.REFUSED)

    def _on_done(self, message: Done) -> None:
        self._check_posted(message.slot)
        state = self._by_slot.get(message.slot)
        if state is None:
            if message.slot in self._open:
                raise RemoteProtocolError(detail=f"Done for slot {message.slot}, into which nothing was sent")
            return  # it has crossed our Drop
        if message.key != state.key:
            raise RemoteProtocolError(detail=f"Done for slot {message.slot} names another key")
        if message.code == Code.OK and state.next_index * self._limits.chunk_bytes < len(state.data):
            raise RemoteProtocolError(detail=f"Done for slot {message.slot} before all of it was sent")
        self._end(state, known_code(message.code)[0])

    # -- inside

    def _choose(self, key: Key, size_bytes: int) -> int | None:
        fitting = [(slot.key is None, number) for number, slot in self._open.items() if slot.takes(key, size_bytes)]
        return min(fitting)[1] if fitting else None

    def _next(self) -> _Transfer | None:
        """Whose chunk goes next.  Asked twice a chunk, looked for once: `_looked` is cleared by all that may change the answer."""
        if self._looked:
            return self._best
        chunk = self._limits.chunk_bytes
        best: _Transfer | None = None
        for state in self._by_number.values():
            start = state.next_index * chunk
            ready = start < len(state.data) and min(start + chunk, len(state.data)) <= state.ready_bytes
            if ready and (best is None or state.order < best.order):
                best = state
        self._best, self._looked = best, True
        return best

    def _end(self, state: _Transfer, code: Code) -> None:
        del self._by_slot[state.slot], self._by_number[state.number]
        self._looked = False
        if state is self._held:
            state.ended = code
        else:
            self._events.append(SendEnded(state.number, state.key, code))

    def _let_go(self) -> bool:
        """The session holds no chunk any more; True if a transfer that has ended waited for that."""
        held, self._held = self._held, None
        if held is None or held.ended is None:
            return False
        self._events.append(SendEnded(held.number, held.key, held.ended))
        return True

    def _check_posted(self, slot: int) -> None:
        if slot > self._last_slot:
            raise RemoteProtocolError(detail=f"slot {slot} was never posted")

    def _check_number(self, transfer: int) -> None:
        if not 0 <= transfer < self._next_number:
            raise LocalProtocolError(f"there is no transfer {transfer}")
