"""iperf3 on a line: what TCP itself carries there, without encryption and with almost no CPU.  Everybody's figure is read against it.

The receiver's own count is used (`--get-server-output`, JSON): the sender's also holds what its kernel only queued.  For one server a
test, so `-1`: it ends with the test.  `-O` would drop the start, but not in the series, so the start is dropped here, from the series.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["client", "figures", "server"]


def server() -> list[str]:
    """Command line of the receiving side.  It says nothing until its end, so a client tries until it is there."""
    return ["iperf3", "--server", "--one-off", "--json"]


def client(address: str, seconds: float, congestion: str, connections: int, *, both: bool) -> list[str]:
    """Command line of the sending side; prints one JSON document at its end."""
    options = ["--client", address, "--json", "--get-server-output", "--time", f"{seconds:g}", "--interval", "1"]
    return ["iperf3", *options, "--congestion", congestion, "--parallel", str(connections), *(["--bidir"] if both else [])]


def figures(text: str, drop_s: float) -> dict[str, Any]:
    """What a row needs, from the client's document.  Raises ValueError for a test that failed, with iperf3's words."""
    document = json.loads(text)
    if "error" in document:
        raise ValueError(document["error"])
    server = document["server_output_json"]
    answer: dict[str, Any] = {"congestion": document["end"].get("sender_tcp_congestion", "")}
    # With --bidir `sum` is the way from the client; the way back is received here.
    answer |= _way("", server["intervals"], "sum", drop_s)
    if any("sum_bidir_reverse" in part for part in document["intervals"]):
        answer |= _way("back_", document["intervals"], "sum_bidir_reverse", drop_s)
    used = document["end"]["cpu_utilization_percent"]
    seconds, moved = document["end"]["sum_received"]["seconds"], document["end"]["sum_received"]["bytes"]
    moved += document["end"].get("sum_received_bidir_reverse", {}).get("bytes", 0)
    if moved:
        answer["cpu_s_per_gb"] = (used["host_total"] + used["remote_total"]) / 100 * seconds / (moved / 1e9)
    if "retransmits" in document["end"]["sum_sent"]:
        answer["resent"] = document["end"]["sum_sent"]["retransmits"]
    return answer


def _way(prefix: str, intervals: list[Mapping[str, Any]], key: str, drop_s: float) -> dict[str, Any]:
    sums = [part[key] for part in intervals]
    late = [part for part in sums if part["start"] >= drop_s - 0.5 and part["seconds"] > 0.5]
    seconds = sum(part["seconds"] for part in late)
    rate = sum(part["bytes"] for part in late) * 8e-6 / seconds if seconds else 0.0
    return {f"{prefix}mbit_per_s": rate, f"{prefix}series_mbit": [round(part["bits_per_second"] * 1e-6, 2) for part in sums]}
