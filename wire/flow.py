"""Flow control: absolute credit, one window a direction.

A receiver says up to which byte offset of a stream it takes data, not how many more bytes (QUIC's MAX_DATA, RFC 9000 section
4, instead of HTTP/2's WINDOW_UPDATE).  Saying it twice changes nothing and a lost or doubled update cannot exist; the price
is one 64-bit number.

The rules, each with a test:

1. A limit never falls.  The same limit again is allowed, a lower one is a violation.
2. Data beyond the limit are a violation of whoever sent them.
3. Credit comes back when the *application* has read, not when bytes arrive: what is granted and unread is the memory we hold
   for a peer.
4. It is announced when a quarter of the window was read.  Later, and a sender that is one round trip away stands still;
   earlier, and the way back is full of credits.
5. A window is at least its start size plus, on a message stream, one largest message.  With rule 4 up to a quarter of the
   start size may be read and unannounced; a message of the whole window would then wait for ever.

A message costs `MESSAGE_OVERHEAD_BYTES` more than its bytes on its stream's window (as Linux charges an skb its true size):
without it a peer fills a 64 KiB window with 65,536 objects of one byte.  The connection's window counts plain bytes only,
because data of a stream that is closed, whose kind is forgotten, must be counted the same way at both ends.

A window's size may change (windows.py decides when): larger at any time, smaller only as a renewal that is not made, since rule 1
holds for it as well.
"""

from __future__ import annotations

from .errors import Code, LocalProtocolError, RemoteProtocolError

MESSAGE_OVERHEAD_BYTES = 64  # a bytes object of CPython 3.11 (33) plus its place in a deque and the allocator's rounding
CREDIT_MAX = 2**64 - 1  # the field on the wire is a u64


class SendWindow:
    """What we may send.  `sent` and `limit` are absolute offsets in bytes; hot paths read them directly."""

    __slots__ = ("limit", "sent")

    def __init__(self, limit: int) -> None:
        self.sent = 0
        self.limit = limit

    @property
    def available(self) -> int:
        """Bytes that may be sent now."""
        return self.limit - self.sent

    def take(self, size: int) -> None:
        """Use credit.  Raises LocalProtocolError, with the window untouched, if there is not enough."""
        if size > self.limit - self.sent:
            raise LocalProtocolError(f"{size} bytes are over the credit of {self.limit - self.sent}")
        self.sent += size

    def give_back(self, size: int) -> None:
        """Undo `take` for bytes that were dropped before they were sealed: the peer has never counted them."""
        if size > self.sent:
            raise LocalProtocolError(f"{size} bytes given back, {self.sent} taken")
        self.sent -= size

    def raise_to(self, limit: int) -> bool:
        """Take a limit of the peer; True if it rose.  Raises RemoteProtocolError if it fell."""
        if limit < self.limit:
            raise RemoteProtocolError(Code.PROTOCOL, f"credit fell from {self.limit} to {limit}")
        rose = limit > self.limit
        self.limit = limit
        return rose


class ReceiveWindow:
    """What the peer may send.  `arrived` bytes came, `consumed` of them were read, `limit` is what was announced."""

    __slots__ = (
        "apart", "arrived", "consumed", "grows", "limit", "mark_arrived", "mark_at", "mark_consumed", "most", "previous", "quarter",
        "size", "start",
    )  # fmt: skip

    def __init__(self, size: int, *, quarter: int | None = None, announced: int | None = None) -> None:
        """`size`: bytes granted beyond what was read; `quarter`: how much is read before it is announced; `announced`: what the
        peer believes before our first credit (default: all of `size`).
        """
        self.size = self.start = size
        self.quarter = size // 4 if quarter is None else quarter
        self.limit = size if announced is None else announced
        self.previous = self.limit  # what was announced before the last rise
        self.arrived = 0
        self.consumed = 0
        self.grows = False
        self.most = 0  # it grows to so much; 0: as any other
        self.apart = False  # its bytes are not for us, and may stay here for long: it comes on top of the connection's window
        self.mark_at = 0.0  # since when the two below are counted, to see whether the window holds the sender up
        self.mark_consumed = self.mark_arrived = 0

    @property
    def unread(self) -> int:
        """Bytes that we hold for the application."""
        return self.arrived - self.consumed

    def arrive(self, size: int) -> None:
        """Count arrived bytes.  Raises RemoteProtocolError if the peer had no credit for them."""
        self.arrived += size
        if self.arrived > self.limit:
            raise RemoteProtocolError(Code.PROTOCOL, f"{self.arrived - self.limit} bytes beyond the credit")

    def read(self, size: int) -> bool:
        """Count bytes that the application took; True if `limit` rose far enough to be announced."""
        self.consumed += size
        limit = self.consumed + self.size
        if limit - self.limit >= self.quarter:
            self.previous = self.limit
            self.limit = limit
            return True
        return False

    def mark(self, now: float) -> None:
        """Count from here."""
        self.mark_at = now
        self.mark_consumed = self.consumed
        self.mark_arrived = self.arrived

    def resize(self, size: int) -> None:
        """Grant `size` bytes from now on; the limit rises if that is more, and is to be announced."""
        self.size = size
        self.quarter = size // 4
        self.limit = max(self.limit, self.consumed + size)

    def fall_back(self) -> bool:
        """Back to the start size; True if the limit is to be announced nevertheless, because almost all of it was used up.

        Called after a `read` that said True: that rise was not announced, so undoing it lets nothing fall.
        """
        self.limit = self.previous
        self.size = self.start
        self.quarter = self.size // 4
        return self.read(0)

    def unread_again(self, size: int) -> None:
        """Undo `read`: the application gave bytes back.  What was announced stays announced."""
        self.consumed -= size
