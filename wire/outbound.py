"""Records out: from streams and answers to sealed bytes, by priority.

`pull` seals records back to back into one buffer that is used again and again, and returns a view of it: one system call
sends them all, and no byte is copied between the application's memory and the ciphertext.  The view is valid until the next
`pull`.

Two buffers.  Without bulk a connection uses a small one, so that five hundred idle peers cost nothing; the large one (budget
plus one record) exists while bulk flows and is given up by `tick` when it stopped.

How much plaintext a bulk record carries is the scheduling quantum: `record_quantum_s` at the rate at which the socket takes
bytes, so that a control message waits at most that long behind it.  The rate is what the writer shows us: while bulk waits it
comes back as soon as the socket has taken the last pull, so bytes per time between pulls is the rate.  Idle time is not
counted.  A measurement ends after one quantum of time, or a mebibyte (at less than 20 ms it makes the largest record anyway,
and short bursts would never measure otherwise).
"""

from __future__ import annotations

from .connection import Connection, ConnectionState
from .events import Kind, Writable
from .inbound import CHUNK, CHUNK_BODY, DATA
from .records import FLAG_FIN, FrameType, Sealer
from .scheduler import CONTROL, MESSAGES, TENSORS
from .streams import Stream

MEASURED_BYTES = 1 << 20
SMALL_PULL_BYTES = 64 << 10  # of class 0 and 1 at once: ten largest messages would make the buffer large for nothing
SLACK_BYTES = 1 << 10  # CHUNK and REKEY records beside the one that was asked for
REKEY = int(FrameType.REKEY)
NO_ORDER = 2**63 - 1  # what a source without a chunk says
OPENING = frozenset((int(FrameType.OPEN), int(FrameType.ACCEPT)))


class Outbound:
    """The sending half of a session."""

    __slots__ = ("_busy", "_bytes", "_conn", "_large", "_sealer", "_seconds", "_small", "bytes_per_s", "last_out", "pulled_at", "quantum")

    def __init__(self, conn: Connection, sealer: Sealer, now: float) -> None:
        self._conn = conn
        self._sealer = sealer
        limits = conn.limits
        self._small = memoryview(
            bytearray(SMALL_PULL_BYTES + max(limits.message_max_bytes, limits.record_plaintext_min_bytes) + SLACK_BYTES)
        )
        self._large: memoryview | None = None
        self.quantum = limits.record_plaintext_start_bytes  # plaintext bytes of a bulk record
        self._busy = False  # bulk was left over at the last pull
        self._bytes = 0
        self._seconds = 0.0
        self.bytes_per_s = 0.0  # at the last measurement
        self.pulled_at = now
        self.last_out = now

    @property
    def wants_write(self) -> bool:
        """Whether `pull` would return something."""
        return True if self._conn.scheduler else bool(self._conn.replies)

    def pull(self, budget: int, now: float) -> list[memoryview]:
        """Seal records by priority until about `budget` bytes; at least one if anything is ready."""
        conn = self._conn
        scheduler, replies, seal_into = conn.scheduler, conn.replies, self._sealer.seal_into
        if scheduler.bulk_waiting:
            self._measure(now)
            out = self._large
            if out is None or len(out) < budget + conn.limits.record_plaintext_max_bytes + SLACK_BYTES:
                out = self._large = memoryview(bytearray(budget + conn.limits.record_plaintext_max_bytes + SLACK_BYTES))
        else:
            out = self._small
            budget = min(budget, SMALL_PULL_BYTES)
        bytes_out = conn.bytes_out
        used = 0
        while used < budget or not used:
            cls = scheduler.next_class(now, bool(replies))
            if cls < 0 or (cls >= TENSORS and out is self._small):
                break  # in the second case an OPEN has just let bulk in
            if cls == CONTROL:
                kind, number, body = replies.take(now)
                size = seal_into(number, kind, 0, body, out[used:])
                if kind in OPENING:
                    self._activate(number)
            else:
                stream = scheduler.pop(cls)
                if stream.kind is Kind.CHUNKS:
                    size = self._seal_chunk(stream, out[used:])
                else:
                    size = self._seal_data(stream, out[used:])
            bytes_out[cls] += size
            scheduler.charge(cls, size, now)
            used += size
            if self._sealer.needs_rekey:
                used += seal_into(0, REKEY, 0, b"", out[used:])
                self._sealer.rekey()
        self._busy = bool(scheduler.bulk_waiting)
        self._bytes += used if self._busy else 0
        self.pulled_at = now
        if conn.state is ConnectionState.DRAINING:
            conn.close_if_drained()
        if not used:
            return []
        self.last_out = now
        return [out[:used]]

    def give_up_buffer(self) -> None:
        """Nothing bulky was sent for a while."""
        self._large = None

    @property
    def has_large_buffer(self) -> bool:
        """Whether the large buffer exists."""
        return self._large is not None

    # -- one record

    def _seal_data(self, stream: Stream, out: memoryview) -> int:
        """One whole message, or one record of a byte stream; FIN with the last."""
        queue = stream.queue
        if not queue:
            body: bytes | bytearray | memoryview = b""
        elif stream.kind is Kind.MESSAGE:
            body = queue.popleft()
            stream.queued -= len(body)
        else:
            body = stream.cut(self.quantum if stream.cls > MESSAGES else SMALL_PULL_BYTES)
        flags = FLAG_FIN if stream.fin_queued and not queue else 0
        size = self._sealer.seal_into(stream.id, DATA, flags, body, out)
        if queue:
            self._conn.scheduler.push(stream, stream.cls, stream.order)
        else:
            self._drained(stream, flags)
        if stream.need:
            self._conn.wake_if_writable(stream)
        return size

    def _seal_chunk(self, stream: Stream, out: memoryview) -> int:
        """The next piece of the chunk under way, or the first of the next chunk with the CHUNK that names its place."""
        conn = self._conn
        used = 0
        source, rest = stream.source, stream.chunk
        if rest is None:
            chunk = source.next_chunk() if source is not None else None
            if chunk is None:
                if stream.fin_queued:
                    used = self._sealer.seal_into(stream.id, DATA, FLAG_FIN, b"", out)
                    self._drained(stream, FLAG_FIN)
                return used
            rest = chunk.data
            head = CHUNK_BODY.pack(chunk.slot, chunk.index, len(rest), chunk.flags)
            used = self._sealer.seal_into(stream.id, CHUNK, 0, head, out)
            if len(rest) > self.quantum:
                stream.order = source.order if source is not None else 0
        quantum = self.quantum
        if len(rest) > quantum:
            used += self._sealer.seal_into(stream.id, DATA, 0, rest[:quantum], out[used:])
            stream.chunk = rest[quantum:]
            conn.scheduler.push(stream, stream.cls, stream.order)
        else:
            used += self._sealer.seal_into(stream.id, DATA, 0, rest, out[used:])
            stream.chunk = None
            order = source.order if source is not None else NO_ORDER
            if order != NO_ORDER or stream.fin_queued:
                conn.scheduler.push(stream, stream.cls, order)
            elif source is not None:
                source.next_chunk()  # None; asking says that the chunk was read to its end, so that its buffer can go back
        return used

    def _drained(self, stream: Stream, flags: int) -> None:
        conn = self._conn
        if stream.wants_drained:
            stream.wants_drained = False
            conn.events.append(Writable(stream.id))
        if flags:
            stream.fin_sealed = True
            conn.forget_if_done(stream)

    def _activate(self, number: int) -> None:
        """Our OPEN or ACCEPT has left: what waited behind it may follow."""
        stream = self._conn.streams.get(number)
        if stream is not None:
            stream.opened = True
            if stream.queue or stream.fin_queued:
                self._conn.scheduler.push(stream, stream.cls, stream.order)

    # -- the quantum

    def _measure(self, now: float) -> None:
        if not self._busy:
            return
        limits = self._conn.limits
        self._seconds += max(0.0, now - self.pulled_at)
        if self._seconds >= limits.record_quantum_s or (self._bytes >= MEASURED_BYTES and self._seconds > 0.0):
            self.bytes_per_s = self._bytes / self._seconds
            wanted = int(self.bytes_per_s * limits.record_quantum_s)
            middle = (self.quantum + wanted) // 2  # half the old value: one stall of the socket is not a slow line
            self.quantum = max(limits.record_plaintext_min_bytes, min(limits.record_plaintext_max_bytes, middle))
            self._bytes = 0
            self._seconds = 0.0
