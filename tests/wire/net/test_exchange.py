"""Peer exchange: everybody comes to know everybody from one introduction.  FIND-1, FIND-11, WIRE-9, WIRE-11."""

from __future__ import annotations

import random
from contextlib import AsyncExitStack

import pytest
import trio
import trio.testing

from tests.wire.net.worlds import OTHER_RUN, RUN, World, local, member
from wire.errors import Code, StreamReset
from wire.messages import Records, Want
from wire.net import DialFailed, Net, Peer, SeedList
from wire.net.exchange import PROTOCOL
from wire.statements import NO_RUN

Clock = trio.testing.MockClock


async def test_two_nets_find_each_other_through_a_third_on_sockets() -> None:
    async with local(run=None) as seed:
        seeds = SeedList.of(f"127.0.0.1:{seed.addresses[0].port}")
        async with local(seeds=seeds) as a, local(seeds=seeds) as b:
            with trio.fail_after(10):
                while not any(record.peer_id == b.peer_id for record in a.known()):
                    await trio.sleep(0.01)
            peer = await a.connect(b.peer_id)
            assert peer.peer_id == b.peer_id and not peer.guest
            assert b.peer(a.peer_id) is not None
            assert {peer.peer_id for peer in seed.peers()} == {a.peer_id, b.peer_id}
            assert all(peer.guest for peer in seed.peers())


@pytest.mark.parametrize("chance", range(20))
async def test_nodes_started_in_one_tick_know_each_other_within_ten_seconds(chance: int, autojump_clock: Clock) -> None:
    """FIND-1: one or two seeds and 4 to 10 nodes, also before the seed: one component, nobody needs a restart."""
    rng = random.Random(chance)
    world = World(rng=rng, delay_s=0.01, jitter_s=0.05)
    count = rng.randint(4, 10)
    texts = [f"10.0.1.{number}:4001" for number in range(rng.choice((1, 2)))]
    async with AsyncExitStack() as stack:
        nodes: list[Net] = []
        starts = [("node", number) for number in range(count)] + [("seed", number) for number in range(len(texts))]
        rng.shuffle(starts)
        for kind, number in starts:
            if kind == "seed":
                await stack.enter_async_context(member(world, f"10.0.1.{number}", run=None))
            else:
                nodes.append(await stack.enter_async_context(member(world, f"10.0.0.{number}", seeds=SeedList.of(*texts))))
        everybody = {node.peer_id for node in nodes}
        with trio.fail_after(10):
            while any(everybody - {node.peer_id} - {record.peer_id for record in node.known()} for node in nodes):
                await trio.sleep(0.05)


async def test_answers_are_limited_and_a_well_behaved_asker_never_meets_the_limit(autojump_clock: Clock) -> None:
    """WIRE-11: an hour of the default rhythm against the default limit."""
    world = World()
    async with member(world, "10.0.0.1") as a, member(world, "10.0.0.2") as b:
        peer = await a.dial(b.addresses[0])
        await trio.sleep(3600)
        assert not peer.closed
        assert a.counts["px-rate_limited"] == b.counts["px-rate_limited"] == 0
        codes = []
        for _ in range(10):
            try:
                await peer.call(PROTOCOL, Want(RUN, 24), Records, deadline_s=5)
            except StreamReset as error:
                codes.append(error.code)
        assert codes == [Code.RATE_LIMITED] * 5


async def test_what_does_not_verify_is_counted_and_the_rest_is_taken(autojump_clock: Clock) -> None:
    """WIRE-9: each for its own reason; the connection stays."""
    world = World()
    async with member(world, "10.0.0.1") as a, member(world, "10.0.0.2") as b, member(world, "10.0.0.3") as honest:
        await b.dial(honest.addresses[0])
        await trio.sleep(1)
        good = honest._record.raw
        async with member(world, "10.0.0.4", run=OTHER_RUN) as foreign:
            foreign_record = foreign._record.raw
        answer = [good[:-1] + bytes([good[-1] ^ 1]), b"rubbish", foreign_record, good]

        async def lie(peer: Peer, want: Want) -> Records:
            return Records(tuple(answer))

        b._exchange.answer = lie  # type: ignore[method-assign]
        b.services._table.pop(PROTOCOL)
        b.serve_calls(PROTOCOL, Want, lie, guest=True)
        peer = await a.dial(b.addresses[0])
        await trio.sleep(1)
        assert {record.peer_id for record in a.known()} == {b.peer_id, honest.peer_id}
        reasons = {name: count for name, count in a.counts.items() if name.startswith("record-")}
        assert set(reasons) == {"record-forged", "record-malformed", "record-foreignrun"}
        assert len(set(reasons.values())) == 1  # one of each an answer
        assert not peer.closed
        assert next(record for record in a.known() if record.peer_id == honest.peer_id).statement.raw == good


async def test_a_record_of_somebody_else_in_hello_is_not_taken(autojump_clock: Clock) -> None:
    """WIRE-9: X's record sent by Y."""
    world = World()
    async with member(world, "10.0.0.1") as a, member(world, "10.0.0.2") as b, member(world, "10.0.0.3") as other:
        b._record.raw = other._record.raw
        await b.dial(a.addresses[0])
        assert a.counts["record-wrongsigner"] == 1 and not a.known()


async def test_runs_are_kept_apart_by_a_seed_for_all_runs(autojump_clock: Clock) -> None:
    world = World()
    async with (
        member(world, "10.0.0.9", run=None) as seed,
        member(world, "10.0.0.1") as a,
        member(world, "10.0.0.2") as b,
        member(world, "10.0.0.3", run=OTHER_RUN) as stranger,
    ):
        for net in (a, b, stranger):
            await net.dial(seed.addresses[0])
        await trio.sleep(30)
        assert len(seed.known()) == 3
        assert {record.peer_id for record in a.known()} == {b.peer_id, seed.peer_id} - {seed.peer_id}
        assert b.peer_id not in {record.peer_id for record in stranger.known()}
        (peer,) = a.peers()
        records = (await peer.call(PROTOCOL, Want(NO_RUN, 24), Records, deadline_s=5)).records
        assert len(records) == 3  # zeros mean any run: the seed itself, b and the stranger


async def test_back_off_is_forgotten_when_the_peer_comes_or_a_newer_record_arrives(autojump_clock: Clock) -> None:
    """FIND-11."""
    world = World()
    async with member(world, "10.0.0.1") as a, member(world, "10.0.0.2") as b:
        await a.dial(b.addresses[0])
        await trio.sleep(1)
        place = b.addresses[0]
        from wire.net.causes import SILENT

        for _ in range(100):
            a.manager.backoff.failed(place, SILENT, trio.current_time())
        b._seal()
        a._exchange.take(b._record.raw)  # (b) a newer record
        assert a.manager.backoff.count(place) == 0
        for _ in range(100):
            a.manager.backoff.failed(place, SILENT, trio.current_time())
        for peer in a.peers():
            peer.goaway(Code.SHUTDOWN)
        await trio.sleep(2)
        await b.dial(a.addresses[0])  # (a) it dials us
        assert a.manager.backoff.count(place) == 0


async def test_a_renewed_record_reaches_the_connected(autojump_clock: Clock) -> None:
    """FIND-15: renewed at half its life, by HELLO; peers that stay connected never hold an expired one."""
    world = World()
    async with member(world, "10.0.0.1") as a, member(world, "10.0.0.2") as b:
        await a.dial(b.addresses[0])
        await trio.sleep(1)
        first = a.known()[0].statement.seq
        await trio.sleep(4000)
        assert a.known()[0].statement.seq > first


async def test_who_cannot_be_reached_is_asked_for_before_the_minute_is_over(autojump_clock: Clock) -> None:
    """The first questions were too early; somebody knows better by now.  Without the failed call nothing is asked for 48 s."""
    world = World(rng=random.Random(1))
    seeds = SeedList.of("10.0.1.0:4001")
    async with member(world, "10.0.1.0", run=None), member(world, "10.0.0.1", seeds=seeds) as a:
        await trio.sleep(20)
        async with member(world, "10.0.0.2", seeds=seeds) as b:
            await trio.sleep(3)
            assert all(record.peer_id != b.peer_id for record in a.known())
            with pytest.raises(DialFailed):
                await a.connect(b.peer_id)
            with trio.fail_after(7):
                while all(record.peer_id != b.peer_id for record in a.known()):
                    await trio.sleep(0.1)
