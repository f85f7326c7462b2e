"""Our address as others see it: who said what, and when enough of them agree.

A node behind a router does not know its outside address; every peer tells it in HELLO what it sees.  What goes wrong: the first
one is believed and lies, so that a whole swarm dials a victim; ten liars sit in one data centre; a mapping that the router made
for a random port is advertised, which nobody else can use (FIND-12).  So:

* An address counts when observers in 3 distinct networks (/16 of IPv4, /32 of IPv6) say the same.  A network has one vote, the
  last it gave; moving to another answer takes the old one away.
* Only what was seen of a connection from the *listen port* counts: routers give other ports other outside ports.
* A vote fades after half an hour, and all of them when this machine's own addresses change.

That an address was seen does not make it reachable: that is for checkers to find out (wire/net/reach.py's business).

Pure: times are monotonic seconds and arguments.  The numbers stand in `Limits` (observers_needed, observation_life_s).
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from dataclasses import dataclass

from wire.address import Address, AddressClass
from wire.limits import Limits

# What nobody can have as an outside address.
_NOT_OUTSIDE = frozenset({AddressClass.UNSPECIFIED, AddressClass.MULTICAST, AddressClass.LOOPBACK, AddressClass.LINK_LOCAL})


@dataclass(frozen=True, slots=True)
class _Vote:
    seen: Address
    at: float


def network_of(host: str) -> str | None:
    """The network that has one vote: /16 of IPv4, /32 of IPv6; None for what is no literal address."""
    try:
        ip = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return str(ipaddress.ip_network((ip, 16 if ip.version == 4 else 32), strict=False))


class Observations:
    """See the module.  Bounded: at most `observers_max` votes for each listen port, the oldest give way."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._votes: dict[tuple[int, str], _Vote] = {}  # (listen port, network) -> what it said last

    def heard(self, observer: str, seen: str, local_port: int, listen_ports: frozenset[int], now: float) -> bool:
        """An authenticated peer at host `observer` sees our end of a connection as the address `seen`; True if that counts.

        `local_port`: of our end.  Garbage, names, circuits and places that are nobody's outside address do not count.
        """
        network = network_of(observer)
        if network is None or local_port not in listen_ports:
            return False
        try:
            address = Address.parse_received(seen)
        except ValueError:
            return False
        if not address.is_literal or address.relay is not None or address.scope_class in _NOT_OUTSIDE:
            return False
        key = local_port, network
        self._votes.pop(key, None)
        self._votes[key] = _Vote(address.with_peer(None), now)
        if len(self._votes) > self._limits.observers_max * max(1, len(listen_ports)):
            del self._votes[next(iter(self._votes))]
        return True

    def forget(self) -> None:
        """This machine's addresses changed: what was seen says nothing any more."""
        self._votes.clear()

    def agreed(self, now: float) -> tuple[Address, ...]:
        """Outside addresses on which enough networks agree, most votes first."""
        since = now - self._limits.observation_life_s
        counts = Counter(vote.seen for vote in self._votes.values() if vote.at >= since)
        return tuple(address for address, count in counts.most_common() if count >= self._limits.observers_needed)
