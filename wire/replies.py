"""Session frames that wait to be sealed: class 0.

The reader answers while the writer may be blocked, so what it answers must not grow: credits coalesce per stream (only the
highest limit matters), of pongs the newest few are kept (an old one measures nothing any more), and the rest is counted;
whoever makes us owe it more than `replies_waiting_max` frames is cut.

Order: frames as they came (a stream's ACCEPT before its credits, HELLO before everything), then pongs, then credits.
"""

from __future__ import annotations

import struct
from collections import deque

from .limits import Limits
from .records import FrameType
from .rtt import RttMeter

HELLO, PING, PONG = int(FrameType.HELLO), int(FrameType.PING), int(FrameType.PONG)
CREDIT, GOAWAY = int(FrameType.CREDIT), int(FrameType.GOAWAY)
PING_BODY = struct.Struct(">Qq")
PONG_BODY = struct.Struct(">QIq")
CREDIT_BODY = struct.Struct(">Q")
GOAWAY_HEAD = struct.Struct(">HII")
RESET_HEAD = struct.Struct(">H")

Frame = tuple[int, int, bytes]  # type, stream, body


class Replies:
    """The queue of class 0.  `wall_offset_s`: wall clock minus the monotonic clock that is handed in."""

    __slots__ = ("_credits", "_frames", "_pongs", "_rtt", "ping_waiting", "wall_offset_s")

    def __init__(self, limits: Limits, rtt: RttMeter, wall_offset_s: float) -> None:
        self._frames: deque[Frame] = deque()
        self._pongs: deque[tuple[int, float]] = deque(maxlen=limits.pongs_waiting_max)
        self._credits: dict[int, int] = {}
        self._rtt = rtt
        self.ping_waiting = False
        self.wall_offset_s = wall_offset_s

    def __len__(self) -> int:
        return len(self._frames) + len(self._pongs) + len(self._credits)

    def __bool__(self) -> bool:
        return bool(self._frames or self._pongs or self._credits)

    def add(self, kind: int, stream: int, body: bytes) -> None:
        """Queue a frame."""
        self._frames.append((kind, stream, body))

    def add_ping(self) -> None:
        """Queue a PING, which takes its token and time when it leaves; a second one while the first cannot leave says no more."""
        if not self.ping_waiting:
            self.ping_waiting = True
            self._frames.append((PING, 0, b""))

    def add_pong(self, token: int, now: float) -> None:
        """Answer a ping that came at `now`."""
        self._pongs.append((token, now))

    def add_credit(self, stream: int, limit: int) -> None:
        """Announce a limit; 0 = the connection."""
        self._credits[stream] = limit

    def forget_credit(self, stream: int) -> None:
        """The stream has ended: its credit is of no use."""
        self._credits.pop(stream, None)

    def only(self, kind: int, stream: int, body: bytes) -> None:
        """The session failed: nothing but this is said, behind our HELLO if that has not left yet."""
        first = self._frames[0] if self._frames and self._frames[0][0] == HELLO else None
        self._frames.clear()
        self._pongs.clear()
        self._credits.clear()
        if first is not None:
            self._frames.append(first)
        self._frames.append((kind, stream, body))

    def clear(self) -> None:
        """Say nothing more."""
        self._frames.clear()
        self._pongs.clear()
        self._credits.clear()

    def take(self, now: float) -> Frame:
        """The next frame, whose body is final.  Raises KeyError if nothing waits."""
        if self._frames:
            frame = self._frames.popleft()
            if frame[0] == PING:
                self.ping_waiting = False
                wall_us = self._wall_us(now)
                return PING, 0, PING_BODY.pack(self._rtt.sent(now, wall_us), wall_us)
            return frame
        if self._pongs:
            token, came = self._pongs.popleft()
            hold_us = min(2**32 - 1, max(0, int((now - came) * 1e6)))
            return PONG, 0, PONG_BODY.pack(token, hold_us, self._wall_us(now))
        stream, limit = self._credits.popitem()
        return CREDIT, stream, CREDIT_BODY.pack(limit)

    def _wall_us(self, now: float) -> int:
        return int((now + self.wall_offset_s) * 1e6)
