"""Members that all-reduce over production nets in memory, under a mock clock."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import trio

from plnode.collective.allreduce import Pooled, Reducer, Spoilt, Vector
from plnode.collective.messages import REDUCE
from tests.wire.net.worlds import World, member
from wire.identity import Identity, PeerId
from wire.net import Net
from wire.tensor import DType


@dataclass
class Group:
    nets: list[Net]
    reducers: list[Reducer] = field(default_factory=list)
    pieces: int = 0  # that have arrived, at all members
    on_piece: Callable[[], None] = lambda: None

    def _piece(self) -> None:
        self.pieces += 1
        self.on_piece()

    @property
    def ids(self) -> list[PeerId]:
        return [net.peer_id for net in self.nets]

    def make(self, elements: int, *, dtype: DType = DType.fp32, own: Sequence[dict[str, Any]] | None = None, **settings: Any) -> None:
        """A reducer at every member; `own`: settings of each alone."""
        for rank, net in enumerate(self.nets):
            mine = settings | (own[rank] if own else {})
            self.reducers.append(Reducer(net, 1, self.ids, dtype, elements, self._piece, **mine))

    async def reduce(self, vectors: Sequence[Vector], step: int = 0, *, only: Sequence[int] | None = None, **settings: Any) -> list[Pooled]:
        """One round of all (or `only` some) members; vectors are replaced."""
        found: dict[int, Pooled] = {}

        async def one(rank: int) -> None:
            found[rank] = await self.reducers[rank].reduce(vectors[rank], step, **settings)

        async with trio.open_nursery() as nursery:
            for rank in range(len(self.nets)) if only is None else only:
                nursery.start_soon(one, rank)
        return [found[rank] for rank in sorted(found)]

    async def broken(self, vectors: Sequence[Vector], step: int = 0, *, after: int, **settings: Any) -> None:
        """A round that all members break off when `after` pieces have arrived in all."""
        most = self.pieces + after
        with trio.CancelScope() as scope:
            self.on_piece = lambda: scope.cancel() if self.pieces >= most else None
            await self.reduce(vectors, step, **settings)
        self.on_piece = lambda: None
        assert scope.cancelled_caught, "the round has fewer pieces"

    async def settled(self) -> None:
        """Until withdrawals have crossed the net and all slots are gone."""
        for _ in range(100):
            await trio.sleep(0.01)
            if not any(reducer.open for reducer in self.reducers):
                return


@asynccontextmanager
async def group(members: int, *, seed: int = 1, apart: Sequence[tuple[int, int]] = ()) -> AsyncIterator[Group]:
    """`members` nets in rank order, connected but for the pairs in `apart`."""
    rng = random.Random(seed)
    identities = sorted((Identity(rng.randbytes(32)) for _ in range(members)), key=lambda i: i.peer_id)
    world = World(rng=rng)
    async with AsyncExitStack() as stack:
        nets = [
            await stack.enter_async_context(member(world, f"10.0.0.{rank + 1}", identity=identity))
            for rank, identity in enumerate(identities)
        ]
        for rank, net in enumerate(nets):
            net.serve_channel(REDUCE, step_field=0)
            for other in range(rank):
                if (other, rank) not in apart:
                    await net.dial(nets[other].addresses[0])
        made = Group(nets)
        yield made
        for reducer in made.reducers:
            reducer.close()


def gradients(members: int, elements: int, seed: int = 0, dtype: Any = np.float32) -> list[Any]:
    """One random vector each, of very different magnitudes within."""
    rng = np.random.default_rng(seed)
    scale = np.exp(rng.standard_normal(elements) * 2)
    return [(rng.standard_normal(elements) * scale).astype(dtype) for _ in range(members)]


def in_rank_order(vectors: Sequence[Any]) -> Any:
    total = vectors[0].copy()
    for vector in vectors[1:]:
        total += vector
    return total


def leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield from leaves(one)
    else:
        yield error


async def accused(round_: Callable[[], Any]) -> set[Any]:
    """Whom the members name in a round that fails."""
    with pytest.raises(ExceptionGroup) as failed, trio.fail_after(60):
        await round_()
    return {error.member for error in leaves(failed.value) if isinstance(error, Spoilt)}
