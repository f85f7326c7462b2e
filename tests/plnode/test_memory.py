"""What a stage may use: the container's limit, the refusal that says what would do, and the word after a silent end."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

import plnode.node
from plnode.exits import ExitCode, Outcome
from plnode.lastword import FILE_MAX_BYTES, LastWord
from plnode.manifest import Manifest, SignedManifest, sign
from plnode.manifest_text import default_values, render, shipped_values
from plnode.memory import HEADROOM_BYTES, Room, room_for_stage, system_limit
from plnode.observe import events as e
from plnode.observe.recorder import Recorder
from plnode.plan import plan_run
from plnode.settings import load_settings
from tests.plnode.test_observe_events import EXAMPLES
from wire.identity import Identity

MIB = 1 << 20
LARGE = {"model.dim": 1024, "model.ffn_dim": 2752, "model.heads": 8}
ASSIGNED = next(event for event in EXAMPLES if isinstance(event, e.StageAssigned))


def of_limit(limit_mib: int, asked_mib: int | None = None) -> Room:
    return room_for_stage(None if asked_mib is None else asked_mib * MIB, limit_bytes=limit_mib * MIB, held_bytes=170 * MIB)


def test_of_a_limit_the_program_and_the_wire_take_their_part() -> None:
    room = of_limit(1024)
    assert room.set_aside_bytes == 170 * MIB + HEADROOM_BYTES + 256 * MIB
    assert room.stage_bytes == 1024 * MIB - room.set_aside_bytes
    assert of_limit(1024, asked_mib=900).stage_bytes == 900 * MIB, "the owner's word counts"
    assert room_for_stage(None, limit_bytes=None).set_aside_bytes == 0


@pytest.mark.parametrize("limit_mib", [300, 512, 1024, 8192])
def test_mem_2_a_refusal_names_a_limit_that_does(limit_mib: int) -> None:
    """MEM-2: at 50 % and 101 % of what there is; the limit named is enough, and no more than 1 % above it."""
    room = of_limit(limit_mib)
    fits = max(room.stage_bytes, 0)
    assert (room.refusal([fits * 5, fits // 2]) is None) == (room.stage_bytes >= 0)
    needed = fits + fits // 100 + 3 * MIB
    refusal = room.refusal([needed, needed * 2])
    assert refusal is not None and f"limit of {limit_mib:,} MiB" in refusal
    named = int(refusal.split("a limit of ")[1].split(" MiB")[0].replace(",", ""))
    assert of_limit(named).refusal([needed]) is None
    assert of_limit(named * 99 // 100 - 1).refusal([needed]) is not None


def test_mem_3_a_setting_above_the_limit_is_warned_of() -> None:
    warning = of_limit(512, asked_mib=400).warning()
    assert warning is not None and "400 MiB" in warning and "137" in warning
    assert of_limit(512, asked_mib=100).warning() is None
    assert of_limit(512).warning() is None


def test_a_limit_above_the_machine_is_none(tmp_path: Path) -> None:
    """Version 1 of the cgroups says "no limit" with a number near 2^63, version 2 with a word."""
    files = [tmp_path / "memory.max", tmp_path / "memory.limit_in_bytes"]
    assert system_limit(files) is None
    files[1].write_text("9223372036854771712\n")
    assert system_limit(files) is None
    files[0].write_text("max\n")
    assert system_limit(files) is None
    files[0].write_text("400000000\n")
    assert system_limit(files) == 400_000_000


@pytest.mark.parametrize(("limit_mib", "said"), [(128, "limit is 128 MiB"), (420, "smallest stage of this run needs")])
async def test_a_node_that_cannot_fit_is_refused_before_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit_mib: int, said: str
) -> None:
    monkeypatch.setattr(plnode.node, "system_limit", lambda: limit_mib * MIB)
    identity = Identity.generate()
    toml = render(default_values({**shipped_values(), **LARGE})).encode()
    settings = load_settings({"data": str(tmp_path), "listen": "192.0.2.1:1"}, {})  # an address that cannot be bound
    with trio.fail_after(60):
        outcome = await plnode.node.run_node(settings, SignedManifest.open(sign(identity, toml)), identity, Recorder())
    assert isinstance(outcome, Outcome)
    assert outcome.exit_code is ExitCode.NO_MEMORY
    assert said in outcome.message


def test_the_large_model_above_is_too_large_and_the_shipped_one_is_not() -> None:
    fits = []
    for changes in ({}, LARGE):
        toml = render(default_values({**shipped_values(), **changes})).encode()
        fits.append(of_limit(512).refusal(stage.least_bytes for stage in plan_run(Manifest.parse(toml)).stages) is None)
    assert fits == [True, False]


def test_mem_3_the_next_start_tells_of_a_silent_end(tmp_path: Path) -> None:
    first = LastWord(tmp_path)
    assert first.left_behind() is None
    first.begin(limit_bytes=400_000_000)
    first.take(ASSIGNED, 1.0)
    second = LastWord(tmp_path)
    told = second.left_behind()
    assert told is not None
    assert "without a word" in told
    assert "400.0 MB" in told.replace("400 MB", "400.0 MB")
    assert "planned with" in told
    second.begin(limit_bytes=None)
    second.take(e.NodeStopped("SIGTERM received"), 2.0)
    assert LastWord(tmp_path).left_behind() is None


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"plan_bytes": "many", "limit_bytes": -1}', "9" * FILE_MAX_BYTES * 2, "\xff"])
def test_a_damaged_last_word_is_no_obstacle(tmp_path: Path, content: str) -> None:
    (tmp_path / "running.json").write_text(content, "latin-1")
    told = LastWord(tmp_path).left_behind()
    assert told is not None and told.endswith("went down")
