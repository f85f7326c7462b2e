"""The device thread: takes jobs from a bounded set in the order of the policy, runs them, sends the outcomes to the loop.

One condition guards the set of queued jobs and the closing flag; everything else is touched by one side only.  The loop puts jobs
in and takes them back (a cancel); the thread takes one out, and from then on it alone decides how the job ends.  Outcomes go to
the loop by ``TrioToken.run_sync_soon`` and resume the task that waits.

The thread is a daemon: an interpreter that ends while a kernel hangs must not hang with it.  In order it is joined.

Whatever a job raises is the job's outcome.  Whatever else is raised here is the end of the thread: every queued job and every
later one fails with ``RunnerFailed``, so that nothing waits on what is gone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import outcome
import torch
import trio

from .device import POLL_S, Device, open_device
from .errors import RunnerClosed, RunnerFailed, RunnerFull, StageMemoryError, StaleStep, StepDiscarded
from .hostpool import HostPool
from .policy import JobView, Kind, Moment, Order, Verdict, choose
from .work import StageWork

# Barriers are few, one task's each; FORGET only follows another job's end.
_BOUNDED = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.EVALUATE})


def call_soon(token: trio.lowlevel.TrioToken, function: Callable[..., object], *args: object) -> None:
    """Call ``function`` on the loop of ``token``; nothing if that loop has ended."""
    with suppress(trio.RunFinishedError):
        token.run_sync_soon(function, *args)


@dataclass(slots=True, eq=False)
class Job:
    """A call on the device thread and the task that waits for its outcome (None: nobody does)."""

    view: JobView
    call: Callable[[StageWork], Any]
    task: trio.lowlevel.Task | None


class DeviceThread:
    """Made and closed on the loop.  ``work``, ``device`` and ``pool`` exist once ``started`` is set and ``failure`` is None."""

    def __init__(self, order: Order, job_limit: int, pool_bytes: int) -> None:
        self._order, self._job_limit, self._pool_bytes = order, job_limit, pool_bytes
        self._token = trio.lowlevel.current_trio_token()
        self._wake = threading.Condition()
        self._queue: dict[int, Job] = {}  # guarded by _wake
        self._closing = False  # guarded by _wake
        self._thread: threading.Thread | None = None
        self.failure: BaseException | None = None
        self.started = trio.Event()
        self.ended = trio.Event()
        self.done: dict[Kind, int] = dict.fromkeys(Kind, 0)
        self.busy_s = 0.0
        self.device: Device
        self.pool: HostPool
        self.work: StageWork

    @property
    def queued(self) -> int:
        """Jobs that wait."""
        return len(self._queue)

    # --- the loop's side ------------------------------------------------------------------------------------------------

    def start(self, make: Callable[[], StageWork], device: str, threads: int) -> None:
        """Start; ``make`` is called on the thread and may use ``device`` and ``pool``."""
        self._thread = threading.Thread(target=self._main, args=(make, device, threads), name="plnode-device", daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        """Queue a job.  Raises RunnerFailed, RunnerClosed, and RunnerFull for a microbatch's job (barriers are few)."""
        with self._wake:
            if self.failure is not None:
                raise _failed(self.failure)
            if self._closing:
                raise RunnerClosed("the runner is closed")
            if job.view.kind in _BOUNDED and len(self._queue) >= self._job_limit:
                raise RunnerFull(f"{len(self._queue)} jobs are queued, the limit is {self._job_limit}")
            self._queue[job.view.sequence] = job
            self._wake.notify()

    def withdraw(self, job: Job) -> bool:
        """Take a job back that has not begun; False if it has, then its outcome will come."""
        with self._wake:
            return self._queue.pop(job.view.sequence, None) is not None

    async def close(self) -> None:
        """End queued jobs with RunnerClosed, wait for the running one, join the thread.  Not interrupted by a cancel."""
        with self._wake:
            self._closing = True
            jobs = list(self._queue.values())
            self._queue.clear()
            self._wake.notify()
        self._end_all(jobs, lambda: RunnerClosed("the runner was closed before this job ran"))
        if self._thread is not None:
            with trio.CancelScope(shield=True):
                await self.ended.wait()
            self._thread.join()  # setting the event was its last act

    def _deliver(self, job: Job, result: outcome.Outcome[Any]) -> None:
        if job.task is not None:
            trio.lowlevel.reschedule(job.task, result)

    def _end_all(self, jobs: list[Job], error: Callable[[], BaseException]) -> None:
        for job in jobs:
            self._deliver(job, outcome.Error(error()))

    # --- the thread's side ----------------------------------------------------------------------------------------------

    def _main(self, make: Callable[[], StageWork], device: str, threads: int) -> None:
        try:
            # Holds for the calling thread; several device threads in one process each set their own.
            torch.set_num_threads(threads)
            self.device = open_device(device, self._wake)
            self.pool = HostPool(self._pool_bytes, self.device.host_block)
            with self.device.active():
                self.work = make()
                call_soon(self._token, self.started.set)
                while (taken := self._next()) is not None:
                    self._run(*taken)
                    del taken  # it holds the caller's buffers
                self.device.drain()
        except BaseException as caught:
            error = caught
            with self._wake:
                self.failure = error
                jobs = list(self._queue.values())
                self._queue.clear()
            call_soon(self._token, self._end_all, jobs, lambda: _failed(error))
            call_soon(self._token, self.started.set)
        call_soon(self._token, self.ended.set)

    def _next(self) -> tuple[Job, Verdict] | None:
        work = self.work
        while True:
            copying = self.device.poll()
            with self._wake:
                if self._closing:
                    return None
                moment = Moment(work.open_step, work.account.seen, work.budget.tight)
                decision = choose([job.view for job in self._queue.values()], moment, self._order)
                if decision is not None:
                    return self._queue.pop(decision.job.sequence), decision.verdict
                self._wake.wait(POLL_S if copying else None)

    def _run(self, job: Job, verdict: Verdict) -> None:
        began = time.perf_counter()
        try:
            if verdict is Verdict.STALE:
                raise StaleStep(f"step {job.view.step} was applied, step {self.work.open_step} is open")
            if verdict is Verdict.DISCARDED:
                raise StepDiscarded(f"step {job.view.step} was discarded while the job was queued")
            result: outcome.Outcome[Any] = outcome.Value(job.call(self.work))
            self.done[job.view.kind] += 1
        except BaseException as error:
            result = outcome.Error(self._explain(job.view, error))
        self.busy_s += time.perf_counter() - began
        call_soon(self._token, self._deliver, job, result)

    def _explain(self, view: JobView, error: BaseException) -> BaseException:
        # Torch says "out of memory" by class on a GPU and only by text on the CPU.
        if not (isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)):
            return error
        budget = self.work.budget
        explained = StageMemoryError(
            f"out of memory in {view.kind.name.lower()} of microbatch {(view.step, view.index)}: "
            f"{len(self.work.live)} microbatches and {budget.kept_graphs} graphs of {budget.kept_bytes:,} bytes are held; "
            "lower the memory setting (more is recomputed then) or grant fewer slots"
        )
        explained.__cause__ = error
        return explained


def _failed(cause: BaseException) -> RunnerFailed:
    error = RunnerFailed(f"the device thread has ended: {cause!r}")
    error.__cause__ = cause
    return error
