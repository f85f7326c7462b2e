"""Whom to be connected to again: peers that are wanted and are not there are dialled until they are.

What goes wrong without it: a line is down for a minute, both ends notice, and two nodes that work together stay apart until one
of them happens to look (NAT-8).  What goes wrong with the obvious remedy: a node that many know restarts, and all dial it in the same
tick; a peer that said "you are banned" or "I am stopping" is asked again every second.

Who is wanted is said from above (`want`, a set of ids); in addition a peer that we dialled and talked with is missed for ten minutes
after it was lost.  The rhythm is that of the back-off of its addresses (dial.py): whoever fails is tried again when that allows,
sooner when a newer record came or the local network changed.  Of two that know each other the lower id dials first and the other a
second later, so that the usual case needs no tie-break between two connections; a random part of a second more after a loss
spreads a crowd, and at most 16 are dialled at once.  What the peer said when it went decides by this table:

    lost without a word       both: again
    SUPERSEDED                both: again (the winner was lost, too)
    IDLE                      wanted: again; else not before somebody calls
    SHUTDOWN                  wanted: later, if it has not come by itself; else never
    busy, full, too often     wanted: later; else never
    banned, wrong run, ...    never, unless it comes by itself
    our own goodbye           never

Who was told that it is banned is remembered, whether it wanted that peer or not: `want` comes with every change of what this node does,
and would ask again each time.  Only the word of the peer itself counts.  A refusal in a hello comes in clear and may be forged, so
it costs a back-off and no more (causes.py).
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from enum import Enum

import trio

from wire.errors import Code, ConnectionLost, WireError
from wire.identity import PeerId
from wire.limits import Limits

DIALS_AT_ONCE = 16
MISSED_MOST = 64  # peers that nobody asked for
BARRED_MOST = 1024  # of those that ban us; 32 bytes each, and each has cost a handshake
SECOND_DIALLER_WAITS_S = 1.0
SPREAD_S = 1.0
DIAL_S = 30.0  # 16 addresses, 8 at once, 5 s each, and as much again for a machine that computes
RETRY_MOST_S = 60.0  # after failures that leave no address to back off from


class Then(Enum):
    """What follows a loss."""

    AGAIN = "again"
    LATER = "later"
    NEVER = "never"


# code of the goodbye -> for those who are wanted, for those who are only missed
_GOODBYES: dict[Code, tuple[Then, Then]] = {
    Code.SUPERSEDED: (Then.AGAIN, Then.AGAIN),
    Code.IDLE: (Then.AGAIN, Then.NEVER),
    Code.SHUTDOWN: (Then.LATER, Then.NEVER),
    Code.OK: (Then.LATER, Then.NEVER),
    Code.REFUSED: (Then.LATER, Then.NEVER),
    Code.RESOURCE_LIMIT: (Then.LATER, Then.NEVER),
    Code.RATE_LIMITED: (Then.LATER, Then.NEVER),
    Code.TIMEOUT: (Then.LATER, Then.NEVER),
    Code.INTERNAL: (Then.LATER, Then.NEVER),
}


def after(reason: WireError, wanted: bool) -> Then:
    """What follows when the last connection to a peer ended for this reason."""
    if isinstance(reason, ConnectionLost):
        return Then.AGAIN
    if reason.local and reason.code not in (Code.SUPERSEDED, Code.IDLE):
        return Then.NEVER
    return _GOODBYES.get(reason.code, (Then.NEVER, Then.NEVER))[0 if wanted else 1]


@dataclass(slots=True)
class _Missing:
    """A peer that is not there.  `until`: given up then, unless it is wanted."""

    at: float  # not dialled before; infinite: not at all
    until: float
    failures: int = 0


class Wanted:
    """Runs one task.  `connect(peer_id, DIAL_S)` raises WireError; `present(peer_id)` says whether a connection stands."""

    def __init__(
        self,
        own: PeerId,
        limits: Limits,
        *,
        connect: Callable[[PeerId, float], Awaitable[object]],
        present: Callable[[PeerId], bool],
        rng: random.Random,
    ) -> None:
        self._own = own
        self._limits = limits
        self._connect = connect
        self._present = present
        self._rng = rng
        self._wanted: frozenset[PeerId] = frozenset()
        self._missing: dict[PeerId, _Missing] = {}
        self._barred: dict[PeerId, None] = {}  # they have banned us
        self._dialling: set[PeerId] = set()
        self._look = trio.Event()

    # -- what we are told

    def want(self, peers: Iterable[PeerId]) -> None:
        """From now on these, and no others, are wanted.  Those who are not there are dialled."""
        wanted = frozenset(peers) - {self._own}
        if wanted == self._wanted:
            return
        now = trio.current_time()
        self._wanted, before = wanted, self._wanted
        for peer_id in wanted - before:
            if peer_id not in self._missing and peer_id not in self._barred and not self._present(peer_id):
                self._missing[peer_id] = _Missing(now + self._turn_s(peer_id), now)
        for peer_id in before - wanted:
            if (found := self._missing.get(peer_id)) is not None and found.until <= now:
                del self._missing[peer_id]
        self._look.set()

    def lost(self, peer_id: PeerId, reason: WireError, *, missed: bool) -> None:
        """The last connection to a peer ended.  `missed`: we dialled it and talked with it."""
        wanted = peer_id in self._wanted
        then = after(reason, wanted)
        if reason.code is Code.BANNED and not reason.local:
            self._barred[peer_id] = None
            for each in list(self._barred)[:-BARRED_MOST]:
                del self._barred[each]
        if not wanted and (not missed or then is Then.NEVER):
            return
        now, limits = trio.current_time(), self._limits
        at = float("inf")
        if then is not Then.NEVER:
            at = now + self._turn_s(peer_id) + self._rng.uniform(0.0, SPREAD_S)
        if then is Then.LATER:
            at += max(limits.redial_later_s, reason.retry_after or 0.0) * self._rng.uniform(1.0, 1.5)
        self._missing[peer_id] = _Missing(at, now + limits.redial_missed_s if missed else now)
        unasked = [each for each in self._missing if each not in self._wanted]
        for each in unasked[:-MISSED_MOST]:
            del self._missing[each]
        self._look.set()

    def found(self, peer_id: PeerId) -> None:
        """It is connected, whoever dialled."""
        self._missing.pop(peer_id, None)
        self._barred.pop(peer_id, None)

    def barred(self, peer_id: PeerId) -> bool:
        """Whether it has banned us: nobody should dial it, unless it comes by itself."""
        return peer_id in self._barred

    def news(self, peer_id: PeerId) -> None:
        """A newer record: its addresses may be others, and it lives."""
        found = self._missing.get(peer_id)
        if found is not None and found.at != float("inf"):
            self._hurry(found)

    def network_changed(self) -> None:
        """What failed before says nothing."""
        for found in self._missing.values():
            if found.at != float("inf"):
                self._hurry(found)

    def _hurry(self, found: _Missing) -> None:
        found.failures = 0
        found.at = min(found.at, trio.current_time() + self._rng.uniform(0.0, SPREAD_S))
        self._look.set()

    def _turn_s(self, peer_id: PeerId) -> float:
        return 0.0 if self._own < peer_id else SECOND_DIALLER_WAITS_S

    # -- the task

    async def run(self) -> None:
        """For ever.  A cancel ends the dials."""
        async with trio.open_nursery() as nursery:
            while True:
                self._look = trio.Event()
                with trio.CancelScope(deadline=self._start_due(nursery)):
                    await self._look.wait()

    def _start_due(self, nursery: trio.Nursery) -> float:
        """Begin what is due; gives the time of the next."""
        now, soonest = trio.current_time(), float("inf")
        for peer_id, found in list(self._missing.items()):
            if peer_id in self._dialling:
                continue
            if peer_id not in self._wanted and found.until <= now:
                del self._missing[peer_id]
            elif found.at > now:
                soonest = min(soonest, found.at)
            elif len(self._dialling) < DIALS_AT_ONCE:
                self._dialling.add(peer_id)
                nursery.start_soon(self._dial, peer_id, found)
        return soonest

    async def _dial(self, peer_id: PeerId, found: _Missing) -> None:
        try:
            await self._connect(peer_id, DIAL_S)
            if self._present(peer_id):  # it may have been lost again before this task runs
                self.found(peer_id)
        except WireError as error:
            found.failures += 1
            pause_s = min(RETRY_MOST_S, 2.0 ** min(found.failures, 16)) * self._rng.uniform(0.5, 1.0)
            found.at = trio.current_time() + max(pause_s, (error.retry_after or 0.0) + self._rng.uniform(0.0, SPREAD_S))
        finally:
            self._dialling.discard(peer_id)
            self._look.set()
