"""`plnode run`: make, sign, plan and show a run manifest."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from plnode.cli.files import read_file, write_file
from plnode.exits import BadInput
from plnode.manifest import Manifest, SignedManifest, sign
from plnode.manifest_text import default_values, render, shipped_values
from plnode.observe.lines import quantity
from wire.identity import Identity

if TYPE_CHECKING:
    from plnode.plan import RunPlan

__all__ = ["assignment", "command"]

TOML_FILE, KEY_FILE, SIGNED_FILE = "run.toml", "owner.key", "run.signed"
_HEADINGS = (
    "stage", "layers", "parameters", "FLOPs/token", "weights", "gradients", "optimizer", "in flight", "buffers", "memory",
    "B/token on", "B/token back",
)  # fmt: skip
_ENVELOPE_FIRST_BYTE = 0x97  # msgpack: an array of seven (wire.md section 4); no TOML begins so


@click.group("run")
def command() -> None:
    """Make, sign, plan and show run manifests: the file that fixes what must be equal on every node.

    \b
    Examples:
      plnode run init --out my-run --set model.dim=256 --set stages.count=4
      plnode run plan my-run/run.toml
      plnode run sign my-run/run.toml
      plnode run show my-run/run.signed
    """


@command.command("init")
@click.option("--out", "folder", required=True, metavar="DIR", type=Path, help="Folder for the three files; made if absent.")
@click.option("--name", metavar="NAME", help="What people call the run.")
@click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="Start with another value, e.g. model.dim=256.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def init(folder: Path, name: str | None, changes: tuple[str, ...], as_json: bool) -> None:
    """Write a commented run.toml, the owner's key (mode 0600) and the signed run file into DIR.

    Edit run.toml, then sign it again with `plnode run sign`: every change makes another run. The signed file is what contributors
    need; the key is yours alone.

    \b
    Examples:
      plnode run init --out my-run
      plnode run init --out my-run --name "small bible" --set model.layers=8 --set "stages.split=[3, 3, 2]" --set stages.count=3
    """
    given = dict(assignment(text) for text in changes)
    if name is not None:
        given["name"] = name
    toml = render(default_values({**shipped_values(), **given})).encode()
    Manifest.parse(toml)  # refused before anything is written
    paths = [folder / part for part in (TOML_FILE, KEY_FILE, SIGNED_FILE)]
    for path in paths:
        if path.exists():
            raise BadInput(f"{path} is there already", "Choose another folder: a run's key and manifest are never overwritten.")
    owner = Identity.load_or_create(folder / KEY_FILE)
    signed = sign(owner, toml)
    write_file(folder / TOML_FILE, toml)
    write_file(folder / SIGNED_FILE, signed)
    _report_run(SignedManifest.open(signed), [str(p) for p in paths], as_json)


@command.command("sign")
@click.argument("toml_file", metavar="RUN.TOML", type=Path)
@click.option("--key", metavar="FILE", type=Path, help="The owner's key (default: owner.key beside the manifest).")
@click.option("--out", metavar="FILE", type=Path, help="The signed file (default: run.signed beside the manifest).")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def sign_command(toml_file: Path, key: Path | None, out: Path | None, as_json: bool) -> None:
    """Check a manifest and sign it with the owner's key.

    \b
    Example:
      plnode run sign my-run/run.toml
    """
    toml = read_file(toml_file)
    Manifest.parse(toml)  # a bad manifest is refused before the key is looked for
    signed = sign(Identity.load(key or toml_file.parent / KEY_FILE), toml)
    target = out or toml_file.parent / SIGNED_FILE
    write_file(target, signed)
    _report_run(SignedManifest.open(signed), [str(target)], as_json)


@command.command("show")
@click.argument("signed_file", metavar="RUN.SIGNED", type=Path)
@click.option("--json", "as_json", is_flag=True, help="The content and the signature's facts as one JSON object.")
def show(signed_file: Path, as_json: bool) -> None:
    """Show a signed run file: its run id, its owner, and the manifest as it was signed.

    \b
    Example:
      plnode run show run.signed
    """
    signed = SignedManifest.load(signed_file)
    if as_json:
        content = tomllib.loads(signed.toml.decode())
        click.echo(json.dumps({"run_id": signed.run_id.hex(), "owner": str(signed.owner), "manifest": content}))
        return
    click.echo(f"# run {signed.run_id.hex()}\n# owner {signed.owner}\n")
    click.echo(signed.toml.decode(), nl=False)


@command.command("plan")
@click.argument("file", metavar="RUN.TOML|RUN.SIGNED", type=Path)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def plan(file: Path, as_json: bool) -> None:
    """Show what each stage costs: layers, parameters, FLOPs a token, memory, and bytes a token over each boundary.

    \b
    Examples:
      plnode run plan my-run/run.toml
      plnode run plan run.signed --json | jq .stages[0].memory_bytes
    """
    from plnode.plan import plan_run

    raw = read_file(file)
    is_signed = raw[:1] == bytes([_ENVELOPE_FIRST_BYTE])
    manifest = SignedManifest.open(raw, source=str(file)).manifest if is_signed else Manifest.parse(raw)
    result = plan_run(manifest)
    if as_json:
        click.echo(json.dumps(result.to_json()))
        return
    click.echo(f"{manifest.name}: {manifest.stages.count} stages x {manifest.stages.replicas} replicas")
    for line in _table(result):
        click.echo(line)
    click.echo(
        f"{quantity(result.parameters)} parameters in all; the busiest stage does {result.imbalance:.2f} x the mean; "
        f"at most {result.in_flight} microbatches under way from one origin"
    )


def _table(plan: RunPlan) -> list[str]:
    """Aligned columns, as wide as they are: lines that a terminal may wrap and a pipe keeps."""
    rows: list[tuple[str, ...]] = [_HEADINGS]
    for stage in plan.stages:
        parts = ["embed"] * stage.embed + [f"{stage.first_layer}-{stage.end_layer - 1}"] + ["head"] * stage.head
        memory = (stage.weights_bytes, stage.gradients_bytes, stage.optimizer_bytes, stage.activation_bytes, stage.buffers_bytes)
        crossing = (stage.forward_bytes_per_token, stage.backward_bytes_per_token)
        rows.append(
            (
                str(stage.stage),
                "+".join(parts),
                quantity(stage.parameters),
                quantity(stage.flops_per_token),
                *(quantity(b, "B") for b in (*memory, stage.memory_bytes)),
                *("-" if b is None else f"{b:.0f}" for b in crossing),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADINGS))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def assignment(text: str) -> tuple[str, Any]:
    """`model.dim=256` -> ("model.dim", 256).  The value is TOML; what is none is a text whose quotes were left out."""
    path, equals, value = text.partition("=")
    if not equals or not path:
        raise BadInput(f'--set expects KEY=VALUE, got "{text}"', "For example: --set model.dim=256")
    try:
        return path.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return path.strip(), value.strip()


def _report_run(signed: SignedManifest, files: list[str], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"run_id": signed.run_id.hex(), "owner": str(signed.owner), "files": files}))
        return
    click.echo(f'run {signed.run_id.hex()} "{signed.manifest.name}", owner {signed.owner}')
    for file in files:
        click.echo(f"  wrote {file}")
