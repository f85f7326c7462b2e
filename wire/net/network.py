"""The network of a node behind one object: `async with open_net(...) as net`.

What belongs together here and nowhere else: listeners, seeds, the peer book, peer exchange, the node's own signed record, and the
manager of connections.  Each is a file of its own that does not know the others; this one connects them and owns their nursery.

Order of the end: no new connections, SHUTDOWN to every peer, a second for them to go, then everything is cancelled, the known
peers are written down and the sockets are closed.  A cancel of the surrounding scope takes the same way.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import trio

from wire.address import Address, Scope
from wire.delivered import DeliveredKeys
from wire.envelope import OpenedRecord
from wire.errors import Code, WireError, error_for
from wire.hello import Hello, Refusal, preferred_ciphers
from wire.identity import Identity, PeerId
from wire.limits import DEFAULT_LIMITS, Limits
from wire.messages import SessionHello, Want
from wire.net import exchange
from wire.net.book import PeerBook
from wire.net.exchange import PeerExchange
from wire.net.interfaces import descriptor_limit, watch_interfaces
from wire.net.knownpeers import KnownPeers
from wire.net.link import Link
from wire.net.listen import Admission, accept_loop, bind_all
from wire.net.manager import Manager
from wire.net.memory import process_budget
from wire.net.netevents import (
    Announcer,
    Complaint,
    Listening,
    NetEvent,
    NotListening,
    PeerConnected,
    PeerLost,
    RecordLearned,
    SeedStateChanged,
    Traffic,
)
from wire.net.ownrecord import OwnRecord
from wire.net.peer import Peer
from wire.net.seedlist import SeedEntry, SeedList
from wire.net.seeds import SeedKeeper, SeedState, SeedStatus
from wire.net.services import ChannelHandler, Handler, Service, Services, TensorService, calls
from wire.net.sheltered import open_sheltered_nursery
from wire.net.transport import Listener, TcpTransport, Transport, literal_text
from wire.net.upgrade import Local
from wire.pipeinfo import PipeInfo

log = logging.getLogger("wire.net")

Request = TypeVar("Request")

GOODBYE_S = 1.0  # the end waits so long for peers, who are told SHUTDOWN at once, to finish what is under way
FULL_RETRY_MS = 5000  # a refused guest tries again after this, or elsewhere at once


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
    ) -> None:
        self.peer_id = identity.peer_id
        self.run = run
        self.limits = limits
        self.addresses: tuple[Address, ...] = ()
        self.services = Services()
        self.seed_states: dict[SeedEntry, SeedState] = {}
        self._scope = scope
        self._agent = agent
        self._inbound_max = min(limits.inbound_connections_max, descriptor_limit() // 4)
        self._transport = transport
        self._rng = rng
        self._boot_id = os.urandom(8)
        self._record = OwnRecord(
            identity, run=run, scope=scope, announce=announce, capabilities=capabilities, data_dir=data_dir, limits=limits
        )
        self._announcer = Announcer()
        self._listeners: list[Listener] = []
        self._ended = [0, 0]
        self._nursery: trio.Nursery | None = None
        self.book = PeerBook(self.peer_id, scope, limits)
        self._known_peers = KnownPeers(self.book, None if data_dir is None else data_dir / "known-peers", run, limits)
        local = Local(
            identity=identity,
            run=run,
            ciphers=preferred_ciphers(time.perf_counter),
            limits=limits,
            hello=self._hello,
            serves=self.services.refusal,
            admit=self._admit,
            budget=process_budget(limits),
            remembered=lambda peer_id: self.manager.remembered(peer_id),
        )
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
        )
        self.counts = self.manager.counts  # what happened how often, by kind
        self._exchange = PeerExchange(
            self.book,
            run,
            limits,
            peers=self.peers,
            learned=self._on_learned,
            own_record=lambda: self._record.raw,
            rng=rng,
            counts=self.counts,
        )
        self._keeper: SeedKeeper | None = None
        if seeds is not None:
            self._keeper = SeedKeeper(seeds, self, limits, report=self._on_seed, complain=self._complain, rng=rng)
        self.serve_calls(exchange.PROTOCOL, Want, self._exchange.answer, guest=True)

    # -- who is there

    def peers(self) -> tuple[Peer, ...]:
        """Connected peers."""
        return tuple(peer for peer in self.manager.peers.values() if not peer.closed)

    def peer(self, peer_id: PeerId) -> Peer | None:
        peer = self.manager.peers.get(peer_id)
        return None if peer is None or peer.closed else peer

    def known(self) -> tuple[OpenedRecord, ...]:
        """Signed records of other peers, connected or not."""
        return self.book.records()

    def traffic(self) -> Traffic:
        links = [link for peer in self.manager.peers.values() for link in peer.all_links]
        past = [peer.tally.socket for peer in self.manager.peers.values()]
        return Traffic(
            self._ended[0] + sum(link.bytes_in for link in links) + sum(ended[0] for ended in past),
            self._ended[1] + sum(link.bytes_out for link in links) + sum(ended[1] for ended in past),
        )

    def gauges(self) -> dict[str, int]:
        """What is held now; all 0 in a node without peers."""
        total: Counter[str] = Counter(peers=len(self.manager.peers), connections=self.manager.links)
        for peer in self.manager.peers.values():
            total.update(peer.gauges())
        return dict(total)

    def events(self) -> trio.MemoryReceiveChannel[NetEvent]:
        """A channel of everything that happens from now on; the first caller also gets what happened before."""
        return self._announcer.subscribe()

    # -- what we do

    async def connect(self, peer_id: PeerId, *, deadline_s: float = 30.0) -> Peer:
        """The peer, connected: the connection that exists, or a dial by what the peer book knows.

        Raises `DialFailed` with every address and its cause, TIMEOUT, SELF.  A cancel leaves nothing.
        """
        return await self.manager.connect(peer_id, deadline_s=deadline_s)

    async def dial(self, address: Address, *, deadline_s: float = 30.0) -> Peer:
        """Dial one address that the operator named; whoever answers, unless it carries an id.  Errors as `connect`."""
        with trio.move_on_after(deadline_s):
            return await self.manager.dial([address], expected=address.peer_id, target=str(address), patient=True)
        raise error_for(Code.TIMEOUT, detail=f"{address} not connected within {deadline_s:g} s")

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

    # -- Reach: what the seed keeper needs

    async def dial_seed(self, entry: SeedEntry) -> PeerId:
        address = entry.address
        if self._is_own(address):
            raise error_for(Code.SELF, local=True)
        if address.peer_id is not None and (peer := self.peer(address.peer_id)) is not None:
            return peer.peer_id
        peer = await self.manager.dial([address], expected=address.peer_id, target=str(entry), patient=True)
        return peer.peer_id

    async def wait_lost(self, peer_id: PeerId) -> WireError | None:
        peer = self.manager.peers.get(peer_id)
        return None if peer is None else await peer.wait_closed()

    def connected_peers(self) -> int:
        return len(self.manager.peers)

    def _is_own(self, address: Address) -> bool:
        return address.peer_id == self.peer_id or any(
            (bound.host, bound.port) == (address.host, address.port) for bound in self.addresses
        )

    # -- from start to end

    def _start(self, listeners: list[Listener], failures: Sequence[tuple[Address, str]], nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self.manager.start(nursery)
        admission = Admission(self.limits, self._scope)
        self._listeners = listeners
        self.addresses = tuple(listener.address for listener in listeners)
        for listener in listeners:
            self._announcer.emit(Listening(listener.address))
            pause_s = self.limits.accept_error_pause_s
            nursery.start_soon(accept_loop, listener, admission, self.manager.accept, self.counts, pause_s)
        for address, why in failures:
            self._announcer.emit(NotListening(address, why))
        self._seal()
        self._known_peers.load(self._complain)
        nursery.start_soon(self._renew)
        nursery.start_soon(watch_interfaces, self._transport, self._on_interfaces)
        nursery.start_soon(self._exchange.run)
        nursery.start_soon(self._known_peers.write_regularly, self._complain)
        delay_s = 0.0 if self._keeper is None else self.limits.known_peers_delay_s
        nursery.start_soon(self._known_peers.dial_some, delay_s, self.peers, self.connect, self._rng)
        if self._keeper is not None:
            self.seed_states = self._keeper.states
            nursery.start_soon(self._keeper.run)

    async def _stop(self) -> None:
        for listener in self._listeners:
            listener.close()
        await self.manager.close(grace_s=GOODBYE_S)
        self._known_peers.write(self._complain)
        self._announcer.close()

    # -- our own record

    def _seal(self) -> None:
        self._record.seal(self.addresses, self._transport.local_addresses())

    async def _renew(self) -> None:
        while True:
            await trio.sleep(self._record.renew_after_s(self._rng))
            self._publish()

    def _publish(self) -> None:
        self._seal()
        for peer in self.peers():
            for link in peer.links:
                link.update_hello(self._hello(link.peer_id, link.guest, link.pipe.info(), link.generation))

    def _on_interfaces(self) -> None:
        """This machine's addresses changed: what failed says nothing any more, what stands may be dead."""
        self.manager.backoff.forget_all()
        self.manager.ping_all()
        self._publish()

    def _hello(self, peer_id: PeerId, guest: bool, info: PipeInfo, generation: int | None = None) -> SessionHello:
        return SessionHello(
            revision=self._record.revision,
            boot_id=self._boot_id,
            agent=self._agent,
            features=(),
            peer_record=self._record.raw,
            observed=literal_text(*info.remote),
            # Half of the connection: one unread stream must not stop the others.
            bulk_window=min(self.limits.stream_window_bulk_bytes, self.limits.connection_window_control_bytes // 2),
            max_streams=self.limits.inbound_streams_max,
            generation=self.manager.generation(peer_id) if generation is None else generation,
        )

    def _admit(self, offer: Hello) -> Refusal | None:
        most = self._inbound_max
        if self.run is not None and not any(offer.run_tag):
            most -= int(most * self.limits.inbound_members_share)  # guests leave room for members
        return Refusal(Code.RESOURCE_LIMIT, FULL_RETRY_MS) if self.manager.links >= most else None

    # -- what happens

    def _complain(self, text: str) -> None:
        self._announcer.emit(Complaint(text))

    def _on_connected(self, peer: Peer, link: Link) -> None:
        self.book.connected(peer.peer_id, trio.current_time(), time.time(), run=link.peer_run, address=link.dialled)
        peer.heard = self._on_hello
        self._on_hello(peer, link.hello)
        self._announcer.emit(PeerConnected(peer))
        if self._nursery is not None:
            self._nursery.start_soon(self._exchange.ask, peer)

    def _on_hello(self, peer: Peer, hello: SessionHello) -> None:
        if hello.peer_record:
            self._exchange.take(hello.peer_record, peer.peer_id)

    def _on_lost(self, peer: Peer) -> None:
        self._ended[0] += peer.tally.socket[0]
        self._ended[1] += peer.tally.socket[1]
        self.book.disconnected(peer.peer_id, trio.current_time())
        self._exchange.forget(peer.peer_id)
        assert peer.reason is not None
        self._announcer.emit(PeerLost(peer.peer_id, peer.reason))

    def _on_learned(self, record: OpenedRecord) -> None:
        self.manager.backoff.forget(record.addresses)
        self._announcer.emit(RecordLearned(record))

    def _on_seed(self, state: SeedState) -> None:
        if state.status is SeedStatus.REMOVED:
            self.seed_states.pop(state.entry, None)
        self._announcer.emit(SeedStateChanged(str(state.entry), str(state.status), state.reason))


@asynccontextmanager
async def open_net(
    identity: Identity,
    *,
    run: bytes | None,
    listen: Sequence[Address] = (),
    scope: Scope = Scope.INTERNET,
    seeds: SeedList | None = None,
    data_dir: Path | None = None,
    announce: Sequence[Address] = (),
    limits: Limits = DEFAULT_LIMITS,
    capabilities: Sequence[str] = (),
    agent: str = "plnode/0.1",
    transport: Transport | None = None,
    rng: random.Random | None = None,
) -> AsyncIterator[Net]:
    """The network of this node, running while the block runs.

    `run`: run id of 32 bytes; None for a newcomer without a manifest, or a seed for all runs.  `listen`: addresses to bind, port
    0 for any; none at all for a node that only dials.  `data_dir`: where known peers and the sequence number are kept; None
    keeps nothing.  Raises `BindFailed` if addresses were given and none could be bound, before anything else happens.
    """
    net = Net(
        identity,
        run=run,
        scope=scope,
        seeds=seeds,
        data_dir=data_dir,
        announce=announce,
        limits=limits,
        capabilities=capabilities,
        agent=agent,
        transport=transport or TcpTransport(),
        rng=rng or random.Random(os.urandom(16)),
    )
    listeners, failures = await bind_all(net._transport, listen)
    async with open_sheltered_nursery() as nursery:  # a cancel does not end the connections before goodbye is said
        try:
            net._start(listeners, failures, nursery)
            yield net
        finally:
            with trio.CancelScope(shield=True):
                await net._stop()
