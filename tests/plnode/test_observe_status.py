"""The status socket and the metrics: what is asked for is what happened."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
import trio

from plnode.exits import BadInput
from plnode.observe import events as e
from plnode.observe.metrics import Metrics
from plnode.observe.status import NodeAbsent, Status, ask, serve_status
from tests.plnode.test_observe_events import EXAMPLES, PEER, STATUS


def test_the_document_says_what_it_waits_for_and_since_when() -> None:
    now = 100.0
    status = Status(clock=lambda: now)
    status.take(e.Waiting("for stage 2", "nobody holds it"), 40.0)
    status.take(e.Waiting("for stage 2", "one of two"), 70.0)  # the same cause: its age counts from the first
    status.take(e.Waiting("for a seed", ""), 90.0)
    status.take(e.WaitingOver("for a seed"), 95.0)
    assert status.document()["waiting"] == [{"what": "for stage 2", "detail": "one of two", "since_s": 60.0}]
    assert status.document()["status"] is None


def test_the_document_is_json_after_every_event_and_bounded() -> None:
    status = Status(clock=lambda: 10.0)
    for i in range(200):
        for event in EXAMPLES:
            status.take(event, 5.0)
        status.take(e.SeedState(f"seed {i}", "down", "refused"), 5.0)
    document = json.loads(json.dumps(status.document(), allow_nan=False))
    assert document["age_s"] == 5.0
    assert e.event_from_json(document["status"]) == STATUS
    assert document["stage"]["stage"] == 1
    assert len(document["seeds"]) == 64
    assert len(document["troubles"]) == 8


async def test_the_socket_answers_and_goes(tmp_path: Path) -> None:
    folder = tmp_path / ("a long name " * 10)  # beyond the 107 bytes of a Unix socket's path
    folder.mkdir()
    status, metrics = Status(), Metrics()
    status.take(STATUS, 0.0)
    metrics.take(STATUS, 0.0)
    async with trio.open_nursery() as nursery:
        await nursery.start(serve_status, folder / "status.sock", status, metrics.text)
        assert (folder / "status.sock").stat().st_mode & 0o777 == 0o600
        document = json.loads(await trio.to_thread.run_sync(ask, folder))
        assert document["status"]["step"] == 4
        assert "plnode_queue 1" in await trio.to_thread.run_sync(ask, folder, "metrics")
        assert "unknown request" in await trio.to_thread.run_sync(ask, folder, "secrets")
        nursery.cancel_scope.cancel()
    assert not (folder / "status.sock").exists()
    with pytest.raises(NodeAbsent, match="no node runs on"):
        ask(folder)


async def test_a_socket_left_by_a_killed_node_is_replaced(tmp_path: Path) -> None:
    """RUN-2"""
    path = tmp_path / "status.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with pytest.raises(NodeAbsent):
        ask(tmp_path)
    async with trio.open_nursery() as nursery:
        await nursery.start(serve_status, path, Status())
        assert json.loads(await trio.to_thread.run_sync(ask, tmp_path))["status"] is None
        with pytest.raises(OSError, match="in use"):  # but one that is alive is left alone
            await serve_status(path, Status())
        assert json.loads(await trio.to_thread.run_sync(ask, tmp_path))["status"] is None
        nursery.cancel_scope.cancel()


async def test_an_asker_that_says_nothing_is_let_go(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    path = tmp_path / "status.sock"
    async with trio.open_nursery() as nursery:
        await nursery.start(serve_status, path, Status())
        silent = await trio.open_unix_socket(path)
        async with silent:
            assert await silent.receive_some(1) == b""
            assert trio.current_time() >= 2.0
        nursery.cancel_scope.cancel()


def test_asking_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="there is no such folder"):
        ask(tmp_path / "nowhere")


def test_metrics_count_what_the_events_say() -> None:
    metrics = Metrics()
    for event in EXAMPLES:
        metrics.take(event, 0.0)
    assert metrics.value("plnode_tokens_total") == 2 * 8192
    assert metrics.value("plnode_loss") == 7.5  # the second step's loss is not known: the last known one stays
    assert metrics.value("plnode_skipped_steps_total") == 1
    assert metrics.value("plnode_waiting") == 0
    assert metrics.value("plnode_peers_lost_total") == 1
    assert metrics.value("plnode_boundary_bytes_total", '{boundary="0-1",direction="backward"}') == 90
    metrics.take(e.Waiting("x", ""), 0.0)
    assert metrics.value("plnode_waiting") == 1


def test_the_exposition_reads_as_prometheus_reads_it() -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    metrics = Metrics()
    for event in EXAMPLES:
        metrics.take(event, 0.0)
    families = {f.name: f for f in parser.text_string_to_metric_families(metrics.text())}
    assert families["plnode_sent_bytes"].type == "counter"
    samples = {(s.name, s.labels.get("direction")): s.value for s in families["plnode_boundary_bytes"].samples}
    assert samples == {("plnode_boundary_bytes_total", "forward"): 100.0, ("plnode_boundary_bytes_total", "backward"): 90.0}
    assert PEER not in metrics.text()
