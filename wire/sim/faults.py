"""What goes wrong on purpose, by script: lines, machines, addresses, connections.

Each fault is one call and one line of the log; `storm` draws some of them from the seed.  None of them tells anybody: the silence
is the point.  Packets on their way when a line is cut are lost and go again after it heals, as TCP does it.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from wire.sim.link import Bottleneck

if TYPE_CHECKING:
    from wire.sim.host import Host
    from wire.sim.nat import Nat
    from wire.sim.pipe import SimPipe


class Faults:
    """The part of `Internet` that breaks things."""

    rng: random.Random

    def __init__(self) -> None:
        self.hosts: list[Host] = []
        self._apart: set[frozenset[Host]] = set()

    def note(self, kind: str, *what: Any) -> None:
        raise NotImplementedError

    def tick(self) -> float:
        raise NotImplementedError

    def at(self, when: float, do: Callable[..., None], *args: Any) -> None:
        raise NotImplementedError

    def reaches(self, one: Host, other: Host) -> bool:
        if not (one.alive and other.alive) or one.is_cut or other.is_cut:
            return False
        return not self._apart or frozenset((one, other)) not in self._apart

    def _fault(self, kind: str, *what: Any) -> None:
        self.tick()
        self.note(kind, *what)

    def partition(self, some: Host | list[Host], others: Host | list[Host]) -> None:
        """Nothing passes between these hosts until `heal`."""
        some, others = _several(some), _several(others)
        self._fault("partition", tuple(host.name for host in some), tuple(host.name for host in others))
        self._apart |= {frozenset((one, other)) for one in some for other in others if one is not other}

    def cut(self, host: Host) -> None:
        """Its line is dead, both ways."""
        self._fault("cut", host.name)
        host.is_cut = True

    def heal(self, *hosts: Host) -> None:
        """End partitions and cuts of these hosts, of all if none is named."""
        self._fault("heal", *(host.name for host in hosts))
        if not hosts:
            self._apart.clear()
        self._apart = {pair for pair in self._apart if not pair & set(hosts)}
        for host in hosts or self.hosts:
            host.is_cut = False

    def kill(self, host: Host) -> None:
        """The power is gone: no FIN, no RST.  Its pipes and listeners break; the test ends its tasks."""
        self._fault("kill", host.name)
        host.alive = False
        for pipe in list(host.connections.values()):
            pipe.was_reset(errno.ENETDOWN)
        for listener in list(host.listeners.values()):
            listener.close()
        for dialling in list(host.dialling.values()):
            dialling.fail(errno.ENETDOWN)

    def restart(self, host: Host) -> None:
        """Up again, with nothing remembered: peers that go on sending are answered with RST."""
        self._fault("restart", host.name)
        if host.alive:
            self.kill(host)
        host.alive = True

    def change_address(self, host: Host, *new: str) -> None:
        """It moves: packets of old connections, both ways, go nowhere, and `local_addresses` shows the new ones."""
        self._fault("change_address", host.name, *new)
        host.addresses = new

    def change_outside(self, nat: Nat, address: str) -> None:
        """The router gets another outside address and forgets its mappings; the house notices nothing, not even by a reset."""
        self._fault("change_outside", nat.address, address)
        nat.address = address
        nat.routers = ()
        nat.install(self.rng)

    def slow(self, host: Host, bps: float) -> None:
        """Its line carries this much from now on, each way; 0 for unlimited."""
        self._fault("slow", host.name, bps)
        lines: tuple[Bottleneck, ...] = (host.up, host.down)
        for line in lines:
            line.bps = bps

    def reset(self, pipe: SimPipe) -> None:
        """Somebody on the way sends RST to both ends."""
        self._fault("inject-reset", pipe.number)
        pipe.was_reset()
        pipe.other.was_reset()

    def half_open(self, pipe: SimPipe) -> None:
        """This end forgets the connection without a word; the other learns of it when it sends."""
        self._fault("half-open", pipe.number)
        pipe.error = OSError(errno.ECONNABORTED, "forgotten")
        pipe.forget()
        pipe.wake_all()

    def storm(self, hosts: list[Host], *, count: int, within_s: float, lasting_s: float) -> None:
        """So many random cuts, partitions and resets of these hosts from now on, each of the first two healed in `lasting_s`."""
        start, rng = self.tick(), self.rng
        for _ in range(count):
            when, until = start + rng.random() * within_s, rng.random() * lasting_s
            one, other = rng.sample(hosts, 2)
            match rng.choice(("cut", "partition", "reset")):
                case "cut":
                    self.at(when, self.cut, one)
                    self.at(when + until, self.heal, one)
                case "partition":
                    self.at(when, self.partition, one, other)
                    self.at(when + until, self.heal, one, other)
                case _:
                    self.at(when, self._reset_one, one)

    def _reset_one(self, host: Host) -> None:
        pipes = list(host.connections.values())
        if pipes:
            self.reset(self.rng.choice(pipes))


def _several(hosts: Host | list[Host]) -> list[Host]:
    return hosts if isinstance(hosts, list) else [hosts]
