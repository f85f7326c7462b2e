"""The demo itself, small: real processes from the seed list to the report; and what Ctrl-C leaves behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import trio

pytestmark = pytest.mark.processes

SMALL = [
    "demo", "--stages", "2", "--replicas", "2", "--set", "model.dim=32", "--set", "model.layers=2", "--set", "model.heads=2",
    "--set", "model.kv_heads=1", "--set", "model.ffn_dim=64", "--set", "model.seq_len=32", "--set", "batch.microbatches=4",
    "--set", "evaluation.microbatches=2",
]  # fmt: skip
FIGURES = {
    "steps", "tokens", "seconds", "tokens_per_s", "first_loss", "last_loss", "heldout_loss", "unigram_loss", "boundary_bytes_per_token",
    "lost_microbatches", "nodes",
}  # fmt: skip


def test_the_demo_trains_and_reports(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "plnode", *SMALL, "--steps", "25", "--out", str(tmp_path / "demo"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures.keys() >= FIGURES
    assert (figures["steps"], figures["nodes"], figures["lost_microbatches"]) == (25, 4, 0)
    assert figures["tokens"] == 25 * 4 * 4 * 32
    assert figures["last_loss"] < figures["first_loss"] - 0.3
    # 32 wide in fp32; forward also 33 ids of 2 bytes a sequence of 32 tokens.
    assert figures["boundary_bytes_per_token"] == {"0-1": {"forward": 32 * 4 + 2 * 33 / 32, "backward": 32 * 4}}
    report = tmp_path / "demo" / "report"
    assert json.loads((report / "summary.json").read_text())["heldout_loss"] == figures["heldout_loss"]
    rows = [json.loads(line) for line in (report / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(26)), "the last row is the held-out loss of the final weights"
    assert (report / "loss.png").read_bytes().startswith(b"\x89PNG")
    logs = "".join(path.read_text() for path in (tmp_path / "demo" / "logs").iterdir())
    assert "Traceback" not in logs


async def test_ctrl_c_leaves_no_process_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "plnode", *SMALL, "--steps", "100000", "--out", str(tmp_path / "demo")]
    with trio.fail_after(120):
        process = await trio.lowlevel.open_process(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        said = b""
        assert process.stdout is not None
        async with process.stdout:
            async for part in process.stdout:
                said += part
                if b"/100000  loss" in said:
                    break
            nodes = psutil.Process(process.pid).children(recursive=True)
            assert len(nodes) == 5
            process.send_signal(signal.SIGINT)
            async for part in process.stdout:
                said += part
        assert await process.wait() == 130
    assert b"Traceback" not in said
    assert [node for node in nodes if node.is_running() and node.status() != psutil.STATUS_ZOMBIE] == []
