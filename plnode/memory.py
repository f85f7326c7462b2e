"""What a stage may use of this machine's memory, and the refusal when no stage of the run fits into it.

The machine's free memory is not the process's.  In a container the cgroup's limit counts, and whoever passes it is killed with
SIGKILL: no exception, no last line, exit code 137 (Linux' memory controller; `docker inspect` says OOMKilled).  So a node that
cannot fit says so before it opens the network or allocates anything, with what would fit (MEM-2), and of the limit a part is
set aside that no plan of a stage counts:

* what the process holds already: the interpreter and torch, 170 MiB of anonymous memory (measured with torch 2.13, CPU).
* what the wire may have promised to peers and not read: a quarter of the limit, at most 2 GiB (`wire/budget.py`).
* `HEADROOM_BYTES`: the health check is a second interpreter in the same cgroup (50 MiB while it runs), and the allocator's slack.

Without a limit the system's own figure of what is available is taken, as before: there memory that runs short is swapped or
taken from caches, and no one knows what else the machine's owner will start.  A figure that the owner gives (`--memory`) is his
word in every case; if the limit is below it, he is told.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from wire.budget import unread_total
from wire.limits import DEFAULT_LIMITS
from wire.net.memory import CGROUP_FILES, lower_limit

__all__ = ["PROCESS_LEAST_BYTES", "Room", "room_for_stage", "system_limit"]

HEADROOM_BYTES = 64 << 20
PROCESS_LEAST_BYTES = 256 << 20
"""Interpreter, torch and headroom: with less the process is killed while it starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a stage may use, and how that came about.  All in bytes."""

    stage_bytes: int
    limit_bytes: int | None
    """The container's limit; None without one below the machine's memory."""
    set_aside_bytes: int
    """Of the limit: what the process, the wire and the headroom take; 0 without a limit."""
    asked_bytes: int | None
    """What the owner gave."""

    def refusal(self, needs: Iterable[int]) -> str | None:
        """Why no stage of those that need `needs` bytes fits, and what would help; None if one does."""
        least = min(needs)
        if least <= self.stage_bytes:
            return None
        what = f"the smallest stage of this run needs {_mib(least)} and this node has {_mib(max(self.stage_bytes, 0))} for it"
        if self.asked_bytes is not None:
            return f"{what}: allow it more (--memory or PLNODE_MEMORY), at least {_mib(least)}"
        if self.limit_bytes is None:
            return f"{what}: free some memory, or take part on another machine"
        return (
            f"{what}: of the container's limit of {_mib(self.limit_bytes)}, {_mib(self.set_aside_bytes)} are the program's own and the "
            f"network's; a limit of {_mib(self._sufficient(least))} would do (docker run --memory, or memory: in the compose file)"
        )

    def warning(self) -> str | None:
        """What the owner should know of a figure of his that the limit does not bear (MEM-3)."""
        if self.asked_bytes is None or self.limit_bytes is None or self.asked_bytes <= self.limit_bytes - self.set_aside_bytes:
            return None
        return (
            f"memory for the stage is set to {_mib(self.asked_bytes)}, but of the container's limit of {_mib(self.limit_bytes)} "
            f"only {_mib(max(self.limit_bytes - self.set_aside_bytes, 0))} are left for it: beyond that the system kills this node "
            "(exit code 137)"
        )

    def _sufficient(self, stage_bytes: int) -> int:
        """A limit of which `stage_bytes` are left: the wire's share grows with it."""
        assert self.limit_bytes is not None
        fixed = self.set_aside_bytes - unread_total(self.limit_bytes, DEFAULT_LIMITS) + stage_bytes
        return min(fixed * 4 // 3 + 1, fixed + DEFAULT_LIMITS.unread_budget_bytes)


def system_limit(files: Sequence[Path] = CGROUP_FILES) -> int | None:
    """The limit that the system puts on this process's container, in bytes; None if the machine's memory is the limit."""
    total = psutil.virtual_memory().total
    limit = lower_limit(total, files)
    return limit if limit < total else None


def room_for_stage(asked_bytes: int | None, *, limit_bytes: int | None, held_bytes: int | None = None) -> Room:
    """What a stage may use.  `held_bytes`: what this process holds already; None: looked up."""
    set_aside = 0
    if limit_bytes is not None:
        held = _anonymous_bytes() if held_bytes is None else held_bytes
        set_aside = held + HEADROOM_BYTES + unread_total(limit_bytes, DEFAULT_LIMITS)
    available = psutil.virtual_memory().available
    free = available if limit_bytes is None else min(available, limit_bytes - set_aside)
    return Room(
        stage_bytes=free if asked_bytes is None else asked_bytes,
        limit_bytes=limit_bytes, set_aside_bytes=set_aside, asked_bytes=asked_bytes,
    )  # fmt: skip


def _anonymous_bytes() -> int:
    """Resident memory that is no file's: the system can drop the pages of files instead of killing for them."""
    memory = psutil.Process().memory_info()
    return int(memory.rss - getattr(memory, "shared", 0))


def _mib(size_bytes: int) -> str:
    return f"{-(-size_bytes // (1 << 20)):,} MiB"
