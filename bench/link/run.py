"""`python -m bench link`: all contestants in one run, measure by measure, so that compared figures are seconds apart.

All processes stay alive for the whole run and wait on their stdin while others are measured, which costs nothing.  In each repeat
every contestant has its turn at each measure; whatever else the machine does falls on all of them alike, and ratios are taken
within a repeat.  Processes are not bound to cores: gRPC works with more than one thread a side.

On loopback there is neither delay nor loss: this measures what a byte and a message cost in CPU, not behaviour on a line.  So the
processor time of both ends stands beside the rate: each process counts its own, all threads, user and system, per megabyte (10^6
bytes) that was sent and received.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import trio

from bench.children import Child, Children, open_children, python
from bench.conditions import conditions, installed
from bench.report import Bar, Column, Report, Row, ratios

__all__ = ["CONTESTANTS", "MESSAGE_SIZES", "Contestant", "Plan", "run_link"]

MESSAGE_SIZES = (64 * 1024, 1024 * 1024)
# Importing a library on a busy machine; a measure runs some three times its seconds with its warm-up.
START_S = 60.0
PACKAGES = ("trio", "cryptography", "libp2p", "grpcio")
COLUMNS = (
    Column("mib_per_s", "MiB/s"),
    Column("cpu_ms_per_mb", "CPU ms/MB"),
    Column("rtt_p50_us", "rtt p50 us"),
    Column("rtt_p99_us", "rtt p99 us"),
    Column("handshakes_per_s", "handshakes/s"),
)


@dataclass(frozen=True, slots=True)
class Contestant:
    """A row's name, its file in this folder, and the distributions it needs beyond ours."""

    name: str
    module: str
    needs: tuple[str, ...] = ()


CONTESTANTS = (
    Contestant("plnode", "bench.link.plnode_net"),
    Contestant("trio-tcp", "bench.link.trio_tcp"),
    Contestant("trio-aead", "bench.link.trio_aead"),
    Contestant("trio-tls13", "bench.link.trio_tls13"),
    Contestant("py-libp2p", "bench.link.py_libp2p", ("libp2p",)),
    Contestant("grpc-tls", "bench.link.grpc_tls", ("grpcio",)),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """How long is measured: `seconds` for each stream, half of it for round trips and for handshakes, `repeats` times.

    Many short repeats rather than few long ones: what disturbs a machine lasts seconds and should spoil one repeat, not two of three.
    """

    seconds: float = 0.5
    repeats: int = 9

    @classmethod
    def quick(cls) -> Plan:
        """Under 45 s, start-up included."""
        return cls(seconds=0.15, repeats=5)


@dataclass(slots=True)
class _Measured:
    """One contestant at work and what it has shown so far."""

    server: Child
    client: Child
    congestion: str
    streams: dict[int, list[float]] = field(default_factory=lambda: {size: [] for size in MESSAGE_SIZES})
    costs: dict[int, list[float]] = field(default_factory=lambda: {size: [] for size in MESSAGE_SIZES})
    others: dict[str, list[float]] = field(default_factory=dict)


async def run_link(plan: Plan, contestants: Sequence[Contestant] = CONTESTANTS) -> Report:
    """Raises BenchFailed if a contestant dies or is silent."""
    stated = conditions(PACKAGES) | {"repeats": plan.repeats, "seconds": plan.seconds}
    missing = [c for c in contestants if not all(map(installed, c.needs))]
    notes = [f"{c.name}: not installed: pip install 'plnode[bench]'" for c in missing]
    measured: dict[str, _Measured] = {}
    async with open_children() as children:
        async with trio.open_nursery() as starting:
            for contestant in contestants:
                if contestant not in missing:
                    starting.start_soon(_start, children, contestant, measured)
        measured = {c.name: measured[c.name] for c in contestants if c.name in measured}
        for repeat in range(plan.repeats):
            print(f"link: repeat {repeat + 1} of {plan.repeats}", file=sys.stderr, flush=True)
            await _repeat(plan, measured)
    stated["congestion"] = {name: m.congestion or "the kernel's default" for name, m in measured.items()}
    return Report(
        bench="link", conditions=stated, columns=COLUMNS, rows=_rows(measured), bars=_bars(measured), notes=notes
    )


async def _start(children: Children, contestant: Contestant, measured: dict[str, _Measured]) -> None:
    server = await children.start(f"{contestant.name} server", python(contestant.module, "server"))
    where = await server.hear(START_S)
    client = await children.start(f"{contestant.name} client", python(contestant.module, "client"))
    answer = await client.ask(where, START_S)
    measured[contestant.name] = _Measured(server, client, answer["congestion"])


async def _repeat(plan: Plan, measured: Mapping[str, _Measured]) -> None:
    half = plan.seconds / 2
    for m in measured.values():
        await m.client.ask({"measure": "connect"}, START_S)
    for size in reversed(MESSAGE_SIZES):
        for m in measured.values():
            before = (await m.server.ask({}, START_S))["cpu_s"]
            answer = await _ask(m, {"measure": "stream", "message_bytes": size, "seconds": plan.seconds})
            used = answer["cpu_s"] + (await m.server.ask({}, START_S))["cpu_s"] - before
            m.costs[size].append(used * 1e3 / (answer["bytes"] / 1e6))
            m.streams[size].append(answer["mib_per_s"])
    for measure in ("round_trips", "handshakes"):
        for m in measured.values():
            for key, value in (await _ask(m, {"measure": measure, "seconds": half})).items():
                m.others.setdefault(key, []).append(value)


async def _ask(m: _Measured, request: dict[str, Any]) -> dict[str, Any]:
    return await m.client.ask(request, START_S + 20 * request["seconds"])


def _rows(measured: Mapping[str, _Measured]) -> list[Row]:
    return [
        Row(name, {"mib_per_s": m.streams[size], "cpu_ms_per_mb": m.costs[size], **m.others}, {"message_bytes": size})
        for size in MESSAGE_SIZES
        for name, m in measured.items()
    ]


def _bars(measured: Mapping[str, _Measured]) -> list[Bar]:
    """What the stream is held to.  A contestant that is not there leaves its requirement unmeasured."""
    mebibyte = MESSAGE_SIZES[1]

    def rate(name: str) -> list[float]:
        return measured[name].streams[mebibyte] if name in measured else []

    def trips(name: str) -> list[float]:
        return measured[name].others.get("rtt_p50_us", []) if name in measured else []

    ours = rate("plnode")
    cost = measured["plnode"].costs[mebibyte] if "plnode" in measured else []
    return [
        Bar("stream at 1 MiB, plnode / py-libp2p", ratios(ours, rate("py-libp2p")), at_least=6.0),
        Bar("stream at 1 MiB, plnode / trio-aead", ratios(ours, rate("trio-aead")), at_least=0.65),
        Bar("stream at 1 MiB, plnode / grpc-tls", ratios(ours, rate("grpc-tls")), at_least=1.0),
        Bar("round trip p50, plnode / trio-tcp", ratios(trips("plnode"), trips("trio-tcp")), at_most=3.0),
        Bar("stream at 1 MiB, plnode: CPU ms per MB, both ends", cost, at_most=1.2),
    ]
