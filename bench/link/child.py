"""A contestant as a process: `python -m bench.link.<file> server` or `client`.

The server's first line is where it is.  The client's first line in is that address, its first out says that it is connected;
then one line of request, one line of answer, until stdin ends.  The request `connect` closes the connection and makes a new one:
what TCP has learnt of the line differs from connection to connection, and a repeat that kept its connection would repeat that too.

How many messages make up the asked-for time is found out here before the first stream of each size, by doubling until a batch
lasts a fifth of it; later streams of that size go by the rate of the last.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import trio

from bench.link.competitor import Client, Competitor, Loop
from bench.report import quantile

__all__ = ["ASYNCIO", "TRIO", "main"]

# Round trips for a p99 worth the name: ten values lie beyond it.
ROUND_TRIPS_LEAST = 1000
HANDSHAKES_LEAST = 3


class _Trio:
    def run(self, main: Any, *arguments: Any) -> None:
        trio.run(main, *arguments)

    async def line(self) -> str:
        return await trio.to_thread.run_sync(sys.stdin.readline)


class _Asyncio:
    def run(self, main: Any, *arguments: Any) -> None:
        asyncio.run(main(*arguments))

    async def line(self) -> str:
        return await asyncio.to_thread(sys.stdin.readline)


TRIO: Loop = _Trio()
ASYNCIO: Loop = _Asyncio()


def main(competitor: Competitor) -> None:
    """The program of a contestant's file."""
    programs = {"server": _serve, "client": _client}
    if len(sys.argv) != 2 or sys.argv[1] not in programs:
        sys.exit(f"usage: python -m {sys.modules['__main__'].__spec__.name} server|client")  # type: ignore[union-attr]
    competitor.loop.run(programs[sys.argv[1]], competitor)


async def _serve(competitor: Competitor) -> None:
    async with competitor.serve() as where:
        _say(where)
        while await competitor.loop.line():
            pass


async def _client(competitor: Competitor) -> None:
    where = json.loads(await competitor.loop.line())
    counts: dict[int, int] = {}
    while True:
        async with competitor.connect(where) as client:
            _say({"congestion": client.congestion})
            while (line := await competitor.loop.line()) and (request := json.loads(line))["measure"] != "connect":
                _say(await _measure(client, counts, request))
        if not line:
            return


async def _measure(client: Client, counts: dict[int, int], request: dict[str, Any]) -> dict[str, Any]:
    match request["measure"]:
        case "stream":
            return await _stream(client, counts, request["message_bytes"], request["seconds"])
        case "round_trips":
            return await _round_trips(client, request["seconds"])
        case "handshakes":
            return await _handshakes(client, request["seconds"])
        case other:
            raise ValueError(f"no such measure: {other}")


async def _stream(client: Client, counts: dict[int, int], size: int, seconds: float) -> dict[str, Any]:
    if size not in counts:
        count, took = 1, 0.0
        while took < seconds / 5:
            count *= 2
            took = await client.stream(size, count)
        counts[size] = max(2, round(count * seconds / took))
    count = counts[size]
    took = await client.stream(size, count)
    counts[size] = max(2, round(count * seconds / took))
    return {"mib_per_s": size * count / took / 2**20}


async def _round_trips(client: Client, seconds: float) -> dict[str, Any]:
    warm = await client.round_trips(100)
    count = max(ROUND_TRIPS_LEAST, round(100 * seconds / sum(warm)))
    trips = await client.round_trips(count)
    return {"rtt_p50_us": quantile(trips, 0.5) * 1e6, "rtt_p99_us": quantile(trips, 0.99) * 1e6}


async def _handshakes(client: Client, seconds: float) -> dict[str, Any]:
    total, count = 0.0, 0
    began = time.perf_counter()
    if await client.handshake() is None:
        return {}
    while count < HANDSHAKES_LEAST or time.perf_counter() - began < seconds:
        took = await client.handshake()
        assert took is not None
        total, count = total + took, count + 1
    return {"handshakes_per_s": count / total}


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)
