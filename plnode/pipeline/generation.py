"""One generation of the run at one replica: microbatches flow, steps are agreed and applied, until the run ends or breaks.

Every microbatch is one task that reads like its life: forward, hand on, wait for the gradient, backward, return the gradient.
The ledger checks each move against its table; the device thread orders the work; slots bound it.  One more task walks the steps:
it waits until the stage's accounts cover the step's set, agrees on the round, adds the gradients of the replicas up, applies.

Weights and data are tied by the step number alone: a microbatch of step t is computed with the weights before update t, at every
stage, because the device runs no forward of step t + 1 before step t is applied, and step t is not applied before everything of
its set - held-out microbatches included - has been computed here.

If anything breaks (a member is lost, a deadline passes, a value is not finite) the generation is broken off here, everybody else is
told, and the caller starts again from snapshots.  Nothing in here ever goes on with a guess.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import TypeVar

import numpy as np
import trio

from plnode.collective.accounts import summed
from plnode.collective.allreduce import Reducer, Spoilt
from plnode.collective.deadline import Deadline
from plnode.collective.group import Agreement, RoundError, StageGroup
from plnode.collective.messages import REDUCE
from plnode.pipeline.broken import Broken, short
from plnode.pipeline.flow import Attest, Flow, Ids
from plnode.pipeline.hops import BOUNDARY, Edges, HopLost, Upstream
from plnode.pipeline.ledger import Ledger, LedgerError, StepPlan
from plnode.pipeline.microbatch import Microbatch, era
from plnode.pipeline.window import Window
from plnode.stage.boundary import DenseBoundary
from plnode.stage.errors import BadPayload, RunnerFailed, StageError, StageMemoryError
from plnode.stage.runner import StageRunner
from plnode.swarm.roster import Roster
from wire.errors import WireError
from wire.identity import PeerId
from wire.net import Net, Peer

Fault = TypeVar("Fault", bound=BaseException)

DRIFT = 2
"""Steps that a microbatch may be ahead of the replica that gets it.  A replica without work in step t may still be in the round of
t - 1 (it waits for a piece from a third member) while another one has done all of t and the origins have gone on to t + 1.  They get
no further: t + 1 can only end when t is applied everywhere at that stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What the run asks of this replica; all from the manifest."""

    stages: int
    steps: int
    plan: Callable[[int], StepPlan]
    train_ids: Callable[[int, int], Ids]  # (step, index) -> ids (B, L+1)
    heldout_ids: Callable[[int], Ids]
    tokens_per_microbatch: int
    wire: str = "fp32"  # how gradients travel between replicas, and how they are pooled (collective/allreduce.py)
    pooling: str = "mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """A step is over at this replica.  Losses are known on the last stage only; `loss` and `heldout` in nats a token."""

    step: int
    trained: bool
    loss: float | None
    heldout: float | None
    heldout_tokens: int
    grad_norm: float | None
    seconds: float
    outliers: tuple[PeerId, ...] = ()  # replicas of this stage whose gradient robust pooling weighed down


class Generation:
    """Runs the generation `roster` at this replica of `stage`."""

    def __init__(
        self,
        *,
        net: Net,
        roster: Roster,
        stage: int,
        work: Work,
        runner: StageRunner,
        boundary_in: DenseBoundary | None,
        boundary_out: DenseBoundary | None,
        group: StageGroup,
        ledger: Ledger,
        random: Random,
        on_applied: Callable[[Applied], None],
        on_broken: Callable[[Broken], None],
        snapshot: Callable[[int], Awaitable[None]],
        silence: Deadline,
        attest: Attest,
    ) -> None:
        self._net = net
        self._roster = roster
        self._stage = stage
        self._work = work
        self._runner = runner
        self._group = group
        self.ledger = ledger
        self._on_applied = on_applied
        self._on_broken = on_broken
        self._longest_gap_s = 0.0
        group.on_change = self._live
        self._silence = silence
        self._origins = roster.group(0)
        self._origin = self._origins.index(net.peer_id) if stage == 0 else -1
        self._last = stage == work.stages - 1
        self.edges = Edges(
            roster.generation, stage, runner, boundary_in, boundary_out, self._may_receive, random,
            in_index_order=roster.one_replica_a_stage,
        )  # fmt: skip
        self._window = Window(work.stages, work.plan(roster.step).total or 1)
        self._window_changed = trio.Event()
        self._in_window = 0
        self._broken: Broken | None = None
        self._scope = trio.CancelScope()
        self._nursery: trio.Nursery | None = None
        self._reducer: Reducer | None = None
        self._alive = trio.Event()
        self._snapshot = snapshot
        self.step = roster.step
        self.flow = Flow(
            me=net.peer_id,
            stage=stage,
            stages=work.stages,
            runner=runner,
            edges=self.edges,
            ledger=ledger,
            counted=group.account_changed,
            alive=self._live,
            attest=attest,
        )

    # -- the outside -----------------------------------------------------------------------------------------------------------
    def break_off(self, broken: Broken) -> None:
        """End the generation from outside: a member was lost, or another node said so.  The first reason counts, and is told at once."""
        if self._broken is None:
            self._broken = broken
            self._on_broken(broken)
            self._scope.cancel()

    def waits_for(self) -> str:
        """What this replica waits for now, in words."""
        plan = self._work.plan(self.step)
        missing = self._group.waits_for(plan)
        under_way = self.ledger.under_way()
        if missing:
            return f"microbatches {_listed(missing)} of step {self.step} are not done at stage {self._stage}"
        if under_way:
            oldest, state = next(iter(under_way.items()))
            return f"microbatch {oldest.index} of step {oldest.step} ({state.name.lower().replace('_', ' ')})"
        if self._stage > 0:
            return f"activations of step {self.step} from stage {self._stage - 1}"
        return f"the replicas of stage {self._stage} to agree on step {self.step}"

    @property
    def in_flight(self) -> int:
        return len(self.ledger.under_way())

    async def run(self) -> None:
        """Train until the run is complete.  Raises `Broken`; a cancel leaves the runner with a step half done (discard it)."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    self._nursery = nursery
                    nursery.start_soon(self._watch_silence)
                    nursery.start_soon(self._guarded, None, self._work_through, nursery)
        finally:
            self.edges.close()
            if self._reducer is not None:
                self._reducer.close()
        if self._broken is not None:
            raise self._broken

    async def _work_through(self, nursery: trio.Nursery) -> None:
        self._open()
        for down in self.edges.downstream.values():
            nursery.start_soon(self._guarded, down.peer_id, self.flow.receive_gradients, down)
        for up in self.edges.upstream.values():
            nursery.start_soon(self._guarded, up.peer_id, self._receive_activations, up)
        await self._steps()
        nursery.cancel_scope.cancel()

    async def _guarded(self, peer_id: PeerId | None, task: Callable[..., Awaitable[None]], *args: object) -> None:
        """Run a task; whatever it meets that ends a generation is turned into the one reason why.  `peer_id`: whom it deals with."""
        try:
            await task(*args)
        except Broken as broken:
            self.break_off(broken)
        except WireError as failed:
            self._lost(peer_id, failed)
        except RoundError as wrong:
            self.break_off(Broken(str(wrong), wrong.culprit))
        except BadPayload as wrong:
            self.break_off(Broken(f"{short(peer_id)} sent a payload that cannot be read: {wrong}", peer_id))
        except HopLost as lost:
            self._lost(lost.peer_id, lost.cause)
        except (StageMemoryError, RunnerFailed) as failed:
            self.break_off(Broken(f"the device of stage {self._stage}: {failed}", self._net.peer_id, failed=failed))
        except StageError as wrong:
            # A microbatch that does not belong here: twice, too late, too many.  Ours never do.
            self.break_off(Broken(f"{short(peer_id)} sent what stage {self._stage} cannot take: {wrong}", peer_id))
        except LedgerError as wrong:
            self.break_off(Broken(f"the ledger of stage {self._stage} does not add up: {wrong}", peer_id or self._net.peer_id))

    # -- opening ----------------------------------------------------------------------------------------------------------------
    def _open(self) -> None:
        if not self._last:
            for peer_id in self._roster.group(self._stage + 1):
                self.edges.add_downstream(self._peer(peer_id))
        if self._stage > 0:
            for peer_id in self._roster.group(self._stage - 1):
                self.edges.add_upstream(self._peer(peer_id))
        if len(self._group.members) > 1:
            for peer_id in self._group.members:
                if peer_id != self._net.peer_id:
                    self._peer(peer_id)
            dtype, elements, terms = self._runner.gradient_dtype, self._runner.gradient_elements, self._work
            self._reducer = Reducer(
                self._net, self._roster.generation, self._group.members, dtype, elements, self._live,
                wire=terms.wire, pooling=terms.pooling,
            )  # fmt: skip

    def _peer(self, peer_id: PeerId) -> Peer:
        peer = self._net.peer(peer_id)
        if peer is None:
            raise Broken(f"the connection to {peer_id.short} (stage {self._roster.stage_of(peer_id)}) is gone", peer_id)
        return peer

    # -- steps -------------------------------------------------------------------------------------------------------------------
    async def _steps(self) -> None:
        for step in range(self._roster.step, self._work.steps + 1):
            plan = self._work.plan(step)
            self.step = step
            if plan.total:
                await self._one_step(plan)
        # Input gradients of the last step may still be on their way to the replicas before us.
        while self.ledger.under_way():
            await self._next_sign_of_life()

    async def _one_step(self, plan: StepPlan) -> None:
        started = time.monotonic()
        assert self._nursery is not None
        if self._stage == 0:
            self._nursery.start_soon(self._guarded, None, self._originate, plan)
        agreement = await self._group.agree(plan)
        grad_norm: float | None = None
        outliers: tuple[PeerId, ...] = ()
        if plan.train:
            if self._reducer is not None:
                outliers = await self._reduce(plan, agreement)
            stepped = await self._runner.step(plan.step)
            if stepped.skipped_nonfinite:
                raise Broken(f"the gradient of stage {self._stage} is not finite in step {plan.step}", self._net.peer_id, fatal=True)
            grad_norm = stepped.grad_norm
        self.ledger.commit(plan)
        for protocol in (BOUNDARY, REDUCE):
            self._net.delivered(protocol).raise_watermark(era(self._roster.generation, plan.step + 1))
        self._live()
        # The longest silence of each step is what the next ones are measured by: the many short gaps between say nothing.
        self._silence.observe(self._longest_gap_s)
        self._longest_gap_s = 0.0
        seconds = time.monotonic() - started
        loss = heldout = None
        heldout_tokens = plan.evaluate * self._work.tokens_per_microbatch
        if self._last and plan.train:
            loss = summed(agreement.losses, range(plan.train)) / (plan.train * self._work.tokens_per_microbatch)
        if self._last and plan.evaluate:
            heldout = summed(agreement.losses, range(plan.train, plan.total)) / heldout_tokens
        self._on_applied(
            Applied(
                step=plan.step,
                trained=plan.train > 0,
                loss=loss,
                heldout=heldout,
                heldout_tokens=heldout_tokens,
                grad_norm=grad_norm,
                seconds=seconds,
                outliers=outliers,
            )
        )
        if plan.train:
            await self._snapshot(plan.step + 1)

    async def _reduce(self, plan: StepPlan, agreement: Agreement) -> tuple[PeerId, ...]:
        assert self._reducer is not None
        counts = [sum(map(plan.is_training, account)) for account in agreement.terms.accounts]
        elements = self._runner.gradient_elements
        vector = np.empty(elements, self._runner.gradient_dtype.numpy)
        await self._runner.export_gradients(vector.data.cast("B"))
        failed: BaseExceptionGroup[WireError | Spoilt] | None = None
        try:
            pooled = await self._reducer.reduce(vector, plan.step, counts=counts)
        except* (WireError, Spoilt) as causes:
            failed = causes
        if failed is not None:
            spoilt = failed.subgroup(Spoilt)
            culprit = next(iter(_leaves(spoilt))).member if spoilt is not None else None
            reasons = "; ".join(sorted({str(leaf) for leaf in _leaves(failed)}))
            raise Broken(f"the all-reduce of step {plan.step} failed: {reasons}", culprit)
        self._live()
        await self._runner.import_gradients(vector.data.cast("B"))
        return pooled.outliers

    # -- microbatches ---------------------------------------------------------------------------------------------------------------
    async def _originate(self, plan: StepPlan) -> None:
        """Draw this origin's share of the step's set (index modulo the number of origins), as many at once as the window allows."""
        assert self._nursery is not None
        self._window.started_step()
        for index in range(self._origin, plan.total, len(self._origins)):
            while self._in_window >= self._window.size:
                await self._window_changed.wait()
            self._in_window += 1
            ids = self._work.train_ids(plan.step, index) if plan.is_training(index) else self._work.heldout_ids(index - plan.train)
            microbatch = Microbatch(plan.step, index, self._origin)
            self.ledger.admit(microbatch, plan)
            self.edges.enlist(microbatch)
            self._nursery.start_soon(self._guarded, None, self._flow, microbatch, None, ids, None)

    async def _receive_activations(self, hop: Upstream) -> None:
        assert self._nursery is not None
        while True:
            received = await hop.receiver.receive()
            hop.came()
            _, _, _, microbatch = Microbatch.from_key(received.key)
            self._live()
            self.ledger.admit(microbatch, self._work.plan(microbatch.step))
            self.edges.enlist(microbatch)
            self._nursery.start_soon(self._guarded, hop.peer_id, self._flow, microbatch, received.buffer, None, hop)

    async def _flow(self, microbatch: Microbatch, payload: memoryview | None, ids: Ids | None, hop: Upstream | None) -> None:
        """The whole life of one microbatch at this replica."""
        started = time.monotonic()
        training = self._work.plan(microbatch.step).is_training(microbatch.index)
        life = self.flow.train if training else self.flow.evaluate
        await life(microbatch, payload, ids, hop)
        self.ledger.settle(microbatch)
        if self._stage == 0:
            self._in_window -= 1
            if training:
                self._window.completed(started, time.monotonic())
            self._window_changed.set()
            self._window_changed = trio.Event()
        self._live()

    def _may_receive(self, microbatch: Microbatch) -> bool:
        """Whether such a microbatch can come now: within its step's set, of the origin that draws it, at most `DRIFT` steps ahead."""
        fits = self.step <= microbatch.step <= min(self.step + DRIFT, self._work.steps)
        drawn_there = microbatch.origin == microbatch.index % len(self._origins)
        return fits and drawn_there and microbatch.index < self._work.plan(microbatch.step).total

    # -- trouble -----------------------------------------------------------------------------------------------------------------
    def _lost(self, peer_id: PeerId | None, failed: WireError) -> None:
        stage = self._roster.stage_of(peer_id) if peer_id is not None else None
        who = f"{short(peer_id)} (stage {stage})" if stage is not None else short(peer_id)
        self.break_off(Broken(f"lost {who} in step {self.step}: {failed}", peer_id))

    def _live(self) -> None:
        self._alive.set()
        self._alive = trio.Event()

    async def _next_sign_of_life(self) -> None:
        await self._alive.wait()

    async def _watch_silence(self) -> None:
        """Break off when nothing at all happens for much longer than it ever took."""
        while True:
            started = trio.current_time()
            with trio.move_on_after(self._silence.seconds):
                await self._alive.wait()
                self._longest_gap_s = max(self._longest_gap_s, trio.current_time() - started)
                continue
            self.break_off(Broken(f"nothing has happened for {self._silence.seconds:.0f} s; waited for {self.waits_for()}"))


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(str(n) for n in numbers[:8]) + (", ..." if len(numbers) > 8 else "")


def _leaves(group: BaseExceptionGroup[Fault]) -> Iterator[Fault]:
    """The exceptions of a group, however deep."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
