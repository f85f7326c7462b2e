"""All-reduce of one flat vector among the replicas of a stage: a butterfly in pieces over tensor channels.

Each rank sums the pieces of its own share in rank order and returns them; the other shares arrive reduced, straight into place.
Sending, summing and returning of different pieces overlap.  Every slot is keyed: a rank knows exactly which piece it will get from
whom, so memory is bounded by the slots it posts ahead and a peer can put nothing anywhere else.  All ranks end with the
same bits, because every sum is made once, by its owner, in rank order.

Sums are made in the vector's own dtype (fp32 or fp64).  A round that fails or is cancelled withdraws its slots; the vector is then
undefined and the caller throws the step away.  The deadline is the caller's (`Generation`): pieces that arrive are signs of life, and
a round in which none arrives for much longer than it ever took is broken off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import trio

from plnode.collective.messages import REDUCE
from plnode.collective.shares import Piece, pieces
from plnode.pipeline.microbatch import era
from wire.identity import PeerId
from wire.messages import Key
from wire.net import Net, TensorReceiver, TensorSender
from wire.tensor import DType, Expectation

Vector = npt.NDArray[np.float32] | npt.NDArray[np.float64]
CONTRIBUTION, RESULT = 0, 1
AHEAD = 4
"""Pieces a rank is ready to receive at once from each peer and phase: 4 MiB hide 40 ms of latency at 800 Mbit/s."""


class Spoilt(Exception):
    """A member's contribution is not finite."""

    def __init__(self, member: PeerId) -> None:
        super().__init__(f"the gradient of {member.short} is not finite")
        self.member = member


class _Mailbox:
    """Pieces from one peer: keyed slots out, buffers in."""

    def __init__(self, receiver: TensorReceiver, expected: dict[Key, Expectation], alive: Callable[[], None]) -> None:
        self._receiver = receiver
        self._alive = alive
        self._expected = expected
        self._arrived: dict[Key, trio.Event] = {}

    def post(self, key: Key, into: memoryview, expectation: Expectation) -> None:
        self._expected[key] = expectation
        self._arrived[key] = trio.Event()
        self._receiver.post(into, key=key)

    async def wait(self, key: Key) -> None:
        await self._arrived[key].wait()
        del self._arrived[key], self._expected[key]

    async def run(self) -> None:
        while True:
            received = await self._receiver.receive()
            self._alive()
            event = self._arrived.get(received.key)
            if event is not None:
                event.set()

    def close(self) -> None:
        self._receiver.close()


class Reducer:
    """All-reduces among `members` (ascending ids) in one generation; channels are opened once and serve every step.

    `alive()` is called for each piece that arrives: a long round is not a silent one.
    """

    def __init__(
        self, net: Net, generation: int, members: Sequence[PeerId], dtype: DType, elements: int, alive: Callable[[], None]
    ) -> None:
        self._members = tuple(members)
        self._rank = self._members.index(net.peer_id)
        self._dtype = dtype
        self._np = np.dtype("<f8") if dtype is DType.fp64 else np.dtype("<f4")
        self._pieces = pieces(elements, len(self._members), self._np.itemsize)
        self._generation = generation
        self._senders: dict[int, TensorSender] = {}
        self._mailboxes: dict[int, _Mailbox] = {}
        name = generation.to_bytes(4, "big")
        for rank, member in enumerate(self._members):
            if rank == self._rank:
                continue
            peer = net.peer(member)
            if peer is None:
                raise LookupError(f"{member.short} is not connected")
            expected: dict[Key, Expectation] = {}
            self._senders[rank] = peer.sender(REDUCE, name)
            self._mailboxes[rank] = _Mailbox(peer.receiver(REDUCE, name, expected.get), expected, alive)
        self.bytes_sent = 0

    async def reduce(self, vector: Vector, step: int) -> None:
        """Replace `vector` (1-D, contiguous, the group's dtype) by the sum over all ranks.  Wire errors pass through."""
        if vector.dtype != self._np or vector.ndim != 1:
            raise ValueError(f"this group reduces 1-D {self._np}, got {vector.ndim}-D {vector.dtype}")
        async with trio.open_nursery() as nursery:
            for mailbox in self._mailboxes.values():
                nursery.start_soon(mailbox.run)
            async with trio.open_nursery() as work:
                for rank in self._mailboxes:
                    work.start_soon(self._scatter, vector, step, rank)
                    work.start_soon(self._gather, vector, step, rank)
                work.start_soon(self._own_share, vector, step)
            nursery.cancel_scope.cancel()

    def close(self) -> None:
        """Withdraw what is posted; the channels end with the generation."""
        for mailbox in self._mailboxes.values():
            mailbox.close()
        for sender in self._senders.values():
            sender.close()

    # -- tasks ----------------------------------------------------------------------------------------------------------
    async def _scatter(self, vector: Vector, step: int, rank: int) -> None:
        """Send my contribution to `rank`'s share, piece by piece, AHEAD at once."""
        await self._send_each([p for p in self._pieces if p.owner == rank], vector, step, rank, CONTRIBUTION)

    async def _send_each(self, which: list[Piece], vector: Vector, step: int, rank: int, phase: int) -> None:
        limit = trio.CapacityLimiter(AHEAD)

        async def one(piece: Piece, holder: object) -> None:
            try:
                await self._send(piece, vector, step, rank, phase)
            finally:
                limit.release_on_behalf_of(holder)

        async with trio.open_nursery() as nursery:
            for piece in which:
                holder = object()
                await limit.acquire_on_behalf_of(holder)
                nursery.start_soon(one, piece, holder)

    async def _send(self, piece: Piece, vector: Vector, step: int, rank: int, phase: int) -> None:
        part = vector[piece.start : piece.end].data.cast("B")
        await self._senders[rank].send(
            self._key(step, phase, piece, self._rank), part, dtype=self._dtype, shape=(piece.end - piece.start,), order=piece.number
        )
        self.bytes_sent += part.nbytes

    async def _gather(self, vector: Vector, step: int, rank: int) -> None:
        """Receive `rank`'s reduced share straight into place.

        A result can only arrive after its owner has our contribution, but the slot must not be posted before that contribution
        has left: both use the same memory.  `_scatter` and the owner's arithmetic order that: the owner sums what we sent.
        """
        mine = [p for p in self._pieces if p.owner == rank]
        mailbox = self._mailboxes[rank]
        for number, piece in enumerate(mine):
            if number == 0:
                for ahead in mine[:AHEAD]:
                    self._post(mailbox, vector, step, ahead)
            await mailbox.wait(self._key(step, RESULT, piece, piece.owner))
            if number + AHEAD < len(mine):
                self._post(mailbox, vector, step, mine[number + AHEAD])

    def _post(self, mailbox: _Mailbox, vector: Vector, step: int, piece: Piece) -> None:
        part = vector[piece.start : piece.end].data.cast("B")
        mailbox.post(self._key(step, RESULT, piece, piece.owner), part, self._expectation(piece))

    async def _own_share(self, vector: Vector, step: int) -> None:
        """Sum the contributions to my share in rank order, return each piece as soon as it is whole."""
        mine = [p for p in self._pieces if p.owner == self._rank]
        scratch: dict[int, dict[int, Vector]] = {}

        def expect(piece: Piece) -> None:
            scratch[piece.number] = {}
            for rank, mailbox in self._mailboxes.items():
                buffer = np.empty(piece.end - piece.start, self._np)
                scratch[piece.number][rank] = buffer
                mailbox.post(self._key(step, CONTRIBUTION, piece, rank), buffer.data.cast("B"), self._expectation(piece))

        async with trio.open_nursery() as returns:
            for piece in mine[:AHEAD]:
                expect(piece)
            for number, piece in enumerate(mine):
                for rank, mailbox in self._mailboxes.items():
                    await mailbox.wait(self._key(step, CONTRIBUTION, piece, rank))
                others = scratch.pop(piece.number)
                for rank, contribution in others.items():
                    if not np.isfinite(contribution.sum()):
                        raise Spoilt(self._members[rank])
                own = vector[piece.start : piece.end]
                total = own.copy() if self._rank == 0 else others[0]
                for rank in range(1, len(self._members)):
                    np.add(total, own if rank == self._rank else others[rank], out=total)
                own[:] = total
                for rank in self._mailboxes:
                    returns.start_soon(self._send, piece, vector, step, rank, RESULT)
                if number + AHEAD < len(mine):
                    expect(mine[number + AHEAD])

    def _key(self, step: int, phase: int, piece: Piece, sender: int) -> Key:
        return (era(self._generation, step), phase, piece.number, sender)

    def _expectation(self, piece: Piece) -> Expectation:
        count = piece.end - piece.start
        return Expectation(self._dtype, (count,), 0, count * self._np.itemsize)
