"""Peers behind home routers of every kind: which become direct, which stay relayed, and what their owners are told.

The public hosts are seeds and relays.  Every test starts the nodes that it needs.
"""

from __future__ import annotations

import pytest
import trio

from bench.children import Child
from bench.lab import Lab
from tests.net.homes import CONE, CONE_2, CONE_3, FULL, SHIFT, SHIFT_2, SYMMETRIC, SYMMETRIC_2, connected, note, swarm
from tests.net.test_nodes import heard

PUNCHED_S = 10.0  # from the first relayed connection


async def path(node: Child, peer: str, begins: tuple[str, ...], patience_s: float) -> float:
    """Seconds of the node's life at which its path to the peer was this one."""
    with trio.fail_after(patience_s):
        while not ((line := await heard(node, "path", patience_s))["path"].startswith(begins) and line["peer"] == peer):
            pass
    return float(line["at"])


async def pair(lab: Lab, one: str, other: str, *begins: str) -> None:
    with trio.fail_after(60):
        async with swarm(lab) as made:
            (_, a_id), (b, _) = await made.crowd(one, other)
            first = await connected(b, a_id)
            took = 0.0 if first["path"].startswith(begins) else await path(b, a_id, begins, PUNCHED_S) - first["at"]
            note(f"{one}/{other}: {first['path'][:7]} first, {' or '.join(begins)} after {took:.2f} s")
            await b.tell({"send": 1 << 20, "to": a_id})
            assert (await heard(b, "echoed"))["echoed"] is True


@pytest.mark.parametrize(("one", "other"), [(CONE, CONE_2), (CONE, SHIFT), (SHIFT, SHIFT_2)])
async def test_nat_routers_that_keep_a_mapping_are_punched(world: Lab, one: str, other: str) -> None:
    await pair(world, one, other, "punched")


@pytest.mark.parametrize(("one", "other"), [(CONE, SYMMETRIC), (SYMMETRIC, SYMMETRIC_2)])
async def test_nat_3_a_symmetric_router_stays_relayed_and_says_why(world: Lab, one: str, other: str) -> None:
    with trio.fail_after(60):
        async with swarm(world) as made:
            (_, a_id), (b, _) = await made.crowd(one, other)
            with trio.fail_after(30):
                while (found := await heard(b, "reach"))["reach"] != "nat-symmetric":
                    pass
            assert "the router gives each connection another port" in found["reason"]
            assert (await connected(b, a_id))["path"].startswith("relayed via")
            note(f"{one}/{other}: {found['reason']}")
            await b.tell({"send": 1 << 20, "to": a_id})
            assert (await heard(b, "echoed"))["echoed"] is True


async def test_a_mapped_port_is_dialled_directly_by_whoever_sits_behind_a_symmetric_router(world: Lab) -> None:
    """Only seeds have checked the port, to which its listener talks: it counts as closed until somebody else comes, through a relay.

    The symmetric side is not known as such in its first seconds and punches: the mapped port answers it as it answers anybody.
    """
    with trio.fail_after(60):
        async with swarm(world) as made:
            (_, a_id), (b, _) = await made.crowd(FULL, SYMMETRIC)
            first, unrelayed = await connected(b, a_id), ("direct", "punched")
            took = 0.0 if first["path"].startswith(unrelayed) else await path(b, a_id, unrelayed, 30.0) - first["at"]
            note(f"full/symmetric: {first['path'][:7]} first, direct after {took:.2f} s")
            await b.tell({"send": 1 << 20, "to": a_id})
            assert (await heard(b, "echoed"))["echoed"] is True


async def test_nat_9_a_closed_port_is_named_and_direct_once_it_is_mapped(world: Lab) -> None:
    """The pause between checks is cut short here, for it is half an hour."""
    with trio.fail_after(90):
        async with swarm(world) as made:
            a, a_id = await made.home(CONE_3, "again", "2")
            b, _ = await made.home(SYMMETRIC)
            told = await heard(a, "access")
            assert told["access"] == "relayed" and "not reachable on port 20001" in told["reason"] and told["at"] < 60
            assert "open or forward TCP port 20001, or go on through relays" in told["reason"]
            assert (await connected(b, a_id))["path"].startswith("relayed via")
            world.map_ports(8)
            try:
                began = trio.current_time()
                assert (await heard(a, "access"))["access"] == "direct"
            finally:
                world.unmap_ports(8)
            note(f"cone: {told['at']:.1f} s: {told['reason']}; direct {trio.current_time() - began:.1f} s after it was mapped")


async def test_nat_1_two_homes_without_any_relay_are_told_so(world: Lab) -> None:
    with trio.fail_after(60):
        async with swarm(world, "relay", "off") as made:
            for node, _ in await made.crowd(SYMMETRIC, SYMMETRIC_2):
                with trio.fail_after(20):
                    while (verdict := await heard(node, "access"))["access"] != "unreachable":
                        pass
                assert "no relay is known" in verdict["reason"]
                note(f"{node.name}: {verdict['at']:.1f} s: {verdict['reason']}")


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
