"""Token buckets: how often a peer may do something cheap for it and dear for us.

A bucket holds at most `burst` tokens and gains `per_s` a second.  The burst is what makes the rule fair: pings that a dead
radio link held back for half a minute arrive all at once, and that peer did nothing wrong.  So a limit is derived from what a
correct sender can do at worst, never from what looks usual.
"""

from __future__ import annotations

from collections.abc import Hashable


class Bucket:
    """Holds `burst` tokens at first.  Time is the caller's monotonic clock; a clock that stands still gains nothing."""

    __slots__ = ("burst", "last", "per_s", "tokens")

    def __init__(self, per_s: float, burst: float, now: float) -> None:
        self.per_s = per_s
        self.burst = burst
        self.tokens = burst
        self.last = now

    def take(self, now: float) -> bool:
        """Use one token; False if there is none."""
        self.gain(now)
        if self.tokens < 1.0:
            return False
        self.tokens -= 1.0
        return True

    def gain(self, now: float) -> None:
        """Add what time has brought."""
        if now > self.last:
            self.tokens = min(self.burst, self.tokens + (now - self.last) * self.per_s)
            self.last = now

    def earn(self, tokens: float) -> None:
        """Add tokens that were earned otherwise than by time, up to the burst."""
        self.tokens = min(self.burst, self.tokens + tokens)


class Buckets:
    """A bucket for each of at most `most` keys, peers for instance; beyond that the one made first is forgotten.

    Forgetting refills: whoever has `most` keys is not held by this, and has to be held by what a key costs.
    """

    __slots__ = ("_burst", "_found", "_most", "_per_s")

    def __init__(self, per_s: float, burst: float, most: int) -> None:
        self._per_s, self._burst, self._most = per_s, burst, most
        self._found: dict[Hashable, Bucket] = {}

    def take(self, key: Hashable, now: float) -> bool:
        """Use one token of this key; False if it has none."""
        bucket = self._found.get(key)
        if bucket is None:
            if len(self._found) >= self._most:
                del self._found[next(iter(self._found))]
            bucket = self._found[key] = Bucket(self._per_s, self._burst, now)
        return bucket.take(now)

    def __len__(self) -> int:
        return len(self._found)
