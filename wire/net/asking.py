"""The asking side of a call: one message out and one back, on a stream of its own.

While a better connection replaces another (a hole a circuit, section 16 of the wire specification), the end that did not dial it may
still open a stream on the old one, which crosses the goodbye.  The goodbye names the last stream that was looked at, so it is certain
that nothing of such a call has been done: it is asked again, over the connection that stands.  Without that, each move to a better path
fails what was asked in the tenth of a second before it, and a round between nodes breaks at the moment at which they come closer.

After any other end it is not known what the peer has done, and whoever asked decides.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from wire.errors import Code, StreamReset, error_for
from wire.messages import decode
from wire.net.bytestream import ByteStream
from wire.net.stream import MessageStream

Reply = TypeVar("Reply")


async def ask(open_stream: Callable[[], Awaitable[MessageStream | ByteStream]], message: bytes, reply_class: type[Reply]) -> Reply:
    """The reply.  `open_stream()`: on the connection that is best now; it raises when there is none.  Errors as `Peer.call`."""
    while True:
        stream = await open_stream()
        assert isinstance(stream, MessageStream)
        try:
            async with stream:
                await stream.send(message, fin=True)
                return decode(await stream.receive(), reply_class)
        except trio.EndOfChannel:
            raise error_for(Code.PROTOCOL, detail=f"{stream.protocol}: the peer ended without a reply") from None
        except StreamReset as reset:
            if not reset.unseen:
                raise
