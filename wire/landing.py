"""Where chunks land: a posted slot, what a lane is filling, and the end of a lane that a session knows.

The rules that decide who may write where are those of slots.py; here is what they are about.  A lane has at most one reception,
for chunks on a stream come one after another, and a slot knows for every index that is being written which lane writes it.  So
each region of memory has one writer, and the channel can name it.

The bytes of a chunk on the wire and those in the slot are the same today.  A lossless codec of chunks would let a lane write into
scratch of its own and decode from there when the chunk is complete; which of the two it is, a reception would say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from .errors import Code
from .messages import Begin, Key


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


@dataclass(frozen=True, slots=True)
class Reception:
    """The chunk that arrives on a lane and is wanted.  A codec of chunks decodes its scratch into the slot when it is complete."""

    state: PostedSlot
    index: int
    length: int  # on the wire


class LaneSink:
    """Where chunks of one lane go.  Implements ``ChunkSink``; made by ``ReceiverChannel.lane``, dead after ``lane_lost``."""

    __slots__ = ("_complete", "_place", "divert", "number", "reception")

    def __init__(self, number: int, place: Place, complete: Callable[[Reception], None]) -> None:
        self._place = place
        self._complete = complete
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


Place = Callable[[LaneSink, int, int, int, int], memoryview]
