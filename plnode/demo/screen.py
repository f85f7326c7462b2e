"""The demo on the screen: a live table where there is a terminal, plain lines where there is none.

A table that redraws itself needs a terminal of some width; in a pipe, a CI log or a narrow window it becomes noise.  There the
same facts come as lines, and only when something changed: a node's state, and at most one line a second for steps.

Everything here is a pure function of the view, but for the console that is written to.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from plnode.demo.view import NodeView, SwarmView
from plnode.observe.lines import quantity

__all__ = ["LIVE_WIDTH", "Plain", "Screen", "opened_screen", "picture", "summary_line"]

LIVE_WIDTH = 90  # columns below which the table would wrap
_STEP_LINE_S = 1.0


def picture(view: SwarmView, now_s: float) -> Group:
    """The whole screen: the run's figures, its progress, one row a node."""
    table = Table(expand=True, pad_edge=False)
    for heading, justify in (("node", "left"), ("stage", "right"), ("state", "left")):
        table.add_column(heading, justify=justify, no_wrap=True, overflow="ellipsis")  # type: ignore[arg-type]
    for heading in ("step", "tokens/s", "in", "out", "queue", "rtt", "loop p99"):
        table.add_column(heading, justify="right", no_wrap=True)
    for node in view.nodes.values():
        table.add_row(*_row(node))
    bar = ProgressBar(total=max(view.steps, 1), completed=view.done)
    return Group(Text(summary_line(view, now_s), no_wrap=True, overflow="ellipsis"), bar, table)


def summary_line(view: SwarmView, now_s: float) -> str:
    """The run in one line."""
    parts = [f"step {view.done}/{view.steps}", "loss " + _loss(view.loss)]
    if view.heldout:
        last = view.heldout[max(view.heldout)]
        parts.append(f"held-out {last.loss:.4f} (step {last.step})")
    if view.tokens_per_s:
        parts.append(f"{quantity(view.tokens_per_s)} tokens/s")
    if view.eta_s is not None:
        parts.append(f"ETA {_clock(view.eta_s)}")
    parts.append(f"elapsed {_clock(now_s)}")
    return "  ".join(parts)


def _row(node: NodeView) -> list[str]:
    status = node.status
    stage = "" if node.stage is None else str(node.stage)
    if status is None:
        return [node.name, stage, node.state, *[""] * 7]
    rtts = sorted(p.rtt_ms for p in status.peers if p.rtt_ms is not None)
    return [
        node.name,
        stage,
        node.state,
        str(status.step),
        quantity(status.tokens_per_s),
        quantity(status.bytes_in, "B"),
        quantity(status.bytes_out, "B"),
        str(status.queue),
        f"{rtts[len(rtts) // 2]:.1f} ms" if rtts else "",
        f"{status.loop_blocked_p99_ms:.1f} ms",
    ]


class Screen:
    """Redraws the picture in place."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def show(self, view: SwarmView, now_s: float) -> None:
        self._live.update(picture(view, now_s))


class Plain:
    """Writes a line when something changed."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._states: dict[str, str] = {}
        self._heldout = 0
        self._done = 0
        self._said_at = -_STEP_LINE_S

    def show(self, view: SwarmView, now_s: float) -> None:
        for line in self.lines(view, now_s):
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def lines(self, view: SwarmView, now_s: float) -> list[str]:
        """What is to be said now and was not said before."""
        lines = []
        for node in view.nodes.values():
            state = _state(node)
            if state != self._states.get(node.name, "starting"):
                lines.append(f"{node.name}: {state}")
            self._states[node.name] = state
        due = view.done == view.steps or len(view.heldout) > self._heldout or now_s - self._said_at >= _STEP_LINE_S
        if view.done > self._done and due:
            lines.append(summary_line(view, now_s))
            self._done, self._said_at, self._heldout = view.done, now_s, len(view.heldout)
        return lines


@contextmanager
def opened_screen(console: Console) -> Iterator[Screen | Plain]:
    """The live table if the console is a terminal of at least `LIVE_WIDTH` columns, else lines."""
    if not console.is_terminal or console.width < LIVE_WIDTH:
        yield Plain(console)
        return
    with Live(console=console, auto_refresh=True, refresh_per_second=4, transient=False) as live:
        yield Screen(live)


def _state(node: NodeView) -> str:
    return node.state if node.stage is None else f"{node.state}, stage {node.stage}"


def _loss(loss: float | None) -> str:
    return "not known yet" if loss is None else f"{loss:.4f}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
