"""The first weights: one variance rule, and the same bits whoever draws them.

Same bits.  Every node that starts a stage must hold exactly the slice of the model that one process would have made, whatever
the split, the thread count, the device or the library version.  So each tensor is drawn from its own stream, keyed by the run's
seed and the tensor's full name with the global layer number, and nothing in the path may round differently elsewhere: numpy
promises Philox4x64's raw words (Salmon et al., SC'11), not its `normal()`, and torch promises neither.  Element e takes the
e-th 32-bit half of the raw stream, v = (2 (bits >> 8) + 1 - 2^24) / 2^24, uniform in (-1, 1) and exact in fp32; the weight is
fp32(std x sqrt 3) x v, one rounding. Uniform rather than normal: no logarithm, no cosine.

Scale.  Each matrix keeps the mean square of what passes through it.  Behind a norm the input has mean square 1, so std = 1 /
sqrt(dim). The two matrices that write to the residual stream get r = 1 / sqrt(2 layers) on top (layers of the whole model,
never of the stage), so that the stream ends with a mean square between 1 and 2 at any depth.  The input of `down` is silu(g) u
with independent unit Gaussians g, u, whose mean square is E silu(g)^2 = 0.355776.  The head starts at half scale: the first
loss is ln(vocab) + 1/8.  Norm gains start at 1.  This is the variance rule of Koneputugodage et al. (CVPR 2025) for this
architecture.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import numpy.typing as npt
import torch

from plnode.model.config import ModelConfig

SILU_MEAN_SQUARE = 0.355776  # E silu(z)^2 for z ~ N(0, 1), by quadrature; a test integrates it again
HEAD_SCALE = 0.5


def draw(seed: int, name: str, count: int) -> npt.NDArray[np.float32]:
    """`count` float32 values, uniform in (-1, 1), of the tensor `name` in the run with this unsigned 64-bit seed."""
    digest = hashlib.sha256(b"plnode-init-1" + seed.to_bytes(8, "little") + name.encode()).digest()
    words = np.random.Philox(key=int.from_bytes(digest[:16], "little")).random_raw((count + 1) // 2)
    halves = words.astype("<u8").view("<u4")[:count]
    return ((2 * (halves >> 8).astype(np.int64) + 1 - 2**24) / 2**24).astype(np.float32)


def standard_deviation(config: ModelConfig, name: str) -> float:
    """The standard deviation of the matrix `name`.  Raises KeyError for a name that no matrix of the decoder has."""
    residual = 1.0 / math.sqrt(2 * config.layers)
    return {
        "embedding": 1.0,
        "q": 1.0 / math.sqrt(config.dim),
        "k": 1.0 / math.sqrt(config.dim),
        "v": 1.0 / math.sqrt(config.dim),
        "o": residual / math.sqrt(config.dim),
        "gate": 1.0 / math.sqrt(config.dim),
        "up": 1.0 / math.sqrt(config.dim),
        "down": residual / math.sqrt(SILU_MEAN_SQUARE * config.ffn_dim),
        "head": HEAD_SCALE / math.sqrt(config.dim),
    }[name.removesuffix(".weight").rpartition(".")[2]]


@torch.no_grad()
def initialise(config: ModelConfig, name: str, parameter: torch.Tensor, seed: int) -> None:
    """Fill one parameter in place.  `name` is its full name; vectors are norm gains and become 1."""
    if parameter.ndim == 1:
        parameter.fill_(1.0)
        return
    scale = np.float32(standard_deviation(config, name) * math.sqrt(3.0))
    values = scale * draw(seed, name, parameter.numel())
    parameter.copy_(torch.from_numpy(values.reshape(tuple(parameter.shape))))
