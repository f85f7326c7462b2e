"""From a cut to now: the reduced vectors of the steps since, fetched in order and applied.

A vector is chunked and hashed like a state, so it comes from all donors that hold the same one, by the same plan.  Where two donors or
more offer the vector of a step, the root that most hold is taken and a tie is an error that names both sides: the replicas have come
apart, and whoever follows one of them cannot know which is right.

*When to give up.*  Following moves one vector a step.  It is worth less than a fresh cut when the vectors that are missing are together
larger than the state, or when a donor has let go of one: `Behind` says so, and the caller pulls again.  A node whose line takes longer
for a vector than a step lasts can never catch up by following, and cannot take part in exact rounds either.
Peak memory: one vector, whatever the distance (MEM-4).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import trio

from plnode.collective.statecut import Offload
from plnode.collective.statefetch import Fetch, read_table
from plnode.collective.statejoin import ASK_S
from plnode.collective.statemessages import UPDATES, UpdateAsk, UpdateOffer, UpdateRoot
from plnode.collective.statepull import Plan
from wire.errors import WireError
from wire.identity import PeerId
from wire.net import Net

POLL_S = 0.5  # against steps of seconds
BATCH = 8  # vectors between two questions: saves round trips, and donors still let go of what is behind us


class Behind(Exception):
    """Take a fresh cut: the text says whether that is cheaper or the only way."""


class Disagreement(Exception):
    """Donors hold different vectors of one step and no majority; `sides` are those who hold each."""

    def __init__(self, step: int, sides: tuple[tuple[PeerId, ...], ...]) -> None:
        names = " against ".join("+".join(peer.short for peer in side) for side in sides)
        super().__init__(f"the reduced vector of step {step} differs: {names}")
        self.step, self.sides = step, sides


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowTerms:
    """`apply(step, vector)`: apply the reduced vector of `step` to a state that has `step` steps applied.  `level(step)` is called
    whenever no donor is ahead; True ends the following.  `state_bytes`: what a fresh cut would cost."""

    stage: int
    donors: Sequence[PeerId]
    state_bytes: int
    apply: Callable[[int, memoryview], Awaitable[None]]
    level: Callable[[int], bool] = lambda step: True
    offload: Offload = trio.to_thread.run_sync


class Follower:
    """`moved_bytes` and `applied` count what was done."""

    def __init__(self, net: Net, terms: FollowTerms) -> None:
        self._net, self._terms = net, terms
        self.moved_bytes = 0
        self.applied = 0

    async def run(self, step: int) -> int:
        """Follow from a state with `step` steps applied; the step that was reached.  Raises Behind, Disagreement, NoHolder."""
        try:
            while True:
                offers = await self._ask(step)
                at = max((offer.at for offer in offers.values()), default=step)
                if at <= step:
                    if offers and self._terms.level(step):
                        return step
                    await trio.sleep(POLL_S)
                    continue
                if (agreed := self._agreed(step, offers)) is None:
                    await trio.sleep(POLL_S)  # the step is being applied right now
                    continue
                cost = (at - step) * agreed[0].size_bytes
                if cost > self._terms.state_bytes:
                    raise Behind(f"{at - step} vectors of together {cost:,} bytes; a fresh cut has {self._terms.state_bytes:,}")
                for _ in range(BATCH):
                    await self._terms.apply(step, await self._fetch(*agreed))
                    self.applied += 1
                    step += 1
                    if (agreed := self._agreed(step, offers)) is None:
                        break
        finally:
            with trio.move_on_after(1.0, shield=True):
                await self._ask(step, done=True)

    async def _ask(self, step: int, *, done: bool = False) -> dict[PeerId, UpdateOffer]:
        offers: dict[PeerId, UpdateOffer] = {}
        lost: list[str] = []

        async def one(donor: PeerId) -> None:
            peer = self._net.peer(donor)
            if peer is None:
                return
            try:
                offer = await peer.call(UPDATES, UpdateAsk(self._terms.stage, step, done), UpdateOffer, deadline_s=ASK_S)
            except WireError:
                return
            if offer.lost:
                lost.append(f"{donor.short}: {offer.reason}")
            else:
                offers[donor] = offer

        async with trio.open_nursery() as nursery:
            for donor in self._terms.donors:
                nursery.start_soon(one, donor)
        if not done and not offers:
            raise Behind("; ".join(lost) or "no donor answers")
        return offers

    def _agreed(self, step: int, offers: dict[PeerId, UpdateOffer]) -> tuple[UpdateRoot, tuple[PeerId, ...]] | None:
        held: dict[UpdateRoot, list[PeerId]] = {}
        for donor, offer in sorted(offers.items()):
            for root in offer.updates:
                if root.step == step:
                    held.setdefault(root, []).append(donor)
        if not held:
            return None
        order = sorted(held, key=lambda root: -len(held[root]))
        if len(order) > 1 and len(held[order[0]]) == len(held[order[1]]):
            raise Disagreement(step, tuple(tuple(held[root]) for root in order))
        return order[0], tuple(held[order[0]])

    async def _fetch(self, root: UpdateRoot, holders: tuple[PeerId, ...]) -> memoryview:
        size, chunk = root.size_bytes, root.chunk_bytes
        if size > self._terms.state_bytes or chunk < 1 or size < 1:
            raise Behind(f"a vector of {size:,} bytes in chunks of {chunk:,} does not belong to this stage")
        table = await read_table(self._net, holders, root.root, size, chunk)
        vector = memoryview(bytearray(size))

        def write(index: int, data: memoryview) -> None:
            vector[index * chunk : index * chunk + data.nbytes] = data

        fetch = Fetch(self._net, Plan(table, size, chunk, holders), root.root, write, offload=self._terms.offload)
        await fetch.run()
        self.moved_bytes += fetch.moved_bytes
        return vector
