"""What programs notice of TCP: refusal, silence, the ends, ports, simultaneous opens."""

from __future__ import annotations

import errno

import pytest
import trio
import trio.testing

from tests.wire.sim.rooms import FAST, joined, receive, send, two
from wire.address import Address
from wire.sim import Internet, Link

Clock = trio.testing.MockClock
RTT = 4 * FAST.delay_s


async def test_bytes_arrive_whole_after_the_way_and_the_ends_are_named(autojump_clock: Clock) -> None:
    net = Internet()
    one, other = two(net)
    async with net.running():
        near, far, _ = await joined(one, other)
        assert trio.current_time() == pytest.approx(RTT * 1.5)  # SYN, SYN-ACK; ACK
        near.send_now([memoryview(b"one "), memoryview(b"two")])
        assert await receive(far, 7) == b"one two"
        assert trio.current_time() == pytest.approx(RTT * 2)
        assert near.info().local == far.info().remote and near.info().remote == far.info().local == ("192.0.2.2", 4001)


async def test_a_closed_port_refuses_after_one_round_trip_and_a_black_hole_after_all_syns(autojump_clock: Clock) -> None:
    net = Internet()
    one, _ = two(net)
    async with net.running():
        with pytest.raises(ConnectionRefusedError):
            await one.transport.dial(Address("192.0.2.2", 4001))
        assert trio.current_time() == pytest.approx(RTT)
        with pytest.raises(OSError) as nobody:
            await one.transport.dial(Address("192.0.2.9", 4001))
        assert nobody.value.errno == errno.ETIMEDOUT and trio.current_time() == pytest.approx(RTT + 127)
        with pytest.raises(OSError) as other_family:
            await one.transport.dial(Address("2001:db8::1", 4001))
        assert other_family.value.errno == errno.ENETUNREACH
        assert not one.dialling


@pytest.mark.parametrize(("healed_s", "connected_s"), [(0.5, 1), (2, 3), (5, 7)])
async def test_a_syn_is_repeated_after_1_3_and_7_seconds(autojump_clock: Clock, healed_s: float, connected_s: float) -> None:
    net = Internet()
    one, other = two(net)
    async with net.running(), trio.open_nursery() as nursery:
        net.cut(other)
        nursery.start_soon(joined, one, other)
        await trio.sleep(healed_s)
        net.heal(other)
        await trio.sleep(connected_s + RTT - healed_s - 0.01)
        assert not one.connections
        await trio.sleep(0.02)
        assert one.connections


async def test_half_close_lets_the_other_direction_go_on(autojump_clock: Clock) -> None:
    net = Internet()
    one, other = two(net)
    async with net.running():
        near, far, _ = await joined(one, other)
        await send(near, b"question")
        await near.send_eof()
        assert await receive(far, 100) == b"question"
        await send(far, b"answer")
        far.close()
        assert await receive(near, 100) == b"answer"
        with pytest.raises(trio.BrokenResourceError):
            near.send_now([memoryview(b"more")])
        near.close()
        await trio.sleep(1)
        assert not one.connections and not other.connections


async def test_abort_and_a_close_with_unread_data_reset_the_other_end(autojump_clock: Clock) -> None:
    net = Internet()
    one, other = two(net)
    async with net.running():
        for unread in (False, True):
            near, far, listener = await joined(one, other)
            if unread:
                await send(near, b"never read")
                await trio.sleep(1)
                far.close()
            else:
                far.abort()
            with pytest.raises(trio.BrokenResourceError) as reset:
                await near.receive_into(memoryview(bytearray(9)))
            assert isinstance(reset.value.__cause__, OSError) and reset.value.__cause__.errno == errno.ECONNRESET
            with pytest.raises(trio.ClosedResourceError):
                await far.receive_into(memoryview(bytearray(9)))
            listener.close()


async def test_closing_wakes_who_waits_and_a_cancel_loses_nothing(autojump_clock: Clock) -> None:
    net = Internet()
    one, other = two(net)
    async with net.running():
        near, far, _ = await joined(one, other)
        room = memoryview(bytearray(9))
        with trio.move_on_after(RTT / 4):
            await near.receive_into(room)
        await send(far, b"late")
        assert await near.receive_into(room) == 4
        async with trio.open_nursery() as nursery:

            async def closed() -> None:
                with pytest.raises(trio.ClosedResourceError):
                    await near.receive_into(room)

            nursery.start_soon(closed)
            await trio.sleep(1)
            near.close()
            near.close()


async def test_a_full_backlog_drops_and_a_later_syn_gets_in(autojump_clock: Clock) -> None:
    net = Internet()
    one, other = two(net, backlog=2)
    async with net.running(), trio.open_nursery() as nursery:
        listener = await other.transport.listen(Address("192.0.2.2", 4001))
        for _ in range(3):
            nursery.start_soon(one.transport.dial, listener.address)
        await trio.sleep(0.9)
        assert len(one.connections) == 2
        await listener.accept()
        await trio.sleep(0.5)
        assert len(one.connections) == 3


async def test_ports_are_taken_reused_and_free(autojump_clock: Clock) -> None:
    net = Internet()
    one, other = two(net)
    async with net.running():
        near, *_ = await joined(one, other)
        with pytest.raises(OSError) as busy:
            await other.transport.listen(Address("0.0.0.0", 4001))
        assert busy.value.errno == errno.EADDRINUSE
        with pytest.raises(OSError) as foreign:
            await other.transport.listen(Address("192.0.2.1", 4002))
        assert foreign.value.errno == errno.EADDRNOTAVAIL
        back = await one.transport.listen(Address("192.0.2.1", 5000))
        from_port = await other.transport.dial(back.address, local_port=4001)
        assert from_port.info().local == ("192.0.2.2", 4001)  # a listener's port
        with pytest.raises(OSError) as stands:
            await other.transport.dial(Address(*near.info().local), local_port=4001)
        assert stands.value.errno == errno.EADDRNOTAVAIL  # the accept won


async def test_two_dials_of_each_other_become_one_connection(autojump_clock: Clock) -> None:
    net = Internet()
    one, other = two(net)
    ends = []

    async def dial(host, remote: str) -> None:
        ends.append(await host.transport.dial(Address(remote, 4001), local_port=4001))

    async with net.running():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(dial, one, "192.0.2.2")
            nursery.start_soon(dial, other, "192.0.2.1")
        assert len(one.connections) == len(other.connections) == 1
        await send(ends[0], b"hello")
        assert await receive(ends[1], 5) == b"hello"


async def test_a_cancelled_dial_leaves_nothing(autojump_clock: Clock) -> None:
    net = Internet()
    one, other = two(net)
    async with net.running():
        listener = await other.transport.listen(Address("192.0.2.2", 4001))
        for after_s in (RTT / 4, RTT * 0.75):
            with trio.move_on_after(after_s):
                await one.transport.dial(listener.address)
            await trio.sleep(1)
            assert not one.connections and not one.dialling and not other.connections and listener.half == 0


async def test_one_loss_holds_back_what_is_behind_it_for_a_round_trip_and_order_is_kept(autojump_clock: Clock) -> None:
    net = Internet(7)
    one, other = two(net, Link(delay_s=0.02, jitter_s=0.01, loss=0.01))
    async with net.running(), trio.open_nursery() as nursery:
        near, far, _ = await joined(one, other)
        data = bytes(range(251)) * 8000
        nursery.start_soon(send, near, data)
        assert await receive(far, len(data)) == data
        assert net.losses > 5


async def test_names_resolve_by_family_or_not_at_all(autojump_clock: Clock) -> None:
    net = Internet()
    one = net.host("192.0.2.1", "2001:db8::1")
    net.names["seed.example"] = ["192.0.2.1", "2001:db8::1"]
    resolve = one.transport.resolve
    assert [each.host for each in await resolve(Address("seed.example", 1))] == ["192.0.2.1", "2001:db8::1"]
    assert [each.host for each in await resolve(Address("seed.example", 1, "dns6"))] == ["2001:db8::1"]
    with pytest.raises(OSError):
        await resolve(Address("nobody.example", 1))
    assert one.transport.local_addresses() == ("127.0.0.1", "192.0.2.1", "2001:db8::1")
