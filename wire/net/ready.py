"""A buffer that is sent while it is still being filled.

The device copies an activation into host memory piece by piece; waiting for the last byte before the first is sent would add the
whole copy to the latency of a microbatch.  The producer tells how far it is, the channel lets the chunks go that are complete.
"""

from __future__ import annotations

from collections.abc import Callable

from wire.errors import LocalProtocolError


class ReadyBytes:
    """How much of a buffer may be sent already.  The producer calls `advance` on the event loop, the channel listens."""

    __slots__ = ("_listener", "ready_bytes")

    def __init__(self, ready_bytes: int = 0) -> None:
        self.ready_bytes = ready_bytes
        self._listener: Callable[[int], None] | None = None

    def advance(self, ready_bytes: int) -> None:
        """The first `ready_bytes` are final.  It may not fall."""
        if ready_bytes < self.ready_bytes:
            raise LocalProtocolError(f"ready bytes fall from {self.ready_bytes} to {ready_bytes}")
        self.ready_bytes = ready_bytes
        if self._listener is not None:
            self._listener(ready_bytes)

    def listen(self, listener: Callable[[int], None] | None) -> None:
        self._listener = listener
