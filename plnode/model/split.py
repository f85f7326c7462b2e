"""Where the model is cut into stages: consecutive layers, so that the slowest stage is as fast as possible.

A pipeline runs at the speed of its slowest stage, and the head counts as much as several layers when the vocabulary is large
against the width; a split by equal layer counts wastes the other stages.  Publicly known runs of this kind cut by layers and
held very unequal stages.  The embedding is a table lookup and costs nothing that counts; memory is not balanced here (a stage
that does not fit is refused where memory is planned).

Cutting n units into k runs of consecutive units with the least greatest sum is a classic exact dynamic programme (the linear
partition problem). Several splits usually share that greatest sum; of those the one with the least sum of squares is taken,
then the one that gives earlier stages more layers, so that every node computes the same split from the same sizes. All costs
are sums of a few products far below 2^53, exact in double precision on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plnode.model.config import ModelConfig, activation_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpan:
    """One stage: layers [first_layer, end_layer), and whether it embeds and computes the loss."""

    stage: int
    first_layer: int
    end_layer: int
    embed: bool
    head: bool
    params: int
    """Trainable elements."""
    flops_per_token_forward: float
    flops_per_token: float
    """Forward and backward."""

    @property
    def layers(self) -> int:
        return self.end_layer - self.first_layer

    def activation_bytes(self, config: ModelConfig, sequences: int) -> int:
        """Bytes autograd keeps for one microbatch of `sequences` sequences between its forward and its backward."""
        return activation_bytes(config, self.layers, embed=self.embed, head=self.head, sequences=sequences)


def plan_split(config: ModelConfig, stages: int) -> tuple[StageSpan, ...]:
    """The balanced split into `stages` stages of at least one layer.  Raises ValueError if there are not as many layers."""
    if not 1 <= stages <= config.layers:
        raise ValueError(f"{config.layers} layers cannot be cut into {stages} stages")
    costs = [config.layer_flops_per_token] * config.layers
    costs[-1] += config.head_flops_per_token
    return explicit_split(config, balance(costs, stages))


def explicit_split(config: ModelConfig, layers: Sequence[int]) -> tuple[StageSpan, ...]:
    """The split with so many layers a stage.  Raises ValueError if a stage is empty or the sum is not the model's."""
    if not layers or min(layers) < 1 or sum(layers) != config.layers:
        raise ValueError(f"the split {list(layers)} must have at least one layer a stage and {config.layers} in all")
    spans = []
    first = 0
    for stage, count in enumerate(layers):
        embed, head = stage == 0, stage == len(layers) - 1
        forward = count * config.layer_flops_per_token + head * config.head_flops_per_token
        spans.append(
            StageSpan(
                stage=stage,
                first_layer=first,
                end_layer=first + count,
                embed=embed,
                head=head,
                params=count * config.layer_params + embed * config.embedding_params + head * config.head_params,
                flops_per_token_forward=forward,
                flops_per_token=3.0 * forward,
            )
        )
        first += count
    return tuple(spans)


def balance(costs: Sequence[float], parts: int) -> tuple[int, ...]:
    """The lengths of `parts` non-empty runs of `costs`: least greatest sum, then least sum of squares, then longer runs first."""
    n = len(costs)
    prefix = [0.0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)
    # least[k][i]: the least greatest sum when the first i units are cut into k parts.
    least = [[0.0 if i == 0 else float("inf") for i in range(n + 1)]]
    for k in range(1, parts + 1):
        row = [float("inf")] * (n + 1)
        for i in range(k, n + 1):
            row[i] = min(max(least[k - 1][j], prefix[i] - prefix[j]) for j in range(k - 1, i))
        least.append(row)
    bound = least[parts][n]
    # Among the splits within that bound.  best[i]: (sum of squares, negated lengths) of the first i units, compared in order.
    best: list[tuple[float, tuple[int, ...]] | None] = [(0.0, ())] + [None] * n
    for _ in range(parts):
        following: list[tuple[float, tuple[int, ...]] | None] = [None] * (n + 1)
        for i in range(1, n + 1):
            candidates = [
                (before[0] + (prefix[i] - prefix[j]) ** 2, (*before[1], j - i))
                for j in range(i)
                if (before := best[j]) is not None and prefix[i] - prefix[j] <= bound
            ]
            following[i] = min(candidates, default=None)
        best = following
    chosen = best[n]
    assert chosen is not None, "the split that gave the bound is within it"
    return tuple(-length for length in chosen[1])
