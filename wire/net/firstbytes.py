"""What an inbound connection wants: its first four bytes.

One port serves three kinds of callers, because a home router forwards one port and a punched hole leads to one: sessions (`PLW1`),
the two ends of a hole punch (`PLP1`) and dial-backs that check whether this port can be reached (`PLR1`).  The last two are
conversations of a few bytes; whoever is responsible registers for its four.

What goes wrong: a scanner of another protocol is kept until a deadline (WIRE-2).  So what cannot become a registered name any more is
handed on at once, to the handshake, which knows how to refuse it; a caller that says nothing has the handshake's deadline.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from wire.errors import ConnectionLost
from wire.net.causes import HandshakeTimeout
from wire.net.transport import Pipe

GREETING_BYTES = 4

# Takes the pipe, which is its to close.
Greeted = Callable[[Pipe], Awaitable[None]]


async def read_greeting(pipe: Pipe, known: frozenset[bytes], *, deadline_s: float) -> bytes:
    """At most four bytes: one of `known`, or as much as shows that it is none.

    Raises `ConnectionLost` and `HandshakeTimeout`.  The pipe is closed when it raises or is cancelled.
    """
    buffer = memoryview(bytearray(GREETING_BYTES))
    filled = 0
    try:
        with trio.move_on_after(deadline_s):
            while filled < GREETING_BYTES and any(name.startswith(buffer[:filled]) for name in known):
                count = await pipe.receive_into(buffer[filled:])
                if not count:
                    raise ConnectionLost("the other side closed the connection during the handshake")
                filled += count
            return bytes(buffer[:filled])
        raise HandshakeTimeout(f"no handshake within {deadline_s:g} s")
    except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
        pipe.abort()
        raise ConnectionLost(error.__cause__ or error) from error
    except BaseException:
        pipe.close()
        raise
