"""Who is out there: seeds, known peers, peer exchange, the newest seed list and what others say of our address, put together.

Each is a file of its own that does not know the others; this one connects them to the manager of connections and owns none.
`Net` tells it who came, who went and what a HELLO said; it dials through the manager.

`seeds/1` is served to everybody, guests too: a newcomer is who needs the newest list most.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import trio

from wire.address import Address, AddressClass
from wire.envelope import BadEnvelope, OpenedRecord
from wire.errors import Code, WireError, error_for
from wire.identity import PeerId
from wire.limits import Limits
from wire.messages import SeedListAnswer, SeedListAsk, SessionHello
from wire.net.book import PeerBook
from wire.net.exchange import PeerExchange
from wire.net.fetch import fetch
from wire.net.knownpeers import KnownPeers
from wire.net.manager import Manager
from wire.net.netevents import Complaint, NetEvent, NoSeedReachable, RecordLearned, SeedStateChanged
from wire.net.ownrecord import OwnRecord
from wire.net.peer import Peer
from wire.net.seedlist import SeedEntry, SeedList
from wire.net.seeds import SeedKeeper, SeedState
from wire.net.transport import Transport
from wire.observed import Observations

PROTOCOL = "seeds/1"
FILE_NAME = "seeds.signed"  # the newest list of the run's owner, as it was signed


class Discovery:
    """See the module.  `publish` signs and tells our record anew."""

    def __init__(
        self,
        own: PeerId,
        *,
        run: bytes | None,
        seeds: SeedList | None,
        data_dir: Path | None,
        limits: Limits,
        book: PeerBook,
        manager: Manager,
        transport: Transport,
        own_record: OwnRecord,
        publish: Callable[[], None],
        emit: Callable[[NetEvent], None],
        news: Callable[[PeerId], None],
        peers: Callable[[], Sequence[Peer]],
        counts: Counter[str],
        rng: random.Random,
    ) -> None:
        self.observed = Observations(limits)
        self._own = own
        self._limits = limits
        self._book = book
        self._manager = manager
        self._transport = transport
        self._own_record = own_record
        self._publish = publish
        self._emit = emit
        self._news = news
        self._peers = peers
        self._rng = rng
        self._bound: tuple[Address, ...] = ()
        self._seeds = seeds or SeedList(limits=limits)
        self._file = None if data_dir is None else data_dir / FILE_NAME
        self.known_peers = KnownPeers(book, None if data_dir is None else data_dir / "known-peers", run, limits)
        self.exchange = PeerExchange(
            book,
            run,
            limits,
            peers=peers,
            learned=self._on_learned,
            own_record=lambda: own_record.raw,
            own=own,
            own_seen=self._own_seen,
            rng=rng,
            counts=counts,
        )
        self.keeper: SeedKeeper | None = None
        if seeds is not None:
            self.keeper = SeedKeeper(
                seeds,
                self,
                limits,
                report=self._on_seed,
                complain=self.complain,
                rng=rng,
                fetch=partial(fetch, limits=limits),
                unreachable=self._on_unreachable,
                signed=self._keep_list,
            )

    def start(self, nursery: trio.Nursery, bound: tuple[Address, ...], connect: Callable[[PeerId], Awaitable[Peer]]) -> None:
        """After the listeners were bound and our record was signed."""
        self.addresses_changed(bound)
        self.known_peers.load(self.complain)
        self._load_list()
        nursery.start_soon(self.exchange.run)
        nursery.start_soon(self.known_peers.write_regularly, self.complain)
        delay_s = 0.0 if self.keeper is None else self._limits.known_peers_delay_s
        lasting = self.keeper is not None or self._file is not None
        nursery.start_soon(partial(self.known_peers.dial_some, delay_s, self._peers, connect, self._rng, lasting=lasting))
        if self.keeper is not None:
            nursery.start_soon(self.keeper.run)

    def stop(self) -> None:
        self.known_peers.write(self.complain)

    def complain(self, text: str) -> None:
        self._emit(Complaint(text))

    # -- our own addresses

    def addresses_changed(self, bound: tuple[Address, ...]) -> None:
        """At the start, and when this machine's addresses have changed: which places lead to ourselves, and nobody's word counts."""
        self._bound = bound
        own = set()
        for place in bound:
            wild = place.scope_class is AddressClass.UNSPECIFIED
            hosts = [host for host in self._transport.local_addresses() if (":" in host) == (":" in place.host)] if wild else []
            own |= {(host, place.port) for host in (place.host, *hosts)}
        self._manager.own_places = own
        self.observed.forget()
        self._note_outside()

    @property
    def outside(self) -> tuple[Address, ...]:
        """Our outside addresses, as far as enough others agree on them (wire/observed.py)."""
        return self.observed.agreed(trio.current_time())

    def _note_outside(self) -> None:
        told = (Address.parse(text) for text in self._own_record.advertised(self._bound, self._transport.local_addresses()))
        own = [*self.outside, *(address for address in told if address.scope_class is AddressClass.GLOBAL)]
        self._book.outside = frozenset(address.host for address in own)
        self._book.inside = frozenset(self._transport.local_addresses())

    def _own_seen(self, seq: int) -> None:
        if self._own_record.seen(seq):
            self._publish()

    # -- what happens

    def on_connected(self, peer: Peer) -> None:
        self.known_peers.connected()
        if len(self._peers()) == 1:
            self.exchange.company()

    def on_lost(self, peer: Peer) -> None:
        self.exchange.forget(peer.peer_id)
        if not self._peers():
            self.known_peers.alone()

    def on_hello(self, peer: Peer, hello: SessionHello) -> None:
        if hello.peer_record:
            self.exchange.take(hello.peer_record, peer.peer_id)
        link = peer.primary
        if link is not None and hello.observed:
            info, ports = link.pipe.info(), frozenset(address.port for address in self._bound)
            if self.observed.heard(info.remote[0], hello.observed, info.local[1], ports, trio.current_time()):
                self._note_outside()

    def _on_learned(self, record: OpenedRecord) -> None:
        self._manager.backoff.forget(record.addresses)
        self._news(record.peer_id)
        self._emit(RecordLearned(record))

    def _on_seed(self, state: SeedState) -> None:
        self._emit(SeedStateChanged(str(state.entry), str(state.status), state.reason))

    def _on_unreachable(self, states: tuple[SeedState, ...]) -> None:
        self._emit(NoSeedReachable(tuple((str(state.entry), state.reason) for state in states)))

    # -- Reach: what the seed keeper needs

    async def dial_seed(self, entry: SeedEntry) -> PeerId:
        address = entry.address
        if address.peer_id == self._own or (address.host, address.port) in self._manager.own_places:
            raise error_for(Code.SELF, local=True)
        known = None if address.peer_id is None else self._manager.peers.get(address.peer_id)
        if known is not None and not known.closed:
            return known.peer_id
        peer = await self._manager.dial([address], expected=address.peer_id, target=str(entry), patient=True, seed=True)
        return peer.peer_id

    async def wait_lost(self, peer_id: PeerId) -> WireError | None:
        peer = self._manager.peers.get(peer_id)
        return None if peer is None else await peer.wait_closed()

    def connected_peers(self) -> int:
        return len(self._manager.peers)

    async def moved(self, entry: SeedEntry, peer_id: PeerId) -> bool:
        if entry.address.is_literal or entry.address.peer_id is not None:
            return False
        peer = self._manager.peers.get(peer_id)
        try:
            with trio.fail_after(self._limits.dial_timeout_s):
                found = {address.host for address in await self._transport.resolve(entry.address)}
        except (OSError, trio.TooSlowError):
            return False  # a name that cannot be resolved just now is no reason to go anywhere else
        return peer is not None and bool(found) and not found & {link.pipe.info().remote[0] for link in peer.links}

    async def ask_list(self, peer_id: PeerId, newer_than: int) -> bytes:
        peer, run = self._manager.peers.get(peer_id), self._seeds.signed.run
        if peer is None or run is None or self._seeds.signed.owner is None:
            return b""
        question = SeedListAsk(run, newer_than)
        return (await peer.call(PROTOCOL, question, SeedListAnswer, deadline_s=self._limits.seed_list_ask_s)).signed

    # -- the owner's list

    async def answer_list(self, peer: Peer, ask: SeedListAsk) -> SeedListAnswer:
        """The handler of `seeds/1`."""
        found = self._seeds.signed.newest(ask.run)
        newer = found is not None and found.statement.seq > ask.newer_than
        return SeedListAnswer(found.statement.raw if newer and found is not None else b"")

    def _load_list(self) -> None:
        """The list that was in force the last time: an older one is not taken after it."""
        if self._file is None or self._seeds.signed.owner is None:
            return
        try:
            self._seeds.signed.take(self._file.read_bytes(), time.time())
        except FileNotFoundError:
            pass
        except (OSError, BadEnvelope) as error:
            self.complain(f"{self._file} is not used: {error}")

    def _keep_list(self, data: bytes) -> None:
        if self._file is None:
            return
        scratch = self._file.with_name(f".{self._file.name}.new")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            scratch.write_bytes(data)
            os.replace(scratch, self._file)
        except OSError as error:
            with suppress(OSError):
                scratch.unlink()
            self.complain(f"the newest seed list cannot be kept in {self._file}: {error.strerror or error}")
