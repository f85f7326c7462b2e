"""What a node finds out about its own reachability: production nets in `internet` scope on the in-memory internet."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from tests.wire.sim.test_relay import LINE, Town, town, until
from wire.address import Address
from wire.net import Net
from wire.reachability import Reach
from wire.sim import Nat

Clock = trio.testing.MockClock


async def village(t: Town, kind: str | None, seeds: int = 2) -> tuple[Net, list[Net]]:
    """One node behind `kind` of router, two seeds and another in three networks; nobody has been told that it is public."""
    publics = [await t.open(t.net.host(f"8.{n + 1}.0.1", link=LINE)) for n in range(seeds)]
    nat = None if kind is None else Nat(kind, "9.9.0.1")
    node = await t.open(t.net.host("192.168.1.2" if nat else "9.9.0.1", link=LINE, nat=nat))
    for other in publics:
        await node.manager.dial([other.addresses[0]], expected=None, target="seed", seed=True)
    third = await t.open(t.net.host("8.3.0.1", link=LINE))
    await node.dial(third.addresses[0])  # from any port: its word counts even if the router filters by address
    publics.append(third)
    await publics[1].manager.dial([publics[0].addresses[0]], expected=None, target="seed", seed=True)
    return node, publics


@pytest.mark.parametrize(
    ("kind", "state"),
    [(None, Reach.PUBLIC), ("full", Reach.PUBLIC), ("cone", Reach.NAT), ("shift", Reach.NAT), ("symmetric", Reach.SYMMETRIC)],
)
async def test_nat_3_and_9_a_verdict_in_plain_words(kind: str | None, state: Reach, autojump_clock: Clock) -> None:
    async with town() as t:
        node, publics = await village(t, kind)
        took = await until(lambda: node.access.reach.finding.state is state)
        assert took <= 20
        finding = node.access.reach.finding
        if state is Reach.PUBLIC:
            assert Address("9.9.0.1", 4001) in finding.addresses
        else:
            assert "port 4001" in finding.reason and "relay" in finding.reason and not finding.addresses
        for other in publics:
            await until(lambda other=other: other.access.reach.finding.state is Reach.PUBLIC)  # type: ignore[misc]
        record = node.book and node._record
        assert record is not None
        await trio.sleep(30)
        assert node.access.reach.finding.state is state, "it stays so"
