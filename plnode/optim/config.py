"""What an optimizer needs to be told; the same on every node of a run (it comes from the manifest)."""

from __future__ import annotations

import math
from dataclasses import dataclass

NAMES = ("adamw", "muon")
SCHEDULES = ("cosine", "wsd", "constant")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """An optimizer with its schedule.  Raises ValueError for values without a meaning."""

    name: str = "adamw"
    """`adamw` for everything, or `muon` for the matrices of the blocks and AdamW for the rest."""
    lr: float
    """Peak learning rate of AdamW."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW: decay of the means of gradient and squared gradient; 0.95 as in GPT-3 (Brown et al., arXiv 2005.14165)."""
    eps: float = 1e-8
    """AdamW: added to the root of the mean square."""
    weight_decay: float = 0.0
    """Decoupled decay a step, times the learning rate; matrices only, norm gains are not decayed."""
    muon_lr: float = 0.02
    """Peak learning rate of Muon: the spectral norm of an update of a square matrix is about this (value: K. Jordan)."""
    muon_momentum: float = 0.95
    """Muon: decay of the mean of gradients (value: K. Jordan)."""
    clip: float = 1.0
    """Greatest gradient norm of the model; each of S stages clips its own to clip / sqrt(S)."""
    schedule: str = "constant"
    """`cosine`, `wsd` or `constant`, after the warm-up."""
    warmup_steps: int = 0
    """Steps of linear warm-up."""
    total_steps: int
    """Steps of the run; cosine and wsd end there."""
    min_lr_ratio: float = 0.0
    """Learning rate of the last step as a share of the peak (cosine and wsd)."""

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ValueError(f"optimizer must be one of {', '.join(NAMES)}, not {self.name!r}")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, not {self.schedule!r}")
        for name in ("lr", "muon_lr", "clip", "eps"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0.0):
                raise ValueError(f"{name} must be above 0, not {value}")
        for name, value in (("betas", self.betas[0]), ("betas", self.betas[1]), ("muon_momentum", self.muon_momentum)):
            if not 0.0 <= value < 1.0:
                raise ValueError(f"{name} must be in [0, 1), not {value}")
        if not (self.weight_decay >= 0.0 and 0.0 <= self.min_lr_ratio <= 1.0):
            raise ValueError("weight_decay must not be negative and min_lr_ratio must be in [0, 1]")
        if not 0 <= self.warmup_steps <= self.total_steps or self.total_steps < 1:
            raise ValueError(f"warmup_steps {self.warmup_steps} must be within total_steps {self.total_steps}")
