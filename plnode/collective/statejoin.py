"""The joiner's side: `pull` brings the live state of a stage, whole and verified, or says why it cannot be had.

In order: ask all donors what they hold; if not even half of those that answer share a copy, name a step boundary to all of them, so that
all make the copy of the same step; take the root that most hold; fetch it from all of its holders at once into a partial file; hash the
file once more as a whole and parse it.  Only then are there tensors: nothing can be applied before the root matches.

A partial file of an earlier try is gone on with if its root is on offer.  When the holders of one root are exhausted, the next best root
is tried; when none is left, `NoHolder` says what happened to each donor, and the caller takes the way over the snapshots on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import trio
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from plnode.collective.statecut import CHUNK_MOST, Offload
from plnode.collective.statefetch import Fetch, NoHolder, read_table
from plnode.collective.statefile import PartialFile, partial_path
from plnode.collective.statemessages import STATE, StateAsk, StateOffer
from plnode.collective.statepull import Plan, Progress, Standing
from plnode.collective.stateroots import Choice, Offer, ranking
from plnode.stage.snapshot_file import ROOT_DOMAIN, SnapshotRoot, hash_file
from wire.envelope import open_envelope
from wire.errors import WireError
from wire.identity import PeerId
from wire.messages import decode
from wire.net import Net

ASK_S = 10.0
STRAGGLER_S = 5.0  # after most have made their copy
BOUNDARY_S = 900.0  # the longest step that is waited for
CUT_TRIES = 4
MEMORY_BYTES = 256 << 20  # of chunks under way
STATE_MOST_BYTES = 1 << 42  # a table of hashes of 32 MiB; no stage of ours comes near


@dataclass(frozen=True, slots=True)
class Pulled:
    """A verified state.  `odd`: replicas that hold another one of the same step; `liars`: whose chunks were wrong; `lacking`: who
    announced what it had not got.  `moved_bytes` counts everything that came, `had_bytes` what an earlier try had left."""

    step: int
    tensors: dict[str, Tensor]
    statement: SnapshotRoot
    holders: tuple[PeerId, ...]
    odd: tuple[PeerId, ...]
    liars: tuple[PeerId, ...]
    lacking: tuple[PeerId, ...]
    moved_bytes: int
    had_bytes: int
    donors: Mapping[PeerId, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PullTerms:
    """What a pull is about.  `expected`: dtype and shape of every tensor of this stage, checked before anything is returned."""

    run: bytes
    stage: int
    donors: Sequence[PeerId]
    folder: Path
    now_unix: Callable[[], float]
    expected: Mapping[str, tuple[str, tuple[int, ...]]] | None = None
    memory_bytes: int = MEMORY_BYTES
    boundary_s: float = BOUNDARY_S
    offload: Offload = trio.to_thread.run_sync
    on_progress: Callable[[Progress], None] = lambda progress: None


async def pull(net: Net, terms: PullTerms) -> Pulled:
    """The live state.  Raises NoHolder, and OSError when the disk refuses.  A cancel leaves the partial file for the next try."""
    offers, refusals = await _offers(net, terms)
    choices = ranking(offers)
    resumed = [c for c in choices if not c.odd and partial_path(terms.folder, c.statement).exists()]
    reasons = [f"{donor.short}: {why}" for donor, why in refusals.items()]
    for choice in [*resumed, *(c for c in choices if c not in resumed)]:
        try:
            return await _pull_one(net, terms, choice)
        except NoHolder as error:
            reasons.append(f"step {choice.statement.step}: {error}")
    raise NoHolder(f"no live state of stage {terms.stage}: " + ("; ".join(reasons) or "there is no donor"))


async def _pull_one(net: Net, terms: PullTerms, choice: Choice) -> Pulled:
    statement = choice.statement
    size, chunk = statement.size_bytes, statement.chunk_bytes
    table = await read_table(net, choice.holders, statement.root, size, chunk)
    file: PartialFile = await terms.offload(lambda: PartialFile(terms.folder, statement))
    try:
        have = await terms.offload(lambda: file.verified(table))
        plan = Plan(table, size, chunk, choice.holders, have=have, most_outstanding=max(2, terms.memory_bytes // chunk))
        had = plan.verified_bytes
        fetch = Fetch(net, plan, statement.root, file.write, offload=terms.offload, on_progress=terms.on_progress)
        await fetch.run()
        file.close()
        if await terms.offload(lambda: hash_file(file.path, chunk)) != (size, statement.root):
            raise NoHolder("what was written is not what was verified; the disk is failing")
        try:
            tensors = await terms.offload(lambda: load_file(file.path))
        except SafetensorError as error:
            file.remove()
            raise NoHolder(f"signed by {len(choice.holders)} replicas, but no state: {error}") from error
        if odd := _difference(tensors, terms.expected):
            file.remove()
            raise NoHolder(odd)
        file.remove()
        given = {view.donor: view.verified_bytes for view in plan.progress(trio.current_time()).donors}
        return Pulled(
            statement.step, tensors, statement, choice.holders, choice.odd, plan.named(Standing.LIAR), plan.lacking,
            fetch.moved_bytes, had, given,
        )  # fmt: skip
    finally:
        file.close()


def _difference(tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[str, tuple[int, ...]]] | None) -> str:
    if expected is None:
        return ""
    if odd := sorted(tensors.keys() ^ expected.keys()):
        return f"the state differs from this stage's in {len(odd)} names, the first is {odd[0]}"
    for name, tensor in tensors.items():
        if (got := (str(tensor.dtype), tuple(tensor.shape))) != expected[name]:
            return f"{name} is {got}, expected {expected[name]}"
    return ""


async def _offers(net: Net, terms: PullTerms) -> tuple[list[Offer], dict[PeerId, str]]:
    """What can be fetched, and why some donors offer nothing.  Has copies made if too few share one."""
    answers, refusals = await _ask(net, terms, 0, ASK_S)
    for attempt in range(CUT_TRIES):
        offers = [offer for donor, answer in answers.items() for offer in _verified(terms, donor, answer, refusals)]
        choices = ranking(offers)
        able = sum(answer.holds for answer in answers.values())
        if choices and 2 * len(choices[0].holders) >= able:
            return offers, refusals
        if not able:
            return [], refusals
        # One step ahead of the foremost; the next time further, for boundaries may pass faster than questions travel.
        cut_at = max(answer.step for answer in answers.values() if answer.holds) + (1, 2, 4, 8)[attempt]
        cuts, late = await _ask(net, terms, cut_at, terms.boundary_s)
        refusals.update(late)
        answers = {**answers, **cuts}
    offers = [offer for donor, answer in answers.items() for offer in _verified(terms, donor, answer, refusals)]
    return offers, refusals


async def _ask(net: Net, terms: PullTerms, cut_at: int, deadline_s: float) -> tuple[dict[PeerId, StateOffer], dict[PeerId, str]]:
    """Ask all donors at once.  When most have answered, the rest have a few seconds more."""
    answers: dict[PeerId, StateOffer] = {}
    refusals: dict[PeerId, str] = {}
    scope = trio.CancelScope()

    async def one(donor: PeerId) -> None:
        peer = net.peer(donor)
        if peer is None:
            refusals[donor] = "not connected"
            return
        try:
            answers[donor] = await peer.call(STATE, StateAsk(terms.stage, cut_at), StateOffer, deadline_s=deadline_s)
        except WireError as error:
            refusals[donor] = str(error)
        if 2 * (len(answers) + len(refusals)) > len(terms.donors):
            scope.deadline = min(scope.deadline, trio.current_time() + STRAGGLER_S)

    with scope:
        async with trio.open_nursery() as nursery:
            for donor in terms.donors:
                nursery.start_soon(one, donor)
    for donor in terms.donors:
        if donor not in answers:
            refusals.setdefault(donor, "no answer")
    return answers, refusals


def _verified(terms: PullTerms, donor: PeerId, answer: StateOffer, refusals: dict[PeerId, str]) -> list[Offer]:
    """Offers whose signature, run, stage and sizes are in order; a donor that sends another one offers nothing."""
    found = []
    for envelope in answer.envelopes:
        try:
            signed = open_envelope(envelope, ROOT_DOMAIN, now_unix=terms.now_unix(), run=terms.run)
            statement = decode(signed.payload, SnapshotRoot)
        except WireError as error:
            refusals[donor] = f"its statement is not valid: {error}"
            return []
        if signed.signer != donor or statement.run != terms.run or statement.stage != terms.stage:
            refusals[donor] = f"offers a state of stage {statement.stage} signed by {signed.signer.short}"
            return []
        if statement.chunk_bytes > CHUNK_MOST or statement.size_bytes > STATE_MOST_BYTES:
            refusals[donor] = f"offers {statement.size_bytes:,} bytes in chunks of {statement.chunk_bytes:,}"
            return []
        found.append(Offer(donor, statement))
    if not answer.envelopes:
        refusals[donor] = answer.reason or "offers nothing"
    return found
