"""The referee: against a loop with nothing of ours but the decoder, and against a golden run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from plnode.manifest import Manifest
from plnode.manifest_text import default_values, render, shipped_values
from plnode.workload import LanguageModel, ReferenceTrainer, sample
from plnode.workload.reference import parameters_of

# Losses and gradient norms of 20 steps; made by `trainer(...).steps(20)` itself, once, on a CPU.
GOLDEN = Path(__file__).with_name("golden_losses.json")
SMALL = {
    "model.dim": 32, "model.layers": 4, "model.heads": 4, "model.kv_heads": 2, "model.ffn_dim": 48, "model.seq_len": 32,
    "batch.microbatches": 3, "batch.sequences": 2, "stages.count": 3, "steps": 20, "evaluation.microbatches": 2,
}  # fmt: skip


def trainer(**changes: Any) -> ReferenceTrainer:
    paths = {key.replace("__", "."): value for key, value in changes.items()}
    text = render(default_values({**shipped_values(), **SMALL, **paths}))
    return ReferenceTrainer(LanguageModel(Manifest.parse(text.encode())))


def test_the_stages_of_the_referee_are_those_of_the_swarm() -> None:
    referee = trainer()
    names = {id(p): n for n, p in referee.model.named_parameters()}
    for stage, span in enumerate(referee.job.spans):
        found = [names[id(p)] for p in parameters_of(referee.model, span)]
        assert found == [n for n, _ in referee.job.build_stage(stage).named_parameters()]


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_parity_of_stage_optimizers_with_the_referee(name: str) -> None:
    """NUM-1 in one process: stage modules with their own optimizers give the referee's weights to the bit."""
    referee = trainer(optimizer__name=name, optimizer__clip=0.1)
    job = referee.job
    parts = [job.build_stage(i) for i in range(3)]
    optimizers = [job.build_optimizer(part) for part in parts]
    for step in range(3):
        expected = referee.train_step()
        assert min(expected.grad_norms) > 0.1  # every stage is clipped
        total = 0.0
        for index in range(3):
            ids = torch.from_numpy(job.train_ids(step, index))
            inputs, x = [], None
            for part in parts:
                x = None if x is None else x.detach().requires_grad_()
                inputs.append((part, x))
                out = part(x, ids)
                x = out.boundary if out.loss_sum is None else out.loss_sum
                inputs[-1] = (*inputs[-1], x)
            total += float(x.detach())
            gradient = None
            for _, given, out in reversed(inputs):
                root = out / job.tokens_per_step if gradient is None else out
                torch.autograd.backward([root], [gradient])
                gradient = None if given is None else given.grad
        norms = tuple(optimizer.step(step) for optimizer in optimizers)
        assert (total / job.tokens_per_step, norms) == (expected.loss, expected.grad_norms)
    weights = referee.weights()
    for part in parts:
        for key, parameter in part.named_parameters():
            assert torch.equal(parameter, weights[key]), key


def test_the_account_of_a_step_is_the_sum_of_its_microbatches() -> None:
    """NUM-3: gradients after k microbatches equal the sum of k single ones, in fp64."""
    referee = trainer(model__dtype="fp64", boundary__dtype="fp64")
    job, model = referee.job, referee.model
    singles = []
    for index in range(3):
        model.zero_grad()
        model(None, torch.from_numpy(job.train_ids(0, index))).loss_sum.backward()
        singles.append([p.grad.clone() for p in model.parameters()])
    model.zero_grad()
    for index in range(3):
        model(None, torch.from_numpy(job.train_ids(0, index))).loss_sum.backward()
    for parameter, *parts in zip(model.parameters(), *singles, strict=True):
        torch.testing.assert_close(parameter.grad, sum(parts), rtol=1e-12, atol=1e-12)


def records(referee: ReferenceTrainer) -> list[list[float]]:
    return [[done.loss, *done.grad_norms] for done in referee.steps(20)]


def test_losses_equal_the_golden_run() -> None:
    """NUM-8.  The tolerance is for another processor's sums; the controls below are far outside of it."""
    golden = json.loads(GOLDEN.read_text())
    assert records(trainer()) == [pytest.approx(row, rel=2e-3) for row in golden]
    assert golden[-1][0] < golden[0][0] - 0.5


def zero_loss(referee: ReferenceTrainer) -> None:
    with torch.no_grad():
        referee.model.head.weight.zero_()


def frozen_weights(referee: ReferenceTrainer) -> None:
    referee._adamw.param_groups.clear()
    referee._muon.state.clear()


def skipped_step(referee: ReferenceTrainer) -> None:
    referee.step = 1


def constant_batch(referee: ReferenceTrainer) -> None:
    ids = referee.job.train_ids(0, 0)
    referee.job.train_ids = lambda step, index: ids


@pytest.mark.parametrize("mutation", [zero_loss, frozen_weights, skipped_step, constant_batch])
def test_the_golden_run_notices(mutation: Any) -> None:
    golden = json.loads(GOLDEN.read_text())
    referee = trainer(steps=21)
    mutation(referee)
    assert any(row != pytest.approx(expected, rel=2e-3) for row, expected in zip(records(referee), golden, strict=True))


def test_a_loss_that_is_not_finite_is_an_error() -> None:
    referee = trainer()
    with torch.no_grad():
        referee.model.head.weight[0, 0] = math.nan
    with pytest.raises(FloatingPointError, match="step 0"):
        referee.train_step()


def test_held_out_loss_falls_with_training_and_counts_tokens() -> None:
    referee = trainer(steps=40, batch__sequences=4)
    before = referee.heldout_loss()
    assert before == pytest.approx(math.log(2048) + 0.125, abs=0.15)
    for _ in referee.steps(40):
        pass
    assert referee.heldout_loss() < before - 1.5


def test_samples_are_the_same_from_one_part_and_from_three() -> None:
    referee = trainer()
    job = referee.job
    parts = [job.build_stage(i) for i in range(3)]
    for temperature in (0.0, 0.8):
        one = sample(referee.parts(), job.tokenizer, "And God said", 40, temperature=temperature, seed=3)
        assert one == sample(parts, job.tokenizer, "And God said", 40, temperature=temperature, seed=3)
        assert one.startswith("And God said")
        assert len(job.tokenizer.encode(one)) > 32  # the context window has moved
    assert sample(parts, job.tokenizer, "And", 20, seed=1) != sample(parts, job.tokenizer, "And", 20, seed=2)


@pytest.mark.parametrize(("prompt", "temperature"), [("", 1.0), ("And", -0.5)])
def test_sampling_without_a_prompt_or_below_zero_is_refused(prompt: str, temperature: float) -> None:
    referee = trainer()
    with pytest.raises(ValueError, match="sampling needs"):
        sample(referee.parts(), referee.job.tokenizer, prompt, 3, temperature=temperature)
