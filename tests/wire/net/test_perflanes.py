"""Lines measured over one to four lanes, in the internet in memory: what is best, what it costs, and that nothing is left of it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest
import trio
import trio.testing

from tests.wire.net.worlds import descriptors, held, local
from tests.wire.sim.rooms import member
from wire.address import Address
from wire.errors import Code, LocalProtocolError, WireError
from wire.limits import DEFAULT_LIMITS, Limits
from wire.net import Net, Peer
from wire.net.link import Link as Connection
from wire.net.perf import PROTOCOL, PerfService, Progress
from wire.net.perflanes import LANES_WAIT_S, Flow, Rung, best, measure_lanes
from wire.sim import Host, Internet, Link, seed_tasks

Clock = trio.testing.MockClock
FOUR = replace(DEFAULT_LIMITS, lanes_start=4, lanes_start_bbr=4)
NONE = replace(DEFAULT_LIMITS, lanes_max=0)
FULL = Link(0.01, 0.0, 10e6, 10e6)  # both ends: 40 ms, 10 Mbit/s, nothing is lost
LOSSY = Link(0.025, 0.0, 40e6, 40e6, 0.006)  # 100 ms, 40 Mbit/s, of which one connection under cubic carries 2
LINE_BYTES_PER_S = 10e6 / 8


@dataclass
class Two:
    """A member that asks, `peer` as it sees the one that is asked, and what is held."""

    net: Internet
    hosts: tuple[Host, Host]
    asking: Net
    served: Net
    peer: Peer

    def lanes(self) -> list[Connection]:
        """Those that carry a stream now."""
        return [link for link in self.peer.all_links if link.lane and link.ends]


@asynccontextmanager
async def two(
    link: Link = FULL, *, seed: int = 1, limits: Limits = FOUR, theirs: Limits = DEFAULT_LIMITS, they_dial: bool = False
) -> AsyncIterator[Two]:
    """In the end neither side has a stream left, whatever happened."""
    seed_tasks(seed)
    net = Internet(seed)
    hosts = net.host("10.0.0.2", link=link, congestion="cubic"), net.host("10.0.0.1", link=link, congestion="cubic")
    async with net.running(), member(hosts[0], limits) as asking, member(hosts[1], theirs) as served:
        dialled = await (served.dial(asking.addresses[0]) if they_dial else asking.dial(served.addresses[0]))
        while (peer := asking.peer(served.peer_id)) is None:
            await trio.sleep(0.01)
        yield Two(net, hosts, asking, served, peer if they_dial else dialled)
        await trio.sleep(10)
        assert held(asking, served) == {}


def serve(served: Net) -> PerfService:
    service = PerfService(served.limits)
    served.serve(PROTOCOL, service.handle)
    return service


def rates(rung: Rung) -> tuple[float, float]:
    assert rung.down is not None and rung.up.bytes_per_s is not None and rung.down.bytes_per_s is not None
    return rung.up.bytes_per_s, rung.down.bytes_per_s


# -- what is best


async def test_on_a_lossy_long_line_four_lanes_carry_much_more_than_one(autojump_clock: Clock) -> None:
    async with two(LOSSY) as t:
        serve(t.served)
        ladder = await measure_lanes(t.peer)
    assert (ladder.wanted, ladder.had, ladder.served, ladder.ended, ladder.full) == (4, 4, 4, "", False)
    assert [rung.lanes for rung in ladder.rungs] == [1, 2, 3, 4]
    for one, four in zip(rates(ladder.rungs[0]), rates(ladder.rungs[3]), strict=True):
        assert four > 2.5 * one and four < 5e6
    assert best(ladder.rungs).lanes == 4
    assert ladder.rtt_idle_s == pytest.approx(0.1, abs=0.01)


@pytest.mark.parametrize("they_dial", [False, True])
async def test_a_line_that_one_lane_fills_needs_no_more(they_dial: bool, autojump_clock: Clock) -> None:
    """The same streams, lanes and programs as above: it is the line that decides.  Also when the peer has to dial the lanes."""
    async with two(FULL, they_dial=they_dial) as t:
        serve(t.served)
        ladder = await measure_lanes(t.peer, seconds=1)
    assert (ladder.had, ladder.ended, len(ladder.rungs)) == (4, "", 4)
    for rung in ladder.rungs:
        assert rates(rung) == pytest.approx((LINE_BYTES_PER_S, LINE_BYTES_PER_S), rel=0.15)
        assert rung.up.rtt_s is not None and rung.up.rtt_s >= ladder.rtt_idle_s
    assert best(ladder.rungs).lanes == 1


async def test_each_stream_has_a_lane_of_its_own_and_the_others_are_idle(autojump_clock: Clock) -> None:
    seen: defaultdict[str, set[int]] = defaultdict(set)
    async with two() as t:
        serve(t.served)
        await measure_lanes(t.peer, seconds=0.5, progress=lambda now: seen[now.what].add(len(t.lanes())))
    assert {what: max(counts) for what, counts in seen.items()} == {
        f"{way} over {lanes} lane(s)": lanes for lanes in (1, 2, 3, 4) for way in ("up", "down")
    }


def flow(rate: float | None) -> Flow:
    return Flow(rate, 0, None)


BEST = [
    ([(100, 100)], 1),
    ([(100, 100), (110, 90), (113, 113)], 1),
    ([(100, 100), (130, 100), (130, 100), (120, 110)], 2),
    ([(100, 100), (100, 120), (100, 160), (90, 200)], 4),
    ([(100, 100), (114, 114), (125, 125)], 2),  # within the gain of three, and one is not
    ([(100, 100), (130, 50), (140, 10)], 1),  # one way gains, the other loses more
    ([(100, 100), (300, None)], 1),  # ended in the middle of it
    ([(100, 100), (105, 100), (300, None)], 1),
    ([(100, None)], 1),
    ([(None, None), (None, None)], 1),
    ([(None, 100), (50, 100)], 2),
]


@pytest.mark.parametrize(("figures", "lanes"), BEST)
def test_the_fewest_lanes_that_carry_about_the_most(figures: list[tuple[float | None, float | None]], lanes: int) -> None:
    """None for a way down that was not measured, and for a rate up that is not known."""
    rungs = tuple(Rung(n, flow(up), flow(down) if down or not up else None) for n, (up, down) in enumerate(figures, 1))
    assert best(rungs, 0.15).lanes == lanes


# -- fewer lanes than four


async def test_a_net_that_wants_no_lanes_measures_the_control_connection(autojump_clock: Clock) -> None:
    async with two(limits=NONE, theirs=NONE) as t:
        serve(t.served)
        began = trio.current_time()
        ladder = await measure_lanes(t.peer, seconds=1)
        assert trio.current_time() - began < LANES_WAIT_S  # for lanes that nobody wants it is not waited
        assert t.peer.stats.lanes == 0
    assert (ladder.wanted, ladder.had, ladder.ended) == (0, 0, "")
    assert [rung.lanes for rung in ladder.rungs] == [1]
    assert rates(ladder.rungs[0]) == pytest.approx((LINE_BYTES_PER_S, LINE_BYTES_PER_S), rel=0.25)


async def test_lanes_that_cannot_be_had_are_said_to_be_missing(autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A firewall that lets three connections pass: what goes over two lanes is measured, and the rest is named."""
    async with two() as t:
        serve(t.served)
        dial, transport = t.hosts[0].transport.dial, t.hosts[0].transport

        async def guarded(address: Address, *, local_port: int = 0) -> object:
            if t.peer.stats.connections >= 3:
                raise ConnectionRefusedError("by the firewall")
            return await dial(address, local_port=local_port)

        monkeypatch.setattr(transport, "dial", guarded)
        ladder = await measure_lanes(t.peer, seconds=0.5)
    assert (ladder.wanted, ladder.had, ladder.ended) == (4, 2, "")
    assert [rung.lanes for rung in ladder.rungs] == [1, 2]


async def test_streams_that_share_a_lane_are_not_taken_for_two_lanes(autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    async with two() as t:
        serve(t.served)
        beside = Peer._for

        def first(self: Peer, cls: int) -> Connection | None:
            link, lanes = beside(self, cls), self.lanes
            return link if cls < 2 or lanes is None else lanes.usable()[0]

        monkeypatch.setattr(Peer, "_for", first)
        ladder = await measure_lanes(t.peer, seconds=0.3)
    assert [rung.lanes for rung in ladder.rungs] == [1] and "a lane has gone" in ladder.ended


# -- what it costs


@pytest.mark.parametrize("way", ["up", "down"])
async def test_bytes_end_it_where_time_would_not(way: str, autojump_clock: Clock) -> None:
    """A line of 200 Mbit/s and 2 MiB in all, 256 KiB a direction and number of lanes; seconds would be 15 times that and more."""
    fast = Link(0.005, 0.0, 200e6, 200e6)
    async with two(fast) as t:
        serve(t.served)
        began, before = trio.current_time(), t.peer.stats
        ladder = await measure_lanes(t.peer, seconds=2, bytes_most=2 << 20)
        assert trio.current_time() - began < 10
        after = t.peer.stats
    flows = [rung.up if way == "up" else rung.down for rung in ladder.rungs]
    if way == "up":
        assert [flow.bytes for flow in flows if flow] == [256 << 10] * 4  # to the byte
        assert after.class_out_bytes[4] - before.class_out_bytes[4] < (1 << 20) + 10_000
    else:
        # The stream that hears of it is ended; what was under way until then still comes, a window a stream at most.
        assert [flow is not None and 256 << 10 <= flow.bytes <= 5 * (256 << 10) for flow in flows] == [True] * 4
        came = after.class_in_bytes[4] - before.class_in_bytes[4]
        assert 1 << 20 <= came <= (1 << 20) + 10 * DEFAULT_LIMITS.stream_window_bulk_bytes
    assert ladder.ended == "" and len(ladder.rungs) == 4


async def test_seconds_are_shared_out_so_that_the_peer_is_kept_no_longer_than_for_one_lane(autojump_clock: Clock) -> None:
    slow = Link(0.01, 0.0, 3e6, 3e6, queue_bytes=64 << 10)
    async with two(slow) as t:
        service, began = serve(t.served), trio.current_time()
        shown: list[Progress] = []
        ladder = await measure_lanes(t.peer, seconds=15, progress=shown.append)
        took_s = trio.current_time() - began
        await trio.sleep(0.1)  # the end of it has to get there
        assert service.gauges()["perf_runs"] == 0
    assert (ladder.ended, ladder.full) == ("", False) and len(ladder.rungs) == 4
    assert {now.total_s for now in shown} == {3.75}
    assert 2 * DEFAULT_LIMITS.perf_seconds_max < took_s < 2 * DEFAULT_LIMITS.perf_seconds_max + 5 * DEFAULT_LIMITS.perf_grace_s


async def test_a_slow_line_with_a_long_queue_is_full_and_not_tried_further(autojump_clock: Clock) -> None:
    """1 Mbit/s with room for half a minute of it: two lanes would not be empty five seconds after their time."""
    async with two(Link(0.01, 0.0, 1e6, 1e6)) as t:
        serve(t.served)
        ladder = await measure_lanes(t.peer)
    assert (ladder.had, ladder.ended, ladder.full) == (4, "", True)
    assert [rates(rung) for rung in ladder.rungs] == [pytest.approx((125e3, 125e3), rel=0.15)]


async def test_a_time_for_everything_keeps_what_was_found(autojump_clock: Clock) -> None:
    async with two() as t:
        serve(t.served)
        began = trio.current_time()
        ladder = await measure_lanes(t.peer, seconds=1, most_time_s=6)
        assert trio.current_time() - began == pytest.approx(6, abs=0.01)
    assert 1 <= len(ladder.rungs) < 4 and ladder.ended == "the time for it was over"


async def test_a_time_that_goes_by_while_lanes_are_waited_for_is_a_timeout(
    autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two() as t:
        serve(t.served)

        async def nobody(address: Address, *, local_port: int = 0) -> object:
            await trio.sleep_forever()

        monkeypatch.setattr(t.hosts[0].transport, "dial", nobody)
        began = trio.current_time()
        with pytest.raises(WireError) as late:
            await measure_lanes(t.peer, seconds=1, most_time_s=3)
        assert late.value.code is Code.TIMEOUT and trio.current_time() - began == pytest.approx(3, abs=0.01)


@pytest.mark.parametrize(("seconds", "lanes"), [(0.0, 4), (15.1, 4), (1.0, 0), (1.0, 5)])
async def test_what_nobody_may_ask_for_is_not_asked(seconds: float, lanes: int, autojump_clock: Clock) -> None:
    async with two() as t:
        with pytest.raises(LocalProtocolError):
            await measure_lanes(t.peer, seconds=seconds, lanes=lanes)


# -- cancelled


def at_work() -> Counter[str]:
    """Tasks that measure, or answer a stream."""
    names: Counter[str] = Counter()
    root = trio.lowlevel.current_root_task()
    tasks = [] if root is None else [root]
    while tasks:
        task = tasks.pop()
        names[task.name] += task.name.startswith(("wire.net.perf", "wire.net.supervise"))
        tasks.extend(child for nursery in task.child_nurseries for child in nursery.child_tasks)
    return +names


@pytest.mark.parametrize("after_s", [0.1, 0.3, 1.5, 2.6, 3.6, 5.6])
async def test_a_cancel_leaves_no_stream_and_no_task_on_either_side(after_s: float, autojump_clock: Clock) -> None:
    """From the wait for lanes to three of them; `two` looks at both nets."""
    async with two() as t:
        service = serve(t.served)
        t.peer._want_lanes()
        await trio.sleep(3)  # the lanes and their tasks stay
        tasks = at_work()
        seen: list[str] = []
        with trio.move_on_after(after_s) as cancelled:
            await measure_lanes(t.peer, seconds=1, progress=lambda now: seen.append(now.what))
        assert cancelled.cancelled_caught
        assert bool(seen) == (after_s > 0.5)
        await trio.sleep(1)
        assert service.gauges() == {"perf_runs": 0, "perf_streams": 0} and not t.lanes()
        assert at_work() == tasks


# -- real sockets


async def test_over_real_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loopback, taken for two machines: within one there are no lanes."""
    monkeypatch.setattr("wire.pipeinfo.same_machine", lambda local, remote: False)
    before = descriptors()
    async with local() as served, local(limits=FOUR) as asking:
        serve(served)
        peer = await asking.dial(served.addresses[0])
        ladder = await measure_lanes(peer, seconds=0.1, bytes_most=32 << 20)
        assert (ladder.wanted, ladder.had, ladder.served, ladder.ended) == (4, 4, 4, "")
        assert [rung.lanes for rung in ladder.rungs] == [1, 2, 3, 4] and all(rung.up.bytes and rung.down for rung in ladder.rungs)
        assert peer.stats.lanes == 4 and ladder.rtt_idle_s > 0
    assert descriptors() == before
