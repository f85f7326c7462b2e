"""What the next start says about a process that ended without a word.

SIGKILL, the out-of-memory killer and a power failure leave no last line, and whoever looks at the log sees a node that works and
then nothing.  So a node that runs keeps a small file in its data folder: how much memory it may use and what its stage was
planned with.  It is removed when the node stops with a word, be it a refusal or a traceback.  The data folder belongs to one process at a
time, hence a file that is found at the start was left by a process that is dead, and the node tells what is known of it (MEM-3).

The file is a courtesy: if it cannot be written or read, the node works as well, and whatever stands in it is only shown.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from plnode.observe import events as e
from plnode.observe.lines import quantity

__all__ = ["LastWord"]

FILE_MAX_BYTES = 4096  # it has three numbers


class LastWord:
    """A sink of the recorder.  `left_behind()` first, then `begin()`."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "running.json"
        self._known: dict[str, int] = {}

    def left_behind(self) -> str | None:
        """What to tell of a process that ended without a word; None if the last one said goodbye, or there was none."""
        try:
            with self._file.open("rb") as stream:
                known = json.loads(stream.read(FILE_MAX_BYTES))
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            known = {}
        told = known if isinstance(known, dict) else {}
        parts = ["this node's last process ended without a word: it was killed, or the machine went down"]
        if (plan := _number(told, "plan_bytes")) is not None:
            parts.append(f"its stage was planned with {quantity(plan, 'B')}")
        if (limit := _number(told, "limit_bytes")) is not None:
            parts.append(
                f"the container's memory limit was {quantity(limit, 'B')} (if `docker inspect` says OOMKilled, it was the cause: raise it)"
            )
        return "; ".join(parts)

    def begin(self, *, limit_bytes: int | None) -> None:
        """From now on a process that ends without a word leaves the file behind."""
        self._known = {} if limit_bytes is None else {"limit_bytes": limit_bytes}
        self._write()

    def take(self, event: e.Event, time_unix: float) -> None:
        match event:
            case e.StageAssigned():
                self._known["plan_bytes"] = event.memory_bytes
                self._write()
            case e.NodeStopped():
                with suppress(OSError):
                    self._file.unlink(missing_ok=True)

    def _write(self) -> None:
        with suppress(OSError):  # a full disk: the snapshots will say so
            self._file.write_text(json.dumps(self._known))


def _number(known: dict[str, Any], key: str) -> int | None:
    value = known.get(key)
    return value if type(value) is int and 0 <= value < 1 << 62 else None
