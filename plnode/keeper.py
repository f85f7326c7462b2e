"""A node's own snapshots: when they are cut, written, found again, and what happens when one proves damaged.

The stage is copied on the device thread at a step boundary; the disk is written while training goes on.  One writer at a time: on a
disk that is slower than the snapshots come, training waits for it at the next one instead of piling copies up in memory.  A write that
fails is told and costs that snapshot only.  A snapshot that cannot be read is set aside, so that this node no longer offers
the step; otherwise every generation would start from it and break.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import trio

from plnode.observe import events as e
from plnode.observe.recorder import Recorder
from plnode.stage.errors import SnapshotError
from plnode.stage.runner import StageRunner
from plnode.stage.snapshots import SnapshotStore

STEPS_TOLD = 8  # the most that a claim holds


class Keeper:
    """`every`: steps between snapshots, 0 = only after the last step.  `changed()` is called when `steps` is another.  `common()`: the
    newest step that all stages hold; it is kept, whatever is newer here, because a stage whose disk fails falls back on it."""

    def __init__(
        self,
        store: SnapshotStore,
        *,
        every: int,
        last: int,
        recorder: Recorder,
        changed: Callable[[], None],
        common: Callable[[], int],
    ) -> None:
        self._common = common
        self._store = store
        self._every = every
        self._last = last
        self._recorder = recorder
        self._changed = changed
        self._disk = trio.Lock()
        self.stage: int | None = None
        """The stage that this node has snapshots of."""
        self.steps: tuple[int, ...] = ()
        """Their steps, ascending."""
        self._look()

    def _look(self) -> None:
        found = self._store.list()
        self.stage = found[-1].stage if found else None
        self.steps = tuple(stored.step for stored in found if stored.stage == self.stage)[-STEPS_TOLD:]

    async def load(self, runner: StageRunner, step: int, stage: int) -> None:
        """Bring the stage to `step` from disk.  Raises SnapshotError naming the file; that snapshot is set aside."""
        started = time.monotonic()
        try:
            loaded = await trio.to_thread.run_sync(self._store.load, step, stage)
        except SnapshotError:
            await trio.to_thread.run_sync(self._store.set_aside, step, stage)
            self._look()
            self._changed()
            raise
        await runner.restore(loaded.tensors, step)
        self._recorder.emit(e.SnapshotLoaded(step, str(loaded.path), loaded.size_bytes, time.monotonic() - started))

    async def save(self, runner: StageRunner, step: int, stage: int, generation: int, writers: trio.Nursery) -> None:
        """Copy the stage at `step` if a snapshot is due; a task of `writers` puts it on disk."""
        if step != self._last and not (self._every and step % self._every == 0):
            return
        started = time.monotonic()
        async with self._disk:
            tensors = await runner.snapshot()

        async def write() -> None:
            async with self._disk:
                try:
                    written = await trio.to_thread.run_sync(self._store.write, step, stage, generation, tensors, self._common())
                except (SnapshotError, OSError) as failed:
                    self._recorder.emit(e.SnapshotFailed(step, str(failed)))
                    return
            self._recorder.emit(e.SnapshotWritten(step, str(written.path), written.size_bytes, time.monotonic() - started))
            self._look()
            self._changed()

        writers.start_soon(write)
