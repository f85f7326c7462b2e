"""`python -m bench`: one command a bench.  Progress goes to stderr, the table to stdout, with --json one object behind it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import click
import trio

from bench.children import BenchFailed
from bench.report import Report

# A pipe has no width; wide enough for every table.
PIPE_COLUMNS = 160

_quick = click.option("--quick", is_flag=True, help="Under 45 s; the figures are rough.")
_json = click.option("--json", "as_json", is_flag=True, help="The last line is one JSON object.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def program() -> None:
    """Measure, with competitors in the same run. Exit code 0: measured (met or missed), 1: a measured program failed."""


@program.command()
@_quick
@_json
def link(quick: bool, as_json: bool) -> None:
    """One stream between two processes on loopback, beside raw TCP, bare AEAD frames, TLS 1.3, py-libp2p and gRPC."""
    from bench.link.run import Plan, run_link

    _show(run_link, Plan.quick() if quick else Plan(), as_json=as_json)


@program.command()
@click.option("--stages", type=click.IntRange(2, 64), default=2, show_default=True, help="Stages, one node and one core each.")
@_quick
@_json
def pipeline(stages: int, quick: bool, as_json: bool) -> None:
    """Tokens a second of a pipeline of nodes, beside one process and torch's own pipeline on the same cores."""
    from bench.pipeline.run import Plan, run_pipeline

    _show(run_pipeline, Plan.quick(stages) if quick else Plan(stages=stages), as_json=as_json)


def _show(bench: Callable[[Any], Awaitable[Report]], plan: Any, *, as_json: bool) -> None:
    try:
        report = trio.run(bench, plan)
    except* BenchFailed as failed:
        for problem in _leaves(failed):
            click.echo(f"bench: {problem}", err=True)
        sys.exit(1)
    except* KeyboardInterrupt:
        sys.exit(130)
    width = shutil.get_terminal_size((PIPE_COLUMNS, 24)).columns if sys.stdout.isatty() else PIPE_COLUMNS
    click.echo(report.text(width))
    if as_json:
        click.echo(report.json_line())


def _leaves(group: BaseException) -> list[BaseException]:
    if not isinstance(group, BaseExceptionGroup):
        return [group]
    return [leaf for inner in group.exceptions for leaf in _leaves(inner)]


if __name__ == "__main__":
    program(prog_name="python -m bench")
