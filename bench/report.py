"""What a bench says: a table for people, one JSON object for programs, both from the same samples.

A figure without its spread and its conditions is not a figure: on a busy machine two runs of the same program differ by a third.
So a row holds *samples*, one a repeat, and everything printed follows from them: the median, because one disturbed repeat must
not move it, and least and greatest beside it, because with three to nine samples a standard deviation would only look exact.
A requirement is a ratio between rows, and a ratio is taken within each repeat, where both sides saw the same machine; then the
median of the ratios is compared, not the ratio of the medians.

The table has three forms and takes the widest that fits: with spread, without, and one line a figure.  Nothing is ever cut.

JSON: `{"bench", "conditions", "rows": [{"name", labels, medians, "spread": {figure: [least, greatest]}}]}`.  What a row does
not have (a handshake of a program that makes none) is null.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Bar", "Column", "Report", "Row", "Summary", "number", "quantile", "ratios", "summary"]

Label = int | float | str


@dataclass(frozen=True, slots=True)
class Summary:
    """Median, least and greatest of some samples."""

    median: float
    least: float
    greatest: float


def summary(samples: Sequence[float]) -> Summary | None:
    """None for no samples.  Raises ValueError for a sample that is not finite: a bench that divided by zero has no figure."""
    if not samples:
        return None
    if not all(map(math.isfinite, samples)):
        raise ValueError(f"samples that are not finite: {samples}")
    return Summary(statistics.median(samples), min(samples), max(samples))


def quantile(samples: Sequence[float], share: float) -> float:
    """The least sample that at least `share` of all samples do not exceed (nearest rank: always a value that occurred)."""
    if not samples or not 0 < share <= 1:
        raise ValueError("a quantile needs samples and a share in (0, 1]")
    return sorted(samples)[math.ceil(share * len(samples)) - 1]


def number(value: float) -> str:
    """Three significant digits, and never fewer than all digits before the point."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 1 or value == 0 else f"{value:.3g}"


@dataclass(frozen=True, slots=True)
class Column:
    """A figure of the table: its key in the JSON and in `Row.samples`, and its heading, unit included."""

    key: str
    title: str


@dataclass(frozen=True, slots=True)
class Row:
    """One contestant under one condition.  `labels` (a message size) tell rows of the same name apart.

    `series`: what a figure did second by second; only in the JSON.
    """

    name: str
    samples: Mapping[str, Sequence[float]]
    labels: Mapping[str, Label] = field(default_factory=dict)
    series: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def document(self, columns: Sequence[Column]) -> dict[str, Any]:
        """The row of the JSON object."""
        sums = {c.key: summary(self.samples.get(c.key, ())) for c in columns}
        medians = {key: None if s is None else _rounded(s.median) for key, s in sums.items()}
        spread = {key: [_rounded(s.least), _rounded(s.greatest)] for key, s in sums.items() if s is not None}
        series = {"series": {key: list(values) for key, values in self.series.items()}} if self.series else {}
        return {"name": self.name, **self.labels, **medians, "spread": spread, **series}


@dataclass(frozen=True, slots=True)
class Bar:
    """A requirement: a ratio (one sample a repeat) or a figure with its bound.  Exactly one of the bounds is given."""

    text: str
    samples: Sequence[float]
    at_least: float | None = None
    at_most: float | None = None

    @property
    def met(self) -> bool | None:
        """None if it was not measured."""
        s = summary(self.samples)
        if s is None:
            return None
        return s.median >= self.at_least if self.at_least is not None else s.median <= (self.at_most or 0.0)

    def line(self) -> str:
        """For people."""
        s = summary(self.samples)
        if s is None:
            return f"{self.text}: not measured"
        bound = f">= {self.at_least:g}" if self.at_least is not None else f"<= {self.at_most:g}"
        return f"{self.text}: {_with_spread(s)}, wanted {bound}: {'met' if self.met else 'MISSED'}"


def ratios(above: Sequence[float], below: Sequence[float], factor: float = 1.0) -> list[float]:
    """above / (factor x below), repeat by repeat; empty if one side was not measured."""
    return [a / (factor * b) for a, b in zip(above, below, strict=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that a bench found."""

    bench: str
    conditions: Mapping[str, Any]
    columns: Sequence[Column]
    rows: Sequence[Row]
    bars: Sequence[Bar] = ()
    notes: Sequence[str] = ()

    def json_line(self) -> str:
        """One line.  Notes (rows that could not run) stand in the conditions."""
        conditions = {**self.conditions, **({"notes": list(self.notes)} if self.notes else {})}
        rows = [row.document(self.columns) for row in self.rows]
        return json.dumps({"bench": self.bench, "conditions": conditions, "rows": rows}, allow_nan=False)

    def text(self, width: int) -> str:
        """Table, requirements, notes and conditions for a terminal of `width` columns."""
        parts = [self._table(width)]
        if self.bars:
            parts.append("\n".join(_folded(bar.line(), width) for bar in self.bars))
        if self.notes:
            parts.append("\n".join(_folded(note, width) for note in self.notes))
        parts.append("\n".join(_folded(f"{key}: {_plain(value)}", width) for key, value in self.conditions.items()))
        return "\n\n".join(parts)

    def _table(self, width: int) -> str:
        labels = list(dict.fromkeys(key for row in self.rows for key in row.labels))
        for with_spread in (True, False):
            head = [self.bench, *labels, *(c.title for c in self.columns)]
            lines = [head]
            for row in self.rows:
                own = [_label(row.labels[key]) if key in row.labels else "" for key in labels]
                lines.append([row.name, *own, *(self._cell(row, c, with_spread) for c in self.columns)])
            widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
            if sum(widths) + 2 * (len(widths) - 1) <= width:
                return "\n".join(_aligned(line, widths) for line in lines)
        return "\n".join(self._block(row, width) for row in self.rows)

    def _block(self, row: Row, width: int) -> str:
        """A row as lines of its own, for a terminal too narrow for any table."""
        name = " ".join([row.name, *(f"{key}={_label(value)}" for key, value in row.labels.items())])
        figures = (f"  {c.title}: {self._cell(row, c, True)}" for c in self.columns)
        return "\n".join(_folded(line, width) for line in (name, *figures))

    def _cell(self, row: Row, column: Column, with_spread: bool) -> str:
        s = summary(row.samples.get(column.key, ()))
        if s is None:
            return "-"
        # A single sample has no spread to show.
        return _with_spread(s) if with_spread and len(row.samples[column.key]) > 1 else number(s.median)


def _label(value: Label) -> str:
    return value if isinstance(value, str) else f"{value:,}"


def _with_spread(s: Summary) -> str:
    return f"{number(s.median)} ({number(s.least)}..{number(s.greatest)})"


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Names to the left, figures to the right."""
    first, *rest = (cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(cells, widths, strict=True)))
    return "  ".join([first, *rest]).rstrip()


def _folded(line: str, width: int) -> str:
    """`line` broken at spaces; what has no space stays whole, however long."""
    lines, current = [], ""
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    for word in line.split(" "):
        if current.strip() and len(current) + 1 + len(word) > width:
            lines.append(current)
            current = indent + word
        else:
            current = f"{current} {word}" if current else word if word else " "
    return "\n".join([*lines, current])


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(v)}" for key, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value))
    return number(value) if isinstance(value, float) else str(value)


def _rounded(value: float) -> float:
    """Six significant digits: more than any bench knows, and short to read."""
    return float(f"{value:.6g}")
