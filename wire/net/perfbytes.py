"""What both sides of `perf/1` do with bytes: pour them for a time, count them as they come, never more than agreed.

A measurement is bounded by time, and a fast line fits a lot into that: 10 s at 10 Gbit/s are 12 GB, which a metered or shared line
feels.  So each direction also has an `Allowance` of bytes; whichever is used up first ends it.  Time is the one that bites on every
line slower than 10 Gbit/s, so slow lines are measured as before.

Several streams, each on a lane of its own, share one tally and one allowance: what counts is what the pair carries together.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import trio

from wire.net.bytestream import ByteStream

__all__ = ["BUFFER_BYTES", "SLOW_START_SHARE", "Allowance", "Tally", "count", "pour", "steady"]

BUFFER_BYTES = 256 * 1024  # the largest record
SLOW_START_SHARE = 0.2  # 2 of 10 s: at 200 ms of round trip TCP has doubled ten times by then
LEAST_BYTES = 16 * 1024  # of a piece
QUICK_S = 0.05  # a piece that takes longer does not grow; twice as long, and it shrinks
_ZEROS = memoryview(bytes(BUFFER_BYTES))


@dataclass(slots=True)
class Tally:
    """What one direction has received, by second since its first byte."""

    seconds: list[int] = field(default_factory=list)
    first_at: float | None = None
    last_at: float = 0.0
    over: bool = False

    def add(self, count: int, now: float) -> None:
        if self.first_at is None:
            self.first_at = now
        self.last_at = now
        at = int(now - self.first_at)
        self.seconds.extend([0] * (at + 1 - len(self.seconds)))
        self.seconds[at] += count

    @property
    def span_s(self) -> float:
        return 0.0 if self.first_at is None else self.last_at - self.first_at


@dataclass(slots=True)
class Allowance:
    """Bytes that may still go one way."""

    left: int

    def take(self, most: int) -> int:
        """At most `most` of what is left; 0 when nothing is."""
        taken = min(most, self.left)
        self.left -= taken
        return taken


def steady(seconds: tuple[int, ...], span_s: float) -> float | None:
    """Bytes a second after the slow start; None for less than a tenth of a second."""
    skip = int(span_s * SLOW_START_SHARE)
    rest = span_s - skip
    return sum(seconds[skip:]) / rest if rest >= 0.1 else None


async def pour(stream: ByteStream, seconds: float, allowance: Allowance) -> None:
    """Send for so long or until the allowance is used, then the end.

    A piece grows while pieces are quick and shrinks when they are slow: a slow line must notice the end of its time, and the first
    ones are quick on any line, since they only fill buffers.
    """
    ends, piece = trio.current_time() + seconds, LEAST_BYTES
    while (began := trio.current_time()) < ends and (size := allowance.take(piece)):
        await stream.send_all(_ZEROS[:size])
        await trio.lowlevel.checkpoint()  # a line that is never full must not keep the loop
        took_s = trio.current_time() - began
        if took_s < QUICK_S:
            piece = min(2 * piece, BUFFER_BYTES)
        elif took_s > 2 * QUICK_S:
            piece = max(piece // 2, LEAST_BYTES)
    await stream.send_eof()


async def count(stream: ByteStream, tally: Tally, allowance: Allowance) -> bool:
    """Receive into one buffer: True at the peer's end, False when more has come than the allowance."""
    buffer = memoryview(bytearray(BUFFER_BYTES))
    while came := await stream.receive_into(buffer):
        tally.add(came, trio.current_time())
        if allowance.take(came) < came:
            return False
        await trio.lowlevel.checkpoint()
    return True
