"""The history of figures: one JSON line a row and run, appended to a file, so that a slow decline is seen as one.

A line holds what the figure was taken with: time, commit (with "+" if the tree had changes), machine, and the row's conditions.  Lines
are comparable when bench, row, conditions and machine agree, and only those stand under each other.  The file is no part of
the repository: figures of one machine say nothing about another's, and every run would be a change.

    {"date", "commit", "machine": {"cpu", "cores", "kernel"}, "bench", "row", "conditions", "figures", "series"}
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.children import ROOT
from bench.report import Report, number

__all__ = ["HISTORY", "Entry", "append", "entries_of", "grouped", "read", "table"]

HISTORY = "bench-history.jsonl"
MACHINE = ("cpu", "cores", "kernel")


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the file."""

    date: str
    commit: str
    machine: Mapping[str, Any]
    bench: str
    row: str
    conditions: Mapping[str, Any]
    figures: Mapping[str, float]
    series: Mapping[str, Sequence[float]]

    @property
    def key(self) -> tuple[str, str]:
        """What must agree: (a name for people, the machine)."""
        conditions = " ".join(f"{name}={value}" for name, value in self.conditions.items())
        return f"{self.bench} {self.row} {conditions}".rstrip(), json.dumps(self.machine, sort_keys=True)


def append(path: Path, report: Report) -> None:
    """Add a run's rows to the file."""
    with path.open("a") as file:
        for entry in entries_of(report, datetime.now(UTC).isoformat(timespec="seconds"), _commit()):
            file.write(json.dumps(asdict(entry), allow_nan=False) + "\n")


def entries_of(report: Report, date: str, commit: str) -> list[Entry]:
    """What `append` writes."""
    machine = {key: report.conditions[key] for key in MACHINE if key in report.conditions}
    found = []
    for row in report.rows:
        document = row.document(report.columns)
        figures = {c.key: document[c.key] for c in report.columns if document[c.key] is not None}
        found.append(Entry(date, commit, machine, report.bench, row.name, dict(row.labels), figures, dict(row.series)))
    return found


def read(path: Path) -> list[Entry]:
    """All entries, in the order they were written.  Raises ValueError with file and line for one that is none."""
    entries = []
    for count, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            entries.append(Entry(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}:{count}: not a line of a history: {error}") from error
    return entries


def grouped(entries: Iterable[Entry]) -> dict[tuple[str, str], list[Entry]]:
    """Comparable entries together."""
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.key, []).append(entry)
    return groups


def table(entries: Sequence[Entry]) -> str:
    """For each row the course of its figures: the last eight values, and the last against the median of those before."""
    lines = []
    machines = {machine for _, machine in grouped(entries)}
    for (name, machine), group in grouped(entries).items():
        lines.append(name if len(machines) < 2 else f"{name}  [{machine}]")
        for figure in dict.fromkeys(key for entry in group for key in entry.figures):
            values = [entry.figures[figure] for entry in group if figure in entry.figures]
            lines.append(f"  {figure:<20} {' '.join(number(value) for value in values[-8:])}{_change(values)}")
        lines.append(f"  {group[0].date} {group[0].commit} .. {group[-1].date} {group[-1].commit}, {len(group)} runs")
    return "\n".join(lines)


def _change(values: Sequence[float]) -> str:
    before = sorted(values[:-1])
    if not before or not (middle := before[len(before) // 2]):
        return ""
    return f"  ({(values[-1] / middle - 1) * 100:+.0f} % against the runs before)"


def _commit() -> str:
    """Short name of the commit, "+" behind it for a tree with changes; "" without git."""
    found = []
    for command in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]):
        try:
            done = subprocess.run(["git", "-C", str(ROOT), *command], capture_output=True, text=True, check=True, timeout=20)
        except (OSError, subprocess.SubprocessError):
            return ""
        found.append(done.stdout.strip())
    return found[0] + ("+" if found[1] else "")
