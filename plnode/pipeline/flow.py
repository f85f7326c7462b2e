"""The lives of single microbatches at one replica, each as straight code: forward, hand on, wait, backward, return.

What orders them lies elsewhere: the device thread (oldest first), the slots (how many may come), the ledger (each move against its
table).  A task here holds at most one payload of each direction, gives every buffer back to the runner's pool, and raises `Broken`
or the error of the room that failed; `Generation` decides what that means.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import trio

from plnode.pipeline.broken import Broken
from plnode.pipeline.hops import Downstream, Edges, Upstream
from plnode.pipeline.ledger import Ledger
from plnode.pipeline.microbatch import BACKWARD, FORWARD, Input, Microbatch
from plnode.stage.jobs import Forwarded, NonFinite, Where
from plnode.stage.runner import StageRunner
from wire.identity import PeerId

Ids = npt.NDArray[np.int64]
Attest = Callable[[PeerId, int, Microbatch, int, int, float], object]
"""(worker, its stage, microbatch, FORWARD or BACKWARD, bytes, seconds waited): valid work of a neighbour is here."""


@dataclass(slots=True)
class Waiter:
    """A microbatch that waits for its gradient."""

    arrived: trio.Event
    payload: memoryview | None = None


class Flow:
    """Carries microbatches through this replica.

    `counted()` is called when the account has grown, `alive()` when a neighbour has given a sign of life, `attest` for each training
    activation and gradient that came and was finite.
    """

    def __init__(
        self,
        *,
        me: PeerId,
        stage: int,
        stages: int,
        runner: StageRunner,
        edges: Edges,
        ledger: Ledger,
        counted: Callable[[], None],
        alive: Callable[[], None],
        attest: Attest,
    ) -> None:
        self._me = me
        self._stage = stage
        self._last = stage == stages - 1
        self._runner = runner
        self._edges = edges
        self._ledger = ledger
        self._counted = counted
        self._alive = alive
        self._attest = attest
        self._waiters: dict[Microbatch, Waiter] = {}
        self.sent_forward_bytes = 0
        self.sent_backward_bytes = 0
        self.microbatch_s: float | None = None

    async def receive_gradients(self, hop: Downstream) -> None:
        while True:
            received = await hop.receiver.receive()
            _, _, _, microbatch = Microbatch.from_key(received.key)
            self._alive()
            self._edges.gradient_came(hop, received.key)
            waiter = self._waiters[microbatch]
            waiter.payload = received.buffer
            self._ledger.apply(microbatch, Input.GRADIENT_ARRIVED)
            waiter.arrived.set()

    async def train(self, microbatch: Microbatch, payload: memoryview | None, ids: Ids | None, hop: Upstream | None) -> None:
        number = (microbatch.step, microbatch.index)
        waited_s = hop.waited_s if hop is not None else 0.0  # before another one of the same neighbour arrives
        if not self._last:
            self._waiters[microbatch] = Waiter(trio.Event())
        self._ledger.apply(microbatch, Input.START_FORWARD)
        forward = await self._runner.forward(number, payload, ids)
        self._take_next(hop, payload)
        if self._last:
            gradient, ready = forward.gradient, forward.ready
            self.microbatch_s = forward.seconds
            self._finite(microbatch, forward, hop)
            self._attest_forward(microbatch, hop, waited_s)
            self._accumulated(microbatch, forward.loss_sum or 0.0)
        else:
            assert forward.payload is not None
            self._finite(microbatch, forward, hop)
            self._attest_forward(microbatch, hop, waited_s)
            self._ledger.apply(microbatch, Input.ACTIVATION_READY)
            sent = time.monotonic()
            down = await self._edges.send_forward(microbatch, forward.payload, forward.ready, wants_gradient=True)
            self.sent_forward_bytes += len(forward.payload)
            self._runner.release(forward.payload)
            self._ledger.apply(microbatch, Input.SENT_FORWARD)
            waiter = self._waiters[microbatch]
            await waiter.arrived.wait()
            del self._waiters[microbatch]
            assert waiter.payload is not None
            answered_s = time.monotonic() - sent
            down.observe_service(answered_s, down.outstanding)
            self._ledger.apply(microbatch, Input.START_BACKWARD)
            backward = await self._runner.backward(number, waiter.payload)
            self._runner.release(waiter.payload)
            self._alive()
            if backward.nonfinite is not None:
                raise self._not_finite(microbatch, backward.nonfinite, sent_by=down.peer_id)
            self._attest(down.peer_id, self._stage + 1, microbatch, BACKWARD, self._edges.gradient_bytes, answered_s)
            gradient, ready = backward.payload, backward.ready
            self.microbatch_s = forward.seconds + backward.seconds
            self._accumulated(microbatch, 0.0)
        if hop is not None:
            assert gradient is not None
            await self._edges.send_backward(hop, microbatch, gradient, ready)
            self.sent_backward_bytes += len(gradient)
            self._runner.release(gradient)
            self._ledger.apply(microbatch, Input.SENT_BACKWARD)

    async def evaluate(self, microbatch: Microbatch, payload: memoryview | None, ids: Ids | None, hop: Upstream | None) -> None:
        self._ledger.apply(microbatch, Input.START_FORWARD)
        forward = await self._runner.evaluate((microbatch.step, microbatch.index), payload, ids)
        self._take_next(hop, payload)
        self._finite(microbatch, forward, hop)
        if self._last:
            self._ledger.apply(microbatch, Input.EVALUATED, forward.loss_sum or 0.0)
        else:
            assert forward.payload is not None
            self._ledger.apply(microbatch, Input.ACTIVATION_READY)
            await self._edges.send_forward(microbatch, forward.payload, forward.ready, wants_gradient=False)
            self._runner.release(forward.payload)
            self._ledger.apply(microbatch, Input.SENT_EVALUATION)
        self._counted()

    def _take_next(self, hop: Upstream | None, payload: memoryview | None) -> None:
        """The forward has its input: the buffer is free, the replica that sent it may send another."""
        self._alive()
        if hop is not None and payload is not None:
            self._runner.release(payload)
            self._edges.grant(hop)

    def _attest_forward(self, microbatch: Microbatch, hop: Upstream | None, waited_s: float) -> None:
        if hop is not None:
            self._attest(hop.peer_id, self._stage - 1, microbatch, FORWARD, self._edges.activation_bytes, waited_s)

    def _accumulated(self, microbatch: Microbatch, loss_sum: float) -> None:
        self._ledger.apply(microbatch, Input.ACCUMULATED if self._stage > 0 else Input.ACCUMULATED_AT_SOURCE, loss_sum)
        self._counted()

    def _finite(self, microbatch: Microbatch, forward: Forwarded, hop: Upstream | None) -> None:
        if forward.nonfinite is not None:
            raise self._not_finite(microbatch, forward.nonfinite, sent_by=hop.peer_id if hop is not None else None)

    def _not_finite(self, microbatch: Microbatch, what: NonFinite, sent_by: PeerId | None) -> Broken:
        """What came in spoilt is the sender's fault, and another generation may be without it.  What was made here from finite values
        comes of the data or the weights: it would be made again."""
        received = what.where in (Where.INPUT, Where.GRADIENT_IN)
        where = f"microbatch {microbatch.index}, step {microbatch.step}, stage {self._stage}: {what}"
        return Broken(where, sent_by if received else self._me, fatal=not received)
