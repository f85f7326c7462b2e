"""The stage optimizer against plain torch, its state, and what it does with bad gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from plnode.optim import OptimConfig, StageOptimizer, lr_ratio, orthogonalise

SHAPES = {"embedding.weight": (11, 6), "layers.0.ffn.up.weight": (8, 6), "layers.0.ffn_norm.weight": (6,), "head.weight": (11, 6)}


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(4)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def give_gradients(named: dict[str, nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in named.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def config(name: str = "adamw", **change: object) -> OptimConfig:
    values = {"lr": 0.01, "weight_decay": 0.1, "clip": 1.0, "schedule": "cosine", "warmup_steps": 2, "total_steps": 6}
    return OptimConfig(**{"name": name, **values, **change})


def test_adamw_equals_a_plain_torch_loop_to_the_bit() -> None:
    ours, plain = parameters(), parameters()
    optimizer = StageOptimizer(ours.items(), config(), stages=4)
    matrices, vectors = ([p for p in plain.values() if p.ndim == n] for n in (2, 1))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8, fused=True)
    for step in range(6):
        give_gradients(ours, step)
        give_gradients(plain, step)
        norm = torch.nn.utils.clip_grad_norm_(plain.values(), 0.5)  # 1 / sqrt(4)
        for group in reference.param_groups:
            group["lr"] = 0.01 * lr_ratio(config(), step)
        reference.step()
        assert optimizer.step(step) == float(norm) > 0.5
        assert all(torch.equal(ours[n], plain[n]) for n in SHAPES)
        assert all(p.grad is None for p in ours.values())


def test_muon_takes_the_matrices_of_blocks_and_adamw_the_rest() -> None:
    ours, plain = parameters(), parameters()
    chosen = config("muon", clip=1e6, muon_lr=0.5, weight_decay=0.0, schedule="constant", warmup_steps=0)
    optimizer = StageOptimizer(ours.items(), chosen, stages=1)
    reference = StageOptimizer(plain.items(), config(clip=1e6, weight_decay=0.0, schedule="constant", warmup_steps=0), stages=1)
    give_gradients(ours, 0)
    give_gradients(plain, 0)
    gradient = ours["layers.0.ffn.up.weight"].grad
    before = ours["layers.0.ffn.up.weight"].detach().clone()
    optimizer.step(0)
    reference.step(0)
    expected = before - 0.5 * math.sqrt(8 / 6) * orthogonalise(gradient)
    torch.testing.assert_close(ours["layers.0.ffn.up.weight"].detach(), expected)
    for name in SHAPES.keys() - {"layers.0.ffn.up.weight"}:
        assert torch.equal(ours[name], plain[name])


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_state_is_complete_before_the_first_step_and_goes_on_elsewhere_to_the_bit(name: str) -> None:
    """JOIN-7: a joiner full of rubbish takes weights and state over; its next step is that of the donor."""
    donor, joiner = parameters(), parameters()
    a, b = (StageOptimizer(p.items(), config(name), stages=2) for p in (donor, joiner))
    names = set(a.state_tensors())
    for step in range(3):
        give_gradients(donor, step)
        a.step(step)
    give_gradients(joiner, 77)
    b.step(0)
    assert set(a.state_tensors()) == names
    with torch.no_grad():
        for key, parameter in joiner.items():
            parameter.copy_(donor[key])
    b.load_state_tensors({k: v.clone() for k, v in a.state_tensors().items()})
    give_gradients(donor, 3)
    give_gradients(joiner, 3)
    assert a.step(3) == b.step(3)
    assert all(torch.equal(donor[n], joiner[n]) for n in SHAPES)
    assert all(torch.equal(v, b.state_tensors()[k]) for k, v in a.state_tensors().items())


def test_state_is_named_by_parameter() -> None:
    assert set(StageOptimizer(parameters().items(), config("muon"), 1).state_tensors()) == {
        "layers.0.ffn.up.weight.momentum_buffer",
        *(f"{n}.{k}" for n in SHAPES if "up" not in n for k in ("step", "exp_avg", "exp_avg_sq")),
    }


def rename(state: dict[str, Tensor]) -> None:
    state["x.step"] = state.pop("head.weight.step")


def reshape(state: dict[str, Tensor]) -> None:
    state["head.weight.exp_avg"] = torch.zeros(6, 11)


def retype(state: dict[str, Tensor]) -> None:
    state["head.weight.exp_avg"] = state["head.weight.exp_avg"].double()


@pytest.mark.parametrize(("damage", "message"), [(rename, "differs in 2 names"), (reshape, r"is \(6, 11\)"), (retype, "float64")])
def test_state_of_another_shape_is_refused_and_nothing_changes(damage: object, message: str) -> None:
    optimizer = StageOptimizer(parameters().items(), config(), 1)
    state = {k: torch.ones_like(v) for k, v in optimizer.state_tensors().items()}
    damage(state)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_tensors(state)
    assert all(not tensor.any() for tensor in optimizer.state_tensors().values())


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_gradient_that_is_not_finite_changes_nothing(name: str, value: float) -> None:
    named = parameters()
    optimizer = StageOptimizer(named.items(), config(name), 1)
    before = {n: p.detach().clone() for n, p in named.items()}
    give_gradients(named, 0)
    named["head.weight"].grad[3, 3] = value
    assert not math.isfinite(optimizer.step(0))
    assert all(torch.equal(p, before[n]) for n, p in named.items())
    assert all(not tensor.any() for tensor in optimizer.state_tensors().values())
    assert all(p.grad is None for p in named.values())


def test_a_parameter_without_a_gradient_is_an_error() -> None:
    """NUM-2: a stage that trains on nothing says so."""
    named = parameters()
    optimizer = StageOptimizer(named.items(), config(), 1)
    give_gradients(named, 0)
    named["head.weight"].grad = None
    with pytest.raises(RuntimeError, match=r"no gradient for head\.weight"):
        optimizer.step(0)
    with pytest.raises(RuntimeError, match="no gradient"):
        optimizer.gradient_norm()
    assert named["embedding.weight"].grad is not None


def test_gradient_norm_is_before_clipping() -> None:
    named = parameters()
    optimizer = StageOptimizer(named.items(), config(), 1)
    give_gradients(named, 0)
    expected = math.sqrt(sum(float(p.grad.double().square().sum()) for p in named.values()))
    assert optimizer.gradient_norm() == pytest.approx(expected, rel=1e-6)
    assert optimizer.step(0) == pytest.approx(expected, rel=1e-6)
    assert optimizer.gradient_elements == sum(p.numel() for p in named.values())


def test_a_stage_without_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one parameter"):
        StageOptimizer([], config(), 1)


