"""Too many connections from one place.

One router may hide a lab, but not a crowd: without a bound one host could take every place of a node with keys made for it.
Members and guests are counted apart, so that strangers at an address do not lock out its members.  Of a connection through a relay
the other end's address is not known: its place is the relay.

One line may have many addresses, and a line of IPv6 has them for nothing: eight of them were the whole house.  So on the internet an
IPv4 /24 or IPv6 /48 has half of all places, and strangers of other networks have the rest.
"""

from __future__ import annotations

from collections.abc import Iterable

from wire.limits import Limits
from wire.net.interfaces import descriptor_limit
from wire.net.link import Link
from wire.net.peer import Peer
from wire.pipeinfo import PipeInfo
from wire.reservations import line_of


def house(limits: Limits) -> int:
    """How many connections a node takes."""
    return min(limits.inbound_connections_max, descriptor_limit() // 4)


def crowded(link: Link, peers: Iterable[Peer], limits: Limits, *, outside: bool) -> bool:
    """Whether a new connection is one too many of its kind from where it comes.  Never one that we dialled.

    `outside`: on the internet, where a network of many addresses may be one stranger's.
    """
    if link.initiator:
        return False
    place = _place(link.pipe.info())
    line = line_of(place)
    most = limits.connections_per_ip_guests if link.guest else limits.connections_per_ip_members
    same = neighbours = 0
    for peer in peers:
        for other in peer.all_links:
            if not other.initiator:
                there = _place(other.pipe.info())
                same += other.guest == link.guest and there == place
                neighbours += outside and line_of(there) == line
    return same >= most or (outside and neighbours >= house(limits) * limits.inbound_network_share)


def _place(info: PipeInfo) -> str:
    """Where a connection comes from, for counting: a host, or a relay."""
    return info.remote[0] if info.relay is None else str(info.relay)
