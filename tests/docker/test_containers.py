"""The image and a swarm of containers: hardened, killed, stopped, starved of memory.  `make docker-test`; needs a Docker engine.

Containers write events as JSON lines; all times are theirs, compared with the engine's StartedAt on the same clock.
"""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docker.engine import HARD, IMAGE, Container, build, docker, missing

pytestmark = pytest.mark.container

FIRST_MICROBATCH_S = 20.0
SMALL = {
    "model.layers": 2, "model.dim": 64, "model.ffn_dim": 128, "model.seq_len": 32, "stages.count": 2, "stages.replicas": 1,
    "batch.microbatches": 4, "evaluation.every": 0, "snapshot.every": 5,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def image() -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    build()


class Yard:
    """One test's network, volumes and containers."""

    def __init__(self, folder: Path) -> None:
        self._mark = f"plnode-test-{uuid.uuid4().hex[:8]}"
        self.folder = folder
        self.names: list[str] = []
        docker("network", "create", self._mark)

    def run_file(self, **changes: object) -> Path:
        """The signed file of a run, made by the image itself."""
        folder = self.folder / uuid.uuid4().hex[:8]
        folder.mkdir()
        folder.chmod(0o777)
        sets = [f"--set={key}={value}" for key, value in {**SMALL, **{k.replace("__", "."): v for k, v in changes.items()}}.items()]
        docker("run", "--rm", "-v", f"{folder}:/out", IMAGE, "run", "init", "--out", "/out/run", *sets)
        return folder / "run" / "run.signed"

    def seed(self) -> Container:
        return self._start("seed", ["--env", "PLNODE_SCOPE=lan"], ["seed", "--json"])

    def node(self, name: str, signed: Path, *flags: str, **variables: str) -> Container:
        told = {"PLNODE_SCOPE": "lan", "PLNODE_SEEDS": "seed:4001", "PLNODE_MANIFEST": "/run.signed", "PLNODE_NAME": name, **variables}
        environment = [word for key, value in told.items() for word in ("--env", f"{key}={value}")]
        return self._start(name, [*environment, "-v", f"{signed}:/run.signed:ro", *flags], ["join", "--json"])

    def _start(self, name: str, flags: list[str], command: list[str]) -> Container:
        full = f"{self._mark}-{name}"
        self.names.append(full)
        volume = ["--volume", f"{full}:/data"]
        docker("run", "--detach", "--name", full, "--network", self._mark, "--network-alias", name, *HARD, *volume, *flags, IMAGE, *command)
        return Container(full)

    def clear(self) -> None:
        docker("rm", "--force", *self.names, check=False)
        docker("volume", "rm", *self.names, check=False)
        docker("network", "rm", self._mark)


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    made = Yard(tmp_path)
    try:
        yield made
    finally:
        made.clear()


def test_run_4_hardened_and_as_any_user(tmp_path: Path) -> None:
    for user in ("10001", "12345:12345"):
        done = docker("run", "--rm", *HARD, "--user", user, IMAGE, "--help")
        assert "plnode demo" in done.stdout
    assert docker("run", "--rm", "--entrypoint", "id", IMAGE, "-u").stdout == "10001\n"
    if os.geteuid() == 0:  # a mounted folder of somebody else's
        theirs = tmp_path / "theirs"
        theirs.mkdir(mode=0o700)
        os.chown(theirs, 1000, 1000)
        refused = docker("run", "--rm", *HARD, "-v", f"{theirs}:/data", IMAGE, "seed", check=False)
        assert refused.returncode == 2
        assert "run with --user 1000:1000" in refused.stderr
        docker("run", "--rm", *HARD, "--user", "1000:1000", "-v", f"{theirs}:/data", IMAGE, "identity", "--data", "/data", "--create")
        assert {path.stat().st_uid for path in theirs.rglob("*")} == {1000}
        assert (theirs / "identity.key").stat().st_mode & 0o777 == 0o600


def test_run_5_wrong_input_names_the_variable() -> None:
    for variables, named in (
        ([], "PLNODE_SEEDS"),
        (["PLNODE_SEEDS=a:1"], "PLNODE_MANIFEST"),
        (["PLNODE_SEEDS=a:1", "PLNODE_MANIFEST=/none"], "PLNODE_MANIFEST"),
        (["PLNODE_SEEDS=a:1", "PLNODE_MANIFEST=/etc/passwd", "PLNODE_THREAD=1"], "PLNODE_THREAD"),
        (["PLNODE_SEEDS=nonsense", "PLNODE_MANIFEST=/etc/passwd"], "PLNODE_SEEDS"),
    ):
        flags = [word for variable in variables for word in ("--env", variable)]
        done = docker("run", "--rm", *HARD, *flags, IMAGE, check=False)
        assert done.returncode == 2
        assert named in done.stderr
        assert "Traceback" not in done.stderr


def test_a_swarm_of_containers_survives_kill_and_leaves_on_sigterm(yard: Yard) -> None:
    """Trains; one container is killed and started again with its volume; one is stopped; the rest of the run is not needed."""
    signed = yard.run_file(steps=100_000)
    seed = yard.seed()
    seed.wait_for("NodeStarted")
    nodes = [yard.node(name, signed) for name in ("a", "b")]
    for node in nodes:
        node.wait_for("StepDone")
        node.wait_for("SnapshotWritten")
        # The step's events come when all of its microbatches are done: the first one was before that.
        first = node.events("StepDone")[0]["time"] - node.started_at()
        print(f"\ncontainer start to the end of the first step: {first:.1f} s")
        assert first <= FIRST_MICROBATCH_S
    assert docker("exec", nodes[0].name, "healthcheck.sh").returncode == 0

    survivor, victim = nodes
    identity = victim.events("NodeStarted")[0]["peer_id"]
    docker("kill", victim.name)
    assert victim.ended() == 137
    assert not victim.state()["OOMKilled"]
    aborted = survivor.wait_for("RunAborted")
    assert aborted["peer_id"] == identity
    refused = docker("start", victim.name)
    assert refused.returncode == 0
    since = victim.started_at()
    assert victim.wait_for("NodeStarted", since)["peer_id"] == identity, "the volume keeps the key"
    resumed = victim.wait_for("RunStarted", since)
    assert resumed["step"] >= 5
    again = victim.wait_for("StepDone", since)["time"] - since
    print(f"restart after a kill to the end of the first step, from the snapshot: {again:.1f} s")
    assert "ended without a word" in victim.output()
    survivor.wait_for("StepDone", resumed["time"])

    before_stop = survivor.events("StepDone")[-1]["time"]
    took = victim.stop()
    print(f"docker stop: {took:.1f} s")
    assert victim.state()["ExitCode"] == 0
    assert took < 10
    lost = survivor.wait_for("PeerLost", before_stop, lambda event: event["peer_id"] == identity)
    assert "SHUTDOWN" in lost["reason"], "it said goodbye"
    for container in (survivor, seed):
        container.stop()
        assert container.state()["ExitCode"] == 0


@pytest.mark.parametrize("limit_mib", [128, 340])
def test_mem_2_a_limit_in_which_no_stage_fits_is_refused_with_what_would_do(yard: Yard, limit_mib: int) -> None:
    signed = yard.run_file(steps=10, **{"model.dim": 512, "model.heads": 8, "model.ffn_dim": 1376})
    node = yard.node("small", signed, "--memory", f"{limit_mib}m")
    assert node.ended() == 6
    assert not node.state()["OOMKilled"]
    assert "exit code 6 NO_MEMORY" in node.output()
    assert f"limit {'is' if limit_mib == 128 else 'of'} {limit_mib} MiB" in node.output()


def test_mem_3_a_kill_for_memory_is_told_at_the_next_start(yard: Yard) -> None:
    """The owner promises the stage more than the container has: warned of, killed, told of."""
    large = {"model.dim": 1024, "model.heads": 8, "model.ffn_dim": 4096, "model.layers": 6, "stages.count": 1, "batch.microbatches": 2}
    signed = yard.run_file(steps=10, **large)
    yard.seed().wait_for("NodeStarted")
    node = yard.node("greedy", signed, "--memory", "400m", "--memory-swap", "400m", PLNODE_MEMORY="16GiB")
    assert node.ended() == 137
    assert node.state()["OOMKilled"]
    assert "of the container's limit of 400 MiB only" in node.output()
    docker("start", node.name)
    told = node.wait_for("Notice", node.started_at(), lambda event: "without a word" in event["text"])
    assert "memory limit was 419 MB" in told["text"]
    assert "planned with" in told["text"]
    docker("kill", node.name, check=False)


def test_a_stop_in_the_first_seconds_does_not_take_ten(yard: Yard) -> None:
    """RUN-2: as process 1, before anything listens to the signal but after the interpreter is up."""
    signed = yard.run_file(steps=10)
    node = yard.node("early", signed, PLNODE_SEEDS="127.0.0.1:1")
    try:
        docker("exec", node.name, "sh", "-c", "until grep -q '^SigCgt:.*[4567cdef]...$' /proc/1/status; do :; done", timeout_s=30)
        took = node.stop()
    except (AssertionError, subprocess.TimeoutExpired):
        pytest.fail(node.output())
    assert node.state()["ExitCode"] in (0, 143)
    assert took < 9
