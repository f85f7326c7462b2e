"""The run manifest: what is written is read, what is wrong is named by its key, what is signed is what is opened."""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plnode.collective.feedback import WIRES
from plnode.collective.robust import POOLINGS
from plnode.exits import BadInput
from plnode.manifest import DOMAIN, Manifest, ManifestError, SignedManifest, sign
from plnode.manifest_text import default_values, render
from plnode.typed_toml import schema
from wire.envelope import seal
from wire.identity import Identity

HASHES = {"data.sha256": "ab" * 32, "model.tokenizer": "cd" * 32}


def toml(**changes: Any) -> bytes:
    return render(default_values({**HASHES, **{k.replace("__", "."): v for k, v in changes.items()}})).encode()


def test_the_written_manifest_is_read_and_equals_its_values() -> None:
    values = default_values(HASHES)
    manifest = Manifest.parse(render(values).encode())
    assert manifest.model.dim == values["model"]["dim"]
    assert manifest.stages.split is None
    assert manifest.batch.tokens == 8 * 4 * 128
    assert manifest.tokens_per_microbatch == 512
    assert tomllib.loads(render(values)) == values


def test_every_key_stands_in_the_written_manifest_with_a_comment() -> None:
    lines = toml().decode().split("\n")
    keys = 0
    for name, (kind, _, _) in schema(Manifest).items():
        for key in schema(kind) if hasattr(kind, "__dataclass_fields__") else [name]:
            places = [i for i, line in enumerate(lines) if line.startswith((f"{key} = ", f"# {key} = "))]
            assert places, key
            assert all(lines[i - 1].startswith("# ") for i in places), key
            keys += 1
    assert keys > 40
    assert max(len(line) for line in lines) <= 120


@pytest.mark.parametrize(
    ("change", "path", "expected", "got"),
    [
        (("dim = 128", "dimm = 128"), "model.dimm", 'perhaps "dim"', "an unknown key"),
        (("steps = 300", ""), "steps", "a whole number", "missing"),
        (("steps = 300", "steps = 300\nsurprise = 1"), "surprise", "one of", "an unknown key"),
        (("dim = 128", 'dim = "128"'), "model.dim", "a whole number, from 4", '"128"'),
        (("dim = 128", "dim = true"), "model.dim", "a whole number", "true"),
        (("dim = 128", "dim = 128.0"), "model.dim", "a whole number", "128.0"),
        (("steps = 300", "steps = 0"), "steps", "from 1 to", "0"),
        (("clip = 1.0", "clip = nan"), "optimizer.clip", "a number", "nan"),
        (("clip = 1.0", "clip = 0"), "optimizer.clip", "above 0", "0"),
        (('name = "muon"', 'name = "sgd"'), "optimizer.name", '"adamw", "muon"', '"sgd"'),
        (("ab" * 32, "ab" * 31), "data.sha256", "64 lower-case hexadecimal digits", '"abab'),
        (('name = "a new run"', 'name = "a\\u001bnew"'), "name", "printable", "\\x1b"),
        (("[sync]", "[synch]"), "synch", 'perhaps "sync"', "an unknown key"),
        (("# split = ...", "split = [2, 2]"), "stages.split", "3 entries", "2 entries"),
        (("# split = ...", "split = [2, 2, 2]"), "stages.split", "a sum of model.layers = 5", "a sum of 6"),
        (("# split = ...", "split = [5, 0, 0]"), "stages.split", "at least one layer", "[5, 0, 0]"),
        (("# split = ...", 'split = [2, "2", 2]'), "stages.split[1]", "a whole number", '"2"'),
        (("# split = ...", "split = 2"), "stages.split", "a list of whole numbers", "2"),
        (("heads = 4", "heads = 3"), "model.dim", "a multiple of model.heads = 3", "128"),
        (("kv_heads = 2", "kv_heads = 3"), "model.kv_heads", "a divisor of model.heads = 4", "3"),
        (("heads = 4", "heads = 128"), "model.dim", "an even width of a head", "128 / 128"),
        (("count = 3", "count = 7"), "stages.count", "at most model.layers = 5", "7"),
        (("tokens = 4096", "tokens = 4097"), "batch.tokens", "4096 = 8 microbatches", "4097"),
        (("warmup_steps = 10", "warmup_steps = 300"), "optimizer.warmup_steps", "less than steps = 300", "300"),
        (('wire = "fp32"', 'wire = "fp16"'), "collective.wire", '"fp32", "bf16", "int8"', '"fp16"'),
        (('wire = "fp32"', ""), "collective.wire", "text", "missing"),
        (('pooling = "mean"', 'pooling = "median"'), "collective.pooling", '"mean", "pseudo-huber"', '"median"'),
        (('pooling = "mean"', 'pooling = "welsch"'), "collective.pooling", "replicas of at least 3", "welsch"),
        (('[boundary]', '[boundary]\n# x'), "", "", ""),
    ],
)  # fmt: skip
def test_a_wrong_manifest_is_refused_by_its_key(change: tuple[str, str], path: str, expected: str, got: str) -> None:
    text = toml().decode()
    before, after = change
    assert text.count(before) >= 1
    bad = text.replace(f"\n{before}", f"\n{after}", 1) if f"\n{before}" in text else text.replace(before, after, 1)
    if not path:  # the control: a change that is none
        Manifest.parse(bad.encode())
        return
    with pytest.raises(ManifestError) as refused:
        Manifest.parse(bad.encode())
    assert refused.value.path == path
    assert expected in refused.value.expected
    assert got in refused.value.got
    assert path in str(refused.value)


def test_the_collective_section_takes_every_wire_and_pooling_there_is() -> None:
    for wire in WIRES:
        for pooling in POOLINGS:
            manifest = Manifest.parse(toml(stages__replicas=3, collective__wire=wire, collective__pooling=pooling))
            assert (manifest.collective.wire, manifest.collective.pooling) == (wire, pooling)
    with pytest.raises(ManifestError, match=r"fp32 .gradients as they are. for model.dtype = fp64"):
        Manifest.parse(toml(model__dtype="fp64", collective__wire="bf16"))
    Manifest.parse(toml(model__dtype="fp64"))


@pytest.mark.parametrize("raw", [b"\xff\xfe", b"steps = = 3", b"[model", b""])
def test_what_is_no_toml_or_no_manifest_is_refused(raw: bytes) -> None:
    with pytest.raises(ManifestError):
        Manifest.parse(raw)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(key=st.sampled_from(["model", "stages", "steps", "seed", "batch", "model.dim", "stages.split", "data.sha256"]), junk=JUNK)
def test_junk_in_any_place_is_refused_or_read_never_a_crash(key: str, junk: Any) -> None:
    from plnode.typed_toml import read_table

    values = default_values(HASHES)
    section, _, name = key.rpartition(".")
    (values[section] if section else values)[name] = junk
    try:
        manifest = read_table(values, Manifest, ManifestError)
    except ManifestError:
        return
    assert isinstance(manifest, Manifest)


def test_a_change_to_no_key_is_refused() -> None:
    with pytest.raises(ManifestError, match=r"model\.dims"):
        default_values({"model.dims": 3})
    with pytest.raises(ManifestError, match=r"optimiser\.lr"):
        default_values({"optimiser.lr": 3})


def test_the_signed_file_opens_to_what_was_signed(tmp_path: Path) -> None:
    owner = Identity.generate()
    raw = sign(owner, toml(seed=5))
    (tmp_path / "run.signed").write_bytes(raw)
    signed = SignedManifest.load(tmp_path / "run.signed")
    assert signed.toml == toml(seed=5)
    assert signed.run_id == hashlib.sha256(toml(seed=5)).digest()
    assert signed.owner == owner.peer_id
    assert signed.manifest.seed == 5
    assert signed.raw == raw


def test_signing_again_gives_the_same_run() -> None:
    one, two = (sign(Identity.generate(), toml(), now_unix=t) for t in (1.0, 2.0))
    assert one != two
    assert SignedManifest.open(one).run_id == SignedManifest.open(two).run_id


def test_a_changed_comment_is_another_run() -> None:
    owner = Identity.generate()
    ids = {SignedManifest.open(sign(owner, t)).run_id for t in (toml(), toml() + b"# more\n")}
    assert len(ids) == 2


def test_every_flipped_byte_of_a_signed_file_is_noticed() -> None:
    raw = sign(Identity.generate(), toml())
    for i in [*range(120), *range(120, len(raw), 97), *range(len(raw) - 70, len(raw))]:
        bad = bytearray(raw)
        bad[i] ^= 1
        with pytest.raises(BadInput):
            SignedManifest.open(bytes(bad))


def test_nothing_is_signed_that_a_node_would_refuse() -> None:
    with pytest.raises(ManifestError):
        sign(Identity.generate(), toml().replace(b"dim = 128", b"dim = 127"))


def test_a_signature_for_another_purpose_is_none(tmp_path: Path) -> None:
    raw = seal(Identity.generate(), "plw/snapshot/1", toml(), run=bytes(32), seq=1, not_after=0)
    with pytest.raises(BadInput, match="not a run file in order") as refused:
        SignedManifest.open(raw)
    assert "protocol was broken" not in str(refused.value), "that is said of a peer, not of a file"
    raw = seal(Identity.generate(), DOMAIN, b"steps = 1", run=bytes(32), seq=1, not_after=0)
    with pytest.raises(ManifestError):  # well signed, but no manifest
        SignedManifest.open(raw)


def test_an_unsigned_manifest_is_told_from_a_damaged_one(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(toml())
    with pytest.raises(BadInput, match="plnode run sign"):
        SignedManifest.load(file)
    file.write_bytes(b"\x97rubbish")
    with pytest.raises(BadInput, match="fetch it again"):
        SignedManifest.load(file)
    with pytest.raises(BadInput, match="cannot read the run file"):
        SignedManifest.load(tmp_path / "nowhere")
    file.write_bytes(bytes(70000))
    with pytest.raises(BadInput, match="larger than a run file can be"):
        SignedManifest.load(file)
