"""The machine and the software a figure was taken with.  What cannot be found out is left out, not guessed.

The load is that of the minute before the bench began: it says who else was at work.  (The bench's own load would drown it.)
"""

from __future__ import annotations

import os
import platform
import ssl
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["conditions", "installed", "usable_cores"]


def usable_cores() -> tuple[int, ...]:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def installed(distribution: str) -> str | None:
    """Its version, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def conditions(packages: Iterable[str]) -> dict[str, Any]:
    """What every bench states; `packages` are distributions whose versions matter."""
    found: dict[str, Any] = {
        "command": " ".join(["python -m bench", *sys.argv[1:]]),
        "cpu": _cpu(),
        "cores": len(usable_cores()),
        "kernel": platform.release(),
        "load_before": round(os.getloadavg()[0], 2),
        "congestion_default": _read("/proc/sys/net/ipv4/tcp_congestion_control"),
    }
    versions = {"python": platform.python_version(), "openssl": ssl.OPENSSL_VERSION.split()[1]}
    versions |= {name: version for name in packages if (version := installed(name)) is not None}
    return {key: value for key, value in found.items() if value is not None} | {"versions": versions}


def _cpu() -> str:
    for line in (_read("/proc/cpuinfo") or "").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None
