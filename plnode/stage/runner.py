"""The stage runner: one device thread, and the loop's way to give it work.

Torch calls take milliseconds to seconds and must not run on the event loop; the device's context, weights and graphs must not be
touched by two threads.  So there is one daemon thread that owns them all, a bounded set of jobs, and a pure policy that picks the
next one (``policy.py``).  Results come back with ``TrioToken.run_sync_soon``.

* *The loop must answer while the device computes.*  Torch releases the interpreter lock inside its kernels but not between them;
  with Python's default switch interval a waiting loop may stand 5 ms at each turn.  It is lowered to 0.5 ms for the process.
* *Threads.*  ``torch.set_num_threads`` holds for the thread that calls it, so the device thread calls it; several runners can
  live in one process, each with its own.
* *Cancellation.*  A job that has not begun is withdrawn and has done nothing.  A job that runs reads its caller's buffer, so the
  cancel waits for its end (one job, never the queue); then a microbatch's result is dropped, its buffers go back to the pool and
  a forward's graph is forgotten, while a backward stays counted (``account`` says so).  A barrier that ran returns its result.
* *Errors.*  Whatever a job raises, reaches its awaiter and no one else.  An error of the thread itself fails every job, now and
  later, with ``RunnerFailed``: nothing waits on a dead thread.
* *Closing.*  Queued jobs end with ``RunnerClosed``, the running one ends by itself, the thread is joined.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar, cast

import numpy as np
import trio
from numpy.typing import NDArray
from torch import Tensor, nn

from wire.tensor import DType

from .boundary import DenseBoundary
from .device import Inflow
from .errors import RunnerClosed, RunnerFailed
from .jobs import Backward, Counters, Exported, Forwarded, Microbatch, Ready, Stepped
from .policy import JobView, Kind, Order
from .state import Optimizer
from .thread import DeviceThread, Job, call_soon
from .work import StageWork

PartT = TypeVar("PartT", bound=nn.Module)

# Long enough that two busy threads do not spend their time switching, short against a round trip on a home line (20 ms).
SWITCH_INTERVAL_S = 0.0005
# Admitted microbatches are bounded by slots, a few a neighbour; more than this says that credit was counted wrongly.
JOB_LIMIT = 256
# Host buffers for a handful of payloads of the largest models (4096 x 4096 x bf16 = 32 MiB) both ways.
POOL_BYTES = 1 << 30


class StageRunner:
    """Made by ``open_runner``.  All methods belong to the trio loop; none of them runs torch there."""

    def __init__(self, thread: DeviceThread) -> None:
        self._thread = thread
        self._sequence = itertools.count()

    # --- microbatches ---------------------------------------------------------------------------------------------------

    async def forward(
        self, mb: Microbatch, payload: memoryview | Inflow | None = None, ids: NDArray[np.int64] | None = None
    ) -> Forwarded:
        """Run the forward of microbatch (step, index); on the last stage also loss and backward, added to the account.

        First stage: ``ids`` int64 (batch, sequence + 1).  Others: ``payload`` as the boundary defines it, unchanged until this
        returns.  Waits until its step is the open one.  The caller owns the buffers of the result (``release``).
        Raises BadPayload, StaleStep, StepDiscarded, AlreadyCounted, AccountClosed, RunnerFull, StageMemoryError, PoolExhausted.
        """
        return cast(Forwarded, await self._submit(Kind.FORWARD, mb, lambda work: work.forward(mb, payload, ids)))

    async def backward(self, mb: Microbatch, gradient: memoryview | Inflow) -> Backward:
        """Run the backward of a microbatch whose forward ran here and add its gradients to the account.

        ``gradient`` stays unchanged until this returns.  Raises BadPayload, UnknownMicrobatch, and what ``forward`` raises.
        """
        return cast(Backward, await self._submit(Kind.BACKWARD, mb, lambda work: work.backward(mb, gradient)))

    async def evaluate(
        self, mb: Microbatch, payload: memoryview | Inflow | None = None, ids: NDArray[np.int64] | None = None
    ) -> Forwarded:
        """Run a forward without gradients with the weights that step ``mb[0]`` starts from; waits until that step is open."""
        return cast(Forwarded, await self._submit(Kind.EVALUATE, mb, lambda work: work.evaluate(mb, payload, ids)))

    def forget(self, mb: Microbatch) -> None:
        """Drop what is held for a microbatch whose gradient will not come.  Returns at once; no error if there is nothing."""
        with suppress(RunnerClosed, RunnerFailed):  # then nothing is held any more
            self._thread.put(Job(JobView(next(self._sequence), Kind.FORGET, *mb), lambda work: work.forget(mb), None))

    def inflow(self, payload: memoryview) -> Inflow:
        """Begin to copy a payload to the device piece by piece as it is received; pass the result as ``payload``."""
        return self._thread.device.inflow(payload)

    # --- barriers -------------------------------------------------------------------------------------------------------

    async def export_gradients(self, out: memoryview) -> Exported:
        """Write the gradients gathered so far into ``out``: ``gradient_elements`` of ``gradient_dtype`` in order of names.

        NaN throughout if a contribution was not finite.  Raises AccountClosed after an error in a backward.
        """
        return cast(Exported, await self._submit(Kind.EXPORT, None, lambda work: work.export_gradients(out)))

    async def import_gradients(self, view: memoryview) -> None:
        """Replace the gradients by a vector in the same layout; closes the account of the open step."""
        await self._submit(Kind.IMPORT, None, lambda work: work.import_gradients(view))

    async def step(self, step: int) -> Stepped:
        """Apply step ``step``, which must be the open one, or skip it if its gradients are not finite.  Opens ``step + 1``.

        Graphs still held are dropped.  Raises StaleStep, StageError, AccountClosed.
        """
        return cast(Stepped, await self._submit(Kind.STEP, None, lambda work: work.step(step)))

    async def discard(self) -> None:
        """Abort the open step: refuse its queued jobs, drop graphs and gradients.  The step stays open with an empty account."""
        await self._submit(Kind.DISCARD, None, lambda work: work.discard())

    async def snapshot(self) -> dict[str, Tensor]:
        """Host copies of the weights (global names) and the optimizer's tensors (``optimizer.<name>``), all of one moment."""
        return cast("dict[str, Tensor]", await self._submit(Kind.SNAPSHOT, None, lambda work: work.snapshot()))

    async def restore(self, tensors: Mapping[str, Tensor], step: int | None = None) -> None:
        """Replace weights and optimizer state; opens step ``step`` if given.  Raises StageError if names or shapes differ."""
        await self._submit(Kind.RESTORE, None, lambda work: work.restore(tensors, step))

    async def digest(self) -> bytes:
        """SHA-256 of the weights: equal on replicas that hold the same bits."""
        return cast(bytes, await self._submit(Kind.DIGEST, None, lambda work: work.digest()))

    # --- read at any time -----------------------------------------------------------------------------------------------

    @property
    def gradient_elements(self) -> int:
        """Elements of the exported vector."""
        return self._thread.work.gradient_elements

    @property
    def gradient_dtype(self) -> DType:
        """fp32, or fp64 for a model in fp64."""
        return self._thread.work.gradient_dtype

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the exported vector."""
        return self.gradient_elements * self.gradient_dtype.itemsize

    @property
    def gradient_names(self) -> tuple[str, ...]:
        """Parameters in the order of the exported vector."""
        return tuple(self._thread.work.parameters)

    @property
    def open_step(self) -> int:
        """The step whose gradients are being gathered."""
        return self._thread.work.open_step

    @property
    def account(self) -> frozenset[Microbatch]:
        """Microbatches whose contribution is in the gradients of the open step."""
        return self._thread.work.account.counted

    @property
    def counters(self) -> Counters:
        """Totals and gauges; each is exact, together they may be a job apart."""
        work, done = self._thread.work, self._thread.done
        return Counters(
            forwards=done[Kind.FORWARD],
            backwards=done[Kind.BACKWARD],
            evaluations=done[Kind.EVALUATE],
            steps=done[Kind.STEP],
            steps_skipped=work.skipped,
            graphs_kept=work.kept,
            graphs_recomputed=work.recomputed,
            live_microbatches=len(work.live),
            live_graph_bytes=work.budget.kept_bytes,
            graph_estimate_bytes=work.budget.largest_bytes,
            queued_jobs=self._thread.queued,
            pool_lent=self._thread.pool.lent,
            pool_bytes=self._thread.pool.allocated_bytes,
            busy_s=self._thread.busy_s,
        )

    def acquire(self, size_bytes: int) -> memoryview:
        """A host buffer from the pool (pinned on CUDA).  Raises PoolExhausted."""
        return self._thread.pool.acquire(size_bytes)

    def release(self, buffer: memoryview) -> None:
        """Give a buffer back.  A payload whose ``ready`` is not complete must not be given back yet."""
        self._thread.pool.release(buffer)

    # --- the loop's side ------------------------------------------------------------------------------------------------

    async def _submit(self, kind: Kind, mb: Microbatch | None, call: Callable[[StageWork], Any]) -> Any:
        await trio.lowlevel.checkpoint_if_cancelled()
        step, index = mb or (0, 0)
        job = Job(JobView(next(self._sequence), kind, step, index), call, trio.lowlevel.current_task())
        self._thread.put(job)

        def abort(_: Any) -> trio.lowlevel.Abort:
            return trio.lowlevel.Abort.SUCCEEDED if self._thread.withdraw(job) else trio.lowlevel.Abort.FAILED

        result = await trio.lowlevel.wait_task_rescheduled(abort)
        if mb is not None:
            try:
                await trio.lowlevel.checkpoint_if_cancelled()
            except trio.Cancelled:
                self._drop(kind, mb, result)
                raise
        return result

    def _drop(self, kind: Kind, mb: Microbatch, result: Forwarded | Backward) -> None:
        gradient = result.gradient if isinstance(result, Forwarded) else None
        for buffer in (result.payload, gradient):
            if buffer is not None and result.ready is not None:
                self._release_when(result.ready, buffer)
        if kind is Kind.FORWARD:
            self.forget(mb)

    def _release_when(self, ready: Ready, buffer: memoryview) -> None:
        def look(ready_bytes: int) -> None:
            if ready_bytes == ready.total_bytes:
                self._thread.pool.release(buffer)

        ready.watch(look)


@asynccontextmanager
async def open_runner(
    build: Callable[[], PartT],
    optimizer: Callable[[PartT], Optimizer],
    *,
    boundary_in: DenseBoundary | None,
    boundary_out: DenseBoundary | None,
    tokens_per_step: int,
    device: str = "cpu",
    threads: int = 1,
    memory_bytes: int | None = None,
    first_step: int = 0,
    order: Order | None = None,
    job_limit: int = JOB_LIMIT,
    pool_bytes: int = POOL_BYTES,
) -> AsyncIterator[StageRunner]:
    """Start a device thread, build the part and its optimizer there, and end it all on exit.

    ``build`` and ``optimizer`` are called on the device thread.  ``boundary_in`` None: the first stage; ``boundary_out`` None:
    the last one, whose forward includes loss and backward.  ``memory_bytes``: for weights, gradients, optimizer and kept graphs
    together; None keeps every graph.  ``first_step``: the step that is open first.  ``pool_bytes``: limit of host buffers.
    ``order``: see ``policy.Order``; ``forward_accumulates`` is set from ``boundary_out``.

    Raises MemoryPlanError, StageError, and whatever ``build`` raises.  Leaving the block waits for the running job.
    """
    chosen = order or Order()
    chosen = Order(chosen.backward_first, chosen.in_index_order, boundary_out is None)
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
    thread = DeviceThread(chosen, job_limit, pool_bytes)
    # The work must not know the thread: weights in a cycle of references would outlive the runner until a garbage collection.
    token = trio.lowlevel.current_trio_token()

    def make() -> StageWork:
        return StageWork(
            build(),
            optimizer,
            boundary_in=boundary_in,
            boundary_out=boundary_out,
            device=thread.device,
            pool=thread.pool,
            memory_bytes=memory_bytes,
            tokens_per_step=tokens_per_step,
            first_step=first_step,
            ready=lambda ready, n: call_soon(token, ready.advance, n),
        )

    thread.start(make, device, threads)
    try:
        await thread.started.wait()
        if thread.failure is not None:
            raise thread.failure
        yield StageRunner(thread)
    finally:
        await thread.close()
