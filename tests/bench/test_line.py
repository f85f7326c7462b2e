"""The bench on lines, without a line: rates from marks, iperf3's document, what is measured."""

from __future__ import annotations

import json

import pytest

from bench.line import iperf
from bench.line.plan import LinePlan, Point, payload_mbit
from bench.link.flow import per_second, rate


def test_a_rate_does_not_depend_on_where_a_mark_falls() -> None:
    steady = [(0.35 * n, 35) for n in range(1, 40)]  # 100 a second in coarse marks
    assert rate(steady, 5.0) == pytest.approx(100.0)
    assert per_second(steady, 13.0) == pytest.approx([100.0] * 13)


def test_the_start_is_dropped_and_silence_is_zero() -> None:
    fast_then_slow = [(0.1 * n, 100) for n in range(1, 51)] + [(5 + 0.1 * n, 10) for n in range(1, 51)]
    assert rate(fast_then_slow, 5.0) == pytest.approx(100.0)
    assert rate(fast_then_slow, 0.0) == pytest.approx(550.0)
    assert rate([(1.0, 5)], 2.0) == rate([], 0.0) == 0.0
    assert per_second([(0.5, 7)], 3.0) == [7.0, 0.0, 0.0]


def test_payload_of_a_line() -> None:
    assert payload_mbit(200.0) == pytest.approx(191.28, abs=0.01)


def document(**changes: object) -> str:
    parts = [{"sum": {"start": float(n), "seconds": 1.0, "bytes": 10**6 * (n + 1), "bits_per_second": 8e6 * (n + 1)}} for n in range(4)]
    end = {
        "sender_tcp_congestion": "cubic",
        "cpu_utilization_percent": {"host_total": 2.0, "remote_total": 3.0},
        "sum_received": {"seconds": 4.0, "bytes": 10**7},
        "sum_sent": {"retransmits": 7},
    }
    return json.dumps({"intervals": parts, "server_output_json": {"intervals": parts}, "end": end, **changes})


def test_iperf3_is_read_without_its_start() -> None:
    found = iperf.figures(document(), 2.0)
    assert found["mbit_per_s"] == pytest.approx(28.0)  # the mean of 24 and 32
    assert found["cpu_s_per_gb"] == pytest.approx(0.05 * 4 / 0.01)
    assert (found["resent"], found["congestion"]) == (7, "cubic")
    with pytest.raises(ValueError, match="refused"):
        iperf.figures(document(error="connection refused"), 2.0)


def test_chosen_points_are_every_combination() -> None:
    plan = LinePlan.chosen(
        rates=(), rtts=(20.0, 80.0), losses=(0.0, 0.1), congestions=(), lanes=(), sizes=("1m",), both=False, only=("plnode",)
    )
    assert [point for point, _ in plan.turns] == [Point(200.0, rtt, loss) for rtt in (20.0, 80.0) for loss in (0.0, 0.1)]
    assert all([runner.name for runner in runners] == ["plnode"] for _, runners in plan.turns)


def test_the_plans_take_the_time_they_promise() -> None:
    for plan, least, most in ((LinePlan.quick(), 30, 60), (LinePlan.full(), 240, 500)):
        flows = sum(len(runners) for _, runners in plan.turns)
        assert least <= flows * plan.seconds <= most
