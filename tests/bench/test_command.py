"""`python -m bench`: what comes on stdout, and the exit code."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

import bench.link.run
from bench.__main__ import program
from bench.children import BenchFailed
from bench.link.run import Plan
from bench.report import Column, Report, Row


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


def test_a_measured_program_that_fails_is_a_message_and_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    async def failing(plan: Plan) -> Report:
        raise ExceptionGroup("tasks", [BenchFailed("plnode client ended without an answer")])

    monkeypatch.setattr(bench.link.run, "run_link", failing)
    result = CliRunner().invoke(program, ["link"])
    assert result.exit_code == 1
    assert result.stderr == "bench: plnode client ended without an answer\n"
