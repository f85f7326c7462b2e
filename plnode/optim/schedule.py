"""The learning rate as a pure function of the step, as a share of the peak.

A function of the step number alone, with no state: a node that joins, restarts or repeats a step has the same rate as everyone.

* Warm-up: linear, (step + 1) / warmup_steps, so the first step already moves.
* `cosine`: half a cosine from 1 to `min_lr_ratio` at the last step (Loshchilov and Hutter, arXiv 1608.03983).
* `wsd`: 1, then linear to `min_lr_ratio` over the last 20 % of the run: warm-up, stable, decay (Hu et al., arXiv 2404.06395;
  linear and a fifth: Hägele et al., arXiv 2405.18392).  A run that is prolonged repeats only the last fifth.
* `constant`: 1.
"""

from __future__ import annotations

import math

from plnode.optim.config import OptimConfig

WSD_DECAY_SHARE = 0.2


def lr_ratio(config: OptimConfig, step: int) -> float:
    """Share of the peak learning rate at `step` (from 0); the last step's value holds for any step after the end."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    last = config.total_steps - 1
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "cosine":
        begin, shape = config.warmup_steps, _half_cosine
    else:
        decay_steps = max(1, round(config.total_steps * WSD_DECAY_SHARE))
        begin, shape = max(config.warmup_steps, last - decay_steps), _line
    if step <= begin:
        return 1.0
    share = min(1.0, (step - begin) / (last - begin)) if last > begin else 1.0
    return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * shape(share)


def _half_cosine(share: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * share))


def _line(share: float) -> float:
    return 1.0 - share
