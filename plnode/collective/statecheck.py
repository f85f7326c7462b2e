"""After a join, and now and then: do the replicas of a stage hold the same state?

Each replica publishes, for a step and a seed (a round id), the root of its state and its sketch; `compare` asks the others.  Equal roots
end it.  Else the sketches give the distance of the worst tensor, and who is farther than the tolerance is named (JOIN-8): by comparing
with several others a replica also learns whether it is the odd one itself.

What the owner calls, on every replica at the same boundary: `await check.publish(step, seed, tensors)`, then `await check.compare(peers)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import trio
from torch import Tensor

from plnode.collective import sketch
from plnode.collective.statecut import Offload, laid_out
from plnode.collective.statemessages import SKETCH_BYTES, STATE_SKETCH, SketchAnswer, SketchAsk
from wire.errors import WireError
from wire.identity import PeerId
from wire.net import Net, Peer

PUBLISH_S = 60.0  # replicas reach a boundary within a round of each other


@dataclass(frozen=True, slots=True)
class Finding:
    """How `peer` compares: `difference` None when it does not answer (`reason`), relative 0.0 when equal to the bit."""

    peer: PeerId
    difference: sketch.Difference | None
    reason: str = ""

    @property
    def drifted(self) -> bool:
        return self.difference is not None and self.difference.relative > sketch.TOLERANCE


@dataclass(frozen=True, slots=True)
class _Published:
    step: int
    seed: bytes
    root: bytes
    entries: Mapping[str, bytes]
    packed: bytes


class StateCheck:
    """One a node; registers its protocol with `net`.  Keeps what was published last."""

    def __init__(self, net: Net, *, run: bytes, offload: Offload = trio.to_thread.run_sync) -> None:
        self._net, self._run, self._offload = net, run, offload
        self._stage: int | None = None
        self._last: _Published | None = None
        self._news = trio.Event()
        net.serve_calls(STATE_SKETCH, SketchAsk, self._on_ask)

    async def publish(self, stage: int, step: int, seed: bytes, tensors: Mapping[str, Tensor]) -> None:
        """Root and sketch of a state, `tensors` on the host.  Takes about 10 ns an element, in a thread."""

        def work() -> _Published:
            data = laid_out(tensors, run=self._run, stage=stage, step=step)
            entries = sketch.sketch(tensors, seed)
            return _Published(step, seed, data.root, entries, sketch.pack(entries))

        self._last = await self._offload(work)
        self._stage = stage
        self._news.set()
        self._news = trio.Event()

    async def compare(self, peers: Sequence[PeerId]) -> tuple[Finding, ...]:
        """Compare what was published last with what `peers` publish for the same step and seed; in their order."""
        mine = self._last
        if mine is None:
            raise ValueError("nothing was published yet")
        found: dict[PeerId, Finding] = {}

        async def one(peer: PeerId) -> None:
            found[peer] = await self._compare(peer, mine)

        async with trio.open_nursery() as nursery:
            for peer in peers:
                nursery.start_soon(one, peer)
        return tuple(found[peer] for peer in peers)

    async def _compare(self, peer_id: PeerId, mine: _Published) -> Finding:
        peer = self._net.peer(peer_id)
        if peer is None or self._stage is None:
            return Finding(peer_id, None, "not connected")
        data = b""
        try:
            for page in range(-(-len(mine.packed) // SKETCH_BYTES)):
                ask = SketchAsk(self._stage, mine.step, mine.seed, page)
                answer = await peer.call(STATE_SKETCH, ask, SketchAnswer, deadline_s=2 * PUBLISH_S)
                if answer.reason:
                    return Finding(peer_id, None, answer.reason)
                if answer.root == mine.root:
                    return Finding(peer_id, sketch.Difference("", 0.0))
                data += answer.sketch
        except WireError as error:
            return Finding(peer_id, None, str(error))
        theirs = sketch.unpack(data, mine.entries)
        if theirs is None:
            return Finding(peer_id, sketch.Difference("(other tensors)", float("inf")))
        return Finding(peer_id, sketch.compare(mine.entries, theirs))

    async def _on_ask(self, peer: Peer, ask: SketchAsk) -> SketchAnswer:
        with trio.move_on_after(PUBLISH_S):
            while self._last is None or self._last.step < ask.step:
                await self._news.wait()
        last = self._last
        if last is None or (last.step, last.seed, self._stage) != (ask.step, ask.seed, ask.stage):
            return SketchAnswer(b"", 0, b"", f"nothing was published for step {ask.step}")
        pages = -(-len(last.packed) // SKETCH_BYTES)
        return SketchAnswer(last.root, pages, last.packed[ask.page * SKETCH_BYTES : (ask.page + 1) * SKETCH_BYTES])
