"""What a contestant is told by whoever starts it, beside its role: through the environment, so that no file needs options of its own.

`BENCH_LISTEN`: the address a server binds and a client is told (loopback).  `BENCH_CONGESTION`: the congestion control of every
socket that can be reached (cubic, for the reason given in `sockets.py`).  `BENCH_LANES`: how many bulk connections a pair of our
nodes may have, 0 for one connection that carries everything; unset for the node's own choice.
"""

from __future__ import annotations

import os
from dataclasses import fields, replace

from wire.limits import DEFAULT_LIMITS, Limits

__all__ = ["LANES_FIELD", "congestion", "environment", "lanes_known", "limits", "listen_host"]

LANES_FIELD = "lanes_max"


def listen_host() -> str:
    """The IPv4 address that servers bind."""
    return os.environ.get("BENCH_LISTEN", "127.0.0.1")


def congestion() -> str:
    """The congestion control by its name in the kernel."""
    return os.environ.get("BENCH_CONGESTION", "cubic")


def lanes_known() -> bool:
    """Whether this version of our protocol has lanes at all."""
    return any(field.name == LANES_FIELD for field in fields(Limits))


def limits() -> Limits:
    """The node's limits, with the number of lanes that was asked for.  Without lanes there is nothing to choose."""
    wanted = os.environ.get("BENCH_LANES", "")
    return replace(DEFAULT_LIMITS, **{LANES_FIELD: int(wanted)}) if wanted and lanes_known() else DEFAULT_LIMITS


def environment(listen: str, congestion: str, lanes: int | None) -> list[str]:
    """The front of a command line that sets all of this for the command behind it."""
    chosen = [] if lanes is None else [f"BENCH_LANES={lanes}"]
    return ["env", f"BENCH_LISTEN={listen}", f"BENCH_CONGESTION={congestion}", *chosen]
