"""A thread that writes lines, so that a slow reader of our output never stops the event loop.

A node's stdout may be a pipe that nobody empties, a terminal that is paused with Ctrl-S, a log collector in trouble.  A plain
`print` then blocks, with it the loop, and the peers declare this node dead.  So a line is only put into a bounded queue here
(no await, no system call), and one daemon thread does the blocking write.  When the queue is full, something must go: first
the oldest *expendable* line (a periodic status that the next one replaces), then the oldest of all; how many went is told in
the next line that is written, so nobody takes a gap for silence.

A daemon thread and not a trio task: the last lines, the ones that say why the node ends, come after the loop has stopped.
4,096 lines hold an hour of statuses or some minutes of steps, about 2 MB.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable

__all__ = ["LinePump"]


class LinePump:
    """Writes lines to the file descriptor `fd` in order.  Every method may be called from any thread and returns at once, but
    `close`, which waits at most `patience_s` for the rest to be written."""

    def __init__(self, fd: int, *, bound: int = 4096, gap: Callable[[int], str] = "... {} lines left out\n".format) -> None:
        self._fd = fd
        self._bound = bound
        self._gap = gap
        self._lines: deque[tuple[str, bool]] = deque()
        self._dropped = 0
        self._closed = False
        self._ready = threading.Condition()
        self._thread = threading.Thread(target=self._write_all, name="line pump", daemon=True)
        self._thread.start()

    def put(self, line: str, *, expendable: bool = False) -> None:
        """Queues a line (its newline included).  After `close` it is ignored."""
        with self._ready:
            if self._closed:
                return
            if len(self._lines) >= self._bound:
                self._drop_one()
            self._lines.append((line, expendable))
            self._ready.notify()

    def close(self, patience_s: float = 2.0) -> None:
        """Writes what is queued and ends the thread; gives up after `patience_s` if nobody reads."""
        with self._ready:
            self._closed = True
            self._ready.notify()
        self._thread.join(patience_s)

    def _drop_one(self) -> None:
        self._dropped += 1
        for index, (_, expendable) in enumerate(self._lines):
            if expendable:
                del self._lines[index]
                return
        self._lines.popleft()

    def _write_all(self) -> None:
        while True:
            with self._ready:
                while not self._lines and not self._closed:
                    self._ready.wait()
                if not self._lines:
                    return
                text = self._gap(self._dropped) if self._dropped else ""
                self._dropped = 0
                text += "".join(line for line, _ in self._lines)
                self._lines.clear()
            data = memoryview(text.encode("utf-8", "replace"))
            try:
                while data:
                    data = data[os.write(self._fd, data) :]
            except OSError:  # the reader is gone; a node does not stop working for that
                with self._ready:
                    self._closed = True
                    self._lines.clear()
                return
