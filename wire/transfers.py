"""What a sender still has to send: transfers, the chunks each lacks, and the one queue from which all lanes pull.

A chunk of a transfer is in one of four states, each a bitmap over chunk indices, so that a lost lane moves whole sets at once:

* unsent: nobody has taken it.  The lowest goes first, so chunks that come back go before those that were never sent.
* in doubt on a lane: that lane's session took it.  Whether it arrived is known only when the receiver says so, since what a
  socket has accepted may be lost with the connection.  A chunk is in doubt on one lane at most.
* asked: the lane is lost and an ``Ask`` is on its way.  Questions are answered in order, so these are a queue of bitmaps, and a
  second lane may be lost before the first answer.  Sending such a chunk again before the answer would send it twice for nothing.
* had: the receiver has said that it is complete.  Not kept, it is what is left.

``written`` is the union of all that was ever taken: an honest receiver cannot have what never left.

Lanes pull, so the faster lane carries more and one tensor uses all of them; nobody plans which lane a chunk takes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from .chunks import OutChunk
from .errors import Code, LocalProtocolError, RemoteProtocolError
from .limits import Limits
from .messages import Begin, Key
from .tensor import check_shape

NO_ORDER = 2**63 - 1


def full_bitmap(count: int) -> int:
    """Bits 0 to ``count`` - 1."""
    return (1 << count) - 1


def pack_bitmap(bits: int, count: int) -> bytes:
    """As ``Slot`` and ``Have`` carry it: bit i of byte i // 8, lowest first, no byte more than ``count`` chunks need."""
    return bits.to_bytes(-(-count // 8), "little")


def checked(data: memoryview, shape: tuple[int, ...], order: int, ready_bytes: int | None, limits: Limits) -> tuple[memoryview, int]:
    """What a transfer may begin with: the bytes, and how many from the front may go now.  Raises LocalProtocolError."""
    check_shape(shape)
    if not data.c_contiguous:
        raise LocalProtocolError("only contiguous memory can be sent")
    data = data.cast("B")
    if len(data) > limits.tensor_max_bytes:
        raise LocalProtocolError(f"a tensor has at most {limits.tensor_max_bytes} bytes, not {len(data)}")
    if order >= NO_ORDER:
        raise LocalProtocolError(f"an order is below 2**63 - 1, which says that nothing is ready, not {order}")
    ready = len(data) if ready_bytes is None else ready_bytes
    if not 0 <= ready <= len(data):
        raise LocalProtocolError(f"{ready} of {len(data)} bytes cannot be ready")
    return data, ready


@dataclass(slots=True)
class OpenSlot:
    """A posted slot that is unused."""

    key: Key | None
    max_bytes: int

    def takes(self, key: Key | None, size_bytes: int) -> bool:
        """Whether a tensor of this key (None: of a key not named) and size may go there."""
        return self.max_bytes >= size_bytes and self.key in (None, key)


@dataclass(slots=True, eq=False)
class Transfer:
    """A tensor on its way out."""

    number: int
    begin: Begin  # as said last
    data: memoryview
    count: int  # of chunks
    ready_bytes: int
    moved: bool  # it may have been delivered over a connection that is lost: DUPLICATE is then good news
    unsent: int
    written: int = 0
    doubt: dict[int, int] = field(default_factory=dict)  # by lane
    asked: deque[int] = field(default_factory=deque)  # bitmaps, oldest question first
    waiting: bool = False  # for the receiver to say its slot again
    holders: int = 0  # lanes whose session has a chunk of it
    ended: Code | None = None  # over, but a session holds a chunk

    @property
    def slot(self) -> int:
        return self.begin.slot

    @property
    def key(self) -> Key:
        return self.begin.key

    @property
    def order(self) -> int:
        return self.begin.order

    def unsent_bytes(self, chunk_bytes: int) -> int:
        """What no lane has taken; all of it while the receiver's word on the slot is awaited, for it may have forgotten."""
        return len(self.data) if self.waiting else min(len(self.data), self.unsent.bit_count() * chunk_bytes)

    def take(self, index: int, lane: int) -> bool:
        """Chunk ``index`` goes to a lane; True if it was written before."""
        bit = 1 << index
        again = bool(self.written & bit)
        self.unsent &= ~bit
        self.written |= bit
        self.doubt[lane] = self.doubt.get(lane, 0) | bit
        return again

    def lane_lost(self, lane: int) -> bool:
        """What the lane carried is to be asked for; False if it carried nothing."""
        bits = self.doubt.pop(lane, 0)
        if bits:
            self.asked.append(bits)
            self.moved = True
        return bool(bits)

    def answered(self, had: int) -> None:
        """The receiver has answered the oldest question."""
        self.unsent |= self.asked.popleft() & ~had

    def suspend(self) -> None:
        """Every connection is gone; nothing is sent before the receiver has said the slot again."""
        self.waiting = self.moved = True
        self.unsent = 0
        self.doubt.clear()
        self.asked.clear()

    def resume(self, had: int) -> None:
        """The receiver holds the slot and these chunks."""
        self.waiting = False
        self.unsent = full_bitmap(self.count) & ~had

    def restart(self, begin: Begin) -> None:
        """The receiver holds the slot but has forgotten what came into it."""
        self.begin, self.waiting, self.written = begin, False, 0
        self.unsent = full_bitmap(self.count)

    def bitmap(self, text: bytes) -> int:
        """Read a bitmap of the receiver's.  RemoteProtocolError: it has chunks that never left."""
        bits = int.from_bytes(text, "little")
        if bits & ~self.written:
            raise RemoteProtocolError(detail=f"slot {self.slot} is said to have chunks that were never sent")
        return bits


class Queue:
    """Transfers under way, and which chunk goes next: lowest (order, age) whose lowest unsent chunk is ready."""

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk = chunk_bytes
        self.by_number: dict[int, Transfer] = {}  # in order of age
        self._best: Transfer | None = None
        self._looked = False

    def changed(self) -> None:
        """Something that decides what is next may have changed."""
        self._looked = False

    def next(self) -> Transfer | None:
        """Whose chunk goes next.  Asked several times a chunk, looked for once."""
        if self._looked:
            return self._best
        best: Transfer | None = None
        for state in self.by_number.values():
            if state.unsent and (best is None or state.order < best.order):
                start = self.lowest(state) * self._chunk
                if min(start + self._chunk, len(state.data)) <= state.ready_bytes:
                    best = state
        self._best, self._looked = best, True
        return best

    @staticmethod
    def lowest(state: Transfer) -> int:
        """Index of the lowest unsent chunk; there must be one."""
        return (state.unsent & -state.unsent).bit_length() - 1

    @property
    def order(self) -> int:
        """Order of the transfer whose chunk goes next; ``NO_ORDER`` if none is ready."""
        state = self.next()
        return NO_ORDER if state is None else state.order


class LaneSource:
    """What one lane pulls from.  Implements ``ChunkSource``; made by ``SenderChannel.lane``, empty for ever after ``lane_lost``."""

    __slots__ = ("_pull", "_queue", "held", "number", "paused", "scratch")

    def __init__(self, number: int, queue: Queue, pull: Callable[[LaneSource], OutChunk | None]) -> None:
        self.number = number
        self.paused = False  # no new chunks: the lane is about to end, what it has under way is finished
        self.held: Transfer | None = None  # of which the session has the chunk handed out last
        self.scratch: memoryview | None = None  # where that chunk lies if it went packed (packing.py)
        self._queue = queue
        self._pull: Callable[[LaneSource], OutChunk | None] | None = pull

    def sever(self) -> None:
        """The session reads no more."""
        self._pull = None

    @property
    def order(self) -> int:
        """Lowest order of a chunk that is ready; ``NO_ORDER`` if none is."""
        return NO_ORDER if self._pull is None or self.paused else self._queue.order

    def next_chunk(self) -> OutChunk | None:
        """The next chunk by (order, age); None if none is ready.  Asking says that the chunk before has been read."""
        return None if self._pull is None else self._pull(self)
