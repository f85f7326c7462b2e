"""Who hears of what happens on a connection.

The link (link.py) calls these synchronously, in the middle of its work: an implementation may call the session and `Link.kick`, and
must neither wait nor raise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from wire.errors import StreamReset, WireError
from wire.events import (
    GoAwayReceived,
    HelloReceived,
    Readable,
    StreamAccepted,
    StreamFinished,
    StreamOpened,
    StreamWasReset,
    Writable,
)

if TYPE_CHECKING:
    from wire.net.link import Link


class StreamEnd(Protocol):
    """Whoever waits for events of one stream."""

    def on_readable(self) -> None: ...
    def on_writable(self) -> None: ...
    def on_accepted(self) -> None: ...
    def on_pipe_end(self) -> None:
        """The connection is over and the session about to forget the stream: keep what arrived, `on_reset` follows."""
        ...

    def on_reset(self, error: WireError) -> None:
        """Ended in both directions, by the peer or because the connection ended.  Nothing follows."""
        ...


# What concerns one stream that exists, and nothing else.
STREAM_EVENTS = (Readable, StreamFinished, Writable, StreamAccepted, StreamWasReset)


def tell(ends: dict[int, StreamEnd], event: Readable | StreamFinished | Writable | StreamAccepted | StreamWasReset) -> None:
    """Carry an event to the end of its stream, if somebody waits there; after a reset nobody does any more."""
    end = ends.get(event.stream)
    if isinstance(event, StreamWasReset):
        if end is not None:
            del ends[event.stream]
            end.on_reset(StreamReset(event.code, event.detail, unseen=event.unseen))
    elif end is None:
        return
    elif isinstance(event, Writable):
        end.on_writable()
    elif isinstance(event, StreamAccepted):
        end.on_accepted()
    else:
        end.on_readable()


class Owner(Protocol):
    """Whoever owns connections."""

    def on_opened(self, link: Link, event: StreamOpened) -> None: ...
    def on_hello(self, link: Link, event: HelloReceived) -> None: ...
    def on_goaway(self, link: Link, event: GoAwayReceived) -> None: ...
