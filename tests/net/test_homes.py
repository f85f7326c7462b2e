"""Peers behind home routers, without a run: whole bytes over a punched path, a port that is mapped later, a node without a listener.

Which routers let two peers meet, and what their owners are told, is shown with nodes that train (test_training.py).  The public hosts
are seeds and relays.  Every test starts the nodes that it needs.
"""

from __future__ import annotations

import pytest
import trio

from bench.children import Child
from bench.lab import Lab
from tests.net.homes import CONE, CONE_2, CONE_3, SHIFT, SHIFT_2, SYMMETRIC, connected, note, swarm
from tests.net.test_nodes import heard

PUNCHED_S = 10.0  # from the first relayed connection


async def punched(node: Child, peer: str) -> float:
    """Seconds of the node's life at which its path to the peer was punched."""
    with trio.fail_after(PUNCHED_S):
        while not ((line := await heard(node, "path", PUNCHED_S))["path"].startswith("punched") and line["peer"] == peer):
            pass
    return float(line["at"])


async def test_bytes_come_whole_over_a_punched_path(world: Lab) -> None:
    with trio.fail_after(60):
        async with swarm(world) as made:
            (_, a_id), (b, _) = await made.crowd(CONE, SHIFT)
            first = await connected(b, a_id)
            took = 0.0 if first["path"].startswith("punched") else await punched(b, a_id) - first["at"]
            note(f"cone/shift: {first['path'][:7]} first, punched after {took:.2f} s")
            await b.tell({"send": 1 << 20, "to": a_id})
            assert (await heard(b, "echoed"))["echoed"] is True


@pytest.mark.parametrize("homes", [(CONE, CONE_2), (CONE, SHIFT), (SHIFT, SHIFT_2)], ids=["cone/cone", "cone/shift", "shift/shift"])
async def test_a_punched_pair_has_lanes(world: Lab, homes: tuple[str, str]) -> None:
    """Each through a hole of its own; 60 MB go over them."""
    with trio.fail_after(60):
        async with swarm(world) as made:
            (a, a_id), (b, _) = await made.crowd(*homes)
            if not (await connected(b, a_id))["path"].startswith("punched"):
                await punched(b, a_id)
            await b.tell({"push": 30, "size": 2_000_000, "to": a_id})
            came = [await heard(a, "got") for _ in range(30)]
            assert all(got["whole"] for got in came)
            lanes = [got["lanes"] for got in came if got["via"].startswith("punched")]
            note(f"{homes}: lanes {lanes}, {28 * 2 / (came[-1]['now'] - came[1]['now']):.1f} MB/s")
            assert lanes and 1 <= lanes[-1] <= 2


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
