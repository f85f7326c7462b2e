"""FIND-1, FIND-2, FIND-3, FIND-5, FIND-6, FIND-7, FIND-8 of the cases: seeds that are late, dead, mute, foreign or new."""

from __future__ import annotations

import itertools
import random
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from tests.wire.net.worlds import OTHER_RUN
from tests.wire.sim.finding import at, dials, hang_up, identity, internet, known, node, seeds, state, swept, until
from wire.address import Address
from wire.errors import Code
from wire.hello import Hello, Refusal
from wire.net import Net, NoSeedReachable, SeedStateChanged, SeedStatus
from wire.sim import Host, SimPipe


async def one_component(seed: int, count: int, seed_count: int) -> None:
    net, host = internet(seed)
    homes = [host(f"11.{number}.0.1") for number in range(seed_count)]
    starts = [("seed", number) for number in range(seed_count)] + [("node", number) for number in range(count)]
    random.Random(seed).shuffle(starts)
    async with net.running(), AsyncExitStack() as stack:
        nodes: list[Net] = []
        for kind, number in starts:
            if kind == "seed":
                await stack.enter_async_context(node(homes[number], 1 + number, run=None))
            else:
                nodes.append(await stack.enter_async_context(node(host(f"12.{number}.0.1"), 100 + number, seeds=seeds(*homes))))
        assert trio.current_time() == 0.0, "all in one tick"
        everybody = {member.peer_id for member in nodes}
        await until(lambda: all(everybody - {member.peer_id} <= known(member) for member in nodes), 10, 0.25)


def test_find_1_sixteen_nodes_and_one_seed_started_in_one_tick_are_one_swarm() -> None:
    """wire.md section 23, item 10: some before the seed; each sees all within 10 s, nobody is started again."""

    async def main(seed: int) -> None:
        await one_component(seed, 16, 1)

    swept(main, range(100))


def test_find_1_one_or_two_seeds_and_fewer_nodes() -> None:
    async def main(seed: int) -> None:
        await one_component(seed, 4 + seed % 12, 1 + seed % 2)

    swept(main, range(100, 124))


@pytest.mark.parametrize("as_name", [False, True])
def test_find_2_a_black_hole_and_a_closed_port_cost_less_than_two_seconds(as_name: bool) -> None:
    async def main(seed: int) -> None:
        net, host = internet(seed)
        hole, closed, live, home = "2a00:dead::1", host("11.1.0.1"), host("11.2.0.1"), host("12.1.0.1", "2a00::1")
        net.names["seed.example"] = [hole, closed.name, live.name]
        entries = ("seed.example:4001",) if as_name else (at(hole), at(closed), at(live))
        async with net.running(), node(live) as seed_node:
            async with node(home, seeds=seeds(*entries)) as member:
                assert await until(lambda: member.peer(seed_node.peer_id), 2) < 2
                assert set(dials(home)) == {hole, closed.name, live.name}, "attempts overlap"
                if as_name:
                    before = trio.current_time()
                    await hang_up(*member.peers())
                    await until(lambda: member.peer(seed_node.peer_id), 5)
                    assert dials(home, before)[0] == live.name, "the dead address is not tried first again"
            async with node(home, seeds=seeds(at(hole))) as lonely:
                await until(lambda: home.dialling, 1)
                assert not lonely.peers()
                ending = trio.current_time()
            assert trio.current_time() - ending < 1, "an attempt that hangs keeps nobody"

    swept(main)


def test_find_3_every_seed_silent_at_start_and_one_back_after_a_minute(tmp_path: Path) -> None:
    """The node stays, says so once and joins within 60 s; the swarm does not notice that its seeds go; peers on disk suffice."""

    async def main(seed: int) -> None:
        net, host = internet(seed)
        places = [host("11.1.0.1"), host("11.2.0.1")]
        homes = [host("12.1.0.1"), host("12.2.0.1")]
        for place in places:
            net.cut(place)
        folder = tmp_path / str(seed)
        list_of_two = seeds(*places)
        async with (
            net.running(),
            node(homes[0], seeds=list_of_two, data_dir=folder) as one,
            node(homes[1], seeds=list_of_two) as other,
        ):
            events = one.events()
            await trio.sleep(60)
            heard = drain(events)
            (hopeless,) = [event for event in heard if isinstance(event, NoSeedReachable)]
            assert len(hopeless.reasons) == 2 and all("no answer" in why for _, why in hopeless.reasons)
            assert len([event for event in heard if isinstance(event, SeedStateChanged)]) == 4, "once a cause, not once a retry"
            net.heal(places[1])
            async with node(places[1], run=None) as back:
                await until(lambda: len(back.peers()) == 2, 60)
                await until(lambda: other.peer_id in known(one) or one.peer_id in known(other), 2)  # whoever came last
                first, second = (one, other) if other.peer_id in known(one) else (other, one)
                # Its addresses stand in its record as soon as others have reached it there.
                await until(lambda: first.book.addresses(second.peer_id), 20)
                between = await first.connect(second.peer_id)
            net.cut(places[1])
            await trio.sleep(120)
            assert not between.closed and one.peer(other.peer_id) and first.peer(second.peer_id) is between
        net.cut(places[0])
        async with net.running(), node(homes[1]) as other, node(homes[0], seeds=seeds(*places), data_dir=folder) as one:
            assert await until(lambda: one.peer(other.peer_id), 5) <= 5, "without any seed"

    swept(main)


def drain(channel: trio.MemoryReceiveChannel[object]) -> list[object]:
    found = []
    while True:
        try:
            found.append(channel.receive_nowait())
        except (trio.WouldBlock, trio.EndOfChannel):
            return found


@pytest.mark.parametrize("order", list(itertools.permutations(("mute", "late", "good"))))
def test_find_5_a_mute_seed_and_one_that_answers_after_twenty_seconds(order: tuple[str, ...]) -> None:
    async def main(seed: int) -> None:
        net, host = internet(seed)
        homes = {"mute": host("11.1.0.1"), "late": host("11.2.0.1"), "good": host("11.3.0.1")}
        async with net.running(), trio.open_nursery() as nursery, node(homes["good"]) as good:
            nursery.start_soon(accept_and_say_nothing, homes["mute"])
            nursery.start_soon(answer_after, homes["late"], 20.0)
            async with node(host("12.1.0.1"), seeds=seeds(*(homes[word] for word in order))) as member:
                await until(lambda: member.peer(good.peer_id), 2 + 0.25 * order.index("good"))
                await until(lambda: state(member, homes["mute"]).kinds == ("no-handshake",), 15)
                assert "accepted the connection, but no handshake came" in state(member, homes["mute"]).reason
                await until(lambda: len(member.peers()) == 2, 100)
                assert state(member, homes["late"]).status is SeedStatus.CONNECTED
            nursery.cancel_scope.cancel()

    swept(main, range(4 if order[0] == "good" else 8))


async def accept_and_say_nothing(host: Host) -> None:
    listener = await host.transport.listen(Address(host.name, 4001))
    held: list[SimPipe] = []
    while True:
        held.append(await listener.accept())


async def answer_after(host: Host, delay_s: float) -> None:
    """The first who come are let in and left alone; a node starts there later."""
    with trio.move_on_after(delay_s):
        await accept_and_say_nothing(host)
    for listener in list(host.listeners.values()):
        listener.close()
    async with node(host):
        await trio.sleep_forever()


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_find_6_closed_ports_and_a_foreign_seed_in_every_order(order: tuple[int, ...], tmp_path: Path) -> None:
    async def main(seed: int) -> None:
        net, host = internet(seed)
        homes = [host("11.1.0.1"), host("11.2.0.1"), host("11.3.0.1"), host("11.4.0.1")]
        folder = tmp_path / str(seed)
        net.cut(homes[1])
        places = seeds(*(homes[index] for index in order))
        async with (
            net.running(),
            node(homes[2], run=OTHER_RUN),
            node(homes[3]) as good,
            node(host("12.1.0.1"), seeds=places, data_dir=folder) as member,
        ):
            await until(lambda: member.peer(good.peer_id), 2)
            await trio.sleep(6)
            kinds = [state(member, home).kinds for home in homes[:3]]
            assert kinds == [("refused",), ("silent",), ("run-mismatch",)]
            assert "ours" in state(member, homes[2]).reason, "both runs are named"
        assert b"11.4.0.1" in (data := (folder / "known-peers").read_bytes())
        assert not any(home.name.encode() in data for home in homes[:3]), "only who was met is kept"

    swept(main, range(order[0], order[0] + 1))


def test_find_6_the_dead_sink_in_the_list_on_disk(tmp_path: Path) -> None:
    """After a try in vain a known peer stands behind those that did not fail, whatever its last success."""

    async def main(seed: int) -> None:
        net, host = internet(seed)
        homes = [host(f"11.{number}.0.1") for number in range(1, 7)]
        folder, me = tmp_path / str(seed), host("12.1.0.1")
        async with net.running():
            async with AsyncExitStack() as stack:
                member = await stack.enter_async_context(node(me, data_dir=folder))
                for home in homes:
                    await member.dial((await stack.enter_async_context(node(home))).addresses[0])
            dead = set(homes[:3])
            async with AsyncExitStack() as stack:
                for home in homes[3:]:
                    await stack.enter_async_context(node(home))
                async with node(me, data_dir=folder, seeds=seeds("11.9.0.1:4001")) as member:
                    await until(member.peers, 10)
                    await trio.sleep(8)
                    tried = {home for home in dead if home.name in dials(me, trio.current_time() - 10)}
                    met = {home for home in homes for _, remote in home.connections if remote[0] == me.name}
            data = (folder / "known-peers").read_bytes()
            places = {home: data.index(home.name.encode()) for home in homes}
            assert all(places[home] > max(places[other] for other in met) for home in tried)
            seen.append(len(tried))

    seen: list[int] = []
    swept(main)
    assert sum(seen) > 0


def test_find_7_a_seed_with_a_new_key() -> None:
    """Known without id: joined, the new id noted.  Pinned: refused naming both ids, and the next seed is used."""

    async def main(seed: int) -> None:
        net, host = internet(seed)
        again, other = host("11.1.0.1"), host("11.2.0.1")
        old, new = identity(7).peer_id, identity(8).peer_id
        pinned = seeds(f"{old}@{at(again)}", other)
        async with net.running(), node(other) as second, node(host("12.1.0.1"), seeds=seeds(again)) as free:
            async with node(again, 7, run=None):
                await until(lambda: state(free, again).peer_id == old, 10)
            async with node(again, 8, run=None), node(host("12.2.0.1"), seeds=pinned) as strict:
                await until(lambda: state(free, again).peer_id == new, 10)
                assert state(free, again).status is SeedStatus.CONNECTED
                await until(lambda: strict.peer(second.peer_id), 2)
                refused = state(strict, f"{old}@{at(again)}")
                assert refused.status is SeedStatus.FAILED and refused.kinds == ("peer-mismatch",)
                assert str(old) in refused.reason and str(new) in refused.reason
                assert strict.peer(new) is None and new not in known(strict)

    swept(main)


def test_find_8_six_causes_in_words_and_none_ends_anything() -> None:
    """Wrong run, too old, full, excluded, closed, filtered: each its own words and what would help; then a good one is met."""

    async def main(seed: int) -> None:
        net, host = internet(seed)
        names = ("run-mismatch", "version", "full", "banned", "refused", "silent")
        homes = {kind: host(f"11.{number}.0.1") for number, kind in enumerate(names, 1)}
        good, own = host("11.99.0.1"), host("12.1.0.1")
        net.cut(homes["silent"])
        async with net.running(), AsyncExitStack() as stack:
            await stack.enter_async_context(node(homes["run-mismatch"], run=OTHER_RUN))
            for kind in ("version", "full", "banned"):
                refusing = await stack.enter_async_context(node(homes[kind]))
                local = refusing.manager._local
                if kind == "version":
                    refusing.manager._local = replace(local, versions=(6,))
                else:
                    refusing.manager._local = replace(local, admit=REFUSE[kind])
            await stack.enter_async_context(node(good))
            member = await stack.enter_async_context(node(own, seeds=seeds(*homes.values(), good)))
            await until(member.peers, 3)
            await trio.sleep(6)
            states = {kind: state(member, home) for kind, home in homes.items()}
            assert {kind: found.kinds for kind, found in states.items()} == {kind: (kind,) for kind in names}
            assert len({found.reason.partition(": ")[2] for found in states.values()}) == 6
            assert all(found.reason.endswith(")") for found in states.values()), "what would help"
            retry = {kind: found.retryable for kind, found in states.items()}
            assert retry == {"run-mismatch": False, "version": False, "full": True, "banned": False, "refused": True, "silent": True}
            before = trio.current_time()
            await trio.sleep(130)
            assert {home.name for home in homes.values()} <= set(dials(own, before)), "what may be forged ends nothing"

    swept(main)


def banned(offer: Hello) -> Refusal:
    return Refusal(Code.BANNED)


def full(offer: Hello) -> Refusal:
    return Refusal(Code.RESOURCE_LIMIT, 5000)


REFUSE = {"banned": banned, "full": full}
