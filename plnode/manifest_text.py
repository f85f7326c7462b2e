"""The commented manifest that `plnode run init` writes, made from the schema itself, and the sizes that it starts with.

A hand-kept example file drifts away from what the parser accepts.  Here each line is made from the field's own annotation:
the sentence for people, the bounds, the value.  The test that parses what this writes is therefore a test of every comment
too.

`DEFAULTS` is a start for one machine: a small decoder on the shipped text that learns to spell within minutes on a CPU.  The
two hashes and the vocabulary belong to the shipped corpus and are filled in by whoever calls `render` (`plnode/cli/run.py`,
`plnode/demo`), since reading them costs a look at the data files.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Mapping
from typing import Any

from plnode.manifest import PROTOCOL, Manifest, ManifestError
from plnode.typed_toml import Bounds, Hex, OneOf, Text, doc_of, schema

__all__ = ["DEFAULTS", "default_values", "render", "shipped_values"]

# Muon's 0.02 and AdamW's 3e-3 are what a 128-wide model trained from scratch bears; clip 1.0 and betas (0.9, 0.95) are the usual
# ones of language models.  With five layers three stages are almost equal (two, two, and one with the head); 8 microbatches keep
# three stages of two replicas busy.
DEFAULTS: dict[str, Any] = {
    "protocol": PROTOCOL,
    "name": "a new run",
    "seed": 1,
    "steps": 300,
    "weights": "open",
    "model": {
        "vocab": 2048, "dim": 128, "layers": 5, "heads": 4, "kv_heads": 2, "ffn_dim": 344, "seq_len": 128,
        "rope_theta": 10000.0, "norm_eps": 1e-5, "dtype": "fp32",
    },
    "stages": {"count": 3, "replicas": 2},
    "boundary": {"codec": "dense", "dtype": "fp32"},
    "optimizer": {
        "name": "muon", "lr": 3e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.01,
        "muon_lr": 0.02, "muon_momentum": 0.95, "clip": 1.0, "schedule": "wsd", "warmup_steps": 10, "min_lr_ratio": 0.1,
    },
    "batch": {"microbatches": 8, "sequences": 4},
    "evaluation": {"every": 25, "microbatches": 4},
    "snapshot": {"every": 100},
    "sync": {"mode": "exact"},
    "collective": {"wire": "fp32", "pooling": "mean"},
    "data": {"corpus": "kjv"},
}  # fmt: skip


def default_values(changes: Mapping[str, Any]) -> dict[str, Any]:
    """`DEFAULTS` with `changes` by path (`{"model.dim": 64}`), as nested tables.

    `batch.tokens` and a warm-up that would outlast a short run follow from the others unless given.  A path that no manifest has
    raises `ManifestError`.
    """
    values: dict[str, Any] = {k: dict(v) if isinstance(v, dict) else v for k, v in DEFAULTS.items()}
    for path, value in changes.items():
        section, _, key = path.rpartition(".")
        table = values.get(section) if section else values
        where = schema(Manifest).get(section, (Manifest, (), False))[0] if section else Manifest
        if not isinstance(table, dict) or key not in schema(where):
            raise ManifestError(path, "a key of the manifest", "an unknown key")
        table[key] = value
    batch = values["batch"]
    if "batch.tokens" not in changes:
        batch["tokens"] = batch["microbatches"] * batch["sequences"] * values["model"]["seq_len"]
    if "optimizer.warmup_steps" not in changes:
        values["optimizer"]["warmup_steps"] = min(values["optimizer"]["warmup_steps"], values["steps"] // 2)
    return values


def shipped_values() -> dict[str, Any]:
    """What belongs to the shipped corpus, by path: its hash, its tokenizer's hash and the size of the vocabulary."""
    from plnode.data import load_corpus

    corpus = load_corpus("kjv")
    return {"data.sha256": corpus.sha256, "model.tokenizer": corpus.tokenizer_hash, "model.vocab": corpus.vocabulary}


def render(values: Mapping[str, Any]) -> str:
    """The commented TOML text of `values` (nested tables).  Every key under its explanation, tables last, as TOML wants."""
    lines = [
        "# A run manifest: everything that must be equal on every node of this run.",
        "# The SHA-256 of this file is the run's id, comments included. After a change, sign it again: plnode run sign run.toml",
        "",
    ]
    tables = []
    for name, (kind, checks, _) in schema(Manifest).items():
        if dataclasses.is_dataclass(kind):
            tables.append((name, kind, checks))
        else:
            lines += _entry(name, checks, values.get(name))
    for name, kind, checks in tables:
        lines += ["", *_comment(doc_of(checks)), f"[{name}]"]
        for key, (_, key_checks, _) in schema(kind).items():  # type: ignore[arg-type]
            lines += _entry(key, key_checks, values.get(name, {}).get(key))
    return "\n".join(lines) + "\n"


def _entry(key: str, checks: tuple[Any, ...], value: Any) -> list[str]:
    limits = [c.text() for c in checks if isinstance(c, Bounds | OneOf | Hex | Text) and not _only_one(c)]
    text = doc_of(checks) + (f" ({'; '.join(limits)})" if limits else "")
    if value is None:
        return [*_comment(text), f"# {key} = ..."]
    return [*_comment(text), f"{key} = {_toml(value)}"]


def _only_one(check: Any) -> bool:
    return (isinstance(check, Bounds) and check.least == check.greatest) or (isinstance(check, OneOf) and len(check.words) == 1)


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text, 118)]


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    if isinstance(value, float):
        text = repr(value)  # 1e-05 is TOML, and reads back to the same float
        return text if any(c in text for c in ".en") else text + ".0"
    return str(value)
