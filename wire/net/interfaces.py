"""What the machine under us is and becomes: its addresses, and how many descriptors it gives us.

A laptop moves to another network: connections over the old address are dead and nobody says so, addresses that failed before may
work now, and our record names places that are gone (NAT-4, NAT-8).  There is no portable way to be told, so the list is compared
every 5 s, which costs about a millisecond.
"""

from __future__ import annotations

import resource
from collections.abc import Callable

import trio

from wire.net.transport import Transport

LOOK_EVERY_S = 5.0


async def watch_interfaces(transport: Transport, changed: Callable[[], None]) -> None:
    """Call `changed` whenever this machine's addresses are others than before.  For ever."""
    known = set(transport.local_addresses())
    while True:
        await trio.sleep(LOOK_EVERY_S)
        now = set(transport.local_addresses())
        if now != known:
            known = now
            changed()


def descriptor_limit() -> int:
    """How many files and sockets this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft
