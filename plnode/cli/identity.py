"""`plnode identity`: who this node is."""

from __future__ import annotations

import json
from pathlib import Path

import click

from wire.identity import Identity

__all__ = ["command"]


@click.command("identity")
@click.option("--data", metavar="DIR", required=True, envvar="PLNODE_DATA", type=Path, help="The node's folder.")
@click.option("--create", is_flag=True, help="Make one if there is none.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def command(data: Path, create: bool, as_json: bool) -> None:
    """Show the id of the node that keeps its data in DIR, and where its key is. The key itself is never shown.

    \b
    Examples:
      plnode identity --data ~/plnode
      plnode identity --data ~/plnode --create
    """
    path = data.absolute() / "identity.key"
    identity = Identity.load_or_create(path) if create else Identity.load(path)
    if as_json:
        click.echo(json.dumps({"peer_id": str(identity.peer_id), "key_file": str(path)}))
    else:
        click.echo(f"{identity.peer_id}\nkey: {path}")
