"""Hosts that move: their address goes, an interface is added; and peers that are missed."""

from __future__ import annotations

import random

import pytest
import trio
import trio.testing

from tests.wire.sim.rooms import member
from tests.wire.sim.test_lanes import SIZE, Swarm, swarm
from tests.wire.sim.test_nets import QUESTION, echo
from wire.address import Address
from wire.errors import Code, ConnectionLost, WireError, error_for
from wire.identity import Identity, PeerId
from wire.limits import DEFAULT_LIMITS
from wire.messages import Want
from wire.net import Net, NetworkChanged, NotListening
from wire.net.moved import Moved
from wire.net.wanted import Then, Wanted, after
from wire.sim import Internet, Link, Nat, seed_tasks

Clock = trio.testing.MockClock
LINE = Link(0.02, 0.002, 100e6, 100e6, 0.0005)
COUNT = 40


async def until(condition: object, patience_s: float = 60.0) -> float:
    """Wait for `condition()`; how long that took."""
    began = trio.current_time()
    with trio.fail_after(patience_s):
        while not condition():  # type: ignore[operator]
            await trio.sleep(0.05)
    return trio.current_time() - began


def twice(s: Swarm) -> float:
    """Chunks' worth of tensor bytes that reached the receiver more often than once; headers are less than 1 % of a chunk."""
    return (s.back.stats.class_in_bytes[2] - 1.01 * COUNT * SIZE) / DEFAULT_LIMITS.chunk_bytes


async def move_in_mid_transfer(s: Swarm, move: object, at_s: float) -> float:
    """Exchange, move, and go on to the end; seconds from the move to the next chunk that arrived."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(s.exchange, COUNT)
        await until(lambda: len(s.got) >= 3)
        await trio.sleep(at_s)
        move()  # type: ignore[operator]
        await trio.sleep(0.2)  # what was on its way
        had = s.back.stats.class_in_bytes[2]
        assert len(s.got) < COUNT
        took_s = 0.2 + await until(lambda: s.back.stats.class_in_bytes[2] >= had + DEFAULT_LIMITS.chunk_bytes)
        await until(lambda: len(s.got) == COUNT)
    return took_s


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("seed", range(20))
async def test_nat_8_a_host_whose_own_address_vanishes_goes_on_within_5_s(seed: int, who: int, autojump_clock: Clock) -> None:
    async with swarm(seed) as s:
        ours = (s.a, s.b)[who].events()
        took_s = await move_in_mid_transfer(s, lambda: s.net.change_address(s.hosts[who], f"10.0.1.{who}"), seed / 50)
        assert took_s <= 5, took_s
        assert s.complete() and s.a.peers() == (s.peer,) and s.b.peers() == (s.back,), "the same peer"
        assert twice(s) <= DEFAULT_LIMITS.lanes_start, "at most one chunk a lane"
        seen = []
        while ours.statistics().current_buffer_used:
            seen.append(ours.receive_nowait())
        (change,) = (event for event in seen if isinstance(event, NetworkChanged))
        assert change == NetworkChanged((f"10.0.1.{who}",), (f"10.0.0.{who + 1}",))
        assert any(isinstance(event, NotListening) for event in seen), "nobody listens on an address that is gone"


@pytest.mark.parametrize("seed", range(20))
async def test_nat_8_a_router_whose_outside_address_changes_in_silence_costs_at_most_15_s(seed: int, autojump_clock: Clock) -> None:
    seed_tasks(seed)
    net = Internet(seed)
    nat = Nat("cone", "10.0.0.9")
    inside, outside = net.host("192.168.1.2", link=LINE, nat=nat, congestion="cubic"), net.host("10.0.0.2", link=LINE, congestion="cubic")
    async with net.running(), member(inside) as a, member(outside) as b:
        b.serve_channel("t")
        peer = await a.dial(b.addresses[0])
        await until(lambda: b.peer(a.peer_id) is not None)
        back = b.peer(a.peer_id)
        assert back is not None
        s = Swarm(net, (inside, outside), a, b, peer, back)
        lanes: set[object] = set()  # over which something may have come
        lost: set[object] = set()

        async def watch() -> None:
            while True:
                now = {link for link in back.all_links if link.lane}
                lost.update(lanes - now)
                lanes.update(now)
                await trio.sleep(0.02)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            took_s = await move_in_mid_transfer(s, lambda: net.change_outside(nat, "10.0.0.10"), seed / 50)
            nursery.cancel_scope.cancel()
        assert took_s <= 15, took_s
        assert s.complete() and a.peers() == (peer,) and b.peers() == (back,)
        assert twice(s) <= len(lost) <= 2 * DEFAULT_LIMITS.lanes_start, "one chunk a lane that was lost"


async def test_nat_8_without_the_look_at_the_interfaces_silence_has_to_do(autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the bar of 5 s is worth: nobody looks, and it is missed."""
    monkeypatch.setattr("wire.net.interfaces.LOOK_EVERY_S", 3600.0)
    async with swarm(1) as s:
        assert await move_in_mid_transfer(s, lambda: s.net.change_address(s.hosts[0], "10.0.1.0"), 0.0) > 5


async def test_nat_4_an_interface_that_is_added_is_noticed_and_told(autojump_clock: Clock) -> None:
    async with swarm(2) as s:
        await trio.sleep(3)
        before = next(record.statement.seq for record in s.b.known())
        heard: list[NetworkChanged] = []
        s.a.when_network_changes(heard.append)
        link = s.peer.primary
        s.net.change_address(s.hosts[0], "10.0.0.1", "10.0.2.1")
        await trio.sleep(10)
        assert heard == [NetworkChanged(("10.0.2.1",), ())]
        assert next(record.statement.seq for record in s.b.known()) > before
        assert s.peer.primary is link, "a connection that answers stays where it is"


async def test_nat_4_a_listener_comes_back_with_its_address_and_flapping_cuts_no_connection(autojump_clock: Clock) -> None:
    async with swarm(3) as s:
        await trio.sleep(1)
        host, net = s.hosts[1], s.net
        link = s.peer.primary
        for _ in range(40):
            net.change_address(host, "10.0.0.2", "10.0.2.2")
            await trio.sleep(2)
            net.change_address(host, "10.0.0.2")
            await trio.sleep(2)
        assert s.peer.primary is link and link is not None and link.error is None, "news of ourselves came too fast"
        net.change_address(host, "10.0.2.2")
        await until(lambda: not s.b.addresses, 5)
        net.change_address(host, "10.0.0.2")
        await until(lambda: s.b.addresses == (Address("10.0.0.2", 4001),), 5)


async def missed(a: Net, b: Net, *, used: bool) -> None:
    peer = await a.dial(b.addresses[0])
    if used:
        await peer.call("echo", QUESTION, Want, deadline_s=5)
    await trio.sleep(2)


@pytest.mark.parametrize("used", [True, False])
async def test_a_peer_without_channels_comes_back_if_it_was_talked_with(used: bool, autojump_clock: Clock) -> None:
    net = Internet(4)
    one, other = net.host("10.0.0.1", link=LINE), net.host("10.0.0.2", link=LINE)
    async with net.running(), member(one) as a, member(other) as b:
        b.serve_calls("echo", Want, echo)
        await missed(a, b, used=used)
        for pipe in list(one.connections.values()):
            net.reset(pipe)
        await trio.sleep(10)
        assert bool(a.peers()) is used


async def test_a_wanted_peer_is_dialled_until_it_is_there_without_a_storm(autojump_clock: Clock) -> None:
    net = Internet(5)
    one, other = net.host("10.0.0.1", link=LINE), net.host("10.0.0.2", link=LINE)
    async with net.running(), member(one) as a, member(other) as b:
        await missed(a, b, used=False)
        a.want([b.peer_id])
        net.cut(other)
        await until(lambda: not a.peers())
        before = sum(entry[1] == "dial" for entry in net.log)
        await trio.sleep(120)
        assert 3 <= sum(entry[1] == "dial" for entry in net.log) - before <= 30
        net.heal()
        await until(lambda: a.peers() != (), 60)


@pytest.mark.parametrize("code", [Code.BANNED, Code.SHUTDOWN])
async def test_a_goodbye_is_heeded(code: Code, autojump_clock: Clock) -> None:
    net = Internet(6)
    one, other = net.host("10.0.0.1", link=LINE), net.host("10.0.0.2", link=LINE)
    async with net.running(), member(one) as a, member(other) as b:
        await missed(a, b, used=False)
        a.want([b.peer_id])
        back = b.peer(a.peer_id)
        assert back is not None
        back.goaway(code)
        await trio.sleep(10)
        assert not a.peers()
        await trio.sleep(60)
        assert bool(a.peers()) is (code is Code.SHUTDOWN), "who stops may start again; who bans means it"


@pytest.mark.parametrize("before", [True, False])
async def test_who_bans_is_not_asked_when_it_is_wanted_anew(before: bool, autojump_clock: Clock) -> None:
    net = Internet(6)
    one, other = net.host("10.0.0.1", link=LINE), net.host("10.0.0.2", link=LINE)
    async with net.running(), member(one) as a, member(other) as b:
        await missed(a, b, used=False)
        if before:
            a.want([b.peer_id])
        back = b.peer(a.peer_id)
        assert back is not None
        back.goaway(Code.BANNED)
        await trio.sleep(5)
        dials = sum(entry[1] == "dial" for entry in net.log)
        for _ in range(3):
            a.want([])
            await trio.sleep(1)
            a.want([b.peer_id])
            await trio.sleep(20)
        assert not a.peers() and sum(entry[1] == "dial" for entry in net.log) == dials
        await b.dial(a.addresses[0])  # it comes by itself: forgiven
        for pipe in list(one.connections.values()):
            net.reset(pipe)
        await until(lambda: not a.peers(), 5)
        await until(lambda: a.peers(), 20)


async def test_one_that_is_lost_before_the_dial_has_returned_is_dialled_again(autojump_clock: Clock) -> None:
    """The connection stood and ended while the task that dialled had not run: what the loss noted must stay."""
    dials: list[float] = []
    target = Identity(b"t".ljust(32, b"-")).peer_id

    async def connect(peer_id: PeerId, deadline_s: float) -> None:
        dials.append(trio.current_time())
        await trio.sleep(0.1)
        wanted.found(peer_id)
        wanted.lost(peer_id, ConnectionLost(), missed=True)

    wanted = Wanted(
        Identity(b"o".ljust(32, b"-")).peer_id, DEFAULT_LIMITS, connect=connect, present=lambda peer_id: False, rng=random.Random(1)
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wanted.run)
        wanted.want([target])
        await trio.sleep(30)
        nursery.cancel_scope.cancel()
    assert len(dials) >= 3


@pytest.mark.parametrize(
    ("reason", "wanted", "then"),
    [
        (Moved("our address 10.0.0.1 is gone"), False, Then.AGAIN),
        (error_for(Code.IDLE), False, Then.NEVER),
        (error_for(Code.IDLE), True, Then.AGAIN),
        (error_for(Code.SHUTDOWN), True, Then.LATER),
        (error_for(Code.SHUTDOWN), False, Then.NEVER),
        (error_for(Code.BANNED), True, Then.NEVER),
        (error_for(Code.REFUSED, local=True), True, Then.NEVER),
    ],
)
def test_what_follows_a_loss(reason: WireError, wanted: bool, then: Then) -> None:
    assert after(reason, wanted) is then
