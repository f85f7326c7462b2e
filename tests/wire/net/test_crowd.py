"""One stranger with a line of many addresses, and everybody else: who gets a connection."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
import trio.testing

from tests.wire.net.worlds import World, member
from wire.address import Scope
from wire.limits import DEFAULT_LIMITS
from wire.net import DialFailed, Net

Clock = trio.testing.MockClock
SMALL = replace(DEFAULT_LIMITS, inbound_connections_max=8)


async def settled(sybil: Net, host: Net) -> bool:
    """Whether that one stays connected."""
    try:
        peer = await sybil.dial(host.addresses[0])
    except DialFailed:
        return False
    await trio.sleep(1)
    return not peer.closed


@pytest.mark.parametrize(("line", "other"), [("8.7.6.{}", "9.0.0.1"), ("2400:7:6:{}::1", "2400:8::1")])
async def test_a_line_of_many_addresses_leaves_half_of_the_house(line: str, other: str, autojump_clock: Clock) -> None:
    """Nine identities that call themselves members, each at an address of its own, and then an honest one of another network."""
    world = World()
    async with AsyncExitStack() as stack:
        host = await stack.enter_async_context(member(world, "8.1.0.1", limits=SMALL, scope=Scope.INTERNET))
        inside = 0
        for number in range(1, 10):
            sybil = await stack.enter_async_context(member(world, line.format(number), scope=Scope.INTERNET))
            inside += await settled(sybil, host)
        assert inside == 4 and host.counts["adopt-resource_limit"] == 5
        friend = await stack.enter_async_context(member(world, other, scope=Scope.INTERNET))
        assert (await friend.dial(host.addresses[0])).peer_id == host.peer_id
        assert not host.counts["internal-error"]


async def test_a_house_of_many_machines_is_no_crowd(autojump_clock: Clock) -> None:
    world = World()
    async with AsyncExitStack() as stack:
        host = await stack.enter_async_context(member(world, "192.168.0.100", limits=SMALL, scope=Scope.LAN))
        for number in range(1, 8):
            assert await settled(await stack.enter_async_context(member(world, f"192.168.0.{number}", scope=Scope.LAN)), host)
