"""`plnode join`: take part in a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from plnode.cli.options import checked_seeds, node_options, settings_from
from plnode.cli.service import exit_with_stdin, opened_recorder, run_until_signal
from plnode.exits import BadInput
from plnode.leaving import patience_of
from plnode.manifest import SignedManifest
from plnode.observe.events import NodeStopped
from wire.identity import Identity, lock_data_folder

__all__ = ["command"]


@click.command("join")
@click.option("--manifest", "manifest_file", required=True, metavar="FILE", type=Path, help="The signed run file.")
@node_options(computes=True)
def command(manifest_file: Path, as_json: bool, **flags: Any) -> int:
    """Join a run: hold one stage, train it with the others, until the run is finished or you stop it.

    \b
    Examples:
      plnode join --seeds seeds.txt --manifest run.signed --data ~/plnode
      plnode join --seeds seeds.txt --manifest run.signed --data ~/plnode --device cuda --name attic
      PLNODE_DATA=/data PLNODE_SEEDS=/data/seeds.txt plnode join --manifest run.signed --json

    The seed list is all that a node needs to find the others: entries, files and URLs, also several, separated by commas. A node
    that waits says for what, and `plnode status` shows it.
    Ctrl-C leaves the run; a second Ctrl-C leaves it at once.
    """
    settings = settings_from(flags)
    if not settings.seeds and not (settings.data_dir / "known-peers").exists():  # a node that was there before may know the way
        raise BadInput("a node that joins needs a seed list", "Give --seeds: host:port, a file of them or its URL (or PLNODE_SEEDS).")
    checked_seeds(settings)
    signed = SignedManifest.load(manifest_file)
    patience = patience_of(settings.stop_grace_s)
    if flags["exit_with_stdin"]:
        exit_with_stdin(patience)
    with lock_data_folder(settings.data_dir), opened_recorder(json=as_json, level=settings.log_level) as recorder:
        identity = Identity.load_or_create(settings.key_file)
        from plnode.node import run_node  # torch: only once everything that the user gave is in order

        return run_until_signal(
            lambda: run_node(settings, signed, identity, recorder),
            lambda reason: recorder.emit(NodeStopped(reason)),
            leaves=True,
            patience_s=patience,
        )
