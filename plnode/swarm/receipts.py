"""Receipts: what a neighbour signs about the work that it got from a node.

Who can say that a node worked?  Not the node.  The replica *after* it got the activation of a microbatch: it can attest the forward.
The replica *before* it got the input gradient back: it can attest the backward (and a gradient without a forward there is none).  So
the signer's place follows from the kind: forward of stage s is signed at stage s + 1, backward of stage s at stage s - 1.  Held-out
microbatches have no way back and earn nothing.

What goes wrong, and what is done:

* *A signature a microbatch* would cost 36 us and 160 bytes each.  One envelope a worker and step holds all of them, 14 bytes each.
* *The step fails* after its microbatches have flowed: nothing is sealed before the step was applied at the signer, and a generation
  that broke off takes what it had gathered with it.  A step that was applied here and is done again (the swarm fell back to an older
  snapshot) is sealed again, under a greater generation; of two generations the later one counts (`points.py`).
* *A replica is declared dead* and another one does its microbatches again: `voided`, and what came later from somebody else replaces.
* *A peer makes us hold memory*: at most `STEPS_OPEN` steps of `MOST_MICROBATCHES` are open at once, whatever arrives.

Sans-IO.  The payload of domain plw/receipt/1 is message 112; its entries are packed, because an array of messages may have 1,024
items only and would take twice the bytes:

    entry, 14 bytes, big-endian:  u16 index | u32 tokens | u32 bytes | u32 microseconds        ascending by index, none twice

FLOPs are not in there: they are a formula of the stage and the tokens (`plnode/plan.py`), and who reads a receipt computes them.  Bytes
and microseconds are what the signer saw on its line; they are told, and nothing is paid by them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated

from plnode.swarm.claims import U32
from wire.envelope import BadEnvelope, Malformed, SequenceClock, open_envelope, seal
from wire.errors import WireError
from wire.identity import Identity, PeerId
from wire.messages import Range, Size, decode, encode, message

__all__ = [
    "DOMAIN", "ENVELOPE_MAX_BYTES", "MOST_MICROBATCHES", "STEPS_OPEN",
    "BadEnvelope", "Kind", "Receipt", "ReceiptBody", "ReceiptBook", "Sealed", "Terms", "Work", "open_receipt", "pack_entries",
]  # fmt: skip

DOMAIN = "plw/receipt/1"
MOST_MICROBATCHES = 3000
"""A step.  A manifest allows 2,048 for training; 3,000 is what an envelope holds with room to spare (42 KB)."""
ENVELOPE_MAX_BYTES = 60_000
"""Of 64 KiB that a control message holds: an envelope travels in one."""
STEPS_OPEN = 4
"""Steps whose work is held at once: the one that is open and those that a sender may be ahead (`generation.DRIFT`), and one."""
_ENTRY = struct.Struct(">HIII")
_U32_MAX = 2**32 - 1


class Kind(IntEnum):
    """What was attested; the numbers are those of the directions on a boundary."""

    FORWARD = 0
    BACKWARD = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One microbatch's work at `worker`, as its neighbour saw it.  `stage` is the worker's.  `size_bytes`: what arrived."""

    worker: PeerId
    stage: int
    step: int
    index: int
    kind: Kind
    tokens: int
    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What the run's manifest says that work can be.  `flops_per_token`: one figure a stage, forward and backward."""

    stages: int
    steps: int
    microbatches: int
    tokens: int
    """Of one microbatch."""
    flops_per_token: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.flops_per_token) != self.stages:
            raise ValueError(f"{len(self.flops_per_token)} figures of FLOPs for {self.stages} stages")

    def fault(self, receipt: Receipt) -> str | None:
        """Why this receipt is about work that the run does not have; None if it does."""
        if receipt.stage >= self.stages or not 0 <= receipt.signer_stage < self.stages:
            return f"{receipt.kind.name.lower()} of stage {receipt.stage} has no neighbour to attest it: the run has {self.stages} stages"
        if receipt.step >= self.steps:
            return f"step {receipt.step}: the run has {self.steps}"
        for index, tokens, _, _ in receipt.rows():
            if index >= self.microbatches:
                return f"microbatch {index}: a step has {self.microbatches}"
            if tokens != self.tokens:
                return f"microbatch {index} of {tokens} tokens: every one has {self.tokens}"
        return None


@message(112)
@dataclass(frozen=True, slots=True)
class ReceiptBody:
    """Payload of plw/receipt/1: the signer got this work from `worker` in a step that it has applied."""

    generation: U32
    worker: Annotated[bytes, Size(32)]
    stage: U32
    step: U32
    kind: Annotated[int, Range(0, 1)]
    entries: Annotated[bytes, Size(max=MOST_MICROBATCHES * _ENTRY.size)]


@dataclass(frozen=True, slots=True)
class Receipt:
    """A receipt whose signature and form are in order.  `raw` is what is kept and handed on."""

    signer: PeerId
    run: bytes
    seq: int
    generation: int
    worker: PeerId
    stage: int
    step: int
    kind: Kind
    packed: bytes
    raw: bytes

    @property
    def signer_stage(self) -> int:
        """Where the signer says that it stands; -1: nowhere."""
        return self.stage + 1 if self.kind is Kind.FORWARD else self.stage - 1

    def __len__(self) -> int:
        return len(self.packed) // _ENTRY.size

    def rows(self) -> Iterator[tuple[int, int, int, int]]:
        """(index, tokens, bytes, microseconds), ascending by index."""
        return _ENTRY.iter_unpack(self.packed)

    def works(self) -> Iterator[Work]:
        for index, tokens, size, us in self.rows():
            yield Work(
                worker=self.worker, stage=self.stage, step=self.step, index=index, kind=self.kind, tokens=tokens, size_bytes=size,
                seconds=us / 1e6,
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sealed:
    """A receipt of our own, to be kept and delivered."""

    worker: PeerId
    generation: int
    step: int
    raw: bytes


def pack_entries(works: list[Work]) -> bytes:
    """The entries of works in order of their index; a time beyond 71 minutes is written as that."""
    ordered = sorted(works, key=lambda w: w.index)
    return b"".join(_ENTRY.pack(w.index, w.tokens, w.size_bytes, min(round(w.seconds * 1e6), _U32_MAX)) for w in ordered)


def open_receipt(raw: bytes, *, run: bytes | None) -> Receipt:
    """The receipt in `raw`.  `run`: the one it must be about, None = any.

    Raises BadEnvelope as `open_envelope` does (Malformed, Forged, ForeignRun), Malformed also for a body that is not in order: an
    expiry, another spelling, no entry, entries that do not ascend or are empty work, a signer who attests itself a neighbour's place.
    """
    if len(raw) > ENVELOPE_MAX_BYTES:
        raise Malformed(f"{DOMAIN}: {len(raw)} bytes, at most {ENVELOPE_MAX_BYTES}")
    # Receipts never expire: no clock is asked, so that everybody finds the same in a log for ever.
    statement = open_envelope(raw, DOMAIN, now_unix=0.0, run=run)
    if statement.not_after:
        raise Malformed(f"{DOMAIN}: with an expiry")
    try:
        body = decode(statement.payload, ReceiptBody, max_bytes=ENVELOPE_MAX_BYTES)
        worker = PeerId(body.worker)
    except (WireError, ValueError) as wrong:
        raise Malformed(f"{DOMAIN}: {wrong.detail if isinstance(wrong, WireError) else wrong}") from None
    if encode(body) != statement.payload:
        raise Malformed(f"{DOMAIN}: the body is not in the one spelling")
    if not body.entries or len(body.entries) % _ENTRY.size:
        raise Malformed(f"{DOMAIN}: {len(body.entries)} bytes of entries of {_ENTRY.size}")
    before = -1
    for index, tokens, _, _ in _ENTRY.iter_unpack(body.entries):
        if not before < index < MOST_MICROBATCHES or not tokens:
            raise Malformed(f"{DOMAIN}: microbatch {index} after {before}, {tokens} tokens")
        before = index
    if body.kind == Kind.BACKWARD and body.stage == 0:
        raise Malformed(f"{DOMAIN}: nobody stands before stage 0")
    return Receipt(
        statement.signer, statement.run, statement.seq, body.generation, worker, body.stage, body.step, Kind(body.kind), body.entries,
        statement.raw,
    )  # fmt: skip


class ReceiptBook:
    """What the neighbours of this node did for it, until their step is applied and it can be signed.

    Steps of one generation are applied in ascending order, generations only ascend.  Misuse (a step applied twice, one of a
    generation that has ended) raises ValueError; what comes with the microbatches themselves is refused by `worked` with False.
    """

    def __init__(self, identity: Identity, run: bytes, sequence: SequenceClock) -> None:
        self._identity, self._run, self._sequence = identity, run, sequence
        self._generation = -1
        self._ended = -1
        self._applied = -1
        self._open: dict[int, dict[tuple[Kind, int, int], Work]] = {}
        self.refused = 0

    @property
    def held(self) -> int:
        """Entries that wait for their step."""
        return sum(map(len, self._open.values()))

    def worked(self, work: Work, generation: int) -> bool:
        """Valid work has arrived.  False if it is not kept: twice from one worker, too late, too far ahead, out of bounds, our own.

        The same microbatch from another worker replaces: it was done again, because the first one no longer counts.
        """
        if not self._fits(work) or not self._begin(generation):
            self.refused += 1
            return False
        key = (work.kind, work.stage, work.index)
        known = self._open.get(work.step)
        room = len(self._open) < STEPS_OPEN if known is None else known.get(key) is None or known[key].worker != work.worker
        if work.step <= self._applied or not room:
            self.refused += 1
            return False
        self._open.setdefault(work.step, {})[key] = work
        return True

    def voided(self, worker: PeerId, step: int) -> int:
        """A worker is out of a step that is not applied yet: nothing of it is attested.  Returns how many entries were dropped."""
        entries = self._open.get(step, {})
        void = [key for key, work in entries.items() if work.worker == worker]
        for key in void:
            del entries[key]
        return len(void)

    def applied(self, step: int, generation: int, now_unix: float) -> tuple[Sealed, ...]:
        """The step is over here: one envelope for each worker (and kind) that did something for it, ordered by worker."""
        if not self._begin(generation) or step <= self._applied:
            raise ValueError(f"step {step} of generation {generation} cannot be applied now (after {self._applied} of {self._generation})")
        entries = self._open.get(step, {})
        self._applied = step
        self._open = {later: works for later, works in self._open.items() if later > step}
        groups: dict[tuple[PeerId, Kind, int], list[Work]] = {}
        for (kind, stage, _), work in entries.items():
            groups.setdefault((work.worker, kind, stage), []).append(work)
        sealed = []
        for (worker, kind, stage), works in sorted(groups.items()):
            body = ReceiptBody(generation, worker.raw, stage, step, kind, pack_entries(works))
            sealed.append(Sealed(worker, generation, step, self._seal(body, now_unix)))
        return tuple(sealed)

    def aborted(self, generation: int) -> int:
        """The generation is over: what was not applied is attested by nobody.  Returns how many entries were dropped."""
        if generation < self._generation:
            return 0
        dropped, self._open = self.held, {}
        self._generation = self._ended = generation
        return dropped

    def _begin(self, generation: int) -> bool:
        """Whether this is the generation under way; a greater one begins with this call."""
        if generation <= self._ended or generation < self._generation:
            return False
        if generation > self._generation:
            self._generation, self._applied = generation, -1
            self._open.clear()
        return True

    def _fits(self, work: Work) -> bool:
        numbers = (work.stage, work.step, work.size_bytes, work.tokens - 1)
        return (
            work.worker != self._identity.peer_id
            and 0 <= work.index < MOST_MICROBATCHES
            and all(0 <= number <= _U32_MAX for number in numbers)
            and work.tokens <= _U32_MAX
            and math.isfinite(work.seconds)
            and work.seconds >= 0
            and (work.kind is Kind.FORWARD or work.stage > 0)
        )

    def _seal(self, body: ReceiptBody, now_unix: float) -> bytes:
        return seal(self._identity, DOMAIN, encode(body), run=self._run, seq=self._sequence.next(now_unix), not_after=0)
