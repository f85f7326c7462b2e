"""FIND-9, FIND-10, FIND-11, FIND-14, FIND-16 of the cases: whom a node dials, whom it never dials, and who is refused."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest
import trio

from tests.wire.net.worlds import OTHER_RUN, RUN
from tests.wire.sim.finding import at, dials, hang_up, identity, internet, known, node, seeds, state, swept, until
from wire.address import Address
from wire.envelope import seal_peer_record
from wire.messages import PeerRecord, SessionHello, Want
from wire.net import DialFailed, Net, NoSeedReachable, Peer, SeedStateChanged, SeedStatus
from wire.sim import Link, Nat

QUESTION = Want(RUN, 3)


def record(who: int, *places: str, seq: int | None = None) -> bytes:
    """A peer record as nobody of ours would sign it."""
    now = time.time()
    seq = int(now * 1000) + 5 if seq is None else seq
    return seal_peer_record(identity(who), PeerRecord(places), run=RUN, seq=seq, now_unix=now)


async def echo(peer: Peer, want: Want) -> Want:
    return want


def test_find_9_private_addresses_of_a_record_lead_to_nobody_elsewhere() -> None:
    """Another network: connected through the public one within 1 s, the stranger at 192.168.0.9 never hears of it."""

    async def main(seed: int) -> None:
        net, host = internet(seed)
        house = Nat("cone", "13.1.0.1")
        home, stranger, public = host("192.168.0.2", nat=house), host("192.168.0.9", nat=house), host("11.5.0.1")
        async with net.running(), node(home) as member, node(stranger) as wrong, node(public, 5) as right:
            member._exchange.take(record(5, "/ip4/192.168.0.9/tcp/4001", "/ip4/10.0.0.7/tcp/4001", "/ip4/11.5.0.1/tcp/4001"))
            began = trio.current_time()
            await member.connect(right.peer_id)
            assert trio.current_time() - began < 1
            assert dials(home) == [public.name]
            await hang_up(*member.peers())
            net.cut(public)
            with pytest.raises(DialFailed) as failure:
                await member.connect(right.peer_id)
            assert len(failure.value.causes) == 1 and not wrong.peers()

    swept(main)


def test_find_9_the_same_outside_address_makes_private_ones_worth_a_try_at_the_end() -> None:
    """A neighbour is met so; a stranger met there ends in a mismatch without harm."""

    async def main(seed: int) -> None:
        net, host = internet(seed)
        house = Nat("cone", "13.1.0.1")
        home, neighbour, stranger = (host(f"192.168.0.{number}", nat=house) for number in (2, 8, 9))
        outside = [Address("13.1.0.1", 4001)]
        async with net.running(), node(home, announce=outside) as member, node(neighbour, 5) as right, node(stranger) as wrong:
            member._exchange.take(record(5, "/ip4/192.168.0.8/tcp/4001", "/ip4/13.1.0.1/tcp/4001"))
            await member.connect(right.peer_id)
            assert dials(home)[-1] == neighbour.name and dials(home)[0] == "13.1.0.1", "last"
            member._exchange.take(record(6, "/ip4/192.168.0.9/tcp/4001", "/ip4/13.1.0.1/tcp/4009"))
            with pytest.raises(DialFailed) as failure:
                await member.connect(identity(6).peer_id)
            kinds = {str(address): cause.kind for address, cause in failure.value.causes.items()}
            assert kinds["/ip4/192.168.0.9/tcp/4001"] == "peer-mismatch"
            assert not wrong.peers() and member.peer(wrong.peer_id) is None

    swept(main)


def test_find_10_a_node_that_is_told_its_own_address() -> None:
    """By id, by address, by name: left alone, at most one attempt an address; the entry that is somebody else still counts."""

    async def main(seed: int) -> None:
        net, host = internet(seed)
        own, other = host("12.1.0.1"), host("11.1.0.1")
        net.names |= {"me.example": ["12.1.0.1"], "both.example": ["12.1.0.1", "11.1.0.1"]}
        entries = (f"{identity(3).peer_id}@11.77.0.1:4001", at(own), "me.example:4001", "both.example:4001")
        async with net.running(), node(other) as seed_node, node(own, 3, listen=["0.0.0.0"], seeds=seeds(*entries)) as member:
            await until(lambda: member.peer(seed_node.peer_id), 3)
            await trio.sleep(600)
            assert [state(member, entry).status for entry in entries[:3]] == [SeedStatus.SELF] * 3
            assert state(member, entries[3]).peer_id == seed_node.peer_id
            assert dials(own).count("12.1.0.1") <= 1
            assert [peer.peer_id for peer in member.peers()] == [seed_node.peer_id]

    swept(main)


def test_find_10_the_address_that_a_router_gives_back_is_tried_once() -> None:
    """Nothing local shows that it is ours: the handshake does, and it is remembered."""

    async def main(seed: int) -> None:
        net, host = internet(seed)
        own = host("12.1.0.1", "12.1.0.2")
        own.transport.local_addresses = lambda: ("12.1.0.1",)  # type: ignore[method-assign]  # as with 1:1 NAT in a data centre
        async with net.running(), node(own, 3, listen=["0.0.0.0"], seeds=seeds("12.1.0.2:4001", "11.1.0.1:4001")) as member:
            await trio.sleep(600)
            assert state(member, "12.1.0.2:4001").status is SeedStatus.SELF
            assert dials(own).count("12.1.0.2") == 1 and not member.peers()

    swept(main)


def test_find_10_the_own_record_is_never_replaced_by_a_copy() -> None:
    """A copy with a higher number, as after a clock that was set back: ours is signed anew above it, and others believe ours."""

    async def main(seed: int) -> None:
        net, host = internet(seed)
        own, other = host("12.1.0.1"), host("11.1.0.1")
        async with net.running(), node(own, 3) as member, node(other) as peer:
            ahead = int(time.time() * 1000) + 3_600_000
            copy = record(3, "/ip4/11.66.0.6/tcp/1", seq=ahead)
            assert peer._exchange.take(copy)
            await member.dial(peer.addresses[0])
            await trio.sleep(1)
            assert str(peer.book.addresses(member.peer_id)[0]) == "/ip4/11.66.0.6/tcp/1", "stale for the peer"
            before = member._record.raw
            assert not member._exchange.take(copy) and member.peer_id not in known(member)
            await trio.sleep(1)
            assert member._record.raw not in (before, copy)
            (believed,) = [found for found in peer.known() if found.peer_id == member.peer_id]
            assert believed.statement.raw == member._record.raw and believed.statement.seq > ahead
            assert [str(address) for address in believed.addresses] == ["/ip4/12.1.0.1/tcp/4001"]

    swept(main)


@pytest.mark.parametrize("way", ["it dials us", "a newer record", "neither"])
def test_find_11_back_off_ends_when_the_peer_is_back(way: str) -> None:
    async def main(seed: int) -> None:
        net, host = internet(seed)
        own, other = host("12.1.0.1"), host("11.1.0.1")
        async with net.running(), node(own) as member:
            async with node(other, 5) as peer:
                await member.dial(peer.addresses[0])
                target, place = peer.peer_id, peer.addresses[0]
                await trio.sleep(1)
            net.kill(other)
            for _ in range(100):
                with pytest.raises(DialFailed):
                    await member.manager.dial([place], expected=target, target="it", patient=True)
                await trio.sleep(13)
            assert member.manager.backoff.count(place) >= 100
            with pytest.raises(DialFailed, match="not tried again for"):
                await member.connect(target)
            net.restart(other)
            async with node(other, 5) as peer:
                back = trio.current_time()
                if way == "it dials us":
                    await peer.dial(member.addresses[0])
                    await until(lambda: member.peer(target), 1)
                elif way == "a newer record":
                    member._exchange.take(peer._record.raw)
                    await member.connect(target)
                else:
                    while member.peer(target) is None:
                        try:
                            await member.connect(target)
                        except DialFailed as held:
                            assert held.retry_after is not None
                            await trio.sleep(5)
                assert trio.current_time() - back <= (300 + 5 if way == "neither" else 1)
                assert member.manager.backoff.count(place) == 0, "one success resets the pause"

    swept(main)


def test_find_14_a_thousand_rounds_of_two_that_dial_at_once() -> None:
    """RTT 1 to 200 ms, starts within one RTT: one connection stays, the same at both ends; no call in flight is lost."""

    async def main(seed: int) -> None:
        chance = random.Random(seed)
        net, host = internet(seed)
        one, other = host("11.1.0.1"), host("12.1.0.1")
        async with net.running(), node(one) as a, node(other) as b:
            for side in (a, b):
                side.serve_calls("echo", Want, echo)
            for _ in range(50):
                rtt_s = chance.uniform(0.001, 0.2)
                one.link = other.link = Link(rtt_s / 4)
                answers: list[Want] = []

                async def dial(net: Net, to: Net, delay_s: float, answers: list[Want] = answers) -> None:
                    await trio.sleep(delay_s)
                    peer = await net.dial(to.addresses[0])
                    answers.append(await peer.call("echo", QUESTION, Want, deadline_s=5))

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(dial, a, b, chance.uniform(0, rtt_s))
                    nursery.start_soon(dial, b, a, chance.uniform(0, rtt_s))
                assert len(answers) == 2
                await trio.sleep(1)
                (peer,), (back,) = a.peers(), b.peers()
                assert len(peer.links) == len(back.links) == 1
                near, far = peer.links[0].pipe.info(), back.links[0].pipe.info()
                assert (near.local, near.remote) == (far.remote, far.local), "the same at both ends"
                await hang_up(peer)
                await until(lambda: not a.peers() and not b.peers(), 5)
            await trio.sleep(1)
            assert not any(a.gauges().values()) and not any(b.gauges().values())

    swept(main)


def speaking(net: Net, *versions: int) -> None:
    net.manager._local = replace(net.manager._local, versions=versions)


def test_find_16_old_and_new_versions_meet() -> None:
    """n with n + 1 works with what both know; n with n + 5, or another manifest, is one refusal that names both sides."""

    async def main(seed: int) -> None:
        net, host = internet(seed)
        old, new, far, foreign, own = (host(f"1{number}.1.0.1") for number in range(1, 6))
        async with (
            net.running(),
            node(old),
            node(new, capabilities=("from-the-future",)) as newer,
            node(far) as too_new,
            node(foreign, run=OTHER_RUN),
            node(own, seeds=seeds(old, new, far, foreign)) as member,
        ):
            speaking(newer, 1, 2)
            speaking(too_new, 6)
            told = newer._hello

            def hello(*about: object) -> SessionHello:
                return replace(told(*about), features=("unheard-of/9",))  # type: ignore[arg-type]

            newer.manager._local = replace(newer.manager._local, hello=hello)
            events = member.events()
            await until(lambda: len(member.peers()) == 2, 3)
            assert member.peer(newer.peer_id) is not None
            await trio.sleep(600)
            assert len(member.peers()) == 2
            told_of: dict[str, list[str]] = {}
            while (event := nothing_more(events)) is not None:
                assert not isinstance(event, NoSeedReachable)
                if isinstance(event, SeedStateChanged) and event.state == SeedStatus.FAILED:
                    told_of.setdefault(event.entry, []).append(event.reason)
            assert [len(said) for said in told_of.values()] == [1, 1], "many tries, one complaint each"
            (version,) = told_of[f"/ip4/{far.name}/tcp/4001"]
            (run,) = told_of[f"/ip4/{foreign.name}/tcp/4001"]
            assert "it speaks versions [6], we [1]" in version and "update the older" in version
            assert OTHER_RUN[:8].hex() in run and RUN[:8].hex() in run
            assert dials(own).count(far.name) > 10

    swept(main)


def nothing_more(events: trio.MemoryReceiveChannel[object]) -> object | None:
    try:
        return events.receive_nowait()
    except trio.WouldBlock:
        return None
