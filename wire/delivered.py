"""Which tensors have been delivered: the table that makes "at most once" true for a whole node.

A microbatch that is routed anew may come a second time, from another peer, on another channel, after a reconnect.  Training must
not count it twice, and no channel alone can know.  So there is one table a node and protocol; every channel asks it twice: when a
Begin comes (to save the transfer) and when the last byte is there (``deliver``, the only answer that counts: two peers may have
been sending the same key at once).

Keys are kept by step, an int at a fixed position of the key.  The application moves a watermark when it will never again want a
step; below it everything is STALE and nothing is stored.  65,536 keys (a tuple of five ints is ~150 bytes: 10 MB) bound the
table; if it overflows, the watermark rises past the oldest steps.  Forgetting the oldest is the safe side: a key may then be
refused though it was never delivered, which costs a microbatch, but none is delivered twice, which would falsify the sum.
"""

from __future__ import annotations

from .errors import Code, LocalProtocolError
from .limits import DEFAULT_LIMITS
from .messages import Key


class DeliveredKeys:
    """Keys delivered to this node under one protocol.  ``step_field`` is the position of the step (or round) in a key."""

    __slots__ = ("_by_step", "_capacity", "_count", "_step_field", "_watermark")

    def __init__(self, step_field: int = 1, capacity: int = DEFAULT_LIMITS.delivered_keys_max) -> None:
        if capacity < 1 or step_field < 0:
            raise LocalProtocolError(f"no table of delivered keys has capacity {capacity} and step field {step_field}")
        self._by_step: dict[int, set[Key]] = {}
        self._capacity = capacity
        self._count = 0
        self._step_field = step_field
        self._watermark = 0

    def __len__(self) -> int:
        return self._count

    @property
    def watermark(self) -> int:
        """The lowest step that is not STALE."""
        return self._watermark

    def verdict(self, key: Key) -> Code:
        """What delivering ``key`` would give, changing nothing.

        OK = not delivered yet, DUPLICATE = delivered, STALE = below the watermark, EXPECTATION = no key of this protocol (it has
        no step; the key may come straight from a peer).
        """
        step = self._step(key)
        if step is None:
            return Code.EXPECTATION
        if step < self._watermark:
            return Code.STALE
        return Code.DUPLICATE if key in self._by_step.get(step, ()) else Code.OK

    def deliver(self, key: Key) -> Code:
        """Claim a key for delivery: OK exactly once in its life, else as ``verdict``.  Amortised O(1)."""
        code = self.verdict(key)
        step = self._step(key)
        if code is not Code.OK or step is None:
            return code
        if self._count >= self._capacity:
            self.raise_watermark(min(self._by_step) + 1)
            if step < self._watermark:
                return Code.STALE
        self._by_step.setdefault(step, set()).add(key)
        self._count += 1
        return Code.OK

    def raise_watermark(self, step: int) -> None:
        """Everything below ``step`` is STALE from now on and forgotten.  It never falls: what was refused stays refused."""
        if step <= self._watermark:
            return
        self._watermark = step
        for old in [s for s in self._by_step if s < step]:
            self._count -= len(self._by_step.pop(old))

    def _step(self, key: Key) -> int | None:
        step = key[self._step_field] if self._step_field < len(key) else None
        return step if type(step) is int else None
