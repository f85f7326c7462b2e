"""The plan against the real thing: modules, graphs and payloads that are built."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plnode.manifest import Manifest
from plnode.manifest_text import default_values, render
from plnode.model import StagePart
from plnode.optim import StageOptimizer
from plnode.plan import plan_run
from plnode.stage.budget import GraphMeter

SMALL = {
    "data.sha256": "ab" * 32, "model.tokenizer": "cd" * 32, "model.vocab": 96, "model.dim": 32, "model.ffn_dim": 80,
    "model.seq_len": 16, "model.layers": 5, "batch.sequences": 2, "batch.microbatches": 4,
}  # fmt: skip


def manifest(**changes: Any) -> Manifest:
    return Manifest.parse(render(default_values({**SMALL, **{k.replace("__", "."): v for k, v in changes.items()}})).encode())


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_memory_is_that_of_the_built_stage(stages: int, optimizer: str) -> None:
    m = manifest(stages__count=stages, optimizer__name=optimizer)
    plan = plan_run(m)
    config = m.model_config()
    for stage in plan.stages:
        part = StagePart(config, stage.first_layer, stage.end_layer, stage.embed, stage.head, 1)
        parameters = list(part.parameters())
        assert stage.parameters == sum(p.numel() for p in parameters)
        assert stage.weights_bytes == stage.gradients_bytes == sum(p.numel() * p.element_size() for p in parameters)
        optimizer_ = StageOptimizer(part.named_parameters(), m.optim_config(), stages)
        for p in parameters:
            p.grad = torch.zeros_like(p)
        optimizer_.step(0)
        state = sum(t.numel() * t.element_size() for t in optimizer_.state_tensors().values())
        # Beyond the moments there is a step counter of a few bytes for each tensor.
        assert stage.optimizer_bytes <= state <= stage.optimizer_bytes + 8 * len(parameters) + 64
    assert plan.parameters == sum(p.numel() for p in StagePart(config, 0, config.layers, True, True, 1).parameters())


def test_a_graph_is_what_autograd_saves() -> None:
    m = manifest()
    config = m.model_config()
    ids = torch.randint(0, 96, (2, 17))
    x = None
    for stage in plan_run(m).stages:
        part = StagePart(config, stage.first_layer, stage.end_layer, stage.embed, stage.head, 1)
        x = x if x is None else x.detach().requires_grad_()
        meter = GraphMeter(part.parameters())
        with meter:
            x = part(x, ids).boundary
        assert meter.graph_bytes == pytest.approx(stage.graph_bytes, rel=0.15)


def test_bytes_over_a_boundary() -> None:
    """An activation of dim x fp32 and two bytes an id forward, one id more than tokens a sequence; the gradient back."""
    first, middle, last = plan_run(manifest()).stages
    assert first.forward_bytes_per_token == middle.forward_bytes_per_token == 32 * 4 + 2 * 17 / 16
    assert first.backward_bytes_per_token == 32 * 4
    assert last.forward_bytes_per_token is None
    assert plan_run(manifest(boundary__dtype="bf16")).stages[0].backward_bytes_per_token == 32 * 2


def test_microbatches_in_flight_follow_the_window_and_the_step() -> None:
    plan = plan_run(manifest())
    assert plan.in_flight == 4  # the step has no more
    assert [s.in_flight for s in plan.stages] == [4, 4, 1]
    assert plan_run(manifest(batch__microbatches=64)).in_flight == 8
    first = plan.stages[0]
    assert first.memory_bytes == first.fixed_bytes + first.buffers_bytes + 4 * first.graph_bytes
    assert first.least_bytes == first.memory_bytes - 3 * first.graph_bytes


def test_the_split_is_balanced_unless_it_is_given() -> None:
    given = plan_run(manifest(stages__split=[1, 1, 3]))
    assert given.to_json()["split"] == [1, 1, 3]
    balanced = plan_run(manifest())
    assert balanced.imbalance < given.imbalance
    assert balanced.imbalance >= 1.0
    assert max(s.flops_per_token for s in given.stages) / (given.flops_per_token / 3) == pytest.approx(given.imbalance)
