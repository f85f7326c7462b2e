"""A run leaves receipts of exactly the work that it took, whoever reads them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from plnode.observe import events as e
from plnode.plan import receipt_terms
from plnode.swarm.points import Table, tally
from plnode.swarm.receiptcheck import check_logs, log_files
from plnode.swarm.receiptlog import FOLDER
from tests.swarm.harness import RunningNode, Swarm, manifest, train


def read(swarm: Swarm, nodes: Iterable[RunningNode]) -> Table:
    files = [file for node in nodes for file in log_files(node.folder)]
    checked = check_logs(files, run=swarm.signed.run_id)
    assert files and not checked.problems
    return tally(checked.receipts, receipt_terms(swarm.signed.manifest))


async def test_points_of_a_run_are_all_of_its_work_and_no_more(tmp_path: Path) -> None:
    signed = manifest({"stages.count": 3, "stages.replicas": 2, "steps": 4})
    swarm = await train(tmp_path, signed, 6)
    table = read(swarm, swarm.nodes)
    terms = receipt_terms(signed.manifest)
    microbatches = terms.steps * terms.microbatches
    assert not table.findings
    assert sum(row.microbatches for row in table.rows.values()) == microbatches * terms.stages, "held-out ones earn nothing"
    assert table.flops == pytest.approx(microbatches * terms.tokens * sum(terms.flops_per_token))
    assert all(row.one_sided == row.superseded == 0 for row in table.rows.values())
    assert all((folder.stat().st_mode & 0o77) == 0 for node in swarm.nodes for folder in log_files(node.folder))

    # Each worker can show its own work without anybody else's log ...
    for node in swarm.nodes:
        mine = read(swarm, [node])
        own = next(peer for peer in table.rows if str(peer) == node.story.of(e.NodeStarted)[0].peer_id)
        assert mine.rows[own].flops == table.rows[own].flops > 0
    # ... and a log that is lost costs nobody anything: signer and worker both keep each receipt.
    assert read(swarm, swarm.nodes[1:]).flops == table.flops


async def test_a_run_of_one_stage_has_no_neighbours_and_no_receipts(tmp_path: Path) -> None:
    swarm = await train(tmp_path, manifest({"stages.count": 1, "stages.replicas": 2, "steps": 2}), 2)
    assert [file for node in swarm.nodes for file in (node.folder / FOLDER).iterdir()] == []
