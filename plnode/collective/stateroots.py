"""Which of the offered states a joiner takes: the root that most replicas hold and have signed.

Theory.  A root says what the state *is*; nobody can check from outside that it is the right one.  What a newcomer can check is that
several replicas, which have computed it on their own, hold the same.  So roots are counted by holders, the most held one wins, and
whoever holds another one *of the same step* is named: it has drifted, or lies (JOIN-8).  A root of another step says nothing about
its holder.  Of two that are held by equally many the newer one wins (less to catch up with), then the smaller root, so that joiners
which see the same offers take the same and share the donors' copies.

One holder alone is believed: with a single replica left there is nobody to compare with.  The result says how many there were.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from plnode.stage.snapshot_file import SnapshotRoot
from wire.identity import PeerId


@dataclass(frozen=True, slots=True)
class Offer:
    """A signed statement by `donor` about what it holds now."""

    donor: PeerId
    statement: SnapshotRoot


@dataclass(frozen=True, slots=True)
class Choice:
    """The state to take, who holds it (ascending), and who holds another of the same step."""

    statement: SnapshotRoot
    holders: tuple[PeerId, ...]
    odd: tuple[PeerId, ...]


def ranking(offers: Iterable[Offer]) -> tuple[Choice, ...]:
    """All states on offer, best first.  Only one offer a donor and root counts; size and chunk size must agree, too."""
    held: dict[tuple[bytes, int, int, int], dict[PeerId, SnapshotRoot]] = {}
    for offer in offers:
        s = offer.statement
        held.setdefault((s.root, s.step, s.size_bytes, s.chunk_bytes), {})[offer.donor] = s
    order = sorted(held, key=lambda key: (-len(held[key]), -key[1], key[0], key[2], key[3]))
    found = []
    for key in order:
        others = {donor for other in order if other != key and other[1] == key[1] for donor in held[other]}
        holders = tuple(sorted(held[key]))
        found.append(Choice(held[key][holders[0]], holders, tuple(sorted(others - set(holders)))))
    return tuple(found)
