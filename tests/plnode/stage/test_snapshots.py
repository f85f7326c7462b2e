"""Snapshots: whole or absent, verified or refused by name (MEM-5, JOIN-2)."""

import os
import shutil

import pytest
import torch
from safetensors import safe_open

from plnode.stage import SnapshotError, snapshot_file
from plnode.stage.snapshots import SnapshotStore
from wire.identity import Identity

RUN, OTHER_RUN = b"\x01" * 32, b"\x02" * 32


def tensors(value=1.0):
    return {
        "layers.0.ffn.up.weight": torch.full((300, 1000), value),  # two chunks of 1 MiB
        "layers.0.norm.weight": torch.ones(7, dtype=torch.bfloat16),
        "optimizer.layers.0.norm.weight.step": torch.tensor(3.0),
    }


@pytest.fixture(scope="module")
def identity():
    return Identity.generate()


@pytest.fixture
def store(tmp_path, identity):
    return SnapshotStore(tmp_path, RUN, identity)


def names(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


def test_round_trip_layout_and_metadata(store, identity, tmp_path):
    written = store.write(12, 3, 5, tensors())
    assert names(tmp_path / "snapshots") == ["12", "12/stage-3.root", "12/stage-3.safetensors"]
    assert written.size_bytes == written.path.stat().st_size and store.list() == (written,)
    loaded = store.load(12, 3)
    assert loaded.tensors.keys() == tensors().keys()
    assert all(torch.equal(loaded.tensors[n], t) and loaded.tensors[n].dtype == t.dtype for n, t in tensors().items())
    statement = loaded.statement
    assert (statement.run, statement.stage, statement.step, statement.generation) == (RUN, 3, 12, 5)
    assert (statement.chunk_bytes, statement.size_bytes) == (1 << 20, written.size_bytes)
    with safe_open(written.path, framework="pt") as file:
        assert file.metadata() == {"run": RUN.hex(), "stage": "3", "step": "12", "generation": "5"}


def test_the_newest_are_kept(store, tmp_path):
    for step in (1, 2, 10, 3):
        store.write(step, 0, 0, tensors(float(step)))
    # 3 is older than 10 and 2: the node went back to 3, and what lies ahead of it is not touched by a write of 3.
    assert [s.step for s in store.list()] == [2, 3, 10]
    store.write(11, 0, 0, tensors())
    assert [s.step for s in store.list()] == [10, 11] and not (tmp_path / "snapshots" / "2").exists()
    store.write(11, 1, 0, tensors())  # another stage in the same folder
    assert [(s.step, s.stage) for s in store.list()] == [(10, 0), (11, 0), (11, 1)]
    store.write(11, 0, 1, tensors(5.0))  # the same again replaces it, and only it
    assert store.load(11, 0).statement.generation == 1 and store.load(11, 1).statement.generation == 0


def damage_truncate(path):
    os.truncate(path, path.stat().st_size - 1)


def damage_flip(path):
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("file", "harm", "says"),
    [
        ("stage-0.safetensors", damage_truncate, "truncated"),
        ("stage-0.safetensors", damage_flip, "differ from its signed root"),
        ("stage-0.root", damage_truncate, "not a valid signed root"),
        ("stage-0.root", damage_flip, "not a valid signed root"),
        ("stage-0.root", lambda path: path.write_bytes(bytes(5000)), "longer than"),
    ],
)
def test_damage_is_named(store, tmp_path, file, harm, says):
    store.write(4, 0, 0, tensors())
    store.load(4, 0)
    harm(tmp_path / "snapshots" / "4" / file)
    with pytest.raises(SnapshotError, match=says) as refusal:
        store.load(4, 0)
    assert str(tmp_path / "snapshots" / "4" / file) in str(refusal.value)


def test_foreign_files_are_named(store, identity, tmp_path):
    store.write(4, 0, 0, tensors())
    folder = tmp_path / "snapshots"
    for suffix in ("safetensors", "root"):  # someone renames
        shutil.copy(folder / "4" / f"stage-0.{suffix}", folder / "4" / f"stage-1.{suffix}")
    shutil.copytree(folder / "4", folder / "5")
    with pytest.raises(SnapshotError, match=r"stage-1\.root: of stage 0, not of stage 1"):
        store.load(4, 1)
    with pytest.raises(SnapshotError, match=r"5/stage-0\.root: of step 4, not of step 5"):
        store.load(5, 0)
    assert [(s.step, s.stage) for s in store.list()] == [(4, 0)]
    other = SnapshotStore(tmp_path, OTHER_RUN, identity)
    assert other.list() == ()
    with pytest.raises(SnapshotError, match=r"stage-0\.root"):
        other.load(4, 0)
    stranger = SnapshotStore(tmp_path, RUN, Identity.generate())
    with pytest.raises(SnapshotError, match="not by this node"):
        stranger.load(4, 0)
    with pytest.raises(SnapshotError, match="no snapshot of stage 7"):
        store.load(4, 7)
    # What is checked last is the run inside the statement, whoever opens the envelope.
    stored = store.list()[0]
    opened = store._open(stored.root_path.read_bytes())
    with pytest.raises(SnapshotError, match=f"of run {RUN.hex()[:16]}"):
        snapshot_file.load_snapshot(stored, lambda _: opened, run=OTHER_RUN, stage=0)


def test_another_runs_snapshots_are_neither_removed_nor_written_over(store, identity, tmp_path):
    other = SnapshotStore(tmp_path, OTHER_RUN, identity)
    for step in (1, 2):
        other.write(step, 0, 0, tensors())
    for step in (3, 4, 5):
        store.write(step, 0, 0, tensors())
    assert [s.step for s in other.list()] == [1, 2] and [s.step for s in store.list()] == [4, 5]
    with pytest.raises(SnapshotError, match="its own data folder"):
        store.write(2, 0, 0, tensors())
    other.load(2, 0)


@pytest.mark.parametrize("at", ["save_file", "hash_file", "_sync_file", "sync_folder", "_put_in_place"])
def test_a_write_that_fails_leaves_no_trace(store, tmp_path, monkeypatch, at):
    """MEM-5: the disk is full at any point; the older snapshot stays good, the next write succeeds."""
    store.write(1, 0, 0, tensors())
    before = names(tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(snapshot_file, at, full)
        with pytest.raises(SnapshotError, match=r"2/stage-0.safetensors: the snapshot could not be written.*No space"):
            store.write(2, 0, 0, tensors())
    assert names(tmp_path) == before
    store.load(1, 0)
    store.write(2, 0, 0, tensors())
    store.load(2, 0)


def test_killed_in_the_middle_is_invisible_and_cleaned_up(store, tmp_path, monkeypatch):
    """A process that dies cannot clean up: what it leaves is not listed, and goes with the next write of that step."""
    store.write(1, 0, 0, tensors())
    with monkeypatch.context() as patch:
        patch.setattr(snapshot_file, "_put_in_place", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        patch.setattr(snapshot_file.shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(KeyboardInterrupt):
            store.write(2, 0, 0, tensors())
    assert (tmp_path / "snapshots" / ".2-0.partial" / "stage-0.safetensors").exists()
    assert [s.step for s in store.list()] == [1]
    store.write(2, 0, 0, tensors())
    assert [s.step for s in store.list()] == [1, 2] and not list((tmp_path / "snapshots").glob(".*"))


def test_keep_is_checked_and_junk_is_ignored(tmp_path, identity):
    store = SnapshotStore(tmp_path, RUN, identity, keep=0)
    with pytest.raises(SnapshotError, match="at least 1"):
        store.write(1, 0, 0, tensors())
    assert store.list() == ()
    folder = tmp_path / "snapshots"
    (folder / "7").mkdir(parents=True)
    (folder / "7" / "stage-0.safetensors").write_bytes(b"no root")
    (folder / "x").mkdir()
    (folder / "8").write_bytes(b"a file")
    assert snapshot_file.list_snapshots(folder) == ()
