"""Reading receipt logs that somebody hands us: every byte is accounted for, every signature verified, every complaint has its place.

The files come from people who want points.  So nothing in them is believed by its name or its order, no length of theirs makes us
reserve memory (one frame of at most 60 KB is read at a time), and complaints are kept in words up to `MOST_PROBLEMS`; all are counted.
The same envelope lies in the logs of both neighbours; it is verified once (0.1 ms each) and its second copy is only counted.

Good receipts are kept whole: two to four times the size of the logs in memory, by how many microbatches an envelope has.

What stands here is whether the envelopes are in order, one by one.  Whether they agree with each other is `points.tally`'s.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from plnode.swarm.receiptlog import FOLDER, Flaw, NotALog, read_log, segments
from plnode.swarm.receipts import BadEnvelope, Receipt, open_receipt
from wire.envelope import ForeignRun

__all__ = ["Checked", "FileCheck", "Problem", "check_logs", "log_files"]

MOST_PROBLEMS = 1000


@dataclass(frozen=True, slots=True)
class Problem:
    """Something in a file that is not a receipt in order.  `kind`: forged, malformed, damaged, or torn (a crash; harmless)."""

    file: str
    offset: int
    kind: str
    what: str


@dataclass(slots=True)
class FileCheck:
    """What is in one file."""

    path: str
    size_bytes: int = 0
    envelopes: int = 0
    """All frames with a good checksum."""
    good: int = 0
    copies: int = 0
    """Good ones that were read before."""
    foreign: int = 0
    """Of other runs."""


@dataclass(slots=True)
class Checked:
    """What was read.  `receipts`: each good one once, with the first place where it stands ("file:offset")."""

    files: list[FileCheck] = field(default_factory=list)
    receipts: list[tuple[Receipt, str]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def sound(self) -> bool:
        """Nothing is wrong but torn ends, which every crash may leave."""
        return not (self.counts.keys() - {"torn"})

    def _add(self, problem: Problem) -> None:
        self.counts[problem.kind] += 1
        if len(self.problems) < MOST_PROBLEMS:
            self.problems.append(problem)


def log_files(path: Path) -> list[Path]:
    """The log files that a path means: itself, the segments in it, or those of the data folder that it is.  [] if there are none."""
    if not path.is_dir():
        return [path]
    return segments(path) or segments(path / FOLDER)


def check_logs(paths: Iterable[Path], *, run: bytes | None, advanced: Callable[[int], None] = lambda size_bytes: None) -> Checked:
    """Read and verify all files.  `run`: the run they should be of; receipts of others are counted and left out; None: any.

    `advanced` hears of each envelope that was dealt with, in bytes.  Raises NotALog (with the path) and OSError.
    """
    checked = Checked()
    seen: set[bytes] = set()
    for path in paths:
        report = FileCheck(str(path), path.stat().st_size)
        checked.files.append(report)
        with path.open("rb") as file:
            try:
                for item in read_log(file):
                    if isinstance(item, Flaw):
                        kind = "torn" if item.torn else "damaged"
                        checked._add(Problem(str(path), item.offset, kind, f"{item.what} ({item.size_bytes} bytes)"))
                        continue
                    report.envelopes += 1
                    _check(checked, report, item.offset, item.envelope, run, seen)
                    advanced(len(item.envelope))
            except NotALog as wrong:
                raise NotALog(f"{path}: {wrong}") from None
    return checked


def _check(checked: Checked, report: FileCheck, offset: int, envelope: bytes, run: bytes | None, seen: set[bytes]) -> None:
    digest = hashlib.sha256(envelope).digest()
    if digest in seen:
        report.good += 1
        report.copies += 1
        return
    try:
        receipt = open_receipt(envelope, run=run)
    except ForeignRun:
        report.foreign += 1
        return
    except BadEnvelope as wrong:
        checked._add(Problem(report.path, offset, type(wrong).__name__.lower(), wrong.detail))
        return
    seen.add(digest)
    report.good += 1
    checked.receipts.append((receipt, f"{report.path}:{offset}"))
