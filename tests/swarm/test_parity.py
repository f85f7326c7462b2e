"""A swarm's result equals what one process would have got alone (training.md, section 3, bars a and d)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from plnode.manifest import SignedManifest
from plnode.observe import events as e
from plnode.workload.lm import LanguageModel
from plnode.workload.reference import ReferenceTrainer
from tests.swarm.harness import manifest, train


def alone(signed: SignedManifest) -> tuple[ReferenceTrainer, list[float]]:
    torch.set_num_threads(1)
    trainer = ReferenceTrainer(LanguageModel(signed.manifest))
    return trainer, [done.loss for done in trainer.steps(signed.manifest.steps)]


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Relative distance of two tensors in norm."""
    return float((ours - theirs).double().norm() / theirs.double().norm())


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("stages", [1, 2, 3])
async def test_parity_one_replica_a_stage_is_equal_to_the_bit(tmp_path: Path, stages: int, optimizer: str) -> None:
    signed = manifest({"stages.count": stages, "stages.replicas": 1, "optimizer.name": optimizer})
    swarm = await train(tmp_path, signed, stages)
    reference, losses = alone(signed)
    weights = swarm.weights()
    assert weights.keys() == reference.weights().keys()
    for name, theirs in reference.weights().items():
        (ours,) = weights[name]
        assert torch.equal(ours, theirs), name
    assert swarm.losses() == losses


@pytest.mark.parametrize(("dtype", "bar"), [("fp32", 1e-5), ("fp64", 1e-10)])
@pytest.mark.parametrize(("stages", "replicas"), [(1, 3), (2, 2), (3, 2)])
async def test_parity_with_replicas(tmp_path: Path, stages: int, replicas: int, dtype: str, bar: float) -> None:
    signed = manifest(
        {"stages.count": stages, "stages.replicas": replicas, "model.dtype": dtype, "boundary.dtype": dtype}
    )
    swarm = await train(tmp_path, signed, stages * replicas)
    reference, losses = alone(signed)
    weights = swarm.weights()
    assert weights.keys() == reference.weights().keys()
    for name, theirs in reference.weights().items():
        assert len(weights[name]) == replicas
        for ours in weights[name]:
            assert torch.equal(ours, weights[name][0]), "replicas hold the same bits"
            assert distance(ours, theirs) < bar, name
    assert swarm.losses() == pytest.approx(losses, rel=bar)


async def test_a_seed_that_belongs_to_the_run_takes_no_part_in_it(tmp_path: Path) -> None:
    signed = manifest({"stages.count": 2, "stages.replicas": 1})
    swarm = await train(tmp_path, signed, 2, seed_run=signed.run_id)
    _, losses = alone(signed)
    assert swarm.losses() == losses
    assert not swarm.seed.of(e.Notice), "nothing to say of it"


async def test_parity_can_fail(tmp_path: Path) -> None:
    """The negative control: another order of the data is another result, far outside the bars."""
    signed = manifest({"stages.count": 2, "stages.replicas": 1, "steps": 2})
    swarm = await train(tmp_path, signed, 2)
    reference, losses = alone(manifest({"stages.count": 2, "stages.replicas": 1, "steps": 2, "seed": 2}))
    assert max(distance(swarm.weights()[n][0], t) for n, t in reference.weights().items()) > 1e-3
    assert abs(swarm.losses()[-1] - losses[-1]) > 1e-4


async def test_held_out_loss_is_that_of_the_weights(tmp_path: Path) -> None:
    signed = manifest({"stages.count": 2, "stages.replicas": 2, "evaluation.every": 0})
    swarm = await train(tmp_path, signed, 4)
    told = {(event.step, event.loss) for node in swarm.nodes for event in node.story.of(e.HeldOut)}
    ((step, loss),) = told
    reference, _ = alone(signed)
    assert step == signed.manifest.steps
    assert loss == pytest.approx(reference.heldout_loss(), rel=1e-5)
