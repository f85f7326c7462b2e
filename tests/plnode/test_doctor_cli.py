"""`plnode doctor` as a process, against a seed and a member of the run on loopback."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plnode.cli import main
from plnode.cli.doctor import _Screen
from plnode.exits import ExitCode
from wire.identity import Identity, lock_data_folder

# A seed, and a member that serves perf/1 on a data folder with a status socket: a whole node would bring training that takes the line.
SERVER = """
import sys, trio
from pathlib import Path
from plnode.manifest import SignedManifest
from plnode.observe import events as e
from plnode.observe.status import Status, serve_status
from wire.address import Address, Scope
from wire.identity import Identity, lock_data_folder
from wire.net import SeedList, open_net
from wire.net.perf import serve_perf

async def serve():
    here = dict(listen=[Address("127.0.0.1", 0)], scope=Scope.HOST)
    run, folder = SignedManifest.load(Path(sys.argv[1])).run_id, Path(sys.argv[2])
    async with open_net(Identity.generate(), run=None, **here) as seed:
        seeds = SeedList.of(str(seed.addresses[0]))
        with lock_data_folder(folder):
            member = Identity.load_or_create(folder / "identity.key")
            async with open_net(member, run=run, seeds=seeds, **here) as net, trio.open_nursery() as nursery:
                serve_perf(net)
                while net.peer(seed.peer_id) is None:
                    await trio.sleep(0.01)
                status = Status()
                status.take(e.NodeStarted(str(net.peer_id), "m", (str(net.addresses[0]),), "cpu", 1), 0.0)
                status.take(e.StageAssigned(1, 1, 2, 10, 10), 0.0)
                status.take(e.SeedState("the seed", "connected", None), 0.0)
                await nursery.start(serve_status, folder / "status.sock", status)
                print(seed.addresses[0].port, net.addresses[0].port, net.peer_id, flush=True)
                await trio.to_thread.run_sync(sys.stdin.read)
                nursery.cancel_scope.cancel()

trio.run(serve)
"""


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("doctor")
    assert main(["run", "init", "--out", str(folder)]) == 0
    return folder / "run.signed"


@pytest.fixture(scope="module")
def swarm(run_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int, str, Path]]:
    """Seed, port and id of the member, its data folder."""
    folder = tmp_path_factory.mktemp("member")
    command = [sys.executable, "-c", SERVER, str(run_file), str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        seed, member, peer_id = process.stdout.readline().split()
        yield f"127.0.0.1:{seed}", int(member), peer_id, folder
        process.stdin.close()
        assert process.wait(20) == 0


def doctor(run_file: Path, *arguments: str, listen: str = "127.0.0.1:0") -> subprocess.CompletedProcess[str]:
    settings = ["--scope", "host", "--listen", listen, "--seconds", "0.3"]
    command = [sys.executable, "-m", "plnode", "doctor", "--manifest", str(run_file), *settings, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=90)


def verdicts(told: dict[str, Any]) -> dict[str, str]:
    return {check["name"]: check["verdict"] for check in told["checks"]}


def test_a_machine_that_can_take_part(swarm: tuple[str, int, str, Path], run_file: Path, tmp_path: Path) -> None:
    seed, _, peer_id, _ = swarm
    data = tmp_path / "data"
    data.mkdir()
    Identity.load_or_create(data / "identity.key")
    kept = ["--seeds", seed, "--data", str(data)]
    done = doctor(run_file, *kept)
    assert done.returncode == ExitCode.OK, done.stdout + done.stderr
    assert not done.stderr  # no spinner where there is no terminal
    assert done.stdout.splitlines()[-1] == "can take part as: stage 0-2, direct"
    assert "ok       seed " in done.stdout and "round trip" in done.stdout
    assert f"ok       line to {peer_id[-6:]}" in done.stdout and "Mbit/s up" in done.stdout
    assert "direct over one connection" in done.stdout  # within one machine there are no lanes
    again = doctor(run_file, *kept, "--json")
    assert again.returncode == ExitCode.OK, again.stderr
    told = json.loads(again.stdout)
    assert told["can_take_part"] and told["stages"] == [0, 1, 2] and told["how"] == "direct"
    (line,) = [check for check in told["checks"] if check["name"].startswith("line to")]
    assert line["verdict"] == "skipped" and "within this minute" in line["found"]
    assert verdicts(told)["clock"] == "ok"
    assert {path.name for path in data.iterdir()} <= {"identity.key", "lock"}  # nothing else is left behind


def test_a_machine_that_cannot(swarm: tuple[str, int, str, Path], run_file: Path, tmp_path: Path) -> None:
    seed, port, _, _ = swarm
    new = tmp_path / "new"
    tight = ["--seeds", seed, "--data", str(new), "--memory", "1MiB", "--quick", "--json"]
    done = doctor(run_file, *tight, listen=f"127.0.0.1:{port}")
    assert done.returncode == ExitCode.CANNOT_TAKE_PART, done.stdout + done.stderr
    told = json.loads(done.stdout)
    bad = [check for check in told["checks"] if check["verdict"] == "bad"]
    assert [check["name"] for check in bad] == ["stages 0-2", "addresses"]
    assert "in use by another program" in bad[1]["found"] and all(check["fix"] for check in bad)
    assert verdicts(told)["lines"] == "skipped" and told["stages"] == [] and not told["can_take_part"]
    assert told["exit_code"] == 8 and told["conclusion"].startswith("cannot take part: stages 0-2: does not fit")
    assert not new.exists()


def test_no_seed_answers(run_file: Path, tmp_path: Path) -> None:
    done = doctor(run_file, "--seeds", "127.0.0.1:1", "--data", str(tmp_path))
    assert done.returncode == ExitCode.CANNOT_TAKE_PART, done.stderr
    assert "bad      seed /ip4/127.0.0.1/tcp/1: failed: 127.0.0.1:1: connection refused" in done.stdout
    assert "no node that trains in this run is connected" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("cannot take part: seed /ip4/127.0.0.1/tcp/1")


def test_a_node_that_runs_is_asked(swarm: tuple[str, int, str, Path], run_file: Path) -> None:
    seed, port, _, folder = swarm
    done = doctor(run_file, "--seeds", seed, "--data", str(folder), listen=f"127.0.0.1:{port}")
    assert done.returncode == ExitCode.OK, done.stdout + done.stderr
    assert f"the running node listens on /ip4/127.0.0.1/tcp/{port}" in done.stdout
    assert "the running node holds stage 1" in done.stdout and "plnode bench" in done.stdout
    assert done.stdout.splitlines()[-1] == "can take part as: stage 1, direct"


@pytest.mark.parametrize("live", [False, True])
def test_the_line_that_moves_is_for_terminals_and_is_taken_away(live: bool, capsys: pytest.CaptureFixture[str]) -> None:
    screen = _Screen(live=live)
    screen.turn("waiting for a seed")
    shown = capsys.readouterr().err
    assert ("waiting for a seed" in shown) is live and "\n" not in shown
    screen.clear()
    assert capsys.readouterr().err.endswith("\x1b[K" if live else "")


BAD = [
    ([], "a doctor's visit needs a seed list"),
    (["--seeds", "/nowhere"], "the seed list cannot be used"),
    (["--seeds", "127.0.0.1:1", "--listen", "nonsense"], "settings: listen: expected host:port"),
    (["--seeds", "127.0.0.1:1", "--seconds", "16"], "Invalid value for '--seconds'"),
    (["--seeds", "127.0.0.1:1", "--device", "tpu"], "Invalid value for '--device'"),
    (["--seeds", "127.0.0.1:1", "--manifest", "/nowhere"], "cannot read the run file /nowhere"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_wrong_input(arguments: list[str], message: str, run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--manifest", str(run_file), *arguments]) == ExitCode.BAD_INPUT
    out, err = capsys.readouterr()
    assert message in err and "Traceback" not in err and not out


def test_a_folder_that_is_held_by_something_that_does_not_answer(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Identity.load_or_create(tmp_path / "identity.key")
    with lock_data_folder(tmp_path):
        code = main(["doctor", "--manifest", str(run_file), "--seeds", "127.0.0.1:1", "--data", str(tmp_path)])
    assert code == ExitCode.BAD_INPUT
    assert "another process uses the data folder" in capsys.readouterr().err
