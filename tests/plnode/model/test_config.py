"""Formulas of the sizes against the real thing: parameters, FLOPs, bytes kept for the backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from plnode.model import ModelConfig, StagePart, plan_split

SIZES = {"vocab": 300, "dim": 48, "layers": 4, "heads": 6, "kv_heads": 2, "ffn_dim": 128, "seq_len": 32}


def test_parameters_are_those_of_the_module() -> None:
    config = ModelConfig(**SIZES)
    assert config.params == sum(p.numel() for p in StagePart(config, 0, 4, True, True, 1).parameters())
    for span in plan_split(config, 3):
        part = StagePart(config, span.first_layer, span.end_layer, span.embed, span.head, 1)
        assert span.params == sum(p.numel() for p in part.parameters())


def kept_bytes(part: StagePart, x: Tensor | None, ids: Tensor) -> int:
    """What autograd saves in one forward, each storage once, weights and rotation tables not."""
    constant = {t.untyped_storage().data_ptr() for t in [*part.parameters(), *part.buffers()]}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        # The norm gain as the norm uses it in bf16 is a cast of `dim` elements.
        if storage.data_ptr() not in constant and tensor.ndim > 1:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = part(x, ids)  # noqa: F841  the graph must live while addresses are compared
    return sum(saved.values())


@pytest.mark.parametrize("dtype", ["fp32", "fp64", "bf16"])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_activation_bytes_are_what_autograd_keeps(dtype: str, stages: int) -> None:
    config = ModelConfig(**SIZES, dtype=dtype)
    ids = torch.zeros(4, 33, dtype=torch.int64)
    for span in plan_split(config, stages):
        part = StagePart(config, span.first_layer, span.end_layer, span.embed, span.head, 1)
        x = None if span.embed else torch.ones(4, 32, 48, dtype=config.compute_dtype).requires_grad_()
        assert span.activation_bytes(config, 4) == pytest.approx(kept_bytes(part, x, ids), rel=0.1)


def test_flops_are_those_of_the_products() -> None:
    """The counter of torch counts attention in full; ours counts what a causal token needs: half, and half a key."""
    config = ModelConfig(**SIZES)
    part, ids = StagePart(config, 0, 4, True, True, 1), torch.zeros(2, 33, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        loss = part(None, ids).loss_sum
    counts = counter.get_flop_counts()["Global"]
    products = sum(flops for operation, flops in counts.items() if "attention" not in str(operation))
    forward = sum(span.flops_per_token_forward for span in plan_split(config, 2)) * 64
    causal = 4 * 4 * config.dim * 33 / 2 * 64
    assert forward == pytest.approx(products + causal)
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    backward = sum(f for o, f in counter.get_flop_counts()["Global"].items() if "attention" not in str(o))
    assert backward == pytest.approx(2 * products)
    assert sum(span.flops_per_token for span in plan_split(config, 2)) * 64 == pytest.approx(3 * forward)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab": 0}, "vocab must be at least 1"),
        ({"layers": 0}, "layers must be at least 1"),
        ({"heads": 5}, "even multiple"),
        ({"dim": 42}, "even multiple"),  # heads of width 7
        ({"kv_heads": 4}, "must divide"),
        ({"dtype": "fp16"}, "one of fp32, fp64, bf16"),
        ({"norm_eps": 0.0}, "norm_eps above 0"),
        ({"rope_theta": 0.5}, "at least 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{**SIZES, **change})
