"""Who hears of what happens on a connection.

The link (link.py) calls these synchronously, in the middle of its work: an implementation may call the session and `Link.kick`, and
must neither wait nor raise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from wire.errors import WireError
from wire.events import GoAwayReceived, HelloReceived, StreamOpened

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


class Owner(Protocol):
    """Whoever owns connections."""

    def on_opened(self, link: Link, event: StreamOpened) -> None: ...
    def on_hello(self, link: Link, event: HelloReceived) -> None: ...
    def on_goaway(self, link: Link, event: GoAwayReceived) -> None: ...
