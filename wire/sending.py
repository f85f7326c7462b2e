"""The sending half of a tensor channel.

The receiver posts slots, and only a posted slot may be filled: memory at the other end is planned by its owner, never asked for.
``begin`` takes a slot (one posted for this key first, else the oldest that is open to any), says ``Begin`` and makes the chunks
of the caller's buffer available to the lanes, which pull them one by one.  Nothing is copied (or it goes packed: packing.py): a
chunk is a view of that buffer, which must stay as it is until the transfer has ended.  ``advance`` opens chunks as the device
delivers bytes; a tensor can be half on the network while its second half is still being computed.

Several transfers may be under way.  Chunks go lowest ``order`` first (the oldest microbatch unblocks the most work), and among
equals in the order of ``begin``; a transfer whose next chunk is not ready does not hold up the others.  Which chunks are unsent,
in doubt or asked for is kept in transfers.py.

A slot is used once.  Whatever ends a transfer (Done, Unslot, our own cancel) ends the slot for good, and messages about it that
were already on their way are ignored.  A cancelled transfer says ``Drop``; chunks not yet handed out never are.

**The buffer is the channel's until SendEnded**, the one final event of every transfer.  The reason is the chunk that a session
may just be sealing.  It is sent to its end, and if its memory were used again meanwhile, a cancelled tensor could still arrive
whole, with foreign bytes in its last chunk, before the receiver reads the Drop: it would be delivered.  So a transfer that ends
while sessions hold chunks of it says SendEnded when each has asked for its next one, or its lane is lost.

**The channel outlives its connections.**  A lost lane costs a question, ``Ask``; the answer, ``Have``, says what to send again.
A lost control connection costs everything that was not yet read: after ``attach`` the receiver first repeats its last Dones, then
says each slot it still holds, then ``Posted``.  The token decides what a slot it holds is worth:

* the token of our transfer there: only the chunks it lacks are sent.
* no token: our Begin was lost with the connection.  Begin again, from zero and with a new token, as the chunks were forgotten.
* a token we know nothing of: the transfer was cancelled and its Drop lost, or an earlier sender began it.  Drop.

What is not said by ``Posted`` was withdrawn: REFUSED, and the caller puts the tensor into another slot (``moved=True``, because it
may have been delivered after all, and DUPLICATE then means that it arrived).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from enum import Enum

from .channelevents import SendEnded, SenderEvent, SlotsChanged
from .chunks import PLAIN_CHUNK, OutChunk
from .errors import Code, LocalProtocolError, RemoteProtocolError, known_code
from .limits import DEFAULT_LIMITS, Limits
from .messages import Ask, Begin, Done, Drop, Have, Key, Posted, Slot, Unslot, encode
from .packing import Packing
from .tensor import PLAIN, DType
from .transfers import NO_ORDER, LaneSource, OpenSlot, Queue, Transfer, checked, full_bitmap

__all__ = ["NO_ORDER", "LaneSource", "SendEnded", "SenderChannel", "SenderEvent", "SlotsChanged"]


class _Phase(Enum):
    """What is known of the receiver's slots."""

    DETACHED = 0  # there is no control stream
    TELLING = 1  # it is saying which slots it holds
    KNOWN = 2  # after its ``Posted``


class SenderChannel:
    """Sans-IO automaton of the side that sends.  Starts detached.

    After any call: send what ``messages()`` returns on the channel's message stream, look at ``events()``, and tell the sessions
    ``source_ready`` if ``has_chunk``.  ``on_change`` is called for events that appear while a session asks for a chunk, where
    nobody else would look; it may not call back into the channel.  Every method that raises LocalProtocolError leaves the channel
    untouched; after a RemoteProtocolError the connections must end: ``detach`` or ``close``.
    """

    def __init__(
        self,
        random_bytes: Callable[[int], bytes],
        limits: Limits = DEFAULT_LIMITS,
        *,
        on_change: Callable[[], None] = lambda: None,
        packing: Packing | None = None,
    ) -> None:
        self.resent_chunks = 0  # written more than once
        self._random_bytes = random_bytes
        self._limits = limits
        self._on_change = on_change
        self._packing = packing  # None: every chunk goes plain
        self._phase = _Phase.DETACHED
        self._last_slot = -1
        self._said = 0  # slots since ``attach``
        self._open: dict[int, OpenSlot] = {}  # posted and unused, in order of posting
        self._by_slot: dict[int, Transfer] = {}
        self._queue = Queue(limits.chunk_bytes)
        self._ending: set[Transfer] = set()  # have ended, a session holds a chunk
        self._lanes: dict[int, LaneSource] = {}
        self._next_number = 0
        self._messages: list[Begin | Drop | Ask] = []
        self._events: list[SenderEvent] = []
        self._closed = False

    # -- towards the application

    def free_slots(self, key: Key | None = None, size_bytes: int = 0) -> int:
        """How many posted slots would take a tensor of this key and size now; without a key only those open to any key count."""
        return sum(slot.takes(key, size_bytes) for slot in self._open.values())

    @property
    def transfers(self) -> int:
        """Transfers that have not ended: 0 when idle."""
        return len(self._by_slot) + len(self._ending)

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
        moved: bool = False,
    ) -> int:
        """Begin to send ``data`` (contiguous, unchanged until the transfer ends) under ``key``; returns the transfer's number.

        ``ready_bytes``: how many bytes from the front may go now, None = all.  ``moved``: a transfer of it was REFUSED before, so
        that DUPLICATE means that it has arrived.  Raises LocalProtocolError when no posted slot takes it (ask ``free_slots``
        before), when the buffer is not contiguous or too large, a key or tag is out of bounds, or the channel is closed.
        """
        if self._closed:
            raise LocalProtocolError("the channel is closed")
        data, ready = checked(data, shape, order, ready_bytes, self._limits)
        slot = self._choose(key, len(data))
        if slot is None:
            raise LocalProtocolError(f"no slot for {len(data)} bytes under {key!r} is posted")
        message = Begin(slot, key, order, dtype, shape, codec, len(data), self._random_bytes(8), tags)
        encode(message)  # refuses a key, order or tag out of bounds while nothing has changed yet
        if self._packing is not None:
            self._packing.begins(message)
        del self._open[slot]
        count = -(-len(data) // self._limits.chunk_bytes)
        transfer = Transfer(self._next_number, message, data, count, ready, moved, full_bitmap(count))
        self._next_number += 1
        self._by_slot[slot] = self._queue.by_number[transfer.number] = transfer
        self._queue.changed()
        self._messages.append(message)
        return transfer.number

    def advance(self, transfer: int, ready_bytes: int) -> None:
        """Allow the chunks within the first ``ready_bytes`` to go.  Ignored for a transfer that has ended; it may not fall."""
        state = self._queue.by_number.get(transfer)
        if state is None:
            self._check_number(transfer)
            return
        if not state.ready_bytes <= ready_bytes <= len(state.data):
            raise LocalProtocolError(f"{ready_bytes} ready bytes after {state.ready_bytes}, of {len(state.data)}")
        state.ready_bytes = ready_bytes
        self._queue.changed()

    def cancel(self, transfer: int) -> bool:
        """Stop sending; the slot is burned at both ends and SendEnded follows.  False if the transfer had ended already."""
        state = self._queue.by_number.get(transfer)
        if state is None:
            self._check_number(transfer)
            return False
        if not state.waiting:  # else the slot is dropped when the receiver says that it holds it
            self._messages.append(Drop(state.slot, state.key, Code.CANCELLED))
        self._end(state, Code.CANCELLED)
        return True

    def close(self, code: Code) -> None:
        """The channel is over and no session reads any more: every transfer ends with ``code``, no slot is left.  Idempotent."""
        self._closed = True
        self._lose_all()
        for state in list(self._by_slot.values()):
            self._end(state, code)

    def messages(self) -> list[Begin | Drop | Ask]:
        """Take the messages to send, in order."""
        taken, self._messages = self._messages, []
        return taken

    def events(self) -> list[SenderEvent]:
        """Take what happened, in order."""
        taken, self._events = self._events, []
        return taken

    # -- towards the connections

    def attach(self) -> None:
        """A control stream was opened (again).  No slot is known until the receiver has said it; transfers wait for theirs."""
        if self._closed or self._phase is not _Phase.DETACHED:
            raise LocalProtocolError("the channel is closed or has a control stream")
        self._phase = _Phase.TELLING
        self._last_slot, self._said = -1, 0

    def detach(self) -> None:
        """The control connection is gone, and every lane with it.  Idempotent."""
        self._lose_all()
        for state in self._by_slot.values():
            state.suspend()

    def lane(self, number: int) -> LaneSource:
        """A lane was opened; its session pulls from what this returns.  LocalProtocolError: it is open already."""
        if self._closed or number in self._lanes:
            raise LocalProtocolError(f"the channel is closed or has lane {number}")
        lane = self._lanes[number] = LaneSource(number, self._queue, self._pull)
        return lane

    def lane_lost(self, number: int) -> None:
        """The session of that lane reads no more.  What was written there is asked for.  Idempotent."""
        lane = self._lanes.pop(number, None)
        if lane is None:
            return
        lane.sever()
        self._let_go(lane)
        doubtful = sorted(state.slot for state in self._by_slot.values() if state.lane_lost(number))
        if doubtful:
            self._messages.append(Ask(number, tuple(doubtful)))

    def in_doubt(self, number: int) -> bool:
        """Whether chunks were written to that lane whose transfer has not ended: then the lane should make progress."""
        return any(number in state.doubt for state in self._by_slot.values())

    @property
    def unsent_bytes(self) -> int:
        """Of tensors that were begun: what no lane has taken yet."""
        return sum(state.unsent_bytes(self._limits.chunk_bytes) for state in self._by_slot.values())

    @property
    def has_chunk(self) -> bool:
        """Whether a lane that asks would get a chunk."""
        return self._queue.next() is not None

    # -- from the peer

    def on_message(self, message: Slot | Unslot | Done | Have | Posted) -> None:
        """Take a message of the receiver.  Raises RemoteProtocolError when an honest receiver could not have sent it."""
        if self._closed or self._phase is _Phase.DETACHED:
            return
        telling = self._phase is _Phase.TELLING
        match message:
            case Slot():
                self._on_slot(message, telling)
            case Done():
                self._on_done(message, telling)
            case Posted():
                self._on_posted(message, telling)
            case Unslot() | Have() if telling:
                raise RemoteProtocolError(detail=f"{type(message).__name__} before Posted")
            case Unslot():
                self._on_unslot(message)
            case Have():
                self._on_have(message)

    def _on_slot(self, message: Slot, telling: bool) -> None:
        if message.slot <= self._last_slot:
            raise RemoteProtocolError(detail=f"slot {message.slot} after {self._last_slot}: slots ascend and are used once")
        if (self._said if telling else len(self._open) + len(self._by_slot)) >= self._limits.slots_open_max:
            raise RemoteProtocolError(detail=f"more than {self._limits.slots_open_max} open slots")
        if (message.token is None) != (message.bitmap is None) or (message.token is not None and (message.key is None or not telling)):
            raise RemoteProtocolError(detail=f"slot {message.slot} is posted with half of what a slot in use has")
        if message.token is None:
            self._on_empty_slot(message)
        else:
            self._on_filled_slot(message, message.token)
        self._last_slot = message.slot
        self._said += 1

    def _on_empty_slot(self, message: Slot) -> None:
        slot = OpenSlot(message.key, message.max_bytes)
        state = self._by_slot.get(message.slot)
        if state is not None and slot.takes(state.key, len(state.data)):
            state.restart(replace(state.begin, token=self._random_bytes(8)))
            self._messages.append(state.begin)
            self._queue.changed()
            return
        if state is not None:  # the receiver has started anew, and this is another slot under the same number
            self._end(state, Code.REFUSED)
        self._open[message.slot] = slot
        self._events.append(SlotsChanged())

    def _on_filled_slot(self, message: Slot, token: bytes) -> None:
        state = self._by_slot.get(message.slot)
        if state is not None and token == state.begin.token:
            if message.key != state.key:
                raise RemoteProtocolError(detail=f"slot {message.slot} is said to be in use by another key")
            state.resume(state.bitmap(message.bitmap or b""))
            self._queue.changed()
            return
        if message.key is not None:
            self._messages.append(Drop(message.slot, message.key, Code.CANCELLED))
        if state is not None:
            self._end(state, Code.REFUSED)

    def _on_posted(self, message: Posted, telling: bool) -> None:
        if not telling or message.next_slot <= self._last_slot:
            raise RemoteProtocolError(detail=f"Posted({message.next_slot}) after slot {self._last_slot}")
        self._phase = _Phase.KNOWN
        self._last_slot = message.next_slot - 1
        for state in [state for state in self._by_slot.values() if state.waiting]:
            self._end(state, Code.REFUSED)

    def _on_unslot(self, message: Unslot) -> None:
        self._check_posted(message.slot)
        if self._open.pop(message.slot, None) is not None:
            self._events.append(SlotsChanged())
        elif (state := self._by_slot.get(message.slot)) is not None:
            # Our Begin and its Unslot have crossed.
            self._end(state, Code.REFUSED)

    def _on_done(self, message: Done, telling: bool) -> None:
        state = self._by_slot.get(message.slot)
        if telling and (state is None or message.key != state.key):
            return  # repeated, and we have read it before
        self._check_posted(message.slot, telling)
        if state is None:
            if message.slot in self._open:
                raise RemoteProtocolError(detail=f"Done for slot {message.slot}, into which nothing was sent")
            return  # it has crossed our Drop
        if message.key != state.key:
            raise RemoteProtocolError(detail=f"Done for slot {message.slot} names another key")
        if message.code == Code.OK and state.written != full_bitmap(state.count):
            raise RemoteProtocolError(detail=f"Done for slot {message.slot} before all of it was sent")
        code = known_code(message.code)[0]
        self._end(state, Code.OK if code is Code.DUPLICATE and state.moved else code)

    def _on_have(self, message: Have) -> None:
        self._check_posted(message.slot)
        state = self._by_slot.get(message.slot)
        if state is None:
            if message.slot in self._open:
                raise RemoteProtocolError(detail=f"Have for slot {message.slot}, into which nothing was sent")
            return  # it has crossed our Drop
        if not state.asked or message.token != state.begin.token:
            raise RemoteProtocolError(detail=f"Have for slot {message.slot} that answers no Ask")
        state.answered(state.bitmap(message.bitmap))
        self._queue.changed()

    # -- inside

    def _pull(self, lane: LaneSource) -> OutChunk | None:
        if self._let_go(lane):
            self._on_change()
        state = None if lane.paused else self._queue.next()
        if state is None:
            return None
        index = self._queue.lowest(state)
        self.resent_chunks += state.take(index, lane.number)
        lane.held = state
        state.holders += 1
        self._queue.changed()
        start = index * self._limits.chunk_bytes
        chunk = OutChunk(state.slot, index, state.data[start : start + self._limits.chunk_bytes], PLAIN_CHUNK)
        return chunk if self._packing is None else self._packing.pack(state.begin, chunk, lane)

    def _choose(self, key: Key, size_bytes: int) -> int | None:
        fitting = [(slot.key is None, number) for number, slot in self._open.items() if slot.takes(key, size_bytes)]
        return min(fitting)[1] if fitting else None

    def _end(self, state: Transfer, code: Code) -> None:
        del self._by_slot[state.slot], self._queue.by_number[state.number]
        self._queue.changed()
        if state.holders:
            state.ended = code
            self._ending.add(state)
        else:
            self._events.append(SendEnded(state.number, state.key, code))

    def _let_go(self, lane: LaneSource) -> bool:
        """The session holds no chunk any more; True if a transfer that has ended waited for that alone."""
        held, lane.held = lane.held, None
        if held is None:
            return False
        held.holders -= 1
        if held.ended is None or held.holders:
            return False
        self._ending.remove(held)
        self._events.append(SendEnded(held.number, held.key, held.ended))
        return True

    def _lose_all(self) -> None:
        self._phase = _Phase.DETACHED
        for lane in self._lanes.values():
            lane.sever()
            self._let_go(lane)
        self._lanes.clear()
        self._messages.clear()
        if self._open:
            self._open.clear()
            self._events.append(SlotsChanged())
        self._queue.changed()

    def _check_posted(self, slot: int, telling: bool = False) -> None:
        if slot > self._last_slot and not telling:
            raise RemoteProtocolError(detail=f"slot {slot} was never posted")

    def _check_number(self, transfer: int) -> None:
        if not 0 <= transfer < self._next_number:
            raise LocalProtocolError(f"there is no transfer {transfer}")
