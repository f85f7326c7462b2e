"""An internet in memory: hosts, lines, routers and their troubles under trio's mock clock; see `internet`."""

from wire.sim.host import Host, SimListener, SimTransport
from wire.sim.internet import Internet, seed_tasks
from wire.sim.link import Link
from wire.sim.nat import Nat
from wire.sim.pipe import SimPipe

__all__ = ["Host", "Internet", "Link", "Nat", "SimListener", "SimPipe", "SimTransport", "seed_tasks"]
