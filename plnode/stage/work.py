"""What the device thread does with one stage: forward, backward, step, and copies of its state.

Plain torch, no threads, no trio: it can be called from a test directly.  Everything here runs on one thread, which owns the part,
its optimizer and all tensors.

The input of a microbatch is copied into a tensor of our own at once, so the payload's buffer is free as soon as the job is done.
Between forward and backward a microbatch holds either the graph or only that input (``budget.py``); both give the same bits.

The loss that is differentiated is ``loss_sum / tokens_per_step``: the token mean over the step's whole set, so that gradients of
any number of microbatches, on any number of replicas, simply add up.  They add up in ``.grad`` in the order of the jobs.

Exported gradients are one flat vector in ascending order of parameter names, which is equal on all replicas of a stage however
their modules are written down, in fp32 (fp64 for a model in fp64): sums of many contributions need the digits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from wire.tensor import DType

from .account import GradientAccount
from .boundary import DenseBoundary, host_bytes
from .budget import GraphBudget, GraphMeter, plan_for
from .device import Device, Inflow
from .errors import BadPayload, StageError, StaleStep, UnknownMicrobatch
from .hostpool import HostPool
from .jobs import Backward, Exported, Forwarded, Microbatch, NonFinite, Ready, Stepped, Where
from .state import Optimizer, copy_state, digest_weights, replace_state


class Output(Protocol):
    """What a part returns: the boundary activation (batch, sequence, width), or on the last stage the sum of the token losses."""

    @property
    def boundary(self) -> Tensor | None: ...
    @property
    def loss_sum(self) -> Tensor | None: ...


@dataclass(slots=True)
class _Live:
    """A microbatch between forward and backward."""

    x_BLD: Tensor | None
    ids_BL1: Tensor
    boundary: Tensor | None  # with its graph, or None: recompute
    graph_bytes: int
    nonfinite: NonFinite | None


def _finite(tensor: Tensor) -> bool:
    """Whether all elements are finite.  A NaN or infinity makes the sum one too, and a sum takes a twelfth of the time of looking at
    each element (9 against 120 ms for ten million on one core).  Only a sum that is not finite, perhaps by overflow, is looked into."""
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


class StageWork:
    """One stage's weights, optimizer and microbatches under way.  Device thread only."""

    def __init__(
        self,
        part: nn.Module,
        optimizer: Callable[[Any], Optimizer],
        *,
        boundary_in: DenseBoundary | None,
        boundary_out: DenseBoundary | None,
        device: Device,
        pool: HostPool,
        memory_bytes: int | None,
        tokens_per_step: int,
        first_step: int,
        ready: Callable[[Ready, int], None],
    ) -> None:
        if tokens_per_step < 1:
            raise StageError(f"a step has at least 1 token, not {tokens_per_step}")
        self._device, self._pool, self._ready = device, pool, ready
        self.boundary_in, self.boundary_out, self._tokens_per_step = boundary_in, boundary_out, tokens_per_step
        # Refused before the optimizer allocates anything.
        limit = None if memory_bytes is None else plan_for(part.parameters()).graph_bytes(memory_bytes)
        self.budget = GraphBudget(limit)
        self.part = part.to(device.torch_device)
        self.optimizer = optimizer(self.part)
        self.parameters = dict(sorted((n, p) for n, p in self.part.named_parameters() if p.requires_grad))
        if not self.parameters:
            raise StageError("a stage without parameters has nothing to train")
        weight_dtype = next(iter(self.parameters.values())).dtype
        # A part whose activations are narrower than its weights says so in its config (``ModelConfig.compute_dtype``).
        self._dtype: torch.dtype = getattr(getattr(part, "config", None), "compute_dtype", weight_dtype)
        self.gradient_dtype = DType.fp64 if weight_dtype == torch.float64 else DType.fp32
        self.gradient_elements = sum(p.numel() for p in self.parameters.values())
        self.open_step = first_step
        self.account = GradientAccount()
        self.live: dict[Microbatch, _Live] = {}
        self.recomputed = 0
        self.kept = 0
        self.skipped = 0

    # --- microbatches ---------------------------------------------------------------------------------------------------

    def forward(self, mb: Microbatch, payload: memoryview | Inflow | None, ids: NDArray[np.int64] | None) -> Forwarded:
        """Forward of the open step; on the last stage also loss and backward."""
        began = time.perf_counter()
        if self.boundary_out is None:
            self.account.check_open(mb)
        x_BLD, ids_BL1 = self._input(payload, ids)
        nonfinite = NonFinite(Where.INPUT) if x_BLD is not None and not _finite(x_BLD) else None
        if self.boundary_out is None:
            return self._last(mb, x_BLD, ids_BL1, nonfinite, began)
        self.forget(mb)  # a second forward of the same microbatch replaces the first
        with self._reserved(self.boundary_out.forward_bytes) as out:
            assert out is not None
            boundary, size, keep = self._metered(x_BLD, ids_BL1)
            if nonfinite is None and not _finite(boundary):
                nonfinite = NonFinite(Where.OUTPUT)
            ready = self._send(self.boundary_out.pack_forward(boundary, ids_BL1), out)
        if keep:
            self.budget.keep(size)
            self.kept += 1
        self.live[mb] = _Live(x_BLD, ids_BL1, boundary if keep else None, size if keep else 0, nonfinite)
        return Forwarded(
            payload=out, ready=ready, gradient=None, loss_sum=None, seconds=time.perf_counter() - began,
            kept_graph=keep, finite=nonfinite is None, nonfinite=nonfinite,
        )  # fmt: skip

    def _metered(self, x_BLD: Tensor | None, ids_BL1: Tensor) -> tuple[Tensor, int, bool]:
        """(boundary, bytes of its graph, whether to keep it)."""
        shape = tuple(ids_BL1.shape)
        size = self.budget.estimate(shape)
        if size is None:
            meter = GraphMeter([*self.part.parameters(), *self.part.buffers()])
            with torch.enable_grad(), meter:
                boundary = self._boundary(x_BLD, ids_BL1)
            size = meter.graph_bytes
            self.budget.measured(shape, size)
            keep = self.budget.fits(shape)
        else:
            keep = self.budget.fits(shape)
            with torch.set_grad_enabled(keep):
                boundary = self._boundary(x_BLD, ids_BL1)
        return boundary, size, keep

    def _last(
        self, mb: Microbatch, x_BLD: Tensor | None, ids_BL1: Tensor, nonfinite: NonFinite | None, began: float
    ) -> Forwarded:
        with self._reserved(self._upstream_bytes) as out, torch.enable_grad():
            loss_sum = self._loss(x_BLD, ids_BL1)
            value = float(loss_sum.detach())
            if nonfinite is None and not math.isfinite(value):
                nonfinite = NonFinite(Where.LOSS)
            gradient, nonfinite = self._accumulate(mb, loss_sum / self._tokens_per_step, None, x_BLD, nonfinite)
            ready = self._send_gradient(gradient, out)
        return Forwarded(
            payload=None, ready=ready, gradient=out, loss_sum=value, seconds=time.perf_counter() - began,
            kept_graph=True, finite=nonfinite is None, nonfinite=nonfinite,
        )  # fmt: skip

    def backward(self, mb: Microbatch, payload: memoryview | Inflow) -> Backward:
        """Backward of a microbatch whose forward is held; adds to the account."""
        began = time.perf_counter()
        if self.boundary_out is None:
            raise StageError("the last stage has its backward in the forward")
        self.account.check_open(mb)
        live = self.live.get(mb)
        if live is None:
            raise UnknownMicrobatch(f"no forward of microbatch {mb} is held here")
        g_BLD = self.boundary_out.unpack_backward(self._device.to_device(payload)).to(self._dtype)
        nonfinite = live.nonfinite or (None if _finite(g_BLD) else NonFinite(Where.GRADIENT_IN))
        recompute = live.boundary is None and nonfinite is None
        boundary = live.boundary
        with self._reserved(self._upstream_bytes) as out:
            if recompute:
                with torch.enable_grad():
                    boundary = self._boundary(live.x_BLD, live.ids_BL1)
                self.recomputed += 1
            gradient, nonfinite = self._accumulate(mb, boundary, g_BLD, live.x_BLD, nonfinite)
            if mb in self.account.counted:
                self.forget(mb)
            ready = self._send_gradient(gradient, out)
        return Backward(
            payload=out, ready=ready, seconds=time.perf_counter() - began, finite=nonfinite is None,
            recomputed=recompute, nonfinite=nonfinite,
        )  # fmt: skip

    def evaluate(self, mb: Microbatch, payload: memoryview | Inflow | None, ids: NDArray[np.int64] | None) -> Forwarded:
        """Forward without gradients, with the weights of the open step."""
        began = time.perf_counter()
        x_BLD, ids_BL1 = self._input(payload, ids)
        nonfinite = NonFinite(Where.INPUT) if x_BLD is not None and not _finite(x_BLD) else None
        ready, value = None, None
        with self._reserved(None if self.boundary_out is None else self.boundary_out.forward_bytes) as out, torch.no_grad():
            if self.boundary_out is None:
                value = float(self._loss(x_BLD, ids_BL1))
                finite = math.isfinite(value)
            else:
                boundary = self._boundary(x_BLD, ids_BL1)
                finite = _finite(boundary)
                assert out is not None
                ready = self._send(self.boundary_out.pack_forward(boundary, ids_BL1), out)
        if nonfinite is None and not finite:
            nonfinite = NonFinite(Where.LOSS if self.boundary_out is None else Where.OUTPUT)
        return Forwarded(
            payload=out, ready=ready, gradient=None, loss_sum=value, seconds=time.perf_counter() - began,
            kept_graph=False, finite=nonfinite is None, nonfinite=nonfinite,
        )  # fmt: skip

    def forget(self, mb: Microbatch) -> None:
        """Drop what is held for a microbatch, if anything."""
        live = self.live.pop(mb, None)
        if live is not None and live.boundary is not None:
            self.budget.drop(live.graph_bytes)

    def _input(
        self, payload: memoryview | Inflow | None, ids: NDArray[np.int64] | None
    ) -> tuple[Tensor | None, Tensor]:
        if self.boundary_in is None:
            if ids is None or payload is not None or ids.ndim != 2 or ids.dtype != np.int64:
                raise StageError("the first stage takes int64 ids (batch, sequence + 1) and no payload")
            return None, torch.tensor(ids, device=self._device.torch_device)
        if payload is None or ids is not None:
            raise StageError("a stage that is not the first takes a payload; the ids are in it")
        host = payload.host if isinstance(payload, Inflow) else payload
        if host.nbytes != self.boundary_in.forward_bytes:
            raise BadPayload(f"an activation has {self.boundary_in.forward_bytes} bytes, not {host.nbytes}")
        # From the host's copy: checked there, before any of it reaches the device.
        ids_BL1 = self.boundary_in.unpack_ids(host_bytes(host)).to(self._device.torch_device)
        x_BLD = self.boundary_in.unpack_activation(self._device.to_device(payload)).to(self._dtype)
        return x_BLD.detach().requires_grad_(), ids_BL1

    def _boundary(self, x_BLD: Tensor | None, ids_BL1: Tensor) -> Tensor:
        boundary: Tensor | None = self.part(x_BLD, ids_BL1).boundary
        if boundary is None:
            raise StageError("the part has no boundary output, but it is not the last stage")
        return boundary

    def _loss(self, x_BLD: Tensor | None, ids_BL1: Tensor) -> Tensor:
        loss_sum: Tensor | None = self.part(x_BLD, ids_BL1).loss_sum
        if loss_sum is None:
            raise StageError("the part computes no loss, but it is the last stage")
        return loss_sum

    def _accumulate(
        self, mb: Microbatch, root: Tensor | None, g_BLD: Tensor | None, x_BLD: Tensor | None, nonfinite: NonFinite | None
    ) -> tuple[Tensor | None, NonFinite | None]:
        """Differentiate ``root`` into ``.grad``.  Returns the gradient of ``x_BLD`` and what was not finite."""
        if nonfinite is not None:
            self.account.leave_out(mb, nonfinite)
            return None if x_BLD is None else torch.full_like(x_BLD, math.nan), nonfinite
        assert root is not None  # kept or recomputed by the caller whenever it is finite
        try:
            torch.autograd.backward(root, g_BLD)
        except BaseException:
            self.account.torn = True
            raise
        self.account.add(mb)
        if x_BLD is None:
            return None, None
        gradient, x_BLD.grad = x_BLD.grad, None
        if gradient is None:
            raise StageError("the part does not use its input")
        if not _finite(gradient):
            self.account.spoilt = nonfinite = NonFinite(Where.GRADIENT_OUT)
        return gradient, nonfinite

    @contextmanager
    def _reserved(self, size: int | None) -> Iterator[memoryview | None]:
        """A buffer for what the job sends, taken before it computes: afterwards it would be too late to refuse.

        Goes back to the pool if the job fails.
        """
        out = None if size is None else self._pool.acquire(size)
        try:
            yield out
        except BaseException:
            if out is not None:
                self._pool.release(out)
            raise

    def _send(self, parts: tuple[Tensor, ...], out: memoryview) -> Ready:
        ready = Ready(out.nbytes)
        self._device.to_host(parts, out, lambda n: self._ready(ready, n))
        return ready

    def _send_gradient(self, gradient: Tensor | None, out: memoryview | None) -> Ready | None:
        if self.boundary_in is None or gradient is None or out is None:
            return None
        return self._send(self.boundary_in.pack_backward(gradient), out)

    @property
    def _upstream_bytes(self) -> int | None:
        return None if self.boundary_in is None else self.boundary_in.backward_bytes

    # --- the step -------------------------------------------------------------------------------------------------------

    def export_gradients(self, out: memoryview) -> Exported:
        """Write the sum as one flat vector; NaN throughout if a contribution was not finite."""
        self.account.check_whole()
        flat = self._flat(out)
        if self.account.nonfinite is not None:
            flat.fill_(math.nan)
        else:
            for parameter, piece in self._pieces(flat):
                if parameter.grad is None:
                    piece.zero_()
                else:
                    piece.copy_(parameter.grad.view(-1))
        return Exported(account=tuple(sorted(self.account.counted)), nonfinite=self.account.nonfinite)

    def import_gradients(self, view: memoryview) -> None:
        """Replace the sum by a flat vector; the account is closed until the step is applied or discarded."""
        for parameter, piece in self._pieces(self._flat(view)):
            parameter.grad = torch.empty_like(parameter).copy_(piece.view_as(parameter))
        self.account.imported = True
        self.account.torn = False

    def _flat(self, view: memoryview) -> Tensor:
        expected = self.gradient_elements * self.gradient_dtype.itemsize
        if view.nbytes != expected:
            raise StageError(f"the gradients of this stage have {expected} bytes, the buffer {view.nbytes}")
        return host_bytes(view).view(torch.float64 if self.gradient_dtype is DType.fp64 else torch.float32)

    def _pieces(self, flat: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
        pieces, at = [], 0
        for parameter in self.parameters.values():
            pieces.append((parameter, flat[at : at + parameter.numel()]))
            at += parameter.numel()
        return pieces

    def step(self, step: int) -> Stepped:
        """Apply the gradients, or skip if they are not finite; opens the next step either way."""
        began = time.perf_counter()
        if step != self.open_step:
            kind = StaleStep if step < self.open_step else StageError
            raise kind(f"step {step} cannot be applied, step {self.open_step} is open")
        self.account.check_whole()
        nonfinite = None if self.account.imported else self.account.nonfinite
        if nonfinite is None:
            bad = tuple(n for n, p in self.parameters.items() if p.grad is not None and not _finite(p.grad))
            nonfinite = NonFinite(Where.ACCOUNT, bad) if bad else None
        if nonfinite is None:
            norm = float(self.optimizer.step(step))
            if not math.isfinite(norm):  # finite gradients, but their squares overflow: the optimizer changed nothing
                nonfinite = NonFinite(Where.ACCOUNT)
        else:
            norm = math.nan
        self.skipped += nonfinite is not None
        self.discard()
        self.open_step = step + 1
        return Stepped(
            grad_norm=norm, seconds=time.perf_counter() - began, skipped_nonfinite=nonfinite is not None, nonfinite=nonfinite
        )

    def discard(self) -> None:
        """Drop every microbatch held and every gradient; the step stays open with an empty account."""
        for mb in list(self.live):
            self.forget(mb)
        for parameter in self.parameters.values():
            parameter.grad = None
        self.account = GradientAccount()

    # --- state ----------------------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Tensor]:
        """Host copies of weights and optimizer state (``state.py``)."""
        return copy_state(self.part, self.optimizer)

    def restore(self, tensors: Mapping[str, Tensor], step: int | None) -> None:
        """Replace weights and optimizer state, drop microbatches and gradients, open ``step`` if given."""
        replace_state(self.part, self.optimizer, tensors)
        self.discard()
        if step is not None:
            self.open_step = step

    def digest(self) -> bytes:
        """SHA-256 of the weights."""
        return digest_weights(self.part)
