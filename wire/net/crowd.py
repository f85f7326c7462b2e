"""Too many connections from one place.

One router may hide a lab, but not a crowd: without a bound one host could take every place of a node with keys made for it.
Members and guests are counted apart, so that strangers at an address do not lock out its members.  Of a connection through a relay
the other end's address is not known: its place is the relay.
"""

from __future__ import annotations

from collections.abc import Iterable

from wire.limits import Limits
from wire.net.link import Link
from wire.net.peer import Peer
from wire.pipeinfo import PipeInfo


def crowded(link: Link, peers: Iterable[Peer], limits: Limits) -> bool:
    """Whether a new connection is one too many of its kind from where it comes.  Never one that we dialled."""
    if link.initiator:
        return False
    info = link.pipe.info()
    most = limits.connections_per_ip_guests if link.guest else limits.connections_per_ip_members
    same = (
        other
        for peer in peers
        for other in peer.all_links
        if not other.initiator and other.guest == link.guest and _place(other.pipe.info()) == _place(info)
    )
    return sum(1 for _ in same) >= most


def _place(info: PipeInfo) -> str:
    """Where a connection comes from, for counting: a host, or a relay."""
    return info.remote[0] if info.relay is None else str(info.relay)
