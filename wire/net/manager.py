"""Connections of the node as a whole: at most one peer object a peer, and who may stay.

Three ways lead here: a connection came to us, we dialled an address, or we dialled a peer by what is known of it.  All end in
`adopt`, which decides what the new connection is to the ones that exist (wire.md section 16; primary.py):

* The same process at both ends of both (equal boot ids): one of them becomes primary by rule, the loser drains.
* Another process with the same identity: the old connection is pinged.  If it answers within 3 s, two processes share an
  identity and the newer is refused (DUPLICATE_IDENTITY); if not, the peer was restarted and the old connection is dropped.

An outbound dial is never cancelled because an inbound connection appeared: the other side may be doing the same with its own,
and then none is left (FIND-14).  Several callers who want the same peer share one dial.

Each peer runs in a task of its own in the manager's nursery; whatever comes out of it ends that peer and is logged here once.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import NoReturn

import trio

from wire.address import Address, Scope
from wire.errors import Code, ConnectionLost, WireError, error_for
from wire.events import GoAwayReceived, HelloReceived, StreamOpened
from wire.identity import PeerId
from wire.limits import Limits
from wire.net.causes import ITSELF, Cause
from wire.net.crowd import crowded
from wire.net.dial import BackOff, DialFailed, DialRate, dial_from, plan_dial, race
from wire.net.firstbytes import Greeted, read_greeting
from wire.net.link import Link
from wire.net.moved import end_orphans, prove_alive
from wire.net.peer import Peer
from wire.net.reconnect import reconnect
from wire.net.services import Services
from wire.net.transport import Pipe, Transport
from wire.net.upgrade import Local, upgrade
from wire.remembered import RememberedWindows

log = logging.getLogger("wire.net")


class _Shared:
    """One dial that several callers wait for."""

    def __init__(self) -> None:
        self.done = trio.Event()
        self.scope = trio.CancelScope()
        self.waiting = 0
        self.peer: Peer | None = None
        self.error: WireError | None = None


class Manager:
    """Owns the peers.  Works from `start` to `close`."""

    def __init__(
        self,
        local: Local,
        transport: Transport,
        services: Services,
        limits: Limits,
        *,
        scope: Scope,
        addresses: Callable[[PeerId], Sequence[Address]],
        connected: Callable[[Peer, Link], None],
        lost: Callable[[Peer], None],
        dialled: Callable[[PeerId, bool], None],
        rate: DialRate,
        circuit: Callable[[PeerId, PeerId, Address], Awaitable[Pipe]],
        lane: Callable[[Link], Awaitable[Pipe]],
        local_port: Callable[[Address, PeerId | None, bool], int],
    ) -> None:
        """`rate`: of every dial of this node, whoever asked for it.  `circuit(relay, target, at)` opens one, `at` being the relay's
        place.  `lane(control)`: a pipe for a lane.  `local_port(address, who, is_seed)`: the port to dial from, 0 for any."""
        self.peers: dict[PeerId, Peer] = {}
        self.backoff = BackOff(limits)
        self.own_places: set[tuple[str, int]] = set()  # host and port that lead to this node itself: never dialled
        self.counts: Counter[str] = Counter()
        self._local = local
        self._own = local.identity.peer_id
        self._transport = transport
        self._services = services
        self._limits = limits
        self._crowds_allowed = scope is Scope.HOST  # a swarm on one machine
        self._outside = scope is Scope.INTERNET
        self._rate = rate
        self.addresses = addresses
        self._connected = connected
        self._lost = lost
        self._dialled = dialled
        self._circuit = circuit
        self._lane = lane
        self._local_port = local_port
        self.greetings: dict[bytes, Greeted] = {}  # who takes inbound pipes that begin otherwise than a session
        self._dialling: dict[PeerId, _Shared] = {}
        self._nursery: trio.Nursery | None = None
        self._closing = False
        self.next_network = trio.Event()  # set and replaced when this machine's addresses change

    def start(self, nursery: trio.Nursery) -> None:
        """Peers and dials run in this nursery.  Its cancel ends every connection without a goodbye; `close` says one before."""
        self._nursery = nursery

    def leave(self) -> None:
        """Say SHUTDOWN to everybody: no connection and no stream is made any more, those that stand may finish."""
        self._closing = True
        for shared in self._dialling.values():
            shared.scope.cancel()
        for peer in list(self.peers.values()):
            peer.goaway(Code.SHUTDOWN, retry_ms=int(self._limits.redial_later_s * 1000))

    async def close(self, *, grace_s: float) -> None:
        """Leave, and wait until the connections have ended, at most `grace_s`."""
        self.leave()
        with trio.move_on_after(grace_s):
            for peer in list(self.peers.values()):
                await peer.wait_closed()

    @property
    def links(self) -> int:
        return sum(len(peer.all_links) for peer in self.peers.values())

    def generation(self, peer_id: PeerId) -> int:
        """How often all connections to that peer were lost."""
        peer = self.peers.get(peer_id)
        return 0 if peer is None else peer.losses

    def remembered(self, peer_id: PeerId) -> RememberedWindows:
        """The windows that protocols of that peer needed last."""
        peer = self.peers.get(peer_id)
        return RememberedWindows() if peer is None else peer.remembered

    def network_changed(self, gone: Collection[str]) -> None:
        """This machine's addresses are others, without `gone`: what failed says nothing any more, what stands may be dead."""
        self.backoff.forget_all()
        self.next_network.set()
        self.next_network = trio.Event()
        links = [link for peer in self.peers.values() for link in peer.all_links]
        for link in end_orphans(links, gone):
            if self._nursery is not None:
                self._nursery.start_soon(prove_alive, link, self._limits)

    # -- ways in

    async def accept(self, pipe: Pipe) -> None:
        """Serve an inbound pipe up to its place among the peers.  A handshake that fails is a count, not an error."""
        others = self.greetings if pipe.info().relay is None else {}
        try:
            first = b""
            if others:
                first = await read_greeting(pipe, frozenset(others), deadline_s=self._limits.handshake_timeout_s)
                if first in others:
                    await others[first](pipe)
                    return
            link = await upgrade(pipe, self._local, initiator=False, first=first)
        except WireError as error:
            self.counts[f"handshake-{error.code.name.lower()}"] += 1
            log.debug("inbound handshake from %s: %s", pipe.info().remote, error)
            return
        try:
            await self.adopt(link)
        except WireError as error:
            self.counts[f"adopt-{error.code.name.lower()}"] += 1

    async def connect(self, peer_id: PeerId, *, deadline_s: float) -> Peer:
        """The peer, connected: the connection that exists, or one dial by all that is known, shared with other callers.

        Raises `DialFailed` naming every address and cause, TIMEOUT after `deadline_s`.  A cancel ends the dial if nobody else
        waits for it.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        peer = self.peers.get(peer_id)
        if peer is not None and peer.primary is not None:
            return peer
        if peer_id == self._own:
            raise error_for(Code.SELF, local=True)
        shared = self._dialling.get(peer_id)
        if shared is None:
            if self._nursery is None or self._closing:
                raise error_for(Code.SHUTDOWN, local=True)
            shared = self._dialling[peer_id] = _Shared()
            self._nursery.start_soon(self._dial_shared, peer_id, shared)
        shared.waiting += 1
        try:
            with trio.move_on_after(deadline_s):
                await shared.done.wait()
        finally:
            shared.waiting -= 1
            if not shared.waiting and not shared.done.is_set():
                shared.scope.cancel()
        if shared.peer is not None:
            return shared.peer
        raise shared.error or error_for(Code.TIMEOUT, detail=f"{peer_id} not connected within {deadline_s:g} s")

    async def _dial_shared(self, peer_id: PeerId, shared: _Shared) -> None:
        try:
            with shared.scope:
                shared.peer = await self.dial(self.addresses(peer_id), expected=peer_id, target=str(peer_id))
        except WireError as error:
            shared.error = error
        finally:
            if self._dialling.get(peer_id) is shared:
                del self._dialling[peer_id]
            shared.done.set()

    async def dial(
        self, addresses: Sequence[Address], *, expected: PeerId | None, target: str, patient: bool = False, seed: bool = False
    ) -> Peer:
        """Dial these addresses as one peer; the first authenticated wins.

        `patient`: the caller has a rhythm of its own, so that back-off only sorts the addresses.  `seed`: it is one.  Raises `DialFailed`.
        A cancel leaves no connection behind.
        """
        now = trio.current_time()
        literals: list[Address] = []
        failed: dict[Address, Cause] = {}
        for address in addresses:
            literals += await self._resolve(address, failed)
        failed |= {
            address: ITSELF
            for address in literals
            if address.relay is None and (address.host, address.port) in self.own_places
        }
        literals = [address for address in literals if address not in failed]
        attempts, held = plan_dial(literals, self.backoff, float("inf") if patient else now, self._limits)

        async def attempt(address: Address) -> tuple[Address, Link]:
            return address, await self._attempt(address, expected or address.peer_id, seed)

        found = await race(
            attempts,
            attempt,
            lambda won: won[1].discard(),
            at_once=self._limits.dials_at_once_per_peer,
            failed=self._failed,
        )
        if isinstance(found, dict):
            if expected is not None:
                self._dialled(expected, False)
            raise DialFailed(target, {**failed, **found}, held)
        address, link = found
        self.backoff.forget((address,))
        link.dialled = address
        return await self.adopt(link)

    def _failed(self, address: Address, cause: Cause) -> None:
        self.backoff.failed(address, cause, trio.current_time())
        if cause.code is Code.SELF:
            self.own_places.add((address.host, address.port))  # proven by our own key: one attempt an address (FIND-10)

    async def _resolve(self, address: Address, failed: dict[Address, Cause]) -> Sequence[Address]:
        if address.is_literal:
            return (address,)
        try:
            with trio.fail_after(self._limits.dial_timeout_s):
                return [found.with_peer(address.peer_id) for found in await self._transport.resolve(address)]
        except (OSError, trio.TooSlowError) as error:
            failed[address] = Cause("name", f"the name cannot be resolved ({error})", "check the name and this machine's DNS")
            return ()

    async def _attempt(self, address: Address, expected: PeerId | None, seed: bool) -> Link:
        if address.relay is not None:
            assert address.peer_id is not None
            pipe = await self._circuit(address.relay, address.peer_id, address)
            return await upgrade(pipe, self._local, initiator=True, expected=address.peer_id)
        await trio.sleep(self._rate.delay_s(address, trio.current_time()))
        with trio.fail_after(self._limits.dial_timeout_s):
            pipe = await dial_from(self._transport, address, self._local_port(address, expected, seed))
        return await upgrade(pipe, self._local, initiator=True, expected=expected)

    async def authenticate(self, pipe: Pipe, initiator: bool, expected: PeerId) -> Link:
        """The handshake over a pipe that somebody else has made.  Raises what refuses it; the pipe is closed then."""
        return await upgrade(pipe, self._local, initiator=initiator, expected=expected)

    # -- who stays

    async def adopt(self, link: Link) -> Peer:
        """Give an authenticated connection its place.  Raises what refuses it; the connection is ended then, as by a cancel."""
        try:
            return await self._adopt(link)
        except BaseException:
            link.discard()
            raise

    async def _adopt(self, link: Link) -> Peer:
        if self._nursery is None or self._closing:
            raise error_for(Code.SHUTDOWN, local=True)
        if not self._crowds_allowed and crowded(link, self.peers.values(), self._limits, outside=self._outside):
            self._turn_away(link, Code.RESOURCE_LIMIT)
            raise error_for(Code.RESOURCE_LIMIT, detail=f"too many connections from {link.pipe.info().remote[0]}")
        peer = self.peers.get(link.peer_id)
        if link.bulk:
            # Two control connections with their lanes, while one replaces the other.
            if peer is not None and len(peer.all_links) >= 2 * self._limits.connections_per_peer:
                self._refuse_crowd(link)
            if peer is None or peer.closed or peer.boot_id != link.hello.boot_id or not peer.adopt_lane(link):
                self._turn_away(link, Code.AUTH)
                raise error_for(Code.AUTH, detail="a bulk connection that belongs to no control connection")
            return peer
        if peer is not None and not peer.closed and peer.boot_id != link.hello.boot_id:
            if await self._answers(peer):
                self._turn_away(link, Code.DUPLICATE_IDENTITY)
                raise error_for(Code.DUPLICATE_IDENTITY, detail=f"two processes have the identity {link.peer_id}")
            peer.fail(ConnectionLost("the peer was restarted"))
            await peer.wait_closed()
            peer = self.peers.get(link.peer_id)  # another connection may have been first
        if peer is not None and not peer.closed:
            # Whoever has lost all connections is let in: those that we still count are dead, and end with this.
            newest = all(link.generation > other.generation for other in peer.links)
            if not newest and len(peer.all_links) >= self._limits.connections_per_peer:
                self._refuse_crowd(link)
            peer.add(link)
            return peer
        peer = Peer(
            link,
            self._own,
            self._services,
            self._limits,
            self.counts,
            dial_lane=self._dial_lane,
            interrupted=self._interrupted,
        )
        self.peers[link.peer_id] = peer
        self.backoff.forget(self.addresses(link.peer_id))
        self._nursery.start_soon(self._run_peer, peer)
        self._connected(peer, link)
        return peer

    async def _run_peer(self, peer: Peer) -> None:
        """The supervisor of one peer."""
        try:
            await peer.run()
        except Exception:
            self.counts["internal-error"] += 1
            log.exception("serving peer %s failed", peer.peer_id)
        finally:
            peer.end(ConnectionLost("serving this peer failed"))
            if self.peers.get(peer.peer_id) is peer:
                del self.peers[peer.peer_id]
            self._lost(peer)

    async def _dial_lane(self, control: Link, ticket: bytes) -> Link:
        """A bulk connection to where a control connection of ours leads."""
        link = await upgrade(await self._lane(control), self._local, initiator=True, expected=control.peer_id, ticket=ticket)
        if link.hello.boot_id != control.hello.boot_id:
            link.discard()
            raise error_for(Code.AUTH, detail="another process of this identity answers where the peer was")
        return link

    def _interrupted(self, peer: Peer, cause: WireError, grace_s: float) -> None:
        """A peer with tensor channels has lost its last connection."""
        if self._nursery is None or self._closing:
            peer.end(cause)
        else:
            told = grace_s == self._limits.resume_closed_s
            self._nursery.start_soon(lambda: reconnect(self, peer, cause, grace_s, told=told))

    async def _answers(self, peer: Peer) -> bool:
        """Whether the process behind the old connection answers a ping."""
        link = peer.primary
        with trio.move_on_after(self._limits.duplicate_ping_timeout_s):
            return link is not None and await link.answers()
        return False

    def _refuse_crowd(self, link: Link) -> NoReturn:
        self._turn_away(link, Code.RESOURCE_LIMIT)
        raise error_for(Code.RESOURCE_LIMIT, detail="too many connections to one peer")

    def _turn_away(self, link: Link, code: Code) -> None:
        """Say why, and go."""
        assert self._nursery is not None
        link.taken = True
        self._nursery.start_soon(link.run, _Nobody())
        link.goaway(code)


class _Nobody:
    """Owner of a connection that is being turned away."""

    def on_opened(self, link: Link, event: StreamOpened) -> None:
        link.reset(event.stream, Code.SHUTDOWN)

    def on_hello(self, link: Link, event: HelloReceived) -> None: ...

    def on_goaway(self, link: Link, event: GoAwayReceived) -> None: ...
