"""What is trained: one manifest, read by all rows.

About 21 million parameters: large enough that a microbatch keeps a core busy for some 0.2 s, small enough that a laptop has the
model in memory four times.  16 microbatches a step leave a two-stage pipeline a bubble of 1/17.  AdamW everywhere (Muon's
orthogonalisation would be a good part of the step and is not what is measured here).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from plnode.manifest import Manifest, SignedManifest, sign
from plnode.manifest_text import default_values, render, shipped_values
from wire.identity import Identity

__all__ = ["Size", "load_manifest", "write_manifest"]

# A run that nobody waits for the end of: the bench stops it, so that no final snapshot falls into a measured step.
STEPS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The decoder and the batch."""

    dim: int = 512
    layers: int = 6
    heads: int = 8
    kv_heads: int = 4
    ffn_dim: int = 1536
    seq_len: int = 128
    sequences: int = 2
    microbatches: int = 16


def write_manifest(folder: Path, size: Size, stages: int) -> Path:
    """The signed run file in `folder`; the run trains on the shipped corpus with its vocabulary of 2,048."""
    changes = {
        **shipped_values(),
        "name": "bench",
        "steps": STEPS,
        "model.dim": size.dim,
        "model.layers": size.layers,
        "model.heads": size.heads,
        "model.kv_heads": size.kv_heads,
        "model.ffn_dim": size.ffn_dim,
        "model.seq_len": size.seq_len,
        "batch.sequences": size.sequences,
        "batch.microbatches": size.microbatches,
        "stages.count": stages,
        "stages.replicas": 1,
        "optimizer.name": "adamw",
        "optimizer.schedule": "constant",
        "evaluation.every": 0,
        "evaluation.microbatches": 1,
        "snapshot.every": 0,
    }
    file = folder / "run.signed"
    file.write_bytes(sign(Identity.generate(), render(default_values(changes)).encode()))
    return file


def load_manifest(file: str) -> Manifest:
    """The manifest of `write_manifest`'s file."""
    return SignedManifest.load(Path(file)).manifest
