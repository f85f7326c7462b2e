"""How much memory this process may use, as far as the system says.

The machine's memory is not the process's: a container with 2 GiB on a machine of 512 is killed by its cgroup long before the
machine is full.  So the cgroup's limit counts if it is lower.  Looked at are the files of the process's own cgroup, version 2
(`memory.max`, Linux' admin-guide/cgroup-v2) and version 1 (`memory.limit_in_bytes`), where a container sees them: at the root of
its cgroup mount.  "max", a number as large as an address space, or no file at all mean no limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from wire.budget import UnreadBudget, unread_total
from wire.limits import Limits

CGROUP_FILES = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def lower_limit(ram_bytes: int, files: Sequence[Path] = CGROUP_FILES) -> int:
    """The machine's memory or the lowest limit that one of `files` names, in bytes."""
    for file in files:
        try:
            text = file.read_text("ascii").strip()
        except (OSError, UnicodeDecodeError):
            continue
        if text.isdigit() and int(text) > 0:
            ram_bytes = min(ram_bytes, int(text))
    return ram_bytes


def process_budget(limits: Limits) -> UnreadBudget:
    """The budget of unread bytes for this machine or container."""
    import psutil  # here, as in transport.py: a simulated net needs neither

    return UnreadBudget(unread_total(lower_limit(psutil.virtual_memory().total), limits))
