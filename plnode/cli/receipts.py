"""`plnode receipts`: check logs of receipts, and compute points from them."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from plnode.exits import BadInput, ExitCode
from plnode.manifest import SignedManifest
from plnode.observe.lines import quantity

if TYPE_CHECKING:
    from plnode.swarm.points import Table
    from plnode.swarm.receiptcheck import Checked
    from plnode.swarm.receipts import Receipt

__all__ = ["command"]

_SHOWN = 20  # complaints in words; --json has up to a thousand of each kind
_POINTS = ("node", "microbatches", "tokens", "FLOPs", "by stage", "one-sided", "superseded", "disputed", "attested", "contradictions")
_LISTED = ("generation", "step", "stage", "kind", "worker", "signer", "microbatches", "tokens", "bytes", "seconds", "place")


@click.group("receipts")
def command() -> None:
    """Check logs of receipts: what neighbours signed about each other's work, and the points that follow from it.

    A node keeps its receipts in the folder `receipts` of its data folder.

    \b
    Examples:
      plnode receipts verify my-data --manifest run.signed
      plnode receipts show my-data
    """


@command.command("verify")
@click.argument("paths", metavar="PATH...", type=Path, nargs=-1, required=True)
@click.option("--manifest", metavar="FILE", type=Path, help="The signed run file: only its receipts count, and points are computed.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def verify(paths: tuple[Path, ...], manifest: Path | None, as_json: bool) -> int:
    """Verify every signature in the logs, and compute each node's points if the run file is given.

    PATH is a log file, a folder of them, or a node's data folder; give the logs of many nodes, and what both neighbours attest counts.
    Points are FLOPs: a microbatch's work at a stage counts once, when the neighbours before and after it have both signed for it. What
    is not believed is named with file and byte offset. An end that a crash left unfinished is told, and is no fault.

    \b
    Exit codes: 0 all in order, 2 wrong input, 9 something is forged, damaged or contradicts itself (the rest is still counted).
    \b
    Examples:
      plnode receipts verify my-data
      plnode receipts verify logs-of-others/*.log my-data --manifest run.signed
      plnode receipts verify logs/ --manifest run.signed --json | jq .points.nodes
    """
    signed = SignedManifest.load(manifest) if manifest is not None else None
    checked = _read(paths, signed.run_id if signed else None)
    foreign = sum(file.foreign for file in checked.files)
    if signed is not None and foreign and not checked.receipts:
        raise BadInput(f"no receipt is of run {signed.run_id.hex()}, {foreign} are of others", "Is this the run file of these logs?")
    table = None
    if signed is not None:
        from plnode.plan import receipt_terms
        from plnode.swarm.points import tally

        table = tally(checked.receipts, receipt_terms(signed.manifest))
    sound = checked.sound and (table is None or not table.counts)
    if as_json:
        click.echo(json.dumps(_document(checked, table, signed, sound)))
    else:
        for line in _report(checked, table):
            click.echo(line)
    return ExitCode.OK if sound else ExitCode.UNSOUND


@command.command("show")
@click.argument("paths", metavar="PATH...", type=Path, nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line, with every microbatch.")
def show(paths: tuple[Path, ...], as_json: bool) -> None:
    """List the receipts in the logs, oldest step first: who attested what to whom. Those that cannot be believed are left out.

    \b
    Examples:
      plnode receipts show my-data
      plnode receipts show my-data --json | jq 'select(.step == 12)'
    """
    checked = _read(paths, None)
    receipts = sorted(checked.receipts, key=lambda item: (item[0].generation, item[0].step, item[0].stage, item[0].kind, item[0].raw))
    if as_json:
        for receipt, place in receipts:
            click.echo(json.dumps(_one(receipt, place)))
    else:
        for line in _aligned([_LISTED, *(_row(receipt, place) for receipt, place in receipts)]):
            click.echo(line)
    if not checked.sound:
        click.echo(f"{_worse(checked)} left out; `plnode receipts verify` says where", err=True)


def _read(paths: tuple[Path, ...], run: bytes | None) -> Checked:
    from rich.console import Console
    from rich.progress import Progress

    from plnode.swarm.receiptcheck import check_logs, log_files
    from plnode.swarm.receiptlog import NotALog

    files: list[Path] = []
    for path in paths:
        found = log_files(path)
        if not found:
            raise BadInput(f"{path} holds no receipt log", "Name a log file, a folder of them, or a node's data folder.")
        files += [file for file in found if file not in files]
    try:
        size_bytes = sum(file.stat().st_size for file in files)
        # A large log takes minutes (0.1 ms a signature): whoever watches is told how far it is.
        with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
            task = bar.add_task("verifying", total=size_bytes)
            return check_logs(files, run=run, advanced=lambda more: bar.advance(task, more))
    except NotALog as wrong:
        raise BadInput(str(wrong), "Name a log file, a folder of them, or a node's data folder.") from None
    except OSError as problem:
        raise BadInput(f"cannot read {problem.filename}: {problem.strerror}", "Check the path.") from None


def _worse(checked: Checked) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(checked.counts.items()) if kind != "torn")


def _report(checked: Checked, table: Table | None) -> list[str]:
    lines = []
    for file in checked.files:
        extra = "".join(f", {count} {what}" for count, what in ((file.copies, "read before"), (file.foreign, "of other runs")) if count)
        lines.append(f"{file.path}: {file.envelopes} envelopes, {file.good} in order{extra}")
    problems = checked.problems[:_SHOWN]
    lines += [f"{p.file}: offset {p.offset}: {p.kind}: {p.what}" for p in problems]
    if more := checked.counts.total() - len(problems):
        lines.append(f"... and {more} more (--json)")
    entries = sum(len(receipt) for receipt, _ in checked.receipts)
    lines.append(f"{len(checked.receipts)} receipts in order, {entries} attested microbatches")
    if table is None:
        runs = sorted({receipt.run.hex() for receipt, _ in checked.receipts})
        lines += [f"run {run}" for run in runs]
        return [*lines, "points need the run file (--manifest)"]
    findings = table.findings[:_SHOWN]
    lines += [f"{f.kind}: {f.what}" + (f" ({', '.join(f.places)})" if f.places else "") for f in findings]
    if more := sum(table.counts.values()) - len(findings):
        lines.append(f"... and {more} more (--json)")
    rows: list[tuple[str, ...]] = [_POINTS]
    for peer, row in table.rows.items():
        by_stage = " ".join(f"{stage}:{quantity(tokens)}" for stage, tokens in sorted(row.tokens.items())) or "-"
        rest = (row.one_sided, row.superseded, row.disputed, row.attested, row.contradictions)
        figures = (str(row.microbatches), quantity(row.tokens.total()), quantity(row.flops), by_stage)
        rows.append((str(peer), *figures, *map(str, rest)))
    return [*lines, *_aligned(rows), f"{quantity(table.flops, 'FLOPs')} in all"]


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Columns as wide as they are: lines that a terminal may wrap and a pipe keeps."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _document(checked: Checked, table: Table | None, signed: SignedManifest | None, sound: bool) -> dict[str, Any]:
    points = None
    if table is not None and signed is not None:
        nodes = [
            {
                "peer_id": str(peer), "microbatches": row.microbatches, "flops": row.flops, "bytes": row.size_bytes,
                "tokens": {str(stage): tokens for stage, tokens in sorted(row.tokens.items())}, "one_sided": row.one_sided,
                "superseded": row.superseded, "disputed": row.disputed, "attested": row.attested, "contradictions": row.contradictions,
            }
            for peer, row in table.rows.items()
        ]  # fmt: skip
        findings = [{**dataclasses.asdict(f), "culprit": str(f.culprit) if f.culprit else None} for f in table.findings]
        points = {
            "run_id": signed.run_id.hex(), "flops": table.flops, "nodes": nodes, "findings": findings, "finding_counts": dict(table.counts)
        }  # fmt: skip
    return {
        "sound": sound,
        "files": [dataclasses.asdict(file) for file in checked.files],
        "receipts": len(checked.receipts),
        "attested_microbatches": sum(len(receipt) for receipt, _ in checked.receipts),
        "runs": sorted({receipt.run.hex() for receipt, _ in checked.receipts}),
        "problems": [dataclasses.asdict(problem) for problem in checked.problems],
        "problem_counts": dict(checked.counts),
        "points": points,
    }


def _one(receipt: Receipt, place: str) -> dict[str, Any]:
    return {
        "run_id": receipt.run.hex(), "generation": receipt.generation, "step": receipt.step, "stage": receipt.stage,
        "kind": receipt.kind.name.lower(), "worker": str(receipt.worker), "signer": str(receipt.signer), "number": receipt.seq,
        "place": place,
        "microbatches": [
            {"index": work.index, "tokens": work.tokens, "bytes": work.size_bytes, "seconds": work.seconds} for work in receipt.works()
        ],
    }  # fmt: skip


def _row(receipt: Receipt, place: str) -> tuple[str, ...]:
    tokens, size, us = (sum(column) for column in list(zip(*receipt.rows(), strict=True))[1:])
    return (
        str(receipt.generation), str(receipt.step), str(receipt.stage), receipt.kind.name.lower(), receipt.worker.short,
        receipt.signer.short, str(len(receipt)), str(tokens), str(size), f"{us / 1e6:.3f}", place,
    )  # fmt: skip
