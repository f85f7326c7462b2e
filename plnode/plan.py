"""What a run costs each stage, before anybody downloads or allocates anything.

From the manifest alone: which layers a stage holds, its parameters, FLOPs and bytes of memory, and what it sends a token.
The node plans its memory with these figures, assignment weighs stages with them, and `plnode run plan` shows them to whoever
writes a manifest.  They are formulas of sizes (`plnode/model/config.py`, `plnode/stage/boundary.py`); tests hold each against
the real thing: parameters against the built module, bytes of a graph against what autograd saves, payloads against the
boundary's own size.

Memory of a stage:

* weights, gradients: elements x width.  Of a bf16 model all three are fp32 (plnode/model/config.py).
* optimizer: AdamW keeps two moments for every element, Muon one momentum for the matrices inside the layers.
* in flight: microbatches between their forward and their backward keep what autograd saved.  At most `cap(stages)` of them are
  under way from one origin (plnode/pipeline/window.py), never more than the step has; the last stage runs the backward right
  behind the forward and keeps one.  This is the figure for keeping all graphs.  A node with less memory keeps the boundary inputs
  and repeats the forward instead: `least_bytes`, below which it cannot work.
* buffers: what arrives and what leaves of each microbatch in flight, as bytes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from plnode.manifest import Manifest
from plnode.model import ModelConfig, StageSpan, explicit_split, plan_split
from plnode.pipeline.ledger import StepPlan
from plnode.pipeline.window import cap
from plnode.stage.boundary import DenseBoundary, id_dtype_for
from plnode.swarm.receipts import Terms
from wire.tensor import DType

__all__ = ["RunPlan", "StagePlan", "plan_run", "receipt_terms", "step_plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One stage.  Bytes and elements are whole numbers; bytes a token over the boundary *behind* the stage, None for the last."""

    stage: int
    first_layer: int
    end_layer: int
    embed: bool
    head: bool
    parameters: int
    flops_per_token: float
    """Forward and backward, without repeating a forward."""
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    graph_bytes: int
    """What autograd keeps of one microbatch."""
    in_flight: int
    """Microbatches that may be between forward and backward here."""
    buffers_bytes: int
    forward_bytes_per_token: float | None
    backward_bytes_per_token: float | None

    @property
    def activation_bytes(self) -> int:
        """All graphs in flight."""
        return self.graph_bytes * self.in_flight

    @property
    def fixed_bytes(self) -> int:
        """Weights, gradients, optimizer."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def memory_bytes(self) -> int:
        """With all graphs kept."""
        return self.fixed_bytes + self.buffers_bytes + self.activation_bytes

    @property
    def least_bytes(self) -> int:
        """With one graph at a time, the others repeated."""
        return self.fixed_bytes + self.buffers_bytes + self.graph_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """All stages of a run."""

    stages: tuple[StagePlan, ...]
    parameters: int
    tokens_per_step: int
    flops_per_token: float
    in_flight: int
    """Microbatches under way from one origin, at most."""

    @property
    def imbalance(self) -> float:
        """FLOPs of the busiest stage over the mean: 1 is a perfect split, and the pipeline is slower by this factor."""
        return max(s.flops_per_token for s in self.stages) * len(self.stages) / self.flops_per_token

    def to_json(self) -> dict[str, Any]:
        stages = [
            dataclasses.asdict(s) | {name: getattr(s, name) for name in ("activation_bytes", "memory_bytes", "least_bytes")}
            for s in self.stages
        ]
        return {
            "stages": stages,
            "split": [s.end_layer - s.first_layer for s in self.stages],
            "parameters": self.parameters,
            "tokens_per_step": self.tokens_per_step,
            "flops_per_token": self.flops_per_token,
            "in_flight": self.in_flight,
            "imbalance": self.imbalance,
        }


def plan_run(manifest: Manifest) -> RunPlan:
    """The plan of `manifest`, which has been checked; every node computes the same."""
    config = manifest.model_config()
    if manifest.stages.split is None:
        spans = plan_split(config, manifest.stages.count)
    else:
        spans = explicit_split(config, manifest.stages.split)
    in_flight = min(cap(manifest.stages.count), manifest.batch.microbatches)
    stages = tuple(_stage(manifest, config, span, in_flight) for span in spans)
    return RunPlan(
        stages=stages,
        parameters=sum(s.parameters for s in stages),
        tokens_per_step=manifest.batch.tokens,
        flops_per_token=sum(s.flops_per_token for s in stages),
        in_flight=in_flight,
    )


def _stage(manifest: Manifest, config: ModelConfig, span: StageSpan, in_flight: int) -> StagePlan:
    width = config.weight_dtype.itemsize
    weights = span.params * width
    boundary = _boundary(manifest)
    kept = 1 if span.head else in_flight
    both_ways = boundary.forward_bytes + boundary.backward_bytes
    sides = (not span.embed) + (not span.head)
    tokens = manifest.tokens_per_microbatch
    return StagePlan(
        stage=span.stage,
        first_layer=span.first_layer,
        end_layer=span.end_layer,
        embed=span.embed,
        head=span.head,
        parameters=span.params,
        flops_per_token=span.flops_per_token,
        weights_bytes=weights,
        gradients_bytes=weights,
        optimizer_bytes=_optimizer_elements(manifest, config, span) * width,
        graph_bytes=span.activation_bytes(config, manifest.batch.sequences),
        in_flight=kept,
        buffers_bytes=in_flight * both_ways * sides,
        forward_bytes_per_token=None if span.head else boundary.forward_bytes / tokens,
        backward_bytes_per_token=None if span.head else boundary.backward_bytes / tokens,
    )


def _optimizer_elements(manifest: Manifest, config: ModelConfig, span: StageSpan) -> int:
    """Elements of state: two moments for AdamW's parameters, one momentum for Muon's (the matrices inside the layers)."""
    if manifest.optimizer.name == "adamw":
        return 2 * span.params
    matrices = span.layers * config.layer_matrix_params
    return matrices + 2 * (span.params - matrices)


def _boundary(manifest: Manifest) -> DenseBoundary:
    dtype = DType[manifest.boundary.dtype]
    model = manifest.model
    return DenseBoundary(manifest.batch.sequences, model.seq_len, model.dim, dtype, id_dtype_for(model.vocab))


def receipt_terms(manifest: Manifest) -> Terms:
    """What receipts of this run can be about, and what a token earns at each stage."""
    return Terms(
        stages=manifest.stages.count,
        steps=manifest.steps,
        microbatches=manifest.batch.microbatches,
        tokens=manifest.tokens_per_microbatch,
        flops_per_token=tuple(stage.flops_per_token for stage in plan_run(manifest).stages),
    )


def step_plan(manifest: Manifest, step: int) -> StepPlan:
    """The fixed set of `step`: training microbatches, and held-out ones every so many steps and after the last one."""
    if step >= manifest.steps:
        return StepPlan(step, 0, manifest.evaluation.microbatches)
    every = manifest.evaluation.every
    evaluates = every > 0 and step % every == 0
    return StepPlan(step, manifest.batch.microbatches, manifest.evaluation.microbatches if evaluates else 0)
