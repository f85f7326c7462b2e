"""Who may forward how much now: the relay's rate, shared fairly over the pairs that it connects.

What goes wrong.  A relay that copies as fast as it can fills its own household's line, and gives whoever opens the most circuits
the most of it.  One that cuts circuits over a limit breaks the pipeline it was to save.  So bytes wait here instead: over the
rate the relay does not read, returns no credit, and the sender feels backpressure as on any slow line.

* One token bucket for the relay, `rate` bytes per second, `burst` of one second: bytes of both directions and of all bulk
  circuits come out of it, since each costs the relay's upload once.
* One bucket for each peer with the cap of 160 Mbit/s, so that one pair with a fast line alone does not take it all.
* Deficit round robin (Shreedhar and Varghese, SIGCOMM 1995) over *pairs* of peers, a quantum of 64 KiB a turn.  Over pairs, because
  circuits are free to open: a pair with ten gets what a pair with one gets.  A pair that has nothing waiting has no turn and saves
  nothing up; its part goes to the others.  Pieces can be cut anywhere, so a turn that the bucket interrupts goes on later.
* Within a pair what carries its control connection goes before its lanes: a full lane must not hold up the ping that shows that
  the relay lives.
* A pair whose peer is at its cap is passed over and keeps its place and the rest of its turn.

Pieces are at least 16 KiB, or 5 ms at the rate up to the quantum, unless less is waiting: smaller ones cost a wake-up each and bring
nothing.  A piece that was granted is paid: ask only for bytes that are there to be forwarded.

Considered and left: a bucket a pair at its share (leaves the part of idle ones unused); weights by stake or work done (the relay
cannot know them); a queue a peer for capped pairs (O(1) where this is O(capped pairs) a pass, at most rate / 256 KiB of them).

An *item* is whatever waits on its own, usually (circuit, direction).  Time is the caller's monotonic clock in seconds.
Source: the project's wire specification, section "Relay".
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from wire.limits import DEFAULT_LIMITS, Limits
from wire.rates import Bucket

T = TypeVar("T", bound=Hashable)

PIECE_MIN_BYTES = 16 << 10  # a largest TLS-like record; ~30 us of Python each
PIECE_S = 0.005  # a wake-up each
ROUNDING = 0.5  # bytes: at the moment that `next_time` named, a bucket may lack what a float's last digits are worth


@dataclass(slots=True)
class _Peer:
    bucket: Bucket
    pairs: int = 0


@dataclass(slots=True, eq=False)
class _Pair(Generic[T]):
    key: frozenset[Hashable]
    peers: tuple[_Peer, ...]
    items: int = 0
    deficit: int = 0
    in_ring: bool = False
    capped: int = 0
    """Passes in which a peer's cap held it up."""
    queues: tuple[deque[T], deque[T]] = field(default_factory=lambda: (deque(), deque()))
    """Items that wait: control, bulk."""


@dataclass(slots=True, eq=False)
class _Item(Generic[T]):
    pair: _Pair[T]
    queue: int
    waiting: int = 0
    since: tuple[int, int] = (0, 0)
    """Counts of dry passes, of all and of its pair, when it began to wait."""
    told: bool = False


class FairShare(Generic[T]):
    """`rate` bytes per second for all, `peer_cap` for each peer; 0 as rate grants nothing.  Change `rate` by `set_rate`."""

    __slots__ = ("_bucket", "_dry", "_idle", "_items", "_limits", "_next", "_pairs", "_peer_cap", "_peers", "_piece", "_ring", "rate")

    def __init__(self, rate: float, peer_cap: float | None = None, *, now: float, limits: Limits = DEFAULT_LIMITS) -> None:
        self._limits = limits
        self._peer_cap = limits.relay_peer_bytes_per_s if peer_cap is None else peer_cap
        self._items: dict[T, _Item[T]] = {}
        self._pairs: dict[frozenset[Hashable], _Pair[T]] = {}
        self._peers: dict[Hashable, _Peer] = {}
        # Peers without a circuit: forgotten when their bucket is full again, so that nobody gets a new burst by coming anew.
        self._idle: OrderedDict[Hashable, float] = OrderedDict()
        self._ring: deque[_Pair[T]] = deque()
        self._dry = 0  # passes that ended because the bucket was empty
        self._next = 0.0
        self._bucket = Bucket(rate, 0.0, now)
        self.rate = rate
        self.set_rate(rate, now)
        self._bucket.tokens = self._bucket.burst

    def set_rate(self, rate: float, now: float) -> None:
        """Another rate from now on; what was saved up is cut to the new burst."""
        limits, bucket = self._limits, self._bucket
        bucket.gain(now)
        self._piece = int(min(max(PIECE_MIN_BYTES, rate * PIECE_S), limits.relay_quantum_bytes))
        self.rate = bucket.per_s = rate
        # A burst below a piece would never grant one.
        bucket.burst = max(rate * limits.relay_burst_s, self._piece) if rate > 0 else 0.0
        bucket.tokens = min(bucket.tokens, bucket.burst)
        self._next = 0.0

    def add(self, item: T, peers: tuple[Hashable, Hashable], *, control: bool, now: float) -> None:
        """A new item of the pair `peers`, in whatever order they stand.  Raises ValueError for an item that is there."""
        if item in self._items:
            raise ValueError(f"{item!r} is there already")
        self._forget(now)
        key = frozenset(peers)
        pair = self._pairs.get(key)
        if pair is None:
            pair = self._pairs[key] = _Pair(key, tuple(self._peer(peer, now) for peer in key))
        pair.items += 1
        self._items[item] = _Item(pair, 0 if control else 1)

    def ask(self, item: T, waiting: int) -> None:
        """`waiting` bytes of `item` are there to be forwarded: all of them, those asked for before included."""
        entry = self._items[item]
        if waiting > 0 and not entry.waiting:
            pair = entry.pair
            entry.since = self._dry, pair.capped
            pair.queues[entry.queue].append(item)
            if not pair.in_ring:
                pair.in_ring = True
                self._ring.append(pair)
            self._next = 0.0
        elif waiting <= 0 and entry.waiting:
            entry.pair.queues[entry.queue].remove(item)
        entry.waiting = max(0, waiting)

    def grant(self, now: float) -> list[tuple[T, int]]:
        """(item, bytes) to forward now, in this order; an item may come several times."""
        self._forget(now)
        self._bucket.gain(now)
        grants: list[tuple[T, int]] = []
        ring, passed_over = self._ring, []
        wait = self._next = float("inf")
        while ring:
            pair = ring[0]
            queue = pair.queues[0] or pair.queues[1]
            if not queue:
                ring.popleft()
                pair.in_ring, pair.deficit = False, 0
                continue
            if pair.deficit <= 0:
                pair.deficit += self._limits.relay_quantum_bytes
            entry = self._items[queue[0]]
            size = min(entry.waiting, pair.deficit)
            least = min(size, self._piece)
            if self._bucket.tokens + ROUNDING < least:
                self._dry += 1
                wait = min(wait, self._until(self._bucket, least))
                break
            for peer in pair.peers:
                peer.bucket.gain(now)
            lowest = min(peer.bucket.tokens for peer in pair.peers)
            if lowest + ROUNDING < least:
                pair.capped += 1
                wait = min(wait, max(self._until(peer.bucket, least) for peer in pair.peers))
                passed_over.append(ring.popleft())
                continue
            size = int(min(size, self._bucket.tokens + ROUNDING, lowest + ROUNDING))
            grants.append((queue[0], size))
            self._bucket.tokens -= size
            for peer in pair.peers:
                peer.bucket.tokens -= size
            entry.waiting -= size
            pair.deficit -= size
            if not entry.waiting:
                queue.popleft()
            if pair.deficit <= 0:
                queue.rotate(-1)  # the next turn is another item's
                ring.rotate(-1)
        ring.extendleft(reversed(passed_over))
        self._next = now + wait
        return grants

    def next_time(self, now: float) -> float | None:
        """When `grant` will have something; None if nothing waits, or the rate is 0."""
        if not self._ring or self.rate <= 0:
            return None
        return max(now, self._next)

    def throttled(self, item: T) -> bool:
        """True once in the life of an item: it waits because of the rate or a peer's cap, not for its turn only."""
        entry = self._items.get(item)
        if entry is None or entry.told or not entry.waiting or entry.since == (self._dry, entry.pair.capped):
            return False
        entry.told = True
        return True

    def remove(self, item: T, now: float) -> None:
        """Forget an item, whatever waits of it; one that is not there is as good as removed."""
        entry = self._items.pop(item, None)
        if entry is None:
            return
        pair = entry.pair
        if entry.waiting:
            pair.queues[entry.queue].remove(item)
        pair.items -= 1
        if pair.items:
            return
        del self._pairs[pair.key]
        if pair.in_ring:
            self._ring.remove(pair)
        for key in pair.key:
            peer = self._peers[key]
            peer.pairs -= 1
            if not peer.pairs:
                self._idle[key] = now

    def gauges(self) -> dict[str, int]:
        """Counts; all 0 when the last item was removed."""
        return {
            "share_items": len(self._items),
            "share_pairs": len(self._pairs),
            "share_pairs_waiting": len(self._ring),
            "share_peers": len(self._peers) - len(self._idle),
            "share_waiting_bytes": sum(entry.waiting for entry in self._items.values()),
        }

    def _peer(self, key: Hashable, now: float) -> _Peer:
        peer = self._peers.get(key)
        if peer is None:
            burst = max(self._peer_cap * self._limits.relay_burst_s, self._limits.relay_quantum_bytes)
            peer = self._peers[key] = _Peer(Bucket(self._peer_cap, burst, now))
        self._idle.pop(key, None)
        peer.pairs += 1
        return peer

    def _forget(self, now: float) -> None:
        while self._idle:
            key, since = next(iter(self._idle.items()))
            bucket = self._peers[key].bucket
            if now < since + bucket.burst / bucket.per_s:
                return
            del self._idle[key], self._peers[key]

    @staticmethod
    def _until(bucket: Bucket, tokens: float) -> float:
        """Seconds until it holds so many."""
        return max(0.0, (tokens - bucket.tokens) / bucket.per_s) if bucket.per_s > 0 else float("inf")
