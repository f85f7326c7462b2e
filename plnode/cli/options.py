"""Flags that several commands share, and their way into `Settings`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from plnode.exits import BadInput
from plnode.settings import Settings, load_settings

__all__ = ["checked_seeds", "node_options", "settings_from"]

F = TypeVar("F", bound=Callable[..., Any])

_KEYS = (
    "name", "data", "listen", "seeds", "scope", "announce", "relay", "relay_rate", "portmap", "device", "threads", "memory", "stop_grace",
    "log_level",
)  # fmt: skip


def node_options(*, computes: bool, json_help: str = "Events as JSON lines on stdout.") -> Callable[[F], F]:
    """The flags of a node.  A seed does not compute and has no device."""
    options = [
        click.option("--data", metavar="DIR", help="Folder for this node's key, peer book and snapshots; one node at a time."),
        click.option("--listen", metavar="ADDR", help="Addresses to listen on: host:port or /ip4/A/tcp/P, separated by commas."),
        click.option("--seeds", metavar="WHERE", help="Seeds: host:port or ID@host:port, files and http(s) URLs of them, by commas."),
        click.option("--scope", type=click.Choice(["internet", "lan", "host"]), help="How far this node's addresses reach."),
        click.option("--announce", metavar="ADDR", help="Addresses to tell others: for a router that forwards another port to this one."),
        click.option("--relay", type=click.Choice(["on", "off"]), help="Forward for nodes that cannot be dialled (default: on)."),
        click.option("--relay-rate", metavar="SIZE", help="Bytes a second for that (default: a quarter of the line)."),
        click.option("--portmap", type=click.Choice(["off", "on"]), help="Ask the router to forward this node's ports (default: off)."),
        click.option("--name", metavar="NAME", help="Name shown to others (default: the host's)."),
        *_compute_options(computes),
        click.option("--stop-grace", type=click.IntRange(2, 600), metavar="SECONDS", help="How long a stop waits for it (default: 10)."),
        click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), help="What stderr shows."),
        click.option("--settings", "settings_file", type=click.Path(path_type=Path), help="Settings file (TOML, same keys)."),
        click.option("--json", "as_json", is_flag=True, help=json_help),
        click.option("--exit-with-stdin", is_flag=True, help="End when stdin is closed: for programs that start nodes."),
    ]

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def _compute_options(computes: bool) -> list[Callable[[Any], Any]]:
    if not computes:
        return []
    return [
        click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Where the stage computes (default: cpu)."),
        click.option("--threads", type=click.IntRange(1, 1024), metavar="N", help="Threads of the CPU device (default: 1)."),
        click.option("--memory", metavar="SIZE", help='Memory for the stage, e.g. "6GiB" (default: what is free).'),
    ]


def settings_from(flags: dict[str, Any], *, default_listen: str = "0.0.0.0:0") -> Settings:
    """`Settings` of a command's flags, the environment and the settings file.  Raises `BadInput`."""
    given = {key: flags[key] for key in _KEYS if flags.get(key) is not None}
    return load_settings(given, os.environ, file=flags.get("settings_file"), default_listen=default_listen)


def checked_seeds(settings: Settings) -> None:
    """Reads the seed lists once before anything starts: a wrong line is the user's to mend.  Raises `BadInput`."""
    from wire.net.seedlist import SeedList, SeedListError

    if not settings.seeds:
        return
    try:
        SeedList.gather(settings.seeds)
    except SeedListError as problem:
        raise BadInput(f"the seed list cannot be used: {problem}", "One entry a line: host:port or ID@host:port.") from None
