"""First weights: the same bits for any slice, the intended scale, and a referee for the random stream."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch

from plnode.model import ModelConfig, StagePart
from plnode.model.initialise import SILU_MEAN_SQUARE, draw, standard_deviation

CONFIG = ModelConfig(vocab=512, dim=128, layers=6, heads=4, kv_heads=2, ffn_dim=320, seq_len=64)


def philox_words(key: int, count: int) -> list[int]:
    """Philox4x64-10 from the paper (Salmon et al., SC'11), in plain integers; numpy counts up before it generates."""
    mask = 2**64 - 1
    words: list[int] = []
    counter = 0
    while len(words) < count:
        counter += 1
        x = [(counter >> 64 * i) & mask for i in range(4)]
        k = [key & mask, key >> 64]
        for round_number in range(10):
            if round_number:
                k = [(k[0] + 0x9E3779B97F4A7C15) & mask, (k[1] + 0xBB67AE8584CAA73B) & mask]
            a, b = 0xD2E7470EE14C6C93 * x[0], 0xCA5A826395121157 * x[2]
            x = [(b >> 64) ^ x[1] ^ k[0], b & mask, (a >> 64) ^ x[3] ^ k[1], a & mask]
        words += x
    return words[:count]


def test_init_draws_follow_the_published_stream() -> None:
    name = "layers.3.attention.q.weight"
    key = int.from_bytes(hashlib.sha256(b"plnode-init-1" + (9).to_bytes(8, "little") + name.encode()).digest()[:16], "little")
    halves = [half for word in philox_words(key, 500) for half in (word & 0xFFFFFFFF, word >> 32)]
    expected = [(2 * (half >> 8) + 1 - 2**24) / 2**24 for half in halves]
    assert draw(9, name, 999).tolist() == expected[:999]


def test_init_bits_are_pinned() -> None:
    part = StagePart(CONFIG, 3, 4, False, False, 9)
    data = part.get_parameter("layers.3.attention.q.weight").detach().numpy().tobytes()
    assert hashlib.sha256(data).hexdigest() == "d8859dc36bcd5c1c13ce29c069630ab625f598f45de7b02c93a51cfe8ea24359"


def test_init_of_any_slice_is_that_of_the_whole() -> None:
    whole = StagePart(CONFIG, 0, 6, True, True, 9).state_dict()
    for first in range(6):
        part = StagePart(CONFIG, first, 6, first == 0, True, 9)
        assert all(torch.equal(value, whole[name]) for name, value in part.state_dict().items())
    other = StagePart(CONFIG, 0, 6, True, True, 10).state_dict()
    assert not any(torch.equal(whole[name], other[name]) for name in whole if whole[name].ndim == 2)


def test_init_differs_between_layers() -> None:
    """Control: a key from the stage-local number would give every stage the same first layer."""
    part = StagePart(CONFIG, 0, 2, True, False, 9)
    assert not torch.equal(part.get_parameter("layers.0.ffn.up.weight"), part.get_parameter("layers.1.ffn.up.weight"))


def test_init_in_fp64_is_the_same_numbers() -> None:
    fine = ModelConfig(vocab=512, dim=128, layers=6, heads=4, kv_heads=2, ffn_dim=320, seq_len=64, dtype="fp64")
    a, b = (StagePart(c, 2, 3, False, False, 9).get_parameter("layers.2.ffn.down.weight") for c in (CONFIG, fine))
    assert torch.equal(a.double(), b)


def test_init_has_the_intended_spread() -> None:
    for name, parameter in StagePart(CONFIG, 0, 6, True, True, 9).named_parameters():
        if parameter.ndim == 1:
            assert torch.equal(parameter, torch.ones_like(parameter))
        else:
            ratio = float(parameter.detach().double().square().mean().sqrt()) / standard_deviation(CONFIG, name)
            assert ratio == pytest.approx(1.0, abs=0.02), name


def test_init_silu_constant_is_its_integral() -> None:
    u = (np.arange(400_000) + 0.5) / 20_000 - 10
    weight = np.exp(-u * u / 2)
    silu = u / (1 + np.exp(-u))
    assert float((silu**2 * weight).sum() / weight.sum()) == pytest.approx(SILU_MEAN_SQUARE, abs=5e-7)


@pytest.mark.parametrize("layers", [4, 16])
def test_init_keeps_stream_and_gradient_at_one_size(layers: int) -> None:
    config = ModelConfig(vocab=512, dim=128, layers=layers, heads=4, kv_heads=2, ffn_dim=344, seq_len=64)
    part = StagePart(config, 0, layers, True, True, 3)
    ids = torch.randint(0, 512, (4, 65), generator=torch.Generator().manual_seed(1))
    stream = StagePart(config, 0, layers, True, False, 3)(None, ids).boundary
    assert 1.2 < float(stream.detach().square().mean()) < 2.1
    loss = part(None, ids).loss_sum / 256
    assert float(loss.detach()) == pytest.approx(math.log(512) + 1 / 8, abs=0.15)
    loss.backward()
    norms = [float(part.get_parameter(f"layers.{i}.ffn.up.weight").grad.norm()) for i in (0, layers - 1)]
    assert norms[0] / norms[1] < 2.5


def test_init_of_a_matrix_without_a_rule_is_refused() -> None:
    with pytest.raises(KeyError):
        standard_deviation(CONFIG, "layers.0.attention.extra.weight")
