"""The partial file of a pull: what is verified survives a restart.

    DATA/snapshots/.pull-<stage>-<step>-<root, 16 hex digits>.partial

The file has its final size from the start and holes where nothing came yet.  There is no list of what is in it: such a list can be newer
or older than the data after a crash.  Instead everything is hashed again when a pull goes on, about a second a gigabyte, against
hashes that belong to the root.  A partial of another root is of no use and is removed.  All functions block; call them in a thread.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from plnode.collective.statecut import HASH_BYTES, chunk_count, chunk_length
from plnode.stage.snapshot_file import SnapshotRoot

PATTERN = ".pull-*.partial"


def partial_path(folder: Path, statement: SnapshotRoot) -> Path:
    return folder / f".pull-{statement.stage}-{statement.step}-{statement.root.hex()[:16]}.partial"


class PartialFile:
    """Chunks of one state on disk.  Close it; the file stays until `remove`."""

    def __init__(self, folder: Path, statement: SnapshotRoot) -> None:
        """Opens or begins the file, and removes those of other roots.  Raises OSError: no room, no right."""
        folder.mkdir(parents=True, exist_ok=True)
        self.path = partial_path(folder, statement)
        for other in folder.glob(PATTERN):
            if other != self.path:
                other.unlink(missing_ok=True)
        self._size, self._chunk = statement.size_bytes, statement.chunk_bytes
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self._fd, self._size)

    def verified(self, hashes: bytes) -> list[int]:
        """Chunks whose bytes are right.  Reads the whole file, a chunk at a time."""
        found = []
        for index in range(chunk_count(self._size, self._chunk)):
            data = os.pread(self._fd, chunk_length(index, self._size, self._chunk), index * self._chunk)
            if hashlib.sha256(data).digest() == hashes[index * HASH_BYTES : (index + 1) * HASH_BYTES]:
                found.append(index)
        return found

    def write(self, index: int, data: memoryview) -> None:
        """Raises OSError when the disk refuses."""
        offset = index * self._chunk
        while data:
            count = os.pwrite(self._fd, data, offset)
            data, offset = data[count:], offset + count

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def remove(self) -> None:
        self.close()
        self.path.unlink(missing_ok=True)
