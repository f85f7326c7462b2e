"""The relay's table: who holds a place here, who may be connected to whom, and what each circuit has used.

A relay works for strangers with its own line, so everything that it does for them is counted here, before it is done.

What goes wrong.  It connects to somebody who never asked to be reached, or is gone, and the caller waits for a timeout (NAT-5).
An old connection of a peer ends after its new one has reserved, and takes the new place along.  Relays are chained, and bytes
circle.  One line takes all places, one stranger all circuits of a target.  A circuit that ended without a word is counted for
ever, until the relay is "full" while it is idle.  Hence:

* A place belongs to a peer *and* to one connection; `connection_ended` names both, and voids only what they hold together.
* A refusal says which rule refused (`relayrefusals.py`), and changes nothing.
* A place that was lost is remembered for a minute, to tell "gone, try again" from "never heard of", and to let a peer whose line
  failed come back without paying for it.
* Everything counted is counted once at opening and once at closing; `close` twice is as good as once.

Classes.  `signal` is for anyone, slow, short and small.  `bulk` is for members only, without an end: its rate is shared
(`fairshare.py`) and not capped; one more pair is refused when the share of all would fall below what is of use.  Signal circuits
count for both ends, and a pair may have two of them, so that one stranger cannot hold all four of a target; nor all 32 of bulk.

Limits are of this relay, `Limits` has them with their reasons.  The state is bounded by them; nothing is kept for a caller
that was refused, but the count of its requests.  What is done for each piece of a circuit is O(1); `reserve`, `tick` and `next_time`
look at every place.

Sans-IO: time is the caller's monotonic clock in seconds.  Sealing and opening vouchers (`vouchers.py`) is the caller's: it opens
the voucher first and answers with the code of `BadEnvelope`, then asks `connect`.
Source: the project's wire specification, section "Relay"; the shape is that of libp2p's circuit relay v2 (specs/relay/circuit-v2.md).
"""

from __future__ import annotations

import ipaddress
from collections import Counter, OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from wire.identity import PeerId
from wire.limits import DEFAULT_LIMITS, Limits
from wire.rates import Bucket
from wire.relaymessages import Purpose, RelayClass
from wire.relayrefusals import Refusal, Why

__all__ = ["Circuit", "Ended", "Granted", "Refusal", "RelayTable", "Why", "line_of"]

K = TypeVar("K", bound=Hashable)
Pair = frozenset[PeerId]
FULL_RETRY_S = 60.0  # a place or circuit becomes free when somebody leaves, which nobody knows; a minute costs the relay nothing
GONE_RETRY_S = 5.0  # a peer whose connection closed dials again at once and reserves


@dataclass(frozen=True, slots=True)
class Granted:
    """A place.  `expires` on the caller's clock; `rate`: bytes per second that a circuit of this class can expect now."""

    peer: PeerId
    cls: RelayClass
    expires: float
    rate: int
    renewed: bool
    """The peer held a place before."""


@dataclass(slots=True)
class Circuit:
    """Two ends that are connected here.  `up` is from source to target.  Read by everybody, changed by the table only."""

    id: int
    source: PeerId
    target: PeerId
    cls: RelayClass
    purpose: Purpose
    opened: float
    ends: float | None
    """When it is over, however little it carried; None for bulk."""
    up_bytes: int = 0
    down_bytes: int = 0
    open: bool = True
    _paces: tuple[Bucket, Bucket] | None = None

    @property
    def pair(self) -> Pair:
        return frozenset((self.source, self.target))


@dataclass(frozen=True, slots=True)
class Ended:
    """A circuit that the table closed, and why."""

    circuit: Circuit
    refusal: Refusal


@dataclass(slots=True)
class _Place:
    cls: RelayClass
    network: str
    since: float
    expires: float
    connection: Hashable
    circuits: set[int]


@lru_cache(4096)  # asked for every connection that stands, whenever another comes
def line_of(host: str) -> str:
    """The line that an address belongs to: its IPv4 /24 or IPv6 /48.  Anything that is no IP address is one of its own."""
    try:
        ip = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    return str(ipaddress.ip_network((ip, 24 if ip.version == 4 else 48), strict=False))


class RelayTable:
    """Of one relay process.  `bulk_rate`: bytes per second that it relays in class bulk, 0 = none; may be set anew at any time."""

    __slots__ = (
        "_circuits", "_ended", "_limits", "_networks", "_next_id", "_pairs", "_per_peer", "_places", "_requests", "bulk_rate", "stopping",
    )  # fmt: skip

    def __init__(self, bulk_rate: float, limits: Limits = DEFAULT_LIMITS) -> None:
        self.bulk_rate = bulk_rate
        self.stopping = False  # set once: no new places and circuits, those that stand go on
        self._limits = limits
        self._places: dict[PeerId, _Place] = {}
        self._networks: Counter[str] = Counter()
        self._ended: OrderedDict[PeerId, tuple[float, Why, bool]] = OrderedDict()
        self._requests: OrderedDict[PeerId, Bucket] = OrderedDict()
        self._circuits: dict[int, Circuit] = {}
        self._per_peer: Counter[tuple[PeerId, RelayClass]] = Counter()
        self._pairs: dict[RelayClass, Counter[Pair]] = {cls: Counter() for cls in RelayClass}
        self._next_id = 1

    # -- places

    def reserve(
        self, peer: PeerId, cls: int, host: str, *, member: bool, over_circuit: bool, connection: Hashable, now: float
    ) -> Granted | Refusal:
        """A place for `peer` on `connection`, or the renewal of one; it replaces the one before, whatever connection held it.

        host: the peer's address as seen here.  member: of this relay's run.  over_circuit: the request came through a relay.
        """
        limits = self._limits
        if self.stopping:
            return Refusal(Why.STOPPING, limits.redial_later_s)
        if over_circuit:
            return Refusal(Why.CHAIN)
        if cls not in (RelayClass.SIGNAL, RelayClass.BULK):
            return Refusal(Why.CLASS)
        self._expire(now)
        if peer not in self._ended or not self._ended[peer][2]:
            wait = self._count_request(peer, now)
            if wait:
                return Refusal(Why.RATE, wait)
        if cls == RelayClass.BULK and not member:
            return Refusal(Why.NOT_MEMBER)
        if cls == RelayClass.BULK and self.bulk_rate <= 0:
            return Refusal(Why.NO_BULK)
        held = self._places.get(peer)
        network = line_of(host)
        if held is None and len(self._places) >= limits.relay_reservations_max:
            return Refusal(Why.PLACES, FULL_RETRY_S)
        others = self._networks[network] - (held is not None and held.network == network)
        if others >= limits.relay_reservations_per_network:
            return Refusal(Why.NETWORK, FULL_RETRY_S)

        if held is not None:
            self._leave_network(held.network)
        self._networks[network] += 1
        self._ended.pop(peer, None)
        expires = now + limits.relay_reservation_life_s
        # Circuits that came through the connection before end with it; their `close` comes from there.
        circuits = held.circuits if held is not None and held.connection == connection else set()
        self._places[peer] = _Place(RelayClass(cls), network, now, expires, connection, circuits)
        rate = limits.relay_signal_bytes_per_s if cls == RelayClass.SIGNAL else self.bulk_share()
        return Granted(peer, RelayClass(cls), expires, rate, held is not None)

    def connection_ended(self, peer: PeerId, connection: Hashable, now: float) -> tuple[Circuit, ...]:
        """`connection` of `peer` is over.  If it held the peer's place, that is void; the circuits to it are closed and returned.

        A circuit *from* the peer ends with its stream: whoever splices it calls `close`.
        """
        place = self._places.get(peer)
        if place is None or place.connection != connection:
            return ()
        self._void(peer, Why.GONE, now)
        return tuple(circuit for number in sorted(place.circuits) if (circuit := self.close(number)) is not None)

    def holds(self, peer: PeerId, now: float) -> bool:
        """Whether `peer` can be reached through this relay now."""
        place = self._places.get(peer)
        return place is not None and now < place.expires

    # -- circuits

    def connect(
        self, source: PeerId, target: PeerId, cls: int, purpose: int, *,
        voucher_checked: bool, over_circuit: bool, members: tuple[bool, bool], now: float,
    ) -> Circuit | Refusal:  # fmt: skip
        """A circuit that is counted from now until `close`; the caller now opens the stream to the target.

        voucher_checked: `open_voucher` let the target's voucher pass.  over_circuit: the request came through a relay.
        members: whether source and target belong to this relay's run.
        """
        limits = self._limits
        if self.stopping:
            return Refusal(Why.STOPPING, limits.redial_later_s)
        if over_circuit:
            return Refusal(Why.CHAIN)
        if source == target:
            return Refusal(Why.SELF)
        if cls not in (RelayClass.SIGNAL, RelayClass.BULK) or purpose not in (Purpose.CONTROL, Purpose.LANE):
            return Refusal(Why.CLASS)
        cls, purpose = RelayClass(cls), Purpose(purpose)
        if not voucher_checked:
            return Refusal(Why.NO_VOUCHER)
        self._forget(now)
        place = self._places.get(target)
        if place is None or now >= place.expires:
            why = Why.EXPIRED if place is not None else self._ended.get(target, (0.0, Why.NEVER, False))[1]
            return Refusal(why, GONE_RETRY_S if why is Why.GONE else 0.0)
        if cls == RelayClass.BULK and not all(members):
            return Refusal(Why.NOT_MEMBER)
        if cls > place.cls:
            return Refusal(Why.LOWER)
        pair = frozenset((source, target))
        refusal = self._no_room(source, target, pair, cls)
        if refusal is not None:
            return refusal

        circuit = Circuit(self._next_id, source, target, cls, purpose, now, None)
        if cls == RelayClass.SIGNAL:
            circuit.ends = now + limits.relay_signal_s
            rate = limits.relay_signal_bytes_per_s
            circuit._paces = Bucket(rate, rate * limits.relay_burst_s, now), Bucket(rate, rate * limits.relay_burst_s, now)
        self._next_id += 1
        self._circuits[circuit.id] = circuit
        place.circuits.add(circuit.id)
        for peer in (source, target):
            self._per_peer[peer, cls] += 1
        self._pairs[cls][pair] += 1
        return circuit

    def forwarded(self, number: int, up: bool, size: int, now: float) -> Refusal | None:
        """Count `size` bytes that are about to pass.  A refusal: they may not, nothing was counted, reset the circuit with its code."""
        circuit = self._circuits.get(number)
        if circuit is None:
            return Refusal(Why.CLOSED)
        used = (circuit.up_bytes if up else circuit.down_bytes) + size
        if circuit.cls == RelayClass.SIGNAL and used > self._limits.relay_signal_bytes:
            return Refusal(Why.BYTES, detail=f"{used - size} of {self._limits.relay_signal_bytes} bytes")
        if up:
            circuit.up_bytes = used
        else:
            circuit.down_bytes = used
        if circuit._paces is not None:
            # As a debt: the bytes are there, what waits is the next read.
            pace = circuit._paces[0 if up else 1]
            pace.gain(now)
            pace.tokens -= size
        return None

    def pause_s(self, number: int, up: bool, now: float) -> float:
        """Seconds until the next read of this direction of a signal circuit; 0 for bulk, whose pace is `FairShare`'s."""
        circuit = self._circuits.get(number)
        if circuit is None or circuit._paces is None:
            return 0.0
        pace = circuit._paces[0 if up else 1]
        pace.gain(now)
        return max(0.0, -pace.tokens / pace.per_s)

    def close(self, number: int) -> Circuit | None:
        """The circuit, with its last counts, as it leaves the table; None if it has left before."""
        circuit = self._circuits.pop(number, None)
        if circuit is None:
            return None
        circuit.open = False
        for peer in (circuit.source, circuit.target):
            _less(self._per_peer, (peer, circuit.cls))
        _less(self._pairs[circuit.cls], circuit.pair)
        place = self._places.get(circuit.target)
        if place is not None:
            place.circuits.discard(number)
        return circuit

    def tick(self, now: float) -> list[Ended]:
        """What time has ended: places (their circuits stay) and signal circuits, which are closed and returned."""
        self._expire(now)
        over = [circuit for circuit in self._circuits.values() if circuit.ends is not None and now >= circuit.ends]
        for circuit in over:
            self.close(circuit.id)
        return [Ended(circuit, Refusal(Why.TIME)) for circuit in over]

    def next_time(self) -> float | None:
        """When `tick` has something to do, None if never."""
        times = [place.expires for place in self._places.values()]
        times += [circuit.ends for circuit in self._circuits.values() if circuit.ends is not None]
        return min(times, default=None)

    # -- numbers

    def bulk_share(self) -> int:
        """Bytes per second that one more pair could expect, 0 if it would be refused: what the peer record tells."""
        share = self.bulk_rate / (len(self._pairs[RelayClass.BULK]) + 1)
        return int(min(share, self._limits.relay_peer_bytes_per_s)) if share >= self._limits.relay_bulk_share_min_bytes_per_s else 0

    def gauges(self) -> dict[str, int]:
        """Counts; all 0 when every connection and circuit has ended."""
        bulk = sum(circuit.cls == RelayClass.BULK for circuit in self._circuits.values())
        return {
            "relay_reservations": len(self._places),
            "relay_networks": len(self._networks),
            "relay_circuits_signal": len(self._circuits) - bulk,
            "relay_circuits_bulk": bulk,
            "relay_peers": len(self._per_peer),
            "relay_pairs": sum(map(len, self._pairs.values())),
        }

    # -- inside

    def _no_room(self, source: PeerId, target: PeerId, pair: Pair, cls: RelayClass) -> Refusal | None:
        limits = self._limits
        most = limits.relay_signal_circuits if cls == RelayClass.SIGNAL else limits.relay_bulk_circuits
        for peer, why in ((source, Why.SOURCE_FULL), (target, Why.TARGET_FULL)):
            if self._per_peer[peer, cls] >= most:
                return Refusal(why, FULL_RETRY_S)
        if self._pairs[cls][pair] >= (limits.relay_signal_pair_circuits if cls == RelayClass.SIGNAL else limits.relay_bulk_pair_circuits):
            return Refusal(Why.PAIR_FULL, FULL_RETRY_S)
        if cls == RelayClass.SIGNAL:
            return None
        if self.bulk_rate <= 0:
            return Refusal(Why.NO_BULK)
        if not self._pairs[cls][pair] and not self.bulk_share():  # another circuit of a pair takes from nobody else
            return Refusal(Why.SHARE, FULL_RETRY_S)
        return None

    def _count_request(self, peer: PeerId, now: float) -> float:
        """Seconds to wait before the next request; 0: this one is counted."""
        limits = self._limits
        bucket = self._requests.get(peer)
        if bucket is None:
            bucket = self._requests[peer] = Bucket(1 / limits.relay_request_interval_s, limits.relay_requests_burst, now)
            if len(self._requests) > limits.relay_requesters_max:
                self._requests.popitem(last=False)
        self._requests.move_to_end(peer)
        return 0.0 if bucket.take(now) else (1.0 - bucket.tokens) / bucket.per_s

    def _void(self, peer: PeerId, why: Why, now: float) -> None:
        place = self._places.pop(peer)
        self._leave_network(place.network)
        # One that was given back at once is no line that failed: else a loop of that would have a signature a turn for nothing.
        free = why is Why.GONE and now - place.since >= self._limits.relay_free_held_s
        self._ended[peer] = now, why, free
        self._ended.move_to_end(peer)
        if len(self._ended) > self._limits.relay_requesters_max:
            self._ended.popitem(last=False)

    def _expire(self, now: float) -> None:
        for peer in [peer for peer, place in self._places.items() if now >= place.expires]:
            self._void(peer, Why.EXPIRED, now)
        self._forget(now)

    def _leave_network(self, network: str) -> None:
        _less(self._networks, network)

    def _forget(self, now: float) -> None:
        """Drop the memory of places that were lost long enough ago."""
        while self._ended:
            peer, (when, _, _) = next(iter(self._ended.items()))
            if now < when + self._limits.relay_again_free_s:
                return
            del self._ended[peer]


def _less(counts: Counter[K], key: K) -> None:
    """One less of `key`; nothing is kept of what is not there."""
    counts[key] -= 1
    if counts[key] <= 0:
        del counts[key]
