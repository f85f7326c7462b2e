"""Homes behind routers, and two public hosts that are their seeds and relays: what the tests on them share."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from bench.children import Child
from bench.lab import Lab
from tests.net.conftest import Hosts, open_hosts
from tests.net.test_nodes import heard

PORT, HOME_PORT = "4001", "20001"  # a port that the routers `shift` and `full` treat
CONE, SHIFT, SYMMETRIC, FULL, CONE_2, SHIFT_2, SYMMETRIC_2, CONE_3 = (f"h{number}" for number in range(1, 9))


def note(text: str) -> None:
    """Figures, for those who run this with `-s`."""
    sys.stdout.write(text + "\n")


@dataclass(frozen=True, slots=True)
class Swarm:
    hosts: Hosts
    public: list[Child]
    ids: list[str]
    seeds: tuple[str, ...]

    async def home(self, host: str, *settings: str, listen: bool = True) -> tuple[Child, str]:
        """A node on a host behind a router, and its peer id."""
        own = ("listen", "0.0.0.0", HOME_PORT) if listen else ()
        node = await self.hosts.start(host, *own, *self.seeds, *settings)
        return node, (await heard(node, "ready"))["peer"]

    async def crowd(self, *hosts: str) -> list[tuple[Child, str]]:
        """Several at once, also on one host."""
        ports = [str(int(HOME_PORT) + hosts[:index].count(host)) for index, host in enumerate(hosts)]
        nodes = [
            await self.hosts.start(host, "listen", "0.0.0.0", port, *self.seeds) for host, port in zip(hosts, ports, strict=True)
        ]
        return [(node, (await heard(node, "ready"))["peer"]) for node in nodes]


@asynccontextmanager
async def swarm(lab: Lab, *relay: str, second: Sequence[str] | None = None) -> AsyncIterator[Swarm]:
    """Both public hosts up.  `second`: what the second one is told, if that is another."""
    async with open_hosts(lab) as hosts:
        seeds = [f"{lab.addr(host)}:{PORT}" for host in ("p1", "p2")]
        public = [
            await hosts.start(host, "listen", lab.addr(host), PORT, "seed", other, *told)
            for host, other, told in (("p1", seeds[1], relay), ("p2", seeds[0], relay if second is None else second))
        ]
        ids = [(await heard(node, "ready"))["peer"] for node in public]
        yield Swarm(hosts, public, ids, tuple(word for seed in seeds for word in ("seed", seed)))


async def connected(node: Child, peer: str) -> dict[str, Any]:
    """Tell a node to connect, by what it will learn; the line that says which way."""
    await node.tell({"connect": peer})
    return await heard(node, "path")
