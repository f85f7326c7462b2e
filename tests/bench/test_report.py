"""The report: medians, spread, requirements, the table in all its widths, the JSON object."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.report import Bar, Column, Report, Row, Summary, number, quantile, ratios, summary

COLUMNS = (Column("mib_per_s", "MiB/s"), Column("rtt_p50_us", "rtt p50 us"))


def report(**changes: object) -> Report:
    given_: dict[str, object] = {
        "bench": "link",
        "conditions": {"load_before": 0.25, "versions": {"trio": "0.35.0"}},
        "columns": COLUMNS,
        "rows": [
            Row("plnode", {"mib_per_s": [300.0, 100.0, 290.0], "rtt_p50_us": [90.5]}, {"message_bytes": 1048576}),
            Row("trio-aead", {"mib_per_s": [1400.0, 1500.0, 1600.0]}, {"message_bytes": 1048576}),
        ],
    }
    return Report(**{**given_, **changes})  # type: ignore[arg-type]


def test_one_disturbed_repeat_does_not_move_the_median() -> None:
    assert summary([300.0, 3.0, 290.0]) == Summary(290.0, 3.0, 300.0)
    assert summary([1.0, 2.0, 3.0, 40.0]) == Summary(2.5, 1.0, 40.0)


def test_no_samples_have_no_summary_and_infinite_ones_are_refused() -> None:
    assert summary([]) is None
    for bad in (math.inf, math.nan):
        with pytest.raises(ValueError):
            summary([1.0, bad])


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=50), st.floats(0.01, 1.0))
def test_a_quantile_is_a_sample_that_enough_samples_do_not_exceed(samples: list[float], share: float) -> None:
    found = quantile(samples, share)
    assert found in samples
    assert sum(s <= found for s in samples) >= share * len(samples) - 1e-9
    assert sum(s < found for s in samples) < share * len(samples)


def test_p99_of_a_thousand_is_not_the_greatest() -> None:
    assert quantile([1.0] * 989 + [50.0] * 10 + [900.0], 0.99) == 50.0
    with pytest.raises(ValueError):
        quantile([], 0.5)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0.00"), (0.01234, "0.0123"), (1.234, "1.23"), (12.34, "12.3"), (123.4, "123"), (1234567.8, "1,234,568")],
)
def test_numbers_have_three_digits_or_all_before_the_point(value: float, text: str) -> None:
    assert number(value) == text


def test_ratios_are_taken_within_a_repeat() -> None:
    assert ratios([100.0, 50.0], [50.0, 25.0]) == [2.0, 2.0]  # the machine was half as fast in the second repeat
    assert ratios([100.0], [50.0], 2) == [1.0]
    assert ratios([1.0], []) == []


def test_a_requirement_is_met_missed_or_not_measured() -> None:
    least = Bar("a / b", [3.9, 4.1, 4.2], at_least=4.0)
    assert least.met is True and "met" in least.line() and ">= 4" in least.line()
    assert Bar("a / b", [3.9, 3.9, 4.2], at_least=4.0).met is False
    most = Bar("x", [3.1], at_most=3.0)
    assert most.met is False and "MISSED" in most.line()
    assert Bar("x", [2.9], at_most=3.0).met is True
    missing = Bar("x", [], at_least=1.0)
    assert missing.met is None and missing.line() == "x: not measured"


def test_json_is_one_line_with_medians_labels_and_spread() -> None:
    line = report(notes=["py-libp2p: not installed: pip install 'plnode[bench]'"]).json_line()
    assert "\n" not in line
    document = json.loads(line)
    assert list(document) == ["bench", "conditions", "rows"]
    assert document["bench"] == "link"
    assert document["conditions"]["notes"] == ["py-libp2p: not installed: pip install 'plnode[bench]'"]
    assert document["rows"][0] == {
        "name": "plnode",
        "message_bytes": 1048576,
        "mib_per_s": 290.0,
        "rtt_p50_us": 90.5,
        "spread": {"mib_per_s": [100.0, 300.0], "rtt_p50_us": [90.5, 90.5]},
    }
    assert document["rows"][1]["rtt_p50_us"] is None and "rtt_p50_us" not in document["rows"][1]["spread"]


def test_the_table_shows_spread_where_it_fits() -> None:
    lines = report().text(120).splitlines()
    assert lines[0].split() == ["link", "message_bytes", "MiB/s", "rtt", "p50", "us"]
    assert "290 (100..300)" in lines[1] and "1,048,576" in lines[1]
    assert lines[2].rstrip().endswith("-")
    assert len({len(line) for line in lines[:2]}) == 1  # figures stand to the right, under each other


def test_a_narrower_table_loses_the_spread_before_any_figure() -> None:
    text = report().text(48)
    table = text.split("\n\n")[0]
    assert "290" in table and "(100..300)" not in table
    assert max(map(len, table.splitlines())) <= 48


@given(st.integers(1, 200))
def test_no_width_loses_a_figure(width: int) -> None:
    full = report(bars=[Bar("a ratio of two rates", [0.5], at_least=0.4)], notes=["a note of several words"])
    words = full.text(width).split()
    for figure in ("290", "1,500", "90.5", "0.5 (0.5..0.5)", "note", "0.35.0"):
        assert figure.replace(" ", "") in "".join(words), figure
    longest = max(map(len, words))
    # What cannot be broken may stand out; nothing else does (the indent of a continued line is at most 4).
    assert max(map(len, full.text(width).splitlines())) <= max(width, longest + 4)


def test_rows_of_different_labels_share_a_table() -> None:
    rows = [Row("plnode", {"mib_per_s": [1.0]}, {"message_bytes": 64}), Row("plnode", {"mib_per_s": [2.0]})]
    lines = report(rows=rows).text(100).splitlines()
    assert lines[1].split()[:2] == ["plnode", "64"] and lines[2].split()[:2] == ["plnode", "2.00"]
