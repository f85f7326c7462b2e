"""How others reach this node: by its own address, through relays, or through a hole in its router.

Each of these is a file of its own that does not know the others; this one knows what the node has found out about itself so far
(`standing`) and decides what is offered and wanted:

* a node that others can dial offers to relay, and holds no place at relays;
* any other holds places at two relays, and dials seeds and relays *from its listener's port*, so that its router maps the very port
  that others will be told.

Within a house (`lan`) or a machine (`host`) everybody counts as reachable and nobody is asked.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import trio

from wire.address import Address, AddressClass, Scope
from wire.events import GoAwayReceived
from wire.identity import Identity, PeerId
from wire.limits import Limits
from wire.net import punch, reach
from wire.net.book import PeerBook
from wire.net.circuits import OPENED, Circuits
from wire.net.detour import go_round
from wire.net.dial import DialRate
from wire.net.link import Link
from wire.net.manager import Manager
from wire.net.metering import PROTOCOL as NOTE
from wire.net.metering import Metering
from wire.net.morelanes import MoreLanes
from wire.net.netevents import AccessChanged, NetEvent, ReachChanged
from wire.net.ownrecord import Standing
from wire.net.peer import Peer
from wire.net.portmap import PortMapping
from wire.net.punch import PunchService
from wire.net.reach import ReachService
from wire.net.relay import RelayOffer, RelayService
from wire.net.relays import RelayKeeper
from wire.net.services import Service, Services
from wire.net.transport import Pipe, Transport, literal
from wire.net.uplink import Uplink
from wire.path import PathKind
from wire.reachability import Finding, Reach


class Access:
    """See the module."""

    def __init__(
        self,
        identity: Identity,
        run: bytes | None,
        boot_id: bytes,
        scope: Scope,
        limits: Limits,
        offer: RelayOffer,
        transport: Transport,
        *,
        portmap: bool,
        rate: DialRate,
        announce: Sequence[Address],
        rng: random.Random,
        book: PeerBook,
        services: Services,
        counts: Counter[str],
        manager: Callable[[], Manager],
        emit: Callable[[NetEvent], None],
        changed: Callable[[], None],
    ) -> None:
        """`changed()`: what `standing` says is another, so the record has to be published."""
        self.listening: tuple[Address, ...] = ()
        self._own = identity.peer_id
        self._scope = scope
        self._limits = limits
        self._transport = transport
        self._book = book
        self._manager = manager
        self._dials: dict[PeerId, trio.Lock] = {}  # of relays that are being dialled
        self._emit = emit
        self._changed = changed
        self._told = Standing()
        self._nursery: trio.Nursery | None = None
        uplink = Uplink(lambda: [link for peer in manager().peers.values() for link in peer.all_links])
        self.relay = RelayService(identity, run, boot_id, limits, offer, peer=self._peer, uplink=uplink, counts=counts)
        self.relays = RelayKeeper(
            self._own,
            limits,
            wanted=lambda: run is not None and not self.public,
            records=book.records,
            connect=self._to_relay,
            rtt_s=lambda peer_id: None if (peer := self._peer(peer_id)) is None else peer.rtt_s,
            member=lambda peer_id: (peer := self._peer(peer_id)) is not None and not peer.guest,
            in_use=self._carries,
            changed=self._stands,
        )
        self.metering = Metering(limits, emit)
        self.circuits = Circuits(
            limits,
            connect=self._to_relay,
            vouchers=book.vouchers,
            own_relays=self.relays.holders,
            accept=self._accept,
            metering=self.metering,
        )
        services.add(NOTE, Service(self.metering.noted, guest=True))
        self.reach = ReachService(
            identity,
            limits,
            scope,
            transport,
            rate=rate,
            announce=announce,
            peers=lambda: [peer for peer in manager().peers.values() if not peer.closed and peer.primary is not None],
            changed=self._found,
            rng=rng,
        )
        self.punch = PunchService(
            self._own,
            limits,
            scope,
            transport,
            rate=rate,
            finding=lambda: self.reach.finding,
            listening=lambda: self.listening,
            record=lambda peer_id: None if (entry := book.get(peer_id)) is None or entry.record is None else entry.record.record,
            addresses=book.addresses,
            seen=self.circuits.seen,
            peers=lambda: [peer for peer in manager().peers.values() if not peer.closed],
            dial=lambda addresses, who: manager().dial(addresses, expected=who, target=str(who)),
            authenticate=lambda pipe, initiator, who: manager().authenticate(pipe, initiator, who),
            adopt=lambda link: manager().adopt(link),
            emit=emit,
        )
        self.more_lanes = MoreLanes(
            limits,
            transport,
            rate=rate,
            peers=lambda: [peer for peer in manager().peers.values() if not peer.closed],
            join=self._join,
            rng=rng,
        )
        # Only in `internet` scope: within a house nobody comes through the router.
        self.portmap = PortMapping(limits, changed=self._mapped, emit=emit) if portmap and scope is Scope.INTERNET else None
        self.punch.serve(services)
        self.more_lanes.serve(services)
        self.reach.serve(services)
        services.add(OPENED, Service(self.circuits.take, guest=True))
        self.relay.serve(services)

    @property
    def public(self) -> bool:
        """Whether others can dial this node."""
        return self._scope is not Scope.INTERNET or self.reach.finding.state is Reach.PUBLIC

    @property
    def standing(self) -> Standing:
        """What the node's record says about this."""
        found = self.reach.finding
        if self.public:
            offered = self._scope is Scope.INTERNET
            return Standing(
                str(found.state),
                reachable=found.addresses,
                relay_classes=self.relay.classes() if offered else (),
                relay_free_bps=self.relay.free_bps() if offered else 0,
            )
        return Standing(
            str(found.state),
            circuits=tuple(self.relays.circuits()),
            vouchers=tuple(place.voucher for place in self.relays.places),
        )

    def local_port(self, address: Address, who: PeerId | None, seed: bool) -> int:
        """The port to dial from, 0 for any."""
        if self.public or not (seed or (who is not None and who in self.relays.holders())):
            return 0
        return next((bound.port for bound in self.listening if bound.kind == address.kind), 0)

    async def lane_pipe(self, control: Link) -> Pipe:
        """A pipe for a lane of that control connection.  Raises WireError, OSError or TooSlowError."""
        info = control.pipe.info()
        if info.path.kind is PathKind.PUNCHED and literal(*info.remote).scope_class is AddressClass.GLOBAL:
            return await self.more_lanes.open(control)
        with trio.fail_after(self._limits.dial_timeout_s):
            if info.relay is not None:
                return await self.circuits.open(info.relay, control.peer_id, True)
            return await self._transport.dial(literal(*info.remote))

    def start(self, listening: tuple[Address, ...], nursery: trio.Nursery) -> None:
        """Works from now on until the nursery ends."""
        self.listening = listening
        self._nursery = nursery
        self.reach.listening(listening)
        if self._scope is Scope.INTERNET:
            self._manager().greetings |= {reach.GREETING: self.reach.greeted, punch.GREETING: self.punch.greeted}
            nursery.start_soon(self.reach.run)
            nursery.start_soon(self.punch.run)
            nursery.start_soon(self._watch)
        if self.portmap is not None:
            self.portmap.listening(listening)
            nursery.start_soon(self.portmap.run)
        nursery.start_soon(self.relays.run)
        nursery.start_soon(self.relay.run)

    def on_hello(self, peer: Peer, observed: str) -> None:
        """A HELLO came."""
        if self._scope is Scope.INTERNET:
            self.reach.saw(peer, observed)

    def on_leaving(self, peer: Peer, event: GoAwayReceived) -> None:
        """A peer has said goodbye on its last connection: what it does for us as a relay ends with that."""
        self.relays.left(peer.peer_id, event.retry_ms / 1000)
        for other in self._manager().peers.values():
            link = other.primary
            if self._nursery is not None and link is not None and link.relay == peer.peer_id and link.initiator:
                self._nursery.start_soon(go_round, self._manager(), other, link)

    def addresses_changed(self, listening: tuple[Address, ...]) -> None:
        """This machine's interfaces are others."""
        self.listening = listening
        self.reach.listening(self.listening)
        self.punch.changed()
        if self.portmap is not None:
            self.portmap.listening(listening)

    def on_lost(self, peer_id: PeerId) -> None:
        """The last connection to a peer ended."""
        self.metering.relay_lost(peer_id)

    def gauges(self) -> dict[str, int]:
        """What is held for others, or by others for us; all 0 in a node without peers."""
        parts = (self.relay, self.reach, self.punch, self.more_lanes)
        return {name: count for part in parts for name, count in part.gauges().items()} | {"places": len(self.relays.places)}

    @property
    def verdict(self) -> AccessChanged:
        """How others reach this node, and why not better."""
        finding, places = self.reach.finding, self.relays.places
        if self.public:
            return AccessChanged("direct", finding.reason)
        if places:
            through = ", ".join(place.relay.short for place in places)
            return AccessChanged("relayed", f"{finding.reason}; others come through {through}")
        if finding.state is Reach.UNKNOWN:
            return AccessChanged("unknown", finding.reason)
        refusals = "; ".join(f"{peer_id.short}: {error}" for peer_id, error in list(self.relays.refusals.items())[-3:])
        relays = f"no relay took it ({refusals})" if refusals else "no relay is known: a node of the run that others can dial is one"
        return AccessChanged("unreachable", f"{finding.reason}; {relays}; connections that this node makes itself work")

    async def _watch(self) -> None:
        """Tell of the verdict, and of what the router does, when they have stood for a moment."""
        told = before = ("unknown", Reach.UNKNOWN)
        while True:
            await trio.sleep(self._limits.access_settles_s)
            verdict, now = self.verdict, (self.verdict.verdict, self.reach.finding.state)
            if now == before and now != told and Reach.UNKNOWN not in now:
                told = now
                self._emit(verdict)
            before = now

    # -- what the parts need

    def _found(self, finding: Finding) -> None:
        self._stands()
        self._emit(ReachChanged(finding))

    def _stands(self) -> None:
        """Publish, if the record would say something else.  Records are rationed, and a start has findings that change nothing in
        them: with these the one that names our places would be ten seconds late."""
        if (standing := self.standing) != self._told:
            self._told = standing
            self._changed()

    def _mapped(self, outside: tuple[Address, ...]) -> None:
        self.reach.mapped = outside

    def _peer(self, peer_id: PeerId) -> Peer | None:
        peer = self._manager().peers.get(peer_id)
        return None if peer is None or peer.closed else peer

    def _carries(self, relay: PeerId) -> bool:
        links = (link for peer in self._manager().peers.values() for link in peer.links)
        return any(link.relay == relay and not link.initiator for link in links)

    async def _accept(self, pipe: Pipe) -> None:
        await self._manager().accept(pipe)

    async def _join(self, pipe: Pipe, who: PeerId) -> None:
        await self._manager().adopt(await self._manager().authenticate(pipe, False, who))

    async def _to_relay(self, relay: PeerId, at: Address | None) -> Peer:
        """A direct connection to a relay.  Callers that come together share one dial."""
        places = [address for address in self._book.addresses(relay) if address.relay is None]
        if at is not None:
            places.insert(0, Address(at.host, at.port, at.kind))
        lock = self._dials.setdefault(relay, trio.Lock())
        try:
            async with lock:
                peer = self._peer(relay)
                if peer is not None and peer.primary is not None and (not peer.relayed or not places):
                    return peer
                return await self._manager().dial(places, expected=relay, target=str(relay), patient=True)
        finally:
            if not lock.statistics().tasks_waiting and not lock.locked():
                self._dials.pop(relay, None)
