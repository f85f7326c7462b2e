"""The pipeline bench: what the nodes' events come to, that the competitors do the same work, one tiny run of everything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trio

from bench.children import BenchFailed, open_children, python
from bench.pipeline.job import Size, load_manifest, write_manifest
from bench.pipeline.run import ROWS, Plan, _trainers, run_pipeline
from bench.pipeline.swarm import Tally
from plnode.model import plan_split
from plnode.observe import events as e

TINY = Size(dim=16, layers=4, heads=2, kv_heads=1, ffn_dim=24, seq_len=16, sequences=2, microbatches=4)


def step_done(step: int, time: float, *, skipped: bool = False) -> dict[str, Any]:
    return {**e.to_json(e.StepDone(step, 1.0, 4096, 99.0, None, skipped)), "time": time}


def status(p99_ms: float, state: str = "training") -> dict[str, Any]:
    return e.to_json(
        e.NodeStatus(
            name="n", peer_id="p", stage=0, state=state, waiting_for=None, waiting_since_s=None, step=1, steps=9, loss=None,
            tokens_per_s=1.0, bytes_in=0, bytes_out=0, queue=0, in_flight=0, credits=0, kept_graphs=0, recomputed=0,
            lost_microbatches=0, boundary_bytes={}, boundary_tokens=0, peers=(), loop_blocked_p99_ms=p99_ms, eta_s=None,
        )
    )  # fmt: skip


def test_a_step_lasts_from_the_slowest_node_to_the_slowest_node() -> None:
    tally = Tally(nodes=2)
    for name, step, time in [("a", 0, 10.0), ("b", 0, 10.5), ("b", 1, 12.0), ("a", 1, 12.5), ("a", 2, 13.0)]:
        tally.take(name, step_done(step, time))
    assert tally.steps_done == 2  # nobody has heard of step 2 from b
    assert tally.tokens_per_s() == [4096 / 2.0]  # and the first step has no beginning


def test_the_loop_is_watched_only_while_training() -> None:
    tally = Tally(nodes=1)
    tally.take("a", status(50.0))  # before the first step: building the model
    tally.take("a", step_done(0, 1.0))
    tally.take("a", status(40.0, "waiting"))
    tally.take("a", status(2.0))
    assert tally.loop_p99_ms == [2.0]


def test_a_disturbed_run_gives_no_figures() -> None:
    with pytest.raises(BenchFailed, match="not finite"):
        Tally(nodes=1).take("a", step_done(3, 1.0, skipped=True))
    with pytest.raises(BenchFailed, match="peer lost"):
        Tally(nodes=1).take("a", e.to_json(e.RunAborted(3, "peer lost", None)))


def test_the_model_is_the_one_that_is_promised(tmp_path: Path) -> None:
    manifest = load_manifest(str(write_manifest(tmp_path, Size(), 2)))
    config = manifest.model_config()
    assert 20e6 < config.params < 22e6
    assert manifest.optimizer.name == "adamw"
    costs = [span.flops_per_token_forward for span in plan_split(config, 2)]
    assert max(costs) < 1.15 * min(costs)  # else the bench would measure the split


@pytest.mark.processes
async def test_one_process_and_torchs_pipeline_do_the_same_work(tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path, TINY, 2)
    with trio.fail_after(200):
        async with open_children() as children:
            trainers = await _trainers(children, manifest, [0, 0])
            losses = {}
            for name, processes in trainers.rows.items():
                for child in processes:
                    await child.tell({"steps": 3})
                losses[name] = (await processes[-1].hear(100))["losses"]
    assert losses["torch-1f1b-gloo"] == pytest.approx(losses["single-1-thread"], rel=1e-5)
    assert losses["single-1-thread"][0] != losses["single-1-thread"][2]  # something is learnt


@pytest.mark.processes
async def test_all_rows_run() -> None:
    with trio.fail_after(300):
        report = await run_pipeline(Plan(repeats=1, steps=2, size=TINY))
    document = json.loads(report.json_line())
    assert [row["name"] for row in document["rows"]] == list(ROWS)
    assert all(row["tokens_per_s"] > 0 for row in document["rows"])
    assert document["conditions"]["torch_threads"]["plnode"] == 1


@pytest.mark.processes
async def test_a_trainer_without_a_manifest_says_so(tmp_path: Path) -> None:
    async with open_children() as children:
        child = await children.start("single", python("bench.pipeline.single"))
        with pytest.raises(BenchFailed, match="cannot read the run file"):
            await child.ask({"manifest": str(tmp_path / "none"), "threads": 1}, 100)
