"""AdamW (Loshchilov and Hutter, arXiv 1711.05101): torch's own arithmetic without torch's `Optimizer` class.

The class costs each process two seconds and 100 MB at its first construction (it imports torch's compiler), and keeps state in a
form that has to be unpacked by name anyhow.  The update itself is torch's fused kernel, one pass over the memory: 33 ms for ten
million parameters on one core where the unfused form takes 113 (both measured in one run on a busy machine).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim.adam import adam


class AdamW:
    """For any parameters.  `groups`: (parameters, weight decay).  State: `step`, `exp_avg`, `exp_avg_sq`, present from the start."""

    def __init__(
        self, groups: Sequence[tuple[Sequence[nn.Parameter], float]], lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        self.lr = lr
        self._groups = [(list(parameters), decay) for parameters, decay in groups if parameters]
        self._betas = betas
        self._eps = eps
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {
            parameter: {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
            for parameters, _ in self._groups
            for parameter in parameters
        }

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient; gradients are left as they are."""
        for parameters, decay in self._groups:
            ready = [(p, p.grad, self.state[p]) for p in parameters if p.grad is not None]
            adam(
                [p for p, _, _ in ready],
                [g for _, g, _ in ready],
                [s["exp_avg"] for _, _, s in ready],
                [s["exp_avg_sq"] for _, _, s in ready],
                [],
                [s["step"] for _, _, s in ready],
                fused=True,
                decoupled_weight_decay=True,
                amsgrad=False,
                beta1=self._betas[0],
                beta2=self._betas[1],
                lr=self.lr,
                weight_decay=decay,
                eps=self._eps,
                maximize=False,
            )
