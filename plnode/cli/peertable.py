"""The table of peers in `plnode status`.

Plain text, so that it can be piped, pasted and read without colours.  A row is a line, always: a wrapped table is read by nobody.
So in a narrow window columns are left out, least needed first, and the heading says that there are more.  A pipe has no width and
gets everything, unless `COLUMNS` says otherwise, as `watch` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from plnode.observe.lines import quantity, short_id

__all__ = ["table"]

_GAP = "  "
_INDENT = "  "


def table(peers: list[dict[str, Any]], width: int | None = None) -> list[str]:
    """The lines for the `peers` of a status document; none without peers.  `width` in columns, None for as many as it takes."""
    if not peers:
        return []
    columns = list(_COLUMNS)
    rows = [[head for head, _ in columns], *([show(peer) for _, show in columns] for peer in peers)]
    left_out = False
    for head in _LEFT_OUT:
        if width is None or _width(rows) <= width:
            break
        at = rows[0].index(head)
        rows = [[cell for i, cell in enumerate(row) if i != at] for row in rows]
        left_out = True
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(w) if head in _RIGHT else cell.ljust(w) for head, cell, w in zip(rows[0], row, widths, strict=True)]
        lines.append((_INDENT + _GAP.join(cells)).rstrip())
    for peer in peers:
        if peer["why"] and not peer["idle"]:
            lines.append(f"{_INDENT}{short_id(peer['peer_id'])}: {peer['why']}")
    if left_out:
        lines.append(f"{_INDENT}(more columns in a wider window, all figures with --json)")
    return lines


def _width(rows: list[list[str]]) -> int:
    return len(_INDENT) + sum(max(map(len, column)) + len(_GAP) for column in zip(*rows, strict=True)) - len(_GAP)


def _stage(peer: dict[str, Any]) -> str:
    return "-" if peer["stage"] is None else str(peer["stage"])


def _path(peer: dict[str, Any]) -> str:
    if not peer["connected"]:
        return "none"
    return str(peer["path"]) if peer["relay"] is None else f"via {short_id(peer['relay'])}"


def _rtt(peer: dict[str, Any]) -> str:
    if peer["rtt_median_ms"] is None:
        return "-"
    return f"{_short(peer['rtt_median_ms'])}/{_short(peer['rtt_p99_ms'])}"


def _lanes(peer: dict[str, Any]) -> str:
    if not peer["connections"]:
        return "-"
    lanes = peer["connections"][1:]
    used = "/".join(dict.fromkeys(each["congestion"] for each in lanes or peer["connections"] if each["congestion"]))
    return f"{len(lanes) or 'mixed'} {used}".rstrip()


def _rate(key: str) -> Callable[[dict[str, Any]], str]:
    return lambda peer: quantity(float(f"{peer[key]:.3g}"), "B")


def _queue(peer: dict[str, Any]) -> str:
    return quantity(sum(peer["queued_bytes"]), "B")


def _clock(peer: dict[str, Any]) -> str:
    offset_ms = peer["clock_offset_ms"]
    if offset_ms is None:
        return "-"
    return f"{offset_ms:+.0f} ms" if abs(offset_ms) < 1000 else f"{offset_ms / 1000:+.4g} s"


def _short(ms: float) -> str:
    """Three digits: 0.12, 1.23, 45.6, 789."""
    return f"{ms:.2f}" if ms < 9.995 else f"{ms:.1f}" if ms < 99.95 else f"{ms:.0f}"


_COLUMNS: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("peer", lambda peer: short_id(peer["peer_id"])),
    ("stage", _stage),
    ("path", _path),
    ("rtt ms", _rtt),
    ("lanes", _lanes),
    ("in/s", _rate("in_bytes_per_s")),
    ("out/s", _rate("out_bytes_per_s")),
    ("queue", _queue),
    ("resent", lambda peer: str(peer["resent_chunks"])),
    ("clock", _clock),
)
_RIGHT = frozenset(head for head, _ in _COLUMNS) - {"peer", "path", "lanes"}
# What a person misses least goes first; who it is, how far and how fast stay to the end.
_LEFT_OUT = ("clock", "resent", "queue", "lanes", "path", "stage", "out/s", "in/s")
