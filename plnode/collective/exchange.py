"""One round of the all-reduce, as the tasks of one rank.

Four kinds of task: *scatter* sends our contribution to each owner, *own share* combines what comes and returns it, *gather* takes
reduced shares, and, with robust pooling, *reports* takes from each owner the inner products of its share.

A sum and a coordinate-wise pooling give each piece back as soon as it is whole.  A vector-wise pooling cannot: its weights
depend on all of the vector.  So owners keep their whole share of all contributions, as they came over the wire (together as
much as one vector, encoded), exchange the inner products, and then combine.  Owners report inner products in every robust
pooling, since outliers are named from them.

Arithmetic runs on the event loop in slices of some milliseconds with checkpoints between: a piece has 262,144 elements, and a
thread would cost the order of events in virtual time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import trio

from plnode.collective.feedback import Debt, encode, shortfall
from plnode.collective.mailbox import Mailbox, Spoilt
from plnode.collective.robust import (
    COORDINATE,
    SQUARE_MAX,
    VECTOR,
    Pooled,
    by_work,
    check_gram,
    coordinates,
    means,
    outliers,
    weigh,
)
from plnode.collective.shares import Piece
from wire.identity import PeerId
from wire.messages import Key
from wire.net import TensorSender
from wire.tensor import Array, DType, Expectation, NumericCodec, from_bytes

Vector = npt.NDArray[np.float32] | npt.NDArray[np.float64]
CONTRIBUTION, RESULT, REPORT = 0, 1, 2
AHEAD = 4
"""Pieces a rank is ready to receive at once from each peer and phase: 4 MiB hide 40 ms of latency at 800 Mbit/s."""
SLICE = 1 << 14
"""Elements that are pooled without a checkpoint: 16 members' are 2 MiB of float64, in the cache, and some milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What all rounds of a generation have in common."""

    members: tuple[PeerId, ...]
    rank: int  # ours
    dtype: DType
    codec: NumericCodec
    pooling: str
    pieces: tuple[Piece, ...]
    elements: int


@dataclass(frozen=True, slots=True)
class Line:
    """The channels to and from one member."""

    sender: TensorSender
    mailbox: Mailbox


class Exchange:
    """One call of `Reducer.reduce`.  `attempt` = (era, attempt), the beginning of every key; `counts`: microbatches by rank."""

    def __init__(self, terms: Terms, lines: Mapping[int, Line], vector: Vector, attempt: tuple[int, int], counts: Sequence[int]) -> None:
        self._terms, self._lines, self._vector, self._attempt, self._counts = terms, lines, vector, attempt, counts
        self._mine = [p for p in terms.pieces if p.owner == terms.rank]
        self._owners = sorted({p.owner for p in terms.pieces})
        self._sent = {p.number: trio.Event() for p in terms.pieces if p.owner != terms.rank}
        self._owed: Debt | None = None
        self.debt: Debt | None = None  # of a lossy wire, complete when the round is
        self.bytes_sent = 0
        n = len(terms.members)
        # Of each share: upper triangle of the members' inner products there, and below them the sums of coordinate weights.
        self._reports: dict[int, npt.NDArray[np.float64]] = {}
        self._own_report = np.zeros((n + 1, n))
        self._squares = dict.fromkeys(self._owners, 0.0)  # of our contribution, by owner
        self._weights: tuple[float, ...] = by_work(counts)
        self._outliers: tuple[int, ...] = ()
        self._weighed = trio.Event()

    def owes(self, owed: Debt) -> None:
        """The wire is lossy, and this is what to add before encoding."""
        self._owed = owed
        self.debt = np.zeros_like(owed)

    def start(self, nursery: trio.Nursery) -> None:
        """All tasks of this rank; the round is complete when they are."""
        for rank in self._lines:
            if rank in self._owners:
                nursery.start_soon(self._scatter, rank)
                nursery.start_soon(self._gather, rank)
        if self._mine:
            nursery.start_soon(self._own_share)
        if self._robust:
            nursery.start_soon(self._take_reports)

    def pooled(self) -> Pooled:
        """What the round did, once it is complete."""
        return Pooled(self._weights, tuple(self._terms.members[i] for i in self._outliers))

    @property
    def _robust(self) -> bool:
        return self._terms.pooling != "mean"

    # -- our contribution to others' shares -------------------------------------------------------------------------------------
    async def _scatter(self, rank: int) -> None:
        """Send my contribution to `rank`'s share, piece by piece, AHEAD at once."""
        limit = trio.CapacityLimiter(AHEAD)

        async def one(piece: Piece, raw: memoryview, holder: object) -> None:
            try:
                await self._send(CONTRIBUTION, piece, rank, raw)
                self._sent[piece.number].set()
            finally:
                limit.release_on_behalf_of(holder)

        async with trio.open_nursery() as nursery:
            for piece in self._terms.pieces:
                if piece.owner != rank:
                    continue
                holder = object()
                await limit.acquire_on_behalf_of(holder)
                raw, seen = self._encode(piece, self._vector[piece.start : piece.end])
                if self._robust:
                    self._squares[rank] += _square(seen)
                nursery.start_soon(one, piece, raw, holder)

    async def _gather(self, rank: int) -> None:
        """Receive `rank`'s reduced share; a piece is replaced only when our contribution in the same memory has left."""
        theirs = [p for p in self._terms.pieces if p.owner == rank]
        mailbox = self._lines[rank].mailbox
        for ahead in theirs[:AHEAD]:
            mailbox.post(self._key(RESULT, ahead, rank), self._expectation(ahead))
        for number, piece in enumerate(theirs):
            raw = await mailbox.wait(self._key(RESULT, piece, rank))
            await self._sent[piece.number].wait()
            self._vector[piece.start : piece.end] = self._decode(piece, raw)
            if number + AHEAD < len(theirs):
                ahead = theirs[number + AHEAD]
                mailbox.post(self._key(RESULT, ahead, rank), self._expectation(ahead))

    # -- my share ---------------------------------------------------------------------------------------------------------------
    async def _own_share(self) -> None:
        """Combine the contributions to my share, return each piece as soon as it can be."""
        kept: list[tuple[Piece, dict[int, memoryview]]] = []
        vectorwise = self._terms.pooling in VECTOR

        def expect(piece: Piece) -> None:
            for rank, line in self._lines.items():
                line.mailbox.post(self._key(CONTRIBUTION, piece, rank), self._expectation(piece))

        async with trio.open_nursery() as returns:
            for piece in self._mine[:AHEAD]:
                expect(piece)
            for number, piece in enumerate(self._mine):
                raws = {r: await line.mailbox.wait(self._key(CONTRIBUTION, piece, r)) for r, line in self._lines.items()}
                parts = self._contributions(piece, raws)
                for rank, part in enumerate(parts):
                    if not _finite(part):
                        raise Spoilt(self._terms.members[rank])
                if self._robust:
                    await self._multiply(parts)
                if vectorwise:
                    kept.append((piece, raws))
                elif self._terms.pooling in COORDINATE:
                    self._return(returns, piece, await self._by_coordinate(parts))
                else:
                    self._return(returns, piece, _total(parts))
                if number + AHEAD < len(self._mine):
                    expect(self._mine[number + AHEAD])
            if self._robust:
                await self._report(returns)
            if vectorwise:
                await self._weighed.wait()
                while kept:
                    piece, raws = kept.pop(0)
                    self._return(returns, piece, await self._by_vector(self._contributions(piece, raws)))

    def _contributions(self, piece: Piece, raws: Mapping[int, memoryview]) -> list[Array]:
        own = self._vector[piece.start : piece.end]
        return [own if rank == self._terms.rank else self._decode(piece, raws[rank]) for rank in range(len(self._terms.members))]

    def _return(self, returns: trio.Nursery, piece: Piece, total: Array) -> None:
        raw, seen = self._encode(piece, total)
        self._vector[piece.start : piece.end] = seen
        for rank in self._lines:
            returns.start_soon(self._send, RESULT, piece, rank, raw)

    # -- robust pooling -----------------------------------------------------------------------------------------------------------
    async def _multiply(self, parts: list[Array]) -> None:
        """Add the inner products of one piece to the report."""
        products = self._own_report[:-1]
        for start in range(0, len(parts[0]), SLICE):
            x_NM = np.stack([part[start : start + SLICE] for part in parts]).astype(np.float64)
            with np.errstate(over="ignore", invalid="ignore"):
                products += x_NM @ x_NM.T
            await trio.lowlevel.checkpoint()
        for rank, member in enumerate(self._terms.members):
            if not products[rank, rank] <= SQUARE_MAX:
                raise Spoilt(member, f"the gradient of {member.short} is too large to be pooled")

    async def _by_coordinate(self, parts: list[Array]) -> Array:
        total = np.empty_like(parts[0])
        scale = np.array([1 / c if c else 0.0 for c in self._counts])[:, None]
        for start in range(0, len(total), SLICE):
            x_NM = np.stack([part[start : start + SLICE] for part in parts]).astype(np.float64) * scale
            y, shares = coordinates(x_NM, self._counts, self._terms.pooling)
            total[start : start + SLICE] = y * sum(self._counts)
            self._own_report[-1] += shares
            await trio.lowlevel.checkpoint()
        return total

    async def _by_vector(self, parts: list[Array]) -> Array:
        factors = [w * sum(self._counts) / c if c else 0.0 for w, c in zip(self._weights, self._counts, strict=True)]
        total = np.empty_like(parts[0])
        for start in range(0, len(total), SLICE):
            y = np.zeros(len(total[start : start + SLICE]))
            for factor, part in zip(factors, parts, strict=True):
                if factor:  # whoever has no weight has no influence, not even on a zero's sign
                    y += factor * part[start : start + SLICE]
            total[start : start + SLICE] = y
            await trio.lowlevel.checkpoint()
        return total

    async def _report(self, returns: trio.Nursery) -> None:
        """Tell everybody about my share."""
        self._own_report[:-1] = np.triu(self._own_report[:-1])
        self._reports[self._terms.rank] = self._own_report
        raw = self._own_report.data.cast("B")
        for rank in self._lines:
            returns.start_soon(self._send_report, rank, raw)
        self._weigh()

    async def _send_report(self, rank: int, raw: memoryview) -> None:
        await self._lines[rank].sender.send(
            self._report_key(self._terms.rank), raw, dtype=DType.fp64, shape=self._own_report.shape, order=0
        )
        self.bytes_sent += len(raw)

    async def _take_reports(self) -> None:
        shape = self._own_report.shape
        others = [owner for owner in self._owners if owner != self._terms.rank]
        for owner in others:
            self._lines[owner].mailbox.post(self._report_key(owner), Expectation(DType.fp64, shape, 0, 8 * math.prod(shape)))
        for owner in others:
            raw = await self._lines[owner].mailbox.wait(self._report_key(owner))
            report = from_bytes(raw, DType.fp64, shape)
            # An honest owner has all of our contribution by now, so that its norm is complete here too.
            wrong = check_gram(report[:-1].tolist(), self._terms.rank, self._squares[owner])
            share = sum(p.end - p.start for p in self._terms.pieces if p.owner == owner)
            if wrong is None and not (report[-1].min() >= 0 and report[-1].sum() <= share * 1.001):
                wrong = "weights that cannot be"
            if wrong is not None:
                member = self._terms.members[owner]
                raise Spoilt(member, f"{member.short} reports of its share {wrong}")
            self._reports[owner] = report
        self._weigh()

    def _weigh(self) -> None:
        """With the reports of all shares here: the same weights at all members, to the bit."""
        if len(self._reports) < len(self._owners):
            return
        n = range(len(self._terms.members))
        summed = [[0.0 for _ in n] for _ in [*n, None]]
        for owner in self._owners:
            for row, part in zip(summed, self._reports[owner].tolist(), strict=True):
                for j in n:
                    row[j] += part[j]
        gram = means(summed[:-1], self._counts)
        if self._terms.pooling in VECTOR:
            self._weights = weigh(gram, self._counts, self._terms.pooling)
        elif total := math.fsum(summed[-1]):
            self._weights = tuple(w / total for w in summed[-1])
        self._outliers = outliers(gram, self._counts, self._weights)
        self._weighed.set()

    # -- the wire ---------------------------------------------------------------------------------------------------------------
    def _encode(self, piece: Piece, part: Array) -> tuple[memoryview, Array]:
        """The part for the wire and as it will be seen; of a lossy wire with what is owed, and the rest becomes the new debt."""
        if self._owed is None or self.debt is None:
            return encode(self._terms.codec, part)
        where = slice(piece.start, piece.end)
        wanted = part + self._owed[where]
        raw, seen = encode(self._terms.codec, wanted)
        self.debt[where] = shortfall(wanted, seen)
        return raw, seen

    def _decode(self, piece: Piece, raw: memoryview) -> Array:
        return self._terms.codec.decode(raw, (piece.end - piece.start,))

    async def _send(self, phase: int, piece: Piece, rank: int, raw: memoryview) -> None:
        await self._lines[rank].sender.send(
            self._key(phase, piece, self._terms.rank), raw, dtype=self._terms.dtype, shape=(piece.end - piece.start,),
            codec=self._terms.codec.number, order=piece.number,
        )  # fmt: skip
        self.bytes_sent += len(raw)

    def _key(self, phase: int, piece: Piece, sender: int) -> Key:
        return (*self._attempt, phase, piece.number, sender)

    def _report_key(self, sender: int) -> Key:
        return (*self._attempt, REPORT, 0, sender)

    def _expectation(self, piece: Piece) -> Expectation:
        shape = (piece.end - piece.start,)
        return Expectation(self._terms.dtype, shape, self._terms.codec.number, self._terms.codec.wire_size(shape))


def _total(parts: list[Array]) -> Array:
    """The sum in rank order, in the vector's dtype.  It may overflow: then nobody's contribution is wrong, and the step shows it."""
    total: Array = parts[0].copy()
    with np.errstate(over="ignore", invalid="ignore"):
        for part in parts[1:]:
            np.add(total, part, out=total)
    return total


def _finite(part: Array) -> bool:
    """Whether every element is.  Mostly a sum tells; finite elements may add up to infinity, so then all are looked at."""
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(part.sum())) or bool(np.isfinite(part).all())


def _square(part: Array) -> float:
    """Sum of squares in float64."""
    with np.errstate(over="ignore", invalid="ignore"):
        return sum(float(np.dot(s, s)) for s in (part[i : i + SLICE].astype(np.float64) for i in range(0, len(part), SLICE)))
