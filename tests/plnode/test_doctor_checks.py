"""The doctor's verdicts: for each check, what was found and what it is worth."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plnode.doctor import checks as c
from plnode.doctor.checks import Check, Verdict
from plnode.doctor.facts import Device, Disk, Line, Machine, Network, PeerSeen, SeedSeen, Versions
from plnode.doctor.lines import bandwidth
from plnode.doctor.machine import look_at_disk
from plnode.doctor.report import conclude, document, lines
from plnode.doctor.stages import Fit, Need, fits, largest, memory
from plnode.doctor.surroundings import from_status, settled
from plnode.exits import ExitCode, restart_helps
from plnode.observe.status import Status
from plnode.settings import load_settings
from tests.plnode.test_observe_events import EXAMPLES
from wire.identity import Identity

OK, WARNING, BAD, SKIPPED = Verdict.OK, Verdict.WARNING, Verdict.BAD, Verdict.SKIPPED
GIB = 1 << 30
PEER = str(Identity(bytes(32)).peer_id)

VERSIONS = Versions(python=(3, 11, 7), torch=(2, 6), torch_text="2.6.0", protocol=1, manifest_protocol=1, lacking="")
DISK = Disk(folder="/d", exists=True, refused="", free_bytes=10 * GIB)
DEVICE = Device(kind="cpu", threads=1, cores=2, name="", free_bytes=None, lacking="")
GPU = Device(kind="cuda", threads=1, cores=2, name="Some GPU", free_bytes=8 * GIB, lacking="")
MACHINE = Machine(
    versions=VERSIONS, disk=DISK, device=DEVICE, allowed_bytes=None, available_bytes=4 * GIB, limit_bytes=8 * GIB, descriptors=8192,
    connections_most=512, bbr="",
)  # fmt: skip
SEED = SeedSeen(entry="/dns/s/tcp/1", state="connected", reason="", peer_id=PEER, rtt_s=0.02)
SEEN = PeerSeen(peer_id=PEER, rtt_s=0.02, clock_offset_s=0.0)
NETWORK = Network(
    running=False, held_stage=None, scope="internet", bound=("/ip4/0.0.0.0/tcp/4001",), not_bound="", fixed_port=True, access="direct",
    access_reason="reached by others", nat="public", seeds=(SEED,), peers=(SEEN,),
)  # fmt: skip
LINE = Line(peer_id=PEER, path="direct", congestion="bbr", lanes=2, rtt_s=0.02, up_bytes_per_s=2e6, down_bytes_per_s=4e6, refused="")


def changed(facts: Any, **changes: Any) -> Any:
    return replace(facts, **changes)


ROWS: list[tuple[Check, Verdict, str, str]] = [
    (c.versions(VERSIONS), OK, "Python 3.11.7, torch 2.6.0", ""),
    (c.versions(changed(VERSIONS, python=(3, 10, 9))), BAD, "3.10.9", "Python 3.11"),
    (c.versions(changed(VERSIONS, torch=(2, 5))), BAD, "torch", "torch 2.6"),
    (c.versions(changed(VERSIONS, manifest_protocol=2)), BAD, "the run speaks protocol 2", "version of this program"),
    (c.versions(changed(VERSIONS, lacking="data.sha256: another")), BAD, "data.sha256", "the owner of the run uses"),
    (c.disk(DISK, GIB, 3), OK, "10.7 GB free", ""),
    (c.disk(DISK, None, 3), OK, "writable", ""),
    (c.disk(DISK, 4 * GIB, 3), WARNING, "take 12.9 GB", "free 2.15 GB"),
    (c.disk(DISK, 11 * GIB, 3), BAD, "take 35.4 GB", "--data"),
    (c.disk(changed(DISK, refused="read-only"), GIB, 3), BAD, "read-only", "--data"),
    (c.disk(changed(DISK, exists=False), GIB, 3), OK, "not there yet", ""),
    (c.disk(changed(DISK, free_bytes=None), GIB, 3), SKIPPED, "not known", ""),
    (c.device(DEVICE), OK, "1 thread(s) on 2 core(s)", ""),
    (c.device(changed(DEVICE, cores=8)), OK, "--threads 7", ""),
    (c.device(changed(DEVICE, threads=4)), WARNING, "4 thread(s)", "--threads 2"),
    (c.device(GPU), OK, "Some GPU, 8.59 GB", ""),
    (c.device(changed(GPU, lacking="no driver")), BAD, "no driver", "--device cpu"),
    (c.descriptors(2048, 512), OK, "512 connections", ""),
    (c.descriptors(1024, 512), WARNING, "256 connections", "ulimit -n 2048"),
    (c.descriptors(64, 512), BAD, "16 connections", "ulimit"),
    (c.congestion(""), OK, "bbr", ""),
    (c.congestion("not in this kernel"), WARNING, "not in this kernel", "modprobe tcp_bbr"),
    (c.congestion(None), SKIPPED, "no choice", ""),
    (c.listening(NETWORK), OK, "listened on /ip4/0.0.0.0/tcp/4001", ""),
    (c.listening(changed(NETWORK, running=True)), OK, "the running node listens", ""),
    (c.listening(changed(NETWORK, fixed_port=False)), WARNING, "another at each start", "--listen"),
    (c.listening(changed(NETWORK, fixed_port=False, scope="lan")), OK, "listened on", ""),
    (c.listening(changed(NETWORK, not_bound="port 1 is in use")), WARNING, "port 1 is in use", "--listen"),
    (c.listening(changed(NETWORK, not_bound="port 1 is in use", bound=())), BAD, "listened on nothing", "--listen"),
    (c.reachability(NETWORK), OK, "direct: reached by others", ""),
    (c.reachability(changed(NETWORK, scope="lan", access="unknown")), OK, "within this network", ""),
    (c.reachability(changed(NETWORK, access="relayed", nat="nat")), WARNING, "can be punched", "forward it in the router"),
    (c.reachability(changed(NETWORK, access="relayed", nat="nat-symmetric")), WARNING, "only relays help", "forward it"),
    (c.reachability(changed(NETWORK, access="unreachable", nat="outbound-only")), WARNING, "firewall", "until then"),
    (c.reachability(changed(NETWORK, access="unknown", nat="unknown")), SKIPPED, "unknown", "ask again"),
    (c.relaying(False, None), OK, "off", ""),
    (c.relaying(True, None), OK, "a quarter", ""),
    (c.relaying(True, 0), OK, "signalling only", ""),
    (c.relaying(True, 2_000_000), OK, "at most 2 MB/s", ""),
    (c.clock([]), SKIPPED, "no peer", ""),
    (c.clock([None]), SKIPPED, "no peer", ""),
    (c.clock([0.1, 0.2, 99.0]), OK, "0.20 s behind the median of 3", ""),
    (c.clock([5.0, 6.0]), WARNING, "too few", "timedatectl"),
    (c.clock([-5.0, -6.0, -7.0]), WARNING, "6.00 s ahead of", "timedatectl"),
    (c.clock([400.0, 400.0, 401.0]), BAD, "400.00 s behind", "timedatectl"),
    (bandwidth(LINE, 1000.0), OK, "16 Mbit/s up and 32 Mbit/s down; enough for 2 k tokens/s", ""),
    (bandwidth(LINE, 0.0), OK, "direct over 2 lane(s) of bbr, round trip 20 ms", ""),
    (bandwidth(changed(LINE, lanes=0, congestion=""), 0.0), OK, "direct over one connection, round trip", ""),
    (bandwidth(changed(LINE, up_bytes_per_s=1e5), 1000.0), WARNING, "0.8 Mbit/s up", "slower than a megabit"),
    (bandwidth(changed(LINE, down_bytes_per_s=None), 1000.0), WARNING, "not known down", "too little"),
    (bandwidth(changed(LINE, refused="not measured: busy"), 1000.0), SKIPPED, "busy", ""),
]  # fmt: skip


@pytest.mark.parametrize(("check", "verdict", "found", "fix"), ROWS, ids=[f"{n}-{row[0].name}-{row[1]}" for n, row in enumerate(ROWS)])
def test_facts_and_their_verdict(check: Check, verdict: Verdict, found: str, fix: str) -> None:
    assert check.verdict is verdict, check
    assert found in check.found
    assert (fix in check.fix) if fix else not check.fix, check
    assert all(len(line.splitlines()) == 1 for line in lines(check))


def test_a_dead_seed_is_bad_only_when_nobody_is_there() -> None:
    dead = replace(SEED, state="failed", reason="connection refused", peer_id=None, rtt_s=None)
    assert [check.verdict for check in c.seeds([SEED, dead], 1)] == [OK, WARNING]
    assert [check.verdict for check in c.seeds([dead], 1)] == [WARNING]
    (alone,) = c.seeds([dead], 0)
    assert alone.verdict is BAD and "connection refused" in alone.found and alone.fix
    assert c.seeds([], 0)[0].verdict is BAD
    assert c.seeds([], 2)[0].verdict is SKIPPED
    assert "20 ms" in c.seeds([SEED], 1)[0].found
    others = [replace(SEED, state=state) for state in ("self", "released", "dialling")]
    assert [check.verdict for check in c.seeds(others, 1)] == [SKIPPED, OK, WARNING]


NEEDS = [
    Need(0, 5 * GIB, 3 * GIB, GIB), Need(1, 2 * GIB, GIB, GIB // 2), Need(2, 2 * GIB, GIB, GIB // 2),
    Need(3, 9 * GIB, 6 * GIB, 2 * GIB),
]  # fmt: skip


def test_which_stages_fit() -> None:
    assert fits(MACHINE, NEEDS) == [Fit.REPEATING, Fit.WHOLE, Fit.WHOLE, Fit.NOT]
    assert largest(MACHINE, NEEDS) == NEEDS[0]
    found = memory(MACHINE, NEEDS, None)
    assert [(check.name, check.verdict) for check in found] == [
        ("memory", OK), ("stage 0", OK), ("stages 1-2", OK), ("stage 3", WARNING)
    ]  # fmt: skip
    small = replace(MACHINE, available_bytes=GIB // 2)
    assert largest(small, NEEDS) is None
    nothing = memory(small, NEEDS, None)
    assert [check.verdict for check in nothing] == [OK, BAD] and nothing[1].name == "stages 0-3" and "--memory" in nothing[1].fix
    assert [check.found for check in memory(small, NEEDS, 2)] == ["the running node holds stage 2: it fits"]


@pytest.mark.parametrize(
    ("machine", "verdict", "text"),
    [
        (replace(MACHINE, allowed_bytes=2 * GIB), OK, "2.15 GB allowed"),
        (replace(MACHINE, allowed_bytes=6 * GIB), WARNING, "4.29 GB available"),
        (replace(MACHINE, limit_bytes=GIB), WARNING, "only 1.07 GB"),
        (replace(MACHINE, device=replace(GPU, free_bytes=GIB)), WARNING, "only 1.07 GB"),
        (replace(MACHINE, device=GPU), OK, "4.29 GB available"),
    ],
)
def test_memory_that_the_node_would_not_know_of(machine: Machine, verdict: Verdict, text: str) -> None:
    first = memory(machine, NEEDS, None)[0]
    assert (first.verdict, bool(first.fix)) == (verdict, verdict is WARNING) and text in first.found


def test_the_answer_and_its_exit_code() -> None:
    fine = [Check("disk", OK, "room"), Check("clock", WARNING, "slow", "set it"), Check("lines", SKIPPED, "left out")]
    can = conclude(fine, [0, 1, 2, 5], "relayed")
    assert (can.text, can.exit_code) == ("can take part as: stage 0-2 or 5, through relays", ExitCode.OK)
    assert conclude(fine, [3], "direct").text == "can take part as: stage 3, direct"
    cannot = conclude([*fine, Check("seed a", BAD, "gone"), Check("seed b", BAD, "gone"), Check("device", BAD, "none")], [0], "direct")
    assert cannot.text == "cannot take part: seed a: gone; also: device"
    assert cannot.exit_code == ExitCode.CANNOT_TAKE_PART == 8 and not restart_helps(cannot.exit_code)
    told = document(fine, can)
    assert told["checks"][1] == {"name": "clock", "verdict": "warning", "found": "slow", "fix": "set it"}
    assert (told["can_take_part"], told["stages"], told["how"], told["exit_code"]) == (True, [0, 1, 2, 5], "relayed", 0)


ALONE = replace(NETWORK, peers=(), access="unknown", nat="unknown", seeds=(replace(SEED, state="failed"),))
WAITS = [
    (NETWORK, 0.5, 0, True),
    (NETWORK, 0.5, 1, False),
    (NETWORK, 10.0, 1, True),
    (replace(NETWORK, access="unreachable", nat="nat"), 20.0, 0, False),
    (replace(NETWORK, access="unreachable", nat="nat"), 25.0, 0, True),
    (replace(NETWORK, access="relayed", nat="unknown"), 10.0, 0, False),
    (replace(NETWORK, access="relayed", nat="nat"), 3.0, 0, False),
    (replace(NETWORK, access="relayed", nat="nat"), 6.0, 0, True),
    (replace(NETWORK, access="unknown", scope="host"), 0.5, 0, True),
    (replace(NETWORK, peers=(replace(SEEN, rtt_s=None),)), 0.5, 0, False),
    (replace(NETWORK, seeds=(SEED, replace(SEED, state="dialling"))), 0.5, 0, False),
    (ALONE, 4.0, 0, False),
    (ALONE, 5.0, 0, True),
    (replace(ALONE, seeds=(replace(SEED, state="dialling"),)), 14.0, 0, False),
    (replace(ALONE, seeds=()), 14.0, 0, False),
]  # fmt: skip


@pytest.mark.parametrize(("facts", "elapsed_s", "missing", "enough"), WAITS)
def test_how_long_it_waits(facts: Network, elapsed_s: float, missing: int, enough: bool) -> None:
    assert settled(facts, elapsed_s, missing=missing) is enough


def test_a_router_that_is_asked_to_forward_has_its_time() -> None:
    relayed = replace(NETWORK, access="relayed", nat="nat")
    assert settled(relayed, 6.0, missing=0) and not settled(relayed, 6.0, missing=0, mapping=True)
    assert settled(NETWORK, 6.0, missing=0, mapping=True)


def test_a_running_node_is_believed() -> None:
    settings = load_settings({"data": "."}, {})
    status = Status(clock=lambda: 100.0)
    fresh = from_status(status.document(), settings)
    assert (fresh.running, fresh.access, fresh.held_stage) == (True, "unknown", None) and "just started" in fresh.access_reason
    for event in EXAMPLES:
        status.take(event, 99.0)
    seen = from_status(status.document(), settings)
    assert seen.running and seen.held_stage == 1 and seen.bound and seen.peers
    assert {seed.state for seed in seen.seeds} == {"refused"}


def test_a_folder_is_looked_at_and_not_made(tmp_path: Path) -> None:
    found = look_at_disk(tmp_path / "a" / "b")
    assert (found.exists, found.refused) == (False, "") and found.free_bytes
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    assert "cannot be written to" in look_at_disk(tmp_path / "file").refused


def test_versions_are_those_that_the_package_asks_for() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={c.PYTHON_LEAST[0]}.{c.PYTHON_LEAST[1]}"
    assert f"torch>={c.TORCH_LEAST[0]}.{c.TORCH_LEAST[1]}" in project["dependencies"]
