"""Production nets over the in-memory internet, unchanged: they meet, talk, lose the line, and say why."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from tests.wire.net.worlds import RUN
from tests.wire.sim.rooms import member
from wire.address import Address
from wire.errors import Code
from wire.messages import Want
from wire.net import DialFailed, Net, Peer
from wire.sim import Host, Internet, Link, Nat, seed_tasks

Clock = trio.testing.MockClock
QUESTION = Want(RUN, 3)


async def echo(peer: Peer, want: Want) -> Want:
    return want


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[Internet, Host, Host, Net, Net, Peer]]:
    net = Internet(1)
    one, other = (net.host(name, link=Link(0.02, 0.002, 50e6, 50e6, 0.001)) for name in ("10.0.0.1", "10.0.0.2"))
    async with net.running(), member(one) as a, member(other) as b:
        b.serve_calls("echo", Want, echo)
        yield net, one, other, a, b, await a.dial(b.addresses[0])


async def test_two_nets_meet_and_talk(autojump_clock: Clock) -> None:
    async with pair() as (_, one, _, a, b, peer):
        assert b.peer(a.peer_id) is not None
        started = trio.current_time()
        for _ in range(5):
            assert await peer.call("echo", QUESTION, Want, deadline_s=2) == QUESTION
        assert 5 * 0.08 <= trio.current_time() - started < 2
        assert len(one.connections) == 1


async def test_several_may_ask_at_once_whether_a_connection_answers(autojump_clock: Clock) -> None:
    async with pair() as (_, _, _, _, _, peer):
        assert peer.primary is not None
        answered: list[bool] = []

        async def ask() -> None:
            assert peer.primary is not None
            answered.append(await peer.primary.answers())

        with trio.fail_after(2):
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(ask)
        assert answered == [True] * 3


async def test_a_cut_line_is_noticed_by_silence(autojump_clock: Clock) -> None:
    async with pair() as (net, one, _, _, _, peer):
        started = trio.current_time()
        net.cut(one)
        with trio.fail_after(300):
            error = await peer.wait_closed()
        assert 1 < trio.current_time() - started < 120
        assert error.code is Code.TIMEOUT, error


async def test_a_reset_connection_is_noticed_at_once(autojump_clock: Clock) -> None:
    async with pair() as (net, one, _, _, _, peer):
        net.reset(next(iter(one.connections.values())))
        with trio.fail_after(1):
            error = await peer.wait_closed()
        assert "reset" in str(error).lower(), error


async def test_a_dial_names_its_cause(autojump_clock: Clock) -> None:
    async with pair() as (net, _, other, a, _, _):
        with pytest.raises(DialFailed) as refused:
            await a.dial(Address("10.0.0.2", 4999))
        assert [cause.kind for cause in refused.value.causes.values()] == ["refused"]
        net.cut(other)
        with pytest.raises(DialFailed) as silent:
            await a.dial(Address("10.0.0.2", 4998))
        assert [cause.kind for cause in silent.value.causes.values()] == ["silent"]


def test_two_runs_of_one_seed_are_one_with_production_nets_too() -> None:
    def run() -> tuple[int, list[tuple[Any, ...]]]:
        seen: list[tuple[int, list[tuple[Any, ...]]]] = []

        async def main() -> None:
            seed_tasks(3)
            async with pair() as (net, one, _, _, _, peer):
                for _ in range(20):
                    await peer.call("echo", QUESTION, Want, deadline_s=5)
                net.cut(one)
                await peer.wait_closed()
                net.heal()
                await trio.sleep(10)
                seen.append((net.digest, net.log))

        trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
        return seen[0]

    first = run()
    assert first == run() and len(first[1]) > 3


async def test_a_net_behind_a_router_dials_out_and_strangers_do_not_get_in(autojump_clock: Clock) -> None:
    net = Internet(1)
    inside, outside = net.host("192.168.1.2", nat=Nat("cone", "10.0.0.9")), net.host("10.0.0.2")
    async with net.running(), member(inside) as a, member(outside) as b:
        await a.dial(b.addresses[0])
        (connection,) = outside.connections.values()
        assert connection.info().remote[0] == "10.0.0.9"
        with pytest.raises(DialFailed) as silent:
            await b.dial(Address("10.0.0.9", 4001))
        assert [cause.kind for cause in silent.value.causes.values()] == ["silent"]
