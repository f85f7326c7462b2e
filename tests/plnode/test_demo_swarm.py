"""The demo's swarm with a fake node: the whole life of its processes, and that none is left."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from plnode.cli.service import run_until_signal
from plnode.demo.launcher import Exited, LineSplitter, Said, open_launcher
from plnode.demo.swarm import DemoFailed, SwarmFolder, prepare, run_swarm
from plnode.demo.view import SwarmView
from plnode.exits import BadInput, ExitCode
from plnode.manifest_text import default_values

pytestmark = pytest.mark.processes

FAKE = Path(__file__).with_name("fake_node.py")
PROGRAM = (sys.executable, str(FAKE))
ROOT = FAKE.parents[2]
VALUES = {
    "data.sha256": "ab" * 32, "model.tokenizer": "cd" * 32, "model.layers": 2,
    "stages.count": 2, "stages.replicas": 1, "steps": 4,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SwarmFolder:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PLNODE_NAME", "a setting that must not reach the nodes")
    return prepare(tmp_path / "swarm", default_values(VALUES))


def quiet(view: SwarmView, now_s: float) -> None:
    return


async def test_a_run_from_start_to_end(folder: SwarmFolder) -> None:
    shown: list[int] = []
    with trio.fail_after(60):
        view = await run_swarm(folder, lambda v, now: shown.append(v.done), patience_s=50, program=PROGRAM)
    assert view.done == 4
    assert [p.loss for p in view.series()] == [7.0, 6.0, 5.0, 4.0]
    assert sorted(view.heldout) == [0, 2]
    assert view.tokens == 4 * 64
    assert {n.exit_code for n in view.nodes.values()} == {0}
    assert view.boundary_bytes_per_token() == {"0-1": {"forward": 100.0, "backward": 50.0}}
    assert set(view.snapshots[4]) == {0, 1}
    assert shown[-1] == 4
    assert "no event" in folder.log("node-0").read_text()


async def test_a_node_that_dies_is_named_with_its_last_words(folder: SwarmFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NODE", "die")
    with trio.fail_after(60), pytest.raises(DemoFailed) as failed:
        await run_swarm(folder, quiet, patience_s=50, program=PROGRAM)
    assert failed.value.code is ExitCode.NODE_DIED
    for part in ("node-1", "stage 1", "exit code 7", "the device caught fire"):
        assert part in str(failed.value)


async def test_a_seed_that_cannot_start_is_named(folder: SwarmFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NODE", "no seed")
    with trio.fail_after(60), pytest.raises(DemoFailed, match="the seed ended with exit code 2") as failed:
        await run_swarm(folder, quiet, patience_s=50, program=PROGRAM)
    assert "port in use" in str(failed.value)


async def test_a_swarm_that_is_stuck_ends_with_the_reasons_given(folder: SwarmFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NODE", "stuck")
    with trio.fail_after(60), pytest.raises(DemoFailed) as failed:
        await run_swarm(folder, quiet, patience_s=3, program=PROGRAM)
    assert failed.value.code is ExitCode.NO_PROGRESS
    assert "node-0 (stage 0): waits for a replica of stage 1: 0 of 1 here" in str(failed.value)


async def test_a_cancel_leaves_no_process(folder: SwarmFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """RUN-2"""
    monkeypatch.setenv("FAKE_NODE", "stuck")
    with trio.CancelScope() as scope:

        def cancel_when_waiting(view: SwarmView, now_s: float) -> None:
            if all(n.waiting for n in view.nodes.values()):
                scope.cancel()

        with trio.fail_after(60):
            await run_swarm(folder, cancel_when_waiting, patience_s=50, program=PROGRAM)
    assert scope.cancelled_caught
    assert _children() == []


async def test_a_process_that_does_not_listen_is_killed_with_its_children(tmp_path: Path) -> None:
    grandchild = 0
    with trio.fail_after(60):
        async with open_launcher() as launcher:
            environment = {**os.environ, "FAKE_NODE": "deaf", "PYTHONPATH": str(ROOT)}
            pid = await launcher.start("deaf", [*PROGRAM, "seed"], log=tmp_path / "log", env=environment)
            message = await launcher.messages.receive()
            assert isinstance(message, Said)
            grandchild = int(message.text)
            handles = [os.pidfd_open(p) for p in (pid, grandchild)]
            await launcher.stop(patience_s=0.1)
    assert _all_end(handles, 10.0)


async def test_an_exit_is_told_after_everything_that_was_said(tmp_path: Path) -> None:
    script = "import sys\nfor i in range(5000): print('x' * 100, i)\nsys.stderr.write('bye\\n')\nsys.exit(3)"
    seen: list[Said | Exited] = []
    with trio.fail_after(60):
        async with open_launcher() as launcher:
            await launcher.start("talker", [sys.executable, "-c", script], log=tmp_path / "log")
            while not seen or not isinstance(seen[-1], Exited):
                seen.append(await launcher.messages.receive())
    assert sum(isinstance(m, Said) and m.stream == "stdout" for m in seen) == 5000
    assert seen[-1] == Exited("talker", 3, ("bye",))
    assert (tmp_path / "log").stat().st_size > 500_000


def test_nodes_end_when_the_demo_is_killed(folder: SwarmFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """RUN-2: SIGKILL of the parent leaves nobody to clean up; the end of stdin does it."""
    monkeypatch.setenv("FAKE_NODE", "stuck")
    script = (
        "import sys, trio\nfrom pathlib import Path\nfrom plnode.demo.launcher import open_launcher\n"
        "async def main():\n"
        "    async with open_launcher() as l:\n"
        "        for i in range(2):\n"
        "            flags = ['join', '--name', f'node-{i}', '--data', 'd', '--seeds', sys.argv[2]]\n"
        "            pid = await l.start(str(i), [sys.executable, sys.argv[1], *flags], log=Path(sys.argv[3]))\n"
        "            print(pid, flush=True)\n"
        "        ready = 0\n"
        "        while ready < 2:\n"
        "            m = await l.messages.receive()\n"
        "            ready += 'Waiting' in getattr(m, 'text', '')\n"
        "        print('ready', flush=True)\n"
        "        await trio.sleep_forever()\n"
        "trio.run(main)\n"
    )
    folder.seeds.write_text("seed@127.0.0.1:4000\n")
    argv = [sys.executable, "-c", script, str(FAKE), str(folder.seeds), str(folder.root / "log")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        handles = [os.pidfd_open(pid) for pid in pids]
        assert parent.stdout.readline() == "ready\n"
        parent.kill()
    assert _all_end(handles, 20.0)


def test_an_earlier_run_is_not_written_over(folder: SwarmFolder) -> None:
    with pytest.raises(BadInput, match="holds an earlier run"):
        prepare(folder.root, default_values(VALUES))


@pytest.mark.parametrize(
    ("number", "leaves", "code"),
    [(signal.SIGINT, False, 130), (signal.SIGTERM, False, 143), (signal.SIGINT, True, 130), (signal.SIGTERM, True, 0)],
)
def test_run_2_a_signal_is_a_clean_cancel(number: signal.Signals, leaves: bool, code: int) -> None:
    steps: list[str] = []

    async def program() -> None:
        try:
            os.kill(os.getpid(), number)
            await trio.sleep_forever()
        finally:
            steps.append("goodbye")

    assert run_until_signal(program, steps.append, leaves=leaves) == code  # type: ignore[arg-type]
    assert steps == [f"{number.name} received", "goodbye"]


def test_a_second_signal_ends_a_program_that_does_not_let_go() -> None:
    script = (
        "import os, sys, trio\nfrom plnode.cli.service import run_until_signal\n"
        "async def stubborn():\n"
        "    try:\n"
        "        print('up', flush=True)\n"
        "        await trio.sleep_forever()\n"
        "    finally:\n"
        "        print('first', flush=True)\n"
        "        with trio.CancelScope(shield=True):\n"
        "            await trio.sleep_forever()\n"
        "sys.exit(run_until_signal(stubborn, lambda reason: None))\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for said in ("up\n", "first\n"):
            assert process.stdout.readline() == said
            process.terminate()
        assert process.wait(20) == 143


def test_lines_come_out_whole_whatever_the_pieces() -> None:
    text = b"one\ntwo\r\n\nthree"
    for size in range(1, len(text) + 1):
        splitter = LineSplitter()
        lines = [line for i in range(0, len(text), size) for line in splitter.feed(text[i : i + size])]
        assert [*lines, *splitter.feed(b"")] == ["one", "two", "", "three"]
    splitter = LineSplitter(max_bytes=5)
    assert splitter.feed(b"123456789\n1234") == ["12345"]
    assert splitter.feed(b"56789") == []
    assert splitter.feed(b"\n") == ["12345"]


def _children() -> list[int]:
    mine = str(os.getpid())
    found = []
    for entry in os.listdir("/proc"):
        try:
            fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
        except (OSError, IndexError):
            continue
        if entry.isdigit() and len(fields) > 1 and fields[1] == mine:
            found.append(int(entry))
    return found


def _all_end(handles: list[int], patience_s: float) -> bool:
    """Waits for processes that are not our children: a pidfd becomes readable when its process ends."""
    try:
        return all(select.select([h], [], [], patience_s)[0] for h in handles)
    finally:
        for handle in handles:
            os.close(handle)
