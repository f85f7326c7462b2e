"""The history as a picture: a small plot for each row's main figure, run by run.  SVG, so that it stays sharp and is text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.history import Entry, grouped

__all__ = ["write_plot"]

# The figure that a bench is about; the first that a row has.
MAIN = ("line_percent", "mib_per_s", "tokens_per_s")
COLUMNS = 3


def write_plot(path: Path, entries: Sequence[Entry]) -> bool:
    """False without matplotlib, as with the demo's plot: the figures do not need it."""
    try:
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError:
        return False
    plots = []
    for (name, _), group in grouped(entries).items():
        figure_name = next((key for key in MAIN if any(key in entry.figures for entry in group)), None)
        if figure_name is not None:
            plots.append((name, figure_name, [(e.commit, e.figures[figure_name]) for e in group if figure_name in e.figures]))
    rows = max(1, -(-len(plots) // COLUMNS))
    figure = Figure(figsize=(5 * COLUMNS, 2.6 * rows), layout="constrained")
    FigureCanvasSVG(figure)
    for index, (name, figure_name, points) in enumerate(plots):
        axes = figure.add_subplot(rows, COLUMNS, index + 1)
        axes.plot(range(len(points)), [value for _, value in points], marker="o", markersize=3, linewidth=1.0)
        axes.set_title(name, fontsize=7)
        axes.set_ylabel(figure_name, fontsize=7)
        axes.set_ylim(bottom=0)
        axes.set_xticks(range(len(points)), [commit for commit, _ in points], fontsize=5, rotation=45)
        axes.grid(alpha=0.3)
    figure.savefig(path, format="svg", metadata={"Date": None})
    return True
