"""The state that `plnode status` shows, and the socket that hands it out.

The state is a fold over events: the last `NodeStatus`, the seeds' states, what the node waits for, the last few things that
went wrong.  It is served on a Unix socket in the data folder: whoever may read the folder may ask, no port is opened, and the
answer comes from the process itself, so a file left by a dead one cannot be taken for news.  A request is one line (`status`
or `metrics`), the answer is everything until the end of the stream.

Traps: a Unix socket's path may be 107 bytes long (sockaddr_un), and data folders of tests and containers are longer, so the
path is opened through `/proc/self/fd`; a socket file of a killed process stays in the folder, so a file on which nobody
answers is replaced, and one on which somebody does is left alone.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import trio

from plnode.exits import BadInput
from plnode.observe import events as e

__all__ = ["NodeAbsent", "Status", "ask", "serve_status"]

# The requester is a person's command on the same machine: two seconds are an eternity for both directions.
_PATIENCE_S = 2.0
_TROUBLES = 8
_SEEDS = 64  # entries in a seed list, wire.md section 18


class NodeAbsent(BadInput):
    """No node runs on that data folder."""


class Status:
    """A sink of the recorder.  `document()` is what `plnode status --json` prints."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._started: e.NodeStarted | None = None
        self._assigned: e.StageAssigned | None = None
        self._last: e.NodeStatus | None = None
        self._last_at = 0.0
        self._seeds: dict[str, dict[str, Any]] = {}
        self._waiting: dict[str, tuple[str, float]] = {}
        self._heldout: e.HeldOut | None = None
        self._troubles: deque[dict[str, Any]] = deque(maxlen=_TROUBLES)

    def take(self, event: e.Event, time_unix: float) -> None:
        match event:
            case e.NodeStatus():
                self._last, self._last_at = event, time_unix
            case e.NodeStarted():
                self._started = event
            case e.StageAssigned():
                self._assigned = event
            case e.SeedState(entry, state, reason):
                if entry in self._seeds or len(self._seeds) < _SEEDS:
                    self._seeds[entry] = {"state": state, "reason": reason, "since": time_unix}
            case e.Waiting(what, detail):
                since = self._waiting[what][1] if what in self._waiting else time_unix
                self._waiting[what] = (detail, since)
            case e.WaitingOver(what):
                self._waiting.pop(what, None)
            case e.HeldOut():
                self._heldout = event
            case e.RunAborted() | e.PeerLost() | e.SnapshotFailed():
                self._troubles.append({**e.to_json(event), "time": time_unix})

    def document(self) -> dict[str, Any]:
        """The whole state as JSON values.  `age_s` says how old the periodic part is; null before the first."""
        now = self._clock()
        return {
            "node": e.to_json(self._started) if self._started else None,
            "stage": e.to_json(self._assigned) if self._assigned else None,
            "status": e.to_json(self._last) if self._last else None,
            "age_s": round(now - self._last_at, 3) if self._last else None,
            "waiting": [
                {"what": what, "detail": detail, "since_s": round(now - since, 1)}
                for what, (detail, since) in self._waiting.items()
            ],
            "seeds": self._seeds,
            "heldout": e.to_json(self._heldout) if self._heldout else None,
            "troubles": list(self._troubles),
        }


async def serve_status(
    path: Path,
    status: Status,
    metrics: Callable[[], str] | None = None,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answers on the Unix socket `path` until cancelled, then removes it.  `task_status.started()` once it can be asked.

    A folder where a socket cannot be made, or a socket on which another process answers, raises `OSError`.
    """
    answers: dict[bytes, Callable[[], str]] = {b"status": lambda: json.dumps(status.document(), allow_nan=False) + "\n"}
    if metrics is not None:
        answers[b"metrics"] = metrics

    async def answer(stream: trio.SocketStream) -> None:
        with trio.move_on_after(_PATIENCE_S):
            try:
                request = await stream.receive_some(64)
                make = answers.get(bytes(request).strip())
                await stream.send_all((make() if make else '{"error": "unknown request"}\n').encode())
                await stream.send_eof()
            except trio.BrokenResourceError:
                return  # the asker went away: its own business

    listener = trio.SocketListener(_bound(path))
    try:
        await trio.serve_listeners(answer, [listener], task_status=_Once(task_status))
    finally:
        _remove(path)


class _Once:
    """`serve_listeners` reports its listeners; our starter only wants to know that it is up."""

    def __init__(self, inner: trio.TaskStatus[None]) -> None:
        self._inner = inner

    def started(self, value: object = None) -> None:
        self._inner.started()


def ask(data_dir: Path, request: str = "status") -> str:
    """The answer of the node that runs on `data_dir`.  Raises `NodeAbsent` if none does."""
    path = data_dir / "status.sock"
    remedy = "Start one with `plnode join` or `plnode seed`, or name its folder with --data."
    if not data_dir.is_dir():
        raise NodeAbsent(f"no node runs on {data_dir}: there is no such folder", remedy)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asker, _short(path) as name:
        asker.settimeout(_PATIENCE_S)
        try:
            asker.connect(name)
            asker.sendall(request.encode() + b"\n")
            parts = []
            while part := asker.recv(65536):
                parts.append(part)
        except (FileNotFoundError, ConnectionRefusedError):
            raise NodeAbsent(f"no node runs on {data_dir}", remedy) from None
        except PermissionError:
            raise BadInput(f"not allowed to ask the node on {data_dir}", "Ask as the user that the node runs as.") from None
        except TimeoutError:
            raise BadInput(
                f"the node on {data_dir} did not answer within {_PATIENCE_S:g} s",
                "Its event loop may be blocked; look at its log.",
            ) from None
    return b"".join(parts).decode()


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)


def _bound(path: Path) -> trio.socket.SocketType:
    """A listening socket at `path`, for its owner only; the file of a dead process is replaced."""
    with _short(path) as name:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode) and not _answered(name):
            path.unlink()
        inner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            inner.bind(name)
            os.chmod(path, 0o600)
            inner.listen(8)
        except OSError:
            inner.close()
            raise
    return trio.socket.from_stdlib_socket(inner)


def _answered(name: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PATIENCE_S)
        try:
            probe.connect(name)
        except ConnectionRefusedError:
            return False
        return True


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """A name of `path` that fits into sockaddr_un, good within the block."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}" if os.path.isdir("/proc/self/fd") else str(path)
    finally:
        os.close(folder)
