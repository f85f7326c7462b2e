"""`plnode bench` as a process against a serving process, and its messages for what the user has to mend."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from plnode.cli import main
from plnode.exits import ExitCode
from wire.identity import Identity, lock_data_folder

# A member that serves perf/1 and nothing else: a whole node would bring torch, and training that takes the line.
SERVER = """
import sys, trio
from plnode.manifest import SignedManifest
from pathlib import Path
from wire.address import Address, Scope
from wire.identity import Identity
from wire.net import open_net
from wire.net.perf import serve_perf

async def serve():
    run = SignedManifest.load(Path(sys.argv[1])).run_id if sys.argv[1] else None
    async with open_net(Identity.generate(), run=run, listen=[Address("127.0.0.1", 0)], scope=Scope.HOST) as net:
        if run is not None:
            serve_perf(net)
        print(net.addresses[0].port, net.peer_id, flush=True)
        await trio.to_thread.run_sync(sys.stdin.read)

trio.run(serve)
"""


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    assert main(["run", "init", "--out", str(folder)]) == 0
    return folder / "run.signed"


def serving(manifest: str) -> Iterator[tuple[str, str]]:
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, manifest], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        port, peer_id = process.stdout.readline().split()
        yield f"127.0.0.1:{port}", peer_id
        process.stdin.close()
        assert process.wait(20) == 0


@pytest.fixture
def server(run_file: Path) -> Iterator[tuple[str, str]]:
    yield from serving(str(run_file))


@pytest.fixture
def seed() -> Iterator[tuple[str, str]]:
    yield from serving("")


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "plnode", "bench", *arguments, "--scope", "host", "--seconds", "0.5"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_line_is_measured_and_a_second_time_is_too_soon(server: tuple[str, str], run_file: Path, tmp_path: Path) -> None:
    address, peer_id = server
    Identity.load_or_create(tmp_path / "identity.key")
    kept = ["--manifest", str(run_file), "--data", str(tmp_path)]
    done = bench(f"{peer_id}@{address}", *kept, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["peer_id"] == peer_id and found["path"] == "direct"
    assert found["up_mbit_s"] > 0 and found["down_mbit_s"] > 0
    assert found["connect_ms"] >= 0 and found["handshake_ms"] > 0 and found["rtt_ms"] > 0
    assert found["congestion"] != "not known"
    again = bench(address, *kept)
    assert again.returncode == ExitCode.BAD_INPUT
    assert "RATE_LIMITED" in again.stderr and "again in" in again.stderr and "Traceback" not in again.stderr
    person = bench(address, "--manifest", str(run_file), "--both")  # an identity of its own: another peer
    assert person.returncode == 0, person.stderr
    assert "steady rate up" in person.stdout and "megabyte" in person.stdout
    assert max(map(len, person.stdout.splitlines())) <= 140


def test_a_seed_is_not_measured(seed: tuple[str, str], run_file: Path) -> None:
    refused = bench(seed[0], "--manifest", str(run_file))
    assert refused.returncode == ExitCode.BAD_INPUT
    assert "A seed is not measured" in refused.stderr and "Traceback" not in refused.stderr


def test_nobody_at_the_address(run_file: Path) -> None:
    gone = bench("127.0.0.1:1", "--manifest", str(run_file))
    assert gone.returncode == ExitCode.BAD_INPUT
    assert "cannot be reached" in gone.stderr and "firewall" in gone.stderr and "Traceback" not in gone.stderr


PEER = str(Identity(bytes(32)).peer_id)
BAD = [
    ([PEER], "Give --seeds"),
    (["nonsense"], "is no address and no peer id"),
    (["1.2.3.4:99999"], "is no address and no peer id"),
    (["1.2.3.4:99", "--seconds", "16"], "Invalid value for '--seconds'"),
    (["1.2.3.4:99", "--data", "/nowhere"], "there is no folder /nowhere"),
    ([PEER, "--seeds", "/nowhere"], "the seed list cannot be used"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_wrong_input(arguments: list[str], message: str, run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments, "--manifest", str(run_file)]) == ExitCode.BAD_INPUT
    assert message in capsys.readouterr().err


def test_a_folder_on_which_a_node_runs(tmp_path: Path, run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with lock_data_folder(tmp_path):
        assert main(["bench", "1.2.3.4:99", "--manifest", str(run_file), "--data", str(tmp_path)]) == ExitCode.BAD_INPUT
    assert "Leave --data out" in capsys.readouterr().err
