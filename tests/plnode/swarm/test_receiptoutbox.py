"""What waits for an answer is bounded by age and bytes, and an answer takes its own letter only.

Mutations that were tried, each fails a test here: no age; no bound of bytes; an answer that takes whatever is oldest.
"""

from __future__ import annotations

from plnode.swarm.receipts import Sealed
from plnode.swarm.receiptservice import Outbox
from tests.plnode.swarm.receiptworld import IDS
from wire.identity import PeerId


def sealed(worker: PeerId, size: int = 10) -> Sealed:
    return Sealed(worker, 1, 0, bytes(size))


def test_the_outbox_gives_up_what_is_too_old() -> None:
    box = Outbox(keep=3)
    first = sealed(IDS[0])
    box.step((first,))
    box.step((sealed(IDS[0]), sealed(IDS[1])))
    box.step(())
    assert len(box) == 3 and box.oldest(IDS[0]) is first
    box.step(())
    assert len(box) == 2 and box.given_up == 1
    box.answered(first)
    assert len(box) == 2, "an answer that comes too late takes no other letter"
    box.step(())
    assert len(box) == 0 == box.held_bytes and box.workers() == () and box.given_up == 3


def test_the_outbox_is_bounded_in_bytes_and_drops_the_oldest() -> None:
    box = Outbox(keep=100, max_bytes=100)
    for number in range(12):
        box.step((sealed(IDS[number % 2], 30),))
        assert box.held_bytes <= 100
    assert len(box) == 3 and box.given_up == 9 and {IDS[0], IDS[1]} == set(box.workers())
