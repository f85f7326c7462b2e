"""The optimizer of one stage: clipping, schedule, update, and its state by name.

What goes wrong: (1) clipping by the norm of the *whole* model needs a sum over all stages before anyone may step, one more
round trip at every step, and a dead stage stops the others.  So each of S stages clips its own gradient to clip / sqrt(S): if
all stages have equal norms that is the same clip.  (2) State that exists only after the first step cannot be handed to a
joiner, nor overwritten by what it receives; here all state exists from construction, as tensors with global names.  (3) A
non-finite gradient that is applied ruins weights and moments for good; here it changes nothing, and the caller sees it in the
norm.  (4) A stage that trains on no gradient looks healthy for days (NUM-2); a parameter without a gradient is an error.

Which optimizer a parameter gets depends on its name and rank alone: `muon` takes the matrices of the blocks.  AdamW (Loshchilov
and Hutter, arXiv 1711.05101) is torch's, decaying matrices only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from plnode.optim.adamw import AdamW
from plnode.optim.config import OptimConfig
from plnode.optim.muon import Muon
from plnode.optim.schedule import lr_ratio

# State of one parameter, by the key under which its optimizer holds it.
_KEYS = {AdamW: ("step", "exp_avg", "exp_avg_sq"), Muon: ("momentum_buffer",)}


def is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """Whether this is a matrix of a block (Muon's), not embedding, head or norm gain (always AdamW's)."""
    return parameter.ndim == 2 and name.startswith("layers.")


class StageOptimizer:
    """Owns the update of the given parameters.  `stages` is the number of stages of the run.

    Use on the thread that owns the parameters.  `gradient_elements` counts the parameters' elements.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]], config: OptimConfig, stages: int) -> None:
        self._parameters = dict(named_parameters)
        if not self._parameters or stages < 1:
            raise ValueError("a stage has at least one parameter, a run at least one stage")
        self._config = config
        self._clip = config.clip / math.sqrt(stages)
        hidden = [p for n, p in self._parameters.items() if config.name == "muon" and is_hidden_matrix(n, p)]
        taken = {id(p) for p in hidden}
        rest = [p for p in self._parameters.values() if id(p) not in taken]
        # (optimizer, its peak learning rate)
        self._optimizers: list[tuple[AdamW | Muon, float]] = []
        if hidden:
            muon = Muon(hidden, config.muon_lr, config.muon_momentum, config.weight_decay)
            self._optimizers.append((muon, config.muon_lr))
        if rest:
            matrices, vectors = [p for p in rest if p.ndim >= 2], [p for p in rest if p.ndim < 2]
            adamw = AdamW([(matrices, config.weight_decay), (vectors, 0.0)], config.lr, config.betas, config.eps)
            self._optimizers.append((adamw, config.lr))

    @property
    def gradient_elements(self) -> int:
        return sum(p.numel() for p in self._parameters.values())

    def gradient_norm(self) -> float:
        """Euclidean norm of the stage's gradient, before clipping.  Raises RuntimeError if a parameter has none."""
        return float(torch.nn.utils.get_total_norm(self._gradients()))

    def step(self, step: int) -> float:
        """Clip, set the rate of `step`, update, drop the gradients.  Returns the norm before clipping.

        If the norm is not finite nothing is updated (the gradients are dropped all the same): the caller sees it by the return
        value.  Raises RuntimeError, leaving everything as it was, if a parameter has no gradient.
        """
        gradients = self._gradients()
        norm = torch.nn.utils.get_total_norm(gradients)
        if torch.isfinite(norm):
            torch.nn.utils.clip_grads_with_norm_(self._parameters.values(), self._clip, norm)
            ratio = lr_ratio(self._config, step)
            for optimizer, peak in self._optimizers:
                optimizer.lr = peak * ratio
                optimizer.step()
        self.zero_gradients()
        return float(norm)

    def zero_gradients(self) -> None:
        """Forget the gradients of all parameters."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def state_tensors(self) -> dict[str, Tensor]:
        """The state as `<parameter>.<key>`: live tensors, not copies.  Names and shapes are the same before the first step."""
        return {
            f"{name}.{key}": optimizer.state[parameter][key]
            for name, parameter in self._parameters.items()
            for optimizer, _ in self._optimizers
            if parameter in optimizer.state
            for key in _KEYS[type(optimizer)]
        }

    @torch.no_grad()
    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite the whole state in place.  Raises ValueError, changing nothing, unless names, shapes and dtypes are ours."""
        own = self.state_tensors()
        if own.keys() != tensors.keys():
            odd = sorted(own.keys() ^ tensors.keys())
            raise ValueError(f"optimizer state differs in {len(odd)} names, the first is {odd[0]}")
        for name, tensor in own.items():
            given = tensors[name]
            if given.shape != tensor.shape or given.dtype != tensor.dtype:
                raise ValueError(
                    f"optimizer state {name} is {tuple(given.shape)} {given.dtype}, expected {tuple(tensor.shape)} {tensor.dtype}"
                )
        for name, tensor in own.items():
            tensor.copy_(tensors[name])

    def _gradients(self) -> list[Tensor]:
        missing = [name for name, parameter in self._parameters.items() if parameter.grad is None]
        if missing:
            raise RuntimeError(f"no gradient for {missing[0]} and {len(missing) - 1} more parameters: no backward was run")
        return [p.grad for p in self._parameters.values() if p.grad is not None]
