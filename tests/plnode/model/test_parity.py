"""A chain of stages equals the whole model, to the bit: loss, boundaries, every gradient, the weights after a step."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from plnode.model import ModelConfig, StagePart
from plnode.optim import OptimConfig, StageOptimizer

SIZES = {"vocab": 97, "dim": 32, "layers": 4, "heads": 4, "kv_heads": 2, "ffn_dim": 48, "seq_len": 16}


def splits(layers: int) -> list[tuple[int, ...]]:
    return [(0, *cut, layers) for n in range(4) for cut in itertools.combinations(range(1, layers), n)]


def chain(config: ModelConfig, bounds: tuple[int, ...]) -> list[StagePart]:
    last = len(bounds) - 2
    return [StagePart(config, a, b, i == 0, i == last, 11) for i, (a, b) in enumerate(itertools.pairwise(bounds))]


def run_chain(parts: list[StagePart], ids: Tensor, tokens: int) -> float:
    """Forward through boundaries cut off from their graph, then backward the same way: what the swarm does, without the swarm."""
    x: Tensor | None = None
    inputs, outputs = [], []
    for part in parts:
        x = None if x is None else x.detach().clone().requires_grad_()
        inputs.append(x)
        out = part(x, ids)
        outputs.append(out.boundary if out.loss_sum is None else out.loss_sum / tokens)
        x = out.boundary
    gradient = None
    for given, out in zip(reversed(inputs), reversed(outputs), strict=True):
        torch.autograd.backward([out], [gradient])
        gradient = None if given is None else given.grad
    return float(outputs[-1].detach()) * tokens


def batches(config: ModelConfig, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, config.vocab, (2, config.seq_len + 1), generator=generator) for _ in range(count)]


@pytest.mark.parametrize("dtype", ["fp32", "fp64", "bf16"])
@pytest.mark.parametrize("bounds", splits(4), ids=str)
def test_parity_of_loss_and_gradients_for_every_split(bounds: tuple[int, ...], dtype: str) -> None:
    config = ModelConfig(**SIZES, dtype=dtype)
    one, many = chain(config, (0, 4)), chain(config, bounds)
    for ids in batches(config, 3):  # gradients of several microbatches are summed
        assert run_chain(one, ids, 96) == run_chain(many, ids, 96)
    expected = {n: p.grad for n, p in one[0].named_parameters()}
    found = {n: p.grad for part in many for n, p in part.named_parameters()}
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0, name
        assert torch.equal(gradient, found[name]), name


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_parity_of_weights_after_steps(name: str) -> None:
    config = ModelConfig(**SIZES)
    optim = OptimConfig(name=name, lr=1e-2, weight_decay=0.1, clip=1e9, total_steps=3)  # no clipping: it is by stage
    one, many = chain(config, (0, 4)), chain(config, (0, 1, 3, 4))
    optimizers = [StageOptimizer(part.named_parameters(), optim, 3) for part in one + many]
    for step, ids in enumerate(batches(config, 3)):
        run_chain(one, ids, 32)
        run_chain(many, ids, 32)
        for optimizer in optimizers:
            assert optimizer.step(step) > 0
    expected = dict(one[0].named_parameters())
    start = dict(chain(config, (0, 4))[0].named_parameters())
    for part in many:
        for key, parameter in part.named_parameters():
            assert torch.equal(parameter, expected[key]), key
            assert not torch.equal(parameter, start[key]), key


def test_parity_fails_for_a_stage_with_other_weights() -> None:
    """Control: the comparison sees one changed weight."""
    config = ModelConfig(**SIZES)
    one, many = chain(config, (0, 4)), chain(config, (0, 2, 4))
    with torch.no_grad():
        next(many[1].parameters())[0] += 1e-6
    (ids,) = batches(config, 1)
    run_chain(one, ids, 32)
    run_chain(many, ids, 32)
    assert not torch.equal(one[0].embedding.weight.grad, many[0].embedding.weight.grad)


def test_parity_of_logits_for_sampling() -> None:
    config = ModelConfig(**SIZES)
    (whole,) = chain(config, (0, 4))
    ids = batches(config, 1)[0][:, :9]
    x = None
    for part in chain(config, (0, 1, 4)):
        x = part.logits(x, ids)
    assert x.shape == (2, 9, 97)
    assert torch.equal(x, whole.logits(None, ids))


def test_the_same_forward_twice_gives_the_same_bits() -> None:
    config = ModelConfig(**SIZES)
    (whole,) = chain(config, (0, 4))
    (ids,) = batches(config, 1)
    gradients = []
    for _ in range(2):
        whole.zero_grad()
        run_chain([whole], ids, 32)
        gradients.append([p.grad.clone() for p in whole.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
