"""The link bench: every contestant runs, as two processes; who is not installed is noted; who dies ends the bench."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from cryptography.exceptions import InvalidTag

from bench.children import BenchFailed
from bench.conditions import installed
from bench.link.bytepipe import EndOfPipe, PipeClient, answer, fill
from bench.link.run import CONTESTANTS, MESSAGE_SIZES, Contestant, Plan, run_link
from bench.link.trio_aead import KEYS, AeadPipe
from bench.link.trio_tcp import SocketPipe

TINY = Plan(seconds=0.01, repeats=1)


@pytest.mark.processes
@pytest.mark.parametrize("contestant", CONTESTANTS, ids=lambda c: c.name)
async def test_a_contestant_runs(contestant: Contestant) -> None:
    if not all(map(installed, contestant.needs)):
        pytest.skip(f"{contestant.name} is not installed")
    with trio.fail_after(100):
        document = json.loads((await run_link(TINY, [contestant])).json_line())
    rows = document["rows"]
    assert [(row["name"], row["message_bytes"]) for row in rows] == [(contestant.name, size) for size in MESSAGE_SIZES]
    for row in rows:
        assert row["mib_per_s"] > 0
        assert 0 < row["rtt_p50_us"] <= row["rtt_p99_us"]
        assert (row["handshakes_per_s"] is None) == (contestant.name == "trio-aead")
    assert document["conditions"]["congestion"][contestant.name]


async def test_who_is_not_installed_is_noted_and_has_no_row() -> None:
    report = await run_link(TINY, [Contestant("py-libp2p", "bench.link.py_libp2p", ("no-such-distribution",))])
    document = json.loads(report.json_line())
    assert document["rows"] == []
    assert document["conditions"]["notes"] == ["py-libp2p: not installed: pip install 'plnode[bench]'"]
    assert all(bar.met is None for bar in report.bars)


@pytest.mark.processes
async def test_a_contestant_that_ends_at_once_fails_the_bench() -> None:
    with pytest.RaisesGroup(pytest.RaisesExc(BenchFailed, match="broken server"), flatten_subgroups=True):
        await run_link(TINY, [Contestant("broken", "bench.link.competitor")])


@asynccontextmanager
async def socket_pair() -> AsyncIterator[tuple[trio.SocketStream, trio.SocketStream]]:
    near, far = trio.socket.socketpair()
    async with trio.SocketStream(near) as a, trio.SocketStream(far) as b:
        yield a, b


async def test_a_pipe_echoes_and_ends() -> None:
    async with socket_pair() as (near, far), trio.open_nursery() as nursery:
        nursery.start_soon(answer, SocketPipe(far))
        client = PipeClient(SocketPipe(near))
        assert len(await client.round_trips(3)) == 3
        assert await client.stream(100_000, 3) > 0
        await near.send_eof()


async def test_an_end_within_a_message_is_not_taken_for_a_message() -> None:
    async with socket_pair() as (near, far):
        await near.send_all(b"12345")
        await near.send_eof()
        with pytest.raises(EndOfPipe):
            await fill(SocketPipe(far), memoryview(bytearray(6)))


async def test_the_bare_aead_loop_does_encrypt() -> None:
    """Otherwise it would be no limit for an encrypted stream."""
    plain = bytes(range(256)) * 1024
    async with socket_pair() as (near, far), trio.open_nursery() as nursery:
        nursery.start_soon(AeadPipe(near, *KEYS).send, memoryview(plain))
        place = memoryview(bytearray(len(plain)))
        await fill(AeadPipe(far, *KEYS[::-1]), place)
        assert bytes(place) == plain
    async with socket_pair() as (near, far):
        await AeadPipe(near, *KEYS).send(memoryview(b"attack at dawn"))
        wire = bytearray(await far.receive_some())
        assert b"attack" not in wire
        wire[6] ^= 1
        async with socket_pair() as (again, other):
            await again.send_all(wire)
            with pytest.raises(InvalidTag):
                await AeadPipe(other, *KEYS[::-1]).receive(memoryview(bytearray(64)))
