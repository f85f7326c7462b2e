"""To say it until it was heard: which connected peers have not taken what this node told them, and when they are told again.

Claims go to a peer in calls.  What goes wrong if each is made once: a call dies with its connection, or its OPEN crosses the GOAWAY of
a connection that is just being replaced by a better one, while the peer itself stays connected.  No event follows, and the peer goes by
an old claim until the next one; of a node that waits for a generation, that is its renewal, a quarter of an hour later.

So a call that failed leaves a debt.  The peer is told all that is known at once, and then again after pauses that double from half a
second to a minute, each with a random part, so that those who lost one peer in one moment do not all call it in another.  It ends
when everything was answered or the peer is gone.  A peer that never takes it - a seed, which has no use for claims - costs a call
a minute.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from random import Random

import trio

from wire.net import Peer

FIRST_PAUSE_S = 0.5  # a few round trips: by then the better connection stands
LONGEST_PAUSE_S = 60.0


class Greetings:
    """At most one conversation a peer.  `tell(peer)` tells it all that is known and returns whether all was answered."""

    def __init__(self, tell: Callable[[Peer], Awaitable[bool]], random: Random) -> None:
        self._tell = tell
        self._random = random
        self._unheard: set[Peer] = set()  # something that they were told has failed since the last greeting began
        self._under_way: set[Peer] = set()

    async def greet(self, peer: Peer) -> None:
        """Until the peer has answered all or is gone; at once, if it is being greeted already: then that goes on for longer."""
        self._unheard.add(peer)
        if peer in self._under_way:
            return
        self._under_way.add(peer)
        pause_s = FIRST_PAUSE_S
        try:
            while not peer.closed:
                self._unheard.discard(peer)
                if await self._tell(peer) and peer not in self._unheard:
                    return
                with trio.move_on_after(pause_s * self._random.uniform(0.5, 1.0)):
                    await peer.wait_closed()
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        finally:
            self._under_way.discard(peer)
            self._unheard.discard(peer)
