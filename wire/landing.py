"""Where chunks land: a posted slot, what a lane is filling, and the end of a lane that a session knows.

The rules that decide who may write where are those of slots.py; here is what they are about.  A lane has at most one reception,
for chunks on a stream come one after another, and a slot knows for every index that is being written which lane writes it.  So
each region of memory has one writer, and the channel can name it.

A plain chunk is written into the slot's memory, record by record.  A packed one (planes.py) is written into scratch of its lane, and
unpacked from there into the slot in one step, when it is complete; until then nothing of it is in the slot.  What it unpacks to is
known only then, before Begin at least, so its place is checked twice: a bound when it is announced, exactly when it is complete.
Scratch belongs to a lane and ends with it.  It is as large as the largest packed chunk that came there, a sixteenth aside: a packed
chunk is 5 % shorter than the plain one, so that is less than a chunk, and a peer that opens many chunk streams for a byte each
makes us hold no more than it was allowed to send, twice what we have posted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from .errors import Code, RemoteProtocolError
from .messages import Begin, Key
from .planes import Planes, raw_size, shrinks


@dataclass(slots=True)
class PostedSlot:
    """A buffer of ours, and what has come into it."""

    number: int
    key: Key | None
    buffer: memoryview
    begin: Begin | None = None
    complete: int = 0  # bitmap by chunk index
    missing: int = 0  # chunks, known from Begin on
    under_way: dict[int, LaneSink] = field(default_factory=dict)  # by chunk index: whose session writes it
    end: int = 0  # end of the furthest chunk so far
    short_end: int | None = None  # the tensor's length as a short chunk, which can only be the last, has told it
    dropped: Code | None = None  # the slot has ended and waits for a chunk under way

    @property
    def total(self) -> int | None:
        """The tensor's length in bytes, if it is known."""
        return self.short_end if self.begin is None else self.begin.raw_len

    def check(self, index: int, length: int, chunk: int) -> None:
        """Raise RemoteProtocolError if no tensor for this slot has a chunk ``index`` of ``length`` bytes; ``chunk``: of a full one."""
        start, total = index * chunk, self.total
        if total is not None:
            honest = length == min(chunk, total - start)
        else:
            # A short chunk is the last one, so nothing that came may lie behind it.
            after = self.end if length < chunk else 0
            honest = after <= start + length <= len(self.buffer)
        if not honest:
            raise RemoteProtocolError(detail=f"chunk {index} of {length} bytes does not belong into slot {self.number}")

    def check_packed(self, index: int, length: int, chunk: int) -> None:
        """The same for ``length`` packed bytes, of which it is not known yet what they unpack to: it must be more than they are."""
        total = len(self.buffer) if self.total is None else self.total
        if not shrinks(length, min(chunk, total - index * chunk)):
            raise RemoteProtocolError(detail=f"packed chunk {index} of {length} bytes does not belong into slot {self.number}")

    def filled(self, index: int, length: int, chunk: int) -> memoryview:
        """The memory of a chunk that passed ``check``, which is taken note of."""
        start = index * chunk
        self.end = max(self.end, start + length)
        if length < chunk:
            self.short_end = start + length
        return self.buffer[start : start + length]


@dataclass(frozen=True, slots=True)
class Reception:
    """The chunk that arrives on a lane and is wanted."""

    state: PostedSlot
    index: int
    length: int  # on the wire
    packed: memoryview | None = None  # where it lies until it is complete; None: in the slot


class LaneSink:
    """Where chunks of one lane go.  Implements ``ChunkSink``; made by ``ReceiverChannel.lane``, dead after ``lane_lost``."""

    __slots__ = ("_complete", "_place", "_scratch", "divert", "number", "reception")

    def __init__(self, number: int, place: Place, complete: Callable[[Reception], None]) -> None:
        self._place = place
        self._complete = complete
        self._scratch = memoryview(b"")
        self.number = number
        self.reception: Reception | None = None
        self.divert: Callable[[memoryview], None] | None = None
        """``Session.divert`` of this lane's chunk stream: the rest of the chunk under way goes into that view instead."""

    def place(self, slot: int, index: int, length: int, flags: int) -> memoryview:
        """See ``ChunkSink``: memory of the slot if the chunk is wanted, the dustbin if it once was, else RemoteProtocolError."""
        return self._place(self, slot, index, length, flags)

    def placed(self, slot: int, index: int) -> None:
        """See ``ChunkSink``: the chunk is complete and immutable from here on, or its buffer can go back at last."""
        reception, self.reception = self.reception, None
        if reception is not None:  # else it went to the dustbin
            self._complete(reception)

    def scratch(self, length: int, chunk: int) -> memoryview:
        """Memory for a packed chunk; nobody else writes there, so it need not be diverted."""
        if len(self._scratch) < length:
            self._scratch = memoryview(bytearray(min(chunk, length + length // 16)))
        return self._scratch[:length]


def unpack(planes: Planes, state: PostedSlot, index: int, packed: memoryview, chunk: int) -> None:
    """Write a complete packed chunk into its slot.  RemoteProtocolError: damaged, or not of the size that is due there."""
    try:
        length = raw_size(packed, chunk)
        state.check(index, length, chunk)
        planes.unpack(packed, state.filled(index, length, chunk))
    except RemoteProtocolError as error:
        raise RemoteProtocolError(error.code, detail=f"slot {state.number}, chunk {index}: {error.detail}") from None


Place = Callable[[LaneSink, int, int, int, int], memoryview]
