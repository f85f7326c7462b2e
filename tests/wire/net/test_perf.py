"""`perf/1` between two members in memory: figures, refusals, and that nothing is left however it ends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from tests.wire.net.worlds import World, held, member
from tests.wire.sim.rooms import member as sim_member
from wire.address import Address
from wire.errors import Code, WireError
from wire.events import Kind
from wire.messages import PerfAnswer, PerfAsk, PerfPulse, decode, encode
from wire.net import ByteStream, MessageStream, Peer
from wire.net.perf import CLASS, DOWN, PROTOCOL, UP, PerfService, Progress, measure, serve_perf
from wire.net.perfbytes import Allowance, Tally, pour, steady
from wire.sim import Internet, Link

SERVER = Address("10.0.0.1", 4001)


@asynccontextmanager
async def pair(**asker: object) -> AsyncIterator[tuple[Peer, PerfService, World]]:
    """A peer that asks, the service of the other."""
    world = World(capacity=1 << 16)
    async with member(world, "10.0.0.1") as served, member(world, "10.0.0.2", **asker) as asking:
        service = serve_perf(served)
        yield await asking.dial(SERVER), service, world
        await trio.testing.wait_all_tasks_blocked()
        assert service.gauges() == {"perf_runs": 0, "perf_streams": 0}
        assert held(served) == {}


async def granted(peer: Peer, seconds: float = 1.0) -> MessageStream:
    control = await peer.open(PROTOCOL)
    assert isinstance(control, MessageStream)
    await control.send(encode(PerfAsk(int(seconds * 1000))))
    assert decode(await control.receive(), PerfAnswer).code == Code.OK
    return control


async def data(peer: Peer, way: bytes) -> ByteStream:
    stream = await peer.open(PROTOCOL, Kind.BYTE, CLASS)
    assert isinstance(stream, ByteStream)
    await stream.send_all(way)
    return stream


def test_the_steady_rate_leaves_out_the_slow_start() -> None:
    tally = Tally()
    for tenth in range(101):
        tally.add(1 if tenth < 20 else 1000, 50.0 + tenth / 10)
    assert steady(tuple(tally.seconds), tally.span_s) == pytest.approx(10_000, rel=0.02)
    assert sum(tally.seconds) / tally.span_s < 9000  # which the mean of the whole would hide
    assert steady((5,), 0.0) is None


class Bucket:
    """Takes half a MiB at once, as buffers do, and then a megabit a second."""

    def __init__(self) -> None:
        self.room = 512 * 1024
        self.taken = 0

    async def send_all(self, data: memoryview) -> None:
        self.taken += len(data)
        at_once = min(self.room, len(data))
        self.room -= at_once
        await trio.sleep((len(data) - at_once) / 125e3)

    async def send_eof(self) -> None:
        await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("seconds", [1.0, 3.0])
async def test_a_slow_line_notices_the_end_of_its_time(seconds: float, autojump_clock: trio.testing.MockClock) -> None:
    """Though the first pieces are quick, as on any line: at most the one piece that waited for room, and a small one, are late."""
    bucket, began = Bucket(), trio.current_time()
    await pour(bucket, seconds, Allowance(1 << 40))  # type: ignore[arg-type]
    late_s = trio.current_time() - began - seconds
    assert 0 <= late_s < (1.1 if seconds == 1.0 else 0.3)
    assert bucket.taken == pytest.approx(512 * 1024 + (seconds + late_s) * 125e3, rel=0.01)


@pytest.mark.parametrize("both", [False, True])
async def test_both_directions_have_the_rate_of_the_line(both: bool, autojump_clock: trio.testing.MockClock) -> None:
    """A line of 40 Mbit/s up and 80 down, 40 ms: what is measured is the line, not the machine."""
    seen: list[Progress] = []
    net = Internet(1)
    asker, other = net.host("10.0.0.2", link=Link(0.01, 0.0, 40e6, 80e6)), net.host("10.0.0.1", link=Link(0.01))
    async with net.running(), sim_member(other) as served, sim_member(asker) as asking:
        serve_perf(served)
        peer = await asking.dial(SERVER)
        measured = await measure(peer, seconds=5, both_at_once=both, progress=seen.append)
    assert measured.up.steady_bytes_per_s == pytest.approx(5e6, rel=0.1)
    assert measured.down.steady_bytes_per_s == pytest.approx(10e6, rel=0.1)
    assert measured.up.bytes == sum(measured.up.series)
    assert measured.rtt_up_s is not None and measured.down.first_byte_s is not None
    assert {p.what for p in seen} == ({"both"} if both else {"up", "down"})


async def test_a_guest_is_refused(autojump_clock: trio.testing.MockClock) -> None:
    async with pair(run=None) as (peer, _, _world):
        with pytest.raises(WireError) as refused:
            await measure(peer, seconds=1)
        assert refused.value.code == Code.NOT_MEMBER


async def test_one_at_a_time_and_one_a_minute(autojump_clock: trio.testing.MockClock) -> None:
    async with pair() as (peer, _, world), member(world, "10.0.0.3") as third:
        control = await granted(peer)
        other = await third.dial(SERVER)
        with pytest.raises(WireError) as busy:
            await measure(other, seconds=1)
        assert busy.value.code == Code.REFUSED and busy.value.retry_after
        await control.send_eof()
        with pytest.raises(trio.EndOfChannel):
            await control.receive()
        with pytest.raises(WireError) as limited:
            await measure(peer, seconds=1)
        assert limited.value.code == Code.RATE_LIMITED
        assert limited.value.retry_after == pytest.approx(60, abs=1)
        await trio.sleep(limited.value.retry_after)
        control = await granted(peer)  # the wait that it named was enough
        control.reset()


async def test_bytes_without_a_grant_are_refused(autojump_clock: trio.testing.MockClock) -> None:
    async with pair() as (peer, _, _world):
        stream = await data(peer, UP)
        with pytest.raises(WireError) as refused:
            await stream.receive_some(1)
        assert refused.value.code == Code.REFUSED
        stream.close()


@pytest.mark.parametrize("way", [UP, DOWN])
async def test_the_end_of_the_asker_ends_it_here(way: bytes, autojump_clock: trio.testing.MockClock) -> None:
    async with pair() as (peer, service, _world):
        control = await granted(peer)
        stream = await data(peer, way)
        with trio.move_on_after(0.1):
            await trio.sleep_forever()
        assert service.gauges() == {"perf_runs": 1, "perf_streams": 1}  # else the next lines would prove nothing
        control.reset()
        with trio.move_on_after(0.1):
            await trio.sleep_forever()
        assert service.gauges() == {"perf_runs": 0, "perf_streams": 0}
        stream.reset()


async def test_a_lost_connection_ends_it_here(autojump_clock: trio.testing.MockClock) -> None:
    async with pair() as (peer, service, world):
        await granted(peer)
        await data(peer, UP)
        await trio.testing.wait_all_tasks_blocked()
        assert service.gauges()["perf_runs"] == 1
        world.pipes[-1][0].abort()
        await peer.wait_closed()
        await trio.sleep(1)


@pytest.mark.parametrize("way", [UP, DOWN])
async def test_a_peer_that_never_reads_or_never_stops_runs_into_the_deadline(
    way: bytes, autojump_clock: trio.testing.MockClock
) -> None:
    """Down: nobody reads.  Up: nobody ever ends it, a byte now and then."""
    async with pair() as (peer, _, _world):
        control = await granted(peer)
        stream = await data(peer, way)
        began = trio.current_time()
        with pytest.raises(WireError) as ended:
            while True:
                if way == UP:
                    await stream.send_all(b"x")
                await trio.sleep(0.5)
                if stream._error is not None:
                    raise stream._error
        assert ended.value.code == Code.TIMEOUT
        assert trio.current_time() - began == pytest.approx(6, abs=0.6)
        with pytest.raises(WireError) as over:
            await control.receive()
        assert over.value.code == Code.TIMEOUT
        assert trio.current_time() - began == pytest.approx(12, abs=0.6)


async def test_a_flood_of_pulses_is_ended(autojump_clock: trio.testing.MockClock) -> None:
    async with pair() as (peer, _, _world):
        control = await granted(peer)
        with pytest.raises(WireError) as ended:
            for number in range(1000):
                await control.send(encode(PerfPulse(number)))
                await control.receive()
        assert ended.value.code == Code.EXCESSIVE
