"""The last second of a connection: let the peer read why.

A close with unread bytes in our kernel resets the connection, and the reset overtakes the GOAWAY that is still under way.  So what
is sealed is sent, our direction is ended, and what the peer still says is read and dropped until it ends too, or a second is over.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from wire.net.transport import Pipe

LINGER_S = 1.0  # the peer's reading of our reason is a courtesy
SCRATCH_BYTES = 16 * 1024


async def linger(pipe: Pipe, push: Callable[[], bool]) -> None:
    """`push()` sends what is left as far as the pipe takes it now; True if something remains."""
    with trio.move_on_after(LINGER_S):
        try:
            while push():
                await pipe.wait_writable()
            await pipe.send_eof()
            scratch = memoryview(bytearray(SCRATCH_BYTES))
            while await pipe.receive_into(scratch):
                pass
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return
