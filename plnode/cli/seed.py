"""`plnode seed`: introduce peers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from plnode.cli.options import checked_seeds, node_options, settings_from
from plnode.cli.service import exit_with_stdin, opened_recorder, run_until_signal
from plnode.leaving import patience_of
from plnode.manifest import SignedManifest
from plnode.observe.events import NodeStopped
from wire.identity import Identity, lock_data_folder

__all__ = ["command"]


@click.command("seed")
@node_options(computes=False)
@click.option("--manifest", "manifest_file", metavar="FILE", type=Path, help="Serve the run of this file, and relay for its members.")
def command(as_json: bool, manifest_file: Path | None, **flags: Any) -> int:
    """Run a seed: a node whose address stands in seed lists. It introduces peers of any run and computes nothing.

    With --manifest it belongs to that run and forwards, end-to-end encrypted, for members behind routers; a node that is not of a run
    forwards no more than what two need to meet.

    \b
    Examples:
      plnode seed --listen 0.0.0.0:4000 --data seed-data
      plnode seed --listen 0.0.0.0:4000 --data relay --manifest run.signed --relay-rate 5MB
      plnode seed --listen 127.0.0.1:0 --scope host --data /tmp/seed --json

    Its address and id are in the first line that it prints; "ID@host:port" is an entry for a seed list. Without an id the
    entry trusts whoever answers at that address, which is enough: a seed only introduces.
    """
    settings = settings_from(flags)
    checked_seeds(settings)
    run = None if manifest_file is None else SignedManifest.load(manifest_file).run_id
    patience = patience_of(settings.stop_grace_s)
    if flags["exit_with_stdin"]:
        exit_with_stdin(patience)
    with lock_data_folder(settings.data_dir), opened_recorder(json=as_json, level=settings.log_level) as recorder:
        identity = Identity.load_or_create(settings.key_file)
        from plnode.node import run_seed

        return run_until_signal(
            lambda: run_seed(settings, identity, recorder, run),
            lambda reason: recorder.emit(NodeStopped(reason)),
            leaves=True,
            patience_s=patience,
        )
