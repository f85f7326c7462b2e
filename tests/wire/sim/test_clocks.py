"""Wall clocks that are off, of production nets on the in-memory internet: what each sees, and when the operator hears of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import trio
import trio.testing

from tests.wire.sim.rooms import member
from tests.wire.sim.test_lanes import swarm
from wire.net import ClockOff, Net
from wire.sim import Host, Internet, Link, seed_tasks

Clock = trio.testing.MockClock
LINE = Link(0.02, 0.002, 50e6, 50e6, 0.001)


@asynccontextmanager
async def around(skews_s: list[float], *, own_skew_s: float = 0.0) -> AsyncIterator[tuple[Host, Net, list[Host], list[Net]]]:
    """A net with a peer for each skew, connected; all hosts have the line LINE."""
    seed_tasks(1)
    net = Internet(1)
    own = net.host("10.0.0.1", link=LINE, clock_skew_s=own_skew_s)
    hosts = [net.host(f"10.0.0.{number}", link=LINE, clock_skew_s=skew_s) for number, skew_s in enumerate(skews_s, 2)]
    async with net.running(), AsyncExitStack() as stack:
        center = await stack.enter_async_context(member(own))
        others = [await stack.enter_async_context(member(host)) for host in hosts]
        for other in others:
            await center.dial(other.addresses[0])
        yield own, center, hosts, others


def complaints(events: trio.MemoryReceiveChannel[object]) -> list[ClockOff]:
    """Those that wait in the channel now."""
    found = []
    while True:
        try:
            event = events.receive_nowait()
        except trio.WouldBlock:
            return found
        if isinstance(event, ClockOff):
            found.append(event)


async def test_the_offset_is_found_within_milliseconds_from_both_ends(autojump_clock: Clock) -> None:
    async with around([5.0, -0.25]) as (_, center, _, others):
        await trio.sleep(60)
        offsets = {status.peer_id: status.clock_offset_s for status in center.status()}
        back = [status.clock_offset_s for other in others for status in other.status() if status.peer_id == center.peer_id]
        for (expected, other), seen in zip(((5.0, others[0]), (-0.25, others[1])), back, strict=True):
            assert offsets[other.peer_id] == pytest.approx(expected, abs=0.003)
            assert seen == pytest.approx(-expected, abs=0.003)


async def test_a_clock_that_is_off_is_said_once_with_the_number_and_again_after_it_was_healed(autojump_clock: Clock) -> None:
    async with around([0.0, 0.0, 0.0], own_skew_s=-7.5) as (own, center, _, others):
        events, theirs = center.events(), others[0].events()
        await trio.sleep(300)
        (said,) = complaints(events)
        assert said.peers == 3 and said.offset_s == pytest.approx(7.5, abs=0.01)
        assert complaints(theirs) == []  # they are connected to us alone, whose word is not enough
        own.clock_skew_s = 0.0  # the operator sets it while all connections stand
        await trio.sleep(5)
        assert [status.clock_offset_s for status in center.status()] == [pytest.approx(0.0, abs=0.01)] * 3
        await trio.sleep(60)
        assert complaints(events) == []
        own.clock_skew_s = 30.0
        await trio.sleep(60)
        (again,) = complaints(events)
        assert again.offset_s == pytest.approx(-30.0, abs=0.01)


@pytest.mark.parametrize("skews_s", [[9.0, 9.0], [0.0, 0.0, 3600.0], [1.9, 1.9, 1.9]])
async def test_two_peers_or_one_wrong_clock_or_less_than_two_seconds_are_no_reason(skews_s: list[float], autojump_clock: Clock) -> None:
    async with around(skews_s) as (_, center, _, _):
        events = center.events()
        await trio.sleep(120)
        assert complaints(events) == []
        seen = sorted(status.clock_offset_s or 0.0 for status in center.status())
        assert seen == pytest.approx(sorted(skews_s), abs=0.01)  # known all the same


async def test_lanes_with_their_congestion_control_and_rates_of_a_channel_at_work(autojump_clock: Clock) -> None:
    async with swarm(3) as s:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(s.exchange, 60)
            await trio.sleep(4)
            (status,) = s.a.status()
            assert status.connected and not status.mixed and not status.idle and status.why == ""
            assert str(status.path) == "direct"
            assert [each.lane for each in status.lanes] == list(range(1, len(status.lanes) + 1)) and len(status.lanes) >= 2
            assert {each.congestion for each in status.connections} == {"cubic"}
            assert sum(status.queued_bytes) == status.queued_bytes[2] > 0
            assert status.out_bytes_per_s > 1e5 > status.in_bytes_per_s
            assert status.rtt is not None and 0.04 < status.rtt.minimum < 0.2  # twice two lines of 20 ms
            (back,) = s.b.status()
            assert back.in_bytes_per_s == pytest.approx(status.out_bytes_per_s, rel=0.5)
            with trio.fail_after(120):
                while len(s.got) < 60:
                    await trio.sleep(0.1)
        assert s.complete()
        await trio.sleep(60)
        (after,) = s.a.status()
        assert after.out_bytes_per_s < 0.01 * status.out_bytes_per_s and after.queued_bytes == (0, 0, 0, 0, 0)
