"""The composition root: builds the services of a node, owns their nursery, and makes them one process.

Two programs are put together here: a node that takes part in a run, and a seed that only introduces peers.  What they have in
common is the network, the recorder and the status socket.  Torch is imported only where there is something to compute: a seed
starts in a fifth of the time and a tenth of the memory.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import trio

from plnode import deadlines
from plnode.exits import BadInput, ExitCode, Outcome
from plnode.heard import told
from plnode.lastword import LastWord
from plnode.leaving import Leaving
from plnode.manifest import SignedManifest
from plnode.memory import PROCESS_LEAST_BYTES, room_for_stage, system_limit
from plnode.observe import events as e
from plnode.observe.loopwatch import LoopWatch
from plnode.observe.metrics import Metrics
from plnode.observe.recorder import Recorder
from plnode.observe.status import Status, serve_status
from plnode.peerlines import peer_line
from plnode.settings import Settings
from plnode.swarm.claims import NodeState
from plnode.swarm.receiptlog import FOLDER, ReceiptLog
from wire.identity import Identity, PeerId
from wire.net import BindFailed, Net, NetEvent, RelayOffer, SeedList, SeedListError, open_net
from wire.net.perf import serve_perf

if TYPE_CHECKING:
    from plnode.participant import Participant

STATUS_EVERY_S = 1.0


async def run_node(settings: Settings, signed: SignedManifest, identity: Identity, recorder: Recorder) -> Outcome:
    """Take part in the run `signed` until it is complete or this node cannot go on.

    Raises BadInput for what the user has to mend (a busy port, a seed list, another installation).  A cancel says goodbye.  A
    machine or container into which no stage fits is refused before anything is allocated.
    """
    limit = system_limit()
    if limit is not None and limit < PROCESS_LEAST_BYTES:  # before torch: it would not even load
        least, has = PROCESS_LEAST_BYTES >> 20, limit >> 20
        return Outcome(ExitCode.NO_MEMORY, f"the container's memory limit is {has} MiB; without a stage a node takes {least} MiB: raise it")
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    last_word = LastWord(settings.data_dir)
    if (silent_end := last_word.left_behind()) is not None:
        recorder.emit(e.Notice(silent_end))
    last_word.begin(limit_bytes=limit)
    recorder.add(last_word)
    from plnode.participant import Participant  # brings torch, which a seed does not need
    from plnode.plan import plan_run
    from plnode.workload.lm import JobError, LanguageModel

    deadlines.check()
    try:
        job = LanguageModel(signed.manifest)
    except JobError as wrong:
        remedy = "Install the version that the owner of the run uses."
        raise BadInput(f"this installation cannot take part: {wrong}", remedy) from None
    room = room_for_stage(settings.memory_bytes, limit_bytes=limit)
    if (refusal := room.refusal(plan.least_bytes for plan in plan_run(signed.manifest).stages)) is not None:
        return Outcome(ExitCode.NO_MEMORY, refusal)
    if (warning := room.warning()) is not None:
        recorder.emit(e.Notice(warning))
    settings = replace(settings, memory_bytes=room.stage_bytes)
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    seeds = _seeds(settings, signed.owner, signed.run_id)
    async with _network(settings, identity, recorder, run=signed.run_id, seeds=seeds) as (net, events, watch):
        serve_perf(net)
        with _receipt_log(settings, recorder) as log:
            participant = Participant(net, settings, signed, job, identity, recorder, log)
            addresses = tuple(str(a) for a in net.addresses)
            recorder.emit(e.NodeStarted(str(net.peer_id), settings.name, addresses, settings.device, settings.threads))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(participant.follow, events)
                nursery.start_soon(participant.membership.run)
                nursery.start_soon(participant.receipts.run)
                nursery.start_soon(_report, recorder, lambda: _node_status(participant, net, settings, watch))
                outcome = await participant.run()
                recorder.emit(_node_status(participant, net, settings, watch))
                nursery.cancel_scope.cancel()
    return outcome


async def run_seed(settings: Settings, identity: Identity, recorder: Recorder, run: bytes | None = None) -> Outcome:
    """Introduce peers of any run, or of one and relay for its members, until cancelled.  Raises BadInput as `run_node`."""
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    seeds = _seeds(settings, settings.owner, run)
    async with _network(settings, identity, recorder, run=run, seeds=seeds) as (net, events, watch):
        recorder.emit(e.NodeStarted(str(net.peer_id), settings.name, tuple(str(a) for a in net.addresses), "none", 0))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_report, recorder, lambda: _seed_status(net, settings, watch))
            async for event in events:
                if (event_for_people := told(event, lambda _: None)) is not None:
                    recorder.emit(event_for_people)
    return Outcome(ExitCode.OK, "the seed has stopped")


@contextmanager
def _receipt_log(settings: Settings, recorder: Recorder) -> Iterator[ReceiptLog]:
    """The receipts in the data folder, open for appending.  Raises BadInput."""
    folder = settings.data_dir / FOLDER
    try:
        log = ReceiptLog(folder, tell=lambda text: recorder.emit(e.Notice(text)))
    except OSError as refused:
        raise BadInput(f"the receipts cannot be kept in {folder}: {refused.strerror}", "Mend that folder, or move it away.") from None
    try:
        yield log
    finally:
        with suppress(OSError):  # what is not on the disk is in the other neighbours' logs
            log.close()


def _seeds(settings: Settings, owner: PeerId | None, run: bytes | None) -> SeedList | None:
    """The seeds, if any are given; a signed list must be the owner's.  Raises BadInput."""
    try:
        return SeedList.gather(settings.seeds, owner=owner, run=run) if settings.seeds else None
    except SeedListError as problem:
        raise BadInput(f"the seed list cannot be used: {problem}", "Ask the owner of the run for the newest one.") from None


@asynccontextmanager
async def _network(
    settings: Settings, identity: Identity, recorder: Recorder, *, run: bytes | None, seeds: SeedList | None
) -> AsyncIterator[tuple[Net, trio.MemoryReceiveChannel[NetEvent], LoopWatch]]:
    """The network, its events, and the status socket behind the recorder."""
    watch = LoopWatch()
    status, metrics = Status(), Metrics()
    recorder.add(status)
    recorder.add(metrics)
    leaving = Leaving(settings.stop_grace_s)
    trio.lowlevel.add_instrument(watch)
    try:
        offer = RelayOffer(settings.relay, settings.relay_rate)
        async with open_net(
            identity,
            run=run,
            listen=settings.listen,
            scope=settings.scope,
            seeds=seeds,
            data_dir=settings.data_dir,
            announce=settings.announce,
            relay=offer,
            portmap=settings.portmap,
            notice_s=leaving.notice_s,
        ) as net, trio.open_nursery() as nursery:
            nursery.start_soon(leaving.watch)
            await nursery.start(serve_status, settings.status_socket, status, metrics.text)
            yield net, net.events(), watch
            nursery.cancel_scope.cancel()
    except BindFailed as busy:
        raise BadInput(str(busy), "Choose another port with --listen, or stop what uses it.") from None
    finally:
        trio.lowlevel.remove_instrument(watch)


async def _report(recorder: Recorder, status: Callable[[], e.NodeStatus]) -> None:
    while True:
        recorder.emit(status())
        await trio.sleep(STATUS_EVERY_S)


def _node_status(node: Participant, net: Net, settings: Settings, watch: LoopWatch) -> e.NodeStatus:
    own, generation, waits = node.membership.own, node.generation, node.waits
    totals, counters = node.totals, node.totals.counters
    traffic = net.traffic()
    return e.NodeStatus(
        name=settings.name,
        peer_id=str(net.peer_id),
        stage=own.stage,
        state=_STATES[NodeState(own.state)] if waits.what is None or own.state != NodeState.ACTIVE else "waiting",
        waiting_for=waits.text,
        waiting_since_s=waits.since_s,
        step=node.progress.step,
        steps=node.progress.steps,
        loss=node.run_loss(),
        tokens_per_s=node.progress.tokens_per_s,
        bytes_in=traffic.bytes_in,
        bytes_out=traffic.bytes_out,
        queue=counters.queued_jobs,
        in_flight=generation.in_flight if generation is not None else 0,
        credits=generation.edges.credits if generation is not None else 0,
        kept_graphs=counters.graphs_kept,
        recomputed=counters.graphs_recomputed,
        lost_microbatches=node.lost_microbatches,
        boundary_bytes={name: e.BoundaryBytes(*sent) for name, sent in sorted(totals.sent().items())},
        boundary_tokens=totals.tokens,
        peers=_peers(node, net),
        loop_blocked_p99_ms=watch.take().p99_ms,
        eta_s=node.progress.eta_s,
        access=net.access.verdict.verdict,
        access_reason=net.access.verdict.reason,
    )


def _seed_status(net: Net, settings: Settings, watch: LoopWatch) -> e.NodeStatus:
    traffic = net.traffic()
    return e.NodeStatus(
        name=settings.name, peer_id=str(net.peer_id), stage=None, state="seeding", waiting_for=None, waiting_since_s=None, step=0,
        steps=0, loss=None, tokens_per_s=0.0, bytes_in=traffic.bytes_in, bytes_out=traffic.bytes_out, queue=0, in_flight=0, credits=0,
        kept_graphs=0, recomputed=0, lost_microbatches=0, boundary_bytes={}, boundary_tokens=0,
        peers=tuple(peer_line(status, None) for status in net.status()),
        loop_blocked_p99_ms=watch.take().p99_ms, eta_s=None, access=net.access.verdict.verdict,
        access_reason=net.access.verdict.reason,
    )  # fmt: skip


def _peers(node: Participant, net: Net) -> tuple[e.PeerLine, ...]:
    lines = []
    for status in net.status():
        claim = node.membership.claim_of(status.peer_id)
        lines.append(peer_line(status, claim.stage if claim is not None else None))
    return tuple(sorted(lines, key=lambda line: (line.stage is None, line.stage or 0, line.peer_id)))


_STATES = {
    NodeState.STARTING: "starting",
    NodeState.READY: "waiting",
    NodeState.ACTIVE: "training",
    NodeState.FINISHED: "stopping",
}
