"""The decoder against a second one written from the formulas, and the conditions that it promises."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from plnode.model import ModelConfig, StagePart
from plnode.model.decoder import rotate, rotation

CONFIG = ModelConfig(vocab=53, dim=24, layers=3, heads=4, kv_heads=2, ffn_dim=40, seq_len=12, dtype="fp64")


def ids_of(config: ModelConfig, sequences: int = 3, length: int | None = None) -> Tensor:
    length = config.seq_len if length is None else length
    return torch.randint(0, config.vocab, (sequences, length + 1), generator=torch.Generator().manual_seed(3))


def whole(config: ModelConfig, seed: int = 1) -> StagePart:
    return StagePart(config, 0, config.layers, True, True, seed)


def second_decoder(weights: dict[str, Tensor], config: ModelConfig, ids: list[int]) -> Tensor:
    """Logits (L, V) of one sequence, token by token and head by head: complex rotations, explicit softmax, no torch.nn."""

    def norm(x: Tensor, name: str) -> Tensor:
        return x / math.sqrt(float((x * x).mean()) + config.norm_eps) * weights[f"{name}.weight"]

    def turned(x: Tensor, position: int) -> Tensor:
        half = len(x) // 2
        frequencies = torch.tensor([config.rope_theta ** (-2 * i / len(x)) for i in range(half)], dtype=torch.float64)
        z = torch.complex(x[:half], x[half:]) * torch.exp(1j * position * frequencies)
        return torch.cat((z.real, z.imag))

    streams = [weights["embedding.weight"][i] for i in ids]
    width, group = config.head_dim, config.heads // config.kv_heads
    for layer in range(config.layers):
        at = f"layers.{layer}"
        normed = [norm(x, f"{at}.attention_norm") for x in streams]
        q, k, v = ([weights[f"{at}.attention.{m}.weight"] @ x for x in normed] for m in "qkv")
        mixed = []
        for i in range(len(ids)):
            heads = []
            for h in range(config.heads):
                own, shared = slice(h * width, (h + 1) * width), slice(h // group * width, (h // group + 1) * width)
                scores = [float(turned(q[i][own], i) @ turned(k[j][shared], j)) / math.sqrt(width) for j in range(i + 1)]
                shares = [math.exp(s - max(scores)) for s in scores]
                heads.append(sum(s / sum(shares) * v[j][shared] for j, s in enumerate(shares)))
            mixed.append(torch.cat(heads))
        streams = [x + weights[f"{at}.attention.o.weight"] @ m for x, m in zip(streams, mixed, strict=True)]
        for i, x in enumerate(streams):
            y = norm(x, f"{at}.ffn_norm")
            gate, up = weights[f"{at}.ffn.gate.weight"] @ y, weights[f"{at}.ffn.up.weight"] @ y
            streams[i] = x + weights[f"{at}.ffn.down.weight"] @ (gate / (1 + torch.exp(-gate)) * up)
    return torch.stack([weights["head.weight"] @ norm(x, "final_norm") for x in streams])


def test_logits_equal_those_of_a_second_decoder_written_from_the_formulas() -> None:
    model = whole(CONFIG)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # gains of 1 would hide a gain that is never applied
                parameter.copy_(torch.linspace(0.5, 1.5, CONFIG.dim))
    ids = ids_of(CONFIG)[:1, :-1]
    expected = second_decoder({n: p.detach() for n, p in model.named_parameters()}, CONFIG, ids[0].tolist())
    torch.testing.assert_close(model.logits(None, ids)[0], expected, rtol=1e-11, atol=1e-12)


def test_loss_is_the_sum_over_tokens_of_minus_log_probability() -> None:
    model, ids = whole(CONFIG), ids_of(CONFIG)
    log_p = torch.log_softmax(model.logits(None, ids[:, :-1]), dim=-1).detach()
    by_hand = sum(-float(log_p[b, t, ids[b, t + 1]]) for b in range(3) for t in range(CONFIG.seq_len))
    out = model(None, ids)
    assert out.boundary is None
    assert float(out.loss_sum.detach()) == pytest.approx(by_hand, rel=1e-12)


def test_attention_looks_back_only() -> None:
    model, ids = whole(CONFIG), ids_of(CONFIG)[:, :-1]
    changed = ids.clone()
    changed[:, 7] = (changed[:, 7] + 1) % CONFIG.vocab
    before, after = model.logits(None, ids), model.logits(None, changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.isclose(before[:, 7:], after[:, 7:]).all(-1).any()


def test_rotation_makes_scores_depend_on_the_distance_only() -> None:
    cos, sin = rotation(CONFIG, 12)
    q, k = torch.randn(2, 1, 1, 1, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).expand(2, 1, 12, 1, 6)
    scores = torch.einsum("blhk,bmhk->lm", rotate(q, cos, sin), rotate(k, cos, sin))
    for distance in range(-11, 12):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-12)
    assert not torch.allclose(scores[0, 0], scores[0, 5])


def test_names_are_global_whatever_the_slice() -> None:
    names = [n for n, _ in StagePart(CONFIG, 1, 3, False, True, 1).named_parameters()]
    attention, ffn = [f"attention.{m}" for m in "qkvo"], [f"ffn.{m}" for m in ("gate", "up", "down")]
    block = ["attention_norm", *attention, "ffn_norm", *ffn]
    assert names == [f"layers.{i}.{m}.weight" for i in (1, 2) for m in block] + ["final_norm.weight", "head.weight"]
    assert {n for n, _ in whole(CONFIG).named_parameters()} == {*names, "embedding.weight"} | {
        n.replace("layers.1", "layers.0") for n in names if "layers.1" in n
    }


def test_nothing_is_shared_between_ends_or_layers() -> None:
    parameters = list(whole(CONFIG).parameters())
    assert len({p.data_ptr() for p in parameters}) == len(parameters)


def test_global_random_numbers_are_neither_used_nor_changed() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    whole(CONFIG)
    assert torch.equal(torch.rand(3), expected)


def test_on_the_meta_device_nothing_is_allocated() -> None:
    with torch.device("meta"):
        part = whole(ModelConfig(vocab=50_000, dim=8192, layers=80, heads=64, kv_heads=8, ffn_dim=28_672, seq_len=4096))
    assert all(p.is_meta for p in part.parameters())


@pytest.mark.parametrize(
    ("x", "ids", "message"),
    [
        (torch.zeros(3, 12, 24, dtype=torch.float64), ids_of(CONFIG), "takes ids only"),
        (None, ids_of(CONFIG, length=13), "more than seq_len"),
    ],
)
def test_wrong_input_of_the_first_stage_is_refused(x: Tensor | None, ids: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        whole(CONFIG)(x, ids)


@pytest.mark.parametrize(
    "x",
    [None, torch.zeros(2, 12, 24, dtype=torch.float64), torch.zeros(3, 12, 24), torch.zeros(3, 11, 24, dtype=torch.float64)],
    ids=["missing", "batch", "dtype", "length"],
)
def test_wrong_input_of_a_later_stage_is_refused(x: Tensor | None) -> None:
    with pytest.raises(ValueError, match=r"does not fit|any other stage"):
        StagePart(CONFIG, 1, 2, False, False, 1)(x, ids_of(CONFIG))


@pytest.mark.parametrize("bounds", [(0, 4, True, True), (2, 1, False, False), (1, 3, True, True), (0, 2, True, True)])
def test_bounds_outside_the_model_are_refused(bounds: tuple[int, int, bool, bool]) -> None:
    with pytest.raises(ValueError, match=r"within|stands before"):
        StagePart(CONFIG, *bounds, 1)


def test_bf16_computes_in_bf16_keeps_fp32_weights_and_stays_near_fp32() -> None:
    fine = ModelConfig(vocab=53, dim=24, layers=3, heads=4, kv_heads=2, ffn_dim=40, seq_len=12)
    coarse = ModelConfig(vocab=53, dim=24, layers=3, heads=4, kv_heads=2, ffn_dim=40, seq_len=12, dtype="bf16")
    ids = ids_of(fine)
    first = StagePart(coarse, 0, 2, True, False, 1)
    assert first(None, ids).boundary.dtype == torch.bfloat16
    models = whole(fine), whole(coarse)
    losses = [m(None, ids).loss_sum for m in models]
    assert losses[1].dtype == torch.float32
    assert float(losses[1].detach()) == pytest.approx(float(losses[0].detach()), rel=5e-3)
    for loss in losses:
        loss.backward()
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert b.dtype == b.grad.dtype == torch.float32
        assert float((a.grad - b.grad).norm() / a.grad.norm()) < 0.05, name
