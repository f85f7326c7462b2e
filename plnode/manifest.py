"""The run manifest: what must be equal on every node of a run, in one signed TOML file whose hash is the run's name.

What goes wrong without it: two contributors start with another learning rate, tokenizer or layer split, and the run is ruined
in a way that no single node can see.  So everything that has to be equal stands in this file, its SHA-256 is the *run id*
that is part of every handshake, and a node with another file is refused at connect (wire.md section 5).  What may differ from
node to node (name, device, ports, memory) is in `settings.py` and never here.

No key has a default, except `stages.split`, where leaving it out has a meaning of its own ("balance by FLOPs").  A default
would live in the program and not in the hash: two versions of the program would then train two different runs under one id.
The price is a long file; `plnode run init` writes it, commented (`manifest_text.py`).

The hash is over the bytes of the file as written, comments included: nobody has to agree on a canonical form of TOML.

Inconsistent values (a split that does not add up, heads that do not divide the width) are refused here, with the path of the
key that has to change, because a node that finds out later has already downloaded, joined and reserved memory.
"""

from __future__ import annotations

import hashlib
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from plnode.exits import BadInput
from plnode.typed_toml import Bounds, Doc, Hex, KeyProblem, OneOf, Text, read_table
from wire.envelope import BadEnvelope, open_envelope, seal
from wire.identity import Identity, PeerId

if TYPE_CHECKING:
    from plnode.model import ModelConfig
    from plnode.optim import OptimConfig

__all__ = ["DOMAIN", "Manifest", "ManifestError", "SignedManifest", "sign"]

DOMAIN = "plw/manifest/1"  # wire.md section 4
PROTOCOL = 1
_NO_RUN = bytes(32)  # a manifest is signed outside of any run: it is what makes one
# An envelope is at most 64 KiB (wire.md section 4); the file is read no further than that plus the envelope's own fields.
_FILE_MAX_BYTES = 65536


class ManifestError(KeyProblem):
    """A key of the manifest is unknown, missing, of the wrong type, out of bounds or at odds with another."""

    source = "run manifest"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
    """The decoder.  Sizes in elements."""

    vocab: Annotated[int, Bounds(2, 1 << 20), Doc("Tokens in the vocabulary. Must be what the tokenizer has.")]
    dim: Annotated[int, Bounds(4, 1 << 16), Doc("Width of the residual stream; a multiple of heads.")]
    layers: Annotated[int, Bounds(1, 1024), Doc("Transformer layers, to be cut into stages.")]
    heads: Annotated[int, Bounds(1, 1024), Doc("Query heads; dim / heads is the width of a head and must be even (RoPE).")]
    kv_heads: Annotated[int, Bounds(1, 1024), Doc("Key/value heads (grouped-query attention); divides heads.")]
    ffn_dim: Annotated[int, Bounds(1, 1 << 18), Doc("Inner width of the feed-forward layer.")]
    seq_len: Annotated[int, Bounds(2, 1 << 20), Doc("Tokens a sequence.")]
    rope_theta: Annotated[float, Bounds(1.0, 1e9), Doc("Base of the rotary position embedding.")]
    norm_eps: Annotated[float, Bounds(0.0, 1e-2, above=True), Doc("Added to the mean square in RMSNorm.")]
    dtype: Annotated[
        str, OneOf(("fp32", "fp64", "bf16")), Doc("Of products and boundaries. bf16 keeps weights, gradients and optimizer state in fp32.")
    ]
    tokenizer: Annotated[str, Hex(64), Doc("SHA-256 of the tokenizer file.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagesSection:
    """How the model is cut."""

    count: Annotated[int, Bounds(1, 256), Doc("Stages: slices of consecutive layers, one a node.")]
    split: Annotated[
        tuple[int, ...] | None,
        Bounds(0, 1024),
        Doc("Layers a stage, e.g. [3, 3, 2]. Left out: the split whose slowest stage is fastest, embedding and head counted."),
    ] = None
    replicas: Annotated[int, Bounds(1, 16), Doc("Replicas that every stage needs before the run starts.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundarySection:
    """How activations and gradients are written between stages."""

    codec: Annotated[str, OneOf(("dense",)), Doc("How a boundary tensor is written for the wire.")]
    dtype: Annotated[
        str,
        OneOf(("fp32", "bf16", "fp64")),
        Doc("Of activations and gradients on the wire; the model's own dtype loses nothing."),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSection:
    """The optimizer and its schedule; the schedule runs over the run's `steps`."""

    name: Annotated[str, OneOf(("adamw", "muon")), Doc("muon: Newton-Schulz updates of hidden matrices, AdamW for the rest.")]
    lr: Annotated[float, Bounds(0.0, 10.0, above=True), Doc("Peak learning rate of AdamW.")]
    beta1: Annotated[float, Bounds(0.0, 0.9999), Doc("AdamW: decay of the mean of gradients.")]
    beta2: Annotated[float, Bounds(0.0, 0.99999), Doc("AdamW: decay of the mean of squared gradients.")]
    eps: Annotated[float, Bounds(0.0, 1e-2, above=True), Doc("AdamW: added to the denominator.")]
    weight_decay: Annotated[float, Bounds(0.0, 10.0), Doc("Decoupled weight decay.")]
    muon_lr: Annotated[float, Bounds(0.0, 10.0, above=True), Doc("Peak learning rate of Muon's matrices (unused by adamw).")]
    muon_momentum: Annotated[float, Bounds(0.0, 0.9999), Doc("Momentum of Muon (unused by adamw).")]
    clip: Annotated[float, Bounds(0.0, 1e6, above=True), Doc("Greatest gradient norm; a stage clips to clip / sqrt(stages).")]
    schedule: Annotated[str, OneOf(("cosine", "wsd", "constant")), Doc("Shape of the learning rate over the run.")]
    warmup_steps: Annotated[int, Bounds(0, 10_000_000), Doc("Steps of linear warm-up.")]
    min_lr_ratio: Annotated[float, Bounds(0.0, 1.0), Doc("Last learning rate as a share of the peak.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSection:
    """What one step is made of."""

    microbatches: Annotated[int, Bounds(1, 2048), Doc("Microbatches a step: the units that flow through the pipeline.")]
    sequences: Annotated[int, Bounds(1, 4096), Doc("Sequences a microbatch.")]
    tokens: Annotated[int, Bounds(1, 1 << 40), Doc("Tokens a step: microbatches x sequences x model.seq_len, as a check.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSection:
    """The held-out loss."""

    every: Annotated[int, Bounds(0, 10_000_000), Doc("Steps between held-out losses; the last step has one. 0 = only that.")]
    microbatches: Annotated[int, Bounds(1, 900), Doc("Microbatches of held-out text each time.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotSection:
    """Snapshots on the disk of every node."""

    every: Annotated[int, Bounds(0, 10_000_000), Doc("Steps between snapshots; the last step always has one. 0 = only that.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncSection:
    """How the replicas of a stage keep their weights together."""

    mode: Annotated[str, OneOf(("exact",)), Doc("exact: every step is the mean gradient over exactly its microbatches.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSection:
    """How the replicas of a stage combine their gradients."""

    wire: Annotated[
        str,
        OneOf(("fp32", "bf16", "int8")),
        Doc("Of gradients between replicas. fp32: as they are. bf16, int8 (blocks): 1/2, 1/4 of the bytes; what is lost is made up later."),
    ]
    pooling: Annotated[
        str,
        OneOf(("mean", "pseudo-huber", "huber", "welsch", "truncated", "coordinate-huber", "coordinate-welsch")),
        Doc("mean: trusts all replicas. The others bound what a lying one does, by whole gradients or coordinate by coordinate."),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSection:
    """What is trained on."""

    corpus: Annotated[str, OneOf(("kjv",)), Doc("kjv: the King James Bible, shipped with the package.")]
    sha256: Annotated[str, Hex(64), Doc("SHA-256 of the corpus, as tokens.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A run manifest that has been checked.  Construct it with `parse`."""

    protocol: Annotated[int, Bounds(PROTOCOL, PROTOCOL), Doc("Version of what nodes say to each other.")]
    name: Annotated[str, Text(1, 64), Doc("What people call this run.")]
    seed: Annotated[int, Bounds(0, (1 << 32) - 1), Doc("Seed of all randomness: weights, order of samples.")]
    steps: Annotated[int, Bounds(1, 1_000_000_000), Doc("Optimizer steps after which the run is finished.")]
    weights: Annotated[
        str,
        OneOf(("open", "sealed")),
        Doc("open: anyone may assemble a checkpoint. sealed: a stage's weights go only to nodes that hold that stage."),
    ]
    model: Annotated[ModelSection, Doc("The decoder.")]
    stages: Annotated[StagesSection, Doc("How the model is cut.")]
    boundary: Annotated[BoundarySection, Doc("What crosses from one stage to the next.")]
    optimizer: Annotated[OptimizerSection, Doc("The optimizer and its schedule.")]
    batch: Annotated[BatchSection, Doc("What one step is made of.")]
    evaluation: Annotated[EvaluationSection, Doc("The held-out loss.")]
    snapshot: Annotated[SnapshotSection, Doc("Snapshots on the disk of every node.")]
    sync: Annotated[SyncSection, Doc("How the replicas of a stage keep their weights together.")]
    collective: Annotated[CollectiveSection, Doc("How the replicas of a stage combine their gradients.")]
    data: Annotated[DataSection, Doc("What is trained on.")]

    @classmethod
    def parse(cls, toml: bytes) -> Manifest:
        """Reads the bytes of a manifest.  Raises `ManifestError` naming the key; TOML that is none is reported with its line."""
        try:
            table = tomllib.loads(toml.decode("utf-8"))
        except (UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
            raise ManifestError("(the whole file)", "TOML in UTF-8", str(problem)) from None
        manifest = read_table(table, cls, ManifestError)
        _check_consistency(manifest)
        return manifest

    @property
    def tokens_per_microbatch(self) -> int:
        return self.batch.sequences * self.model.seq_len

    def model_config(self) -> ModelConfig:
        """The model's part for `plnode.model` (which imports torch, so the import waits until somebody needs it)."""
        from plnode.model import ModelConfig

        m = self.model
        return ModelConfig(
            vocab=m.vocab, dim=m.dim, layers=m.layers, heads=m.heads, kv_heads=m.kv_heads, ffn_dim=m.ffn_dim,
            seq_len=m.seq_len, rope_theta=m.rope_theta, norm_eps=m.norm_eps, dtype=m.dtype,
        )  # fmt: skip

    def optim_config(self) -> OptimConfig:
        """The optimizer's part for `plnode.optim`; the schedule's length is the run's."""
        from plnode.optim import OptimConfig

        o = self.optimizer
        return OptimConfig(
            name=o.name, lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps, weight_decay=o.weight_decay, muon_lr=o.muon_lr,
            muon_momentum=o.muon_momentum, clip=o.clip, warmup_steps=o.warmup_steps, total_steps=self.steps,
            min_lr_ratio=o.min_lr_ratio, schedule=o.schedule,
        )  # fmt: skip


def _check_consistency(m: Manifest) -> None:
    """Raises for values that are fine one by one but not together; the path is that of the key to change."""
    model = m.model
    if model.dim % model.heads:
        raise ManifestError("model.dim", f"a multiple of model.heads = {model.heads}", str(model.dim))
    if (model.dim // model.heads) % 2:
        raise ManifestError("model.dim", "an even width of a head (model.dim / model.heads)", f"{model.dim} / {model.heads}")
    if model.heads % model.kv_heads:
        raise ManifestError("model.kv_heads", f"a divisor of model.heads = {model.heads}", str(model.kv_heads))
    if m.stages.count > model.layers:
        raise ManifestError("stages.count", f"at most model.layers = {model.layers}", str(m.stages.count))
    if m.stages.split is not None:
        if len(m.stages.split) != m.stages.count:
            raise ManifestError("stages.split", f"stages.count = {m.stages.count} entries", f"{len(m.stages.split)} entries")
        if sum(m.stages.split) != model.layers:
            raise ManifestError("stages.split", f"a sum of model.layers = {model.layers}", f"a sum of {sum(m.stages.split)}")
        if 0 in m.stages.split:
            raise ManifestError("stages.split", "at least one layer a stage", str(list(m.stages.split)))
    tokens = m.batch.microbatches * m.batch.sequences * model.seq_len
    if m.batch.tokens != tokens:
        factors = f"{m.batch.microbatches} microbatches x {m.batch.sequences} sequences x model.seq_len {model.seq_len}"
        raise ManifestError("batch.tokens", f"{tokens} = {factors}", str(m.batch.tokens))
    if m.optimizer.warmup_steps >= m.steps:
        raise ManifestError("optimizer.warmup_steps", f"less than steps = {m.steps}", str(m.optimizer.warmup_steps))
    widest = {"bf16": 2, "fp32": 4, "fp64": 8}
    if m.sync.mode == "exact" and widest[m.boundary.dtype] > widest[model.dtype]:
        raise ManifestError("boundary.dtype", f"no wider than model.dtype = {model.dtype}", m.boundary.dtype)
    if model.dtype == "fp64" and m.collective.wire != "fp32":
        raise ManifestError("collective.wire", "fp32 (gradients as they are) for model.dtype = fp64", m.collective.wire)
    if m.collective.pooling != "mean" and m.stages.replicas < 3:
        raise ManifestError("collective.pooling", "mean, or stages.replicas of at least 3: two cannot outvote one", m.collective.pooling)


def sign(identity: Identity, toml: bytes, *, now_unix: float | None = None) -> bytes:
    """Checks `toml` and seals it with the owner's key: the bytes of the signed run file.

    Raises `ManifestError` for a bad manifest: nothing is ever signed that a node would refuse.
    """
    Manifest.parse(toml)
    now = time.time() if now_unix is None else now_unix
    return seal(identity, DOMAIN, toml, run=_NO_RUN, seq=int(now * 1000), not_after=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedManifest:
    """A signed run file that has been opened: signature and content are both in order."""

    manifest: Manifest
    run_id: bytes
    """SHA-256 of the TOML bytes: the name of the run (32 bytes)."""
    owner: PeerId
    """Whose key signed it."""
    toml: bytes
    raw: bytes
    """The file as it was, to hand on."""

    @classmethod
    def open(cls, raw: bytes, *, source: str = "the signed run file") -> SignedManifest:
        """Raises `BadInput` if the signature is wrong, `ManifestError` if the content is."""
        try:
            statement = open_envelope(raw, DOMAIN, now_unix=time.time(), run=_NO_RUN)
        except BadEnvelope as problem:
            # Of a file only the cause is said: what `problem` advises is for a peer on a connection.
            raise BadInput(f"{source} is not a run file in order: {problem.detail or problem.code.name}", _remedy(raw)) from None
        toml = bytes(statement.payload)
        run_id = hashlib.sha256(toml).digest()
        return cls(manifest=Manifest.parse(toml), run_id=run_id, owner=statement.signer, toml=toml, raw=raw)

    @classmethod
    def load(cls, path: Path) -> SignedManifest:
        """Reads a signed run file.  Raises `BadInput`."""
        try:
            with path.open("rb") as file:
                raw = file.read(_FILE_MAX_BYTES + 1)
        except OSError as problem:
            raise BadInput(f"cannot read the run file {path}: {problem.strerror}", "Ask the owner of the run for it.") from None
        if len(raw) > _FILE_MAX_BYTES:
            raise BadInput(f"{path} is larger than a run file can be ({_FILE_MAX_BYTES} bytes)", "Is this the right file?")
        return cls.open(raw, source=str(path))


def _remedy(raw: bytes) -> str:
    if b"[model]" in raw[:4096] or raw[:1] == b"#":
        return "It looks like an unsigned manifest; the owner of the run signs it with `plnode run sign`."
    return "It was damaged on the way or is another kind of file; fetch it again from the owner of the run."
