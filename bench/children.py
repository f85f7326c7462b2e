"""The processes that are measured, and how the bench talks with them: JSON lines over stdin and stdout.

Readiness is a line, never a sleep.  A child ends when its stdin does, so that none survives a bench that was killed; one that
does not is killed with its process group.  What it says on stderr is kept: if it ends before its answer, that is the reason.

A child may be bound to cores.  A small program between does that (`bench.pinned`), since the binding must stand before torch
counts the cores, and between fork and exec nothing of Python may run in a process with threads.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import trio

__all__ = ["BenchFailed", "Child", "environment", "open_children", "pinned", "python"]

ROOT = Path(__file__).resolve().parent.parent
# Goodbyes on loopback take milliseconds; a stopped interpreter with torch needs about a second to tear down.
LEAVE_S = 5.0
ANSWER_MAX_BYTES = 1 << 20


class BenchFailed(Exception):
    """A measured process died, was silent for too long or said what it must not; the text says which, and its last words."""


def python(module: str, *arguments: str) -> list[str]:
    """The command line of one of our modules."""
    return [sys.executable, "-m", module, *arguments]


def pinned(cores: Sequence[int], argv: Sequence[str]) -> list[str]:
    """`argv` bound to these cores, where the system can do that."""
    if not cores or not hasattr(os, "sched_setaffinity"):
        return list(argv)
    return [*python("bench.pinned", ",".join(map(str, cores))), *argv]


def environment() -> dict[str, str]:
    """Ours, with this package importable, and without settings that would reach every node."""
    own = {key: value for key, value in os.environ.items() if not key.startswith("PLNODE_")}
    own["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), own.get("PYTHONPATH", "")]))
    return own


class Child:
    """One process that answers.  Made by `Children.start`."""

    def __init__(self, name: str, process: trio.Process) -> None:
        self.name = name
        self._process = process
        self._buffer = bytearray()
        self._last: deque[str] = deque(maxlen=8)
        self._drained = trio.Event()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def hear(self, patience_s: float) -> dict[str, Any]:
        """Its next line.  Raises BenchFailed if it ends, says something else than an object, or nothing for `patience_s`."""
        assert self._process.stdout is not None
        with trio.move_on_after(patience_s):
            while b"\n" not in self._buffer:
                data = await self._process.stdout.receive_some(65536)
                if not data or len(self._buffer) > ANSWER_MAX_BYTES:
                    await self._drained.wait()
                    raise BenchFailed(f"{self.name} ended without an answer{self._words()}")
                self._buffer += data
            line, _, rest = bytes(self._buffer).partition(b"\n")
            self._buffer = bytearray(rest)
            try:
                answer = json.loads(line)
            except ValueError:
                answer = None
            if not isinstance(answer, dict):
                raise BenchFailed(f"{self.name} said {line[:200]!r}, which is no answer")
            return answer
        raise BenchFailed(f"{self.name} gave no answer within {patience_s:g} s{self._words()}")

    async def tell(self, request: dict[str, Any]) -> None:
        """Send one line.  Raises BenchFailed if it is gone."""
        assert self._process.stdin is not None
        try:
            await self._process.stdin.send_all(json.dumps(request).encode() + b"\n")
        except trio.BrokenResourceError:
            await self._drained.wait()
            raise BenchFailed(f"{self.name} has ended{self._words()}") from None

    async def ask(self, request: dict[str, Any], patience_s: float) -> dict[str, Any]:
        """`tell`, then `hear`."""
        await self.tell(request)
        return await self.hear(patience_s)

    async def end(self) -> None:
        """Close its stdin, wait for it, kill what is left.  Cannot be cancelled, lasts little over `LEAVE_S`."""
        with trio.CancelScope(shield=True):
            if self._process.stdin is not None:
                await self._process.stdin.aclose()
            with trio.move_on_after(LEAVE_S):
                await self._process.wait()
            with suppress(ProcessLookupError):  # its group is its own: nobody else is hit
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()

    async def kill(self) -> None:
        """End it now, with its process group; what it would still say is not waited for."""
        with trio.CancelScope(shield=True):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()

    async def follow_stderr(self) -> None:
        """Keep its last words; runs until they end."""
        assert self._process.stderr is not None
        rest = b""
        try:
            async for data in self._process.stderr:
                *lines, rest = (rest + data).split(b"\n")
                self._last.extend(line.decode("utf-8", "replace") for line in lines if line.strip())
        finally:
            if rest.strip():
                self._last.append(rest.decode("utf-8", "replace"))
            self._drained.set()

    def _words(self) -> str:
        return "".join(f"\n  | {line}" for line in self._last) or " (it said nothing)"


class Children:
    """All children of one bench."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._all: list[Child] = []

    async def start(self, name: str, argv: Sequence[str], cores: Sequence[int] = ()) -> Child:
        """Start a process, bound to `cores` if given.  A cancel leaves either none, or one that `end` knows."""
        with trio.CancelScope(shield=True):
            process = await trio.lowlevel.open_process(
                pinned(cores, argv),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                start_new_session=True, env=environment(),
            )  # fmt: skip
        child = Child(name, process)
        self._all.append(child)
        self._nursery.start_soon(child.follow_stderr)
        return child

    async def kill(self) -> None:
        """Kill all, the youngest first."""
        for child in reversed(self._all):
            await child.kill()

    async def end(self) -> None:
        """End all, the youngest first: a client before its server."""
        for child in reversed(self._all):
            await child.end()


@asynccontextmanager
async def open_children() -> AsyncIterator[Children]:
    """Children that are gone when the block is left, however it is left."""
    async with trio.open_nursery() as nursery:
        children = Children(nursery)
        try:
            yield children
        finally:
            await children.end()
            nursery.cancel_scope.cancel()
