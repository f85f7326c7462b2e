"""What the tests of receipts share: people, one of their receipts, and a whole run's."""

from __future__ import annotations

from itertools import pairwise
from random import Random

from plnode.swarm.receipts import DOMAIN, Kind, Receipt, ReceiptBody, ReceiptBook, Terms, Work, open_receipt, pack_entries
from tests.wire.net.worlds import RUN
from wire.envelope import SequenceClock, seal
from wire.identity import Identity, PeerId
from wire.messages import encode

PEOPLE = [Identity(bytes([number]) * 32) for number in range(1, 13)]
IDS = [person.peer_id for person in PEOPLE]
TERMS = Terms(stages=3, steps=10, microbatches=4, tokens=128, flops_per_token=(10.0, 30.0, 20.0))


def work(worker: PeerId = IDS[1], **changes: object) -> Work:
    values = {"stage": 1, "step": 5, "index": 0, "kind": Kind.FORWARD, "tokens": 128, "size_bytes": 1000, "seconds": 0.25, **changes}
    return Work(worker=worker, **values)  # type: ignore[arg-type]


def raw(
    signer: Identity, worker: PeerId, stage: int, kind: Kind, indices: list[int], *, step: int = 5, generation: int = 1, tokens: int = 128,
    size: int = 1000, seconds: float = 0.25, run: bytes = RUN, seq: int = 1,
) -> bytes:  # fmt: skip
    """A receipt as `signer` would seal it, whether it is true or not."""
    works = [work(worker, index=i, tokens=tokens, size_bytes=size, seconds=seconds) for i in indices]
    body = ReceiptBody(generation, worker.raw, stage, step, kind, pack_entries(works))
    return seal(signer, DOMAIN, encode(body), run=run, seq=seq, not_after=0)


def opened(*raws: bytes) -> list[tuple[Receipt, str]]:
    return [(open_receipt(one, run=RUN), f"log:{number}") for number, one in enumerate(raws)]


def honest_step(
    groups: list[list[Identity]], random: Random, *, step: int = 5, generation: int = 1, microbatches: int = 4, tokens: int = 128,
    run: bytes = RUN,
) -> tuple[list[bytes], dict[tuple[int, int], PeerId]]:  # fmt: skip
    """All receipts of one step whose microbatches took random routes, and who did what: (index, stage) -> worker."""
    books = {person.peer_id: ReceiptBook(person, run, SequenceClock(None)) for group in groups for person in group}
    did = {}
    for index in range(microbatches):
        route = [random.choice(group).peer_id for group in groups]
        for stage, (before, after) in enumerate(pairwise(route)):
            values = {"step": step, "index": index, "tokens": tokens}
            assert books[after].worked(work(before, stage=stage, **values), generation)
            assert books[before].worked(work(after, stage=stage + 1, kind=Kind.BACKWARD, **values), generation)
        did |= {(index, stage): worker for stage, worker in enumerate(route)}
    return [sealed.raw for book in books.values() for sealed in book.applied(step, generation, 1000.0)], did
