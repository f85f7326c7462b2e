"""Running a program of ours as a process: signals, the end of stdin, the recorder's outputs.

How `seed`, `join` and `demo` end, in order of politeness:

1. SIGTERM or SIGINT: the program's task is cancelled and gets its patience to say goodbye (`leaving.py`).  A node that was told to stop
   and has left has done all that it was asked: after SIGTERM it exits with 0 (`leaves`).  Otherwise the exit code is 128 + signal.
2. A second signal, or the patience is over: the process ends at once, with 128 + signal.
3. With `--exit-with-stdin`, the end of stdin counts as SIGTERM.  A parent that starts nodes keeps the other end of their stdin;
   if the parent is killed (also with SIGKILL) the kernel closes it and no node is left behind.  The watcher is a thread and not a
   task, because a node whose event loop hangs must end as well: it sends the process its own SIGTERM, and if that has no effect
   it calls `_exit`.  (Linux' PR_SET_PDEATHSIG is not used: it follows the parent's *thread*, and trio starts processes from
   short-lived ones.)

The interpreter's own KeyboardInterrupt is off while the program runs: it may strike between any two instructions.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import trio

from plnode.exits import ExitCode, Outcome
from plnode.leaving import patience_of
from plnode.observe.pump import LinePump
from plnode.observe.recorder import HumanLines, JsonLines, Recorder, Sink
from plnode.settings import STOP_GRACE_S

__all__ = ["exit_with_stdin", "opened_recorder", "run_until_signal"]

# Goodbyes on open connections take a round trip, a job on the device some seconds.  `docker stop` kills after 10 s: by then the
# program should have ended by itself.
PATIENCE_S = patience_of(STOP_GRACE_S)


@contextmanager
def opened_recorder(*, json: bool, level: str) -> Iterator[Recorder]:
    """A recorder with lines for people on stderr and, with `json`, JSON lines on stdout.  Both are flushed at the end."""
    pumps = [LinePump(sys.stderr.fileno())]
    sinks: list[Sink] = [HumanLines(pumps[0], level, colors=sys.stderr.isatty())]
    if json:
        pumps.append(LinePump(sys.stdout.fileno(), gap='{{"kind": "Gap", "lines": {}}}\n'.format))
        sinks.append(JsonLines(pumps[1]))
    try:
        yield Recorder(sinks)
    finally:
        for pump in pumps:
            pump.close()


def run_until_signal(
    program: Callable[[], Awaitable[Outcome]], stopped: Callable[[str], None], *, leaves: bool = False, patience_s: float = PATIENCE_S
) -> int:
    """Runs `program` under trio until it returns or a signal cancels it, then at most `patience_s`; returns the exit code.

    `leaves`: to leave when told to is what this program is for; after SIGTERM and all goodbyes the code is 0.  `stopped` is told
    the reason in every case, before the goodbyes if it is a signal.  Exceptions of the program pass through.
    """
    ended_by: signal.Signals | None = None
    outcome: Outcome | None = None

    async def watch(scope: trio.CancelScope, *, task_status: trio.TaskStatus[None]) -> None:
        nonlocal ended_by
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            async for number in signals:
                ended_by = signal.Signals(number)
                break
            stopped(f"{ended_by.name} received" if ended_by else "stopped")
            scope.cancel()
            with trio.move_on_after(patience_s):
                async for _ in signals:
                    break
            os._exit(128 + int(ended_by or 0))

    async def main() -> None:
        nonlocal outcome
        async with trio.open_nursery() as nursery:
            scope = trio.CancelScope()
            await nursery.start(watch, scope)
            with scope:
                outcome = await program()
            nursery.cancel_scope.cancel()

    try:
        trio.run(main)
    except BaseException as problem:
        cause = _only_leaf(problem)
        stopped(f"{type(cause).__name__}: {cause}")
        if cause is problem:
            raise
        raise cause from problem
    if ended_by is not None:
        return ExitCode.OK if leaves and ended_by is signal.SIGTERM else 128 + ended_by
    assert outcome is not None  # neither cancelled nor raised: it returned
    stopped(outcome.message or "finished")
    return int(outcome.exit_code)


def _only_leaf(problem: BaseException) -> BaseException:
    """The one exception in nested groups of one, which nurseries make; a group of several stays what it is."""
    while isinstance(problem, BaseExceptionGroup) and len(problem.exceptions) == 1:
        problem = problem.exceptions[0]
    return problem


def exit_with_stdin(patience_s: float = PATIENCE_S) -> None:
    """Ends this process when its stdin does.  Returns at once; the watching is done by a daemon thread."""

    def watch() -> None:
        try:
            while os.read(0, 4096):
                pass
        except OSError:
            pass  # no stdin at all is an ended one
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(patience_s + 2.0)  # a thread of its own: the event loop is not concerned
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, name="stdin watch", daemon=True).start()
