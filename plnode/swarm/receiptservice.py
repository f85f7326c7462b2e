"""Receipts between neighbours: sealed when a step was applied, delivered to whom they are about, kept by both.

Theory.  The signer has no use for its receipt; the worker has.  So the signer delivers, and because nothing of training waits for it, it
can take its time: one task a worker, one call at a time, again until there is an answer or the receipt is `KEEP_STEPS` steps old.  A worker
that is away for longer loses receipts of that time from its own log; they are still in the signer's.

What goes wrong, and what is done:

* *A stranger, or a member from elsewhere, sends receipts* to fill our disk or to be paid by our word: only neighbours of an agreed roster
  that this node was in are heard, before a signature is looked at.
* *A neighbour sends many*: one envelope a step and signer.  A second, different one is evidence, kept once and told; more are refused.
  So what neighbours can make us write is bounded by the steps that were applied here.
* *It attests what cannot be yet*: a neighbour cannot apply step t while work for it needs our weights before t, so nothing beyond the
  first step that is not applied here is taken.
* *The answer is lost*: the same bytes come again and are answered again, not written again.
* *The disk is full*: "later", said to the signer; our own are told and dropped.

The owner (participant) calls, all from the loop:

    service.began(roster)                                    a generation begins here
    service.received(peer, stage, step, index, kind, tokens, bytes, seconds)     a neighbour's valid work is here; its `stage`
    service.voided(peer, step)                               a replica was declared dead in a step
    service.applied(step, generation)                        after the update was applied
    service.aborted(generation)                              the generation broke off, or ended
    await service.run()                                      for ever, in a nursery of the node
    await service.settled()                                  at the end, under a deadline: all was answered
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from random import Random
from typing import Annotated

import trio

from plnode.swarm.receiptlog import ReceiptLog
from plnode.swarm.receipts import ENVELOPE_MAX_BYTES, BadEnvelope, Kind, Receipt, ReceiptBook, Sealed, Terms, Work, open_receipt
from plnode.swarm.roster import Roster
from wire.envelope import SequenceClock
from wire.errors import WireError, printable
from wire.identity import Identity, PeerId
from wire.messages import Range, Size, message
from wire.net import Net, Peer

__all__ = ["RECEIPTS", "Deliver", "ReceiptService", "Taken", "Verdict"]

RECEIPTS = "receipts/1"
KEEP_STEPS = 64
"""A neighbour that lost its line for a minute or two is back within so many steps of a second or more."""
KEEP_GENERATIONS = 4
"""Rosters by which late receipts are judged: the swarm may have begun anew while one was on its way."""
OUTBOX_MAX_BYTES = 16 << 20
CALL_S = 30.0  # 60 KB in the background class, on a line that training fills
RETRY_S, RETRY_MOST_S = 5.0, 60.0
SYNC_S = 5.0  # between fsyncs; see receiptlog.py
BACKGROUND = 4  # the lowest class of wire/scheduler.py


class Verdict(IntEnum):
    """What became of a delivered receipt."""

    KEPT = 0
    REFUSED = 1  # for good
    LATER = 2


@message(113)
@dataclass(frozen=True, slots=True)
class Deliver:
    """A sealed receipt, to whom it is about."""

    envelope: Annotated[bytes, Size(max=ENVELOPE_MAX_BYTES)]


@message(114)
@dataclass(frozen=True, slots=True)
class Taken:
    verdict: Annotated[int, Range(0, 2)]
    reason: Annotated[str, Size(max=256)] = ""


@dataclass(slots=True)
class _Epoch:
    """A generation that this node was in, and what it got in it: (step, signer) -> digests, at most two."""

    roster: Roster
    stage: int
    next_step: int
    seen: dict[tuple[int, PeerId], list[bytes]] = field(default_factory=dict)

    def neighbours(self) -> frozenset[PeerId]:
        return frozenset(peer for peer, stage in self.roster.members if abs(stage - self.stage) == 1)


@dataclass(frozen=True, slots=True)
class _Letter:
    sealed: Sealed
    posted: int


class Outbox:
    """What was sealed and not answered, by worker, oldest first; bounded by age and bytes."""

    def __init__(self, keep: int = KEEP_STEPS, max_bytes: int = OUTBOX_MAX_BYTES) -> None:
        self._keep, self._max_bytes = keep, max_bytes
        self._letters: dict[PeerId, deque[_Letter]] = {}
        self._now = 0
        self.held_bytes = 0
        self.given_up = 0

    def __len__(self) -> int:
        return sum(map(len, self._letters.values()))

    def workers(self) -> tuple[PeerId, ...]:
        return tuple(self._letters)

    def step(self, sealed: tuple[Sealed, ...]) -> None:
        """A step was applied, these are its receipts: whatever is too old by now, or too much, is given up."""
        self._now += 1
        for one in sealed:
            self._letters.setdefault(one.worker, deque()).append(_Letter(one, self._now))
            self.held_bytes += len(one.raw)
        for worker, letters in list(self._letters.items()):
            while letters and letters[0].posted <= self._now - self._keep:
                self._give_up(worker)
        while self.held_bytes > self._max_bytes:
            self._give_up(min(self._letters, key=lambda worker: self._letters[worker][0].posted))

    def oldest(self, worker: PeerId) -> Sealed | None:
        letters = self._letters.get(worker)
        return letters[0].sealed if letters else None

    def answered(self, sealed: Sealed) -> None:
        """It was answered.  Nothing happens when it was given up meanwhile."""
        if self.oldest(sealed.worker) is sealed:
            self._pop(sealed.worker)

    def _give_up(self, worker: PeerId) -> None:
        self._pop(worker)
        self.given_up += 1

    def _pop(self, worker: PeerId) -> None:
        letters = self._letters[worker]
        self.held_bytes -= len(letters.popleft().sealed.raw)
        if not letters:
            del self._letters[worker]


class ReceiptService:
    """See the module.  One a node and run, made once: it registers its protocol with `net`."""

    def __init__(
        self,
        net: Net,
        identity: Identity,
        run: bytes,
        *,
        terms: Terms,
        log: ReceiptLog,
        sequence: SequenceClock,
        tell: Callable[[str], None] = lambda text: None,
        wall: Callable[[], float] = time.time,
        random: Random | None = None,
        offload: Callable[[Callable[[], None]], Awaitable[None]] = trio.to_thread.run_sync,
    ) -> None:
        """`sequence`: the node's one clock of statements.  `tell`: a sentence about what went wrong, for the node's notices.
        `offload`: runs an fsync, which may take long, beside the loop."""
        self._net, self._run_id, self._terms, self._log = net, run, terms, log
        self._tell, self._wall, self._random = tell, wall, random or Random(identity.peer_id.raw)
        self._offload = offload
        self._book = ReceiptBook(identity, run, sequence)
        self._outbox = Outbox()
        self._epochs: dict[int, _Epoch] = {}
        self._generation = -1
        self._busy: set[PeerId] = set()
        self._news = trio.Event()
        self._told: set[tuple[str, PeerId | None]] = set()
        self.delivered = 0
        self.kept = 0
        net.serve_calls(RECEIPTS, Deliver, self._on_deliver)

    # -- what the owner calls

    @property
    def waiting(self) -> int:
        """Receipts of ours that were not answered yet."""
        return len(self._outbox)

    def began(self, roster: Roster) -> None:
        """A generation begins, with this node in it.  ValueError: it is not in the roster."""
        stage = roster.stage_of(self._net.peer_id)
        if stage is None:
            raise ValueError(f"this node is not in generation {roster.generation}")
        self._generation = roster.generation
        self._epochs[roster.generation] = _Epoch(roster, stage, roster.step)
        self._told.clear()
        while len(self._epochs) > KEEP_GENERATIONS:
            del self._epochs[min(self._epochs)]

    def received(self, peer: PeerId, stage: int, step: int, index: int, kind: int, tokens: int, size_bytes: int, seconds: float) -> bool:
        """Valid work of `peer` (at `stage`) is here: an activation (kind 0) or an input gradient (kind 1) of a training microbatch.

        `seconds`: how long the signer waited for it, for people.  False if it will not be attested: held-out, twice, too late.
        """
        if index >= self._terms.microbatches:
            return False
        work = Work(
            worker=peer, stage=stage, step=step, index=index, kind=Kind(kind), tokens=tokens, size_bytes=size_bytes, seconds=seconds
        )  # fmt: skip
        return self._book.worked(work, self._generation)

    def voided(self, peer: PeerId, step: int) -> None:
        """`peer` is out of a step that is not applied: it gets no receipt for it."""
        self._book.voided(peer, step)

    def applied(self, step: int, generation: int) -> None:
        """The update of `step` was applied here: seal, keep and deliver.  ValueError for a step twice, or of another generation."""
        if generation != self._generation:
            raise ValueError(f"step {step} of generation {generation} was applied in generation {self._generation}")
        sealed = self._book.applied(step, generation, self._wall())
        epoch = self._epochs[generation]
        epoch.next_step = step + 1
        epoch.seen = {key: digests for key, digests in epoch.seen.items() if key[0] > step - KEEP_STEPS}
        for one in sealed:
            try:
                self._log.append(one.raw)
            except OSError as refused:
                self._tell_once("disk", None, f"receipts cannot be written: {refused}; they are sent, but not kept here")
        self._outbox.step(sealed)
        self._wake()

    def aborted(self, generation: int) -> None:
        """The generation is over: what was not applied is forgotten.  What was sealed is still delivered."""
        self._book.aborted(generation)

    async def settled(self) -> None:
        """Wait until every receipt of ours was answered or given up.  Put it under a deadline: a peer may never come back."""
        while len(self._outbox):
            await self._news.wait()

    async def run(self) -> None:
        """Deliver and sync for ever.  A cancel leaves what was not answered in the outbox, and the log synced."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._sync)
                while True:
                    for worker in self._outbox.workers():
                        if worker not in self._busy:
                            self._busy.add(worker)
                            nursery.start_soon(self._deliver, worker)
                    await self._news.wait()
        finally:
            if (sync := self._log.unsynced()) is not None:
                with suppress(OSError):  # the next start finds out what is there
                    sync()

    # -- the signer

    async def _deliver(self, worker: PeerId) -> None:
        """All letters to one worker, one after the other."""
        failures = 0
        try:
            while (sealed := self._outbox.oldest(worker)) is not None:
                if await self._answered(sealed):
                    self._outbox.answered(sealed)
                    self._wake()
                    failures = 0
                else:
                    pause_s = min(RETRY_S * 2 ** min(failures, 8), RETRY_MOST_S)
                    failures += 1
                    await trio.sleep(pause_s * (0.5 + self._random.random()))
        finally:
            self._busy.discard(worker)

    async def _answered(self, sealed: Sealed) -> bool:
        peer = self._net.peer(sealed.worker)
        if peer is None:
            return False
        try:
            taken = await peer.call(RECEIPTS, Deliver(sealed.raw), Taken, deadline_s=CALL_S, cls=BACKGROUND)
        except WireError:
            return False  # lost, busy, or it does not speak this yet: the next try tells
        if taken.verdict == Verdict.REFUSED:
            self._tell_once("refused", sealed.worker, f"{sealed.worker.short} refused a receipt: {printable(taken.reason)}")
        self.delivered += taken.verdict == Verdict.KEPT
        return taken.verdict != Verdict.LATER

    # -- the worker

    async def _on_deliver(self, peer: Peer, request: Deliver) -> Taken:
        await trio.lowlevel.checkpoint()
        epochs = [epoch for epoch in self._epochs.values() if peer.peer_id in epoch.neighbours()]
        if not epochs:
            return Taken(Verdict.REFUSED, "you are not a neighbour of mine")
        digest = hashlib.sha256(request.envelope).digest()
        if any(digest in digests for epoch in epochs for digests in epoch.seen.values()):
            return Taken(Verdict.KEPT)
        try:
            receipt = open_receipt(request.envelope, run=self._run_id)
        except BadEnvelope as wrong:
            self._tell_once("bad", peer.peer_id, f"{peer.peer_id.short} sent a receipt that is not in order: {wrong.detail}")
            return Taken(Verdict.REFUSED, wrong.detail[:200])
        if (objection := self._objection(receipt, peer.peer_id)) is not None:
            self._tell_once("objection", peer.peer_id, f"{peer.peer_id.short} sent a receipt that is not believed: {objection}")
            return Taken(Verdict.REFUSED, objection[:200])
        digests = self._epochs[receipt.generation].seen.setdefault((receipt.step, receipt.signer), [])
        if len(digests) > 1:
            return Taken(Verdict.REFUSED, f"a third receipt for step {receipt.step}")
        if digests:
            self._tell_once("two", peer.peer_id, f"{peer.peer_id.short} signed two receipts for step {receipt.step}; both are kept")
        try:
            self._log.append(receipt.raw)
        except OSError as refused:
            self._tell_once("disk", None, f"receipts cannot be written: {refused}")
            return Taken(Verdict.LATER, "my disk takes nothing now")
        digests.append(digest)
        self.kept += 1
        return Taken(Verdict.KEPT)

    def _objection(self, receipt: Receipt, sender: PeerId) -> str | None:
        """Why a receipt in order is not taken."""
        if receipt.signer != sender:
            return f"it is signed by {receipt.signer.short}"
        if receipt.worker != self._net.peer_id:
            return "it is about another node"
        epoch = self._epochs.get(receipt.generation)
        if epoch is None:
            return f"generation {receipt.generation} is none of my last ones"
        if receipt.stage != epoch.stage or epoch.roster.stage_of(sender) != receipt.signer_stage:
            return f"the {receipt.kind.name.lower()} of stage {receipt.stage} is not yours to attest in generation {receipt.generation}"
        if not max(epoch.roster.step, epoch.next_step - KEEP_STEPS) <= receipt.step <= epoch.next_step:
            return f"step {receipt.step}; step {epoch.next_step} is open here"
        return self._terms.fault(receipt)

    # -- the disk

    async def _sync(self) -> None:
        while True:
            await trio.sleep(SYNC_S)
            if (sync := self._log.unsynced()) is not None:
                try:
                    with trio.CancelScope(shield=True):  # it holds a descriptor, and what it does cannot be broken off
                        await self._offload(sync)
                except OSError as refused:
                    self._tell_once("disk", None, f"receipts may not be on the disk: {refused}")

    def _tell_once(self, about: str, peer: PeerId | None, text: str) -> None:
        """Once a generation: who sends nonsense for ever must not fill the log of events."""
        if (about, peer) not in self._told:
            self._told.add((about, peer))
            self._tell(text)

    def _wake(self) -> None:
        self._news.set()
        self._news = trio.Event()
