"""The sizes of a decoder, and what follows from them: parameters, FLOPs, bytes kept for the backward.

These figures plan the split, the memory and the receipts, so they are formulas of the sizes alone and a test checks each
against the real thing (parameters against the built module, bytes against what autograd saves).

FLOPs count multiply and add apart.  A matrix of p parameters costs 2p a token forward and 4p backward (gradient of its input
and of itself): Kaplan et al., arXiv 2001.08361, section 2.1.  Attention's two products cost 4 x (query width) x (keys seen) a
token, where a causal token sees (seq_len + 1) / 2 keys on average (as Kaplan et al.; the PaLM convention, arXiv 2204.02311
appendix B, counts all of them). Norms, rotations and the softmax are left out: they are memory traffic rather than
arithmetic.

`dtype` is the type that activations have and that products are computed in.  Weights, gradients and optimizer state of a bf16
model stay fp32: a bf16 weight of 1 does not change when 1/300 is added to it, which is what a learning rate of 3e-3 does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU, untied head, no biases.

    Raises ValueError if the sizes do not fit together.
    """

    vocab: int
    """Number of tokens."""
    dim: int
    """Width of the residual stream."""
    layers: int
    """Blocks of the whole model."""
    heads: int
    """Query heads; `dim / heads` is the width of a head and even (rotation turns pairs)."""
    kv_heads: int
    """Key and value heads; a divisor of `heads` (Ainslie et al., arXiv 2305.13245)."""
    ffn_dim: int
    """Inner width of the feed-forward part."""
    seq_len: int
    """Tokens a sequence."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies (Su et al., arXiv 2104.09864)."""
    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm (Zhang and Sennrich, arXiv 1910.07467); the value is Llama's."""
    dtype: str = "fp32"
    """`fp32`, `fp64` or `bf16`: of activations and products; weights of a bf16 model are fp32."""

    def __post_init__(self) -> None:
        for name in ("vocab", "dim", "layers", "heads", "kv_heads", "ffn_dim", "seq_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, not {self.dtype!r}")
        if self.dim % self.heads or (self.dim // self.heads) % 2:
            raise ValueError(f"dim {self.dim} must be an even multiple of heads {self.heads}")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads {self.kv_heads} must divide heads {self.heads}")
        if not (self.rope_theta >= 1.0 and self.norm_eps > 0.0):
            raise ValueError("rope_theta must be at least 1 and norm_eps above 0")

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def kv_dim(self) -> int:
        """Width of all keys (or values) of a token."""
        return self.kv_heads * self.head_dim

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of activations, boundaries and products."""
        return _DTYPES[self.dtype]

    @property
    def weight_dtype(self) -> torch.dtype:
        """Of weights, gradients and optimizer state."""
        return torch.float64 if self.dtype == "fp64" else torch.float32

    @property
    def layer_matrix_params(self) -> int:
        """Elements of the seven matrices of one block."""
        return self.dim * (2 * self.dim + 2 * self.kv_dim + 3 * self.ffn_dim)

    @property
    def layer_params(self) -> int:
        """Elements of one block: the matrices and two norm gains."""
        return self.layer_matrix_params + 2 * self.dim

    @property
    def embedding_params(self) -> int:
        return self.vocab * self.dim

    @property
    def head_params(self) -> int:
        """Elements of the final norm and the head."""
        return self.vocab * self.dim + self.dim

    @property
    def params(self) -> int:
        """Elements of the whole model."""
        return self.embedding_params + self.layers * self.layer_params + self.head_params

    @property
    def layer_flops_per_token(self) -> float:
        """FLOPs a token of one block, forward only."""
        return 2.0 * self.layer_matrix_params + 4.0 * self.dim * (self.seq_len + 1) / 2

    @property
    def head_flops_per_token(self) -> float:
        """FLOPs a token of the head, forward only."""
        return 2.0 * self.vocab * self.dim


def activation_bytes(config: ModelConfig, layers: int, *, embed: bool, head: bool, sequences: int) -> int:
    """Bytes that autograd keeps from the forward to the backward of one microbatch, weights not counted.

    For `layers` blocks, with the embedding's ids and the head's tensors where the stage has them, and `sequences` sequences. A
    block keeps a token: two norms with input, normalised input and output (6 dim); query, attention output (2 dim), key and
    value (2 kv_dim), one softmax normaliser a head; gate, up, silu(gate) and their product (4 ffn_dim).  A bf16 norm computes,
    and keeps, its inner values in fp32.  The head keeps the log-probabilities of all tokens, in fp32 or fp64: usually its
    largest tensor.  GPU kernels that fuse the norm keep up to 2 dim less, so this is an upper bound there.
    """
    width = config.compute_dtype.itemsize
    inner = config.weight_dtype.itemsize
    norm = config.dim * (2 * width + inner) + inner + (config.dim * inner if width < inner else 0)
    block = 2 * norm + width * (2 * config.dim + 2 * config.kv_dim + 4 * config.ffn_dim) + config.heads * inner
    a_token = layers * block
    if head:
        a_token += norm + config.vocab * inner + 8  # the targets are int64
    ids = 8 * (config.seq_len + 1) * sequences if embed else 0
    return a_token * config.seq_len * sequences + ids
