"""A contestant as a process: `python -m bench.link.<file> server` or `client`.

The server's first line is where it is.  The client's first line in is that address, its first out says that it is connected;
then one line of request, one line of answer, until stdin ends.  The request `connect` closes the connection and makes a new one:
what TCP has learnt of the line differs from connection to connection, and a repeat that kept its connection would repeat that too.

The request `flow` is a connection's last: it is cancelled in mid-message, and nobody waits for what the line still holds.  While it
runs, probes put small questions; each rests between two of them, so that together they are a load that counts for nothing.

The server answers each line with the processor time that it has used; the client's answers say the same of itself.

How many messages make up the asked-for time is found out here before the first stream of each size, by doubling until a batch
lasts a fifth of it; later streams of that size go by the rate of the last.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import trio

from bench.link.competitor import Client, Competitor, Job, Loop
from bench.link.flow import per_second, rate
from bench.report import quantile

__all__ = ["ASYNCIO", "TRIO", "main"]

# Round trips for a p99 worth the name: ten values lie beyond it.
ROUND_TRIPS_LEAST = 1000
HANDSHAKES_LEAST = 3
# Probes beside a flow: at 80 ms a round trip they ask some 29 times a second, 290 samples in ten seconds.
PROBES = 8
PROBE_REST_S = 0.2
IDLE_PROBES = 15


class _Trio:
    def run(self, main: Any, *arguments: Any) -> None:
        trio.run(main, *arguments)

    async def line(self) -> str:
        return await trio.to_thread.run_sync(sys.stdin.readline)

    async def beside(self, jobs: Sequence[Job], seconds: float) -> None:
        with trio.move_on_after(seconds):
            async with trio.open_nursery() as nursery:
                for job in jobs:
                    nursery.start_soon(job)

    async def sleep(self, seconds: float) -> None:
        await trio.sleep(seconds)


class _Asyncio:
    def run(self, main: Any, *arguments: Any) -> None:
        asyncio.run(main(*arguments))

    async def line(self) -> str:
        return await asyncio.to_thread(sys.stdin.readline)

    async def beside(self, jobs: Sequence[Job], seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
                for job in jobs:
                    group.create_task(job())  # type: ignore[arg-type]
        except TimeoutError:
            pass

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


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
            _say({"cpu_s": time.process_time()})


async def _client(competitor: Competitor) -> None:
    where = json.loads(await competitor.loop.line())
    counts: dict[int, int] = {}
    while True:
        async with competitor.connect(where) as client:
            _say({"congestion": client.congestion})
            while (line := await competitor.loop.line()) and (request := json.loads(line))["measure"] != "connect":
                _say(await _measure(competitor.loop, client, counts, request))
        if not line:
            return


async def _measure(loop: Loop, client: Client, counts: dict[int, int], request: dict[str, Any]) -> dict[str, Any]:
    match request["measure"]:
        case "flow":
            return await _flow(loop, client, request)
        case "stream":
            return await _stream(client, counts, request["message_bytes"], request["seconds"])
        case "round_trips":
            return await _round_trips(client, request["seconds"])
        case "handshakes":
            return await _handshakes(client, request["seconds"])
        case other:
            raise ValueError(f"no such measure: {other}")


async def _stream(client: Client, counts: dict[int, int], size: int, seconds: float) -> dict[str, Any]:
    used, sent = time.process_time(), 0
    if size not in counts:
        count, took = 1, 0.0
        while took < seconds / 5:
            count *= 2
            took = await client.stream(size, count)
            sent += count
        counts[size] = max(2, round(count * seconds / took))
    count = counts[size]
    took = await client.stream(size, count)
    counts[size] = max(2, round(count * seconds / took))
    used = time.process_time() - used
    return {"mib_per_s": size * count / took / 2**20, "bytes": size * (sent + count), "cpu_s": used}


async def _flow(loop: Loop, client: Client, request: dict[str, Any]) -> dict[str, Any]:
    """`seconds` of messages of `message_bytes`, without the first `drop_s`; `both`: in both directions at once."""
    size, seconds, drop_s = request["message_bytes"], request["seconds"], request["drop_s"]
    idle = [trip for _ in range(IDLE_PROBES) if (trip := await client.control()) is not None]
    marks: dict[str, list[tuple[float, int]]] = {"": [], "back_": []}
    trips: list[float] = []
    began, used = time.perf_counter(), time.process_time()

    async def probe() -> None:
        while True:
            trip = await client.control()
            if time.perf_counter() - began > drop_s and trip is not None:
                trips.append(trip)
            await loop.sleep(PROBE_REST_S)

    jobs = list(client.flow(size, lambda count: marks[""].append((time.perf_counter() - began, count))))
    if request["both"]:
        jobs += client.pull(size, lambda count: marks["back_"].append((time.perf_counter() - began, count)))
    await loop.beside([*jobs, *([probe] * PROBES if idle else [])], seconds)
    answer: dict[str, Any] = {"cpu_s": time.process_time() - used, "bytes": sum(n for part in marks.values() for _, n in part)}
    if not request["both"]:
        del marks["back_"]
    for way, part in marks.items():
        answer[f"{way}mbit_per_s"] = rate(part, drop_s) * 8e-6
        answer[f"{way}series_mbit"] = [round(count * 8e-6, 2) for count in per_second(part, seconds)]
    for name, samples in {"idle": idle, "loaded": trips}.items():
        if samples:
            answer |= {f"{name}_p50_ms": quantile(samples, 0.5) * 1e3, f"{name}_p99_ms": quantile(samples, 0.99) * 1e3}
    return answer | client.counts() | {"congestion": client.congestion}


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
