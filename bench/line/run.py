"""`python -m bench link --lab`: every runner of every point, one after another, each alone on its line.

All of one point run within a few minutes in one lab, so that what else the machine does is at least the same machine.  Each runner
is two processes of its own on two hosts of the lab, started before its turn and ended after it; TCP's memory of a path does not
outlive the lab, and nobody inherits another's.

Processor time is what the kernel charges both processes while the flow runs, user and system together, over all bytes that arrived.
The emulated line costs time as well, in a process of its own; with it and both ends on two cores, 1 Gbit/s is near the most that
this lab can carry, and there iperf3 says what it could.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import trio

from bench.children import BenchFailed, open_children, python
from bench.conditions import conditions, installed
from bench.lab import CLIENT, SERVER, Lab, LabFailed, needs, open_lab
from bench.line import iperf
from bench.line.plan import SIZES, LinePlan, Point, Runner, payload_mbit
from bench.link import settings
from bench.others import Others
from bench.report import Bar, Column, Report, Row, ratios
from wire.tensor import DType

__all__ = ["run_line"]

START_S = 60.0
PACKAGES = ("trio", "cryptography", "libp2p", "grpcio", "hivemind")
MODULES = {
    "plnode": ("bench.link.plnode_net", None),
    "plnode-tensors": ("bench.link.plnode_tensors", None),
    "grpc-tls": ("bench.link.grpc_tls", "grpcio"),
    "py-libp2p": ("bench.link.py_libp2p", "libp2p"),
    "hivemind": ("bench.link.hivemind_p2p", "hivemind"),
}
COLUMNS = (
    Column("line_percent", "% line"),
    Column("mbit_per_s", "Mbit/s"),
    Column("back_mbit_per_s", "back Mbit/s"),
    Column("cpu_s_per_gb", "CPU s/GB"),
    Column("idle_p50_ms", "idle p50 ms"),
    Column("loaded_p50_ms", "p50 ms"),
    Column("loaded_p99_ms", "p99 ms"),
    Column("resent", "re-sent"),
    Column("wire_percent", "% packed to"),
    Column("others_cores", "others"),
)
# The point at which packing has to show, and its two flows.
SLOW = {"rate_mbit": 50.0, "rtt_ms": 40.0}
SHRINKING = (Runner("plnode", "bf16", 1), Runner("plnode", "tensor", 1))
# iperf3 listens after some milliseconds; a busy machine needs more.
LISTEN_TRIES = 40
LISTEN_PAUSE_S = 0.1


async def run_line(plan: LinePlan) -> Report:
    """Raises BenchFailed if the lab cannot be built or one of our own processes fails; a rival that fails is noted."""
    if (reason := needs()) is not None:
        raise BenchFailed(f"--lab: {reason}")
    stated = conditions(PACKAGES) | {"seconds": plan.seconds, "dropped_s": plan.drop_s}
    stated["line"] = f"100 % = rate x 1448/1514: {payload_mbit(200.0):.1f} Mbit/s of 200"
    notes: dict[str, None] = {}
    rows: list[tuple[Point, Runner, Row]] = []
    for network, turns in plan.points():
        try:
            with open_lab(network) as lab:
                for point, runners in turns:
                    lab.set_congestion(point.congestion)
                    for runner in runners:
                        row = await _turn(lab, plan, point, runner, notes)
                        if row is not None:
                            rows.append((point, runner, row))
        except LabFailed as failed:
            raise BenchFailed(str(failed)) from failed
    return Report(
        bench="line", conditions=stated, columns=COLUMNS, rows=[row for *_, row in rows], bars=_bars(rows), notes=list(notes)
    )


async def _turn(lab: Lab, plan: LinePlan, point: Point, runner: Runner, notes: dict[str, None]) -> Row | None:
    print(f"line: {point} {runner}", file=sys.stderr, flush=True)
    try:
        with trio.fail_after(2 * START_S + plan.seconds):
            if runner.name == "iperf3":
                found = await _iperf(lab, plan, point, runner)
            else:
                found = await _pair(lab, plan, point, runner)
    except (BenchFailed, _NotHere, trio.TooSlowError, BaseExceptionGroup) as failed:
        first = _first(failed)
        if not isinstance(first, BenchFailed | _NotHere | trio.TooSlowError):
            raise
        if runner.name == "plnode":
            raise BenchFailed(f"{runner}: {first or 'no end'}") from failed
        notes[f"{runner.name}: {first or 'no end'}"] = None
        return None
    return _row(point, runner, found)


class _NotHere(Exception):
    """A rival that is not installed."""


def _first(group: BaseException) -> BaseException:
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group


async def _pair(lab: Lab, plan: LinePlan, point: Point, runner: Runner) -> dict[str, Any]:
    """Two processes of `bench.link`."""
    kind = "plnode-tensors" if runner.name == "plnode" and runner.size in ("tensor", "bf16") else runner.name
    module, needed = MODULES[kind]
    if needed is not None and installed(needed) is None:
        raise _NotHere(f"not installed: pip install {needed}")
    dtype = DType.bf16 if runner.size == "bf16" else DType.uint8
    front = settings.environment(lab.addr(SERVER), point.congestion, runner.lanes, dtype)
    async with open_children() as children:
        server = await children.start(f"{runner.name} server", lab.exec(SERVER, *front, *python(module, "server")))
        where = await server.hear(START_S)
        client = await children.start(f"{runner.name} client", lab.exec(CLIENT, *front, *python(module, "client")))
        await client.ask(where, START_S)
        others = Others([server.pid, client.pid])
        before = (await server.ask({}, START_S))["cpu_s"]
        request = {"message_bytes": SIZES[runner.size], "seconds": plan.seconds, "drop_s": plan.drop_s, "both": runner.both}
        found = await client.ask({"measure": "flow", **request}, START_S + plan.seconds)
        used = found.pop("cpu_s") + (await server.ask({}, START_S))["cpu_s"] - before
        found["others_cores"] = others.cores()
        moved = found.pop("bytes")
        if moved and kind != "hivemind":  # its daemons do the work, and are not the processes counted here
            found["cpu_s_per_gb"] = used / (moved / 1e9)
        await children.kill()  # what is under way would take seconds, and a goodbye tells nothing
    return found


async def _iperf(lab: Lab, plan: LinePlan, point: Point, runner: Runner) -> dict[str, Any]:
    if shutil.which("iperf3") is None:
        raise _NotHere("not installed: apt-get install iperf3")
    client = iperf.client(lab.addr(SERVER), plan.seconds, point.congestion, runner.connections, both=runner.both)
    server = await trio.lowlevel.open_process(
        lab.exec(SERVER, *iperf.server()), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        for _ in range(LISTEN_TRIES):
            done = await trio.run_process(lab.exec(CLIENT, *client), capture_stdout=True, capture_stderr=True, check=False)
            if b"refused" not in done.stdout:
                break
            await trio.sleep(LISTEN_PAUSE_S)
    finally:
        server.kill()
        with trio.CancelScope(shield=True):
            await server.wait()
    try:
        return iperf.figures(done.stdout.decode(), plan.drop_s)
    except (ValueError, KeyError) as error:
        raise BenchFailed(f"{runner.name}: {error!r} {done.stderr.decode()}") from error


def _row(point: Point, runner: Runner, found: dict[str, Any]) -> Row:
    labels: dict[str, int | float | str] = {
        "Mbit": point.rate_mbit, "RTT": point.rtt_ms, "loss%": point.loss_percent,
        "tcp": found.pop("congestion", "") or f"{point.congestion} (default)",
    }  # fmt: skip
    if runner.name == "plnode":
        labels |= {"size": runner.size, "lanes": "own" if runner.lanes is None else runner.lanes}
    elif runner.name == "iperf3":
        labels |= {"size": "-", "lanes": runner.connections}
    else:
        labels |= {"size": runner.size, "lanes": "-"}
    series = {key: found.pop(key) for key in list(found) if key.endswith("series_mbit")}
    samples = {key: [float(value)] for key, value in found.items()}
    samples["line_percent"] = [100 * found["mbit_per_s"] / payload_mbit(point.rate_mbit)]
    return Row(f"{runner.name}{' both' if runner.both else ''}", samples, labels, series)


def _bars(rows: Sequence[tuple[Point, Runner, Row]]) -> list[Bar]:
    """The requirements of a home line (200 Mbit/s, 80 ms); what was not measured says so."""

    def found(figure: str, runner: Runner, **line: Any) -> list[float]:
        return [
            row.samples[figure][0] for point, who, row in rows if point == Point(**line) and who == runner and figure in row.samples
        ]

    def best(figure: str, **line: Any) -> list[float]:
        """Of our tensors, whatever the lanes."""
        all_of_them = [
            row.samples[figure][0]
            for point, who, row in rows
            if point == Point(**line) and (who.name, who.size, who.both) == ("plnode", "tensor", False)
        ]
        return [max(all_of_them)] if all_of_them else []

    def over_idle(key: str) -> list[float]:
        """Milliseconds above the idle round trip while our tensors fill the line without loss: the worst of what was measured."""
        waits = [
            row.samples[key][0] - row.samples["idle_p50_ms"][0]
            for point, who, row in rows
            if (who.name, who.size, who.both) == ("plnode", "tensor", False) and not point.loss_percent and key in row.samples
        ]
        return [max(waits)] if waits else []

    shrinking = (found("mbit_per_s", who, **SLOW) for who in SHRINKING)
    one, four = (found("mbit_per_s", Runner("plnode", "tensor", n), loss_percent=0.1) for n in (1, 4))
    return [
        Bar("cubic, no loss: best % of the line", best("line_percent"), at_least=92.0),
        Bar("cubic, 0.1 % loss: 4 lanes / 1 lane", ratios(four, one), at_least=3.0),
        Bar("cubic, 0.1 % loss: best Mbit/s", best("mbit_per_s", loss_percent=0.1), at_least=60.0),
        Bar("bbr, no loss: best % of the line", best("line_percent", congestion="bbr"), at_least=92.0),
        Bar("bbr, 0.1 % loss: best Mbit/s", best("mbit_per_s", loss_percent=0.1, congestion="bbr"), at_least=130.0),
        Bar("bbr, 1 % loss: best Mbit/s", best("mbit_per_s", loss_percent=1.0, congestion="bbr"), at_least=120.0),
        Bar("50 Mbit/s: Gaussian bf16 / what is not packed", ratios(*shrinking), at_least=1.35),
        Bar("control under bulk, p50 above the idle round trip, ms", over_idle("loaded_p50_ms"), at_most=15.0),
        Bar("control under bulk, p99 above the idle round trip, ms", over_idle("loaded_p99_ms"), at_most=60.0),
    ]
