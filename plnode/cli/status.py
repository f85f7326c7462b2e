"""`plnode status`: what the node on this machine is doing."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from plnode.cli.peertable import table
from plnode.observe.lines import quantity, short_id
from plnode.observe.status import ask

__all__ = ["command", "describe"]

_TROUBLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "RunAborted": lambda t: f"step {t['step']} given up",
    "PeerLost": lambda t: f"lost peer {short_id(t['peer_id'])}",
    "SnapshotFailed": lambda t: f"snapshot of step {t['step']} not written",
}
_STALE_S = 5.0  # a node renews its status every second


@click.command("status")
@click.option("--data", metavar="DIR", envvar="PLNODE_DATA", default=".", type=Path, help="The node's folder (default: here).")
@click.option("--json", "as_json", is_flag=True, help="The whole state as one JSON object.")
@click.option("--metrics", is_flag=True, help="The metrics in Prometheus' text format.")
def command(data: Path, as_json: bool, metrics: bool) -> None:
    """Ask the node that runs on DIR: its stage, its step, what it waits for and since when, its traffic and its peers.

    \b
    Examples:
      plnode status --data ~/plnode
      plnode status --data ~/plnode --json | jq .status.step
      watch plnode status --data ~/plnode
    """
    if metrics:
        click.echo(ask(data, "metrics"), nl=False)
        return
    answer = ask(data)
    if as_json:
        click.echo(answer, nl=False)
        return
    seen = sys.stdout.isatty() or "COLUMNS" in os.environ
    for line in describe(json.loads(answer), shutil.get_terminal_size().columns if seen else None):
        click.echo(line)
    sys.stdout.flush()


def describe(document: dict[str, Any], width: int | None = None) -> list[str]:
    """The status document in lines for a person; `width`: columns of the window, if there is one."""
    node, status, stage = document["node"], document["status"], document["stage"]
    lines = []
    if node:
        lines.append(f"{node['name']}  {node['peer_id']}")
        lines.append(f"  listens on {', '.join(node['addresses'])}; device {node['device']}, {node['threads']} thread(s)")
    if not status:
        lines.append("  starting: no status yet")
    else:
        lines += _work(status, stage)
        if status["access"]:
            lines.append(f"  others reach it: {status['access']}" + (f" ({status['access_reason']})" if status["access_reason"] else ""))
        if document["age_s"] is not None and document["age_s"] > _STALE_S:
            lines.append(f"  these figures are {document['age_s']:.0f} s old: the node may be busy or stuck")
    for cause in document["waiting"]:
        detail = f": {cause['detail']}" if cause["detail"] else ""
        lines.append(f"  waits {cause['what']} since {_duration(cause['since_s'])}{detail}")
    for entry, seed in document["seeds"].items():
        lines.append(f"  seed {entry}: {seed['state']}" + (f" ({seed['reason']})" if seed["reason"] else ""))
    if status:
        lines += table(status["peers"], width)
    for trouble in document["troubles"]:
        lines.append(f"  {_TROUBLES[trouble['kind']](trouble)}: {trouble['reason']}")
    return lines


def _work(status: dict[str, Any], stage: dict[str, Any] | None) -> list[str]:
    held = f"stage {stage['stage']} (layers {stage['first_layer']} to {stage['end_layer'] - 1})" if stage else "no stage yet"
    loss = "not known yet" if status["loss"] is None else f"{status['loss']:.4f}"
    eta = "" if status["eta_s"] is None else f", {_duration(status['eta_s'])} to go"
    lines = [f"  {status['state']}, {held}" if status["steps"] else f"  {status['state']}"]
    if status["steps"]:
        speed = quantity(status["tokens_per_s"])
        lines.append(f"  step {status['step']} of {status['steps']}, loss {loss}, {speed} tokens/s{eta}")
        lines.append(
            f"  queue {status['queue']}, in flight {status['in_flight']}, credits {status['credits']}, "
            f"graphs kept {status['kept_graphs']}, recomputed {status['recomputed']}, lost {status['lost_microbatches']}"
        )
    moved = f"{quantity(status['bytes_in'], 'B')} in, {quantity(status['bytes_out'], 'B')} out"
    lines.append(f"  {moved}; event loop blocked p99 {status['loop_blocked_p99_ms']:.2f} ms")
    return lines


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
