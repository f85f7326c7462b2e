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
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import numpy as np
import outcome
import torch
import trio
from numpy.typing import NDArray
from torch import Tensor, nn

from wire.tensor import DType

from .boundary import DenseBoundary
from .device import POLL_S, Device, Inflow, open_device
from .errors import (
    RunnerClosed,
    RunnerFailed,
    RunnerFull,
    StageError,
    StageMemoryError,
    StaleStep,
    StepDiscarded,
)
from .hostpool import HostPool
from .jobs import Backward, Counters, Exported, Forwarded, Microbatch, Ready, Stepped
from .policy import MICROBATCH_KINDS, Decision, JobView, Kind, Moment, Order, Verdict, choose
from .work import Optimizer, StageWork

T = TypeVar("T")
PartT = TypeVar("PartT", bound=nn.Module)

# Long enough that two busy threads do not spend their time switching, short against a round trip on a home line (20 ms).
SWITCH_INTERVAL_S = 0.0005
# Admitted microbatches are bounded by slots, a few a neighbour; more than this says that credit was counted wrongly.
JOB_LIMIT = 256
# Host buffers for a handful of payloads of the largest models (4096 x 4096 x bf16 = 32 MiB) both ways.
POOL_BYTES = 1 << 30


@dataclass(slots=True, eq=False)
class _Job:
    view: JobView
    call: Callable[[StageWork], Any]
    task: trio.lowlevel.Task | None  # None: nobody waits


@dataclass(slots=True)
class _Totals:
    done: dict[Kind, int] = field(default_factory=dict)
    busy_s: float = 0.0


class StageRunner:
    """Made by ``open_runner``.  All methods belong to the trio loop; none of them runs torch there."""

    def __init__(self, order: Order, job_limit: int, pool_bytes: int) -> None:
        self._order, self._job_limit = order, job_limit
        self._token = trio.lowlevel.current_trio_token()
        self._wake = threading.Condition()
        self._queue: dict[int, _Job] = {}  # guarded by _wake
        self._closing = False  # guarded by _wake
        self._failure: BaseException | None = None
        self._sequence = itertools.count()
        self._totals = _Totals()
        self._started = trio.Event()
        self._ended = trio.Event()
        self._pool_bytes = pool_bytes
        self._device: Device
        self._pool: HostPool
        self._work: StageWork

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
        with self._wake:
            if not self._closing and self._failure is None:
                self._put(_Job(JobView(next(self._sequence), Kind.FORGET, *mb), lambda work: work.forget(mb), None))

    def inflow(self, payload: memoryview) -> Inflow:
        """Begin to copy a payload to the device piece by piece as it is received; pass the result as ``payload``."""
        return self._device.inflow(payload)

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
        return self._work.gradient_elements

    @property
    def gradient_dtype(self) -> DType:
        """fp32, or fp64 for a model in fp64."""
        return self._work.gradient_dtype

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the exported vector."""
        return self.gradient_elements * self.gradient_dtype.itemsize

    @property
    def gradient_names(self) -> tuple[str, ...]:
        """Parameters in the order of the exported vector."""
        return tuple(self._work.parameters)

    @property
    def open_step(self) -> int:
        """The step whose gradients are being gathered."""
        return self._work.open_step

    @property
    def account(self) -> frozenset[Microbatch]:
        """Microbatches whose contribution is in the gradients of the open step."""
        return self._work.account.counted

    @property
    def counters(self) -> Counters:
        """Totals and gauges; each is exact, together they may be a job apart."""
        work, done = self._work, self._totals.done
        return Counters(
            forwards=done.get(Kind.FORWARD, 0),
            backwards=done.get(Kind.BACKWARD, 0),
            evaluations=done.get(Kind.EVALUATE, 0),
            steps=done.get(Kind.STEP, 0),
            steps_skipped=work.skipped,
            graphs_kept=work.kept,
            graphs_recomputed=work.recomputed,
            live_microbatches=len(work.live),
            live_graph_bytes=work.budget.kept_bytes,
            graph_estimate_bytes=work.budget.largest_bytes,
            queued_jobs=len(self._queue),
            pool_lent=self._pool.lent,
            pool_bytes=self._pool.allocated_bytes,
            busy_s=self._totals.busy_s,
        )

    def acquire(self, size_bytes: int) -> memoryview:
        """A host buffer from the pool (pinned on CUDA).  Raises PoolExhausted."""
        return self._pool.acquire(size_bytes)

    def release(self, buffer: memoryview) -> None:
        """Give a buffer back.  A payload whose ``ready`` is not complete must not be given back yet."""
        self._pool.release(buffer)

    # --- the loop's side ------------------------------------------------------------------------------------------------

    async def _submit(self, kind: Kind, mb: Microbatch | None, call: Callable[[StageWork], Any]) -> Any:
        await trio.lowlevel.checkpoint_if_cancelled()
        step, index = mb or (0, 0)
        job = _Job(JobView(next(self._sequence), kind, step, index), call, trio.lowlevel.current_task())
        with self._wake:
            if self._failure is not None:
                raise RunnerFailed(f"the device thread has ended: {self._failure!r}") from self._failure
            if self._closing:
                raise RunnerClosed("the runner is closed")
            if kind in MICROBATCH_KINDS and len(self._queue) >= self._job_limit:
                raise RunnerFull(f"{len(self._queue)} jobs are queued, the limit is {self._job_limit}")
            self._put(job)

        def abort(_: Any) -> trio.lowlevel.Abort:
            with self._wake:
                waiting = self._queue.pop(job.view.sequence, None) is not None
            return trio.lowlevel.Abort.SUCCEEDED if waiting else trio.lowlevel.Abort.FAILED

        result = await trio.lowlevel.wait_task_rescheduled(abort)
        if mb is not None:
            try:
                await trio.lowlevel.checkpoint_if_cancelled()
            except trio.Cancelled:
                self._drop(kind, mb, result)
                raise
        return result

    def _put(self, job: _Job) -> None:
        self._queue[job.view.sequence] = job
        self._wake.notify()

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
                self._pool.release(buffer)

        ready.watch(look)

    def _deliver(self, job: _Job, result: outcome.Outcome[Any]) -> None:
        if job.task is not None:
            trio.lowlevel.reschedule(job.task, result)

    def _end_all(self, jobs: list[_Job], error: Callable[[], BaseException]) -> None:
        for job in jobs:
            self._deliver(job, outcome.Error(error()))

    async def _close(self, thread: threading.Thread) -> None:
        with self._wake:
            self._closing = True
            jobs = list(self._queue.values())
            self._queue.clear()
            self._wake.notify()
        self._end_all(jobs, lambda: RunnerClosed("the runner was closed before this job ran"))
        with trio.CancelScope(shield=True):
            await self._ended.wait()
        thread.join()  # its last act was to set the event

    # --- the device thread ----------------------------------------------------------------------------------------------

    def _soon(self, function: Callable[..., object], *args: object) -> None:
        with suppress(trio.RunFinishedError):  # nobody is left to be told
            self._token.run_sync_soon(function, *args)

    def _nudge(self) -> None:
        with self._wake:
            self._wake.notify()

    def _main(self, make: Callable[[], StageWork], device_name: str, threads: int) -> None:
        try:
            torch.set_num_threads(threads)
            self._device = open_device(device_name, self._nudge)
            self._pool = HostPool(self._pool_bytes, self._device.host_block)
            with self._device.active():
                self._work = make()
                self._soon(self._started.set)
                while (decision := self._next()) is not None:
                    self._run(*decision)
                self._device.drain()
        except BaseException as caught:
            error = caught
            with self._wake:
                self._failure = error
                jobs = list(self._queue.values())
                self._queue.clear()
            self._soon(self._end_all, jobs, lambda: _failed(error))
            self._soon(self._started.set)
        self._soon(self._ended.set)

    def _next(self) -> tuple[_Job, Verdict] | None:
        work = self._work
        while True:
            copying = self._device.poll()
            with self._wake:
                if self._closing:
                    return None
                decision = self._decide(work)
                if decision is not None:
                    return self._queue.pop(decision.job.sequence), decision.verdict
                self._wake.wait(POLL_S if copying else None)

    def _decide(self, work: StageWork) -> Decision | None:
        moment = Moment(work.open_step, work.account.seen, work.budget.tight)
        return choose([job.view for job in self._queue.values()], moment, self._order)

    def _run(self, job: _Job, verdict: Verdict) -> None:
        began = time.perf_counter()
        try:
            if verdict is Verdict.STALE:
                raise StaleStep(f"step {job.view.step} was applied, step {self._work.open_step} is open")
            if verdict is Verdict.DISCARDED:
                raise StepDiscarded(f"step {job.view.step} was discarded while the job was queued")
            result: outcome.Outcome[Any] = outcome.Value(job.call(self._work))
            self._totals.done[job.view.kind] = self._totals.done.get(job.view.kind, 0) + 1
        except BaseException as error:
            result = outcome.Error(self._explain(job, error))
        self._totals.busy_s += time.perf_counter() - began
        job.call = _spent  # the closure holds the caller's buffers
        self._soon(self._deliver, job, result)

    def _explain(self, job: _Job, error: BaseException) -> BaseException:
        # Torch says "out of memory" by class on a GPU and only by text on the CPU.
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error):
            budget = self._work.budget
            explained = StageMemoryError(
                f"out of memory in {job.view.kind.name.lower()} of microbatch {(job.view.step, job.view.index)}: "
                f"{len(self._work.live)} microbatches and {budget.kept_graphs} graphs of {budget.kept_bytes:,} bytes are held; "
                "lower the memory setting (more recomputation) or grant fewer slots"
            )
            explained.__cause__ = error
            return explained
        return error


def _spent(_: StageWork) -> None:
    raise StageError("a job runs once")


def _failed(cause: BaseException) -> RunnerFailed:
    error = RunnerFailed(f"the device thread has ended: {cause!r}")
    error.__cause__ = cause
    return error


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
    runner = StageRunner(chosen, job_limit, pool_bytes)

    def make() -> StageWork:
        return StageWork(
            build(),
            optimizer,
            boundary_in=boundary_in,
            boundary_out=boundary_out,
            device=runner._device,
            pool=runner._pool,
            memory_bytes=memory_bytes,
            tokens_per_step=tokens_per_step,
            first_step=first_step,
            ready=lambda ready, n: runner._soon(ready.advance, n),
        )

    thread = threading.Thread(target=runner._main, args=(make, device, threads), name="plnode-device", daemon=True)
    thread.start()
    try:
        await runner._started.wait()
        if runner._failure is not None:
            raise runner._failure
        yield runner
    finally:
        await runner._close(thread)
