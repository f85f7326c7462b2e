"""A stage without a device, for schedules: the production order of jobs, virtual time, and gradients that count.

Everything around it is production code: the network over pipes in memory, edges, flow, ledger, rounds and all-reduce.  A job takes a
random virtual time.  The "gradient" is a vector with one element a microbatch of the step's set; a backward adds one to its
element.  After the all-reduce of a step every element must be exactly one: each microbatch counted once, none lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import trio

from plnode.collective.deadline import Deadline
from plnode.collective.group import Rounds, StageGroup
from plnode.collective.messages import REDUCE
from plnode.pipeline.generation import Applied, Generation, Work
from plnode.pipeline.hops import BOUNDARY
from plnode.pipeline.ledger import Ledger, StepPlan
from plnode.stage.boundary import DenseBoundary
from plnode.stage.jobs import Backward, Forwarded, Ready, Stepped
from plnode.stage.policy import JobView, Kind, Moment, Order, choose
from plnode.swarm.roster import Roster
from tests.wire.net.worlds import MemoryTransport, World, wall_time
from wire.address import Address, Scope
from wire.identity import Identity
from wire.net import Net, open_net
from wire.tensor import DType

RUN = bytes(range(32))


class VirtualRunner:
    """Has the methods of `StageRunner` that a generation uses.  `counted` holds each step's vector after the all-reduce."""

    gradient_dtype = DType.fp32

    def __init__(
        self, boundary_in: DenseBoundary | None, boundary_out: DenseBoundary | None, per_step: int, order: Order, random: Random
    ) -> None:
        self._in, self._out = boundary_in, boundary_out
        self._order = Order(order.backward_first, order.in_index_order, boundary_out is None)
        self._random = random
        self._jobs: dict[int, tuple[JobView, trio.Event]] = {}
        self._news = trio.Event()
        self._sequence = 0
        self._gradient = np.zeros(per_step, np.float32)
        self.gradient_elements = per_step
        self.open_step = 0
        self.accumulated = 0
        self.counted: list[list[float]] = []
        self.order: list[int] = []

    async def device(self) -> None:
        while True:
            decision = choose([view for view, _ in self._jobs.values()], Moment(self.open_step, self.accumulated), self._order)
            if decision is None:
                await self._news.wait()
                continue
            await trio.sleep(self._random.random())
            view, done = self._jobs.pop(decision.job.sequence)
            if view.kind is Kind.BACKWARD or (view.kind is Kind.FORWARD and self._out is None):
                self._gradient[view.index] += 1
                self.accumulated += 1
                self.order.append(view.index)
            elif view.kind is Kind.STEP:
                self.counted.append(self._gradient.tolist())
                self._gradient[:] = 0
                self.accumulated = 0
                self.open_step += 1
            done.set()

    async def _job(self, kind: Kind, step: int = 0, index: int = 0) -> None:
        self._sequence += 1
        done = trio.Event()
        self._jobs[self._sequence] = (JobView(self._sequence, kind, step, index), done)
        self._news.set()
        self._news = trio.Event()
        await done.wait()

    def _payload(self, size: int) -> tuple[memoryview, Ready]:
        ready = Ready(size)
        ready.advance(size)
        return memoryview(bytearray(size)), ready

    async def forward(self, mb: tuple[int, int], payload: memoryview | None, ids: Any) -> Forwarded:
        assert (payload is None) == (self._in is None)
        await self._job(Kind.FORWARD, *mb)
        out = self._payload(self._out.forward_bytes) if self._out is not None else None
        back = self._payload(self._in.backward_bytes) if self._out is None and self._in is not None else None
        return Forwarded(
            payload=out[0] if out else None,
            ready=(out or back or (None, None))[1],
            gradient=back[0] if back else None,
            loss_sum=float(mb[1] + 1) if self._out is None else None,
            seconds=0.1,
            kept_graph=True,
        )

    async def evaluate(self, mb: tuple[int, int], payload: memoryview | None, ids: Any) -> Forwarded:
        await self._job(Kind.EVALUATE, *mb)
        out = self._payload(self._out.forward_bytes) if self._out is not None else None
        loss = 1.0 if self._out is None else None
        payload, ready = out or (None, None)
        return Forwarded(payload=payload, ready=ready, gradient=None, loss_sum=loss, seconds=0.1, kept_graph=False)

    async def backward(self, mb: tuple[int, int], gradient: memoryview) -> Backward:
        await self._job(Kind.BACKWARD, *mb)
        back = self._payload(self._in.backward_bytes) if self._in is not None else None
        payload, ready = back or (None, None)
        return Backward(payload=payload, ready=ready, seconds=0.1, finite=True, recomputed=False)

    async def export_gradients(self, out: memoryview) -> None:
        await self._job(Kind.EXPORT)
        out[:] = memoryview(self._gradient.data).cast("B")

    async def import_gradients(self, view: memoryview) -> None:
        await self._job(Kind.IMPORT)
        self._gradient[:] = np.frombuffer(view, np.float32)

    async def step(self, step: int) -> Stepped:
        await self._job(Kind.STEP)
        return Stepped(grad_norm=1.0, seconds=0.1, skipped_nonfinite=False)

    def acquire(self, size_bytes: int) -> memoryview:
        return memoryview(bytearray(size_bytes))

    def release(self, buffer: memoryview) -> None:
        assert buffer.nbytes


@dataclass(slots=True)
class Replica:
    stage: int
    runner: VirtualRunner
    ledger: Ledger
    generation: Generation
    applied: list[Applied] = field(default_factory=list)


async def run_generation(
    *,
    stages: int,
    replicas: Sequence[int],
    train: int,
    evaluate: int,
    steps: int,
    dim: int,
    seed: int,
    capacity: int = 1 << 20,
) -> list[Replica]:
    """Run a generation over `steps` steps with `replicas[s]` nodes at stage s; payloads grow with `dim`."""
    random = Random(seed)
    world = World(capacity=capacity, rng=random, jitter_s=0.05)
    boundary = DenseBoundary(batch=2, seq_len=8, dim=dim, dtype=DType.fp32, id_dtype=DType.uint16)
    identities = sorted((Identity(random.randbytes(32)) for _ in range(sum(replicas))), key=lambda i: i.peer_id)
    held = [stage for stage in range(stages) for _ in range(replicas[stage])]
    random.shuffle(held)
    members = sorted(((i.peer_id, s) for i, s in zip(identities, held, strict=True)), key=lambda e: (e[1], e[0]))
    roster = Roster(RUN, 1, 0, tuple(members))
    plan = _plan(train, evaluate, steps)
    work = Work(
        stages=stages,
        steps=steps,
        plan=plan,
        train_ids=lambda step, index: np.zeros((2, 9), np.int64),
        heldout_ids=lambda index: np.zeros((2, 9), np.int64),
        tokens_per_microbatch=16,
    )
    found: list[Replica] = []
    async with AsyncExitStack() as stack:
        nets: list[Net] = []
        for number, identity in enumerate(identities):
            host = f"10.0.0.{number + 1}"
            nets.append(
                await stack.enter_async_context(
                    open_net(
                        identity, run=RUN, listen=[Address(host, 4001)], scope=Scope.LAN, transport=MemoryTransport(world, host),
                        rng=Random(random.random()), wall_time=wall_time,
                    )
                )
            )  # fmt: skip
        rounds = []
        for net in nets:
            net.serve_channel(BOUNDARY, step_field=0)
            net.serve_channel(REDUCE, step_field=0)
            rounds.append(Rounds(net))
        for number, net in enumerate(nets):
            for other, stage in zip(nets[:number], held, strict=False):
                if abs(stage - held[number]) <= 1:
                    await net.dial(other.addresses[0].with_peer(other.peer_id))
        async with trio.open_nursery() as nursery:
            for net, stage, ear in zip(nets, held, rounds, strict=True):
                replica = _replica(net, identities, roster, stage, stages, work, boundary, train, random)
                ear.attach(replica.generation._group)
                nursery.start_soon(replica.runner.device)
                found.append(replica)
            async with trio.open_nursery() as generations:
                for replica in found:
                    generations.start_soon(replica.generation.run)
            nursery.cancel_scope.cancel()
    return found


def _plan(train: int, evaluate: int, steps: int) -> Any:
    def plan(step: int) -> StepPlan:
        return StepPlan(step, train if step < steps else 0, evaluate if step == steps or step % 2 == 0 else 0)

    return plan


def _replica(
    net: Net,
    identities: list[Identity],
    roster: Roster,
    stage: int,
    stages: int,
    work: Work,
    boundary: DenseBoundary,
    train: int,
    random: Random,
) -> Replica:
    identity = next(i for i in identities if i.peer_id == net.peer_id)
    before, after = (boundary if stage > 0 else None), (boundary if stage < stages - 1 else None)
    order = Order(in_index_order=roster.one_replica_a_stage)
    runner = VirtualRunner(before, after, train, order, Random(random.random()))
    ledger = Ledger()
    group = StageGroup(net, identity, roster, stage, ledger.account, work.plan, call_s=lambda: 60.0)
    applied: list[Applied] = []

    async def no_snapshot(step: int) -> None:
        await trio.lowlevel.checkpoint()

    generation = Generation(
        net=net,
        roster=roster,
        stage=stage,
        work=work,
        runner=runner,  # type: ignore[arg-type]
        boundary_in=before,
        boundary_out=after,
        group=group,
        ledger=ledger,
        random=Random(random.random()),
        on_applied=applied.append,
        on_broken=lambda broken: None,
        snapshot=no_snapshot,
        silence=Deadline(floor_s=600.0, ceiling_s=600.0),
        attest=lambda *work: None,
    )
    return Replica(stage, runner, ledger, generation, applied)
