"""The buffer between a pipe and a session: where the next bytes go, and how many of them are asked for.

A partial record at the end of the buffer has to be moved to its front, and the larger the buffer, the more of the processor's cache
it sweeps through.  So the buffer is used from its front, again and again, and holds one largest record and `AHEAD_BYTES`: the
short records before it (a CHUNK, credits), or the beginning of the next.  A stream of largest records then costs one read a
record, and at most those few KiB are moved.  Short records come `READ_BYTES` at a time, as many as there are.

The other way, a buffer of 1 MiB filled as far as it goes, moves an eighth of all bytes and made a stream of 256 KiB records 25 %
slower (3,460 and 2,570 MiB/s, `python -m bench link`); it also costs four times the memory for each idle connection.
"""

from __future__ import annotations

from .limits import Limits
from .records import HEADER_BYTES, RECORD_OVERHEAD_BYTES
from .session import Session

# A system call costs as much as copying 4 to 8 KiB, so that reading more short records at once saves nothing; two of these buffers fit
# into the second-level cache of any server or desktop.
AHEAD_BYTES = 4 * 1024
READ_BYTES = 256 * 1024 + AHEAD_BYTES


class Intake:
    """Feeds a session with what a pipe gives."""

    __slots__ = ("_buffer", "_filled", "_session")

    def __init__(self, session: Session, limits: Limits, leftover: bytes = b"") -> None:
        """`leftover`: bytes that were read before, behind the handshake; they are fed with the first `feed`."""
        most = max(READ_BYTES, limits.record_plaintext_max_bytes + RECORD_OVERHEAD_BYTES) + HEADER_BYTES
        self._session = session
        self._buffer = memoryview(bytearray(max(most, len(leftover) + HEADER_BYTES)))
        self._filled = len(leftover)
        self._buffer[: self._filled] = leftover

    def room(self) -> memoryview:
        """Where the next bytes of the pipe go; at least one."""
        filled = self._filled
        return self._buffer[filled : max(READ_BYTES, filled + self._session.missing_bytes + HEADER_BYTES)]

    def feed(self, count: int, now: float) -> int:
        """`count` bytes came into `room`: give whole records to the session.  Returns the bytes of those; raises as `receive`."""
        buffer = self._buffer
        filled = self._filled + count
        consumed = self._session.receive(buffer[:filled], now) if filled else 0
        rest = filled - consumed
        if consumed and rest:
            buffer[:rest] = buffer[consumed:filled]
        self._filled = rest
        return consumed
