"""Peers in `plnode status`: the table at every width, the JSON, the metrics, and what the network's news become."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import trio

from plnode.cli import main
from plnode.cli.peertable import table
from plnode.heard import told
from plnode.observe import events as e
from plnode.observe.metrics import Metrics
from plnode.observe.status import Status, serve_status
from plnode.peerlines import peer_line
from tests.plnode.test_observe_events import STATUS
from wire.address import Address
from wire.identity import Identity
from wire.net import DIRECT, PUNCHED, ClockOff, ConnectionStatus, PathChanged, PeerStatus, PortMapped, relayed_via
from wire.rtt import Rtt

ONE, TWO, RELAY = (Identity(bytes([number]) * 32).peer_id for number in (1, 2, 3))
FAR = PeerStatus(
    peer_id=ONE,
    path=relayed_via(RELAY),
    connected=True,
    since_s=65.0,
    why="",
    idle=False,
    connections=(
        ConnectionStatus(0, "bbr", 1 << 20, 1 << 20, 0),
        ConnectionStatus(1, "cubic", 5, 16 << 20, 4096),
        ConnectionStatus(2, "cubic", 5, 16 << 20, 4096),
    ),
    rtt=Rtt(64, 0.120, 0.1, 0.125, 0.123, 0.987),
    in_bytes_per_s=1_234_567.8,
    out_bytes_per_s=987.6,
    queued_bytes=(0, 10, 3_000_000, 0, 500),
    resent_chunks=17,
    clock_offset_s=-3.25,
)
NEW = dataclasses.replace(
    FAR, peer_id=TWO, path=DIRECT, why="idle: no stream is open", idle=True, connections=FAR.connections[:1], rtt=None,
    in_bytes_per_s=0.0, out_bytes_per_s=0.0, queued_bytes=(0,) * 5, resent_chunks=0, clock_offset_s=None,
)  # fmt: skip
LOST = dataclasses.replace(NEW, connected=False, connections=(), why="not reachable, dialled again and again: silence", idle=False)
PEERS = (peer_line(FAR, 0), peer_line(NEW, None))
NODE = dataclasses.replace(STATUS, peers=PEERS)


def lines(*peers: e.PeerLine, width: int | None = None) -> list[str]:
    return table(e.to_json(dataclasses.replace(STATUS, peers=peers))["peers"], width)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_a_peer_is_one_row_with_all_its_figures() -> None:
    heading, far, new = lines(*PEERS)
    assert cells(heading) == ["peer", "stage", "path", "rtt ms", "lanes", "in/s", "out/s", "queue", "resent", "clock"]
    assert cells(far) == [
        str(ONE)[-6:], "0", f"via {str(RELAY)[-6:]}", "123/987", "2 cubic", "1.23 MB", "988 B", "3 MB", "17", "-3.25 s",
    ]  # fmt: skip
    assert cells(new) == [str(TWO)[-6:], "-", "direct", "-", "mixed bbr", "0 B", "0 B", "0 B", "0", "-"]
    assert lines() == []


def test_what_is_out_of_order_stands_below_and_idleness_does_not() -> None:
    shown = lines(PEERS[0], PEERS[1], peer_line(LOST, 1))
    assert cells(shown[3])[:5] == [str(TWO)[-6:], "1", "none", "-", "-"]
    assert shown[4:] == [f"  {str(TWO)[-6:]}: not reachable, dialled again and again: silence"]


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120])
def test_the_table_fits_and_loses_the_least_needed_columns(width: int) -> None:
    shown = lines(*PEERS, width=width)
    rows = shown[:3]
    assert max(map(len, rows)) <= width
    heads = cells(rows[0])
    assert heads[:1] == ["peer"] and "rtt ms" in heads
    assert (len(heads) == 10) == (len(shown) == 3)  # who lost columns is told
    assert all(len(cells(row)) == len(heads) for row in rows)
    if width >= 80:
        assert {"path", "lanes", "in/s", "out/s", "queue"} <= set(heads)
    assert all(text.isascii() and text.isprintable() for text in shown)  # no colours, no boxes


def test_every_figure_of_a_status_is_in_the_event() -> None:
    line = e.to_json(NODE)["peers"][0]
    assert line["path"] == "relayed" and line["relay"] == str(RELAY)
    assert [line[f"rtt_{name}"] for name in ("ms", "min_ms", "median_ms", "p99_ms")] == pytest.approx([125, 100, 123, 987])
    assert line["connections"][1] == {
        "lane": 1, "congestion": "cubic", "send_available": 5, "receive_granted": 16 << 20, "receive_used": 4096,
    }  # fmt: skip
    assert line["clock_offset_ms"] == -3250 and line["queued_bytes"] == [0, 10, 3_000_000, 0, 500]
    assert (line["resent_chunks"], line["since_s"], line["connected"], line["idle"]) == (17, 65.0, True, False)
    assert e.event_from_json(e.to_json(NODE)) == NODE


async def test_the_command_shows_the_table_and_all_fields_in_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, metrics = Status(), Metrics()
    for sink in (status, metrics):
        sink.take(NODE, 0.0)
    async with trio.open_nursery() as nursery:
        await nursery.start(serve_status, tmp_path / "status.sock", status, metrics.text)
        monkeypatch.setenv("COLUMNS", "80")
        assert await trio.to_thread.run_sync(main, ["status", "--data", str(tmp_path)]) == 0
        narrow = capsys.readouterr().out
        monkeypatch.delenv("COLUMNS")
        assert await trio.to_thread.run_sync(main, ["status", "--data", str(tmp_path)]) == 0
        piped = capsys.readouterr().out
        assert await trio.to_thread.run_sync(main, ["status", "--data", str(tmp_path), "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert await trio.to_thread.run_sync(main, ["status", "--data", str(tmp_path), "--metrics"]) == 0
        assert 'plnode_peers_by_path{path="relayed"} 1' in capsys.readouterr().out
        nursery.cancel_scope.cancel()
    rows = [line for line in narrow.splitlines() if "via " in line or "mixed" in line]
    assert len(rows) == 2 and max(map(len, rows)) <= 80 and "more columns" in narrow
    assert "clock" in piped and "more columns" not in piped and "\x1b" not in narrow + piped
    assert document["status"]["peers"] == e.to_json(NODE)["peers"]


def test_metrics_of_peers_are_sums_and_medians_without_ids() -> None:
    metrics = Metrics()
    near = dataclasses.replace(peer_line(FAR, 1), path="direct", relay=None, rtt_median_ms=23.0, clock_offset_ms=1250.0)
    metrics.take(dataclasses.replace(STATUS, peers=(*PEERS, near, peer_line(LOST, 0))), 0.0)
    assert metrics.value("plnode_peers") == 4
    paths = {path: metrics.value("plnode_peers_by_path", f'{{path="{path}"}}') for path in ("direct", "punched", "relayed")}
    assert paths == {"direct": 2, "punched": 0, "relayed": 1}  # the lost one is on no path
    assert metrics.value("plnode_lanes") == 4 and metrics.value("plnode_resent_chunks") == 34
    assert metrics.value("plnode_peer_queued_bytes", '{class="2"}') == 6_000_000
    assert metrics.value("plnode_peer_rtt_seconds") == pytest.approx(0.073)
    assert metrics.value("plnode_peer_rtt_worst_p99_seconds") == pytest.approx(0.987)
    assert metrics.value("plnode_clock_offset_seconds") == pytest.approx(-1.0)
    assert str(ONE) not in metrics.text()
    metrics.take(dataclasses.replace(STATUS, peers=()), 1.0)
    assert metrics.value("plnode_clock_offset_seconds") is None  # nobody is there to compare with
    assert metrics.value("plnode_lanes") == 0


def test_what_people_hear_of_clocks_and_paths() -> None:
    behind = told(ClockOff(7.5, 3), lambda _: None)
    assert isinstance(behind, e.Notice) and "7.5 s behind those of 3 peers" in behind.text
    ahead = told(ClockOff(-30.0, 5), lambda _: None)
    assert isinstance(ahead, e.Notice) and "30.0 s ahead of those of 5 peers" in ahead.text
    moved = told(PathChanged(ONE, PUNCHED, relayed_via(RELAY)), lambda _: None)
    assert moved == e.PathChanged(str(ONE), "punched", f"relayed via {RELAY}")


def test_what_people_hear_of_the_router() -> None:
    forwards = told(PortMapped(4001, Address("8.8.4.4", 50001), "PCP"), lambda _: None)
    assert isinstance(forwards, e.Notice) and "forwards 8.8.4.4:50001 to port 4001 (PCP)" in forwards.text
    refuses = told(PortMapped(4001, None, "it says no"), lambda _: None)
    assert refuses == e.Notice("the router does not forward port 4001: it says no")
