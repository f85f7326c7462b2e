"""A stage's whole state as named tensors on the host: weights under their global names, the optimizer's as ``optimizer.<name>``.

Both or neither: weights that come without the optimizer's moments train on as if nothing were wrong, with steps of the wrong
size (JOIN-7).  So a replacement is checked in full before anything is changed.  Device thread only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from .errors import StageError

OPTIMIZER_PREFIX = "optimizer."


class Optimizer(Protocol):
    """What the runner asks of an optimizer (``plnode.optim.StageOptimizer``)."""

    def step(self, step: int) -> float:
        """Apply the gradients with the rate of ``step``; the norm before clipping, not finite if nothing was changed."""

    def state_tensors(self) -> dict[str, Tensor]:
        """The live state tensors by name."""

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Overwrite the whole state, or raise ValueError and change nothing."""


def copy_state(part: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Contiguous host copies of all state, ascending by name."""
    state = {OPTIMIZER_PREFIX + name: tensor for name, tensor in optimizer.state_tensors().items()}
    tensors: dict[str, Tensor] = {**part.state_dict(), **state}
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in sorted(tensors.items())}


def replace_state(part: nn.Module, optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Overwrite weights and optimizer state.  Raises StageError naming the first difference, having changed nothing."""
    own = part.state_dict()
    weights = {name: tensor for name, tensor in tensors.items() if not name.startswith(OPTIMIZER_PREFIX)}
    if odd := sorted(weights.keys() ^ own.keys()):
        raise StageError(f"the weights given and those of this stage differ in {len(odd)} names, the first is {odd[0]}")
    for name, tensor in weights.items():
        if tensor.shape != own[name].shape or tensor.dtype != own[name].dtype:
            expected, got = (f"{tuple(t.shape)} {t.dtype}" for t in (own[name], tensor))
            raise StageError(f"{name} is {got}, expected {expected}")
    state = {name.removeprefix(OPTIMIZER_PREFIX): t for name, t in tensors.items() if name.startswith(OPTIMIZER_PREFIX)}
    try:
        optimizer.load_state_tensors(state)
    except ValueError as error:
        raise StageError(str(error)) from error
    with torch.no_grad():
        for name, tensor in weights.items():
            own[name].copy_(tensor)


def digest_weights(part: nn.Module) -> bytes:
    """SHA-256 over name, dtype, shape and bytes of every weight, ascending by name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(part.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.digest()
