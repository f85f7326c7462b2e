"""Reading and writing the small files that people name on the command line."""

from __future__ import annotations

import os
from pathlib import Path

from plnode.exits import BadInput

__all__ = ["read_file", "write_file"]


def read_file(path: Path) -> bytes:
    """Raises `BadInput`."""
    try:
        return path.read_bytes()
    except OSError as problem:
        raise BadInput(f"cannot read {path}: {problem.strerror}", "Check the path.") from None


def write_file(path: Path, data: bytes) -> None:
    """Whole or not at all: written beside and renamed.  Raises `BadInput`."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_bytes(data)
        scratch.replace(path)
    except OSError as problem:
        scratch.unlink(missing_ok=True)
        raise BadInput(f"cannot write {path}: {problem.strerror}", "Is the folder writable, and the disk not full?") from None
