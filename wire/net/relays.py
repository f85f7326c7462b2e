"""The places that this node holds at relays, while others cannot dial it.

Two relays in different networks, so that the end of one is no event: calls go through the other at once, and a third is sought.
Which: of the peers whose record offers to relay, those of our run first (they carry bulk), then the nearest; free rate breaks ties.
A peer that refused is left alone for as long as it asked for.

A place is one message stream of `relay/1` that stays open (relay.py).  When it ends the place is gone, and the next relay is asked in
the same second; the record that names the places is published anew by whoever is told (`changed`).

A node that has become reachable seeks no places and names none, but gives up only those that nobody's circuit came through: whoever is
there already would be cut off, where he can dial us directly in a moment and let the circuit end.

A relay that says goodbye is about to stop: its place counts no more and another is sought in the same second, but its stream stays
open until no circuit comes through it.  Whoever says so again and again and never stops is asked ever more rarely.

The node that finds no relay at all says so, with what it asked and what it heard, because its owner can do something about it: open
the port, or find somebody who has one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import trio

from wire.address import Address
from wire.envelope import OpenedRecord
from wire.errors import Code, WireError, error_for
from wire.identity import PeerId
from wire.limits import Limits
from wire.messages import decode, encode
from wire.net.peer import Peer
from wire.net.relay import PROTOCOL
from wire.net.stream import MessageStream
from wire.observed import network_of
from wire.relaymessages import RelayClass, Reserve, Reserved
from wire.vouchers import open_voucher

log = logging.getLogger("wire.net")

LOOK_S = 1.0  # how often a missing place is looked for
REFUSED_S = 30.0  # a relay that refused without saying for how long
ANSWER_S = 5.0
TRIED_MAX = 32  # relays whose refusals are remembered
RENEW_LEAST_S = 10.0  # whatever a relay says: one that promises a millisecond must not keep us busy


@dataclass(frozen=True, slots=True)
class Place:
    """A reservation that stands."""

    relay: PeerId
    cls: int  # `RelayClass`
    rate: int  # bytes per second that the relay gives to bulk in all
    voucher: bytes
    address: Address  # of the relay, with its id
    until: float  # monotonic


@dataclass(slots=True)
class _Holding:
    network: str
    place: Place | None = None
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    left: bool = False  # the relay has said that it stops


class RelayKeeper:
    """Holds up to `limits.relays_held` places while `wanted()`.  `changed()` is told when `places` is another."""

    def __init__(
        self,
        own: PeerId,
        limits: Limits,
        *,
        wanted: Callable[[], bool],
        records: Callable[[], Sequence[OpenedRecord]],
        connect: Callable[[PeerId, Address | None], Awaitable[Peer]],
        rtt_s: Callable[[PeerId], float | None],
        member: Callable[[PeerId], bool],
        in_use: Callable[[PeerId], bool],
        changed: Callable[[], None],
    ) -> None:
        """`records`: signed records of others.  `rtt_s(peer)`: None if not connected.  `member(peer)`: of our run.
        `in_use(relay)`: a circuit has come in through it."""
        self._own = own
        self._limits = limits
        self._wanted = wanted
        self._records = records
        self._connect = connect
        self._rtt_s = rtt_s
        self._member = member
        self._in_use = in_use
        self._changed = changed
        self._held: dict[PeerId, _Holding] = {}
        self._not_before: dict[PeerId, float] = {}
        self._goodbyes: dict[PeerId, tuple[float, int]] = {}  # the last one, and how many came without a long place in between
        self.refusals: dict[PeerId, WireError] = {}  # what the last try said, of relays without a place

    @property
    def places(self) -> tuple[Place, ...]:
        """Those that stand and are to stay, the oldest first."""
        return tuple(holding.place for holding in self._held.values() if holding.place is not None and not holding.left)

    def holders(self) -> frozenset[PeerId]:
        """Relays that hold, or are about to hold, a place for us."""
        return frozenset(self._held)

    def circuits(self) -> list[Address]:
        """Where others reach us through relays."""
        return [Address(at.host, at.port, at.kind, self._own, place.relay) for place in self.places if (at := place.address)]

    async def run(self) -> None:
        """For ever.  A cancel ends every reservation."""
        async with trio.open_nursery() as nursery:
            while True:
                if self._wanted():
                    for record in self._next():
                        holding = self._held[record.peer_id] = _Holding(_network(_place_of(record)))
                        nursery.start_soon(self._hold, record, holding)
                for relay, holding in self._held.items():
                    if (holding.left or not self._wanted()) and not self._in_use(relay):
                        holding.scope.cancel()
                await trio.sleep(LOOK_S)

    def left(self, relay: PeerId, again_s: float) -> None:
        """That peer says that it stops, and may be back after `again_s`, 0 if it does not say.

        Its place is named to nobody any more, and kept while circuits come through it, for they end with it.
        """
        now = trio.current_time()
        holding = self._held.get(relay)
        if holding is not None and holding.left:
            return
        most_s = self._limits.relay_left_most_s
        last, times = self._goodbyes.pop(relay, (now, 0))
        times = 0 if now - last > 2 * most_s else times
        self._goodbyes[relay] = now, times + 1
        pause_s = min(max(again_s, REFUSED_S / 2) * 2.0 ** min(times, 16), most_s)
        self._not_before[relay] = now + pause_s
        self._bound()
        if holding is not None:
            holding.left = True
            if holding.place is not None:
                self._changed()

    # -- which

    def _next(self) -> list[OpenedRecord]:
        """Records of relays to ask now; empty if enough places stand or are being asked for."""
        staying = [holding for holding in self._held.values() if not holding.left]
        missing = self._limits.relays_held - len(staying)
        if missing <= 0:
            return []
        now = trio.current_time()
        networks = {holding.network for holding in staying}
        found = [
            record
            for record in self._records()
            if record.record.relay_classes
            and record.peer_id not in self._held
            and self._not_before.get(record.peer_id, now) <= now
            and any(address.relay is None and address.is_literal for address in record.addresses)
        ]
        found.sort(key=self._worth)
        chosen: list[OpenedRecord] = []
        # Another network first; the same one is better than none.
        for again in (False, True):
            for record in found:
                network = _network(_place_of(record))
                if len(chosen) < missing and record not in chosen and (again or network not in networks):
                    chosen.append(record)
                    networks.add(network)
        return chosen

    def _worth(self, record: OpenedRecord) -> tuple[bool, float, int]:
        bulk = "bulk" in record.record.relay_classes and self._member(record.peer_id)
        rtt_s = self._rtt_s(record.peer_id)
        return not bulk, 1.0 if rtt_s is None else rtt_s, -record.record.relay_free_bps

    # -- one place

    async def _hold(self, record: OpenedRecord, holding: _Holding) -> None:
        relay, address = record.peer_id, _place_of(record).with_peer(record.peer_id)
        wait_s = REFUSED_S
        try:
            with holding.scope:
                cls = RelayClass.BULK if "bulk" in record.record.relay_classes and self._member(relay) else RelayClass.SIGNAL
                peer = await self._connect(relay, address)
                if peer.relayed:
                    raise error_for(Code.REFUSED, detail="that relay is itself reached through a relay", local=True)
                async with await peer.open(PROTOCOL) as stream:
                    assert isinstance(stream, MessageStream)
                    while True:
                        place = await self._ask(stream, relay, cls, address)
                        wait_s = 0.0
                        self.refusals.pop(relay, None)
                        holding.place = place
                        self._changed()
                        # Nothing is said meanwhile: what comes, or the end of the stream, is the end of the place.
                        with trio.move_on_after(max(RENEW_LEAST_S, (place.until - trio.current_time()) / 2)):
                            await stream.receive()
                            raise error_for(Code.PROTOCOL, detail="the relay spoke out of turn")
        except trio.EndOfChannel:
            self.refusals[relay] = error_for(Code.SHUTDOWN, detail="the relay ended the reservation")
        except (WireError, trio.TooSlowError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            failure = error if isinstance(error, WireError) else error_for(Code.TIMEOUT, detail=str(error))
            self.refusals[relay] = failure
            wait_s = failure.retry_after or wait_s
            log.debug("no place at the relay %s: %s", relay.short, error)
        finally:
            del self._held[relay]
            self._not_before[relay] = max(trio.current_time() + wait_s, self._not_before.get(relay, 0.0))
            self._bound()
            if holding.place is not None and not holding.left:
                self._changed()

    def _bound(self) -> None:
        tables: tuple[dict[PeerId, float] | dict[PeerId, WireError] | dict[PeerId, tuple[float, int]], ...]
        tables = self._not_before, self.refusals, self._goodbyes
        for table in tables:
            while len(table) > TRIED_MAX:
                del table[next(iter(table))]

    async def _ask(self, stream: MessageStream, relay: PeerId, cls: int, address: Address) -> Place:
        with trio.fail_after(ANSWER_S):
            await stream.send(encode(Reserve(cls)))
            answer = decode(await stream.receive(), Reserved)
        limits = self._limits
        if answer.code != Code.OK:
            raise error_for(answer.code, retry_after=answer.retry_ms / 1000 or None)
        # One that nobody else would take is no place.
        open_voucher(answer.voucher, now_unix=time.time(), run=None, relay=relay, peer=self._own, cls=answer.cls, limits=limits)
        until = trio.current_time() + min(answer.millis / 1000, limits.relay_reservation_life_s)
        return Place(relay, answer.cls, answer.rate, answer.voucher, address, until)


def _place_of(record: OpenedRecord) -> Address:
    """Where a relay's record says that it is."""
    return next(address for address in record.addresses if address.relay is None and address.is_literal)


def _network(address: Address) -> str:
    """One house, or one hoster."""
    return network_of(address.host) or address.host
