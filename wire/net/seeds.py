"""Staying in touch with the seeds: what a node does from its first second until it is stopped.

What others' swarms taught (FIND-1 .. FIND-8): a silent seed must not end the node, must not delay the next seed, and must say
which kind of silence it is; nodes that start together must not stay two swarms.  So:

* Every entry has a task of its own.  The tasks start 250 ms apart (RFC 8305's delay, for the same reason), so the order of the
  list costs at most that, and never a timeout.
* A failure is retried for ever with full jitter, `uniform(0, min(60 s, 1 s * 2^n))`, counted from the start of the failed try: of
  the usual schemes the one that spreads a crowd best ("Exponential Backoff And Jitter", AWS Architecture Blog, 2015), and a seed
  that returns is met within a minute.  The jitter is this file's own; the per-address back-off of dial.py orders the addresses of
  a name, but does not hold a seed back.  A refusal may be forged, so it slows the tries down, but never ends them.
* Each entry has a state and a reason.  `SeedState` is reported when one of the two changes, not once a retry; and once when the
  last hope is gone, with all reasons (`unreachable`).
* With 8 connected peers the seeds have done their work and are released: no retry then.  One random seed is contacted again
  every 10 to 20 minutes, because swarms that formed apart stay apart otherwise.
* At each contact the seed is asked for the newest list that the run's owner signed.
* Files and URLs are looked at every 60 s; entries that are gone lose their task, new ones get one.  The name of a connected seed is
  resolved every 10 minutes: if it leads elsewhere now, whoever is there is dialled too.

Which connection a peer has is the manager's business; here `Reach` stands for it, so that this file runs without a network.
"""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Protocol

import trio

from wire.envelope import BadEnvelope
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
    retryable: bool = True  # whether waiting may help; tried again in any case, because a refusal may be forged


class Reach(Protocol):
    """What the keeper needs of the network."""

    async def dial_seed(self, entry: SeedEntry) -> PeerId:
        """Connect, or find the connection that exists.  Raises WireError."""
        ...

    async def wait_lost(self, peer_id: PeerId) -> WireError | None:
        """Wait until that peer is no longer connected; why, if that is known."""
        ...

    def connected_peers(self) -> int: ...

    async def moved(self, entry: SeedEntry, peer_id: PeerId) -> bool:
        """Whether the entry is a name that leads elsewhere than to where that peer was reached."""
        ...

    async def ask_list(self, peer_id: PeerId, newer_than: int) -> bytes:
        """The newest signed list of our run that this peer has, b"" if none is newer.  Raises WireError."""
        ...


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
        fetch: Callable[[str], Awaitable[bytes]] | None = None,
        unreachable: Callable[[tuple[SeedState, ...]], None] = lambda states: None,
        signed: Callable[[bytes], None] = lambda data: None,
    ) -> None:
        """`fetch`: the content of a URL, raises `SeedListError`.  `unreachable` hears all states when the last seed has failed.

        `signed` hears of each newer list of the run's owner, to keep it.
        """
        self._seeds = seeds
        self._reach = reach
        self._limits = limits
        self._report = report
        self._complain = complain
        self._rng = rng
        self._fetch = fetch
        self._unreachable = unreachable
        self._signed = signed
        self._said: set[str] = set()  # complaints about places, each once
        self._hopeless = False
        self._nursery: trio.Nursery | None = None
        self._scopes: dict[SeedEntry, trio.CancelScope] = {}
        self.states: dict[SeedEntry, SeedState] = {}

    @property
    def any_connected(self) -> bool:
        return any(state.status is SeedStatus.CONNECTED for state in self.states.values())

    async def run(self) -> None:
        """Never returns.  A cancel ends all tasks; connections that were made stay with the manager."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._apply()
            nursery.start_soon(self._revisit)
            if (fetch := self._fetch) is not None:
                for url in self._seeds.urls:
                    nursery.start_soon(self._follow, url, fetch)
            while True:
                await trio.sleep(self._limits.seed_file_check_s)
                self._heeding(self._seeds.reread)
                self._apply()

    async def _follow(self, url: str, fetch: Callable[[str], Awaitable[bytes]]) -> None:
        """Fetch a list again and again."""
        while True:
            try:
                content = await fetch(url)
            except SeedListError as error:
                self._complain_once(f"{error}; tried again for ever")
            else:
                self._heeding(partial(self._seeds.put, url, content))
                self._apply()
            await trio.sleep(self._limits.seed_file_check_s * self._rng.uniform(0.8, 1.0))

    def _heeding(self, change: Callable[[], object]) -> None:
        try:
            change()
        except SeedListError as error:
            self._complain_once(f"the seed list was changed and is not used: {error}")
        else:
            self._said.clear()

    def _complain_once(self, text: str) -> None:
        if text not in self._said and len(self._said) < self._limits.seeds_max:
            self._said.add(text)
            self._complain(text)

    def _apply(self) -> None:
        """Tasks for the entries that there are now."""
        entries = self._seeds.entries
        for entry in set(self._scopes) - set(entries):
            self._scopes.pop(entry).cancel()
            self._set(SeedState(entry, SeedStatus.REMOVED))
            del self.states[entry]
        assert self._nursery is not None
        for index, entry in enumerate(entry for entry in entries if entry not in self._scopes):
            self._scopes[entry] = trio.CancelScope()
            self._set(SeedState(entry, SeedStatus.DIALLING))
            self._nursery.start_soon(self._keep, entry, index * self._limits.seed_stagger_s)

    def _set(self, state: SeedState) -> None:
        if self.states.get(state.entry) != state:
            self.states[state.entry] = state
            self._report(state)
        others = [known for known in self.states.values() if known.status not in (SeedStatus.SELF, SeedStatus.REMOVED)]
        hopeless = bool(others) and all(known.status is SeedStatus.FAILED for known in others)
        if hopeless and not self._hopeless:
            self._unreachable(tuple(others))
        self._hopeless = hopeless

    async def _keep(self, entry: SeedEntry, delay_s: float) -> None:
        limits = self._limits
        with self._scopes[entry]:
            await trio.sleep(delay_s)
            failures = 0
            while True:
                if self._enough():
                    self._set(SeedState(entry, SeedStatus.RELEASED))
                    await trio.sleep(self._pause(limits.seed_retry_max_s))
                    continue
                began = trio.current_time()
                try:
                    peer_id = await self._reach.dial_seed(entry)
                except WireError as error:
                    if error.code is Code.SELF:
                        self._set(SeedState(entry, SeedStatus.SELF, "this entry is the node itself"))
                        return
                    self._set(failure_state(entry, error))
                    failures = min(failures + 1, 16)
                    most_s = limits.seed_retry_max_s
                    if error.retryable:
                        most_s = min(most_s, limits.seed_retry_min_s * 2.0**failures)
                    took_s = trio.current_time() - began
                    await trio.sleep(self._pause(max(limits.seed_retry_min_s, most_s - took_s)))
                    continue
                failures = 0
                await self._stay(entry, peer_id)
                await trio.sleep(self._pause(limits.seed_retry_min_s))

    async def _stay(self, entry: SeedEntry, peer_id: PeerId) -> None:
        """Until the connection to a seed has ended."""
        self._met(entry, peer_id)
        while True:
            with trio.move_on_after(self._limits.seed_resolve_s):
                reason = await self._reach.wait_lost(peer_id)
                words = "the connection ended" + (f": {reason}" if reason is not None else "")
                if self._enough():
                    self._set(SeedState(entry, SeedStatus.RELEASED))
                else:
                    self._set(SeedState(entry, SeedStatus.FAILED, words, ("lost",), peer_id))
                return
            if await self._reach.moved(entry, peer_id):
                try:
                    peer_id = await self._reach.dial_seed(entry)
                except WireError:
                    continue  # the one that we have still works
                self._met(entry, peer_id)

    def _met(self, entry: SeedEntry, peer_id: PeerId) -> None:
        self._set(SeedState(entry, SeedStatus.CONNECTED, peer_id=peer_id))
        assert self._nursery is not None
        self._nursery.start_soon(self._ask_list, peer_id)

    async def _ask_list(self, peer_id: PeerId) -> None:
        """The owner's newest list, if this seed has a newer one; what is not in order is said, and not used."""
        signed = self._seeds.signed
        known = signed.newest(signed.run)
        try:
            data = await self._reach.ask_list(peer_id, 0 if known is None else known.statement.seq)
            if not data or signed.take(data, time.time()) is None:
                return
        except BadEnvelope as error:
            self._complain_once(f"a signed seed list from {peer_id.short} is not believed: {error}")
        except WireError:
            pass  # an older seed, or one that is going: the next contact asks again
        else:
            self._signed(data)
            self._apply()

    def _enough(self) -> bool:
        return self._reach.connected_peers() >= self._limits.seeds_released_at_peers

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
                await self._ask_list(await self._reach.dial_seed(entry))
            except WireError as error:
                if entry in self._scopes:
                    self._set(failure_state(entry, error))


def failure_state(entry: SeedEntry, error: WireError) -> SeedState:
    """The state that a failed dial leaves, with each address's cause."""
    if isinstance(error, DialFailed) and error.causes:
        causes = error.causes
        reason = "; ".join(f"{address.host}:{address.port}: {cause}" for address, cause in causes.items())
        kinds = tuple(cause.kind for cause in causes.values())
        return SeedState(entry, SeedStatus.FAILED, reason, kinds, retryable=error.retryable)
    cause = cause_of(error)
    return SeedState(entry, SeedStatus.FAILED, str(cause), (cause.kind,), retryable=cause.retryable)
