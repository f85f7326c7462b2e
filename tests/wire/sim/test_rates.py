"""How much lines carry: shapes, compared within one run."""

from __future__ import annotations

import time

import pytest
import trio
import trio.testing

from tests.wire.sim.rooms import joined, rate, receive, send
from wire.sim import Internet, Link

Clock = trio.testing.MockClock
LONG = Link(delay_s=0.025, up_bps=1e9, down_bps=1e9, queue_bytes=16 << 20)


async def test_bbr_fills_a_long_fast_line_if_its_buffers_do(autojump_clock: Clock) -> None:
    net = Internet(1)
    one, other = (net.host(name, link=LONG, send_buffer=64 << 20, receive_buffer=64 << 20) for name in ("192.0.2.1", "192.0.2.2"))
    assert 0.9e9 <= await rate(net, one, other, warm_s=3, for_s=0.5) <= 1e9


async def test_the_buffers_of_linux_carry_4_mib_a_round_trip(autojump_clock: Clock) -> None:
    net = Internet(1)
    one, other = net.host("192.0.2.1", link=LONG), net.host("192.0.2.2", link=LONG)
    assert await rate(net, one, other, warm_s=2, for_s=1) == pytest.approx((4 << 20) * 8 / 0.1, rel=0.05)


async def test_loss_costs_cubic_most_of_a_line_several_connections_some_of_it_and_bbr_little(autojump_clock: Clock) -> None:
    def line(loss: float, congestion: str) -> tuple:
        net = Internet(2)
        link = Link(delay_s=0.02, up_bps=200e6, down_bps=200e6, loss=loss / 2)
        return net, *(net.host(name, link=link, congestion=congestion) for name in ("192.0.2.1", "192.0.2.2"))

    whole = await rate(*line(0, "cubic"), warm_s=2, for_s=2)
    single = await rate(*line(0.001, "cubic"), warm_s=6, for_s=20)
    four = await rate(*line(0.001, "cubic"), 4, warm_s=6, for_s=20)
    bbr = await rate(*line(0.001, "bbr"), warm_s=2, for_s=3)
    assert whole > 180e6 and single < 0.25 * whole and four > 2.5 * single and bbr > 0.6 * whole, (whole, single, four, bbr)


async def test_connections_share_a_bottleneck_equally_and_slow_slows(autojump_clock: Clock) -> None:
    net = Internet(3)
    link = Link(delay_s=0.01, up_bps=50e6, down_bps=50e6)
    one, other = net.host("192.0.2.1", link=link), net.host("192.0.2.2", link=link)
    net.slow(one, 10e6)
    assert await rate(net, one, other, 3, warm_s=3, for_s=4) == pytest.approx(10e6, rel=0.1)


async def test_a_gibibyte_a_minute_of_wall_time(autojump_clock: Clock) -> None:
    """64 MiB here, in the same proportion."""
    net = Internet(4)
    one, other = net.host("192.0.2.1"), net.host("192.0.2.2")
    async with net.running(), trio.open_nursery() as nursery:
        near, far, _ = await joined(one, other)
        data = bytes(range(256)) * (64 * 4096)
        started = time.process_time()
        nursery.start_soon(send, near, data)
        assert await receive(far, len(data)) == data
    assert time.process_time() - started < 60 / 16


async def test_a_reader_that_does_not_read_stops_the_sender(autojump_clock: Clock) -> None:
    net = Internet(5)
    one, other = net.host("192.0.2.1"), net.host("192.0.2.2")
    async with net.running():
        near, far, _ = await joined(one, other)
        with trio.move_on_after(30) as stuck:
            await send(near, bytes(20 << 20))
        assert stuck.cancelled_caught
        assert far.host.receive_buffer <= near.flow.taken <= far.host.receive_buffer + near.host.send_buffer
        taken = near.flow.taken
        async with trio.open_nursery() as nursery:  # it goes on when the reader does
            nursery.start_soon(send, near, bytes(2 << 20))
            assert len(await receive(far, taken + (2 << 20))) == taken + (2 << 20)
