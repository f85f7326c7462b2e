"""The entrypoint of the image as a script, with a stand-in for `plnode`: what it checks, what it hands on, how it says no."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ENTRYPOINT = Path(__file__).parents[2] / "docker" / "entrypoint.sh"
STAND_IN = """#!/bin/sh
echo "pid $$"
for word; do echo "argument $word"; done
env | grep ^PLNODE_ | sort
"""


@pytest.fixture
def box(tmp_path: Path) -> Path:
    """A folder with `bin/plnode`, a data folder and a run file."""
    for folder in ("bin", "data"):
        (tmp_path / folder).mkdir()
    (tmp_path / "bin" / "plnode").write_text(STAND_IN)
    (tmp_path / "bin" / "plnode").chmod(0o755)
    (tmp_path / "run.signed").write_bytes(b"signed")
    return tmp_path


def start(box: Path, *arguments: str, **variables: str) -> tuple[int, list[str], str, int]:
    """Exit code, lines of stdout, stderr, and the process id that the starter saw."""
    environment = {"PATH": f"{box / 'bin'}:{os.environ['PATH']}", "PLNODE_DATA": str(box / "data"), **variables}
    command = ["sh", str(ENTRYPOINT), *arguments]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        out, err = process.communicate(timeout=20)
        return process.returncode, out.splitlines(), err, process.pid


def test_a_list_of_seeds_becomes_a_file_and_the_node_takes_our_place(box: Path) -> None:
    code, out, _, pid = start(
        box, PLNODE_SEEDS="seed.example:4000,12D3KooWx@[::1]:4001 /dns/s/tcp/1", PLNODE_MANIFEST=str(box / "run.signed"), PLNODE_NAME="a b"
    )
    assert code == 0
    assert out[0] == f"pid {pid}", "exec: signals and the exit code are the node's own"
    assert out[1:4] == ["argument join", "argument --manifest", f"argument {box / 'run.signed'}"]
    assert "PLNODE_NAME=a b" in out
    assert not any(line.startswith("PLNODE_MANIFEST") for line in out), "the node refuses a variable that is no setting of it"
    file = box / "data" / "PLNODE_SEEDS"
    assert f"PLNODE_SEEDS={file}" in out
    assert file.read_text().splitlines()[1:] == ["seed.example:4000", "12D3KooWx@[::1]:4001", "/dns/s/tcp/1"]


def test_a_path_stays_one_and_flags_are_handed_on(box: Path) -> None:
    seeds = box / "seeds.txt"
    seeds.write_text("a:1\n")
    code, out, _, _ = start(box, "join", "--name", "x y", PLNODE_SEEDS=str(seeds), PLNODE_MANIFEST=str(box / "run.signed"))
    assert code == 0
    assert f"PLNODE_SEEDS={seeds}" in out
    assert out[4:6] == ["argument --name", "argument x y"]
    assert not (box / "data" / "PLNODE_SEEDS").exists()


@pytest.mark.parametrize(("seeds", "listed"), [("", False), ("other:4000", True), ("/dns/other/tcp/4000", True)])
def test_a_seed_needs_no_seeds_and_no_run(box: Path, seeds: str, listed: bool) -> None:
    code, out, _, _ = start(box, "seed", PLNODE_SEEDS=seeds)
    assert code == 0
    assert "argument seed" in out
    assert any(line.startswith("PLNODE_SEEDS=") for line in out) == listed


def test_anything_else_is_the_command_line(box: Path) -> None:
    for arguments in (["--help"], ["run", "plan", "x"], ["exits", "137"], ["status"]):
        code, out, _, _ = start(box, *arguments, PLNODE_DATA="/nowhere")
        assert code == 0
        assert out[1:-1] == [f"argument {word}" for word in arguments]
    for command in ("join", "seed"):
        assert start(box, command, "--help")[1][1:3] == [f"argument {command}", "argument --help"]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"PLNODE_SEEDS": ""}, "PLNODE_SEEDS: is not set"),
        ({"PLNODE_SEEDS": "/no/seeds.txt"}, "PLNODE_SEEDS: there is no file /no/seeds.txt in this container"),
        ({"PLNODE_MANIFEST": ""}, "PLNODE_MANIFEST: is not set"),
        ({"PLNODE_MANIFEST": "/no/run.signed"}, "PLNODE_MANIFEST: there is no file /no/run.signed in this container"),
        ({"PLNODE_MANIFEST": "{box}/data"}, "is not a file"),  # what Docker makes of a mount without a source
        ({"PLNODE_DATA": "/no/folder"}, "PLNODE_DATA: there is no folder /no/folder"),
        ({"PLNODE_DATA": ""}, "PLNODE_DATA: is empty"),
        ({"PLNODE_DATA": "/proc"}, "cannot write into /proc"),
    ],
)
def test_run_5_what_is_wrong_is_named_with_exit_code_2(box: Path, variables: dict[str, str], message: str) -> None:
    right = {"PLNODE_SEEDS": "a:1", "PLNODE_MANIFEST": str(box / "run.signed")}
    wrong = {name: value.format(box=box) for name, value in variables.items()}
    code, out, err, _ = start(box, "join", **{**right, **wrong})
    assert code == 2
    assert not out
    assert f"plnode: {next(iter(variables))}: " in err
    assert message in err
    assert "a restart does not help" in err


def test_nothing_is_left_of_the_check_that_the_folder_is_writable(box: Path) -> None:
    start(box, "seed")
    assert list((box / "data").iterdir()) == []
