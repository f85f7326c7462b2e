"""What is left of a demo: the figures, a plot of the loss, one line of JSON a step.

`figures` is the one place where the view becomes numbers; the screen's last words, `--json` and summary.json are all of it.  A
figure that is not known is null, never a placeholder that looks like one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from plnode.demo.view import SwarmView
from plnode.observe.lines import quantity

__all__ = ["figures", "last_words", "write_report"]


def figures(view: SwarmView, *, unigram_loss: float, run_id: str) -> dict[str, Any]:
    """The final figures.  Losses are nats a token; rates are over the whole run, start-up of the processes not counted."""
    losses = [p.loss for p in view.series() if p.loss is not None]
    seconds = view.seconds
    return {
        "run_id": run_id,
        "nodes": len(view.nodes),
        "steps": view.done,
        "tokens": view.tokens,
        "seconds": round(seconds, 3),
        "tokens_per_s": round(view.tokens / seconds, 1) if seconds > 0 else None,
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        "heldout_loss": view.heldout[max(view.heldout)].loss if view.heldout else None,
        "unigram_loss": unigram_loss,
        "boundary_bytes_per_token": view.boundary_bytes_per_token(),
        "lost_microbatches": view.total("lost_microbatches"),
        "recomputed": view.total("recomputed"),
        "skipped_steps": sum(p.skipped for p in view.series()),
        "aborts": len(view.aborts),
        "bytes_sent": view.total("bytes_out"),
    }


def last_words(result: Mapping[str, Any]) -> list[str]:
    """The figures in lines for a person."""
    lines = [
        f"{result['steps']} steps, {quantity(result['tokens'])} tokens in {result['seconds']:.1f} s on {result['nodes']} nodes"
        + (f": {quantity(result['tokens_per_s'])} tokens/s" if result["tokens_per_s"] else "")
    ]
    if result["first_loss"] is not None:
        lines.append(f"training loss {result['first_loss']:.4f} -> {result['last_loss']:.4f}")
    if result["heldout_loss"] is not None:
        gain = result["unigram_loss"] - result["heldout_loss"]
        compared = f"{abs(gain):.4f} {'below' if gain > 0 else 'above'} word frequencies alone ({result['unigram_loss']:.4f})"
        lines.append(f"held-out loss {result['heldout_loss']:.4f}, {compared}")
    for boundary, moved in result["boundary_bytes_per_token"].items():
        both = ", ".join(f"{figure:.0f} B/token {direction}" for direction, figure in moved.items())
        lines.append(f"boundary {boundary}: {both}")
    lines.append(f"microbatches lost: {result['lost_microbatches']}, steps given up: {result['aborts']}")
    return lines


def write_report(folder: Path, view: SwarmView, result: Mapping[str, Any]) -> list[Path]:
    """Writes summary.json, metrics.jsonl and, where matplotlib is installed, loss.png; returns what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    summary, metrics, plot = folder / "summary.json", folder / "metrics.jsonl", folder / "loss.png"
    summary.write_text(json.dumps(result, indent=2) + "\n")
    metrics.write_text("".join(json.dumps(row) + "\n" for row in _rows(view)))
    written = [summary, metrics]
    if _plot(plot, view, result["unigram_loss"]):
        written.append(plot)
    return written


def _rows(view: SwarmView) -> Iterator[dict[str, Any]]:
    for point in view.series():
        row: dict[str, Any] = {"step": point.step, "loss": point.loss, "tokens": point.tokens, "seconds": point.seconds}
        row |= {"at_s": round(point.at_s, 3), "skipped": point.skipped}
        if point.step in view.heldout:
            row["heldout_loss"] = view.heldout[point.step].loss
        yield row
    for step in sorted(view.heldout.keys() - view.points.keys()):
        yield {"step": step, "heldout_loss": view.heldout[step].loss}


def _plot(path: Path, view: SwarmView, unigram_loss: float) -> bool:
    """False without matplotlib: the figures do not need it, and a contributor's machine may lack it."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)  # no display, no global state
    axes = figure.add_subplot()
    known = [(p.step, p.loss) for p in view.series() if p.loss is not None]
    if known:
        axes.plot(*zip(*known, strict=True), linewidth=1.0, label="training, mean of the step")
    if view.heldout:
        points = [(h.step, h.loss) for h in sorted(view.heldout.values(), key=lambda h: h.step)]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label="held-out")
    axes.axhline(unigram_loss, linestyle="--", linewidth=1.0, color="gray", label="word frequencies alone")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats a token)")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    return True
