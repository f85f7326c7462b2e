"""The demo's view, screen and report: many nodes' stories become one, and what is not known is not shown as a number."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from plnode.demo.report import figures, last_words, write_report
from plnode.demo.screen import LIVE_WIDTH, Plain, Screen, opened_screen, picture, summary_line
from plnode.demo.view import SwarmView
from plnode.observe import events as e
from tests.plnode.test_observe_events import STATUS


def view_of(steps: int = 4, *, nodes: int = 2, done: int = 0) -> SwarmView:
    view = SwarmView([f"node-{i}" for i in range(nodes)], steps=steps, patience_s=90)
    for i in range(nodes):
        view.apply(f"node-{i}", e.NodeStarted(f"id-{i}", f"node-{i}", (), "cpu", 1), 1.0)
        view.apply(f"node-{i}", e.StageAssigned(i, i, i + 1, 10, 10), 1.0)
        view.apply(f"node-{i}", e.RunStarted(1, 0, ()), 2.0)
    for step in range(done):
        # Every node tells the step; only the last stage knows the loss.
        view.apply("node-0", e.StepDone(step, None, 100, 0.5, 1.0, False), 3.0 + step)
        view.apply("node-1", e.StepDone(step, 5.0 - step, 100, 0.5, 1.0, False), 3.1 + step)
    return view


def test_a_step_counts_once_and_its_loss_is_the_one_that_is_told() -> None:
    view = view_of(done=3)
    assert view.done == 3
    assert view.tokens == 300
    assert [p.loss for p in view.series()] == [5.0, 4.0, 3.0]
    assert view.seconds == pytest.approx(2.5)  # told at 3, 4 and 5 s; the first began at 2.5 s
    assert view.tokens_per_s == pytest.approx(120.0)
    assert view.eta_s == pytest.approx(100 / 120)


@given(st.permutations([(n, s) for n in range(3) for s in range(4)]))
def test_the_order_in_which_nodes_tell_their_steps_changes_nothing(told: list[tuple[int, int]]) -> None:
    view = SwarmView(["node-0", "node-1", "node-2"], steps=4, patience_s=9)
    for at, (node, step) in enumerate(told):
        loss = float(step) if node == 2 else None
        view.apply(f"node-{node}", e.StepDone(step, loss, 10, 0.1, None, False), float(at))
    assert [(p.step, p.loss) for p in view.series()] == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0)]
    assert view.tokens == 40


def test_a_swarm_is_stuck_only_after_its_deadline() -> None:
    view = view_of()
    assert not view.is_stuck(89.0)
    assert view.is_stuck(90.1)
    view = view_of(steps=100, done=5)  # steps of half a second: a third of the patience is longer than 20 of them
    assert view.deadline_s() == 30.0
    assert not view.is_stuck(7.0 + 30.0)
    assert view.is_stuck(7.0 + 30.1)
    slow = view_of(steps=100)
    for step in range(4):
        slow.apply("node-0", e.StepDone(step, 1.0, 100, 10.0, None, False), 10.0 * step)
    assert slow.deadline_s() == 200.0


def test_a_node_that_leaves_early_or_badly_is_dead_and_one_that_finished_is_not() -> None:
    view = view_of()
    view.apply("node-0", e.RunFinished(4), 5.0)
    view.exited("node-0", 0, (), 5.0)
    assert view.dead() == []
    view.exited("node-1", 0, (), 5.0)
    assert [n.name for n in view.dead()] == ["node-1"]
    view.nodes["node-1"].finished, view.nodes["node-1"].exit_code = True, 1
    assert [n.name for n in view.dead()] == ["node-1"]


def shown(view: SwarmView, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(picture(view, 65.0))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_picture_shows_each_node_and_the_run() -> None:
    view = view_of(done=2)
    view.apply("node-1", dataclasses.replace(STATUS, bytes_in=1_500_000), 5.0)
    view.apply("node-0", e.Waiting("for a replica of stage 1", "0 of 1"), 5.0)
    view.apply("node-0", e.HeldOut(2, 4.25, 10), 5.0)
    text = shown(view)
    run = ("step 2/4", "loss 4.0000", "held-out 4.2500", "elapsed 1:05")
    for part in (*run, "node-1", "training", "1.5 MB", "waits for a replica"):
        assert part in text
    assert all(len(line) <= 120 for line in text.splitlines())


def test_what_is_not_known_yet_is_said_so() -> None:
    assert "loss not known yet" in summary_line(view_of(), 1.0)
    assert "ETA" not in summary_line(view_of(), 1.0)


def test_without_a_terminal_there_are_lines_and_only_new_ones() -> None:
    plain = Plain(Console(file=io.StringIO()))
    view = view_of()
    assert plain.lines(view, 0.1) == ["node-0: started, stage 0", "node-1: started, stage 1"]
    assert plain.lines(view, 0.2) == []
    view.apply("node-0", e.StepDone(0, 5.0, 100, 0.5, None, False), 3.0)
    assert [line[:8] for line in plain.lines(view, 3.0)] == ["step 1/4"]
    view.apply("node-0", e.StepDone(1, 5.0, 100, 0.5, None, False), 3.1)
    assert plain.lines(view, 3.1) == []  # at most one a second
    assert len(plain.lines(view, 4.1)) == 1
    view.apply("node-0", e.StepDone(2, 5.0, 100, 0.5, None, False), 4.2)
    view.apply("node-0", e.StepDone(3, 5.0, 100, 0.5, None, False), 4.2)
    assert len(plain.lines(view, 4.2)) == 1  # but the last one at once


@pytest.mark.parametrize(
    ("terminal", "width", "kind"), [(True, LIVE_WIDTH, Screen), (True, LIVE_WIDTH - 1, Plain), (False, 200, Plain)]
)
def test_the_table_needs_a_terminal_of_some_width(terminal: bool, width: int, kind: type) -> None:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=width)
    with opened_screen(console) as screen:
        assert type(screen) is kind
        screen.show(view_of(done=1), 1.0)
    assert isinstance(console.file, io.StringIO)
    assert "step 1/4" in console.file.getvalue()


def full_view() -> SwarmView:
    view = view_of(done=4)
    view.apply("node-1", e.HeldOut(4, 3.5, 10), 8.0)
    for i, moved in enumerate((e.BoundaryBytes(4000, 0), e.BoundaryBytes(0, 2000))):
        status = dataclasses.replace(STATUS, boundary_bytes={"0-1": moved}, boundary_tokens=40, lost_microbatches=i)
        view.apply(f"node-{i}", status, 8.0)
    return view


def test_the_final_figures() -> None:
    result = figures(full_view(), unigram_loss=6.0, run_id="ab")
    assert (result["steps"], result["tokens"], result["nodes"], result["lost_microbatches"]) == (4, 400, 2, 1)
    assert (result["first_loss"], result["last_loss"], result["heldout_loss"]) == (5.0, 2.0, 3.5)
    assert result["boundary_bytes_per_token"] == {"0-1": {"forward": 100.0, "backward": 50.0}}
    assert result["tokens_per_s"] == round(400 / 3.5, 1)
    text = "\n".join(last_words(result))
    assert "held-out loss 3.5000, 2.5000 below word frequencies alone (6.0000)" in text
    assert "boundary 0-1: 100 B/token forward, 50 B/token backward" in text


def test_figures_that_are_not_known_are_null() -> None:
    result = figures(view_of(), unigram_loss=6.0, run_id="ab")
    assert result["first_loss"] is result["heldout_loss"] is result["tokens_per_s"] is None
    assert "loss" not in "\n".join(last_words(result))


def test_the_report_folder(tmp_path: Path) -> None:
    view = full_view()
    result = figures(view, unigram_loss=6.0, run_id="ab")
    written = write_report(tmp_path / "report", view, result)
    assert [p.name for p in written] == ["summary.json", "metrics.jsonl", "loss.png"]
    assert json.loads((tmp_path / "report" / "summary.json").read_text()) == result
    rows = [json.loads(line) for line in (tmp_path / "report" / "metrics.jsonl").read_text().splitlines()]
    assert [row.get("loss") for row in rows] == [5.0, 4.0, 3.0, 2.0, None]
    assert rows[-1] == {"step": 4, "heldout_loss": 3.5}
    assert (tmp_path / "report" / "loss.png").read_bytes()[:4] == b"\x89PNG"
