"""`plnode seeds`: check and sign seed lists."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click

from plnode.cli.files import read_file, write_file
from plnode.exits import BadInput
from plnode.manifest import SignedManifest
from wire.errors import LocalProtocolError
from wire.identity import Identity

__all__ = ["command"]


@click.group("seeds")
def command() -> None:
    """Check and sign seed lists: the file that says where a swarm is found.

    \b
    Examples:
      plnode seeds sign seeds.txt --manifest my-run/run.signed --key my-run/owner.key --out seeds.signed
      plnode seeds show seeds.signed
    """


@command.command("sign")
@click.argument("file", metavar="SEEDS.TXT", type=Path)
@click.option("--manifest", required=True, metavar="FILE", type=Path, help="The signed run file: a list is for one run.")
@click.option("--key", metavar="FILE", type=Path, help="The owner's key (default: owner.key beside the manifest).")
@click.option("--days", type=click.IntRange(1, 90), default=90, show_default=True, help="How long the list may be used.")
@click.option("--out", metavar="FILE", type=Path, help="The signed list (default: seeds.signed beside SEEDS.TXT).")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def sign_command(file: Path, manifest: Path, key: Path | None, days: int, out: Path | None, as_json: bool) -> None:
    """Sign a seed list with the key of the run's owner.

    Give the signed file to a seed (`plnode seed --seeds seeds.signed`), or put it on a web server: every node of the run asks
    its seeds for the newest one, so that contributors need no new file when the seeds move. A later list replaces an earlier one.

    \b
    Example:
      plnode seeds sign seeds.txt --manifest my-run/run.signed --key my-run/owner.key --out seeds.signed
    """
    from wire.net.seedlist import SeedListError
    from wire.net.signedseeds import open_seed_list, seal_seed_list

    run = SignedManifest.load(manifest)
    owner = Identity.load(key or manifest.parent / "owner.key")
    if owner.peer_id != run.owner:
        raise BadInput(f"this key is not that of the run's owner {run.owner}", "Name the owner's key with --key.")
    now = time.time()
    try:
        text = read_file(file).decode()
        data = seal_seed_list(owner, text, run=run.run_id, seq=int(now * 1000), now_unix=now, life_s=days * 86400)
    except (SeedListError, UnicodeDecodeError, LocalProtocolError) as problem:
        raise BadInput(f"{file} is no seed list: {problem}", "One entry a line: host:port or ID@host:port.") from None
    target = out or file.parent / "seeds.signed"
    write_file(target, data)
    count = len(open_seed_list(data, owner=run.owner, run=run.run_id, now_unix=now).entries)
    if as_json:
        click.echo(json.dumps({"run_id": run.run_id.hex(), "owner": str(run.owner), "seeds": count, "files": [str(target)]}))
    else:
        click.echo(f"{count} seeds of run {run.run_id.hex()}, signed by its owner for {days} days\n  wrote {target}")


@command.command("show")
@click.argument("file", metavar="SEEDS", type=Path)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def show(file: Path, as_json: bool) -> None:
    """Check a plain or signed list and show its entries.

    \b
    Example:
      plnode seeds show seeds.signed
    """
    from wire.envelope import BadEnvelope
    from wire.net.seedlist import SeedList, SeedListError
    from wire.net.signedseeds import ENVELOPE_FIRST_BYTE, open_seed_list

    raw, facts = read_file(file), {}
    try:
        if raw[:1] == bytes([ENVELOPE_FIRST_BYTE]):
            signed = open_seed_list(raw, owner=None, run=None, now_unix=time.time())
            statement, entries = signed.statement, signed.entries
            facts = {"run_id": statement.run.hex(), "owner": str(statement.signer), "number": statement.seq, "until": statement.not_after}
        else:
            entries = SeedList.read(file).entries
    except (SeedListError, BadEnvelope) as problem:
        raise BadInput(f"{file} is no seed list in order: {problem}", "One entry a line: host:port or ID@host:port.") from None
    if as_json:
        click.echo(json.dumps({**facts, "seeds": [str(entry) for entry in entries]}))
        return
    for name, value in facts.items():
        click.echo(f"# {name} {value}")
    for entry in entries:
        click.echo(str(entry))
