"""Points: what the receipts of a run add up to, computed by whoever has the logs.

The rule.  A microbatch's work at stage s earns its worker the stage's FLOPs for its tokens, if the neighbour after it attested the
forward and the neighbour before it attested the backward, in one generation; at the first and the last stage there is one neighbour, and
its word is all there is.  It earns them once, whatever the number of receipts.  What a node signs about itself counts nothing.

Which generation.  A step that was applied and then lost, because the swarm fell back to an older snapshot, is done again under a greater
number, perhaps by others.  Only the greatest generation in which a microbatch is attested in full counts; what came before is shown as
superseded.  So more logs can move points to a later generation and make disputes known; they never pay a microbatch twice.

What is not believed, and named:

* *unfit*: a stage, step, index or number of tokens that the manifest does not have.
* *self*: the signer is the worker.
* *two places*: in one generation a node stands at one stage.  Who signs forwards of stage 1 (as stage 2) and backwards of stage 1 (as
  stage 0) lies; all that it signed in this generation is void.  So one accomplice cannot be both neighbours.
* *two stories*: one signer says two different things of one microbatch; of this microbatch its word is void.
* *disputed*: two workers are attested in full for one microbatch of one generation.  One of them was not, and a log cannot tell which:
  neither is paid.

How far this can be trusted.  Receipts prove who said what; that the sayers were the real neighbours is known online (`receiptservice.py`
takes receipts from the agreed roster only) and *not* from a log.  Offline, two keys that nobody has seen in the run can attest a
third one anything that the manifest allows; at the first and the last stage one key can.  The bounds: a microbatch of a stage is paid
once, so inventions take what honest nodes were paid, or show as disputes, as soon as the honest logs are read with them; and all points
of a run together are never more than steps x microbatches x FLOPs.  A real member that colludes with both of its neighbours
can be paid for work that it did badly or not at all, as long as nobody else attests that microbatch; finding bad work is the business of
audits.  A member can also refuse to sign, and a log can be kept back: points are a lower bound of honest work, not a measure of it.

Pure functions; sums are of whole tokens, so that the order of the receipts changes nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from plnode.swarm.receipts import Kind, Receipt, Terms
from wire.identity import PeerId

__all__ = ["Finding", "Row", "Table", "tally"]

MOST_FINDINGS = 1000
"""Kept in words; all are counted."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not believed.  `culprit` signed it (None: it cannot be told who lies); `places`: where it was read."""

    kind: str
    culprit: PeerId | None
    what: str
    places: tuple[str, ...]


@dataclass(slots=True)
class Row:
    """One node.  All but the last two lines is about its work."""

    microbatches: int = 0
    """Microbatches x stages that count."""
    tokens: Counter[int] = field(default_factory=Counter)
    """By stage; what counts."""
    flops: float = 0.0
    """The points."""
    size_bytes: int = 0
    """What its neighbours got for the work that counts, as they say."""
    one_sided: int = 0
    """Attested by one neighbour of two."""
    superseded: int = 0
    disputed: int = 0
    attested: int = 0
    """Microbatches that it attested others, whatever became of them."""
    contradictions: int = 0


@dataclass(frozen=True, slots=True)
class Table:
    """The outcome.  `rows` has every worker and signer; `findings` are at most `MOST_FINDINGS`, `counts` says how many there were."""

    rows: Mapping[PeerId, Row]
    findings: tuple[Finding, ...]
    counts: Mapping[str, int]

    @property
    def flops(self) -> float:
        return math.fsum(row.flops for row in self.rows.values())


@dataclass(frozen=True, slots=True)
class _Story:
    """One entry of one receipt; equal to another one that says the same."""

    worker: PeerId
    tokens: int
    size_bytes: int
    microseconds: int
    place: str = field(compare=False)


class _Tally:
    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.rows: dict[PeerId, Row] = {}
        self.findings: list[Finding] = []
        self.counts: Counter[str] = Counter()

    def row(self, peer: PeerId) -> Row:
        return self.rows.setdefault(peer, Row())

    def find(self, kind: str, culprit: PeerId | None, what: str, places: Iterable[str]) -> None:
        self.counts[kind] += 1
        if len(self.findings) < MOST_FINDINGS:
            self.findings.append(Finding(kind, culprit, what, tuple(sorted(set(places)))))

    def believable(self, receipts: Mapping[bytes, tuple[Receipt, str]]) -> list[tuple[Receipt, str]]:
        """The receipts that fit the run and whose signer stands at one place."""
        kept = []
        stands: dict[tuple[PeerId, int], dict[int, str]] = {}
        for raw in sorted(receipts):
            receipt, place = receipts[raw]
            self.row(receipt.signer).attested += len(receipt)
            if receipt.signer == receipt.worker:
                self.find("self", receipt.signer, f"{receipt.signer.short} attests itself step {receipt.step}", [place])
            elif (fault := self.terms.fault(receipt)) is not None:
                self.find("unfit", receipt.signer, f"{receipt.signer.short} attests what the run does not have: {fault}", [place])
            else:
                self.row(receipt.worker)
                stands.setdefault((receipt.signer, receipt.generation), {}).setdefault(receipt.signer_stage, place)
                kept.append((receipt, place))
        for (signer, generation), places in stands.items():
            if len(places) > 1:
                self.row(signer).contradictions += 1
                at = " and ".join(map(str, sorted(places)))
                self.find("two places", signer, f"{signer.short} signs as stage {at} in generation {generation}", places.values())
        return [(r, place) for r, place in kept if len(stands[r.signer, r.generation]) == 1]

    def one_step(self, receipts: list[tuple[Receipt, str]]) -> None:
        """All receipts of one stage in one step."""
        said: dict[tuple[int, int, Kind, PeerId], list[_Story]] = {}  # (index, generation, kind, signer)
        for receipt, place in receipts:
            for index, tokens, size_bytes, microseconds in receipt.rows():
                stories = said.setdefault((index, receipt.generation, receipt.kind, receipt.signer), [])
                story = _Story(receipt.worker, tokens, size_bytes, microseconds, place)
                if story not in stories:
                    stories.append(story)
        stage, step = receipts[0][0].stage, receipts[0][0].step
        attested: dict[int, dict[tuple[int, PeerId], dict[Kind, int]]] = {}  # index -> (generation, worker) -> kind -> bytes
        for (index, generation, kind, signer), stories in sorted(said.items()):
            if len(stories) > 1:
                self.row(signer).contradictions += 1
                what = f"{kind.name.lower()} of microbatch {index}, step {step}, stage {stage}"
                self.find("two stories", signer, f"{signer.short} says {len(stories)} things of the {what}", (s.place for s in stories))
                continue
            kinds = attested.setdefault(index, {}).setdefault((generation, stories[0].worker), {})
            kinds[kind] = max(kinds.get(kind, 0), stories[0].size_bytes)
        for index, claims in attested.items():
            self._one_microbatch(stage, step, index, claims)

    def _one_microbatch(self, stage: int, step: int, index: int, claims: Mapping[tuple[int, PeerId], Mapping[Kind, int]]) -> None:
        needed = ({Kind.FORWARD} if stage < self.terms.stages - 1 else set()) | ({Kind.BACKWARD} if stage > 0 else set())
        complete = [claim for claim, kinds in claims.items() if kinds.keys() >= needed]
        for _, worker in claims.keys() - set(complete):
            self.row(worker).one_sided += 1
        newest = max((generation for generation, _ in complete), default=-1)
        paid = sorted(worker for generation, worker in complete if generation == newest)
        for generation, worker in complete:
            self.row(worker).superseded += generation < newest
        if len(paid) > 1:
            for worker in paid:
                self.row(worker).disputed += 1
            names = " and ".join(worker.short for worker in paid)
            self.find("disputed", None, f"microbatch {index}, step {step}, stage {stage} is attested in full to {names}", ())
        elif paid:
            row = self.row(paid[0])
            row.microbatches += 1
            row.tokens[stage] += self.terms.tokens
            row.size_bytes += sum(claims[newest, paid[0]].values())


def tally(receipts: Iterable[tuple[Receipt, str]], terms: Terms) -> Table:
    """What the receipts of one run add up to.  Each comes with the place where it was read, for the findings.

    The receipts must be of the run that `terms` is of (ValueError when they are of several).  Neither their order nor how often one
    comes changes anything but which places a finding names.
    """
    known: dict[bytes, tuple[Receipt, str]] = {}
    runs = set()
    for receipt, place in receipts:
        runs.add(receipt.run)
        if receipt.raw not in known or place < known[receipt.raw][1]:
            known[receipt.raw] = (receipt, place)
    if len(runs) > 1:
        raise ValueError(f"receipts of {len(runs)} runs")
    work = _Tally(terms)
    groups: dict[tuple[int, int], list[tuple[Receipt, str]]] = {}
    for receipt, place in work.believable(known):
        groups.setdefault((receipt.step, receipt.stage), []).append((receipt, place))
    # One step and stage at a time: the entries of a long run do not fit into a dict.
    for group in sorted(groups):
        work.one_step(groups[group])
    for row in work.rows.values():
        row.flops = math.fsum(tokens * terms.flops_per_token[stage] for stage, tokens in sorted(row.tokens.items()))
    return Table(dict(sorted(work.rows.items())), tuple(work.findings), dict(sorted(work.counts.items())))
