"""Peers behind home routers of every kind: which become direct, which stay relayed, and what their owners are told.

One lab for all: two public hosts that are seeds and relays, and routers of six kinds.  Every test starts the nodes that it needs.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
import trio

from bench.children import Child
from bench.lab import Lab, Network, open_lab
from tests.net.conftest import Hosts, available, open_hosts
from tests.net.test_nodes import heard

PORT, HOME_PORT = "4001", "20001"  # a port that the routers `shift` and `full` treat
PUNCHED_S = 10.0  # from the first relayed connection
KINDS = ("cone", "shift", "symmetric", "full", "cone", "shift", "symmetric")
CONE, SHIFT, SYMMETRIC, _FULL, CONE_2, SHIFT_2, SYMMETRIC_2 = (f"h{number}" for number in range(1, 8))


@pytest.fixture(scope="module")
def world() -> Iterator[Lab]:
    """Seven homes, two public hosts, 80 ms between any two."""
    available()
    with open_lab(Network(rate_mbit=100.0, rtt_ms=80.0, public=2, routers=KINDS)) as made:
        yield made


def note(text: str) -> None:
    """Figures, for those who run this with `-s`."""
    sys.stdout.write(text + "\n")


@dataclass(frozen=True, slots=True)
class Swarm:
    hosts: Hosts
    public: list[Child]
    ids: list[str]
    seeds: tuple[str, ...]

    async def home(self, host: str, *, listen: bool = True) -> tuple[Child, str]:
        """A node on a host behind a router, and its peer id."""
        own = ("listen", "0.0.0.0", HOME_PORT) if listen else ()
        node = await self.hosts.start(host, *own, *self.seeds)
        return node, (await heard(node, "ready"))["peer"]


@asynccontextmanager
async def swarm(lab: Lab, *relay: str) -> AsyncIterator[Swarm]:
    """Both public hosts up."""
    async with open_hosts(lab) as hosts:
        public, ids = [], []
        seeds = [f"{lab.addr(host)}:{PORT}" for host in ("p1", "p2")]
        for index, host in enumerate(("p1", "p2")):
            others = ("seed", seeds[1 - index])
            node = await hosts.start(host, "listen", lab.addr(host), PORT, *others, *relay)
            ids.append((await heard(node, "ready"))["peer"])
            public.append(node)
        yield Swarm(hosts, public, ids, tuple(word for seed in seeds for word in ("seed", seed)))


async def path(node: Child, peer: str, begins: tuple[str, ...], patience_s: float) -> float:
    """Seconds of the node's life at which its path to the peer was this one."""
    with trio.fail_after(patience_s):
        while not ((line := await heard(node, "path", patience_s))["path"].startswith(begins) and line["peer"] == peer):
            pass
    return float(line["at"])


async def pair(lab: Lab, one: str, other: str, *begins: str) -> None:
    with trio.fail_after(60):
        async with swarm(lab) as made:
            a, a_id = await made.home(one)
            b, _ = await made.home(other)
            await heard(a, "access")
            await heard(b, "access")
            await b.tell({"connect": a_id})
            first = await heard(b, "path")
            took = 0.0 if first["path"].startswith(begins) else await path(b, a_id, begins, PUNCHED_S) - first["at"]
            note(f"{one}/{other}: {first['path'][:7]} first, {' or '.join(begins)} after {took:.2f} s")
            await b.tell({"send": 1 << 20, "to": a_id})
            assert (await heard(b, "echoed"))["echoed"] is True


@pytest.mark.parametrize(("one", "other"), [(CONE, CONE_2), (CONE, SHIFT), (SHIFT, SHIFT_2)])
async def test_nat_routers_that_keep_a_mapping_are_punched(world: Lab, one: str, other: str) -> None:
    await pair(world, one, other, "punched")


@pytest.mark.parametrize(("one", "other"), [(CONE, SYMMETRIC)])
async def test_nat_3_a_symmetric_router_stays_relayed_and_says_why(world: Lab, one: str, other: str) -> None:
    with trio.fail_after(60):
        async with swarm(world) as made:
            a, a_id = await made.home(one)
            b, _ = await made.home(other)
            await heard(a, "access")
            with trio.fail_after(30):
                while (found := await heard(b, "reach"))["reach"] != "nat-symmetric":
                    pass
            assert "the router gives each connection another port" in found["reason"]
            await b.tell({"connect": a_id})
            assert (await heard(b, "path"))["path"].startswith("relayed via")
            note(f"{one}/{other}: {found['reason']}")
            await b.tell({"send": 1 << 20, "to": a_id})
            assert (await heard(b, "echoed"))["echoed"] is True


async def test_nat_1_two_homes_without_any_relay_are_told_so(world: Lab) -> None:
    with trio.fail_after(60):
        async with swarm(world, "relay", "off") as made:
            for host in (SYMMETRIC, SYMMETRIC_2):
                node, _ = await made.home(host)
                with trio.fail_after(20):
                    while (verdict := await heard(node, "access"))["access"] != "unreachable":
                        pass
                assert "no relay is known" in verdict["reason"]
                note(f"{host}: {verdict['at']:.1f} s: {verdict['reason']}")


async def test_nat_2_a_node_without_a_listener_is_reached_through_a_relay(world: Lab) -> None:
    with trio.fail_after(60):
        async with swarm(world) as made:
            a, a_id = await made.home(CONE, listen=False)
            b, _ = await made.home(CONE_2)
            while (verdict := await heard(a, "access"))["access"] != "relayed":
                pass
            await b.tell({"connect": a_id})
            await heard(b, "path")
            await b.tell({"send": 1 << 20, "to": a_id})
            assert (await heard(b, "echoed"))["echoed"] is True
            note(verdict["reason"])
