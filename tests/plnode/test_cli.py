"""The command line: files, messages, exit codes; no traceback for what is the user's to mend."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from plnode.cli import main
from plnode.cli.status import describe
from plnode.exits import ExitCode, restart_helps
from plnode.observe import events as e
from plnode.observe.status import Status
from tests.plnode.test_observe_events import EXAMPLES

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PLNODE_DATA", "PLNODE_SEEDS", "PLNODE_SETTINGS", "PLNODE_LISTEN"):
        monkeypatch.delenv(name, raising=False)


def test_init_writes_three_files_that_belong_together(tmp_path: Path, capsys: Captured) -> None:
    folder = tmp_path / "run"
    assert main(["run", "init", "--out", str(folder), "--name", "a test", "--set", "steps=7", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [Path(f).name for f in said["files"]] == ["run.toml", "owner.key", "run.signed"]
    assert stat.S_IMODE((folder / "owner.key").stat().st_mode) == 0o600
    assert main(["run", "show", str(folder / "run.signed"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["run_id"], shown["owner"]) == (said["run_id"], said["owner"])
    assert shown["manifest"]["name"] == "a test"
    assert shown["manifest"]["steps"] == 7


def test_sign_after_a_change_makes_another_run(tmp_path: Path, capsys: Captured) -> None:
    main(["run", "init", "--out", str(tmp_path / "r"), "--json"])
    first = json.loads(capsys.readouterr().out)
    toml = tmp_path / "r" / "run.toml"
    toml.write_text(toml.read_text().replace("steps = 300", "steps = 301"))
    assert main(["run", "sign", str(toml), "--json"]) == 0
    second = json.loads(capsys.readouterr().out)
    assert second["owner"] == first["owner"]
    assert second["run_id"] != first["run_id"]
    assert main(["run", "show", str(tmp_path / "r" / "run.signed")]) == 0
    assert "steps = 301" in capsys.readouterr().out


def test_plan_in_a_table_and_in_json(tmp_path: Path, capsys: Captured) -> None:
    main(["run", "init", "--out", str(tmp_path / "r")])
    capsys.readouterr()
    assert main(["run", "plan", str(tmp_path / "r" / "run.toml")]) == 0
    table = capsys.readouterr().out
    assert "embed+0-1" in table
    assert "+head" in table
    assert main(["run", "plan", str(tmp_path / "r" / "run.signed"), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert sum(plan["split"]) == 5
    assert len({len(line) for line in table.splitlines()[1:5]}) == 1  # aligned


def test_init_never_overwrites_a_key(tmp_path: Path, capsys: Captured) -> None:
    main(["run", "init", "--out", str(tmp_path)])
    key = (tmp_path / "owner.key").read_bytes()
    assert main(["run", "init", "--out", str(tmp_path)]) == ExitCode.BAD_INPUT
    assert (tmp_path / "owner.key").read_bytes() == key


JOIN = ["join", "--manifest", "{tmp}/r/run.signed"]
BAD = [
    (["run", "init", "--out", "{tmp}/x", "--set", "model.dim=127"], "model.dim: expected a multiple of model.heads = 4, got 127"),
    (["run", "init", "--out", "{tmp}/x", "--set", "modeldim=127"], "modeldim"),
    (["run", "init", "--out", "{tmp}/x", "--set", "modeldim"], "--set expects KEY=VALUE"),
    (["run", "init", "--out", "{tmp}/x", "--set", 'seed="1"'], 'seed: expected a whole number, from 0 to 4,294,967,295, got "1"'),
    (["run", "sign", "{tmp}/nowhere.toml"], "cannot read {tmp}/nowhere.toml"),
    (["run", "sign", "{tmp}/r/run.toml", "--key", "{tmp}/nokey"], "cannot read the key file {tmp}/nokey"),
    (["run", "show", "{tmp}/r/run.toml"], "plnode run sign"),
    (["run", "plan", "{tmp}/r/owner.key"], "run manifest"),
    (["join", "--manifest", "{tmp}/r/run.signed", "--data", "{tmp}/d"], "needs a seed list"),
    (["join", "--manifest", "{tmp}/r/run.signed", "--seeds", "{tmp}/seeds"], "settings: data: expected a folder"),
    ([*JOIN, "--seeds", "{tmp}/r/run.toml", "--data", "{tmp}/d"], "the seed list cannot be used"),
    (["join", "--manifest", "{tmp}/no", "--seeds", "{tmp}/seeds", "--data", "{tmp}/d"], "cannot read the run file {tmp}/no"),
    (["join", "--manifest", "{tmp}/r/run.signed", "--data", "{tmp}/d", "--device", "tpu"], "Invalid value for '--device'"),
    ([*JOIN, "--data", "{tmp}/d", "--listen", "nonsense"], "settings: listen: expected host:port"),
    (["seed", "--data", "{tmp}/d", "--memory", "3GiB"], "No such option"),
    (["seed", "--data", "{tmp}/d", "--settings", "{tmp}/no.toml"], "cannot read the settings file"),
    (["status", "--data", "{tmp}/nowhere"], "no node runs on {tmp}/nowhere"),
    (["status", "--data", "{tmp}"], "no node runs on {tmp}"),
    (["identity", "--data", "{tmp}/nowhere"], "cannot read the key file"),
    (["demo", "--stages", "0"], "Invalid value for '--stages'"),
    (["demo", "--out", "{tmp}/r"], "holds an earlier run"),
    (["demo", "--set", "stages.split=[1, 2]"], "stages.split: expected stages.count = 3 entries, got 2 entries"),
    (["nonsense"], "No such command"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(a).replace("{tmp}/", "") for a, _ in BAD])
def test_wrong_input_is_one_message_and_exit_code_2(arguments: list[str], message: str, tmp_path: Path, capsys: Captured) -> None:
    """RUN-5"""
    main(["run", "init", "--out", str(tmp_path / "r")])
    (tmp_path / "seeds").write_text("127.0.0.1:4000\n")
    capsys.readouterr()
    assert main([a.format(tmp=tmp_path) for a in arguments]) == ExitCode.BAD_INPUT
    out, err = capsys.readouterr()
    assert message.format(tmp=tmp_path) in err
    assert "Traceback" not in err
    assert not out
    assert not (tmp_path / "d" / "identity.key").exists()


def test_a_missing_setting_in_the_environment_is_named(tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLNODE_THREAD", "2")
    assert main(["seed", "--data", str(tmp_path)]) == 2
    assert 'PLNODE_THREAD: expected a known key, perhaps "threads"' in capsys.readouterr().err


def test_an_identity_is_made_once_and_its_path_is_said(tmp_path: Path, capsys: Captured) -> None:
    """RUN-3"""
    ids = set()
    for flags in (["--create"], ["--create"], []):
        assert main(["identity", "--data", str(tmp_path / "d"), *flags, "--json"]) == 0
        ids.add(capsys.readouterr().out)
    assert len(ids) == 1
    assert json.loads(ids.pop())["key_file"] == str(tmp_path / "d" / "identity.key")
    (tmp_path / "d" / "identity.key").chmod(0o640)
    assert main(["identity", "--data", str(tmp_path / "d")]) == 2
    assert "chmod 600" in capsys.readouterr().err


COMMANDS = [
    "", "bench", "doctor", "run", "run init", "run sign", "run plan", "run show", "seed", "join", "status", "demo", "identity", "exits",
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_with_an_example(command: str, capsys: Captured) -> None:
    assert main([*command.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert f"plnode {command}".strip() in text
    assert "Example" in text or not command


def test_status_says_what_it_waits_for_and_since_when() -> None:
    status = Status(clock=lambda: 100.0)
    for event in EXAMPLES[:-1]:
        status.take(event, 10.0)
    status.take(e.Waiting("for stage 2", "one of two replicas"), 25.0)
    status.take(EXAMPLES[-1], 99.0)
    text = "\n".join(describe(json.loads(json.dumps(status.document()))))
    assert "waits for stage 2 since 1 min 15 s: one of two replicas" in text
    assert "training, stage 1 (layers 2 to 3)" in text
    assert "step 4 of 10, loss 5.5000, 900 tokens/s, 12 s to go" in text
    assert "seed 127.0.0.1:4001: refused (another run)" in text
    assert "rtt ms" in text and "1.25/2.50" in text and "mixed bbr" in text
    assert "event loop blocked p99 0.30 ms" in text
    assert "step 2 given up: a peer died" in text
    assert "snapshot of step 2 not written: no space left" in text
    assert "old" not in text


def test_status_of_a_node_that_has_just_started_and_of_one_that_is_stuck() -> None:
    status = Status(clock=lambda: 100.0)
    assert "starting" in "\n".join(describe(status.document()))
    status.take(EXAMPLES[-1], 60.0)
    assert "these figures are 40 s old" in "\n".join(describe(status.document()))


def test_exit_codes_say_whether_a_restart_helps() -> None:
    """RUN-5"""
    assert restart_helps(ExitCode.NO_PROGRESS)
    assert not any(restart_helps(c) for c in (ExitCode.OK, ExitCode.BAD_INPUT, ExitCode.REFUSED, ExitCode.TERMINATED))
    assert len(set(ExitCode)) == len(ExitCode.__members__)


def test_every_exit_code_is_explained(capsys: Captured) -> None:
    """RUN-5"""
    assert main(["exits"]) == 0
    text = capsys.readouterr().out
    assert all(f"{code.value} {code.name}: " in text for code in ExitCode)
    assert main(["exits", "137", "5", "139"]) == 0
    killed, stuck, signalled = capsys.readouterr().out.splitlines()
    assert "OOMKilled" in killed
    assert stuck.endswith("A restart helps.")
    assert "signal 11" in signalled


def test_a_code_that_a_command_returns_is_explained(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    for code, said in ((ExitCode.NO_MEMORY, "exit code 6 NO_MEMORY"), (ExitCode.OK, ""), (ExitCode.TERMINATED, "")):
        monkeypatch.setattr("plnode.cli.program.main", lambda code=code, **_: code)
        assert main([]) == code
        assert said in (err := capsys.readouterr().err)
        assert bool(err) == bool(said)
