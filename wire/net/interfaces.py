"""What the machine under us is and becomes: its addresses, and how many descriptors it gives us.

A laptop moves to another network: connections over the old address are dead and nobody says so, addresses that failed before may
work now, and our record names places that are gone (NAT-4, NAT-8).  There is no portable way to be told, so the list is compared
every 2 s.  That costs 0.1 ms (measured with a handful of interfaces), and data that were under way flow again before anybody has
to wait for a silence: 2 s to look and a few round trips to dial are less than the 5 s of one ping interval.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import dataclass

import trio

from wire.net.transport import Transport

LOOK_EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class NetworkChanged:
    """Addresses of this machine, numeric and without zones, that came or went; at least one of the two is not empty."""

    added: tuple[str, ...]
    gone: tuple[str, ...]


async def watch_interfaces(transport: Transport, changed: Callable[[NetworkChanged], None]) -> None:
    """Call `changed` whenever this machine's addresses are others than before.  For ever."""
    known = set(transport.local_addresses())
    while True:
        await trio.sleep(LOOK_EVERY_S)
        now = set(transport.local_addresses())
        if now != known:
            change = NetworkChanged(tuple(sorted(now - known)), tuple(sorted(known - now)))
            known = now
            changed(change)


def descriptor_limit() -> int:
    """How many files and sockets this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft
