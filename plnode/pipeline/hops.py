"""The edges of one replica in one generation: tensor channels to the replicas before and after it.

Credits are posted slots and nothing else.  To every replica before us we keep `AHEAD` unkeyed slots open ("your next microbatch");
one is renewed when a microbatch's forward has left the queue of the device, so that what waits here is bounded by
`AHEAD` × replicas.  For the gradient of every activation that we send on, a keyed slot is posted before it leaves: a gradient never
waits for credit, hence the backward direction can always drain, whatever the forward direction waits for.  That is why no
schedule deadlocks.

With one replica a stage, contributions must be summed in index order at every stage for a result that is equal to one process to
the bit.  Two forwards that end in one tick of the loop may have their tasks resumed in either order, so a microbatch is put into
the queue for the next hop when it is admitted, in order, and the device holds accumulating jobs back (`Order.in_index_order`).
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import trio

from plnode.pipeline.microbatch import BACKWARD, FORWARD, Microbatch
from plnode.pipeline.route import Candidate, choose
from plnode.stage.boundary import DenseBoundary
from plnode.stage.jobs import Ready
from plnode.stage.runner import StageRunner
from wire.errors import WireError
from wire.identity import PeerId
from wire.messages import Key
from wire.net import Peer, ReadyBytes, TensorReceiver, TensorSender
from wire.tensor import Expectation

BOUNDARY = "boundary/1"
AHEAD = 2
"""Unkeyed slots a sender: one microbatch may arrive while the one before it waits for the device."""
SMOOTHING = 0.2  # weight of a new service time; about the last ten microbatches count


class HopLost(Exception):
    """Sending to this very neighbour failed."""

    def __init__(self, peer_id: PeerId, cause: WireError) -> None:
        super().__init__(str(cause))
        self.peer_id = peer_id
        self.cause = cause


def channel_name(generation: int, direction: int) -> bytes:
    return b"%s%d" % (b"gradient/" if direction == BACKWARD else b"activation/", generation)


@dataclass(slots=True)
class Downstream:
    """One replica of the next stage."""

    peer: Peer
    sender: TensorSender
    receiver: TensorReceiver
    outstanding: int = 0
    service_s: float | None = None
    goodput_bps: float | None = None
    awaited: set[Key] = field(default_factory=set)

    @property
    def peer_id(self) -> PeerId:
        return self.peer.peer_id

    def observe_service(self, seconds: float, ahead: int) -> None:
        """A gradient came back `seconds` after its activation was handed over, with `ahead` others before it."""
        one = seconds / (ahead + 1)
        self.service_s = one if self.service_s is None else (1 - SMOOTHING) * self.service_s + SMOOTHING * one

    def observe_transfer(self, size_bytes: int, seconds: float) -> None:
        if seconds > 0:
            rate = size_bytes / seconds
            self.goodput_bps = rate if self.goodput_bps is None else (1 - SMOOTHING) * self.goodput_bps + SMOOTHING * rate


@dataclass(slots=True)
class Upstream:
    """One replica of the stage before.  `waited_s`: between its two newest activations, or from the opening to its first."""

    peer_id: PeerId
    sender: TensorSender
    receiver: TensorReceiver
    came_at: float = field(default_factory=time.monotonic)
    waited_s: float = 0.0

    def came(self) -> None:
        """An activation is here."""
        now = time.monotonic()
        self.waited_s, self.came_at = now - self.came_at, now


class Edges:
    """Both edges of a replica.  `boundary_in`/`boundary_out` are None at the ends of the pipeline."""

    def __init__(
        self,
        generation: int,
        stage: int,
        runner: StageRunner,
        boundary_in: DenseBoundary | None,
        boundary_out: DenseBoundary | None,
        may_receive: Callable[[Microbatch], bool],
        random: Random,
        *,
        in_index_order: bool,
    ) -> None:
        self.generation = generation
        self.stage = stage
        self._runner = runner
        self._in = boundary_in
        self._out = boundary_out
        self._may_receive = may_receive
        self._random = random
        self._in_index_order = in_index_order
        self.downstream: dict[PeerId, Downstream] = {}
        self.upstream: dict[PeerId, Upstream] = {}
        self._queue: list[Microbatch] = []
        self._slots_changed = trio.Event()

    # -- opening -------------------------------------------------------------------------------------------------------------
    def add_downstream(self, peer: Peer) -> None:
        awaited: set[Key] = set()

        def expect(key: Key) -> Expectation | None:
            return self._out.expectation(BACKWARD) if self._out is not None and key in awaited else None

        hop = Downstream(
            peer,
            peer.sender(BOUNDARY, channel_name(self.generation, FORWARD)),
            peer.receiver(BOUNDARY, channel_name(self.generation, BACKWARD), expect),
            awaited=awaited,
        )
        hop.sender.on_slots = self._wake
        self.downstream[peer.peer_id] = hop

    def add_upstream(self, peer: Peer) -> None:
        def expect(key: Key) -> Expectation | None:
            try:
                generation, boundary, direction, microbatch = Microbatch.from_key(key)
            except ValueError:
                return None
            fits = (generation, boundary, direction) == (self.generation, self.stage - 1, FORWARD)
            return self._in.expectation(FORWARD) if self._in is not None and fits and self._may_receive(microbatch) else None

        hop = Upstream(
            peer.peer_id,
            peer.sender(BOUNDARY, channel_name(self.generation, BACKWARD)),
            peer.receiver(BOUNDARY, channel_name(self.generation, FORWARD), expect),
        )
        self.upstream[peer.peer_id] = hop
        for _ in range(AHEAD):
            self.grant(hop)

    def grant(self, hop: Upstream) -> None:
        """Open one more slot to a replica before us."""
        assert self._in is not None
        hop.receiver.post(self._runner.acquire(self._in.forward_bytes))

    def close(self) -> None:
        for down in self.downstream.values():
            down.sender.on_slots = None
            down.sender.close()
            down.receiver.close()
        for up in self.upstream.values():
            up.sender.close()
            up.receiver.close()

    @property
    def activation_bytes(self) -> int:
        """Of one that comes from the stage before; 0 at the first."""
        return self._in.forward_bytes if self._in is not None else 0

    @property
    def gradient_bytes(self) -> int:
        """Of one that comes from the stage after; 0 at the last."""
        return self._out.backward_bytes if self._out is not None else 0

    @property
    def credits(self) -> int:
        """Microbatches that the next stage would take from us now."""
        return sum(hop.sender.free_slots() for hop in self.downstream.values())

    def enlist(self, microbatch: Microbatch) -> None:
        """A microbatch was admitted here.  Where order counts it takes its place in the queue now, not when its forward is done."""
        if self._in_index_order and self._out is not None:
            bisect.insort(self._queue, microbatch)

    # -- sending on --------------------------------------------------------------------------------------------------------------
    async def send_forward(
        self, microbatch: Microbatch, payload: memoryview, ready: Ready | None, *, wants_gradient: bool
    ) -> Downstream:
        """Hand an activation to the replica that is cheapest now; returns it when it has acknowledged every byte.

        Oldest microbatch first when several wait for credit.  Raises HopLost; a cancel drops the send.
        """
        hop = await self._take_slot(microbatch, len(payload))
        key = microbatch.key(self.generation, self.stage, FORWARD)
        if wants_gradient:
            self._await_gradient(hop, microbatch)
        hop.outstanding += 1
        started = time.monotonic()
        try:
            assert self._out is not None
            shape = self._out.expectation(FORWARD)
            await hop.sender.send(
                key, payload, dtype=shape.dtype, shape=shape.shape, codec=shape.codec, order=_age(microbatch), ready=_progress(ready)
            )
        except WireError as failed:
            raise HopLost(hop.peer_id, failed) from failed
        hop.observe_transfer(len(payload), time.monotonic() - started)
        if not wants_gradient:
            hop.outstanding -= 1
        return hop

    async def send_backward(self, hop: Upstream, microbatch: Microbatch, payload: memoryview, ready: Ready | None) -> None:
        """Return an input gradient along the route.  The slot for it was posted before the activation left."""
        assert self._in is not None
        shape = self._in.expectation(BACKWARD)
        key = microbatch.key(self.generation, self.stage - 1, BACKWARD)
        try:
            await hop.sender.send(
                key, payload, dtype=shape.dtype, shape=shape.shape, codec=shape.codec, order=_age(microbatch), ready=_progress(ready)
            )
        except WireError as failed:
            raise HopLost(hop.peer_id, failed) from failed

    def gradient_came(self, hop: Downstream, key: Key) -> None:
        hop.awaited.discard(key)
        hop.outstanding -= 1

    def _await_gradient(self, hop: Downstream, microbatch: Microbatch) -> None:
        assert self._out is not None
        key = microbatch.key(self.generation, self.stage, BACKWARD)
        hop.awaited.add(key)
        hop.receiver.post(self._runner.acquire(self._out.backward_bytes), key=key)

    async def _take_slot(self, microbatch: Microbatch, size_bytes: int) -> Downstream:
        if microbatch not in self._queue:
            bisect.insort(self._queue, microbatch)
        try:
            while True:
                changed = self._slots_changed
                if self._queue[0] == microbatch:
                    peer = choose(self._candidates(), size_bytes, self._random.choice)
                    if peer is not None:
                        return self.downstream[peer]
                await changed.wait()
        finally:
            self._queue.remove(microbatch)
            self._wake()

    def _candidates(self) -> list[Candidate]:
        return [
            Candidate(h.peer_id, h.sender.free_slots(), h.outstanding, h.service_s, h.peer.rtt_s, h.goodput_bps)
            for h in self.downstream.values()
        ]

    def _wake(self) -> None:
        self._slots_changed.set()
        self._slots_changed = trio.Event()


def _progress(ready: Ready | None) -> ReadyBytes | None:
    """A payload that is still leaving the device, as the wire wants to hear of it; None when it is complete."""
    if ready is None or ready.complete:
        return None
    progress = ReadyBytes()
    ready.watch(progress.advance)
    return progress


def _age(microbatch: Microbatch) -> int:
    """Order within the boundary class on the wire: the oldest microbatch first."""
    return microbatch.step << 20 | min(microbatch.index, (1 << 20) - 1)
