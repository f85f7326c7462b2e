"""The memory budget of a stage: what must fit, and whether a microbatch keeps its autograd graph.

Memory is planned before it is used.  ``MemoryPlan`` adds up what a stage holds for as long as it lives (weights, gradients,
optimizer state, host buffers) and refuses with the list when it does not fit; what remains is for graphs.

A microbatch between its forward and its backward costs either its graph (every tensor that autograd saved) or only its boundary
input, from which the forward is repeated: a third more compute (forward:backward is 1:2) for a tenth or less of the memory.
``GraphBudget`` decides per microbatch: keep as long as the graphs kept at once fit.  The choice never changes the result: the
same kernels run on the same numbers, so gradients are equal to the bit, and a test holds that.

A graph's size is measured, not computed from a formula that every new layer would make wrong: during the first forward of each
input shape ``GraphMeter`` listens to autograd's saved tensors and counts each storage once, parameters not at all.  That first
microbatch runs with a graph whatever the budget: one graph at a time must fit anyhow, since the backward of a recomputed
microbatch needs just that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import MemoryPlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What a stage holds all the time, in bytes."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    buffers_bytes: int = 0  # host buffers; counted when the device is the host itself

    @property
    def fixed_bytes(self) -> int:
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes + self.buffers_bytes

    def graph_bytes(self, memory_bytes: int, one_graph_bytes: int = 0) -> int:
        """What remains for graphs.  Raises MemoryPlanError if the fixed part and one graph do not fit."""
        needed = self.fixed_bytes + one_graph_bytes
        if needed > memory_bytes:
            items = {
                "weights": self.weights_bytes,
                "gradients": self.gradients_bytes,
                "optimizer": self.optimizer_bytes,
                "buffers": self.buffers_bytes,
                "one microbatch": one_graph_bytes,
            }
            listed = ", ".join(f"{name} {size:,}" for name, size in items.items() if size)
            raise MemoryPlanError(
                f"the stage needs {needed:,} bytes ({listed}) and has {memory_bytes:,}: "
                f"allow {needed - memory_bytes:,} more, or take a stage of at most {memory_bytes / needed:.0%} of this size"
            )
        return memory_bytes - self.fixed_bytes


def plan_for(parameters: Iterable[Tensor], *, buffers_bytes: int = 0, states_per_weight: int = 2) -> MemoryPlan:
    """The plan for these parameters; they may live on the meta device (nothing is allocated).

    ``states_per_weight``: 2 for AdamW (Kingma and Ba 2015: two moments); an optimizer with fewer is over-estimated, never under.
    """
    weights = sum(p.numel() * p.element_size() for p in parameters)
    return MemoryPlan(
        weights_bytes=weights, gradients_bytes=weights, optimizer_bytes=states_per_weight * weights, buffers_bytes=buffers_bytes
    )


class GraphBudget:
    """Decides per microbatch: keep the graph or recompute.  ``limit_bytes`` None = keep always.  Device thread only."""

    def __init__(self, limit_bytes: int | None) -> None:
        self.limit_bytes = limit_bytes
        self.kept_bytes = 0
        self.kept_graphs = 0
        self._size: dict[tuple[int, ...], int] = {}

    def estimate(self, shape: tuple[int, ...]) -> int | None:
        """Bytes of one graph for inputs of this shape; None until one was measured."""
        return self._size.get(shape)

    def measured(self, shape: tuple[int, ...], graph_bytes: int) -> None:
        """A forward with inputs of this shape saved ``graph_bytes``."""
        self._size[shape] = graph_bytes

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether one more graph of this shape may be kept."""
        return self.limit_bytes is None or self.kept_bytes + self._size.get(shape, 0) <= self.limit_bytes

    @property
    def largest_bytes(self) -> int:
        """The largest graph measured; 0 before the first."""
        return max(self._size.values(), default=0)

    @property
    def tight(self) -> bool:
        """Whether one more graph of the largest size seen so far would not fit."""
        return self.limit_bytes is not None and self.kept_bytes + self.largest_bytes > self.limit_bytes

    def keep(self, graph_bytes: int) -> None:
        """A graph of this size stays until ``drop``."""
        self.kept_bytes += graph_bytes
        self.kept_graphs += 1

    def drop(self, graph_bytes: int) -> None:
        """A kept graph of this size is gone."""
        self.kept_bytes -= graph_bytes
        self.kept_graphs -= 1


class GraphMeter(torch.autograd.graph.saved_tensors_hooks):
    """Context in which a forward runs once to learn what its graph holds.

    ``graph_bytes`` counts each storage once, those of ``held_anyway`` (parameters, buffers) not at all.
    """

    def __init__(self, held_anyway: Iterable[Tensor]) -> None:
        # Keyed by address: two live storages never share one, and every storage counted is alive as long as its graph is.
        self._seen = {tensor.untyped_storage().data_ptr() for tensor in held_anyway}
        self.graph_bytes = 0
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.graph_bytes += storage.nbytes()
        # Detached: a hook that keeps an operation's own output ties a knot of references that only the garbage collector opens.
        return tensor.detach()

    @staticmethod
    def _unpack(tensor: Tensor) -> Tensor:
        return tensor
