"""`plnode seeds`: what is signed is what a node takes; what it would refuse is not signed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from plnode.cli import main, program
from plnode.exits import ExitCode
from plnode.manifest import SignedManifest
from plnode.settings import load_settings
from wire.identity import Identity
from wire.net import SeedList


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("owner") / "run"
    assert main(["run", "init", "--out", str(folder)]) == ExitCode.OK
    return folder


def test_a_list_is_signed_shown_and_taken(run: Path, tmp_path: Path) -> None:
    plain, signed = tmp_path / "seeds.txt", tmp_path / "seeds.signed"
    plain.write_text("seed.example:4000  # the first\n8.0.0.1:4000\n")
    result = CliRunner().invoke(program, ["seeds", "sign", str(plain), "--manifest", str(run / "run.signed"), "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.output)
    assert told["seeds"] == 2 and told["files"] == [str(signed)]
    manifest = SignedManifest.load(run / "run.signed")
    seeds = SeedList.gather([str(signed)], owner=manifest.owner, run=manifest.run_id)
    assert [str(entry) for entry in seeds.entries] == ["/dns/seed.example/tcp/4000", "/ip4/8.0.0.1/tcp/4000"]
    shown = json.loads(CliRunner().invoke(program, ["seeds", "show", str(signed), "--json"]).output)
    assert (shown["owner"], shown["run_id"], len(shown["seeds"])) == (str(manifest.owner), manifest.run_id.hex(), 2)


def test_what_a_node_would_refuse_is_not_signed(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = tmp_path / "seeds.txt"
    plain.write_text("nonsense\n")
    assert main(["seeds", "sign", str(plain), "--manifest", str(run / "run.signed")]) == ExitCode.BAD_INPUT
    assert "is no seed list" in capsys.readouterr().err
    assert not (tmp_path / "seeds.signed").exists()
    plain.write_text("8.0.0.1:4000\n")
    key = tmp_path / "another.key"
    Identity.load_or_create(key)
    assert main(["seeds", "sign", str(plain), "--manifest", str(run / "run.signed"), "--key", str(key)]) == ExitCode.BAD_INPUT
    assert "not that of the run's owner" in capsys.readouterr().err


def test_places_of_seeds_in_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = load_settings({"data": ".", "seeds": "8.0.0.1:4000, seeds.txt,https://example.org/Seeds"}, {})
    assert settings.seeds == ("/ip4/8.0.0.1/tcp/4000", str(tmp_path / "seeds.txt"), "https://example.org/Seeds")
    assert load_settings({"data": "."}, {"PLNODE_SEEDS": "[::1]:4000"}).seeds == ("/ip6/::1/tcp/4000",)
