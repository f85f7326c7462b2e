"""Routers: which ports they give, whom they let in, and what a simultaneous dial achieves through which pair of them."""

from __future__ import annotations

import itertools
from contextlib import suppress

import pytest
import trio
import trio.testing

from tests.wire.sim.rooms import FAST, receive, send
from wire.address import Address
from wire.sim import Host, Internet, Nat, SimPipe

Clock = trio.testing.MockClock
KINDS = ("cone", "shift", "symmetric", "full", "double")
PORT = 4001
PUBLIC = {"a": "198.51.100.1", "b": "198.51.100.2"}


def house(net: Internet, name: str, kind: str, **settings: object) -> Host:
    return net.host("192.168.1.2", link=FAST, nat=Nat(kind, PUBLIC[name], **settings))


async def observed(host: Host, servers: list[Host]) -> list[int]:
    """Our outside port as each server sees it, dialled from PORT."""
    ports = []
    for server in servers:
        listener = await server.transport.listen(Address(server.addresses[0], 9000 + len(server.listeners)))
        await host.transport.dial(listener.address, local_port=PORT)
        ports.append((await listener.accept()).info().remote[1])
    return ports


@pytest.mark.parametrize("kind", KINDS)
async def test_what_two_servers_see(autojump_clock: Clock, kind: str) -> None:
    net = Internet(1)
    inside, servers = house(net, "a", kind), [net.host("192.0.2.1"), net.host("192.0.2.2")]
    async with net.running():
        first, second = await observed(inside, servers)
    if kind == "symmetric":
        assert first != second and PORT not in (first, second)
    else:
        assert first == second == (PORT + 1000 if kind == "shift" else PORT)


@pytest.mark.parametrize(
    ("kind", "filter", "fate"), [("cone", "silent", "in silence"), ("cone", "reset", "refused"), ("full", "silent", "in")]
)
async def test_strangers(autojump_clock: Clock, kind: str, filter: str, fate: str) -> None:
    net = Internet(1)
    inside, server, stranger = house(net, "a", kind, filter=filter), net.host("192.0.2.1"), net.host("192.0.2.9")
    async with net.running():
        await inside.transport.listen(Address("192.168.1.2", PORT))
        await observed(inside, [server])
        with trio.move_on_after(10) as waited:
            try:
                await stranger.transport.dial(Address(PUBLIC["a"], PORT))
                assert fate == "in"
            except ConnectionRefusedError:
                assert fate == "refused"
        assert waited.cancelled_caught == (fate == "in silence")


async def punch(kinds: tuple[str, str], late_s: float = 0.0, **settings: object) -> list[SimPipe]:
    """The connected ends after both dialled what a server saw of the other, from their listen ports."""
    net = Internet(5)
    server = net.host("192.0.2.1", link=FAST)
    hosts = [house(net, name, kind, **settings) for name, kind in zip("ab", kinds, strict=True)]
    ends: list[SimPipe] = []

    async def dial(host: Host, remote: Address, after_s: float) -> None:
        await trio.sleep(after_s)
        with trio.move_on_after(4):
            with suppress(OSError):
                ends.append(await host.transport.dial(remote, local_port=PORT))

    async with net.running():
        for host in hosts:
            await host.transport.listen(Address("192.168.1.2", PORT))
        seen = [Address(PUBLIC[name], (await observed(host, [server]))[0]) for name, host in zip("ab", hosts, strict=True)]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(dial, hosts[0], seen[1], 0.0)
            nursery.start_soon(dial, hosts[1], seen[0], late_s)
        if len(ends) == 2 and ends[0].other is ends[1]:
            await send(ends[0], b"through")
            assert await receive(ends[1], 7) == b"through"
    return ends


@pytest.mark.parametrize("kinds", list(itertools.combinations_with_replacement(("cone", "shift", "double", "symmetric"), 2)))
async def test_hole_punching_works_but_for_symmetric_routers(autojump_clock: Clock, kinds: tuple[str, str]) -> None:
    assert len(await punch(kinds)) == (0 if "symmetric" in kinds else 2)


async def test_punching_half_a_second_late_works_and_routers_that_answer_strangers_defeat_it(autojump_clock: Clock) -> None:
    assert len(await punch(("cone", "cone"), 0.5)) == 2
    assert await punch(("cone", "cone"), 0.5, filter="reset") == []


@pytest.mark.parametrize("kind", ["cone", "symmetric"])
async def test_an_idle_mapping_is_forgotten_without_a_word(autojump_clock: Clock, kind: str) -> None:
    net = Internet(1)
    inside, server = house(net, "a", kind, timeout_s=120), net.host("192.0.2.1", link=FAST)
    async with net.running():
        listener = await server.transport.listen(Address("192.0.2.1", PORT))
        near = await inside.transport.dial(listener.address)
        far = await listener.accept()
        await trio.sleep(100)
        await send(far, b"in time")
        assert await receive(near, 7) == b"in time"
        await trio.sleep(130)
        await send(far, b"late")
        with trio.move_on_after(60):
            await receive(near, 1)
            raise AssertionError("it got in")
        await send(near, b"from inside")  # renews the mapping where its port is no chance
        with trio.move_on_after(60) as lost:
            assert await receive(far, 11) == b"from inside"
        assert lost.cancelled_caught == (kind == "symmetric")


async def test_neighbours_of_one_house_meet_inside_it_and_share_its_address(autojump_clock: Clock) -> None:
    net = Internet(1)
    home = Nat("cone", PUBLIC["a"])
    one, other, server = net.host("192.168.1.2", nat=home), net.host("192.168.1.3", nat=home), net.host("192.0.2.1")
    async with net.running():
        listener = await other.transport.listen(Address("192.168.1.3", PORT))
        await one.transport.dial(listener.address)
        assert (await listener.accept()).info().remote[0] == "192.168.1.2"
        assert await observed(one, [server]) == [PORT] and await observed(other, [server]) == [PORT + 1]
    with pytest.raises(ValueError):
        Nat("cube", PUBLIC["a"])
    with pytest.raises(ValueError):
        net.host("192.168.1.2", nat=home)
