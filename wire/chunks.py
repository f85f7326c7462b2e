"""What a session and a tensor channel say to each other: where bytes of a tensor come from and where they go.

The session moves records and knows nothing of tensors; the channel automata (sending.py, slots.py) know tensors and no records.
Between them stand the two protocols of this file and nothing else.  They are pull on the way out: the writer asks for the next
chunk when its socket takes one, so the order can change until the last moment, and a cancelled tensor costs at most the one chunk
that is under way.  On the way in they are "where shall I put it": a record is decrypted once, straight into its final memory.

A chunk is not divisible: whoever took a chunk from a source sends all of it, whoever was told a place fills all of it.  Meanwhile
the memory belongs to the session, whatever becomes of the tensor: on the way out until it asks for the next chunk, on the way in
until it says ``placed``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

PLAIN_CHUNK = 0
PACKED_CHUNK = 1  # flag of the CHUNK frame: planes.py.  Only towards a receiver that listed the feature


@dataclass(frozen=True, slots=True)
class OutChunk:
    """One chunk to send."""

    slot: int
    index: int
    data: memoryview  # a plain one: a view of the caller's buffer, no copy; a packed one: memory of its lane.  Format "B"
    flags: int  # of the CHUNK frame: PLAIN_CHUNK or PACKED_CHUNK


class ChunkSource(Protocol):
    """The sending side of a channel, as the session sees it."""

    @property
    def order(self) -> int:
        """Age of the chunk that ``next_chunk`` would return, lowest first within class 2; 2**63 - 1 when there is none."""

    def next_chunk(self) -> OutChunk | None:
        """Hand over the next chunk; None when nothing is ready (``Session.source_ready`` is called when that changes).

        The caller sends every byte of it even if its tensor is cancelled meanwhile: the CHUNK frame has already said the length.
        Asking says that the chunk before has been read to its end, so a caller asks on until the answer is None.
        """


class ChunkSink(Protocol):
    """The receiving side of a channel, as the session sees it.  On one stream the calls alternate: place, placed, place ..."""

    def place(self, slot: int, index: int, length: int, flags: int) -> memoryview:
        """Return a writable view (format "B") of exactly ``length`` bytes: memory of the slot, or scratch.

        Raises RemoteProtocolError when no honest sender could send this chunk.  The view may be written until ``placed``.
        """

    def placed(self, slot: int, index: int) -> None:
        """All bytes of the chunk are authenticated and written.  Never called for a chunk of which a record failed to verify.

        Raises RemoteProtocolError when it was packed and does not unpack to the chunk that is due.
        """
