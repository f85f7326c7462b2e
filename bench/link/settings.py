"""What a contestant is told by whoever starts it, beside its role: through the environment, so that no file needs options of its own.

`BENCH_LISTEN`: the address a server binds and a client is told (loopback).  `BENCH_CONGESTION`: the congestion control of every
socket that can be reached (cubic, for the reason given in `sockets.py`).  `BENCH_LANES`: how many bulk connections a pair of our
nodes has from the start, 0 for one connection that carries everything; unset for the node's own choice, which needs half a minute.
`BENCH_DTYPE`: what our tensors hold.  uint8 (zeros), which no node packs, for what the line carries; bf16, Gaussian, for what packing
adds to it.
"""

from __future__ import annotations

import os
from dataclasses import replace

from wire.limits import DEFAULT_LIMITS, Limits
from wire.tensor import DType

__all__ = ["congestion", "dtype", "environment", "limits", "listen_host"]


def listen_host() -> str:
    """The IPv4 address that servers bind."""
    return os.environ.get("BENCH_LISTEN", "127.0.0.1")


def congestion() -> str:
    """The congestion control by its name in the kernel."""
    return os.environ.get("BENCH_CONGESTION", "cubic")


def limits() -> Limits:
    """The node's limits, with the number of lanes that was asked for."""
    wanted = os.environ.get("BENCH_LANES", "")
    if not wanted:
        return DEFAULT_LIMITS
    lanes, start = int(wanted), max(1, int(wanted))  # how many there may be cuts off what there are to be at the start
    return replace(DEFAULT_LIMITS, lanes_max=lanes, lanes_start=start, lanes_start_bbr=start)


def dtype() -> DType:
    """The element type of tensors."""
    return DType[os.environ.get("BENCH_DTYPE", "uint8")]


def environment(listen: str, congestion: str, lanes: int | None, dtype: DType = DType.uint8) -> list[str]:
    """The front of a command line that sets all of this for the command behind it."""
    chosen = [] if lanes is None else [f"BENCH_LANES={lanes}"]
    return ["env", f"BENCH_LISTEN={listen}", f"BENCH_CONGESTION={congestion}", f"BENCH_DTYPE={dtype.name}", *chosen]
