"""Snapshots of a stage on disk: never half-written, never taken on trust.

    DATA/snapshots/<step>/stage-<s>.safetensors     weights under their global names, optimizer tensors as optimizer.<name>
    DATA/snapshots/<step>/stage-<s>.root            a signed statement (envelope domain plw/snapshot/1) about that file

A snapshot is what a stage comes back from when all its holders were lost, so a bad one must be noticed when it is read and must
not have replaced a good one when it was written:

* *Cut off* (power, full disk): both files are written into a hidden folder beside the target, synced, and the folder is renamed;
  what is visible is whole.  A write that fails leaves no trace and the older snapshots as they were.
* *Changed later* (a failing disk, a hand): the root covers every byte.  Root = SHA-256 over the SHA-256 of each chunk of 1 MiB,
  so that another node can fetch and check the file chunk by chunk against the same signature.
* *Someone else's*: run, stage and step stand in the signed statement; a file of another run or stage is refused by name.  One
  data folder serves one run: a snapshot of another run is neither removed nor written over.
* *The disk fills up*: the newest ``keep`` of a stage stay.  The new one is complete before an old one goes, so the disk needs
  room for ``keep + 1``.

The tensors are safetensors: a parser that reads only sizes and offsets, no code.  What signs and what checks a signature are
passed in; ``snapshots.py`` passes a node's identity.  All functions block on the disk; call them through ``trio.to_thread``.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from wire.errors import WireError
from wire.identity import sync_folder
from wire.messages import Range, Size, decode, encode, message

from .errors import SnapshotError

# Also the unit in which another node would fetch the file (training.md, section 6: chunks of 1..4 MiB).
CHUNK_BYTES = 1 << 20
ROOT_DOMAIN = "plw/snapshot/1"
# An envelope around the 100 bytes of a SnapshotRoot; a longer file is not one.
ROOT_FILE_MAX_BYTES = 4096
_WEIGHTS = re.compile(r"stage-(\d{1,9})\.safetensors")
_STEP = re.compile(r"\d{1,18}")


@message(96)
@dataclass(frozen=True, slots=True)
class SnapshotRoot:
    """What a replica signs about a snapshot."""

    run: Annotated[bytes, Size(32)]
    stage: Annotated[int, Range(0, 2**32 - 1)]
    step: Annotated[int, Range(0, 2**63 - 1)]
    generation: Annotated[int, Range(0, 2**63 - 1)]
    size_bytes: Annotated[int, Range(1, 2**63 - 1)]  # of the safetensors file
    chunk_bytes: Annotated[int, Range(1, 2**32 - 1)]
    root: Annotated[bytes, Size(32)]


@dataclass(frozen=True, slots=True)
class Stored:
    """A snapshot that is there, not yet verified."""

    step: int
    stage: int
    path: Path  # of the safetensors file
    root_path: Path
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """A verified snapshot."""

    statement: SnapshotRoot
    tensors: dict[str, Tensor]
    path: Path
    size_bytes: int


def hash_file(path: Path, chunk_bytes: int = CHUNK_BYTES) -> tuple[int, bytes]:
    """(size in bytes, root) of a file: SHA-256 over the concatenated SHA-256 of its chunks.  Reads it once, in chunks."""
    size, root = 0, hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(chunk_bytes):
            root.update(hashlib.sha256(chunk).digest())
            size += len(chunk)
    return size, root.digest()


def write_snapshot(
    folder: Path,
    tensors: Mapping[str, Tensor],
    seal: Callable[[bytes], bytes],
    *,
    run: bytes,
    stage: int,
    step: int,
    generation: int,
    keep: int = 2,
    protect: int = 0,
) -> Stored:
    """Write a snapshot into ``folder`` (DATA/snapshots) and remove all but the newest ``keep`` of this stage and
    the one of step ``protect``.

    ``tensors``: contiguous, on the host, as ``StageRunner.snapshot`` gives them.  ``seal`` makes a signed envelope of domain
    plw/snapshot/1 from the encoded statement.  Replaces a snapshot of the same stage and step.  Raises SnapshotError if the disk
    refuses; then what was there before is unchanged.
    """
    if keep < 1:
        raise SnapshotError(f"at least 1 snapshot is kept, not {keep}")
    target = folder / str(step)
    names = (f"stage-{stage}.safetensors", f"stage-{stage}.root")
    if (owner := _run_of(target / names[0])) not in (None, run.hex()):
        raise SnapshotError(f"{target / names[0]}: belongs to run {owner[:16]}; give each run its own data folder")
    partial = folder / f".{step}-{stage}.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)  # of a write that was cut off
        partial.mkdir()
        metadata = {"run": run.hex(), "stage": str(stage), "step": str(step), "generation": str(generation)}
        save_file(dict(tensors), partial / names[0], metadata)
        # The hash is of what the file holds, not of what was meant to be written.
        size, root = hash_file(partial / names[0])
        statement = SnapshotRoot(run, stage, step, generation, size, CHUNK_BYTES, root)
        (partial / names[1]).write_bytes(seal(encode(statement)))
        for name in names:
            _sync_file(partial / name)
        _put_in_place(partial, target, names)
    except (OSError, SafetensorError) as error:
        raise SnapshotError(f"{target / names[0]}: the snapshot could not be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    ours = [s for s in list_snapshots(folder) if s.stage == stage and s.step <= step and _run_of(s.path) in (None, run.hex())]
    for old in ours[:-keep]:
        if old.step != protect:
            _remove(old)
    return Stored(step, stage, target / names[0], target / names[1], size)


def list_snapshots(folder: Path) -> tuple[Stored, ...]:
    """The complete pairs of files in ``folder``, ascending by (step, stage).  Not verified; other files are ignored."""
    return tuple(sorted(_find(folder), key=lambda stored: (stored.step, stored.stage)))


def load_snapshot(stored: Stored, open_root: Callable[[bytes], bytes], *, run: bytes, stage: int) -> Loaded:
    """Verify and read a snapshot.

    ``open_root`` checks an envelope of domain plw/snapshot/1 (signature, signer, run) and returns its payload, or raises a
    WireError.  Raises SnapshotError naming the file that is truncated, changed, or of another run, stage or step.
    """
    try:
        if stored.root_path.stat().st_size > ROOT_FILE_MAX_BYTES:
            raise SnapshotError(f"{stored.root_path}: longer than a signed root can be")
        statement = decode(open_root(stored.root_path.read_bytes()), SnapshotRoot)
    except WireError as error:
        raise SnapshotError(f"{stored.root_path}: not a valid signed root: {error}") from error
    except OSError as error:
        raise SnapshotError(f"{stored.root_path}: cannot be read: {error}") from error
    if statement.run != run:
        raise SnapshotError(f"{stored.root_path}: of run {statement.run.hex()[:16]}, not of this run {run.hex()[:16]}")
    for what, got, expected in (("stage", statement.stage, stage), ("step", statement.step, stored.step)):
        if got != expected:
            raise SnapshotError(f"{stored.root_path}: of {what} {got}, not of {what} {expected}")
    path = stored.path
    try:
        size = path.stat().st_size
        if size != statement.size_bytes:
            raise SnapshotError(f"{path}: has {size} bytes, its signed root says {statement.size_bytes}; truncated or replaced")
        if hash_file(path, statement.chunk_bytes)[1] != statement.root:
            raise SnapshotError(f"{path}: its bytes differ from its signed root; the file was changed or the disk is failing")
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise SnapshotError(f"{path}: cannot be read: {error}") from error
    return Loaded(statement, tensors, path, size)


def _find(folder: Path) -> Iterator[Stored]:
    if not folder.is_dir():
        return
    for step in folder.iterdir():
        if _STEP.fullmatch(step.name) and step.is_dir():
            for path in step.iterdir():
                match = _WEIGHTS.fullmatch(path.name)
                if match and path.with_suffix(".root").is_file():
                    yield Stored(int(step.name), int(match[1]), path, path.with_suffix(".root"), path.stat().st_size)


def _run_of(path: Path) -> str | None:
    """The run that a weights file says it is of (unsigned), None if it is missing or unreadable."""
    try:
        with safe_open(path, framework="pt") as file:
            return (file.metadata() or {}).get("run")
    except (OSError, SafetensorError):
        return None


def _put_in_place(partial: Path, target: Path, names: tuple[str, str]) -> None:
    old = partial.with_suffix(".old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        # Another stage's snapshot of this step stays; folders can only be exchanged as a whole.
        for other in target.iterdir():
            if other.name not in names:
                os.link(other, partial / other.name)
    sync_folder(partial)
    if target.exists():
        target.rename(old)
    partial.rename(target)
    sync_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _remove(stored: Stored) -> None:
    # The root first: weights without a root are not a snapshot, a root without weights would look like a damaged one.
    stored.root_path.unlink(missing_ok=True)
    stored.path.unlink(missing_ok=True)
    if not any(stored.path.parent.iterdir()):
        stored.path.parent.rmdir()


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
