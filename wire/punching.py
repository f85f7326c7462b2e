"""When two nodes behind routers try to meet directly, at which addresses, and what is said when they do not.

A router that drops strangers lets in whoever its own side has just written to.  So both dial each other at the same moment, from the
ports that others see them at: each dial opens its own router for the other (TCP simultaneous open, RFC 9293 section 3.5; the
rendezvous is libp2p's DCUtR).  It needs a router that gives a port the same outside port towards everybody.  Where one gives each
connection another port nobody can say where to dial: that is known before, so it is not tried, and said.

What goes wrong, and what is done: one attempt may lose its race with the routers' timing, so there are three, each with a round trip
measured anew; then the network decides, and trying again is worth it every five minutes or when an address has changed.  A stranger
names a victim as candidate: only addresses that may be dialled count, at most eight, and three dials a second; private ones only if a
relay sees the other side at the outside address that we have, and then as `neighbours.py` says.  One side learns that, the one to which
the circuit came; within a house it is enough that one dials.

Pure: times are monotonic seconds and arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from wire.address import Address, Scope, may_dial
from wire.limits import Limits
from wire.neighbours import neighbours

# What a record says about a router that cannot be punched, and why.
_HOPELESS = {
    "nat-symmetric": "its router gives each connection another port",
    "outbound-only": "a firewall lets nobody in",
}


def hopeless(own: str, theirs: str) -> str:
    """Why punching between two states of reachability (words of peer records) cannot work; "" if it may."""
    if own in _HOPELESS:
        return f"not tried, this side: {_HOPELESS[own]}"
    if theirs in _HOPELESS:
        return f"not tried, the other side: {_HOPELESS[theirs]}"
    return ""


def offered(outside: Sequence[Address], own: Sequence[Address], limits: Limits) -> tuple[str, ...]:
    """What we name: as others see our listeners' ports, then this machine's own addresses, for a neighbour behind the same router."""
    found = dict.fromkeys(str(address.with_peer(None)) for address in (*outside, *own))
    return tuple(found)[: limits.punch_candidates_max]


def usable(named: Iterable[str], scope: Scope, own: Iterable[str], limits: Limits) -> tuple[Address, ...]:
    """Of what the other side names, what we dial.  `own`: addresses of this machine if both are behind one router, by a relay's word;
    else nothing."""
    addresses = []
    for text in named:
        try:
            address = Address.parse_received(text)
        except ValueError:
            continue
        if address.is_literal and address.relay is None:
            addresses.append(address.with_peer(None))
    open_to_all = (address for address in addresses if may_dial(address, scope))
    return tuple(dict.fromkeys((*open_to_all, *neighbours(addresses, own, limits))))[: limits.punch_candidates_max]


class Attempts:
    """When to try a peer: three times, then every five minutes, anew after a change."""

    __slots__ = ("_count", "_limits", "_next", "why")

    def __init__(self, limits: Limits, now: float) -> None:
        self._limits = limits
        self._count = 0
        self._next = now
        self.why = "not tried yet"

    def due(self, now: float) -> bool:
        return now >= self._next

    def failed(self, why: str, now: float) -> None:
        """One attempt is over without a connection."""
        self.why = why
        self._count += 1
        tries = self._limits.punch_tries
        pause_s = self._limits.punch_pause_s if self._count % tries else self._limits.punch_again_s
        self._next = now + pause_s

    def skipped(self, why: str, now: float) -> None:
        """It cannot work as things are: look again when they may have changed."""
        self.why = why
        self._next = now + self._limits.punch_look_s

    def changed(self, now: float) -> None:
        """An address of one side is another: what failed before says nothing."""
        self._count = 0
        self._next = now
