"""One stream: its automaton, as a table, and the bytes that wait in it.

Everything that changes the state of a stream is in `TRANSITIONS`; it does not know which side we are.  A missing entry is a
violation by whoever caused the input: `LocalProtocolError` or `RemoteProtocolError`, decided by the caller.  What did not fit
into the table: whether our OPEN or ACCEPT has been *sealed* (the scheduler's business: data never overtake them), and whether
the application has read to the end.

Bytes out.  A message is kept as immutable bytes, one record each.  On a byte stream the caller's memory is kept as it is, not
copied, and cut into records when the socket takes them; pieces below `COPIED_BELOW_BYTES` are copied together, because a
record a piece would cost more than the copy, and because the caller of small writes expects to reuse its buffer.

Bytes in.  A record is decrypted once, into the place from which it is read: the buffer that a waiting reader posted, if it
fits; a buffer of its own from 16 KiB on; a shared segment below that.  Small records share because a peer may send one byte a
record, and an object for each would be memory out of all proportion to the window.  Waste is at most what is kept: a segment
is abandoned only for a record that did not fit into its rest.  A place is never memory that was verified before: an AEAD
writes before it knows.
"""

from __future__ import annotations

from collections import deque
from enum import IntEnum

import numpy as np

from .chunks import ChunkSink, ChunkSource
from .errors import LocalProtocolError, RemoteProtocolError
from .events import Kind, Readable
from .flow import ReceiveWindow, SendWindow

SEGMENT_BYTES = 16 << 10  # a sixteenth of a record: the share of a window that small records can waste stays small
COPIED_BELOW_BYTES = 4 << 10  # copying 4 KiB costs ~0.2 us, a record of its own ~5 us
COPIED_TOGETHER_BYTES = 16 << 10  # a record that is worth its cost


class State(IntEnum):
    """IDLE is before OPEN.  OPENING: we opened, no ACCEPT yet; PENDING: the peer opened, we have not accepted.  A suffix
    names who sent its FIN.
    """

    IDLE = 0
    OPENING = 1
    OPENING_LOCAL = 2
    PENDING = 3
    PENDING_REMOTE = 4
    OPEN = 5
    HALF_LOCAL = 6
    HALF_REMOTE = 7
    CLOSED = 8


class Input(IntEnum):
    """SEND is ours, RECV the peer's.  DATA and CHUNK move nothing, but are allowed only where the table has them."""

    SEND_OPEN = 0
    RECV_OPEN = 1
    SEND_ACCEPT = 2
    RECV_ACCEPT = 3
    SEND_DATA = 4
    RECV_DATA = 5
    SEND_FIN = 6
    RECV_FIN = 7
    SEND_RESET = 8
    RECV_RESET = 9
    RECV_CREDIT = 10
    READ = 11


_S, _I = State, Input
LIVE = (_S.OPENING, _S.OPENING_LOCAL, _S.PENDING, _S.PENDING_REMOTE, _S.OPEN, _S.HALF_LOCAL, _S.HALF_REMOTE)

TRANSITIONS: dict[tuple[State, Input], State] = {
    (_S.IDLE, _I.SEND_OPEN): _S.OPENING,
    (_S.IDLE, _I.RECV_OPEN): _S.PENDING,
    (_S.OPENING, _I.RECV_ACCEPT): _S.OPEN,
    (_S.OPENING_LOCAL, _I.RECV_ACCEPT): _S.HALF_LOCAL,
    (_S.PENDING, _I.SEND_ACCEPT): _S.OPEN,
    (_S.PENDING_REMOTE, _I.SEND_ACCEPT): _S.HALF_REMOTE,
    # The opener may send within the start credit before it is accepted; the other side accepts before it sends or reads.
    **{(s, _I.SEND_DATA): s for s in (_S.OPENING, _S.OPEN, _S.HALF_REMOTE)},
    **{(s, _I.RECV_DATA): s for s in (_S.PENDING, _S.OPEN, _S.HALF_LOCAL)},
    (_S.OPENING, _I.SEND_FIN): _S.OPENING_LOCAL,
    (_S.OPEN, _I.SEND_FIN): _S.HALF_LOCAL,
    (_S.HALF_REMOTE, _I.SEND_FIN): _S.CLOSED,
    (_S.PENDING, _I.RECV_FIN): _S.PENDING_REMOTE,
    (_S.OPEN, _I.RECV_FIN): _S.HALF_REMOTE,
    (_S.HALF_LOCAL, _I.RECV_FIN): _S.CLOSED,
    # Credit comes with ACCEPT first.  It may cross our FIN.
    **{(s, _I.RECV_CREDIT): s for s in (_S.OPEN, _S.HALF_LOCAL, _S.HALF_REMOTE)},
    **{(s, _I.READ): s for s in (_S.OPENING, _S.OPENING_LOCAL, _S.OPEN, _S.HALF_LOCAL, _S.HALF_REMOTE, _S.CLOSED)},
    **{(s, i): _S.CLOSED for s in LIVE for i in (_I.SEND_RESET, _I.RECV_RESET)},
    # Frames that were under way when we reset or finished: counted against the connection's credit, then dropped.
    **{(_S.CLOSED, i): _S.CLOSED for i in (_I.RECV_ACCEPT, _I.RECV_DATA, _I.RECV_FIN, _I.RECV_CREDIT)},
    **{(_S.CLOSED, i): _S.CLOSED for i in (_I.RECV_RESET, _I.SEND_RESET)},
}

MAY_SEND = frozenset(state for state, symbol in TRANSITIONS if symbol is Input.SEND_DATA)
MAY_RECEIVE = frozenset(state for state, symbol in TRANSITIONS if symbol is Input.RECV_DATA and state is not State.CLOSED)
MAY_READ = frozenset(state for state, symbol in TRANSITIONS if symbol is Input.READ)


class Stream:
    """A live stream.  Its fields are read by the rooms of the session and by nobody else."""

    __slots__ = (
        "accepted", "arriving", "at", "chunk", "cls", "copies", "eof_read", "filled", "fin_queued", "fin_received",
        "fin_sealed", "id", "into", "kind", "least", "messages", "need", "opened", "order", "posted", "posted_filled",
        "protocol", "queue", "queued", "readable", "reading", "receiving", "recv", "region", "region_start", "region_stop",
        "segments", "send", "sending", "sink", "source", "state", "wants_drained",
    )  # fmt: skip

    def __init__(
        self, number: int, kind: Kind, cls: int, protocol: str, order: int, send: SendWindow, recv: ReceiveWindow
    ) -> None:
        self.id = number
        self.kind = kind
        self.cls = cls
        self.protocol = protocol
        self.order = order
        self.state = State.IDLE
        self.sending = self.receiving = self.reading = False  # derived from the state by `move`
        self.accepted = False  # ACCEPT was sent or received
        self.opened = False  # our OPEN or ACCEPT is sealed: data may follow
        self.send = send
        self.recv = recv
        # out
        self.queue: deque[bytes | bytearray | memoryview] = deque()
        self.at = 0  # offset in the first piece
        self.queued = 0  # bytes accepted and not sealed
        self.copies: bytearray | None = None  # the last piece of the queue, if it is ours to extend
        self.fin_queued = self.fin_sealed = self.fin_received = False
        self.need = 0  # bytes that a sender waits for; 0 = nobody waits
        self.wants_drained = False
        self.source: ChunkSource | None = None
        self.chunk: memoryview | None = None  # the chunk under way
        # in
        self.readable = Readable(number)
        self.messages: deque[bytes] = deque()
        self.segments: deque[memoryview] = deque()
        self.region = _NOWHERE  # the shared segment: [start, stop) is verified and unread, behind it is room
        self.region_start = self.region_stop = 0
        self.posted: memoryview | None = None
        self.posted_filled = 0
        self.least = 1
        self.into = _NOWHERE
        self.eof_read = False
        self.sink: ChunkSink | None = None
        self.arriving: memoryview | None = None  # the place of the chunk that is arriving
        self.filled = (0, 0, 0)  # slot, index, bytes

    def move(self, symbol: Input) -> bool:
        """Apply an input; False, with nothing changed, if the table has no entry."""
        state = TRANSITIONS.get((self.state, symbol))
        if state is None:
            return False
        self.state = state
        self.sending = state in MAY_SEND
        self.receiving = state in MAY_RECEIVE
        self.reading = state in MAY_READ
        return True

    # -- out

    def put(self, data: bytes | bytearray | memoryview) -> None:
        """Queue bytes of a byte stream."""
        size = len(data)
        self.queued += size
        if size >= COPIED_BELOW_BYTES:
            self.queue.append(data)
            self.copies = None
        elif self.copies is not None and len(self.copies) + size <= COPIED_TOGETHER_BYTES:
            self.copies += data
        else:
            self.copies = bytearray(data)
            self.queue.append(self.copies)

    def cut(self, size: int) -> memoryview:
        """Take at most `size` bytes off the queue of a byte stream, never across two pieces.

        Let the view go before the next `put`: a piece cannot grow while it exists.
        """
        piece = self.queue[0]
        at = self.at
        if len(piece) - at <= size:
            self.queue.popleft()
            self.at = 0
            if piece is self.copies:
                self.copies = None
            view = memoryview(piece)[at:] if at else memoryview(piece)
        else:
            self.at = at + size
            view = memoryview(piece)[at : at + size]
        self.queued -= len(view)
        return view

    def copy_queued(self) -> None:
        """Replace the caller's memory by copies, so that the caller may reuse it; a chunk under way by a copy of its rest."""
        if self.chunk is not None:
            self.chunk = memoryview(bytes(self.chunk))
        self.queue = deque(piece if isinstance(piece, bytes) else bytes(piece) for piece in self.queue)
        self.copies = None

    def drop_queued(self) -> int:
        """Forget what is not sealed; returns the bytes whose credit goes back (a chunk has none)."""
        size, self.queued, self.at = self.queued, 0, 0
        self.queue.clear()
        self.copies = self.chunk = self.source = None
        self.fin_queued = False
        return size

    # -- in

    def destination(self, size: int) -> memoryview:
        """Where the next `size` verified bytes of a byte stream shall go; `commit` follows, or the connection is dead."""
        posted = self.posted
        if posted is not None and not self.segments and self.region_start == self.region_stop:
            filled = self.posted_filled
            if size <= len(posted) - filled:
                self.into = posted
                return posted[filled : filled + size]
        if size < SEGMENT_BYTES:
            if size > len(self.region) - self.region_stop:
                self._close_region()
                self.region = memoryview(bytearray(SEGMENT_BYTES))
            self.into = self.region
            return self.region[self.region_stop : self.region_stop + size]
        self.into = np.empty(size, np.uint8).data
        return self.into

    def commit(self, size: int) -> bool:
        """The bytes of `destination` are verified.  True if they lie in the posted buffer: read already."""
        into = self.into
        if into is self.posted:
            self.posted_filled += size
            return True
        if into is self.region:
            self.region_stop += size
        else:
            self._close_region()
            self.segments.append(into)
            self.into = _NOWHERE
        return False

    def take(self, max_bytes: int) -> memoryview | None:
        """The next bytes, at most `max_bytes`, without a copy; None if there are none."""
        if self.segments:
            view = self.segments[0]
            if len(view) <= max_bytes:
                self.segments.popleft()
                return view
            self.segments[0] = view[max_bytes:]
            return view[:max_bytes]
        start = self.region_start
        size = min(self.region_stop - start, max_bytes)
        if size <= 0:
            return None
        self.region_start = start + size
        return self.region[start : start + size]

    def put_back(self, data: bytes) -> None:
        """Return bytes to the front, for a reader that was cancelled."""
        self.segments.appendleft(memoryview(data))

    @property
    def has_unread(self) -> bool:
        """Whether a read would return bytes."""
        return bool(self.messages or self.segments or self.region_start < self.region_stop)

    def drop_unread(self) -> None:
        """Forget what the application has not read."""
        self.messages.clear()
        self.segments.clear()
        self.region = self.into = _NOWHERE
        self.region_start = self.region_stop = 0
        self.posted = self.arriving = self.sink = None

    def _close_region(self) -> None:
        if self.region_start < self.region_stop:
            self.segments.append(self.region[self.region_start : self.region_stop])
        self.region = _NOWHERE
        self.region_start = self.region_stop = 0


_NOWHERE = memoryview(bytearray())  # writable: an AEAD writes its zero bytes into it


def move_local(stream: Stream, symbol: Input) -> None:
    """Apply our own input.  Raises LocalProtocolError, with the stream untouched, if it is not allowed now."""
    if not stream.move(symbol):
        raise LocalProtocolError(f"{symbol.name} on stream {stream.id} in state {stream.state.name}")


def move_remote(stream: Stream, symbol: Input) -> None:
    """Apply the peer's input.  Raises RemoteProtocolError if it is not allowed now."""
    if not stream.move(symbol):
        raise RemoteProtocolError(detail=f"{symbol.name} on stream {stream.id} in state {stream.state.name}")
