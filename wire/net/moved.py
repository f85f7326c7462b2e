"""What a change of the local network does to connections that stand.

* A connection whose own address is no longer ours is dead: nothing that the peer sends can reach us, and no kernel says so.  It is
  ended at once, in words, so that the peer is dialled again instead of being waited for.
* Any other may be dead, because its packets leave through another interface now.  It is pinged; nothing at all within 2 s, or four
  round trips where those are longer, means that it is.  A slow line whose queue holds more than that costs one needless dial, and
  only when the network changes; believing a dead one costs the silence of timers.py, 8 to 15 s.

`Moved` is the cause in both cases: it tells whoever reconnects that the other side cannot reach us, so that we have to dial at
once even where the peer had dialled us.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import trio

from wire.errors import ConnectionLost
from wire.limits import Limits
from wire.net.link import Link

PROOF_RTTS = 4.0


class Moved(ConnectionLost):
    """The connection ended because this machine's network is another one."""


def end_orphans(links: Iterable[Link], gone: Collection[str]) -> list[Link]:
    """End the connections over addresses that this machine no longer has; gives the others."""
    rest = []
    for link in links:
        host = link.pipe.info().local[0]
        if host in gone:
            link.fail(Moved(f"our address {host} is gone"))
        else:
            rest.append(link)
    return rest


async def prove_alive(link: Link, limits: Limits) -> None:
    """Ping a connection and end it if nothing arrives in time.  Returns when it has ended, too."""
    asked_at = trio.current_time()
    deadline_s = max(limits.moved_ping_timeout_s, PROOF_RTTS * (link.session.rtt_s or 0.0))
    link.ping()
    with trio.move_on_after(deadline_s):
        await link.closed.wait()
    if link.session.last_in < asked_at:
        link.fail(Moved(f"nothing arrived within {deadline_s:.1f} s after a change of this machine's network"))
