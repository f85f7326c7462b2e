"""The next hop: which replica of the following stage gets this microbatch, decided by its sender.

A pure function of a snapshot, so that it can be tested as a table.  Cost of a candidate = what it already has from us × the
time it needs for one + the link: RTT + bytes / measured goodput of that very link.  Work is charged when it is handed over
("up front"), not when it ends: without that, all microbatches of one tick go to the replica that was fastest a moment ago.
Only replicas with a free slot are candidates; a replica without one is busy, never bad.  A replica that has never answered is
given the median time of the others, so that it gets its share at once and is measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from wire.identity import PeerId


@dataclass(frozen=True, slots=True)
class Candidate:
    """One replica of the next stage as its sender sees it.  Times in seconds, goodput in bytes per second; None = not measured."""

    peer: PeerId
    free_slots: int
    outstanding: int
    service_s: float | None
    rtt_s: float | None
    goodput_bps: float | None


def cost_s(candidate: Candidate, size_bytes: int, default_service_s: float) -> float:
    """Expected seconds until `candidate` has answered one more microbatch of `size_bytes`."""
    service = candidate.service_s if candidate.service_s is not None else default_service_s
    transfer = size_bytes / candidate.goodput_bps if candidate.goodput_bps else 0.0
    return (candidate.outstanding + 1) * service + (candidate.rtt_s or 0.0) + transfer


def choose(candidates: Sequence[Candidate], size_bytes: int, tie: Callable[[Sequence[PeerId]], PeerId]) -> PeerId | None:
    """The cheapest candidate with a free slot, or None when all are busy.  `tie` picks among equals."""
    free = [c for c in candidates if c.free_slots > 0]
    if not free:
        return None
    known = [c.service_s for c in candidates if c.service_s is not None]
    default = statistics.median(known) if known else 1.0
    costs = {c.peer: cost_s(c, size_bytes, default) for c in free}
    least = min(costs.values())
    best = [peer for peer, cost in costs.items() if cost <= least * 1.000001]
    return best[0] if len(best) == 1 else tie(best)
