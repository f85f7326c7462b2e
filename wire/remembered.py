"""The last receive window of a peer's streams, by protocol: the next stream starts where the last one ended.

A window that has grown from 4 to 32 MiB took some round trips for it.  A peer that asks for one snapshot after the other, or a
connection that is replaced, would pay them each time.  The path changes less often than the stream, so the peer's owner keeps
one table for all of its connections.

It is bounded, because names of protocols come from the peer.  What it says is a wish: the session bounds it by the limits and
by the budget.
"""

from __future__ import annotations

from collections import OrderedDict

REMEMBERED_MAX = 256  # protocols of one peer; there are some twenty


class RememberedWindows:
    """Protocol -> bytes, the least recently used goes first."""

    __slots__ = ("_most", "_windows")

    def __init__(self, most: int = REMEMBERED_MAX) -> None:
        self._most = most
        self._windows: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._windows)

    def get(self, protocol: str) -> int:
        """Bytes of the last window; 0 if none is known."""
        size = self._windows.get(protocol, 0)
        if size:
            self._windows.move_to_end(protocol)
        return size

    def put(self, protocol: str, size: int) -> None:
        """A stream of this protocol has ended with a window of `size` bytes."""
        self._windows[protocol] = size
        self._windows.move_to_end(protocol)
        if len(self._windows) > self._most:
            self._windows.popitem(last=False)
