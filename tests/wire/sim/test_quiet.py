"""Silence is judged sooner while channels exist; a line that loses one packet in twenty must not look dead for it.

The simulated TCP repeats a lost packet as RFC 6298 says, so that rare bad luck lasts seconds; `wire/timers.py` has the sums.
"""

from __future__ import annotations

import pytest
import trio
import trio.testing

from tests.wire.sim.test_lanes import Swarm, swarm
from tests.wire.sim.test_moves import until
from wire.sim import Link, SimPipe

Clock = trio.testing.MockClock
LOSSY = Link(delay_s=0.02, jitter_s=0.002, up_bps=100e6, down_bps=100e6, loss=0.025)  # two lines on the way: 80 ms there and back, 5 %
CLEAN = Link(delay_s=0.02, jitter_s=0.002, up_bps=100e6, down_bps=100e6)


async def steps(s: Swarm, count: int, every_s: float) -> None:
    """Training as the wire sees it: a tensor each step."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(s.receive, count)
        for number in range(count):
            nursery.start_soon(s.send, number)
            await trio.sleep(every_s)


async def test_nat_8_an_hour_at_5_percent_loss_kills_no_connection(autojump_clock: Clock) -> None:
    every_s = 120.0
    async with swarm(1, LOSSY) as s:
        (link,), (back,) = s.peer.links, s.back.links
        await steps(s, int(3600 / every_s), every_s)
        assert s.peer.links == [link] and s.back.links == [back] and link.error is None and back.error is None
        assert s.peer.losses == 0 and s.complete()
        assert s.net.losses > 100


async def silent(s: Swarm) -> tuple[float, float]:
    """Seconds from the last moment at which the other could be heard until each end of the control connection has noticed."""
    (link,), (back,) = s.peer.links, s.back.links
    began = trio.current_time()
    s.net.partition(s.hosts[0], s.hosts[1])
    took: list[float] = []
    for one in (link, back):
        with trio.fail_after(60):
            await one.closed.wait()
        took.append(trio.current_time() - began)
    return took[0], took[1]


@pytest.mark.parametrize("lanes", [0, 2])
@pytest.mark.parametrize("busy", [False, True])
async def test_nat_8_a_black_hole_is_noticed_within_10_s(
    lanes: int, busy: bool, autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without lanes a full pipe lets no ping out; the other's pings are missed all the same."""
    if not lanes:
        monkeypatch.setattr("wire.lanecount.LaneCount.sample", lambda *args, **kwargs: 0)
    for seed in range(5):
        async with swarm(seed, CLEAN) as s:
            async with trio.open_nursery() as nursery:
                if busy:
                    nursery.start_soon(s.exchange, 40)
                    await until(lambda: len(s.got) >= 4)
                    assert len(s.got) < 30
                else:
                    await s.exchange(4)
                    await trio.sleep(3.1)
                assert len(s.peer.all_links) == 1 + lanes
                took = await silent(s)
                nursery.cancel_scope.cancel()
            assert min(took) > 5 and max(took) <= 10.2, took


@pytest.mark.parametrize("lanes", [0, 2])
async def test_a_line_that_is_full_for_a_minute_is_not_dead(lanes: int, autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways 2 Mbit/s and a deep queue, and a receiver that leaves its slots empty for 20 s."""
    if not lanes:
        monkeypatch.setattr("wire.lanecount.LaneCount.sample", lambda *args, **kwargs: 0)
    async with swarm(1, Link(0.02, 0.002, 2e6, 2e6)) as s:
        (link,), (back,) = s.peer.links, s.back.links
        async with trio.open_nursery() as nursery:
            for number in range(12):
                nursery.start_soon(s.send, number)
            await trio.sleep(20)
            nursery.start_soon(s.receive, 12)
        assert s.complete() and trio.current_time() > 50
        assert s.peer.links == [link] and s.back.links == [back] and s.peer.losses == 0


def hold(patch: pytest.MonkeyPatch, pipe: SimPipe, until_s: float) -> None:
    """The program at this end does nothing until then."""
    receive, send, wait = pipe.receive_into, pipe.send_now, pipe.wait_writable

    async def receive_late(buffer: memoryview) -> int:
        count = await receive(buffer)
        await trio.sleep_until(until_s)
        return count

    async def wait_late() -> None:
        await trio.sleep_until(until_s)
        await wait()

    patch.setattr(pipe, "receive_into", receive_late)
    patch.setattr(pipe, "send_now", lambda views: send(views) if trio.current_time() >= until_s else 0)
    patch.setattr(pipe, "wait_writable", wait_late)


async def test_a_peer_that_computes_for_5_s_is_not_dead(autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its program reads and writes nothing; its kernel goes on.  Ten seconds are too long: the test can fail."""
    for pause_s, lives in ((5.0, True), (10.0, False)):
        async with swarm(1, CLEAN) as s:
            await s.exchange(4)
            await trio.sleep(3.1)
            (link,) = s.peer.links
            until_s = trio.current_time() + pause_s
            with monkeypatch.context() as patch:
                for pipe in list(s.hosts[1].connections.values()):
                    hold(patch, pipe, until_s)
                await trio.sleep(15)
            assert (link.error is None) is lives
