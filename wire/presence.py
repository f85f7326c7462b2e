"""Whether a peer is there, judged over all connections with it.

A lost packet stalls one connection for as long as its retransmission timeout, which doubles (RFC 6298): at 80 ms it is repeated 0.28,
0.84, 1.96, 4.2, 8.7 and 17.6 s after it went.  A peer whose only sign were that one connection would look dead at 5 % loss now and
then.  Its other connections have timeouts of their own, so that what came over any of them, were it one byte, proves it alive.

Except for one that was made while the control connection was silent already.  Where a router's outside address has changed in silence a
new lane works at once, and says nothing of the old path: with it counted, the dead control connection was kept for 18 s.
"""

from __future__ import annotations

from typing import Protocol


class Member(Protocol):
    """A connection."""

    chunk_streams: int


class Presence:
    """Shared by a control connection and its lanes.  `heard_at`: when bytes came last, over any that counts, in seconds."""

    __slots__ = ("_control", "_control_at", "heard_at", "lanes")

    def __init__(self, control: Member, now: float) -> None:
        self.heard_at = self._control_at = now
        self._control = control
        self.lanes: list[Member] = []

    @property
    def has_channels(self) -> bool:
        """Whether one of them carries a tensor channel."""
        return bool(self._control.chunk_streams) or any(lane.chunk_streams for lane in self.lanes)

    def heard(self, now: float, lane_since: float | None) -> None:
        """Bytes came: over the control connection, or over a lane that stands since then."""
        if lane_since is None:
            self.heard_at = self._control_at = now
        elif lane_since <= self._control_at:
            self.heard_at = now
