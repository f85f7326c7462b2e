"""Starting the processes of a local swarm, hearing what they say, and leaving none behind.

What goes wrong with programs that start programs: a child outlives its parent and keeps the port, the memory and the CPU; a child
that writes more than a pipe holds blocks because nobody reads it; a child dies and all that is known is "it died".  So:

* Every child runs in a session of its own, which keeps the terminal's Ctrl-C away from it: it is the parent that ends the
  children, in order.  `stop` closes their stdin (they run with `--exit-with-stdin`), waits, then kills the whole process group.
* If the parent itself is killed, also with SIGKILL, the kernel closes those pipes and the children end by themselves
  (`plnode/cli/service.py`).  Our ends of the pipes are not inherited by the next child (PEP 446), or each child would hold its
  siblings' stdin open.
* stdout and stderr are read all the time, line by line, into one bounded channel; a line beyond `LINE_MAX_BYTES` is cut.  The
  last lines of each are kept for the message that says why a process ended, and everything goes into a log file.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal

import trio

__all__ = ["Exited", "Launcher", "LineSplitter", "Said", "open_launcher"]

# A status of a node with a hundred peers has some 15 kB.
LINE_MAX_BYTES = 1 << 20
LAST_LINES = 12
# A node's own patience is 10 s (plnode/cli/service.py); on one machine goodbyes take milliseconds.
STOP_PATIENCE_S = 6.0


@dataclass(frozen=True, slots=True)
class Said:
    """A line (without its newline) that the process `name` wrote to stdout or stderr."""

    name: str
    stream: Literal["stdout", "stderr"]
    text: str


@dataclass(frozen=True, slots=True)
class Exited:
    """The process `name` is gone and has been heard to the end.  `code` is negative for a signal, as Python says it."""

    name: str
    code: int
    last_lines: tuple[str, ...]


class LineSplitter:
    """Bytes in, whole lines out.  Linear in the bytes, whatever the pieces; holds at most `LINE_MAX_BYTES`."""

    def __init__(self, max_bytes: int = LINE_MAX_BYTES) -> None:
        self._max = max_bytes
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[str]:
        """The lines that are complete now.  `b""` is the end: what is left is the last line."""
        if not data:
            last, self._rest = self._rest, bytearray()
            return [_text(last)] if last else []
        *whole, rest = data.split(b"\n")
        lines = []
        for piece in whole:
            self._append(piece)
            lines.append(_text(self._rest))
            self._rest = bytearray()
        self._append(rest)
        return lines

    def _append(self, piece: bytes) -> None:
        self._rest += piece[: self._max - len(self._rest)]


def _text(line: bytes | bytearray) -> str:
    return line.decode("utf-8", "replace").rstrip("\r")


@dataclass(slots=True)
class _Child:
    process: trio.Process
    log: BinaryIO
    last: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    gone: trio.Event = field(default_factory=trio.Event)


class Launcher:
    """The processes of one swarm.  `messages` yields `Said` and `Exited`, each process's own in order.

    Whoever holds a launcher must read `messages`: a full channel stops the reading of the children's output, and so in the
    end the children.
    """

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._children: dict[str, _Child] = {}
        self._send, self.messages = trio.open_memory_channel[Said | Exited](1024)

    async def start(self, name: str, argv: Sequence[str], *, log: Path, env: dict[str, str] | None = None) -> int:
        """Starts a process and returns its id.  Raises `OSError` if that cannot be done.

        A cancel leaves either no process, or one that `stop` knows.
        """
        file = _opened(log)
        try:
            with trio.CancelScope(shield=True):  # a process that nobody knows of would be left behind
                process = await trio.lowlevel.open_process(
                    list(argv),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                    env=env,
                )
        except BaseException:
            file.close()
            raise
        child = _Child(process, file)
        self._children[name] = child
        self._nursery.start_soon(self._follow, name, child)
        return process.pid

    async def stop(self, patience_s: float = STOP_PATIENCE_S) -> None:
        """Ends all processes and returns when none is left; cannot be cancelled, lasts at most a little over `patience_s`."""
        with trio.CancelScope(shield=True):
            for child in self._children.values():
                if child.process.stdin is not None:
                    await child.process.stdin.aclose()
            with trio.move_on_after(patience_s):
                for child in self._children.values():
                    await child.process.wait()
            for child in self._children.values():
                _kill_group(child.process)
                await child.process.wait()

    async def _follow(self, name: str, child: _Child) -> None:
        """Hears one process to its end.  The log is closed and the exit told whatever happens but a cancel."""
        try:
            async with trio.open_nursery() as readers:
                readers.start_soon(self._read, name, child, "stdout", child.process.stdout)
                readers.start_soon(self._read, name, child, "stderr", child.process.stderr)
                code = await child.process.wait()
                # A grandchild could hold the pipes open for ever; what the process itself wrote is there by now.
                readers.cancel_scope.deadline = trio.current_time() + 1.0
            await self._send.send(Exited(name, code, tuple(child.last)))
        finally:
            child.log.close()

    async def _read(
        self, name: str, child: _Child, stream: Literal["stdout", "stderr"], source: trio.abc.ReceiveStream | None
    ) -> None:
        assert source is not None  # both were asked for as pipes
        splitter = LineSplitter()
        async with source:
            while True:
                data = await source.receive_some(65536)
                child.log.write(data)
                for line in splitter.feed(bytes(data)):
                    if stream == "stderr" and line.strip():
                        child.last.append(line)
                    await self._send.send(Said(name, stream, line))
                if not data:
                    return


@asynccontextmanager
async def open_launcher() -> AsyncIterator[Launcher]:
    """A launcher whose processes are gone when the block is left, however it is left."""
    async with trio.open_nursery() as nursery:
        launcher = Launcher(nursery)
        try:
            yield launcher
        finally:
            # What the children still say is of no interest, but must not block their readers (and so their end).
            nursery.cancel_scope.cancel()
            await launcher.stop()


def _opened(path: Path) -> BinaryIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("ab")


def _kill_group(process: trio.Process) -> None:
    """Also what the process may have started itself.  Its group is its own (start_new_session), so nobody else is hit."""
    with suppress(ProcessLookupError):  # nobody is left in it
        os.killpg(process.pid, signal.SIGKILL)
