"""Carries out a plan: opens a byte stream for each request, hashes what comes, writes what is right.

One loop asks the plan, one task a request does the rest.  A task that the plan no longer wants is cancelled, which resets its stream and
stops the donor in mid-chunk.  A write, once begun, is not cancelled: the plan counts the chunk as there.

What an error means: busy (asked again later), not held (that donor is not asked for it again), everything else (the donor is gone).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import trio

from plnode.collective.statecut import HASH_BYTES, Offload, chunk_count
from plnode.collective.statemessages import BACKGROUND, HASHES, STATE_BYTES, ChunkAsk
from plnode.collective.statepull import Failure, Plan, Progress, Request, Standing, Verdict, checked_hashes
from wire.errors import Code, WireError
from wire.events import Kind
from wire.identity import PeerId
from wire.messages import encode
from wire.net import ByteStream, Net

LOOK_S = 0.25  # pauses end and chunks become late without an event
REPORT_S = 1.0
TABLE_S = 60.0
SOME_BYTES = 16 << 10  # what shows that a donor is alive

_FAILURES = {
    Code.RESOURCE_LIMIT: Failure.BUSY,
    Code.RATE_LIMITED: Failure.BUSY,
    Code.REFUSED: Failure.BUSY,
    Code.STALE: Failure.MISSING,
    Code.TIMEOUT: Failure.SILENT,
}


class NoHolder(Exception):
    """Nobody can give the rest; the text names who failed and how.  What was verified stays on disk."""


async def read_bytes(net: Net, donor: PeerId, root: bytes, index: int, into: memoryview, silence_s: float = TABLE_S) -> int:
    """One chunk, or the table of hashes, into `into`; the number of bytes that came.  Wire errors pass through.

    TooSlowError after `silence_s` without a byte, LookupError without a connection.
    """
    peer = net.peer(donor)
    if peer is None:
        raise LookupError(f"{donor.short} is not connected")
    stream = await peer.open(STATE_BYTES, Kind.BYTE, BACKGROUND, meta=encode(ChunkAsk(root, index)))
    assert isinstance(stream, ByteStream)
    try:
        await stream.send_eof()  # the question is in the opening, and leaves with the first thing that is sent
        filled = 0
        while filled < into.nbytes:
            with trio.fail_after(silence_s):
                count = await stream.receive_into(into[filled:], at_least=min(SOME_BYTES, into.nbytes - filled))
            if not count:
                break
            filled += count
        return filled
    except BaseException:
        stream.reset()  # the donor stops in mid-chunk
        raise
    finally:
        stream.close()


async def read_table(net: Net, donors: tuple[PeerId, ...], root: bytes, size_bytes: int, chunk_bytes: int) -> bytes:
    """The table of hashes of all chunks that `root` is made of, from the first donor that has it.  Raises NoHolder."""
    reasons = []
    for donor in donors:
        table = bytearray(HASH_BYTES * chunk_count(size_bytes, chunk_bytes))
        try:
            await read_bytes(net, donor, root, HASHES, memoryview(table))
        except (WireError, LookupError, trio.TooSlowError) as error:
            reasons.append(f"{donor.short}: {error}")
            continue
        if checked_hashes(bytes(table), root, size_bytes, chunk_bytes):
            return bytes(table)
        reasons.append(f"{donor.short}: its table of hashes is not the one that it signed")
    raise NoHolder("no table of hashes: " + "; ".join(reasons))


class Fetch:
    """One plan's work.  `write(index, data)` is called through `offload`, with verified bytes, in any order."""

    def __init__(
        self,
        net: Net,
        plan: Plan,
        root: bytes,
        write: Callable[[int, memoryview], None],
        *,
        offload: Offload,
        on_progress: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        self._net, self._plan, self._root, self._write = net, plan, root, write
        self._offload, self._on_progress = offload, on_progress
        self._scopes: dict[tuple[PeerId, int], trio.CancelScope] = {}
        self._changed = trio.Event()
        self.moved_bytes = 0
        self.reasons: dict[PeerId, str] = {}

    async def run(self) -> None:
        """Return when every chunk is written.  Raises NoHolder when that has become impossible, OSError from `write`."""
        reported = trio.current_time()
        async with trio.open_nursery() as nursery:
            while not self._plan.done:
                now = trio.current_time()
                if self._plan.hopeless:
                    nursery.cancel_scope.cancel()
                    raise NoHolder(self._why())
                while (request := self._plan.next(now)) is not None:
                    scope = self._scopes[request.donor, request.index] = trio.CancelScope()
                    nursery.start_soon(self._one, request, scope)
                self._changed = trio.Event()
                with trio.move_on_after(LOOK_S):
                    await self._changed.wait()
                for dropped in self._plan.take_cancels():
                    if (key := (dropped.donor, dropped.index)) in self._scopes:
                        self._scopes.pop(key).cancel()
                if trio.current_time() - reported >= REPORT_S:
                    reported = trio.current_time()
                    self._on_progress(self._plan.progress(reported))
            nursery.cancel_scope.cancel()
        self._on_progress(self._plan.progress(trio.current_time()))

    def _why(self) -> str:
        failed = [f"{donor.short}: {self.reasons.get(donor, 'gone')}" for donor in self._plan.named(Standing.GONE)]
        failed += [f"{donor.short}: sent wrong bytes" for donor in self._plan.named(Standing.LIAR)]
        failed += [f"{donor.short}: has not got all of what it announced" for donor in self._plan.lacking]
        have, want = self._plan.verified_bytes, self._plan.size_bytes
        return f"{have:,} of {want:,} bytes are here and nobody can give the rest ({'; '.join(failed)})"

    async def _one(self, request: Request, scope: trio.CancelScope) -> None:
        donor, index = request.donor, request.index
        with scope:
            buffer = memoryview(bytearray(self._plan.length(index)))
            try:
                count = await read_bytes(self._net, donor, self._root, index, buffer, request.deadline_s)
            except (WireError, LookupError, trio.TooSlowError) as error:
                failure = Failure.LOST
                if isinstance(error, WireError):
                    failure = _FAILURES.get(error.code, Failure.LOST)
                elif isinstance(error, trio.TooSlowError):
                    failure = Failure.SILENT
                self.reasons[donor] = str(error) or f"silent for {request.deadline_s:g} s"
                self._plan.failed(donor, index, failure, trio.current_time())
            else:
                self.moved_bytes += count
                await self._take(donor, index, buffer if count == buffer.nbytes else buffer[:0])
        if self._scopes.get((donor, index)) is scope:
            del self._scopes[donor, index]
        self._changed.set()

    async def _take(self, donor: PeerId, index: int, data: memoryview) -> None:
        digest: bytes = await self._offload(lambda: hashlib.sha256(data).digest() if data else b"")
        with trio.CancelScope(shield=True):
            if self._plan.received(donor, index, digest, trio.current_time()) is Verdict.GOOD:
                await self._offload(lambda: self._write(index, data))
