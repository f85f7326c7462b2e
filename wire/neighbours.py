"""Which private addresses of another node are worth a dial, when both are behind one router.

Two nodes in one house meet by their addresses in the house, if at all: few home routers carry a packet out and in again.  What goes
wrong: an address like 192.168.0.9 means another machine in each house, and it is somebody else's word.  A stranger who claims to live
here would have us knock at any port of any machine behind our router, and of every network that a VPN or a container engine has put
beside it.  So whoever calls asks for more than a claim before it comes here (a relay's word on whom it sees there, or a vote of
observers on our own address), and of what was named only this is left:

* private addresses, and of those only such in a network of this machine.  The seams of the wire name addresses without masks, so a
  network is taken to be the /24 of IPv4 and the /64 of IPv6, as home routers hand out.  In a wider one some neighbours stay on the relay;
* not our own addresses: a container engine gives every machine the same 172.17.0.1;
* few: a laptop has one by cable and one by radio, and who names more than that is looking for something.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from wire.address import Address, AddressClass
from wire.limits import Limits


def neighbours(named: Iterable[Address], own: Iterable[str], limits: Limits) -> tuple[Address, ...]:
    """Of `named`, in their order, what may be a neighbour of a machine with the addresses `own` (numeric, without zones)."""
    hosts = set(own)
    networks = {home_network(host) for host in hosts}
    found = dict.fromkeys(
        address
        for address in named
        if address.scope_class is AddressClass.PRIVATE
        and address.relay is None
        and address.port
        and address.host not in hosts
        and home_network(address.host) in networks
    )
    return tuple(found)[: limits.neighbours_max]


def home_network(host: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    """The network of a house that this numeric address lies in, as far as an address without a mask tells."""
    ip = ipaddress.ip_address(host)
    return ipaddress.ip_network((ip, 24 if ip.version == 4 else 64), strict=False)
