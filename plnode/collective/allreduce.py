"""All-reduce of one flat vector among the replicas of a stage: a butterfly in pieces over tensor channels.

Each rank combines the pieces of its own share in rank order and returns them; the other shares arrive reduced.  Sending,
combining and returning of different pieces overlap.  Every piece is combined once, by its owner, and the owner too goes on with
what the others decode: all ranks end with the same bits.  `exchange.py` is one round, this file what rounds have in common:
channels, layout, and what is left when a round ends.

* **Shares** follow the members' `weights` (shares.py); who has weight 0 reduces nothing and needs a connection to owners only.
* **The wire** is lossless, or bf16 or int8 blocks with error feedback (feedback.py); sums are made in the vector's own dtype.
* **The pooling** is the sum, or the sum of a robust mean (robust.py), which needs to know how many microbatches each vector holds.

A round that fails or is cancelled withdraws all its slots, and a piece of it that comes late finds none: its key names the attempt.
The vector is then undefined, what is owed unchanged, and the reducer as before; the caller may try again with the vector filled
anew and another `attempt`.  (Delivered keys of a step are remembered until the caller raises the protocol's watermark; a node keeps
65,536, so some thousand pieces a round allow about ten attempts a step.)  The deadline is the caller's (`Generation`): pieces that
arrive are signs of life, and a round in which none arrives for much longer than it ever took is broken off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import trio

from plnode.collective.exchange import Exchange, Line, Terms, Vector
from plnode.collective.feedback import Feedback, codec_for
from plnode.collective.mailbox import Mailbox, Spoilt
from plnode.collective.messages import REDUCE
from plnode.collective.robust import POOLINGS, Pooled
from plnode.collective.shares import pieces
from plnode.pipeline.microbatch import era
from wire.identity import PeerId
from wire.net import Net
from wire.tensor import DType

__all__ = ["Pooled", "Reducer", "Spoilt", "Vector"]


class Reducer:
    """All-reduces among `members` (ascending ids) in one generation; channels are opened once and serve every step.

    `alive()` is called for each piece that arrives: a long round is not a silent one.  `weights` (None: all equal), `wire` and
    `pooling` must be the same at all members.  `feedback`: this node's debt, which outlives the reducer; None with a lossy
    wire begins a new one.  ValueError for what cannot be, LookupError for an owner without a connection.
    """

    def __init__(
        self,
        net: Net,
        generation: int,
        members: Sequence[PeerId],
        dtype: DType,
        elements: int,
        alive: Callable[[], None],
        *,
        weights: Sequence[float] | None = None,
        wire: str = "fp32",
        pooling: str = "mean",
        feedback: Feedback | None = None,
    ) -> None:
        if pooling not in POOLINGS:
            raise ValueError(f"no pooling {pooling!r}: one of {', '.join(POOLINGS)}")
        if weights is not None and len(weights) != len(members):
            raise ValueError(f"{len(members)} members, but {len(weights)} weights")
        if feedback is not None and feedback.elements != elements:
            raise ValueError(f"a debt of {feedback.elements} elements does not fit a vector of {elements}")
        codec = codec_for(wire, dtype)
        self.feedback = None if wire == "fp32" else feedback or Feedback(elements)
        self._terms = Terms(
            members=tuple(members),
            rank=list(members).index(net.peer_id),
            dtype=dtype,
            codec=codec,
            pooling=pooling,
            pieces=pieces(elements, weights if weights is not None else [1.0] * len(members), np.dtype(dtype.numpy).itemsize),
            elements=elements,
        )
        self._generation = generation
        self._lines: dict[int, Line] = {}
        self._reducing = False
        self.bytes_sent = 0
        name = generation.to_bytes(4, "big")
        owners = {p.owner for p in self._terms.pieces}
        for rank, member in enumerate(members):
            if rank == self._terms.rank or not owners & {rank, self._terms.rank}:
                continue  # two that reduce nothing have nothing to say to each other
            peer = net.peer(member)
            if peer is None:
                self.close()
                raise LookupError(f"{member.short} is not connected")
            self._lines[rank] = Line(peer.sender(REDUCE, name), Mailbox(peer, member, REDUCE, name, alive))

    @property
    def open(self) -> int:
        """Slots and buffers that a round holds: 0 between rounds, once no chunk is under way."""
        return sum(line.mailbox.open + line.sender.pending for line in self._lines.values())

    async def reduce(self, vector: Vector, step: int, *, attempt: int = 0, counts: Sequence[int] | None = None) -> Pooled:
        """Replace `vector` (1-D, contiguous, the group's dtype) by the sum over all ranks, or by what pooling makes of it.

        `attempt`: a step may be tried again, each time with another number, the same at all members.  `counts`: how many microbatches
        each member's vector is the sum of, the same at all members (None: one each); a robust result is on the scale of
        the sum over all of them.  Raises, in exception groups, `Spoilt` (a member's fault) and wire errors.
        """
        terms = self._terms
        if vector.dtype != terms.dtype.numpy or vector.shape != (terms.elements,) or not vector.flags.c_contiguous:
            raise ValueError(f"this group reduces {terms.elements} elements of {terms.dtype.numpy}, got {vector.shape} {vector.dtype}")
        counts = tuple(counts) if counts is not None else (1,) * len(terms.members)
        if len(counts) != len(terms.members) or any(c < 0 for c in counts):
            raise ValueError(f"{len(terms.members)} members, but counts {list(counts)}")
        if self._reducing:
            raise trio.BusyResourceError("another task is reducing")
        self._reducing = True
        exchange = Exchange(terms, self._lines, vector, (era(self._generation, step), attempt), counts)
        if self.feedback is not None:
            exchange.owes(self.feedback.begin(step))
        try:
            async with trio.open_nursery() as nursery:
                for line in self._lines.values():
                    nursery.start_soon(line.mailbox.run)
                    nursery.start_soon(line.mailbox.watch)
                async with trio.open_nursery() as work:
                    exchange.start(work)
                nursery.cancel_scope.cancel()
        finally:
            self.bytes_sent += exchange.bytes_sent
            self._reducing = False
            for line in self._lines.values():
                line.mailbox.withdraw()
        if self.feedback is not None and exchange.debt is not None:
            self.feedback.propose(exchange.debt)
        return exchange.pooled()

    def close(self) -> None:
        """Withdraw what is posted; the channels end with the generation."""
        for line in self._lines.values():
            line.mailbox.close()
            line.sender.close()
