"""`plnode receipts`: anybody finds the same points in the same logs, and what is wrong is named with its place.

Mutations that were tried, each fails a test here: exit code 0 for a forged entry; torn ends taken for damage; copies counted as receipts
of their own; the run file's id not looked at; findings of `tally` left out of the exit code.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
from click.testing import CliRunner

from plnode.cli import main, program
from plnode.exits import ExitCode, explain
from plnode.manifest import SignedManifest
from plnode.plan import plan_run, receipt_terms
from plnode.swarm import receiptcheck
from plnode.swarm.receiptlog import ReceiptLog
from plnode.swarm.receipts import Kind
from tests.plnode.swarm.receiptworld import PEOPLE, honest_step, raw
from wire.identity import PeerId


@pytest.fixture(scope="module")
def signed_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("owner") / "run"
    assert main(["run", "init", "--out", str(folder), "--set", "stages.count=2"]) == ExitCode.OK
    return folder / "run.signed"


@pytest.fixture(scope="module")
def run(signed_file: Path) -> SignedManifest:
    return SignedManifest.load(signed_file)


def write(folder: Path, envelopes: list[bytes]) -> Path:
    log = ReceiptLog(folder)
    for envelope in envelopes:
        log.append(envelope)
    log.close()
    return folder / "receipts-00000001.log"


def honest(run: SignedManifest, seed: int = 1) -> tuple[list[bytes], dict[tuple[int, int], PeerId]]:
    manifest = run.manifest
    groups = [PEOPLE[:2], PEOPLE[2:4]]
    count, tokens = manifest.batch.microbatches, manifest.tokens_per_microbatch
    return honest_step(groups, Random(seed), step=0, microbatches=count, tokens=tokens, run=run.run_id)


def verify(*arguments: object) -> tuple[int, dict[str, Any]]:
    """The exit code, as `main` would make it, and the document."""
    result = CliRunner().invoke(program, ["receipts", "verify", *map(str, arguments), "--json"], standalone_mode=False)
    assert result.exception is None, result.exception
    return int(result.return_value), json.loads(result.output)


def test_points_from_the_logs_of_two_nodes(run: SignedManifest, signed_file: Path, tmp_path: Path) -> None:
    receipts, did = honest(run)
    # Two data folders, with copies in both, as nodes keep them.
    write(tmp_path / "one" / "receipts", receipts[:3])
    write(tmp_path / "two" / "receipts", receipts)
    code, told = verify(tmp_path / "one", tmp_path / "two", "--manifest", signed_file)
    assert code == ExitCode.OK and told["sound"] and told["receipts"] == len(receipts)
    assert [(file["good"], file["copies"]) for file in told["files"]] == [(3, 0), (len(receipts), 3)]
    flops = [stage.flops_per_token for stage in plan_run(run.manifest).stages]
    tokens = run.manifest.tokens_per_microbatch
    nodes = {node["peer_id"]: node for node in told["points"]["nodes"]}
    for person in PEOPLE[:4]:
        mine = [stage for (_, stage), worker in did.items() if worker == person.peer_id]
        node = nodes[str(person.peer_id)]
        assert node["microbatches"] == len(mine)
        assert node["flops"] == pytest.approx(sum(tokens * flops[stage] for stage in mine), rel=1e-12)
    assert told["points"]["flops"] == pytest.approx(run.manifest.batch.tokens * sum(flops), rel=1e-12)
    assert told["points"]["run_id"] == run.run_id.hex()
    terms, manifest = receipt_terms(run.manifest), run.manifest
    assert (terms.stages, terms.steps, terms.microbatches, terms.tokens) == (2, manifest.steps, manifest.batch.microbatches, tokens)


def test_without_the_run_file_only_signatures_are_checked(run: SignedManifest, tmp_path: Path) -> None:
    receipts, _ = honest(run)
    path = write(tmp_path, receipts)
    code, told = verify(path)
    assert code == ExitCode.OK and told["points"] is None and told["runs"] == [run.run_id.hex()]
    result = CliRunner().invoke(program, ["receipts", "verify", str(path)], standalone_mode=False)
    assert "points need the run file" in result.output and f"{len(receipts)} receipts in order" in result.output


def test_a_forged_entry_is_named_with_file_and_offset(
    run: SignedManifest, signed_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    receipts, did = honest(run)
    forged = receipts[0].replace(PEOPLE[0].peer_id.raw, PEOPLE[5].peer_id.raw)
    assert forged != receipts[0]
    path = write(tmp_path, [receipts[1], forged, b"nonsense", *receipts[2:], receipts[0]])
    offset = 16 + 8 + len(receipts[1])
    code, told = verify(path, "--manifest", signed_file)
    assert code == ExitCode.UNSOUND == 9 and not told["sound"]
    assert [(p["kind"], p["file"], p["offset"]) for p in told["problems"]] == [
        ("forged", str(path), offset), ("malformed", str(path), offset + 8 + len(forged)),
    ]  # fmt: skip
    assert sum(node["microbatches"] for node in told["points"]["nodes"]) == len(did), "the rest is still counted"
    assert main(["receipts", "verify", str(path), "--manifest", str(signed_file)]) == ExitCode.UNSOUND
    out = capsys.readouterr()
    assert f"{path}: offset {offset}: forged: " in out.out and "UNSOUND" in out.err and explain(9) in out.err


def test_a_torn_end_is_told_and_no_fault_but_damage_is(run: SignedManifest, tmp_path: Path) -> None:
    receipts, _ = honest(run)
    path = write(tmp_path, receipts)
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    code, told = verify(path)
    assert code == ExitCode.OK and told["problem_counts"] == {"torn": 1} and told["receipts"] == len(receipts) - 1
    path.write_bytes(whole[:40] + b"?" + whole[41:])
    code, told = verify(path)
    assert code == ExitCode.UNSOUND and told["problem_counts"] == {"damaged": 1} and told["problems"][0]["offset"] == 16


def test_contradictions_are_named_with_both_places(run: SignedManifest, signed_file: Path, tmp_path: Path) -> None:
    tokens, worker = run.manifest.tokens_per_microbatch, PEOPLE[0].peer_id
    two = [raw(PEOPLE[2], worker, 0, Kind.FORWARD, [0], step=0, tokens=tokens, size=size, run=run.run_id) for size in (1, 2)]
    path = write(tmp_path, two)
    code, told = verify(path, "--manifest", signed_file)
    (finding,) = told["points"]["findings"]
    assert code == ExitCode.UNSOUND and finding["kind"] == "two stories" and finding["culprit"] == str(PEOPLE[2].peer_id)
    assert sorted(finding["places"]) == sorted([f"{path}:16", f"{path}:{16 + 8 + len(two[0])}"])
    result = CliRunner().invoke(program, ["receipts", "verify", str(path), "--manifest", str(signed_file)], standalone_mode=False)
    assert f"{path}:16" in result.output and str(PEOPLE[2].peer_id) in result.output
    # Without the run file each envelope is in order.
    assert verify(path)[0] == ExitCode.OK


def test_receipts_of_another_run_do_not_count(run: SignedManifest, signed_file: Path, tmp_path: Path) -> None:
    receipts, _ = honest(run)
    foreign = raw(PEOPLE[2], PEOPLE[0].peer_id, 0, Kind.FORWARD, [0], run=bytes(31) + b"1")
    code, told = verify(write(tmp_path / "mixed", [*receipts, foreign]), "--manifest", signed_file)
    assert code == ExitCode.OK and told["receipts"] == len(receipts) and told["files"][0]["foreign"] == 1
    with pytest.raises(Exception, match="are of others"):
        verify(write(tmp_path / "other", [foreign]), "--manifest", signed_file)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "cannot read"),
        (lambda path: path.write_bytes(b"[run]\nname = 'x'\n"), "does not begin like a receipt log"),
        (lambda path: path.mkdir(), "holds no receipt log"),
    ],
)
def test_wrong_input_is_one_message(make: Any, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.log"
    make(path)
    for what in ("verify", "show"):
        assert main(["receipts", what, str(path)]) == ExitCode.BAD_INPUT
        error = capsys.readouterr().err
        assert words in error and str(path) in error and "Traceback" not in error


def test_no_path_and_a_wrong_run_file_are_wrong_input(tmp_path: Path, signed_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["receipts", "verify"]) == ExitCode.BAD_INPUT
    path = write(tmp_path / "log", [b"x"])
    assert main(["receipts", "verify", str(path), "--manifest", str(path)]) == ExitCode.BAD_INPUT
    assert "is not a run file in order" in capsys.readouterr().err


def test_show_lists_them_by_step(run: SignedManifest, tmp_path: Path) -> None:
    receipts, _ = honest(run)
    path = write(tmp_path, [*reversed(receipts), receipts[0], b"nonsense"])
    result = CliRunner().invoke(program, ["receipts", "show", str(path)])
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert "worker" in lines[0] and len([line for line in lines if str(path) in line]) == len(receipts)
    assert "1 malformed left out" in result.output
    shown = CliRunner().invoke(program, ["receipts", "show", str(path), "--json"])
    told = [json.loads(line) for line in shown.output.splitlines() if line.startswith("{")]
    assert len(told) == len(receipts) and {one["kind"] for one in told} == {"forward", "backward"}
    assert told[0]["microbatches"][0] == {
        "index": told[0]["microbatches"][0]["index"], "tokens": run.manifest.tokens_per_microbatch, "bytes": 1000, "seconds": 0.25
    }  # fmt: skip


def test_complaints_are_bounded_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiptcheck, "MOST_PROBLEMS", 5)
    path = write(tmp_path, [b"%d" % number for number in range(30)])
    code, told = verify(path)
    assert code == ExitCode.UNSOUND and len(told["problems"]) == 5 and told["problem_counts"] == {"malformed": 30}
    result = CliRunner().invoke(program, ["receipts", "verify", str(path)], standalone_mode=False)
    assert "and 25 more" in result.output


def test_help_has_examples() -> None:
    for command in (["receipts"], ["receipts", "verify"], ["receipts", "show"]):
        text = CliRunner().invoke(program, [*command, "--help"]).output
        assert "plnode receipts" in text and ("Example" in text)


def test_signatures_are_checked_without_torch(run: SignedManifest, tmp_path: Path) -> None:
    """Who only checks signatures must not wait for torch to load."""
    path = write(tmp_path, honest(run)[0])
    call = f"main(['receipts', 'verify', {str(path)!r}])"
    lines = f"import sys; from plnode.cli import main; code = {call}; sys.exit(code or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", lines], capture_output=True, timeout=60).returncode == 0
