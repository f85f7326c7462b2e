"""The doctor's wait in an internet in memory: behind each kind of router the verdict is that of the node, and comes in time."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from plnode.doctor.facts import Network
from plnode.doctor.surroundings import WAIT_S, entered, lines_to_peers
from plnode.settings import load_settings
from tests.wire.net.worlds import RUN
from tests.wire.sim.test_relay import LINE, Town, town
from wire.identity import Identity
from wire.net import SeedList
from wire.net.perf import serve_perf
from wire.sim import Host, Nat

Clock = trio.testing.MockClock


async def visit(t: Town, host: Host) -> tuple[Network, float, list[str]]:
    """What was found, after how many virtual seconds, and what was told meanwhile."""
    told: list[str] = []
    seeds = SeedList.of(*(str(relay.addresses[0]) for relay in t.relays))
    chosen = load_settings({"data": ".", "listen": f"{host.name}:4001"}, {})
    async with entered(chosen, Identity(bytes(31) + b"v"), RUN, seeds, transport=host.transport) as surroundings:
        began = trio.current_time()
        facts = await surroundings.look(told.append)
        return facts, trio.current_time() - began, told


@pytest.mark.parametrize(
    ("kind", "access", "nat"),
    [("", "direct", "public"), ("cone", "relayed", "nat"), ("symmetric", "relayed", "nat-symmetric")],
)
async def test_the_verdict_behind_each_router(kind: str, access: str, nat: str, autojump_clock: Clock) -> None:
    async with town() as t:
        for _ in range(3):
            await t.relay()
        host = t.net.host("192.168.1.2", link=LINE, nat=Nat(kind, "9.1.0.1")) if kind else t.net.host("9.1.0.1", link=LINE)
        facts, took_s, told = await visit(t, host)
        assert (facts.access, facts.nat) == (access, nat), facts
        assert [seed.state for seed in facts.seeds] == ["connected"] * 3
        assert all(seed.rtt_s is not None for seed in facts.seeds) and len(facts.peers) == 3
        assert took_s < WAIT_S and told


async def test_without_a_relay_it_waits_its_time_and_says_so(autojump_clock: Clock) -> None:
    async with town() as t:
        lone = t.net.host("8.1.0.1", link=LINE)
        t.relays.append(await t.open(lone, run=None))  # a seed for all runs: it introduces, and signals for guests
        host = t.net.host("192.168.1.2", link=LINE, nat=Nat("cone", "9.1.0.1"))
        facts, took_s, _ = await visit(t, host)
        assert facts.access in ("unreachable", "unknown") and took_s == pytest.approx(WAIT_S, abs=0.2)


async def test_a_seed_is_no_line_and_a_member_is_one(autojump_clock: Clock) -> None:
    async with town() as t:
        await t.relay()
        serve_perf(await t.relay())
        host = t.net.host("9.1.0.1", link=LINE)
        seeds = SeedList.of(*(str(relay.addresses[0]) for relay in t.relays))
        chosen = load_settings({"data": ".", "listen": f"{host.name}:4001"}, {})
        async with entered(chosen, Identity(bytes(31) + b"v"), RUN, seeds, transport=host.transport) as surroundings:
            await surroundings.look(lambda text: None)
            lines = [line async for line in lines_to_peers(surroundings.net, 2.0, lambda text: None)]
            assert [line.peer_id for line in lines] == [str(t.relays[1].peer_id)]
            assert lines[0].lanes >= 1  # its bytes were bulk, and not on the control connection
            assert not lines[0].refused and lines[0].up_bytes_per_s and lines[0].down_bytes_per_s
            assert [over.lanes for over in lines[0].over] == [1, 2, 3, 4] and not lines[0].ended  # a node would begin with fewer
            again = [line async for line in lines_to_peers(surroundings.net, 2.0, lambda text: None)]
            assert ["within this minute" in line.refused for line in again] == [True]
