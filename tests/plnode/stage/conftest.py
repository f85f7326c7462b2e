"""Small stages and the plain training loop that runners are compared with."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
import trio
from torch import Tensor

from plnode.model.config import ModelConfig
from plnode.model.decoder import StagePart
from plnode.optim.config import OptimConfig
from plnode.optim.stage_optimizer import StageOptimizer
from plnode.stage import DenseBoundary, StageRunner, open_runner
from wire.tensor import DType

LAYERS, BATCH, LENGTH, VOCAB, DIM = 4, 2, 8, 50, 16
_WIRE = {"fp32": DType.fp32, "fp64": DType.fp64, "bf16": DType.bf16}


@dataclass
class Lab:
    """A run small enough for hundreds of steps a second: 4 layers, 2 x 8 tokens a microbatch."""

    dtype: str = "fp32"
    microbatches: int = 3
    seed: int = 7
    optim: OptimConfig = field(
        default_factory=lambda: OptimConfig(
            lr=1e-2, weight_decay=0.1, clip=1.0, schedule="cosine", warmup_steps=2, total_steps=20
        )
    )

    @property
    def config(self) -> ModelConfig:
        return ModelConfig(
            vocab=VOCAB, dim=DIM, layers=LAYERS, heads=2, kv_heads=1, ffn_dim=32, seq_len=LENGTH, dtype=self.dtype
        )  # fmt: skip

    @property
    def boundary(self) -> DenseBoundary:
        return DenseBoundary(BATCH, LENGTH, DIM, _WIRE[self.dtype], DType.uint16, VOCAB)

    @property
    def tokens_per_step(self) -> int:
        return self.microbatches * BATCH * LENGTH

    def ids(self, step: int, index: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Counting upwards from a random start: something that can be learnt."""
        start = np.random.default_rng((self.seed, step, index)).integers(0, VOCAB, (BATCH, 1))
        return (start + np.arange(LENGTH + 1)) % VOCAB

    def spans(self, stages: int) -> list[tuple[int, int, bool, bool]]:
        cuts = [round(LAYERS * s / stages) for s in range(stages + 1)]
        return [(cuts[s], cuts[s + 1], s == 0, s == stages - 1) for s in range(stages)]

    def part(self, stages: int, stage: int) -> StagePart:
        return StagePart(self.config, *self.spans(stages)[stage], self.seed)

    def optimizer(self, part: StagePart, stages: int) -> StageOptimizer:
        return StageOptimizer(part.named_parameters(), self.optim, stages)

    @asynccontextmanager
    async def runners(self, stages: int, **options: Any) -> AsyncIterator[list[StageRunner]]:
        async with AsyncExitStack() as stack:
            yield [await stack.enter_async_context(self.runner(stages, s, **options)) for s in range(stages)]

    def runner(self, stages: int, stage: int, **options: Any) -> Any:
        build: Callable[[], StagePart] = lambda: self.part(stages, stage)  # noqa: E731
        optimizer: Callable[[StagePart], StageOptimizer] = lambda part: self.optimizer(part, stages)  # noqa: E731
        return open_runner(
            build, optimizer, boundary_in=self.boundary if stage else None,
            boundary_out=self.boundary if stage < stages - 1 else None, tokens_per_step=self.tokens_per_step, **options,
        )  # fmt: skip

    def reference(self, stages: int, steps: int) -> tuple[list[float], dict[str, Tensor]]:
        """(loss of each step, weights after the last) of one plain loop over the parts, in index order, on this thread."""
        torch.set_num_threads(1)
        parts = [self.part(stages, s) for s in range(stages)]
        optimizers = [self.optimizer(part, stages) for part in parts]
        losses = []
        for step in range(steps):
            total = 0.0
            for index in range(self.microbatches):
                ids = torch.from_numpy(self.ids(step, index))
                x = None
                for part in parts:
                    out = part(x, ids)
                    x = out.boundary
                (out.loss_sum / self.tokens_per_step).backward()
                total += out.loss_sum.item()
            for optimizer in optimizers:
                optimizer.step(step)
            losses.append(total / self.tokens_per_step)
        return losses, {name: tensor.clone() for part in parts for name, tensor in part.state_dict().items()}


    async def pass_through(self, runners: list[StageRunner], step: int, index: int) -> float:
        """One microbatch through all runners and back, every buffer given back.  The sum of its losses."""
        forward = await runners[0].forward((step, index), None, self.ids(step, index))
        for before, runner in pairwise(runners):
            payload = forward.payload
            forward = await runner.forward((step, index), payload)
            before.release(payload)
        gradient = forward.gradient
        for after, runner in pairwise(reversed(runners)):
            back = await runner.backward((step, index), gradient)
            after.release(gradient)
            gradient = back.payload
        assert gradient is None
        return forward.loss_sum

    async def train(self, runners: list[StageRunner], steps: int) -> list[float]:
        """Microbatch after microbatch; the loss of each step."""
        losses = []
        for step in range(steps):
            total = 0.0
            for index in range(self.microbatches):
                total += await self.pass_through(runners, step, index)
            for runner in runners:
                await runner.step(step)
            losses.append(total / self.tokens_per_step)
        return losses


class Gate:
    """Holds the device thread inside a forward until it is opened; ``entered`` says on the loop that it is held."""

    def __init__(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._open = Event()
        self.entered = trio.Event()

    def pass_(self) -> None:
        self._token.run_sync_soon(self.entered.set)
        assert self._open.wait(60)

    def open(self) -> None:
        self._open.set()


class Gated(StagePart):
    """A part that stands still at ``gate`` whenever it is told to."""

    gate: Gate | None = None
    raises: BaseException | None = None

    def forward(self, x_BLD: Tensor | None, ids_BL1: Tensor) -> Any:
        if self.gate is not None:
            self.gate.pass_()
        if self.raises is not None:
            raise self.raises
        return super().forward(x_BLD, ids_BL1)


@pytest.fixture
def gated(lab: Lab) -> Any:
    """``open(stages, stage) -> (runner context, part)``: a runner whose part can be held or made to fail."""

    def make(stages: int, stage: int, **options: Any) -> tuple[Any, Gated]:
        part = Gated(lab.config, *lab.spans(stages)[stage], lab.seed)
        context = open_runner(
            lambda: part, lambda p: lab.optimizer(p, stages), boundary_in=lab.boundary if stage else None,
            boundary_out=lab.boundary if stage < stages - 1 else None, tokens_per_step=lab.tokens_per_step, **options,
        )  # fmt: skip
        return context, part

    return make


@pytest.fixture
def make_gate() -> type[Gate]:
    return Gate


@pytest.fixture
def lab() -> Lab:
    return Lab()


@pytest.fixture
def make_lab() -> type[Lab]:
    return Lab
