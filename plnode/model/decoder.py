"""A slice of a Llama-style decoder: some consecutive layers, perhaps the embedding before or the loss after them.

    x += attention(norm(x))      x += ffn(norm(x))      logits = head(norm(x))

Tensor names carry their shape:  B sequences, L tokens, D width (`dim`), H query heads, K width of a head, F `ffn_dim`, V
vocabulary; 1 in `ids_BL1` means L + 1.

What goes wrong in a decoder that is cut in pieces, and what is done here:

* *The pieces differ from the whole.*  A stage is the same class as the whole model with other bounds; parameters carry global
  names (`layers.3.attention.q.weight`) and are drawn by name, and nothing is shared between layers or tied between ends. The
  same kernels see the same numbers: outputs and gradients of a chain are those of the whole, to the bit, in every dtype.
* *Results depend on the run.*  No dropout, no atomics: on the CPU with a fixed number of threads everything is deterministic.
  Rotation tables are computed in fp64 and rounded once.
* *Layers cannot be changed later.*  Every matrix is a plain `Linear` of its own (row vectors times the transposed weight, an
  optional bias has its place), norms act before sublayers only, and nothing but these sublayers writes to the residual stream.
* *Sums lose digits.*  The loss is a sum over tokens, not a mean: a microbatch does not know how many tokens its step has. It is
  computed in fp32 at least, norms as well.

A bf16 model computes in bf16 from fp32 weights.  Casting a weight outside of autograd's sight would keep a copy of it in every
graph, one for each microbatch in flight; `_MixedLinear` keeps the weight itself and casts again in the backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plnode.model.config import ModelConfig
from plnode.model.initialise import initialise


@dataclass(frozen=True, slots=True)
class Output:
    """What a forward gives: `boundary` (B, L, D) for the next stage, or on the last stage `loss_sum`, a scalar (fp32 or fp64)."""

    boundary: Tensor | None
    loss_sum: Tensor | None


class _MixedLinear(torch.autograd.Function):
    """x @ w.T in the dtype of x with a weight of higher precision; the gradient of w has the precision of w."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        grad_weight = grad.flatten(0, -2).T @ x.flatten(0, -2)
        return grad @ weight.to(x.dtype), grad_weight.to(weight.dtype)


class Linear(nn.Module):
    """y = x W^T + b with `weight` (out, in); `bias` is None: no layer of this decoder has one."""

    def __init__(self, inputs: int, outputs: int, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=config.weight_dtype))
        self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out), in the dtype of x."""
        if x.dtype == self.weight.dtype:
            return F.linear(x, self.weight)
        y: Tensor = _MixedLinear.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return y


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) x weight, over the last dimension; inner values in fp32 at least."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.empty(config.dim, dtype=config.weight_dtype))

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


def rotation(config: ModelConfig, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines (length, 1, K / 2) of the rotary embedding, in the weights' dtype: angle = position x theta^(-2i / K)."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    angles = torch.arange(length, dtype=torch.float64)[:, None] / config.rope_theta**exponents
    return angles.cos()[:, None].to(config.weight_dtype), angles.sin()[:, None].to(config.weight_dtype)


def rotate(x_BLHK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + K / 2) of each head by the position's angle (the half-split order of Llama's public weights)."""
    a, b = x_BLHK.view(*x_BLHK.shape[:-1], 2, -1).unbind(-2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x_BLHK.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.grouped = config.kv_heads != config.heads
        self.q = Linear(config.dim, config.dim, config)
        self.k = Linear(config.dim, config.kv_dim, config)
        self.v = Linear(config.dim, config.kv_dim, config)
        self.o = Linear(config.dim, config.dim, config)

    def forward(self, x_BLD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(B, L, D) -> (B, L, D); token i sees tokens 0..i of its own sequence."""
        q, k, v = (part(x_BLD).unflatten(-1, (-1, self.head_dim)) for part in (self.q, self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed_BHLK = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=self.grouped
        )
        mixed: Tensor = self.o(mixed_BHLK.transpose(1, 2).flatten(2))
        return mixed


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, arXiv 2002.05202): down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = Linear(config.dim, config.ffn_dim, config)
        self.up = Linear(config.dim, config.ffn_dim, config)
        self.down = Linear(config.ffn_dim, config.dim, config)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """(B, L, D) -> (B, L, D)."""
        out: Tensor = self.down(F.silu(self.gate(x_BLD)) * self.up(x_BLD))
        return out


class Block(nn.Module):
    """One layer: attention, then feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config)
        self.ffn = FeedForward(config)

    def forward(self, x_BLD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(B, L, D) -> (B, L, D)."""
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), cos, sin)
        return x_BLD + self.ffn(self.ffn_norm(x_BLD))  # type: ignore[no-any-return]


class StagePart(nn.Module):
    """Layers [first_layer, end_layer) of the decoder, with the embedding if `embed` and the loss if `head`.

    With all layers and both ends it is the whole model.  Parameters have their global names and are drawn from `seed`; under
    `torch.device("meta")` nothing is allocated or drawn.  Raises ValueError for bounds outside the model.
    """

    def __init__(self, config: ModelConfig, first_layer: int, end_layer: int, embed: bool, head: bool, seed: int) -> None:
        super().__init__()
        if not 0 <= first_layer <= end_layer <= config.layers:
            raise ValueError(f"layers [{first_layer}, {end_layer}) are not within 0..{config.layers}")
        if (embed and first_layer != 0) or (head and end_layer != config.layers):
            raise ValueError("the embedding stands before layer 0 and the head after the last one")
        self.config = config
        # `nn.Embedding` would draw a table from the global generator unless given one.
        table = torch.empty(config.vocab, config.dim, dtype=config.weight_dtype) if embed else None
        self.embedding = None if table is None else nn.Embedding(config.vocab, config.dim, _weight=table)
        self.layers = nn.ModuleDict({str(i): Block(config) for i in range(first_layer, end_layer)})
        self.final_norm = RMSNorm(config) if head else None
        self.head = Linear(config.dim, config.vocab, config) if head else None
        cos, sin = rotation(config, config.seq_len)
        self.register_buffer("rotation_cos", cos, persistent=False)
        self.register_buffer("rotation_sin", sin, persistent=False)
        for name, parameter in self.named_parameters():
            if not parameter.is_meta:
                initialise(config, name, parameter, seed)

    def forward(self, x_BLD: Tensor | None, ids_BL1: Tensor) -> Output:
        """Run the stage on a microbatch.

        `x_BLD` is the boundary tensor of the stage before (None if this stage embeds), in `config.compute_dtype`; `ids_BL1`
        int64 (B, L + 1), L <= seq_len: inputs are all but the last column, targets all but the first.  The last stage returns
        the *sum* of the tokens' cross-entropies in nats.  Raises ValueError if an input is missing, superfluous or misshapen.
        """
        x_BLD = self._stream(x_BLD, ids_BL1[:, :-1])
        if self.head is None:
            return Output(x_BLD, None)
        logits_BLV = self._read_out(x_BLD)
        loss = F.cross_entropy(logits_BLV.flatten(0, 1).to(self.config.weight_dtype), ids_BL1[:, 1:].flatten(), reduction="sum")
        return Output(None, loss)

    def logits(self, x_BLD: Tensor | None, ids_BL: Tensor) -> Tensor:
        """For generation: the boundary (B, L, D), or on the last stage the logits (B, L, V).  `ids_BL` are inputs only."""
        x_BLD = self._stream(x_BLD, ids_BL)
        return x_BLD if self.head is None else self._read_out(x_BLD)

    def _stream(self, x_BLD: Tensor | None, ids_BL: Tensor) -> Tensor:
        if (x_BLD is None) != (self.embedding is not None):
            raise ValueError("a stage with the embedding takes ids only, any other stage a boundary tensor")
        length = ids_BL.shape[1]
        if length > self.config.seq_len:
            raise ValueError(f"{length} tokens are more than seq_len {self.config.seq_len}")
        if x_BLD is None:
            assert self.embedding is not None
            x_BLD = self.embedding(ids_BL).to(self.config.compute_dtype)
        elif x_BLD.shape != (*ids_BL.shape, self.config.dim) or x_BLD.dtype != self.config.compute_dtype:
            raise ValueError(f"boundary {tuple(x_BLD.shape)} {x_BLD.dtype} does not fit ids {tuple(ids_BL.shape)}")
        assert x_BLD is not None
        cos, sin = self.get_buffer("rotation_cos")[:length], self.get_buffer("rotation_sin")[:length]
        for layer in self._blocks():
            x_BLD = layer(x_BLD, cos, sin)
        return x_BLD

    def _blocks(self) -> Iterator[nn.Module]:
        return iter(self.layers.values())

    def _read_out(self, x_BLD: Tensor) -> Tensor:
        assert self.final_norm is not None and self.head is not None
        logits_BLV: Tensor = self.head(self.final_norm(x_BLD))
        return logits_BLV
