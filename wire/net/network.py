"""The network of a node behind one object; `open_net` (opening.py) makes it.

What belongs together here and nowhere else: listeners, discovery, the peer book, the node's own signed record, and the manager of
connections.  Each is a file of its own that does not know the others; this one connects them and owns their nursery.

Order of the end: no new connections, SHUTDOWN to every peer; while circuits stand through this node, as long as its owner waits, for
their ends to find another relay; a second for all others; then everything is cancelled, the known peers are written down and the
sockets are closed.  A cancel of the surrounding scope takes the same way.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import trio

from wire.address import Address, Scope
from wire.delivered import DeliveredKeys
from wire.envelope import OpenedRecord
from wire.errors import Code, error_for
from wire.events import GoAwayReceived
from wire.hello import preferred_ciphers
from wire.identity import Identity, PeerId
from wire.limits import Limits
from wire.messages import SeedListAsk, SessionHello, Want
from wire.net import discovery, exchange
from wire.net.access import Access
from wire.net.book import PeerBook
from wire.net.bound import Listeners
from wire.net.crowd import house
from wire.net.dial import DialFailed, DialRate
from wire.net.discovery import Discovery
from wire.net.features import FEATURES
from wire.net.interfaces import NetworkChanged, watch_interfaces
from wire.net.link import Link
from wire.net.listen import Admission, accept_loop, bind_all, full_house
from wire.net.manager import Manager
from wire.net.memory import process_budget
from wire.net.netevents import Announcer, NetEvent, PeerConnected, PeerLost, Traffic
from wire.net.ownrecord import OwnRecord
from wire.net.peer import Peer
from wire.net.peerstatus import PeerStatus, peer_status
from wire.net.publish import Publisher
from wire.net.relay import RelayOffer
from wire.net.seedlist import SeedEntry, SeedList
from wire.net.seeds import SeedState
from wire.net.services import ChannelHandler, Handler, Service, Services, TensorService, calls
from wire.net.sheltered import open_sheltered_nursery
from wire.net.transport import Listener, Transport, literal_text
from wire.net.upgrade import Local
from wire.net.wanted import Wanted
from wire.net.watch import Watch
from wire.pipeinfo import PipeInfo

log = logging.getLogger("wire.net")

Request = TypeVar("Request")

GOODBYE_S = 1.0  # the end waits so long for peers, who are told SHUTDOWN at once, to finish what is under way


class Net:
    """See the module; made by `open_net`.  All coroutines may be cancelled at any checkpoint."""

    def __init__(
        self,
        identity: Identity,
        *,
        run: bytes | None,
        scope: Scope,
        seeds: SeedList | None,
        data_dir: Path | None,
        announce: Sequence[Address],
        limits: Limits,
        capabilities: Sequence[str],
        agent: str,
        transport: Transport,
        rng: random.Random,
        relay: RelayOffer,
        portmap: bool,
        notice_s: Callable[[], float],
        wall_time: Callable[[], float],
    ) -> None:
        self.peer_id = identity.peer_id
        self.run = run
        self.limits = limits
        self.services = Services()
        self._scope = scope
        self._agent = agent
        self._notice_s = notice_s
        self._inbound_max = house(limits)
        self._transport = transport
        self._rng = rng
        self._boot_id = os.urandom(8)
        self._record = OwnRecord(
            identity, run=run, scope=scope, announce=announce, capabilities=capabilities, data_dir=data_dir, limits=limits
        )
        self._publisher = Publisher(self._publish, lambda: self._record.renew_after_s(rng), limits)
        self._announcer = Announcer()
        self._admission = Admission(limits, scope)
        self._listeners = Listeners(transport, self._accept_from, self._announcer.emit)
        self._on_change: list[Callable[[NetworkChanged], None]] = []
        self._nursery: trio.Nursery | None = None
        self.book = PeerBook(self.peer_id, scope, limits)
        local = Local(
            identity=identity,
            run=run,
            ciphers=preferred_ciphers(time.perf_counter),
            limits=limits,
            hello=self._hello,
            serves=self.services.refusal,
            admit=lambda offer: full_house(offer, run, limits, held=self.manager.links, most=self._inbound_max),
            budget=process_budget(limits),
            remembered=lambda peer_id: self.manager.remembered(peer_id),
            wall_time=wall_time,
        )
        rate = DialRate(limits, scope)
        self.manager = Manager(
            local,
            transport,
            self.services,
            limits,
            scope=scope,
            addresses=self.book.addresses,
            connected=self._on_connected,
            lost=self._on_lost,
            dialled=lambda peer_id, ok: None if ok else self.book.failed(peer_id),
            rate=rate,
            circuit=lambda relay, target, at: self.access.circuits.open(relay, target, False, at),
            lane=lambda control: self.access.lane_pipe(control),
            local_port=lambda address, who, seed: self.access.local_port(address, who, seed),
        )
        self._watch = Watch(limits, peers=lambda: self.manager.peers.values(), wall_time=wall_time, emit=self._announcer.emit)
        self.counts = self.manager.counts  # what happened how often, by kind
        self.wanted = Wanted(
            self.peer_id,
            limits,
            connect=lambda peer_id, deadline_s: self.connect(peer_id, deadline_s=deadline_s),
            present=lambda peer_id: self.peer(peer_id) is not None,
            rng=rng,
        )
        self.access = Access(
            identity,
            run,
            self._boot_id,
            scope,
            limits,
            relay,
            transport,
            portmap=portmap,
            rate=rate,
            announce=announce,
            rng=rng,
            book=self.book,
            services=self.services,
            counts=self.counts,
            manager=lambda: self.manager,
            emit=self._announcer.emit,
            changed=self._publisher.soon,
        )
        self.discovery = Discovery(
            self.peer_id,
            run=run,
            seeds=seeds,
            data_dir=data_dir,
            limits=limits,
            book=self.book,
            manager=self.manager,
            transport=transport,
            own_record=self._record,
            publish=self._publisher.soon,
            emit=self._announcer.emit,
            news=self.wanted.news,
            peers=self.peers,
            counts=self.counts,
            rng=rng,
        )
        self._exchange = self.discovery.exchange
        self.serve_calls(exchange.PROTOCOL, Want, self._exchange.answer, guest=True)
        self.serve_calls(discovery.PROTOCOL, SeedListAsk, self.discovery.answer_list, guest=True)

    @property
    def seed_states(self) -> dict[SeedEntry, SeedState]:
        """What is known of each seed of the list."""
        return {} if self.discovery.keeper is None else dict(self.discovery.keeper.states)

    # -- who is there

    @property
    def addresses(self) -> tuple[Address, ...]:
        """Where we listen, with real ports."""
        return self._listeners.addresses

    def peers(self) -> tuple[Peer, ...]:
        """Connected peers, but for those that have said that they stop."""
        return tuple(peer for peer in self.manager.peers.values() if peer.there)

    def peer(self, peer_id: PeerId) -> Peer | None:
        peer = self.manager.peers.get(peer_id)
        return peer if peer is not None and peer.there else None

    def known(self) -> tuple[OpenedRecord, ...]:
        """Signed records of other peers, connected or not."""
        return self.book.records()

    def traffic(self) -> Traffic:
        return self._watch.traffic()

    def status(self) -> tuple[PeerStatus, ...]:
        """How each connected peer is doing now, in the order in which they came."""
        return tuple(peer_status(peer, trio.current_time()) for peer in self.peers())

    def gauges(self) -> dict[str, int]:
        """What is held now; all 0 in a node without peers."""
        return {**self._watch.gauges(), **self.access.gauges()}

    def events(self) -> trio.MemoryReceiveChannel[NetEvent]:
        """A channel of everything that happens from now on; the first caller also gets what happened before."""
        return self._announcer.subscribe()

    # -- what we do

    async def connect(self, peer_id: PeerId, *, deadline_s: float = 30.0) -> Peer:
        """The peer, connected: the connection that exists, or a dial by what the peer book knows.

        Raises `DialFailed` with every address and its cause, TIMEOUT, SELF.  A cancel leaves nothing.
        """
        try:
            return await self.manager.connect(peer_id, deadline_s=deadline_s)
        except DialFailed:
            self._exchange.missed()
            raise

    async def dial(self, address: Address, *, deadline_s: float = 30.0) -> Peer:
        """Dial one address that the operator named; whoever answers, unless it carries an id.  Errors as `connect`."""
        with trio.move_on_after(deadline_s):
            return await self.manager.dial([address], expected=address.peer_id, target=str(address), patient=True)
        raise error_for(Code.TIMEOUT, detail=f"{address} not connected within {deadline_s:g} s")

    def want(self, peers: Iterable[PeerId]) -> None:
        """From now on these are wanted: dialled while they are not connected, with back-off, for ever; see wanted.py."""
        self.wanted.want(peers)

    def when_network_changes(self, heard: Callable[[NetworkChanged], None]) -> None:
        """Call `heard` at each change of this machine's addresses, after connections were ended or put to the proof."""
        self._on_change.append(heard)

    # -- what we offer

    def serve(self, protocol: str, handler: Handler, *, guest: bool = False) -> None:
        """Answer streams of a protocol: `await handler(peer, stream)`.  `guest`: also for peers that know no run yet."""
        self.services.add(protocol, Service(handler, guest))

    def serve_calls(
        self,
        protocol: str,
        request_class: type[Request],
        answer: Callable[[Peer, Request], Awaitable[object]],
        *,
        guest: bool = False,
    ) -> None:
        """Answer one request a stream: `reply = await answer(peer, request)`, both messages.  A WireError becomes the refusal."""
        self.services.add(protocol, Service(calls(request_class, answer), guest))

    def serve_channel(self, protocol: str, handler: ChannelHandler | None = None, *, step_field: int = 1) -> None:
        """Declare a tensor protocol; `await handler(peer, name)` hears of channels that nobody has made a receiver for.

        `step_field`: the position of the step in its keys, for the node-wide table of delivered keys (`delivered`).
        """
        self.services.add(protocol, TensorService(DeliveredKeys(step_field), handler))

    def delivered(self, protocol: str) -> DeliveredKeys:
        """The table of delivered keys of a tensor protocol: raise its watermark when old steps will never come again."""
        return self.services.tensors(protocol).delivered

    # -- from start to end

    @asynccontextmanager
    async def running(self, listen: Sequence[Address]) -> AsyncIterator[None]:
        """For `open_net`, once: the network works while the block runs.  Raises `BindFailed` before anything else happens."""
        listeners, failures = await bind_all(self._transport, listen)
        async with open_sheltered_nursery() as nursery:  # a cancel does not end the connections before goodbye is said
            try:
                self._start(listeners, failures, nursery)
                yield
            finally:
                with trio.CancelScope(shield=True):
                    await self._stop()

    def _start(self, listeners: list[Listener], failures: Sequence[tuple[Address, str]], nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self.manager.start(nursery)
        self._listeners.start(listeners, failures)
        self._seal()
        nursery.start_soon(self._watch.run)
        nursery.start_soon(self._publisher.run)
        nursery.start_soon(self.wanted.run)
        nursery.start_soon(watch_interfaces, self._transport, self._on_interfaces)
        self.access.start(self.addresses, nursery)
        self.discovery.start(nursery, self.addresses, self.connect)

    def _accept_from(self, listener: Listener) -> None:
        assert self._nursery is not None
        pause_s = self.limits.accept_error_pause_s
        self._nursery.start_soon(accept_loop, listener, self._admission, self.manager.accept, self.counts, pause_s)

    async def _stop(self) -> None:
        self._listeners.close()
        self.access.relay.stop()
        self.manager.leave()
        await self.access.relay.emptied(min(self._notice_s(), self.limits.relay_notice_s))
        await self.manager.close(grace_s=GOODBYE_S)
        self.discovery.stop()
        self._announcer.close()

    # -- our own record

    def _seal(self) -> None:
        self._record.seal(self.addresses, self._transport.local_addresses(), self.access.standing)

    def _publish(self) -> None:
        self._seal()
        for peer in self.peers():
            for link in peer.links:
                link.update_hello(self._hello(link.peer_id, link.guest, link.pipe.info(), link.generation))

    def _on_interfaces(self, change: NetworkChanged) -> None:
        self._announcer.emit(change)
        self.manager.network_changed(change.gone)
        self.wanted.network_changed()
        for heard in self._on_change:
            heard(change)
        if self._nursery is not None:
            self._nursery.start_soon(self._rebind, change)

    async def _rebind(self, change: NetworkChanged) -> None:
        await self._listeners.follow(change)
        self.discovery.addresses_changed(self.addresses)
        self.access.addresses_changed(self.addresses)
        self._publisher.soon()

    def _hello(self, peer_id: PeerId, guest: bool, info: PipeInfo, generation: int | None = None) -> SessionHello:
        return SessionHello(
            revision=self._record.revision,
            boot_id=self._boot_id,
            agent=self._agent,
            features=FEATURES,
            peer_record=self._record.raw,
            observed=literal_text(*info.remote),
            # Half of the connection: one unread stream must not stop the others.
            bulk_window=min(self.limits.stream_window_bulk_bytes, self.limits.connection_window_control_bytes // 2),
            max_streams=self.limits.inbound_streams_max,
            generation=self.manager.generation(peer_id) if generation is None else generation,
        )

    # -- what happens

    def _on_connected(self, peer: Peer, link: Link) -> None:
        self.book.connected(peer.peer_id, trio.current_time(), time.time(), run=link.peer_run, address=link.dialled)
        peer.heard = self._on_hello
        peer.leaving = self._on_leaving
        self._watch.joined(peer)
        self._on_hello(peer, link.hello)
        self.discovery.on_connected(peer)
        self.wanted.found(peer.peer_id)
        self._announcer.emit(PeerConnected(peer))
        if self._nursery is not None:
            self._nursery.start_soon(self._exchange.ask, peer)

    def _on_hello(self, peer: Peer, hello: SessionHello) -> None:
        self.discovery.on_hello(peer, hello)
        self.access.on_hello(peer, hello.observed)

    def _on_leaving(self, peer: Peer, event: GoAwayReceived) -> None:
        self.access.on_leaving(peer, event)
        if event.code is Code.SHUTDOWN and not peer.parted:  # a relay's connection may stand for long after that
            peer.parted = True
            self._announcer.emit(PeerLost(peer.peer_id, error_for(event.code, detail=event.detail)))

    def _on_lost(self, peer: Peer) -> None:
        self._watch.left(peer)
        self.book.disconnected(peer.peer_id, trio.current_time())
        self.discovery.on_lost(peer)
        self.access.on_lost(peer.peer_id)
        assert peer.reason is not None
        kept = any(state.peer_id == peer.peer_id for state in self.seed_states.values())  # the seed keeper's business
        missed = peer.used and peer.dialled is not None and not peer.guest and not kept
        self.wanted.lost(peer.peer_id, peer.reason, missed=missed)
        if not peer.parted:
            self._announcer.emit(PeerLost(peer.peer_id, peer.reason))
