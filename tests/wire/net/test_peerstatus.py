"""Status of a peer: the numbers by themselves, then of two nets in memory: path, queues, windows, rates, why."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio
import trio.testing

from tests.wire.net.worlds import MemoryPipe, MemoryTransport, World, member
from wire.address import Address
from wire.errors import ConnectionLost
from wire.identity import Identity
from wire.limits import DEFAULT_LIMITS
from wire.net import (
    DIRECT,
    PUNCHED,
    ByteStream,
    Kind,
    Net,
    NetEvent,
    Path,
    PathChanged,
    PathKind,
    Peer,
    PeerStatus,
    PipeInfo,
    peer_status,
    relayed_via,
)
from wire.net.byterates import TAU_S, ByteRates
from wire.net.clockwatch import ClockWatch
from wire.rtt import RttMeter
from wire.tensor import DType, Expectation

Clock = trio.testing.MockClock
RELAY = Identity(b"r" * 32).peer_id
MIB = 1 << 20


# -- the path


def test_a_path_has_a_relay_exactly_if_it_is_relayed() -> None:
    assert PipeInfo("tcp", ("a", 1), ("b", 2)).path == DIRECT
    assert [str(path) for path in (DIRECT, PUNCHED, relayed_via(RELAY))] == ["direct", "punched", f"relayed via {RELAY}"]
    assert [path.relayed for path in (DIRECT, PUNCHED, relayed_via(RELAY))] == [False, False, True]
    for kind, relay in ((PathKind.RELAYED, None), (PathKind.DIRECT, RELAY), (PathKind.PUNCHED, RELAY)):
        with pytest.raises(ValueError, match=str(kind)):
            Path(kind, relay)


# -- rates


def test_a_steady_rate_is_found_whatever_the_rhythm_of_looks() -> None:
    for steps in ([1.0] * 60, [0.1, 2.0, 0.5] * 25, [60.0]):
        rates, now = ByteRates(), 100.0
        rates.look(now, 5_000_000, 7)  # what came before counting is nobody's rate
        assert (rates.in_per_s, rates.out_per_s) == (0.0, 0.0)
        for step in steps:
            now += step
            rates.look(now, 5_000_000 + round((now - 100.0) * 1000), 7)
        assert rates.in_per_s == pytest.approx(1000, rel=1e-3) and rates.out_per_s == 0.0


def test_a_rate_falls_by_time_and_not_by_looks() -> None:
    seldom, often = ByteRates(), ByteRates()
    for rates in (seldom, often):
        rates.look(0.0, 0, 0)
        rates.look(100.0, 100_000, 0)
    assert seldom.in_per_s == pytest.approx(1000, rel=1e-6)
    seldom.look(100.0 + TAU_S, 100_000, 0)
    for number in range(1, 51):
        often.look(100.0 + TAU_S * number / 50, 100_000, 0)
    assert seldom.in_per_s == pytest.approx(often.in_per_s) == pytest.approx(1000 / 2.71828, rel=1e-3)
    before = often.in_per_s
    often.look(100.0 + TAU_S, 900_000, 0)  # the same instant: no time, no rate
    assert often.in_per_s == before


# -- clocks


def test_the_clock_is_complained_of_once_until_it_was_healed() -> None:
    watch = ClockWatch(DEFAULT_LIMITS)
    assert watch.look([60.0, 60.0]) is None  # two peers are not enough, however far they are
    assert watch.look([]) is None
    assert watch.look([0.0, 1.9, 60.0]) is None  # one wrong clock is that peer's
    assert watch.look([-2.5, -2.4, 60.0]) == -2.4
    assert watch.look([-9.0, -9.0, -9.0]) is None  # said
    assert watch.look([0.0]) is None and watch.said  # too few to know that it is right again
    assert watch.look([-1.5, -1.5, -1.5]) is None and watch.look([-9.0, -9.0, -9.0]) is None  # about the bound: not healed
    assert watch.look([0.5, 0.5, 0.5]) is None and not watch.said
    assert watch.look([1.0, 3.0, 4.0, 9.0]) == 3.5


def test_the_offset_is_that_of_the_quickest_of_eight_and_follows_our_own_clock() -> None:
    meter = RttMeter(DEFAULT_LIMITS)

    def measure(there_s: float, back_s: float, skew_s: float = 7.0, wall: float = 1000.0) -> None:
        token = meter.sent(0.0, round(wall * 1e6))
        meter.answered(token, 0, round((wall + there_s + skew_s) * 1e6), there_s + back_s)

    measure(0.3, 0.02)  # a queue on the way there: off by half of what it cost
    assert meter.clock_offset_s == pytest.approx(7.14, abs=1e-5)
    measure(0.02, 0.02)
    assert meter.clock_offset_s == pytest.approx(7.0, abs=1e-5)
    for _ in range(7):
        measure(0.3, 0.02)
    assert meter.clock_offset_s == pytest.approx(7.0, abs=1e-5)
    measure(0.3, 0.02)  # the quick one is not among the last eight any more
    assert meter.clock_offset_s == pytest.approx(7.14, abs=1e-5)
    measure(0.01, 0.01)
    token = meter.sent(0.0, 1000 * 10**6)
    meter.wall_moved(6.0)  # ours was set while that ping was under way
    assert meter.clock_offset_s == pytest.approx(1.0, abs=1e-5)
    meter.answered(token, 0, round((1000 + 0.005 + 7.0) * 1e6), 0.01)
    assert meter.clock_offset_s == pytest.approx(1.0, abs=1e-5)


# -- two nets


class PathTransport(MemoryTransport):
    """Its dials take a path that the test chooses, as those through a relay will."""

    path = DIRECT

    async def dial(self, address: Address, *, local_port: int = 0) -> MemoryPipe:
        pipe = await super().dial(address)
        pipe._info = replace(pipe._info, path=self.path)
        return pipe


def status_of(net: Net, other: Net) -> PeerStatus:
    (found,) = [status for status in net.status() if status.peer_id == other.peer_id]
    return found


async def events_until(events: trio.MemoryReceiveChannel[NetEvent], kind: type) -> NetEvent:
    with trio.fail_after(30):
        async for event in events:
            if isinstance(event, kind):
                return event
    raise AssertionError


async def test_an_idle_peer_says_that_it_is_idle_and_how_far_it_is(autojump_clock: Clock) -> None:
    world = World()
    async with member(world, "10.0.0.1") as a, member(world, "10.0.0.2") as b:
        peer = await a.dial(b.addresses[0])
        assert peer.path == DIRECT
        await trio.sleep(30)
        status = status_of(a, b)
        assert status == peer_status(peer, trio.current_time())
        assert status.connected and status.idle and status.mixed and status.why.startswith("idle")
        assert status.since_s == pytest.approx(30, abs=0.1)
        (control,) = status.connections
        assert (control.lane, control.congestion, control.receive_used) == (0, "", 0)
        assert control.receive_granted == DEFAULT_LIMITS.connection_window_control_bytes
        assert 0 < control.send_available <= DEFAULT_LIMITS.connection_window_control_bytes
        assert status.rtt is not None and status.rtt.minimum <= status.rtt.median <= status.rtt.p99
        assert status.clock_offset_s == pytest.approx(0.0, abs=0.05)
        assert status.queued_bytes == (0, 0, 0, 0, 0) and status.resent_chunks == 0
        assert status.in_bytes_per_s < 100  # pings


async def test_what_nobody_reads_is_seen_in_the_windows_and_what_cannot_leave_in_the_queue(autojump_clock: Clock) -> None:
    world = World()
    limits = replace(DEFAULT_LIMITS, lanes_max=0)

    async def deaf(peer: Peer, stream: object) -> None:
        await trio.sleep_forever()

    async with member(world, "10.0.0.1", limits=limits) as a, member(world, "10.0.0.2", limits=limits) as b:
        b.serve("deaf", deaf)
        peer = await a.dial(b.addresses[0])
        async with trio.open_nursery() as nursery:
            stream = await peer.open("deaf", Kind.BYTE, 3)

            async def flood() -> None:
                assert isinstance(stream, ByteStream)
                while True:
                    await stream.send_all(bytes(MIB))

            nursery.start_soon(flood)
            await trio.sleep(1)
            rate = status_of(a, b).out_bytes_per_s
            await trio.sleep(0.5)
            sending, receiving = status_of(a, b), status_of(b, a)
            assert sending.queued_bytes == (0, 0, 0, 0, 0)  # it has no credit: the task keeps it
            assert not sending.idle and sending.why == ""
            (control,) = receiving.connections
            unread = DEFAULT_LIMITS.connection_window_control_bytes // 2  # what one stream may leave unread
            assert unread // 2 < control.receive_used <= unread < control.receive_granted
            assert rate > 10_000
            await trio.sleep(60)
            assert status_of(a, b).out_bytes_per_s < 0.01 * rate  # it stands still
            assert peer.primary is not None and isinstance(peer.primary.pipe, MemoryPipe)
            peer.primary.pipe._capacity = 0  # now the socket takes nothing either
            other = await peer.open("deaf", Kind.BYTE, 4)
            assert isinstance(other, ByteStream)
            nursery.start_soon(other.send_all, bytes(100_000))
            await trio.sleep(1)
            assert status_of(a, b).queued_bytes == (0, 0, 0, 0, 100_000)
            nursery.cancel_scope.cancel()


async def test_tensors_that_wait_for_a_slot_are_in_the_queue_of_their_class(autojump_clock: Clock) -> None:
    world = World()
    size = 3 * MIB
    async with member(world, "10.0.0.1") as a, member(world, "10.0.0.2") as b:
        b.serve_channel("t")
        peer = await a.dial(b.addresses[0])
        await trio.sleep(1)
        sender = peer.sender("t", b"edge", cls=2)
        back = b.peer(a.peer_id)
        assert back is not None
        receiver = back.receiver("t", b"edge", lambda key: Expectation(DType.uint8, (size,), 0, size))
        async with trio.open_nursery() as nursery:
            for number in range(2):
                nursery.start_soon(
                    lambda number: sender.send((0, number), memoryview(bytes(size)), dtype=DType.uint8, shape=(size,)), number
                )
            await trio.sleep(2)
            assert status_of(a, b).queued_bytes == (0, 0, 2 * size, 0, 0)
            receiver.post(memoryview(bytearray(size)))
            await receiver.receive()
            await trio.sleep(1)
            status = status_of(a, b)
            assert status.queued_bytes == (0, 0, size, 0, 0)  # one has come, one still waits
            assert len(status.lanes) == 2 and not status.mixed and [each.lane for each in status.connections] == [0, 1, 2]
            receiver.post(memoryview(bytearray(size)))
            await receiver.receive()
            await trio.sleep(1)
            assert status_of(a, b).queued_bytes == (0, 0, 0, 0, 0)
            receiver.post(memoryview(bytearray(size)))
            await trio.sleep(1)
            for link in peer.all_links:
                assert isinstance(link.pipe, MemoryPipe)
                link.pipe._capacity = 0
            nursery.start_soon(
                lambda: sender.send((0, 2), memoryview(bytes(size)), dtype=DType.uint8, shape=(size,))
            )
            await trio.sleep(0.5)
            (_, _, queued, _, _) = status_of(a, b).queued_bytes  # it has a slot; what the links have sealed is theirs
            assert size - MIB < queued < size
            nursery.cancel_scope.cancel()


async def test_another_path_is_an_event_at_the_end_that_knows_of_it(autojump_clock: Clock) -> None:
    world = World()
    async with member(world, "10.0.0.1") as a, member(world, "10.0.0.2") as b:
        transport = PathTransport(world, "10.0.0.1")
        a.manager._transport = transport
        events = a.events()
        transport.path = relayed_via(RELAY)
        peer = await a.dial(b.addresses[0])
        assert peer.path == relayed_via(RELAY)
        await trio.sleep(5)
        transport.path = PUNCHED
        await a.dial(b.addresses[0])  # the newer connection of one initiator wins
        assert await events_until(events, PathChanged) == PathChanged(b.peer_id, PUNCHED, relayed_via(RELAY))
        assert peer.path == PUNCHED and status_of(a, b).since_s < 1
        await a.dial(b.addresses[0])  # as good as the one before
        await trio.sleep(5)
        transport.path = DIRECT
        await a.dial(b.addresses[0])
        changed = await events_until(events, PathChanged)
        assert changed == PathChanged(b.peer_id, DIRECT, PUNCHED), "the third dial changed nothing"
        back = b.peer(a.peer_id)
        assert back is not None and back.path == DIRECT


async def test_a_peer_that_is_dialled_again_says_why(autojump_clock: Clock) -> None:
    world = World()
    async with member(world, "10.0.0.1") as a, member(world, "10.0.0.2") as b:
        b.serve_channel("t")
        peer = await a.dial(b.addresses[0])
        peer.sender("t", b"edge")
        await trio.sleep(3)
        assert status_of(a, b).connected
        path = peer.path
        world.black_holes.add(("10.0.0.2", 4001))
        for link in peer.all_links:
            link.fail(ConnectionLost("the cable was pulled"))
        await trio.sleep(2)
        status = peer_status(peer, trio.current_time())
        assert not status.connected and status.connections == () and status.path == path
        assert "the cable was pulled" in status.why and 1 < status.since_s < 3


async def test_a_peer_that_gets_no_lane_says_so(autojump_clock: Clock) -> None:
    world = World()
    async with member(world, "10.0.0.1") as a, member(world, "10.0.0.2") as b:
        b.serve_channel("t")
        peer = await a.dial(b.addresses[0])
        await trio.sleep(1)
        world.black_holes.add(("10.0.0.2", 4001))
        peer.sender("t", b"edge")
        await trio.sleep(20)
        status = status_of(a, b)
        assert status.connected and status.mixed and "no lane could be had" in status.why and not status.idle
