"""The receipt log: envelopes on disk, in the order in which they came, both those that this node signed and those that it got.

Points are recomputed from these files by people who trust nobody, so the file keeps the signed bytes and nothing of its own:

    receipts-00000001.log:  "plw-receipts/1\\n\\0"  then frames  u32 length | u32 CRC-32 of the length and the envelope | envelope

What goes wrong, and what is done:

* *The process is killed*: what was appended is in the kernel's hands and stays.  *The machine stops*: at most what came after the last
  fsync is lost.  `unsynced` gives the fsync to whoever has a thread for it; the node does it every 5 s and at its end.  A lost receipt is
  in the other neighbour's log as well (signer and worker both keep it), so one fsync each would buy little and cost the disk a lot.
* *A crash leaves half a frame* (or zeros, where the file system had made room): cut at the next start, and told.
* *A frame in the middle is damaged*: that is no crash, and what follows may be good.  Nothing is cut; a new segment is begun, and
  `plnode receipts verify` names the place.
* *The disk is full*: the frame is taken back, the caller gets the OSError.  *The log grows for ever*: eight segments share a budget, the
  oldest is deleted before it would be exceeded.

The files are the owner's alone (0600): who worked with whom, when and how fast is nobody else's business until he hands it on.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from plnode.swarm.receipts import ENVELOPE_MAX_BYTES

__all__ = ["FOLDER", "MAGIC", "Flaw", "Frame", "NotALog", "ReceiptLog", "read_log", "segments"]

FOLDER = "receipts"
"""In the data folder."""
MAGIC = b"plw-receipts/1\n\x00"
SEGMENTS = 8
"""The oldest eighth is what a full log loses at once."""
BUDGET_BYTES = 256 << 20
"""A node that does 256 microbatches a step between 8 neighbours writes some 18 KB a step: the last 15,000 steps or so."""
_HEAD = struct.Struct(">II")
_FRAME_MAX_BYTES = _HEAD.size + ENVELOPE_MAX_BYTES
LEAST_BUDGET_BYTES = 2 * (len(MAGIC) + _FRAME_MAX_BYTES)


class NotALog(ValueError):
    """The file does not begin like a receipt log."""


@dataclass(frozen=True, slots=True)
class Frame:
    """An envelope as it was written; `offset` of its frame in the file."""

    offset: int
    envelope: bytes


@dataclass(frozen=True, slots=True)
class Flaw:
    """Bytes that are no frame.  `torn`: the unfinished end of a file, as a crash leaves it; else the file was damaged."""

    offset: int
    size_bytes: int
    torn: bool
    what: str


def _checksum(envelope: bytes) -> int:
    return zlib.crc32(envelope, zlib.crc32(len(envelope).to_bytes(4, "big")))


def read_log(file: BinaryIO) -> Iterator[Frame | Flaw]:
    """Everything in a log, in order; after a frame whose checksum is wrong the next one is looked for where it should begin.

    Memory: one frame.  Raises NotALog, OSError.
    """
    size = os.fstat(file.fileno()).st_size
    head = file.read(len(MAGIC))
    if head != MAGIC:
        if not MAGIC.startswith(head) and any(head):
            raise NotALog("it does not begin like a receipt log")
        if head or size:
            yield Flaw(0, size, True, "an unfinished beginning")
        return
    at = len(MAGIC)
    while at < size:
        rest = size - at
        length, crc = _HEAD.unpack(file.read(_HEAD.size)) if rest >= _HEAD.size else (0, 0)
        if rest < _HEAD.size:
            yield Flaw(at, rest, True, "an unfinished frame")
            return
        if not 1 <= length <= ENVELOPE_MAX_BYTES:
            torn = not length and not crc and _all_zero(file)
            yield Flaw(at, rest, torn, "zeros to the end" if torn else f"no frame can have {length} bytes; the rest cannot be read")
            return
        if length > rest - _HEAD.size:
            yield Flaw(at, rest, True, "an unfinished frame")
            return
        envelope = file.read(length)
        if len(envelope) < length:
            yield Flaw(at, rest, True, "the file became shorter while it was read")
            return
        if crc == _checksum(envelope):
            yield Frame(at, envelope)
        else:
            # The last frame with a wrong checksum: its pages reached the disk in another order than they were written.
            yield Flaw(at, _HEAD.size + length, _HEAD.size + length == rest, "the checksum is wrong")
        at += _HEAD.size + length


def _all_zero(file: BinaryIO) -> bool:
    while piece := file.read(1 << 16):
        if any(piece):
            return False
    return True


def segments(folder: Path) -> list[Path]:
    """The files of a log, oldest first; none where there is no such folder."""
    return sorted(path for path in folder.glob("receipts-????????.log") if path.stem[-8:].isdecimal())


class ReceiptLog:
    """The log in `folder`, opened for appending.  One process a folder.  Raises OSError if it cannot be opened."""

    def __init__(self, folder: Path, *, budget_bytes: int = BUDGET_BYTES, tell: Callable[[str], None] = lambda text: None) -> None:
        """`tell`: a sentence about what was found or lost.  `budget_bytes`: of all files together, never exceeded."""
        if budget_bytes < LEAST_BUDGET_BYTES:
            raise ValueError(f"a receipt log needs {LEAST_BUDGET_BYTES} bytes, not {budget_bytes}")
        self._folder, self._budget, self._tell = folder, budget_bytes, tell
        self._segment_bytes = max(budget_bytes // SEGMENTS, len(MAGIC) + _FRAME_MAX_BYTES)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._sizes = {path: path.stat().st_size for path in segments(folder)}
        self._fd: int | None = None
        self._dirty = False
        if self._sizes and not self._continue(next(reversed(self._sizes))):
            self._fd = None

    @property
    def size_bytes(self) -> int:
        return sum(self._sizes.values())

    def append(self, envelope: bytes) -> None:
        """Write one envelope behind the others.  Raises OSError: nothing of it is in the log then."""
        if not 1 <= len(envelope) <= ENVELOPE_MAX_BYTES:
            raise ValueError(f"an envelope of {len(envelope)} bytes")
        frame = _HEAD.pack(len(envelope), _checksum(envelope)) + envelope
        if self._fd is None or self._sizes[self._current] + len(frame) > self._segment_bytes:
            self._begin_segment(len(MAGIC) + len(frame))
        else:
            self._make_room(len(frame), keep=1)
        self._write(frame)

    def unsynced(self) -> Callable[[], None] | None:
        """What brings all that was appended so far onto the disk: an fsync that any thread may call, once.  None: it is there."""
        if self._fd is None or not self._dirty:
            return None
        # A descriptor of its own: the log may begin another segment while the disk works.
        fd, self._dirty = os.dup(self._fd), False

        def sync() -> None:
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

        return sync

    def close(self) -> None:
        """Sync and close.  A second call does nothing."""
        if self._fd is None:
            return
        fd, self._fd = self._fd, None
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    # -- segments

    @property
    def _current(self) -> Path:
        return next(reversed(self._sizes))

    def _continue(self, path: Path) -> bool:
        """Open the newest segment for appending, its torn end cut.  False if it should be left as it is."""
        end = path.stat().st_size
        try:
            with path.open("rb") as file:
                flaws = [item for item in read_log(file) if isinstance(item, Flaw)]
        except NotALog:
            flaws = [Flaw(0, end, False, "it does not begin like a receipt log")]
        if any(not flaw.torn for flaw in flaws):
            self._tell(f"{path} is damaged ({flaws[0].what} at {flaws[0].offset}); it is left as it is, and a new file is begun")
            return False
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fchmod(fd, 0o600)
            if flaws:
                os.ftruncate(fd, flaws[0].offset)
                os.fsync(fd)
                self._tell(f"cut {end - flaws[0].offset} bytes from the end of {path}: {flaws[0].what}, left by a crash")
        except OSError:
            os.close(fd)
            raise
        self._fd, self._sizes[path] = fd, flaws[0].offset if flaws else end
        if not self._sizes[path]:
            self._write(MAGIC)
        return True

    def _begin_segment(self, size_bytes: int) -> None:
        number = int(self._current.stem[-8:]) + 1 if self._sizes else 1
        self.close()
        self._make_room(size_bytes, keep=0)
        path = self._folder / f"receipts-{number:08d}.log"
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._sizes[path] = 0
        self._write(MAGIC)
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _make_room(self, size_bytes: int, *, keep: int) -> None:
        """Delete the oldest segments until so many bytes fit into the budget, but not the newest `keep`."""
        while self.size_bytes + size_bytes > self._budget and len(self._sizes) > keep:
            oldest = next(iter(self._sizes))
            oldest.unlink(missing_ok=True)
            gone = self._sizes.pop(oldest)
            self._tell(f"the receipt log is full ({self._budget} bytes): {oldest.name}, {gone} bytes, was deleted")

    def _write(self, data: bytes) -> None:
        assert self._fd is not None
        path, before = self._current, self._sizes[self._current]
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError:
            try:
                os.ftruncate(self._fd, before)
            except OSError:
                # Half a frame stays behind: the next one goes into another file, so that it can be read.
                with suppress(OSError):
                    os.close(self._fd)
                self._fd = None
            raise
        self._sizes[path] = before + len(data)
        self._dirty = True
