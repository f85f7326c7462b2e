"""Peers that this node has heard of: where they may be reached, and which of them are worth telling others.

Two kinds of knowledge, kept apart because they deserve different trust:

* *Records*, signed by the peer itself, for as long as they are valid.  Only these are handed to others, byte for byte.
* *Hints*, places where a peer was reached before, kept on disk for 30 days.  They make a swarm outlive its seeds (FIND-3): a
  node that comes back dials them at once.  They are never handed out.

What goes wrong: thousands of short-lived nodes pass and a look-up finds only the dead (FIND-4).  So an entry knows whether we
are connected to the peer, when it was last heard of, and whether we lost it; what is handed out is first the connected, then what
was heard of in the last 10 minutes, never the lost.  The book is bounded (4,096); the first to go are the failed, then the
expired, then the longest unheard; a peer whose connection lives is never forgotten (FIND-15).  In `internet` scope one /16 may
fill at most a quarter, so that one hoster cannot fill the book.

Pure: time and randomness are arguments.  `now` is monotonic seconds, `now_unix` wall time, used for signed expiries and on disk.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from wire.address import Address, Scope, may_dial
from wire.envelope import NO_RUN, Latest, OpenedRecord
from wire.errors import RemoteProtocolError
from wire.identity import PeerId
from wire.limits import Limits
from wire.neighbours import neighbours
from wire.observed import network_of
from wire.statements import PEER
from wire.unpacking import pack, unpack

# Handed out first: heard of since.  A record is renewed every hour at the latest, a px round takes a minute.
RECENT_S = 600.0
# On disk: 1,000 peers of 16 addresses at ~60 bytes, and as much again.
FILE_MAX_BYTES = 2 << 20
FILE_FORMAT = 2
_MOST_ON_DISK_IN_ONE_ARRAY = 500  # msgpack arrays of more than 1,024 items are refused by `unpack`


@dataclass(slots=True)
class Entry:
    """One peer."""

    peer_id: PeerId
    run: bytes = NO_RUN
    record: OpenedRecord | None = None
    hints: dict[Address, float] = field(default_factory=dict)  # place -> Unix time of the last success
    heard_at: float = float("-inf")  # monotonic
    reached_at: float = 0.0  # Unix time of the last connection, either way
    connected: bool = False
    lost: bool = False  # we were connected, or tried in vain, and have heard nothing since
    failures: int = 0

    def valid(self, now_unix: float, grace_s: float) -> bool:
        return self.record is not None and self.record.statement.not_after + grace_s >= now_unix


class PeerBook:
    """See the module."""

    def __init__(self, own: PeerId, scope: Scope, limits: Limits) -> None:
        self._own = own
        self._scope = scope
        self._limits = limits
        self._entries: dict[PeerId, Entry] = {}
        self._latest = Latest(limits.peer_book_max)
        self.outside: frozenset[str] = frozenset()  # hosts that this node is seen as, or has itself
        self.inside: frozenset[str] = frozenset()  # this machine's addresses
        self.changed = False  # something that belongs on disk

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, peer_id: PeerId) -> Entry | None:
        return self._entries.get(peer_id)

    def records(self) -> tuple[OpenedRecord, ...]:
        """Every record that is kept, valid or not."""
        return tuple(entry.record for entry in self._entries.values() if entry.record is not None)

    def addresses(self, peer_id: PeerId) -> tuple[Address, ...]:
        """Where to dial a peer: what its record names and our scope allows, those that worked last first; then hints, then circuits.

        Private ones in `internet` scope come last, and only if the peer has an outside address of ours: anywhere else they are
        a stranger's (FIND-9).
        """
        entry = self._entries.get(peer_id)
        if entry is None:
            return ()
        named = entry.record.addresses if entry.record is not None else ()
        direct = [address.with_peer(None) for address in named if address.relay is None]
        usable = [address for address in direct if may_dial(address, self._scope)]
        usable.sort(key=lambda address: -entry.hints.get(address, 0.0))
        hints = sorted(entry.hints, key=lambda address: -entry.hints[address])
        circuits = [address for address in named if address.relay not in (None, self._own) and may_dial(address, self._scope)]
        neighbour = any(address.host in self.outside for address in usable)
        private = neighbours(direct, self.inside, self._limits) if neighbour else ()
        return tuple(dict.fromkeys([*usable, *hints, *circuits, *private]))[: self._limits.addresses_per_peer_max]

    def vouchers(self, peer_id: PeerId) -> tuple[bytes, ...]:
        """Those of its record: what relays have promised to it, and what they want to see of whoever calls."""
        entry = self._entries.get(peer_id)
        return () if entry is None or entry.record is None else entry.record.record.vouchers

    # -- what we hear

    def learn(self, opened: OpenedRecord, now: float, now_unix: float) -> bool:
        """Keep a verified record; True if it is newer than what was known.  Raises `Equivocation` and `Distrusted`.

        Our own record is never taken from others (FIND-10).
        """
        peer_id = opened.peer_id
        if peer_id == self._own:
            return False
        entry = self._entries.get(peer_id)
        if entry is None and not self._room_for(opened.addresses):
            return False
        if not self._latest.accept(opened.statement, PEER):
            return False
        if entry is None:
            entry = self._add(peer_id, now_unix)
        entry.record = opened
        entry.run = opened.statement.run
        entry.heard_at = now
        entry.lost = False
        entry.failures = 0
        self.changed = True
        return True

    def connected(self, peer_id: PeerId, now: float, now_unix: float, *, run: bytes | None, address: Address | None) -> None:
        """A connection stands; `address` is where we dialled it, None if it came to us."""
        entry = self._entries.get(peer_id) or self._add(peer_id, now_unix)
        entry.connected, entry.lost, entry.failures, entry.heard_at = True, False, 0, now
        if run is not None:
            entry.run = run
        entry.reached_at = now_unix
        self.changed = True
        if address is not None and address.is_literal and address.relay is None:
            entry.hints[address.with_peer(None)] = now_unix
            while len(entry.hints) > self._limits.addresses_per_peer_max:
                del entry.hints[min(entry.hints, key=lambda item: entry.hints[item])]

    def disconnected(self, peer_id: PeerId, now: float) -> None:
        """The last connection ended."""
        entry = self._entries.get(peer_id)
        if entry is not None:
            entry.connected, entry.lost, entry.heard_at = False, True, now

    def failed(self, peer_id: PeerId) -> None:
        """Dialling it at all its addresses failed."""
        entry = self._entries.get(peer_id)
        if entry is not None and not entry.connected:
            entry.lost = True
            entry.failures += 1
            self.changed = True

    # -- what we tell

    def sample(
        self, count: int, run: bytes, exclude: Iterable[PeerId], now: float, now_unix: float, rng: random.Random
    ) -> list[bytes]:
        """At most `count` records to hand out, as they were signed.  `run`: zeros for any."""
        skip = set(exclude)
        grace_s = self._limits.expiry_grace_s
        worth = [
            entry
            for entry in self._entries.values()
            if entry.valid(now_unix, grace_s)
            and not entry.lost
            and entry.peer_id not in skip
            and run in (NO_RUN, entry.run)
            and (entry.connected or now - entry.heard_at <= RECENT_S)
        ]
        rng.shuffle(worth)
        worth.sort(key=lambda entry: not entry.connected)
        return [entry.record.statement.raw for entry in worth[:count] if entry.record is not None]

    def candidates(self, count: int, now_unix: float, rng: random.Random) -> list[PeerId]:
        """Random peers worth dialling without having been asked to: those that failed least, and none unheard for 30 days."""
        oldest = now_unix - self._limits.dial_hint_life_s
        found = [entry for entry in self._entries.values() if not entry.connected and self._places(entry, oldest)]
        rng.shuffle(found)
        found.sort(key=lambda entry: entry.failures)
        return [entry.peer_id for entry in found[:count]]

    # -- bounds

    def _room_for(self, addresses: Sequence[Address]) -> bool:
        if self._scope is not Scope.INTERNET:
            return True
        network = _network(addresses)
        if network is None:
            return True
        same = sum(_network(entry.record.addresses) == network for entry in self._entries.values() if entry.record is not None)
        return same < self._limits.peer_book_max * self._limits.peer_book_network_share

    def _add(self, peer_id: PeerId, now_unix: float) -> Entry:
        if len(self._entries) >= self._limits.peer_book_max:
            self._evict(now_unix)
        entry = self._entries[peer_id] = Entry(peer_id)
        return entry

    def _evict(self, now_unix: float) -> None:
        grace_s = self._limits.expiry_grace_s
        idle = [entry for entry in self._entries.values() if not entry.connected]
        if idle:
            worst = min(idle, key=lambda entry: (not entry.lost, entry.valid(now_unix, grace_s), entry.heard_at))
            self._latest.forget(worst.peer_id, PEER, worst.run)
            del self._entries[worst.peer_id]

    # -- disk

    def _places(self, entry: Entry, oldest: float) -> dict[Address, float]:
        """Where a peer may be met, each with the Unix time of which that is known.

        The places of a record count from its making: expired ones still serve as hints, for 30 days, and are never handed out.
        """
        made = 0.0
        if entry.record is not None:
            made = max(entry.reached_at, entry.record.statement.not_after - self._limits.peer_record_life_s)
        found = dict.fromkeys(self.addresses(entry.peer_id), made) | entry.hints
        return {address: at for address, at in found.items() if at >= oldest}

    def to_bytes(self, now_unix: float) -> bytes:
        """The last known peers: id, run, places with the time of their last success, failures in a row since.

        At most 1,000: those that did not fail first, of these the ones that we were connected to, then the newest.
        """
        oldest = now_unix - self._limits.dial_hint_life_s
        known = [(entry, places) for entry in self._entries.values() if (places := self._places(entry, oldest))]
        known.sort(key=lambda item: (item[0].failures, not (item[0].hints or item[0].reached_at), -max(item[1].values())))
        rows = [
            [entry.peer_id.raw, entry.run, [[str(address), int(at)] for address, at in places.items()], entry.failures]
            for entry, places in known[: self._limits.known_peers_max]
        ]
        size = _MOST_ON_DISK_IN_ONE_ARRAY
        return pack([FILE_FORMAT, [rows[start : start + size] for start in range(0, len(rows), size)]])

    def load(self, data: bytes, run: bytes | None, now_unix: float) -> int:
        """Take hints from disk; returns how many peers.  Those of another run or older than 30 days are skipped.

        Raises ValueError for a file that is not ours; a row that makes no sense is skipped.
        """
        try:
            version, parts = unpack(data, FILE_MAX_BYTES)
        except (RemoteProtocolError, TypeError, ValueError) as error:
            raise ValueError(f"not a list of known peers: {error}") from None
        if version != FILE_FORMAT or not isinstance(parts, (tuple, list)):
            raise ValueError(f"a list of known peers in another format: {version!r}")
        oldest = now_unix - self._limits.dial_hint_life_s
        count = 0
        for row in (row for part in parts for row in part):
            try:
                raw, row_run, places, failures = row
                peer_id, failures = PeerId(raw), int(failures)
                hints = {Address.parse(text): float(at) for text, at in places if at >= oldest}
            except (TypeError, ValueError):
                continue
            if not hints or peer_id == self._own or (run is not None and row_run not in (run, NO_RUN)):
                continue
            entry = self._entries.get(peer_id) or self._add(peer_id, now_unix)
            entry.run = row_run
            entry.hints.update(hints)
            entry.failures = failures
            count += 1
        return count


def _network(addresses: Sequence[Address]) -> str | None:
    """The /16 (IPv6: /32) of the first literal address that is the peer's own."""
    own = (address for address in addresses if address.is_literal and address.relay is None)
    return next((network_of(address.host) for address in own), None)
