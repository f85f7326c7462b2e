"""The internet in memory: who has which address, who reaches whom, and when.

Tests of a swarm on real sockets and real time are slow, and when one fails it never fails again.  Here hosts, lines and routers
are objects, time is trio's mock clock and chance is one seeded generator, so production code runs unchanged, half an hour passes
in seconds, and a seed that fails fails again.  It gives the shape of what networks do; throughput is claimed from kernels only.

    net = Internet(seed=1)
    async with net.running():
        a = net.host("192.0.2.1", link=Link(delay_s=0.02, up_bps=20e6))
        async with open_net(identity, listen=[Address("192.0.2.1", 4001)], transport=a.transport): ...

For equal runs of one seed the order of trio's tasks has to be seeded as well (`seed_tasks`), and whatever else the program draws
at random.  Routers look up a name in the house first, then on the public internet; a house is the hosts that share one `Nat`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import trio

from wire.sim.clockwork import Clockwork
from wire.sim.faults import Faults
from wire.sim.host import Host
from wire.sim.link import Link
from wire.sim.nat import Nat, Place

if TYPE_CHECKING:
    from wire.sim.pipe import SimPipe

LOOPBACK_DELAY_S = 20e-6


def seed_tasks(seed: int) -> None:
    """Make the order in which trio runs ready tasks a function of the seed: what hypothesis does for its examples.

    Before `trio.run` or as the first thing in a test.  Lasts for the process.
    """
    run: Any = trio._core._run
    run._ALLOW_DETERMINISTIC_SCHEDULING = True
    run._r.seed(seed)


@dataclass(frozen=True, slots=True)
class Route:
    """Where packets end: whose they are, what that host is called there, and what the sender is called there."""

    host: Host
    local: Place
    seen: Place
    outward: Nat | None  # translates for the sender
    inward: Nat | None  # translates for the receiver


class Internet(Clockwork, Faults):
    """See the module.  `names`: host name -> addresses, for `Transport.resolve`."""

    def __init__(self, seed: int = 0) -> None:
        Clockwork.__init__(self, seed)
        Faults.__init__(self)
        self.names: dict[str, list[str]] = {}
        self.losses = 0
        self._pipes = 0

    def host(self, *addresses: str, link: Link | None = None, nat: Nat | None = None, **settings: Any) -> Host:
        """A machine with these addresses, the house's own ones behind a router.  `settings`: see `Host`.  Raises ValueError."""
        taken = [each for host in self.hosts if host.nat is nat for each in host.addresses]
        if not addresses or set(addresses) & set(taken):
            raise ValueError(f"no address, or one that is taken: {addresses}")
        if nat is not None:
            nat.install(self.rng)
        host = Host(self, addresses, link or Link(), nat, **settings)
        self.hosts.append(host)
        return host

    def number(self) -> int:
        self._pipes += 1
        return self._pipes

    def delay(self, one: Host, other: Host) -> float:
        if one is other:
            return LOOPBACK_DELAY_S
        jitter = one.link.jitter_s + other.link.jitter_s
        return one.link.delay_s + other.link.delay_s + (jitter * self.rng.random() if jitter else 0.0)

    def somebody_at(self, host: Host, address: str) -> Host | None:
        """A host that packets to this address end near: whose it is, or one behind the router whose it is."""
        if address in host.addresses or address in host.loopback:
            return host
        home = [each for each in self.hosts if each.nat is host.nat and address in each.addresses] if host.nat is not None else []
        public = (each for each in self.hosts if address in (each.addresses if each.nat is None else (each.nat.address,)))
        return home[0] if home else next(public, None)

    def route(self, host: Host, local: Place, remote: Place) -> Route | str:
        """Where a first packet goes; makes mappings on its way.  "silent" or "reset" if it does not get anywhere."""
        if remote[0] in host.addresses or remote[0] in host.loopback:
            return Route(host, remote, local, None, None)
        if host.nat is not None:
            for mate in self.hosts:
                if mate.nat is host.nat and remote[0] in mate.addresses:
                    return Route(mate, remote, local, None, None)
        seen = host.nat.out(local, remote, self.now) if host.nat is not None else local
        for target in self.hosts:
            if target.nat is None and remote[0] in target.addresses:
                return Route(target, remote, seen, host.nat, None)
        for nat in {target.nat: None for target in self.hosts if target.nat is not None and target.nat.address == remote[0]}:
            inside = nat.into(remote[1], seen, self.now)
            if inside is None:
                return nat.filter
            for target in self.hosts:
                if target.nat is nat and inside[0] in target.addresses:
                    return Route(target, inside, seen, host.nat, nat)
        return "silent"

    def passes(self, near: SimPipe, far: SimPipe) -> bool:
        """Whether a packet of this connection gets from one end to the other just now."""
        here, there = near.host, far.host
        if here is there:
            return here.alive
        if not self.reaches(here, there) or near.local[0] not in here.addresses or far.local[0] not in there.addresses:
            return False
        if near.nat is not None and near.nat.out(near.local, near.remote, self.now) != far.remote:
            return False
        return far.nat is None or far.nat.into(near.remote[1], far.remote, self.now) == far.local
