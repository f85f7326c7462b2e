"""A node's own snapshots of one run: ``snapshot_file.py`` bound to a data folder, a run and an identity.

Only what this node signed itself is taken from its disk.  A file that someone put there is at best another node's word, and the
stage that is restored from it would be spread by this one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from wire.envelope import Statement, open_envelope, seal
from wire.errors import Code, RemoteProtocolError, WireError
from wire.identity import Identity
from wire.messages import decode

from .errors import SnapshotError
from .snapshot_file import (
    ROOT_DOMAIN,
    ROOT_FILE_MAX_BYTES,
    Loaded,
    SnapshotRoot,
    Stored,
    list_snapshots,
    load_snapshot,
    write_snapshot,
)

# The newest, and one to fall back to if it proves damaged.
KEEP = 2


class SnapshotStore:
    """Snapshots in ``data_dir``/snapshots.  Every method blocks on the disk; ``list`` reads only small files."""

    def __init__(self, data_dir: Path, run: bytes, identity: Identity, *, keep: int = KEEP) -> None:
        self.folder = Path(data_dir) / "snapshots"
        self._run, self._identity, self._keep = run, identity, keep

    def list(self) -> tuple[Stored, ...]:
        """Snapshots of this run with a root that we signed, ascending by (step, stage).  Their weights are not verified yet."""
        return tuple(stored for stored in list_snapshots(self.folder) if self._is_ours(stored))

    def write(self, step: int, stage: int, generation: int, tensors: Mapping[str, Tensor], protect: int = 0) -> Stored:
        """Write the state that ``stage`` has when ``step`` steps were applied.  Raises SnapshotError, having changed nothing.

        Older ones than the newest ``keep`` are removed, but never the one of step ``protect``.
        """
        return write_snapshot(
            self.folder, tensors, lambda payload: self._seal(payload, step),
            run=self._run, stage=stage, step=step, generation=generation, keep=self._keep, protect=protect,
        )  # fmt: skip

    def load(self, step: int, stage: int) -> Loaded:
        """Verify and read.  Raises SnapshotError naming the file and what is wrong with it, also if there is none."""
        for stored in list_snapshots(self.folder):
            if (stored.step, stored.stage) == (step, stage):
                return load_snapshot(stored, self._open, run=self._run, stage=stage)
        raise SnapshotError(f"{self.folder / str(step)}: no snapshot of stage {stage} here")

    def set_aside(self, step: int, stage: int) -> None:
        """Rename the root of a snapshot that proved damaged: it is no longer listed, and can still be looked at."""
        for stored in list_snapshots(self.folder):
            if (stored.step, stored.stage) == (step, stage):
                stored.root_path.rename(stored.root_path.with_suffix(".damaged"))

    def _seal(self, payload: bytes, step: int) -> bytes:
        return seal(self._identity, ROOT_DOMAIN, payload, run=self._run, seq=step, not_after=0)

    def _statement(self, envelope: bytes) -> Statement:
        statement = open_envelope(envelope, ROOT_DOMAIN, now_unix=time.time(), run=self._run)
        if statement.signer != self._identity.peer_id:
            raise RemoteProtocolError(Code.AUTH, f"signed by {statement.signer}, not by this node")
        return statement

    def _open(self, envelope: bytes) -> bytes:
        return self._statement(envelope).payload

    def _is_ours(self, stored: Stored) -> bool:
        try:
            with stored.root_path.open("rb") as file:
                statement = decode(self._open(file.read(ROOT_FILE_MAX_BYTES)), SnapshotRoot)
        except (OSError, WireError):
            return False
        return (statement.step, statement.stage) == (stored.step, stored.stage)
