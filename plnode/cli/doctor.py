"""`plnode doctor`: whether this machine can take part in a run, and as what.

The flags are those of `plnode join`, because the verdicts are about a node with just these settings.  Nothing is made: no folder, no
key; what a router was asked for (--portmap on) is taken back.  Where there is no key yet a fresh one is used, which nobody will hear
of again.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from plnode.cli.options import checked_seeds, node_options, settings_from
from plnode.cli.service import exit_with_stdin, run_until_signal
from plnode.exits import BadInput, ExitCode, Outcome
from plnode.manifest import SignedManifest
from plnode.settings import Settings
from wire.errors import Code
from wire.identity import Identity, KeyFileError, lock_data_folder

__all__ = ["command"]

_SPINNER = "|/-\\"


@click.command("doctor")
@click.option("--manifest", "manifest_file", required=True, metavar="FILE", type=Path, help="The signed run file.")
@click.option("--quick", is_flag=True, help="Measure no line to other members.")
@click.option(
    "--seconds",
    type=click.FloatRange(0.1, 15),
    default=3.0,
    show_default=True,
    help="Time for each direction of a line and number of lanes; a direction takes 15 s at most.",
)
@node_options(computes=True, json_help="All checks as one JSON object on stdout.")
def command(manifest_file: Path, quick: bool, seconds: float, as_json: bool, **flags: Any) -> int:
    """Tell whether this machine can take part in a run, and as what: a line for each check, with what to do about it.

    Give it the flags that `plnode join` will get. It connects to the seeds as the node would, has others dial this machine back, and
    measures the line to up to three members over 1 to 4 lanes; half a minute, up to two and a half with lines. If a node runs on the
    data folder already, it is asked instead. Nothing stays changed. --data is optional here: without it this folder is looked at.

    \b
    Examples:
      plnode doctor --seeds seeds.txt --manifest run.signed --data ~/plnode --listen 0.0.0.0:4001
      plnode doctor --seeds 192.0.2.7:4000 --manifest run.signed --quick
      plnode doctor --seeds seeds.txt --manifest run.signed --json | jq '.checks[] | select(.verdict == "bad")'

    Exit codes: 0 it can take part, 2 wrong input, 8 it cannot (the last line says why).
    """
    if flags.get("data") is None and not {"PLNODE_DATA", "PLNODE_SETTINGS"} & os.environ.keys() and flags["settings_file"] is None:
        flags["data"] = "."
    settings = settings_from(flags)
    if not settings.seeds:
        raise BadInput("a doctor's visit needs a seed list", "Give --seeds: host:port, a file of them or its URL (or PLNODE_SEEDS).")
    checked_seeds(settings)
    signed = SignedManifest.load(manifest_file)
    if flags["exit_with_stdin"]:
        exit_with_stdin()
    from plnode.doctor.checks import Check
    from plnode.doctor.examination import Visit  # torch: only once everything that the user gave is in order
    from plnode.doctor.report import Conclusion, document, lines
    from plnode.doctor.surroundings import told_by_node
    from wire.net import SeedList, SeedListError

    screen = _Screen(live=sys.stderr.isatty() and not as_json)

    def told(check: Check) -> None:
        screen.clear()
        if not as_json:
            click.echo("\n".join(lines(check)))
            sys.stdout.flush()

    visit = Visit(settings, signed, told, screen.turn)
    ended: list[tuple[list[Check], Conclusion]] = []
    with _folder(settings) as identity:
        if identity is None:
            ended.append(visit.beside(told_by_node(settings.data_dir, settings)))
            code = int(ExitCode.OK)
        else:
            try:
                seeds = SeedList.gather(settings.seeds, owner=signed.owner, run=signed.run_id)
            except SeedListError as problem:
                raise BadInput(f"the seed list cannot be used: {problem}", "Ask the owner of the run for the newest one.") from None

            async def program() -> Outcome:
                ended.append(await visit.alone(identity, seeds, 0.0 if quick else seconds))
                return Outcome(ExitCode.OK, "looked at")

            try:
                code = run_until_signal(program, lambda reason: None)
            finally:
                screen.clear()
    for checks, conclusion in ended:
        click.echo(json.dumps(document(checks, conclusion)) if as_json else f"\n{conclusion.text}")
        code = code or int(conclusion.exit_code)
    return code


@contextmanager
def _folder(settings: Settings) -> Iterator[Identity | None]:
    """The data folder for us alone: its identity, or a fresh one where there is none.  None if a node runs on it."""
    if not settings.key_file.exists():
        yield Identity.generate()
        return
    lock = lock_data_folder(settings.data_dir)
    try:
        lock.__enter__()
    except KeyFileError as busy:
        # A folder that cannot be written to is a finding, which the check of the disk words.
        yield None if busy.code is Code.DUPLICATE_IDENTITY else Identity.generate()
        return
    try:
        yield Identity.load(settings.key_file)
    finally:
        lock.__exit__(None, None, None)


class _Screen:
    """One line that shows that something happens, on a terminal only."""

    def __init__(self, live: bool) -> None:
        self._live = live
        self._turns = 0

    def turn(self, text: str) -> None:
        if self._live:
            self._turns += 1
            sys.stderr.write(f"\r\x1b[K{_SPINNER[self._turns % len(_SPINNER)]} {text[:100]}")
            sys.stderr.flush()

    def clear(self) -> None:
        if self._live:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
