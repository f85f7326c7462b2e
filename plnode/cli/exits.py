"""`plnode exits`: what an exit code means."""

from __future__ import annotations

import click

from plnode.exits import FOREIGN, MEANINGS, explain

__all__ = ["command"]


@click.command("exits")
@click.argument("codes", nargs=-1, type=click.IntRange(0, 255), metavar="[CODE]...")
def command(codes: tuple[int, ...]) -> None:
    """Explain exit codes, and whether it helps to start the program again; without CODE, all of them.

    \b
    Examples:
      plnode exits
      plnode exits 6
      docker run --rm plnode exits "$(docker inspect -f '{{.State.ExitCode}}' my-node)"
    """
    for code in codes or sorted([*MEANINGS, *FOREIGN]):
        click.echo(explain(code))
