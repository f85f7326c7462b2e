"""`python -m bench`: what comes on stdout, and the exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import bench.link.run
from bench.__main__ import program
from bench.children import BenchFailed
from bench.history import read
from bench.link.run import Plan
from bench.report import Column, Report, Row


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The history of figures goes where the command was given."""
    monkeypatch.chdir(tmp_path)


def test_the_last_line_is_the_object(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Plan] = []

    async def measured(plan: Plan) -> Report:
        asked.append(plan)
        return Report(bench="link", conditions={}, columns=[Column("x", "x")], rows=[Row("plnode", {"x": [1.0]})])

    monkeypatch.setattr(bench.link.run, "run_link", measured)
    result = CliRunner().invoke(program, ["link", "--quick", "--json"])
    assert result.exit_code == 0
    *table, last = result.stdout.splitlines()
    assert json.loads(last) == {
        "bench": "link", "conditions": {}, "rows": [{"name": "plnode", "x": 1.0, "spread": {"x": [1.0, 1.0]}}]
    }  # fmt: skip
    assert table[0].split() == ["link", "x"]
    plain = CliRunner().invoke(program, ["link"])
    assert not any(line.startswith("{") for line in plain.stdout.splitlines())
    assert asked == [Plan.quick(), Plan()]
    assert [(entry.row, entry.figures) for entry in read(Path("bench-history.jsonl"))] == [("plnode", {"x": 1.0})] * 2
    assert CliRunner().invoke(program, ["link", "--history", ""]).exit_code == 0
    assert len(read(Path("bench-history.jsonl"))) == 2
    shown = CliRunner().invoke(program, ["history"])
    assert shown.exit_code == 0 and "1.00 1.00" in shown.stdout


def test_options_of_the_lab_need_the_lab() -> None:
    result = CliRunner().invoke(program, ["link", "--rtt", "80"])
    assert result.exit_code == 2 and "--lab" in result.stderr


def test_a_damaged_history_is_named_with_its_line() -> None:
    Path("bench-history.jsonl").write_text("{}\n")
    result = CliRunner().invoke(program, ["history"])
    assert result.exit_code == 1 and "bench-history.jsonl:1" in result.stderr


def test_a_measured_program_that_fails_is_a_message_and_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    async def failing(plan: Plan) -> Report:
        raise ExceptionGroup("tasks", [BenchFailed("plnode client ended without an answer")])

    monkeypatch.setattr(bench.link.run, "run_link", failing)
    result = CliRunner().invoke(program, ["link"])
    assert result.exit_code == 1
    assert result.stderr == "bench: plnode client ended without an answer\n"
