"""`python -m bench`: one command a bench.  Progress goes to stderr, the table to stdout, with --json one object behind it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import trio

from bench.children import BenchFailed
from bench.history import HISTORY, append
from bench.line.plan import SIZES
from bench.report import Report

# A pipe has no width; wide enough for every table.
PIPE_COLUMNS = 160

_quick = click.option("--quick", is_flag=True, help="Under 45 s; the figures are rough.")
_history = click.option(
    "--history", default=HISTORY, show_default=True, help="Append the figures to this file, a line a row; '' for nowhere."
)
_json = click.option("--json", "as_json", is_flag=True, help="The last line is one JSON object.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def program() -> None:
    """Measure, with competitors in the same run. Exit code 0: measured (met or missed), 1: a measured program failed."""


@program.command()
@click.option("--lab", is_flag=True, help="On emulated lines in network namespaces (needs root) instead of loopback.")
@click.option("--rate", "rates", type=float, multiple=True, help="Lab: Mbit/s of the line. May be repeated, as all that follow.")
@click.option("--rtt", "rtts", type=float, multiple=True, help="Lab: round trip in ms.")
@click.option("--loss", "losses", type=float, multiple=True, help="Lab: per cent of packets lost.")
@click.option("--congestion", "congestions", multiple=True, help="Lab: congestion control of everybody, such as cubic or bbr.")
@click.option("--lanes", type=click.IntRange(0, 4), multiple=True, help="Lab: bulk connections; 0 is one mixed connection.")
@click.option("--size", "sizes", type=click.Choice([*SIZES]), multiple=True, help="Lab: what our node sends; bf16: tensors it may pack.")
@click.option("--both", is_flag=True, help="Lab: both directions at once (our node and iperf3).")
@click.option("--only", multiple=True, help="Lab: only this one of plnode, iperf3, grpc-tls, py-libp2p, hivemind.")
@click.option("--seconds", type=float, help="Lab: length of each flow.")
@click.option("--drop", "drop_s", type=float, help="Lab: seconds dropped from its start.")
@_quick
@_json
@_history
def link(lab: bool, quick: bool, as_json: bool, history: str, seconds: float | None, drop_s: float | None, **points: Any) -> None:
    """One stream between two processes, beside others in the same run.

    On loopback beside raw TCP, bare AEAD frames, TLS 1.3, py-libp2p and gRPC: what a byte costs. With --lab on lines with a rate, a
    delay and loss, beside iperf3, gRPC, py-libp2p and hivemind's p2p: what a line carries (some ten minutes; --quick one minute; any
    of the options below measures just the points that they name).
    """
    if lab:
        from bench.line.plan import LinePlan
        from bench.line.run import run_line

        chosen = LinePlan.chosen(**points) if any(points.values()) else LinePlan.quick() if quick else LinePlan.full()
        times = {"seconds": seconds or chosen.seconds, "drop_s": chosen.drop_s if drop_s is None else drop_s}
        if times["drop_s"] >= times["seconds"]:
            raise click.UsageError("--drop leaves nothing of --seconds")
        _show(run_line, replace(chosen, **times), as_json=as_json, history=history)
        return
    if any(points.values()) or seconds or drop_s:
        raise click.UsageError("--rate, --rtt, --loss, --congestion and what stands with them need --lab")
    from bench.link.run import Plan, run_link

    _show(run_link, Plan.quick() if quick else Plan(), as_json=as_json, history=history)


@program.command()
@_quick
@_json
@_history
def homes(quick: bool, as_json: bool, history: str) -> None:
    """Tokens a second of a swarm of which most nodes sit behind home routers, beside the same swarm with public addresses.

    In network namespaces (needs root), some six minutes.
    """
    from bench.homes.run import HomesPlan, run_homes

    _show(run_homes, HomesPlan.quick() if quick else HomesPlan(), as_json=as_json, history=history)


@program.command()
@click.option("--stages", type=click.IntRange(2, 64), default=2, show_default=True, help="Stages, one node and one core each.")
@_quick
@_json
@_history
def pipeline(stages: int, quick: bool, as_json: bool, history: str) -> None:
    """Tokens a second of a pipeline of nodes, beside one process and torch's own pipeline on the same cores."""
    from bench.pipeline.run import Plan, run_pipeline

    _show(run_pipeline, Plan.quick(stages) if quick else Plan(stages=stages), as_json=as_json, history=history)


@program.command("history")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path), default=HISTORY)
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), default="bench-history.svg", show_default=True)
def show_history(file: Path, plot: Path) -> None:
    """How figures moved from run to run, from the file that the benches write; and a plot of it."""
    from bench.history import read, table
    from bench.plot import write_plot

    try:
        entries = read(file)
    except ValueError as error:
        click.echo(f"bench: {error}", err=True)
        sys.exit(1)
    click.echo(table(entries))
    click.echo(f"plot: {plot}" if write_plot(plot, entries) else "no plot: matplotlib is missing: pip install 'plnode[report]'")


def _show(bench: Callable[[Any], Awaitable[Report]], plan: Any, *, as_json: bool, history: str) -> None:
    report: Report | None = None
    exit_code = 0
    try:
        report = trio.run(bench, plan)
    except* BenchFailed as failed:
        for problem in _leaves(failed):
            click.echo(f"bench: {problem}", err=True)
        exit_code = 1
    except* KeyboardInterrupt:
        exit_code = 130
    if report is None:  # not from within: before Python 3.11.4 what leaves an except* comes out in a group
        sys.exit(exit_code)
    width = shutil.get_terminal_size((PIPE_COLUMNS, 24)).columns if sys.stdout.isatty() else PIPE_COLUMNS
    click.echo(report.text(width))
    if history:
        append(Path(history), report)
    if as_json:
        click.echo(report.json_line())


def _leaves(group: BaseException) -> list[BaseException]:
    if not isinstance(group, BaseExceptionGroup):
        return [group]
    return [leaf for inner in group.exceptions for leaf in _leaves(inner)]


if __name__ == "__main__":
    program(prog_name="python -m bench")
