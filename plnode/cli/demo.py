"""`plnode demo`: a whole swarm on this machine."""

from __future__ import annotations

import itertools
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from plnode.cli.run import assignment
from plnode.cli.service import run_until_signal
from plnode.exits import ExitCode, Outcome
from plnode.manifest_text import default_values, shipped_values

__all__ = ["command"]

PROMPT = "And the LORD said unto "
SAMPLE_TOKENS = 60


@click.command("demo")
@click.option("--stages", default=3, show_default=True, type=click.IntRange(1, 64), help="Stages that the model is cut into.")
@click.option("--replicas", default=2, show_default=True, type=click.IntRange(1, 16), help="Nodes a stage.")
@click.option("--steps", default=200, show_default=True, type=click.IntRange(1), help="Optimizer steps.")
@click.option("--seed", default=1, show_default=True, type=click.IntRange(0), help="Seed of weights and order of samples.")
@click.option("--threads", default=1, show_default=True, type=click.IntRange(1, 64), help="Threads a node.")
@click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="Another value in the manifest, e.g. model.dim=64.")
@click.option("--prompt", default=PROMPT, show_default=True, help="What the trained model continues at the end.")
@click.option("--out", metavar="DIR", type=Path, help="Keep report, logs and snapshots here (default: only the report, in demo-report).")
@click.option("--patience", default=240.0, show_default=True, type=click.FloatRange(1), help="Seconds without progress allowed.")
@click.option("--json", "as_json", is_flag=True, help="The final figures as one JSON object on the last line of stdout.")
def command(
    stages: int, replicas: int, steps: int, seed: int, threads: int, changes: tuple[str, ...], prompt: str, out: Path | None,
    patience: float, as_json: bool,
) -> int:  # fmt: skip
    """Train a small model with a whole swarm on this machine: a seed and STAGES x REPLICAS nodes, each a process of its own.

    They find each other through the seed list, agree on who holds what, and train on the shipped text over encrypted connections.
    At the end the model is put together from the nodes' snapshots and continues a prompt.

    \b
    Examples:
      plnode demo
      plnode demo --stages 2 --replicas 1 --steps 30 --json
      plnode demo --out demo-1 --set model.dim=256 --set optimizer.name=adamw

    Ctrl-C ends it; no process is left behind, whatever ends it.
    """
    given = dict(assignment(text) for text in changes)
    chosen = {"stages.count": stages, "stages.replicas": replicas, "steps": steps, "seed": seed, "name": "demo"}
    paced = {"evaluation.every": max(steps // 10, 1), "snapshot.every": 0}
    if "model.layers" not in given and stages > 6:
        paced["model.layers"] = stages
    values = default_values({**shipped_values(), **paced, **chosen, **given})
    console = Console(stderr=as_json, highlight=False)
    with _folder(out) as root:
        return run_until_signal(
            lambda: _demo(root, values, console, threads, patience, prompt, as_json, out is not None), _say_signal
        )


def _say_signal(reason: str) -> None:
    """The only end that is not told otherwise."""
    if reason.endswith("received"):
        click.echo(f"plnode demo: {reason}: ending the nodes", err=True)


async def _demo(
    root: Path, values: dict[str, Any], console: Console, threads: int, patience_s: float, prompt: str, as_json: bool, keep: bool
) -> Outcome:
    from plnode.demo.assemble import AssemblyError, continuation
    from plnode.demo.report import figures, last_words, write_report
    from plnode.demo.screen import opened_screen
    from plnode.demo.swarm import DemoFailed, prepare, run_swarm
    from plnode.manifest import SignedManifest
    from plnode.workload import LanguageModel

    folder = prepare(root, values)
    signed = SignedManifest.load(folder.signed)
    job = LanguageModel(signed.manifest)
    try:
        with opened_screen(console) as screen:
            view = await run_swarm(folder, screen.show, patience_s=patience_s, threads=threads)
    except DemoFailed as failed:
        click.echo(f"plnode demo: {failed}", err=True)
        if keep:
            click.echo(f"  logs: {root / 'logs'}", err=True)
        return Outcome(failed.code, str(failed))
    result = figures(view, unigram_loss=job.unigram_loss, run_id=signed.run_id.hex())
    try:
        sealed = signed.manifest.weights == "sealed"
        result["sample"] = None if sealed else continuation(job, view.snapshots, prompt, SAMPLE_TOKENS)
    except AssemblyError as problem:
        click.echo(f"plnode demo: the model could not be put together: {problem}", err=True)
        return Outcome(ExitCode.INTERNAL, str(problem))
    for line in last_words(result):
        console.print(line, markup=False)
    if result["sample"] is not None:
        console.print(f"the model continues:\n  {' '.join(result['sample'].split())}", markup=False, soft_wrap=True)
    for path in write_report(root / "report" if keep else _free("demo-report"), view, result):
        console.print(f"wrote {path}", markup=False, soft_wrap=True)
    if as_json:
        click.echo(json.dumps(result))
    return Outcome(ExitCode.OK, "finished")


def _free(name: str) -> Path:
    """`name` in the current folder, or `name-2`, ...: a report never replaces an earlier one."""
    paths = (Path(name if number == 1 else f"{name}-{number}").absolute() for number in itertools.count(1))
    return next(path for path in paths if not path.exists())


@contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    """The given folder, or one that is gone afterwards."""
    if out is not None:
        yield out.absolute()
        return
    root = Path(tempfile.mkdtemp(prefix="plnode-demo-"))
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)
