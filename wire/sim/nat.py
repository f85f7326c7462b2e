"""Routers that translate: which outside port a connection gets, and which strangers get in.

    none      (no Nat at all) the host's own address is public
    cone      one outside port for an inside port, whoever is called; the number is kept where it is free
    shift     the same, with another number (+ 1000): a peer must ask a third one what its port looks like
    symmetric a random outside port for each destination: what a third one saw is worth nothing
    full      as cone, and strangers get in through a port that is mapped
    double    two cones in a row, as at home behind a carrier

Mapping and filter are the two properties of RFC 4787 and 5382.  The filter of all but `full` looks at address and port, which is
what the connection tracking of Linux does and most home routers are.  A stranger meets silence, or RST (`filter="reset"`), which
ends a hole punch that would otherwise succeed.  A mapping that carried nothing for `timeout_s` is forgotten without a word:
packets from outside vanish from then on.  The next packet from inside renews it where the number does not depend on chance;
a connection through a forgotten symmetric mapping is lost.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

Place = tuple[str, int]  # host and port
KINDS = frozenset({"cone", "shift", "symmetric", "full", "double"})
SHIFT = 1000
CARRIER = "100.64.0.2"  # RFC 6598: the inner router's address towards the carrier's


@dataclass(slots=True)
class Mapping:
    """Times in seconds."""

    inside: Place
    outside: Place
    used_at: float
    allowed: set[Place] = field(default_factory=set)


class Router:
    """One translating box, with one address towards the outside."""

    def __init__(self, kind: str, address: str, timeout_s: float, rng: random.Random) -> None:
        self.kind = kind
        self.address = address
        self.timeout_s = timeout_s
        self._rng = rng
        self._by_inside: dict[tuple[Place, Place | None], Mapping] = {}
        self._by_port: dict[int, Mapping] = {}

    def out(self, inside: Place, remote: Place, now: float) -> Place:
        """The outside name of `inside` towards `remote`; makes or renews the mapping and lets the remote in."""
        key = inside, remote if self.kind == "symmetric" else None
        mapping = self._by_inside.get(key)
        if mapping is not None and now - mapping.used_at > self.timeout_s:
            del self._by_inside[key], self._by_port[mapping.outside[1]]
            mapping = None
        if mapping is None:
            mapping = Mapping(inside, (self.address, self._port(inside[1])), now)
            self._by_inside[key] = self._by_port[mapping.outside[1]] = mapping
        mapping.used_at = now
        mapping.allowed.add(remote)
        return mapping.outside

    def into(self, port: int, remote: Place, now: float) -> Place | None:
        """The inside name behind an outside port for packets from `remote`; None if they do not get in."""
        mapping = self._by_port.get(port)
        if mapping is None or now - mapping.used_at > self.timeout_s:
            return None
        if self.kind != "full" and remote not in mapping.allowed:
            return None
        mapping.used_at = now
        return mapping.inside

    def revoke(self, inside: Place, remote: Place) -> Place | None:
        """No longer let the remote in; the outside name of `inside`, if it has one."""
        mapping = self._by_inside.get((inside, remote if self.kind == "symmetric" else None))
        if mapping is None:
            return None
        mapping.allowed.discard(remote)
        return mapping.outside

    def _port(self, wanted: int) -> int:
        port = wanted
        if self.kind == "shift":
            port = wanted + SHIFT if wanted + SHIFT <= 0xFFFF else wanted - SHIFT
        elif self.kind == "symmetric":
            port = self._rng.randrange(1024, 0x10000)
        while port in self._by_port:
            port = port + 1 if port < 0xFFFF else 1024
        return port


class Nat:
    """What stands between a house and the internet.  Hosts that share one Nat are in the same house.

    kind: see the module.  address: the public one.  filter: "silent" or "reset".  Raises ValueError.
    """

    def __init__(self, kind: str, address: str, *, filter: str = "silent", timeout_s: float = 7440.0) -> None:
        # 7440 s: RFC 5382, REQ-5, the least for an established connection
        if kind not in KINDS or filter not in ("silent", "reset"):
            raise ValueError(f"no such router: {kind!r} with filter {filter!r}")
        self.kind = kind
        self.address = address
        self.filter = filter
        self.timeout_s = timeout_s
        self.routers: tuple[Router, ...] = ()

    def install(self, rng: random.Random) -> None:
        """Make the boxes, from the inside out.  Idempotent."""
        if not self.routers:
            kind = "cone" if self.kind == "double" else self.kind
            outer = Router(kind, self.address, self.timeout_s, rng)
            self.routers = (Router(kind, CARRIER, self.timeout_s, rng), outer) if self.kind == "double" else (outer,)

    def out(self, inside: Place, remote: Place, now: float) -> Place:
        for router in self.routers:
            inside = router.out(inside, remote, now)
        return inside

    def into(self, port: int, remote: Place, now: float) -> Place | None:
        """The house's own name behind a public port, None for strangers."""
        found: Place | None = None
        for router in reversed(self.routers):
            found = router.into(port, remote, now)
            if found is None:
                return None
            port = found[1]
        return found

    def revoke(self, inside: Place, remote: Place) -> None:
        """A connection ended before it stood: forget that the remote was called."""
        place: Place | None = inside
        for router in self.routers:
            place = None if place is None else router.revoke(place, remote)
