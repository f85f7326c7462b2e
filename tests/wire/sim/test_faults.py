"""What is broken on purpose, and that two runs of one seed are one."""

from __future__ import annotations

import errno
from typing import Any

import pytest
import trio
import trio.testing

from tests.wire.sim.rooms import joined, receive, send, two
from wire.address import Address
from wire.sim import Internet, Link, seed_tasks

Clock = trio.testing.MockClock


@pytest.mark.parametrize("fault", ["cut", "partition"])
async def test_what_was_on_its_way_arrives_after_healing(autojump_clock: Clock, fault: str) -> None:
    net = Internet()
    one, other = two(net)
    async with net.running():
        near, far, _ = await joined(one, other)
        await send(near, b"before ")
        await trio.sleep(0.01)
        if fault == "cut":
            net.cut(one)
        else:
            net.partition(one, other)
        await send(near, b"during")
        with trio.move_on_after(10):
            await receive(far, 1)
            raise AssertionError("it got through")
        net.heal()
        assert await receive(far, 13) == b"before during"
        assert trio.current_time() < 30  # the timeout had doubled to some seconds


async def test_a_partition_leaves_others_alone(autojump_clock: Clock) -> None:
    net = Internet()
    one, other = two(net)
    third = net.host("192.0.2.3")
    async with net.running():
        net.partition(one, [other])
        near, far, _ = await joined(one, third)
        await send(near, b"hello")
        assert await receive(far, 5) == b"hello"


async def test_a_killed_host_says_nothing_and_a_restarted_one_resets(autojump_clock: Clock) -> None:
    net = Internet()
    one, other = two(net)
    room = memoryview(bytearray(9))
    async with net.running():
        near, far, _ = await joined(one, other)
        net.kill(other)
        with pytest.raises(trio.BrokenResourceError):
            await far.receive_into(room)
        far.close()
        with trio.move_on_after(100) as silence:
            await near.receive_into(room)
        assert silence.cancelled_caught
        with pytest.raises(OSError) as down:
            await other.transport.listen(Address("192.0.2.2", 4001))
        assert down.value.errno == errno.ENETDOWN
        net.restart(other)
        await send(near, b"still there?")
        with pytest.raises(trio.BrokenResourceError):
            await near.receive_into(room)
        await joined(one, other)


async def test_after_a_change_of_address_old_connections_lead_nowhere(autojump_clock: Clock) -> None:
    net = Internet()
    one, other = two(net)
    async with net.running():
        near, far, _ = await joined(one, other)
        net.change_address(other, "192.0.2.77")
        assert other.transport.local_addresses() == ("127.0.0.1", "192.0.2.77")
        await send(near, b"lost")
        await send(far, b"lost")
        with trio.move_on_after(60) as silence:
            await receive(far, 1)
        assert silence.cancelled_caught and near.error is None and far.error is None
        await joined(other, one, 4002)
        await joined(one, other, 4003)


async def test_resets_from_nowhere_and_half_open_connections(autojump_clock: Clock) -> None:
    net = Internet()
    one, other = two(net)
    room = memoryview(bytearray(9))
    async with net.running():
        near, far, listener = await joined(one, other)
        net.reset(near)
        for end in (near, far):
            with pytest.raises(trio.BrokenResourceError):
                await end.receive_into(room)
        near = await one.transport.dial(listener.address)
        net.half_open(await listener.accept())
        with trio.move_on_after(50) as silence:
            await near.receive_into(room)
        assert silence.cancelled_caught
        await send(near, b"hello?")
        with pytest.raises(trio.BrokenResourceError):
            await near.receive_into(room)


def story(seed: int) -> tuple[int, list[tuple[Any, ...]]]:
    """Six hosts that call each other through lossy lines and faults drawn from the seed."""
    net = Internet(seed)

    async def serve(listener: Any, nursery: trio.Nursery) -> None:
        while True:
            nursery.start_soon(answer, await listener.accept())

    async def answer(pipe: Any) -> None:
        room = memoryview(bytearray(1 << 16))
        try:
            while count := await pipe.receive_into(room):
                await send(pipe, bytes(room[:count]))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        pipe.close()

    async def call(host: Any, remote: Address) -> None:
        with trio.move_on_after(20):
            try:
                pipe = await host.transport.dial(remote)
                await send(pipe, bytes(60_000))
                await receive(pipe, 60_000)
                pipe.close()
            except (OSError, trio.BrokenResourceError):
                pass

    async def main() -> None:
        seed_tasks(seed)
        hosts = [net.host(f"192.0.2.{n}", link=Link(0.01 * n, 0.004, 20e6, 50e6, 0.005)) for n in range(1, 7)]
        async with net.running(), trio.open_nursery() as nursery:
            for host in hosts:
                nursery.start_soon(serve, await host.transport.listen(Address(host.name, 4001)), nursery)
            for host in hosts:
                for other in hosts:
                    if other is not host:
                        nursery.start_soon(call, host, Address(other.name, 4001))
            net.storm(hosts, count=12, within_s=6, lasting_s=2)
            await trio.sleep(30)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    return net.digest, net.log


def test_one_seed_is_one_run() -> None:
    first, again, other = story(1), story(1), story(2)
    assert first == again and len(first[1]) > 100
    kinds = {entry[1] for entry in first[1]}
    assert {"dial", "connected", "lost", "cut", "partition", "heal", "inject-reset"} <= kinds
    assert first != other
