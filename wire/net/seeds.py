"""Staying in touch with the seeds: what a node does from its first second until it is stopped.

What others' swarms taught (FIND-1 .. FIND-8): a silent seed must not end the node, must not delay the next seed, and must say
which kind of silence it is; nodes that start together must not stay two swarms.  So:

* Every entry has a task of its own.  The tasks start 250 ms apart (RFC 8305's delay, for the same reason), so the order of the
  list costs at most that, and never a timeout.
* A failure is retried for ever with full jitter, `uniform(0, min(60 s, 1 s * 2^n))`: of the usual schemes the one that spreads a
  crowd best ("Exponential Backoff And Jitter", AWS Architecture Blog, 2015).  The jitter is this file's own; the per-address
  back-off of dial.py orders the addresses of a name, but does not hold a seed back.
* Each entry has a state and a reason.  `SeedState` is reported when one of the two changes, not once a retry.
* With 8 connected peers the seeds have done their work and are released: no retry then.  One random seed is contacted again
  every 10 to 20 minutes, because swarms that formed apart stay apart otherwise.
* The file is looked at every 60 s; entries that are gone lose their task, new ones get one.

Which connection a peer has is the manager's business; here `Reach` stands for it, so that this file runs without a network.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import trio

from wire.errors import Code, WireError
from wire.identity import PeerId
from wire.limits import Limits
from wire.net.causes import cause_of
from wire.net.dial import DialFailed
from wire.net.seedlist import SeedEntry, SeedList, SeedListError


class SeedStatus(StrEnum):
    DIALLING = "dialling"  # not heard of yet
    CONNECTED = "connected"
    FAILED = "failed"  # the last try failed; tried again for ever
    RELEASED = "released"  # enough peers are connected
    SELF = "self"  # this node itself
    REMOVED = "removed"  # no longer in the list


@dataclass(frozen=True, slots=True)
class SeedState:
    """What is known of one seed.  Also the event that reports a change of it."""

    entry: SeedEntry
    status: SeedStatus
    reason: str = ""  # in words, for people: one cause an address
    kinds: tuple[str, ...] = ()  # `Cause.kind` of each address, for programs
    peer_id: PeerId | None = None  # who answers there


class Reach(Protocol):
    """What the keeper needs of the network."""

    async def dial_seed(self, entry: SeedEntry) -> PeerId:
        """Connect, or find the connection that exists.  Raises WireError."""
        ...

    async def wait_lost(self, peer_id: PeerId) -> WireError | None:
        """Wait until that peer is no longer connected; why, if that is known."""
        ...

    def connected_peers(self) -> int: ...


class SeedKeeper:
    """Runs one task a seed.  `states` may be read at any time."""

    def __init__(
        self,
        seeds: SeedList,
        reach: Reach,
        limits: Limits,
        *,
        report: Callable[[SeedState], None],
        complain: Callable[[str], None],
        rng: random.Random,
    ) -> None:
        self._seeds = seeds
        self._reach = reach
        self._limits = limits
        self._report = report
        self._complain = complain
        self._rng = rng
        self._scopes: dict[SeedEntry, trio.CancelScope] = {}
        self.states: dict[SeedEntry, SeedState] = {}

    @property
    def any_connected(self) -> bool:
        return any(state.status is SeedStatus.CONNECTED for state in self.states.values())

    async def run(self) -> None:
        """Never returns.  A cancel ends all tasks; connections that were made stay with the manager."""
        async with trio.open_nursery() as nursery:
            self._start_new(nursery)
            nursery.start_soon(self._revisit)
            while True:
                await trio.sleep(self._limits.seed_file_check_s)
                self._reread(nursery)

    def _start_new(self, nursery: trio.Nursery) -> None:
        new = [entry for entry in self._seeds.entries if entry not in self._scopes]
        for index, entry in enumerate(new):
            self._scopes[entry] = trio.CancelScope()
            self._set(SeedState(entry, SeedStatus.DIALLING))
            nursery.start_soon(self._keep, entry, index * self._limits.seed_stagger_s)

    def _reread(self, nursery: trio.Nursery) -> None:
        try:
            if not self._seeds.reread(self._limits):
                return
        except SeedListError as error:
            self._complain(f"the seed list was changed and is not used: {error}")
            return
        for entry in set(self._scopes) - set(self._seeds.entries):
            self._scopes.pop(entry).cancel()
            self._set(SeedState(entry, SeedStatus.REMOVED))
            del self.states[entry]
        self._start_new(nursery)

    def _set(self, state: SeedState) -> None:
        if self.states.get(state.entry) != state:
            self.states[state.entry] = state
            self._report(state)

    async def _keep(self, entry: SeedEntry, delay_s: float) -> None:
        limits = self._limits
        with self._scopes[entry]:
            await trio.sleep(delay_s)
            failures = 0
            while True:
                if self._reach.connected_peers() >= limits.seeds_released_at_peers:
                    self._set(SeedState(entry, SeedStatus.RELEASED))
                    await trio.sleep(self._pause(limits.seed_retry_max_s))
                    continue
                try:
                    peer_id = await self._reach.dial_seed(entry)
                except WireError as error:
                    if error.code is Code.SELF:
                        self._set(SeedState(entry, SeedStatus.SELF, "this entry is the node itself"))
                        return
                    self._set(failure_state(entry, error))
                    failures = min(failures + 1, 16)
                    await trio.sleep(self._pause(min(limits.seed_retry_max_s, limits.seed_retry_min_s * 2.0**failures)))
                    continue
                failures = 0
                self._set(SeedState(entry, SeedStatus.CONNECTED, peer_id=peer_id))
                reason = await self._reach.wait_lost(peer_id)
                words = "the connection ended" + (f": {reason}" if reason is not None else "")
                self._set(SeedState(entry, SeedStatus.FAILED, words, ("lost",), peer_id))
                await trio.sleep(self._pause(limits.seed_retry_min_s))

    def _pause(self, most_s: float) -> float:
        return self._rng.uniform(0.0, most_s)

    async def _revisit(self) -> None:
        """Contact one random seed now and then, however many peers there are."""
        while True:
            await trio.sleep(self._rng.uniform(self._limits.seed_revisit_min_s, self._limits.seed_revisit_max_s))
            released = [entry for entry, state in self.states.items() if state.status is SeedStatus.RELEASED]
            if not released:
                continue
            entry = self._rng.choice(released)
            try:
                await self._reach.dial_seed(entry)
            except WireError as error:
                self._set(failure_state(entry, error))


def failure_state(entry: SeedEntry, error: WireError) -> SeedState:
    """The state that a failed dial leaves, with each address's cause."""
    if isinstance(error, DialFailed) and error.causes:
        causes = error.causes
        reason = "; ".join(f"{address.host}:{address.port}: {cause}" for address, cause in causes.items())
        return SeedState(entry, SeedStatus.FAILED, reason, tuple(cause.kind for cause in causes.values()))
    cause = cause_of(error)
    return SeedState(entry, SeedStatus.FAILED, str(cause), (cause.kind,))
