"""What a session tells the layer above: frozen values, drained with `Session.events()` in the order in which things happened.

`Readable` and `Writable` are edges, not levels.  `Readable` comes when something arrived on a stream that had nothing to
read, so a reader reads until it gets None and then waits.  `Writable` comes once after `sendable` (or `unsent`) was asked and
answered "not yet".
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from .errors import Code, WireError
from .messages import SessionHello


class Kind(IntEnum):
    """What boundaries mean on a stream; fixed by OPEN."""

    MESSAGE = 0  # every DATA record is one whole message of at most 64 KiB
    BYTE = 1  # boundaries mean nothing
    CHUNKS = 2  # CHUNK names a place, DATA fills it; one way, from the opener


@dataclass(frozen=True, slots=True)
class HelloReceived:
    """The peer's HELLO, the first one or a newer one.  Its record is not verified yet."""

    hello: SessionHello


@dataclass(frozen=True, slots=True)
class StreamOpened:
    """The peer opened a stream of a protocol that we serve.  Answer with `accept` or `refuse`; data may be there already."""

    stream: int
    kind: Kind
    protocol: str
    cls: int
    meta: bytes


@dataclass(frozen=True, slots=True)
class StreamAccepted:
    """The peer accepted a stream that we opened."""

    stream: int


@dataclass(frozen=True, slots=True)
class Readable:
    """There is something to read, or the end was reached, on a stream that had nothing before."""

    stream: int


@dataclass(frozen=True, slots=True)
class Writable:
    """As much can be sent, or has left, as the last `sendable` or `unsent` waits for."""

    stream: int


@dataclass(frozen=True, slots=True)
class StreamFinished:
    """The peer will send no more on this stream.  What came before is still there to read."""

    stream: int


@dataclass(frozen=True, slots=True)
class StreamWasReset:
    """The peer ended both directions.  Unread data are gone and the id is forgotten: reading it would be a misuse.

    `unseen`: it was opened after the last stream that the peer has looked at.
    """

    stream: int
    code: Code
    detail: str
    unseen: bool = False


@dataclass(frozen=True, slots=True)
class RttMeasured:
    """One ping came back after `rtt_s` seconds, the peer's own delay taken off."""

    rtt_s: float


@dataclass(frozen=True, slots=True)
class GoAwayReceived:
    """The peer opens and takes no new streams; ours above `last_stream` were never looked at and may be tried elsewhere."""

    code: Code
    last_stream: int
    retry_ms: int
    detail: str


@dataclass(frozen=True, slots=True)
class SessionClosed:
    """Nothing will ever arrive again.  `error` is None after a clean end, else what every waiter gets."""

    error: WireError | None


Event = (
    HelloReceived
    | StreamOpened
    | StreamAccepted
    | Readable
    | Writable
    | StreamFinished
    | StreamWasReset
    | RttMeasured
    | GoAwayReceived
    | SessionClosed
)
