"""The bench on lines, without a line: rates from marks, iperf3's document, what is measured."""

from __future__ import annotations

import json

import pytest
import trio

from bench.children import open_children, python
from bench.conditions import installed
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


@pytest.mark.processes
@pytest.mark.parametrize(("module", "both"), [("plnode_net", True), ("plnode_tensors", True), ("grpc_tls", False), ("py_libp2p", False)])
async def test_a_flow_arrives_and_is_asked_beside(module: str, both: bool) -> None:
    """On loopback, through the same processes as in the lab."""
    for needed, distribution in (("grpc_tls", "grpcio"), ("py_libp2p", "libp2p")):
        if module == needed and installed(distribution) is None:
            pytest.skip(f"{distribution} is not installed")
    with trio.fail_after(100):
        async with open_children() as children:
            server = await children.start("server", python(f"bench.link.{module}", "server"))
            where = await server.hear(60)
            client = await children.start("client", python(f"bench.link.{module}", "client"))
            await client.ask(where, 60)
            request = {"measure": "flow", "message_bytes": 1 << 20, "seconds": 1.0, "drop_s": 0.2, "both": both}
            found = await client.ask(request, 60)
            await children.kill()
    assert found["mbit_per_s"] > 0 and len(found["series_mbit"]) == 1
    assert ("back_mbit_per_s" in found) == both and found.get("back_mbit_per_s", 1.0) > 0
    assert found["idle_p50_ms"] > 0 and 0 < found["loaded_p50_ms"] <= found["loaded_p99_ms"]


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
