"""One node's part in one run: take a stage, wait until a generation of the run can begin, train in it, and again.

Every generation starts from a snapshot (or from the manifest's seed at step 0) with a fresh device thread, so that nothing of a
broken one can leak into the next: half-applied weights, posted buffers, graphs.

What ends a node is little: the run is complete, a value is not finite (a new generation would meet it again), its own machine
fails, or the person stops it.  Anything that peers do ends a generation at most.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from random import Random
from typing import Any

import psutil
import trio

from plnode.alarm import Alarm
from plnode.collective.deadline import Deadline
from plnode.collective.group import Rounds, StageGroup
from plnode.collective.messages import REDUCE
from plnode.exits import ExitCode, Outcome
from plnode.heard import told
from plnode.keeper import Keeper
from plnode.manifest import SignedManifest
from plnode.observe import events as e
from plnode.observe.progress import Progress
from plnode.observe.recorder import Recorder
from plnode.observe.waits import Waits
from plnode.pipeline.broken import Broken
from plnode.pipeline.generation import Applied, Generation, Work
from plnode.pipeline.hops import BOUNDARY
from plnode.pipeline.ledger import Ledger, StepPlan
from plnode.pipeline.microbatch import Microbatch
from plnode.pipeline.totals import Totals
from plnode.plan import plan_run, receipt_terms, step_plan
from plnode.settings import Settings
from plnode.stage.boundary import DenseBoundary
from plnode.stage.errors import MemoryPlanError, SnapshotError, StageError, StageMemoryError
from plnode.stage.policy import Order
from plnode.stage.runner import StageRunner, open_runner
from plnode.stage.snapshots import SnapshotStore
from plnode.swarm.assignment import Need, assign, candidates
from plnode.swarm.claims import NodeState, StageClaim
from plnode.swarm.membership import Membership, micronats
from plnode.swarm.muster import Muster
from plnode.swarm.receiptlog import ReceiptLog
from plnode.swarm.receiptservice import ReceiptService
from plnode.swarm.roster import Roster
from plnode.workload.lm import LanguageModel
from wire.envelope import SequenceClock
from wire.errors import printable
from wire.identity import Identity, PeerId
from wire.net import Net, NetEvent, PeerLost

SILENCE_FLOOR_S, SILENCE_CEILING_S = 60.0, 300.0
"""A generation in which nothing happens is broken off: at 4 × what was usual, within these bounds.  The floor leaves room for a
machine that swaps or a laptop that was closed for a moment; the ceiling is for the first steps of a large stage."""
CLAIM_EVERY_S = 2.0
CALL_S = 30.0  # one word within a group; longer than it may wait for a generation to begin (group.BEGIN_S), shorter than silence
SETTLE_S = 10.0  # for the last receipts: neighbours are there until all have finished; who is gone does not hold us up
LEAVE_S = 60.0  # the last held-out microbatches and a snapshot of a large stage; then somebody else's trouble is not ours
POOL_LEAST_BYTES = 1 << 30  # of host buffers; the plan's figure is for one origin, and slots are posted ahead of use
PAUSE_MOST_S = 60.0  # a broken swarm that tries for ever must not keep its machines busy with it


class Participant:
    """One node of one run, from its first claim to the end of the run."""

    def __init__(
        self,
        net: Net,
        settings: Settings,
        signed: SignedManifest,
        job: LanguageModel,
        identity: Identity,
        recorder: Recorder,
        log: ReceiptLog,
    ) -> None:
        self._net, self._settings = net, settings
        self._manifest, self._run = signed.manifest, signed.run_id
        self._identity = identity
        self._recorder = recorder
        self._plans = plan_run(signed.manifest).stages
        self._needs = [Need(p.stage, p.least_bytes) for p in self._plans]
        self._job = job
        self._random = Random(identity.peer_id.raw)
        self._keeper = Keeper(
            SnapshotStore(settings.data_dir, self._run, identity),
            every=self._manifest.snapshot.every,
            last=self._manifest.steps,
            recorder=recorder,
            changed=lambda: self._say(snapshots=self._keeper.steps),
            common=self._common_step,
        )
        self._sequence = SequenceClock(settings.data_dir / "statements.seq")
        self._memory = settings.memory_bytes or psutil.virtual_memory().available
        self.waits = Waits(recorder)
        steps = self._keeper.steps
        claim = StageClaim(
            boot_id=os.urandom(8), name=settings.name, state=NodeState.STARTING, stage=self._keeper.stage, generation=0,
            step=max(steps, default=0), snapshots=steps, memory_bytes=min(self._memory, 2**62), microbatches_per_hour=0,
        )  # fmt: skip
        self.membership = Membership(net, identity, self._run, self._sequence, claim)
        self.receipts = ReceiptService(
            net, identity, self._run, terms=receipt_terms(signed.manifest), log=log, sequence=self._sequence,
            tell=lambda text: recorder.emit(e.Notice(text)),
        )  # fmt: skip
        self._rounds = Rounds(net)
        self._muster = Muster(
            net, identity, self._run, self.membership, self.waits, stages=self._manifest.stages.count,
            replicas=self._manifest.stages.replicas, steps=self._manifest.steps,
            first_snapshot=self._manifest.snapshot.every, data_dir=settings.data_dir, random=self._random,
        )  # fmt: skip
        self.generation: Generation | None = None
        self.ledger = Ledger()
        self.progress = Progress(self._manifest.batch.tokens, self._manifest.steps)
        self._roster: Roster | None = None
        self._claimed_at = 0.0
        self._fruitless = 0
        self._tasks: trio.Nursery | None = None
        self._diverged: int | None = None
        self.lost_microbatches = 0
        self.totals = Totals(self._manifest.tokens_per_microbatch)
        self._alarm = Alarm(net, lambda: self._roster, self._break_off)
        for protocol in (BOUNDARY, REDUCE):
            net.serve_channel(protocol, step_field=0)  # their keys begin with the era

    # -- the loop ----------------------------------------------------------------------------------------------------------------
    async def run(self) -> Outcome:
        """Until the run is complete or this node cannot go on."""
        while True:
            roster = await self._wait_for_generation()
            self.waits.over()
            self._roster = roster
            stage = roster.stage_of(self._net.peer_id)
            assert stage is not None
            self._say(state=NodeState.ACTIVE, stage=stage, generation=roster.generation, step=roster.step)
            members = tuple((str(p), s) for p, s in roster.members)
            self._recorder.emit(e.RunStarted(roster.generation, roster.step, members))
            try:
                await self._train(roster, stage)
            except Broken as broken:
                if (outcome := await self._broken(roster, broken)) is not None:
                    return outcome
                await self._pause(roster)
                continue
            self._recorder.emit(e.RunFinished(self._manifest.steps))
            self._roster = None
            with trio.move_on_after(SETTLE_S):
                await self.receipts.settled()
            await self._leave_together(roster)
            return Outcome(ExitCode.OK, f"the run is complete after {self._manifest.steps} steps")

    async def _leave_together(self, roster: Roster) -> None:
        """Stay until every member has finished (or is gone): what one of them still needs may be here."""
        await self.membership.say_and_wait(replace(self.membership.own, state=NodeState.FINISHED, step=self._manifest.steps))
        with trio.move_on_after(LEAVE_S):
            while True:
                changed = self.membership.changed()
                claims = {peer: claim.state for peer, claim in self.membership.present()}
                behind = [p for p, _ in roster.members if claims.get(p, NodeState.FINISHED) != NodeState.FINISHED]
                if not behind:
                    return
                self.waits.waiting("for the others to finish", ", ".join(p.short for p in behind))
                await changed.wait()

    async def _pause(self, roster: Roster) -> None:
        """Before the next try: at once after a generation that got on, longer and longer after ones that did not."""
        self._fruitless = 0 if self.progress.step > roster.step else self._fruitless + 1
        if self._fruitless > 1:
            seconds = min(PAUSE_MOST_S, 2.0 ** (self._fruitless - 2)) * (0.5 + self._random.random())
            self.waits.waiting("before trying again", f"{self._fruitless} generations ended in their first step")
            await trio.sleep(seconds)

    async def _wait_for_generation(self) -> Roster:
        while not self._take_stage():
            await self.membership.changed().wait()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_stage)
            roster = await self._muster.begin()
            nursery.cancel_scope.cancel()
        return roster

    async def _keep_stage(self) -> None:
        """Follow the claims: while nothing has begun, this node moves to where it is needed more."""
        while True:
            await self.membership.changed().wait()
            self._take_stage()

    def _take_stage(self) -> bool:
        own, stage = self.membership.own, self._keeper.stage
        if stage is None:
            places = assign(candidates(self.membership.present()), self._needs, self._manifest.stages.replicas, self._run)
            stage = places[self._net.peer_id]
        if stage is None:
            least = min(p.least_bytes for p in self._plans)
            self.waits.waiting("for a stage that fits", f"the smallest needs {least >> 20} MiB, this node has {self._memory >> 20} MiB")
            return False
        if stage != own.stage or own.state == NodeState.STARTING:
            plan = self._plans[stage]
            self._recorder.emit(e.StageAssigned(stage, plan.first_layer, plan.end_layer, plan.parameters, plan.memory_bytes))
        self._say(state=NodeState.READY, stage=stage, snapshots=self._keeper.steps, generation=self._muster.last_voted)
        return True

    # -- one generation ---------------------------------------------------------------------------------------------------------
    async def _train(self, roster: Roster, stage: int) -> None:
        manifest, plan = self._manifest, self._plans[stage]
        before = self._job.boundary() if stage > 0 else None
        after = self._job.boundary() if stage < manifest.stages.count - 1 else None
        self.ledger = Ledger()
        self.progress.begin(roster.step)
        self.waits.waiting("for the device", f"building stage {stage}: {plan.parameters:,} parameters on {self._settings.device}")
        # Attached before the stage is built: a replica that is ready sooner may report its work to one that is not.
        group = StageGroup(self._net, self._identity, roster, stage, self.ledger.account, self._plan, call_s=lambda: CALL_S)
        self._rounds.attach(group)
        self.receipts.began(roster)
        try:
            async with open_runner(
                lambda: self._job.build_stage(stage),
                self._job.build_optimizer,
                boundary_in=before,
                boundary_out=after,
                device=self._settings.device,
                threads=self._settings.threads,
                memory_bytes=self._memory,
                tokens_per_step=manifest.batch.tokens,
                first_step=roster.step,
                pool_bytes=max(POOL_LEAST_BYTES, 2 * plan.buffers_bytes * len(roster.group(0))),
                order=Order(in_index_order=roster.one_replica_a_stage),
            ) as runner:
                if roster.step:
                    self.waits.waiting("for the disk", f"loading the snapshot of step {roster.step}")
                    await self._keeper.load(runner, roster.step, stage)
                self.waits.over()
                await self._run_generation(roster, stage, group, runner, before, after)
        except StageError as failed:
            mine = None if isinstance(failed, SnapshotError) else failed
            raise Broken(f"{self._settings.name} (stage {stage}): {failed}", self._net.peer_id, failed=mine) from failed
        finally:
            self._rounds.detach()
            self.receipts.aborted(roster.generation)
            self.totals.end()
            self.generation = None

    async def _run_generation(
        self,
        roster: Roster,
        stage: int,
        group: StageGroup,
        runner: StageRunner,
        before: DenseBoundary | None,
        after: DenseBoundary | None,
    ) -> None:
        broken: Broken | None = None
        async with trio.open_nursery() as writers:
            self.generation = Generation(
                net=self._net,
                roster=roster,
                stage=stage,
                work=self._work(),
                runner=runner,
                boundary_in=before,
                boundary_out=after,
                group=group,
                ledger=self.ledger,
                random=self._random,
                on_applied=lambda applied: self._applied(roster.generation, applied),
                on_broken=lambda broken: self._spread(roster, broken),
                snapshot=lambda step: self._keeper.save(runner, step, stage, roster.generation, writers),
                silence=Deadline(floor_s=SILENCE_FLOOR_S, ceiling_s=SILENCE_CEILING_S),
                attest=self._attest,
            )
            self.totals.begin(stage, self.generation, runner)
            try:
                self._check(roster)
                await self.generation.run()
            except Broken as reason:
                broken = reason  # what is being written to disk is whole and stays
        if broken is not None:
            raise broken

    def _check(self, roster: Roster) -> None:
        """What happened to the generation while this node built its stage."""
        if (broken := self._alarm.heard_of(roster)) is not None:
            raise broken
        for member, stage in roster.members:
            if not self.membership.connected(member):
                raise Broken(f"lost {member.short} of stage {stage} before the generation began", member)

    def _common_step(self) -> int:
        """The newest step that some connected node of every stage holds, as they say; 0 without any."""
        held: dict[int, set[int]] = {stage: set() for stage in range(self._manifest.stages.count)}
        for _, claim in self.membership.present():
            if claim.stage in held:
                held[claim.stage].update(claim.snapshots)
        return max(set.intersection(*held.values()), default=0)

    def _work(self) -> Work:
        manifest, job = self._manifest, self._job
        return Work(
            stages=manifest.stages.count, steps=manifest.steps, plan=self._plan, train_ids=job.train_ids, heldout_ids=job.heldout_ids,
            tokens_per_microbatch=manifest.tokens_per_microbatch, wire=manifest.collective.wire, pooling=manifest.collective.pooling,
        )  # fmt: skip

    def _plan(self, step: int) -> StepPlan:
        return step_plan(self._manifest, step)

    def _attest(self, worker: PeerId, stage: int, microbatch: Microbatch, kind: int, size_bytes: int, seconds: float) -> None:
        tokens = self._manifest.tokens_per_microbatch
        self.receipts.received(worker, stage, microbatch.step, microbatch.index, kind, tokens, size_bytes, seconds)

    def _applied(self, generation: int, applied: Applied) -> None:
        manifest = self._manifest
        if applied.trained:
            self.receipts.applied(applied.step, generation)
            self.progress.done(applied.step, applied.loss)
            tokens = manifest.batch.tokens
            self._recorder.emit(e.StepDone(applied.step, applied.loss, tokens, applied.seconds, applied.grad_norm, False))
            if time.monotonic() - self._claimed_at > CLAIM_EVERY_S:
                self._say(step=applied.step + 1, loss_micronats=micronats(applied.loss), microbatches_per_hour=self._speed())
        if applied.outliers:
            names = ", ".join(peer.short for peer in applied.outliers)
            self._recorder.emit(e.Notice(f"step {applied.step}: the gradient of {names} is far from the others' and counts for less"))
        if applied.heldout is not None:
            self._recorder.emit(e.HeldOut(applied.step, applied.heldout, applied.heldout_tokens))

    async def _broken(self, roster: Roster, broken: Broken) -> Outcome | None:
        """Say why the generation ended, tell the members, and decide whether this node goes on."""
        self._roster = None
        step, self.lost_microbatches = self.progress.step, self.lost_microbatches + self.ledger.abort()
        culprit = str(broken.culprit) if broken.culprit is not None else None
        self._recorder.emit(e.RunAborted(step, broken.reason, culprit))
        self._spread(roster, broken)
        if broken.failed is not None:
            memory = isinstance(broken.failed, MemoryPlanError | StageMemoryError)
            return Outcome(ExitCode.NO_MEMORY if memory else ExitCode.INTERNAL, broken.reason)
        if broken.fatal and self._diverged == step:
            return Outcome(ExitCode.DIVERGED, f"{broken.reason}; it was the same when the step was done again")
        if broken.fatal:
            self._diverged = step
        return None

    def _spread(self, roster: Roster, broken: Broken) -> None:
        """Tell the members without waiting for this node's own end of the generation."""
        self._alarm.spread(roster, self.progress.step, broken, self._tasks)

    def _break_off(self, broken: Broken) -> None:
        if self.generation is not None:
            self.generation.break_off(broken)

    # -- what happens around it ---------------------------------------------------------------------------------------------------
    async def follow(self, events: trio.MemoryReceiveChannel[NetEvent]) -> None:
        """Carry the network's events to whoever they concern, until cancelled."""
        async with trio.open_nursery() as self._tasks:
            try:
                async for event in events:
                    self.membership.on_event(event)
                    if (event_for_people := told(event, self._stage_of)) is not None:
                        self._recorder.emit(event_for_people)
                    if isinstance(event, PeerLost):
                        self._member_lost(event.peer_id, str(event.reason))
            finally:
                self._tasks = None  # before the nursery closes: then it would take no others, and say so with an error

    def _member_lost(self, peer_id: PeerId, reason: str) -> None:
        claim = self.membership.claim_of(peer_id)
        finished = claim is not None and claim.state == NodeState.FINISHED
        if self._roster is None or finished:
            return
        if (stage := self._roster.stage_of(peer_id)) is not None:
            name = f"{printable(claim.name)} ({peer_id.short})" if claim is not None else peer_id.short
            broken = Broken(f"lost {name} of stage {stage} in step {self.progress.step}: {reason}", peer_id)
            self._alarm.note(self._roster, broken)
            self._break_off(broken)

    def _stage_of(self, peer_id: PeerId) -> int | None:
        claim = self.membership.claim_of(peer_id)
        return claim.stage if claim is not None else None

    def _say(self, **changes: Any) -> None:
        self._claimed_at = time.monotonic()
        self.membership.say(replace(self.membership.own, **changes))

    def _speed(self) -> int:
        seconds = self.generation.flow.microbatch_s if self.generation is not None else None
        return round(3600 / seconds) if seconds else 0

    def run_loss(self) -> float | None:
        """The newest mean training loss of the run that this node knows of."""
        if self.progress.loss is not None:
            return self.progress.loss
        known = [(c.step, c.loss_micronats) for _, c in self.membership.present() if c.loss_micronats is not None]
        return max(known)[1] / 1e6 if known else None
