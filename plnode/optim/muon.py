"""Muon: momentum whose update is made nearly orthogonal (K. Jordan et al., kellerjordan.github.io/posts/muon, 2024).

    M <- beta M + (1 - beta) G      D = (1 - beta) G + beta M      W <- W (1 - lr decay) - lr sqrt(max(1, rows / columns)) O(D)

where O(D) replaces the singular values of D by values near 1, by five steps of a quintic Newton-Schulz iteration X <- a X + (b
A + c A^2) X, A = X X^T.  Its coefficients trade convergence for slope at zero (0 -> a^5 = 485 times): singular values above
about 1e-2 of the Frobenius norm end within 0.68..1.14, not at 1.

Why not torch's `Muon`: it casts to bf16 before the iteration.  We need the update to commute with a change of basis of the
weights to the precision of the weights (a transform of a boundary folds weights and momentum), and replicas of one stage on
different hardware to agree closely; bf16 products do neither, and on a CPU they are no faster.  So the iteration runs in the
parameter's dtype, at least fp32 (fp64 in fp64).  Momentum, Nesterov form and scale are torch's, and a test compares the two
with the iteration swapped out.

For matrices only.  Embedding, head and vectors take AdamW: their rows are used one at a time or not at all, which a spectral
norm does not see.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # K. Jordan, as above
STEPS = 5
EPS = 1e-7  # a zero matrix stays zero


def orthogonalise(matrix: Tensor) -> Tensor:
    """Newton-Schulz: (m, n) -> (m, n) with the same singular vectors and singular values near 1; computed in fp32 or fp64."""
    a, b, c = COEFFICIENTS
    x = matrix if matrix.dtype == torch.float64 else matrix.float()
    tall = x.shape[0] > x.shape[1]
    if tall:
        x = x.T
    x = x / (torch.linalg.matrix_norm(x) + EPS)  # Frobenius, an upper bound of the spectral norm
    for _ in range(STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if tall else x).to(matrix.dtype)


class Muon:
    """For two-dimensional parameters.  State: `momentum_buffer` like the parameter, present from the start.

    No subclass of torch's `Optimizer`, for the reason given in `adamw.py`.  Raises ValueError for a parameter that is not a matrix.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        self.lr = lr
        self._momentum = momentum
        self._decay = weight_decay
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {}
        for parameter in params:
            if parameter.ndim != 2:
                raise ValueError(f"Muon is for matrices, not for shape {tuple(parameter.shape)}")
            self.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient; gradients are left as they are."""
        beta = self._momentum
        for parameter, state in self.state.items():
            if parameter.grad is None:
                continue
            buffer = state["momentum_buffer"]
            buffer.lerp_(parameter.grad, 1.0 - beta)
            direction = orthogonalise(parameter.grad.lerp(buffer, beta))
            rows, columns = parameter.shape
            parameter.mul_(1.0 - self.lr * self._decay)
            parameter.add_(direction, alpha=-self.lr * math.sqrt(max(1.0, rows / columns)))
