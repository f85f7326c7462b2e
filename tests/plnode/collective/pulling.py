"""Donors and joiners without a network: what a plan asks takes the time that a line of that rate needs.  Bytes are stand-ins."""

from __future__ import annotations

import hashlib
import heapq
import itertools
from dataclasses import dataclass, field

from plnode.collective.statepull import Failure, Plan, Request, Verdict
from wire.identity import Identity, PeerId

LATENCY_S = 0.05
LOOK_S = 0.25


def peers(count: int) -> list[PeerId]:
    return [Identity(bytes([number + 1]) * 32).peer_id for number in range(count)]


def digest(index: int) -> bytes:
    return hashlib.sha256(b"chunk %d" % index).digest()


def table(count: int) -> bytes:
    return b"".join(digest(index) for index in range(count))


@dataclass
class Donor:
    """Serves one chunk after the other at `rate` bytes/s.  `dies_at`, `lies` (indices), `lacks` (indices), `busy` (times it says so)."""

    rate: float
    dies_at: float = float("inf")
    lies: frozenset[int] = frozenset()
    lacks: frozenset[int] = frozenset()
    busy: int = 0
    free_at: float = 0.0
    sent_bytes: int = 0


@dataclass
class Joiner:
    plan: Plan
    good: list[int] = field(default_factory=list)
    asked: list[Request] = field(default_factory=list)
    verdicts: list[tuple[PeerId, Verdict]] = field(default_factory=list)
    done_at: float = float("inf")
    most_under_way: int = 0
    copies: int = 0


def simulate(donors: dict[PeerId, Donor], joiners: list[Joiner], *, until_s: float = 1e7) -> float:
    """Run until every plan is done or hopeless; the time."""
    order = itertools.count()
    events: list[tuple[float, int, int, Request | None]] = []
    live: dict[tuple[int, PeerId, int], int] = {}
    now = 0.0

    def ask(number: int) -> None:
        joiner = joiners[number]
        for gone in joiner.plan.take_cancels():
            live.pop((number, gone.donor, gone.index), None)
        while (request := joiner.plan.next(now)) is not None:
            donor = donors[request.donor]
            joiner.asked.append(request)
            if (donor.lacks and request.index in donor.lacks) or donor.busy > 0:
                at = now + LATENCY_S
            else:
                donor.free_at = max(donor.free_at, now) + joiner.plan.length(request.index) / donor.rate
                at = donor.free_at + LATENCY_S
            ticket = next(order)
            live[number, request.donor, request.index] = ticket
            heapq.heappush(events, (min(at, max(donor.dies_at, now) + LATENCY_S), ticket, number, request))
        joiner.most_under_way = max(joiner.most_under_way, joiner.plan.under_way)
        joiner.copies = max(joiner.copies, max((len(by) for by in joiner.plan._asked.values()), default=0))

    for number in range(len(joiners)):
        ask(number)
        heapq.heappush(events, (LOOK_S, next(order), number, None))
    while events and now < until_s:
        now, ticket, number, request = heapq.heappop(events)
        joiner = joiners[number]
        plan = joiner.plan
        if plan.done or plan.hopeless:
            continue
        if request is None:
            heapq.heappush(events, (now + LOOK_S, next(order), number, None))
        elif live.pop((number, request.donor, request.index), None) == ticket:
            donor = donors[request.donor]
            if now >= donor.dies_at:
                plan.failed(request.donor, request.index, Failure.LOST, now)
            elif request.index in donor.lacks:
                plan.failed(request.donor, request.index, Failure.MISSING, now)
            elif donor.busy > 0:
                donor.busy -= 1
                plan.failed(request.donor, request.index, Failure.BUSY, now)
            else:
                donor.sent_bytes += plan.length(request.index)
                told = b"x" * 32 if request.index in donor.lies else digest(request.index)
                verdict = plan.received(request.donor, request.index, told, now)
                joiner.verdicts.append((request.donor, verdict))
                if verdict is Verdict.GOOD:
                    joiner.good.append(request.index)
        ask(number)
        if plan.done:
            joiner.done_at = now
    return now
