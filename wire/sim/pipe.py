"""One end of a connection, as a program sees it.

The rules are those of a TCP socket: the end of the peer's data reads as 0; closing with unread data tells the peer RST, which
is how a program that stops listening looks; writing to a peer that has closed succeeds once and then breaks; a host that dies
says nothing.  Waiting tasks are parked and woken by events, one reader and one writer a pipe.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import trio

from wire.path import DIRECT, Path
from wire.pipeinfo import PipeInfo
from wire.sim.flow import UNSENT_BYTES, UNSENT_MOST_BYTES, UNSENT_S, Flow
from wire.sim.nat import Nat, Place

if TYPE_CHECKING:
    from wire.sim.host import Host


def os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


class SimPipe:
    """local, remote: as this end calls them; behind a router they differ from what the other end sees."""

    other: SimPipe
    flow: Flow  # what we send

    def __init__(self, host: Host, local: Place, remote: Place, nat: Nat | None, number: int) -> None:
        self.host = host
        self.local = local
        self.remote = remote
        self.nat = nat  # the router that translates for us, None where the other end is in the same house
        self.number = number
        self.closed = False  # by the program
        self.gone = False  # the kernel knows it no longer
        self.error: OSError | None = None
        self.read_bytes = 0
        self._path = DIRECT
        self._chunks: deque[memoryview] = deque()
        self._ended = False
        self._reader: trio.lowlevel.Task | None = None
        self._writer: trio.lowlevel.Task | None = None

    def info(self) -> PipeInfo:
        return PipeInfo("sim", self.local, self.remote, self.host.congestion, self._path)

    def runs(self, path: Path) -> None:
        self._path = path

    # -- the program's side

    def _check(self) -> None:
        if self.closed:
            raise trio.ClosedResourceError("this pipe was closed")
        if self.error is not None:
            raise trio.BrokenResourceError(str(self.error)) from self.error

    async def receive_into(self, buffer: memoryview) -> int:
        await trio.lowlevel.checkpoint_if_cancelled()
        while True:
            self._check()
            if self._chunks:
                break
            if self._ended:
                return 0
            if self._reader is not None:
                raise trio.BusyResourceError("another task receives from this pipe")
            self._reader = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(self._reader_left)
        filled, size, chunks = 0, len(buffer), self._chunks
        while chunks and filled < size:
            chunk = chunks[0]
            if len(chunk) <= size - filled:
                buffer[filled : filled + len(chunk)] = chunk
                filled += len(chunk)
                chunks.popleft()
            else:
                buffer[filled:] = chunk[: size - filled]
                chunks[0] = chunk[size - filled :]
                filled = size
        self.read_bytes += filled
        self.host.internet.tick()
        self.other.flow.look()
        return filled

    def send_now(self, views: Sequence[memoryview]) -> int:
        self._check()
        if self.flow.fin:
            error = os_error(errno.EPIPE)
            raise trio.BrokenResourceError(str(error)) from error
        self.host.internet.tick()
        return self.flow.take(views)

    async def wait_writable(self) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        while True:
            self._check()
            if self.flow.writable():
                return
            if self._writer is not None:
                raise trio.BusyResourceError("another task sends into this pipe")
            self._writer = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(self._writer_left)

    def taking(self, bytes_per_s: float) -> None:
        most = UNSENT_BYTES
        while most < UNSENT_MOST_BYTES and 2 * most <= bytes_per_s * UNSENT_S:
            most *= 2
        self.flow.unsent_most = most

    async def send_eof(self) -> None:
        await trio.lowlevel.checkpoint()
        if not self.closed and self.error is None:
            self.host.internet.tick()
            self.flow.finish()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.host.internet.tick()
        if self._chunks:
            self._leave(rst=True)
        elif not self.gone:
            self.flow.finish()
            self.perhaps_forget()
        self.wake_all()

    def abort(self) -> None:
        if not self.closed:
            self.closed = True
            self.host.internet.tick()
            self._leave(rst=True)
            self.wake_all()

    # -- the network's side

    def deliver(self, data: memoryview, fin: bool) -> None:
        if data:
            self._chunks.append(data)
        self._ended = self._ended or fin
        if fin:
            self.perhaps_forget()
        self._wake_reader()

    def was_reset(self, number: int = errno.ECONNRESET) -> None:
        """The connection is over and nobody will be told."""
        if not self.gone:
            self.host.internet.note("reset", self.number, self.host.name)
            self.error = os_error(number)
            self._leave(rst=False)
            self.wake_all()

    def answer_reset(self) -> None:
        """Something came for a connection that is not, or for a program that closed it."""
        if not self.gone:
            self._leave(rst=False)
        net = self.host.internet
        if net.passes(self, self.other):
            net.after(net.delay(self.host, self.other.host), self._reset_other)

    def _reset_other(self) -> None:
        if self.host.internet.passes(self, self.other):
            self.other.was_reset()

    def perhaps_forget(self) -> None:
        if self.closed and self._ended and self.flow.fin == "acked":
            self.forget()

    def forget(self) -> None:
        self._leave(rst=False)

    def _leave(self, *, rst: bool) -> None:
        if not self.gone:
            self.gone = True
            self._chunks.clear()
            self.host.connections.pop((self.local, self.remote), None)
            self.flow.stop(rst=rst)

    # -- waiting

    def _reader_left(self, _: object) -> trio.lowlevel.Abort:
        self._reader = None
        return trio.lowlevel.Abort.SUCCEEDED

    def _writer_left(self, _: object) -> trio.lowlevel.Abort:
        self._writer = None
        return trio.lowlevel.Abort.SUCCEEDED

    def _wake_reader(self) -> None:
        if self._reader is not None:
            trio.lowlevel.reschedule(self._reader)
            self._reader = None

    def wake_writer(self) -> None:
        if self._writer is not None:
            trio.lowlevel.reschedule(self._writer)
            self._writer = None

    def wake_all(self) -> None:
        self._wake_reader()
        self.wake_writer()
