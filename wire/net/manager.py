"""Connections of the node as a whole: at most one peer object a peer, and who may stay.

Three ways lead here: a connection came to us, we dialled an address, or we dialled a peer by what is known of it.  All end in
`adopt`, which decides what the new connection is to the ones that exist (wire.md section 16; choose_primary in peer.py):

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
from collections.abc import Callable, Collection, Sequence

import trio

from wire.address import Address, Scope
from wire.errors import Code, ConnectionLost, WireError, error_for
from wire.events import GoAwayReceived, HelloReceived, StreamOpened
from wire.identity import PeerId
from wire.limits import Limits
from wire.net.causes import Cause
from wire.net.dial import BackOff, DialFailed, DialRate, plan_dial, race
from wire.net.link import Link
from wire.net.moved import Moved, end_orphans, prove_alive
from wire.net.peer import Peer
from wire.net.services import Services
from wire.net.transport import Pipe, Transport, literal
from wire.net.upgrade import Local, upgrade
from wire.remembered import RememberedWindows

log = logging.getLogger("wire.net")

RECONNECT_S = 1.0  # whoever was dialled gives the other side so long to dial again
RECONNECT_MOST_S = 5.0


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
    ) -> None:
        self.peers: dict[PeerId, Peer] = {}
        self.backoff = BackOff(limits)
        self.counts: Counter[str] = Counter()
        self._local = local
        self._own = local.identity.peer_id
        self._transport = transport
        self._services = services
        self._limits = limits
        self._crowds_allowed = scope is Scope.HOST  # a swarm on one machine
        self._rate = DialRate(limits, scope)
        self._addresses = addresses
        self._connected = connected
        self._lost = lost
        self._dialled = dialled
        self._dialling: dict[PeerId, _Shared] = {}
        self._nursery: trio.Nursery | None = None
        self._closing = False
        self._network_changed = trio.Event()

    def start(self, nursery: trio.Nursery) -> None:
        """Peers and dials run in this nursery.  Its cancel ends every connection without a goodbye; `close` says one before."""
        self._nursery = nursery

    async def close(self, *, grace_s: float) -> None:
        """Say SHUTDOWN to everybody and wait until the connections have ended, at most `grace_s`."""
        self._closing = True
        for shared in self._dialling.values():
            shared.scope.cancel()
        for peer in list(self.peers.values()):
            peer.goaway(Code.SHUTDOWN)
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
        self._network_changed.set()
        self._network_changed = trio.Event()
        links = [link for peer in self.peers.values() for link in peer.all_links]
        for link in end_orphans(links, gone):
            if self._nursery is not None:
                self._nursery.start_soon(prove_alive, link, self._limits)

    # -- ways in

    async def accept(self, pipe: Pipe) -> None:
        """Serve an inbound pipe up to its place among the peers.  A handshake that fails is a count, not an error."""
        try:
            link = await upgrade(pipe, self._local, initiator=False)
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
                shared.peer = await self.dial(self._addresses(peer_id), expected=peer_id, target=str(peer_id))
        except WireError as error:
            shared.error = error
        finally:
            if self._dialling.get(peer_id) is shared:
                del self._dialling[peer_id]
            shared.done.set()

    async def dial(
        self, addresses: Sequence[Address], *, expected: PeerId | None, target: str, patient: bool = False
    ) -> Peer:
        """Dial these addresses as one peer; the first authenticated wins.

        `patient`: the caller has a rhythm of its own, so that back-off only sorts the addresses.  Raises `DialFailed`.
        A cancel leaves no connection behind.
        """
        now = trio.current_time()
        literals: list[Address] = []
        failed: dict[Address, Cause] = {}
        for address in addresses:
            if address.relay is None:
                literals += await self._resolve(address, failed)
        attempts, held = plan_dial(literals, self.backoff, float("inf") if patient else now, self._limits)

        async def attempt(address: Address) -> tuple[Address, Link]:
            return address, await self._attempt(address, expected or address.peer_id)

        found = await race(
            attempts,
            attempt,
            lambda won: won[1].discard(),
            at_once=self._limits.dials_at_once_per_peer,
            failed=lambda address, cause: self.backoff.failed(address, cause, trio.current_time()),
        )
        if isinstance(found, dict):
            if expected is not None:
                self._dialled(expected, False)
            raise DialFailed(target, {**failed, **found}, held)
        address, link = found
        self.backoff.forget((address,))
        link.dialled = address
        return await self.adopt(link)

    async def _resolve(self, address: Address, failed: dict[Address, Cause]) -> Sequence[Address]:
        if address.is_literal:
            return (address,)
        try:
            with trio.fail_after(self._limits.dial_timeout_s):
                return [found.with_peer(address.peer_id) for found in await self._transport.resolve(address)]
        except (OSError, trio.TooSlowError) as error:
            failed[address] = Cause("name", f"the name cannot be resolved ({error})", "check the name and this machine's DNS")
            return ()

    async def _attempt(self, address: Address, expected: PeerId | None) -> Link:
        await trio.sleep(self._rate.delay_s(address, trio.current_time()))
        with trio.fail_after(self._limits.dial_timeout_s):
            pipe = await self._transport.dial(address)
        return await upgrade(pipe, self._local, initiator=True, expected=expected)

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
        if self._crowded(link):
            self._turn_away(link, Code.RESOURCE_LIMIT)
            raise error_for(Code.RESOURCE_LIMIT, detail=f"too many connections from {link.pipe.info().remote[0]}")
        peer = self.peers.get(link.peer_id)
        if link.bulk:
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
            if len(peer.all_links) >= self._limits.connections_per_peer:
                self._turn_away(link, Code.RESOURCE_LIMIT)
                raise error_for(Code.RESOURCE_LIMIT, detail="too many connections to one peer")
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
        self.backoff.forget(self._addresses(link.peer_id))
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
        host, port = control.pipe.info().remote
        with trio.fail_after(self._limits.dial_timeout_s):
            pipe = await self._transport.dial(literal(host, port))
        return await upgrade(pipe, self._local, initiator=True, expected=control.peer_id, ticket=ticket)

    def _interrupted(self, peer: Peer, cause: WireError, grace_s: float) -> None:
        """A peer with tensor channels has lost its last connection."""
        if self._nursery is None or self._closing:
            peer.end(cause)
        else:
            self._nursery.start_soon(self._reconnect, peer, cause, grace_s)

    async def _reconnect(self, peer: Peer, cause: WireError, grace_s: float) -> None:
        """Dial a peer again until a connection stands, it is known to be gone, or the time is up."""
        told = grace_s == self._limits.resume_closed_s
        with trio.move_on_after(grace_s):
            if peer.dialled is None and not isinstance(cause, Moved):
                await trio.sleep(RECONNECT_S)  # it dialled us, and does it again
            pause_s = RECONNECT_S / 4
            while not peer.links and not peer.closed:
                known = [*self._addresses(peer.peer_id)]
                addresses = known if peer.dialled is None else [peer.dialled, *known]
                try:
                    await self.dial(addresses, expected=peer.peer_id, target=str(peer.peer_id), patient=True)
                except DialFailed as failed:
                    if told and failed.causes and all(item.kind == "refused" for item in failed.causes.values()):
                        break  # its machine answers, its process is not there
                except WireError as error:
                    log.debug("reconnecting %s: %s", peer.peer_id, error)
                with trio.move_on_after(pause_s) as pause:
                    await self._network_changed.wait()
                pause_s = min(2 * pause_s, RECONNECT_MOST_S) if pause.cancelled_caught else RECONNECT_S / 4
        if not peer.links:
            peer.end(cause)

    async def _answers(self, peer: Peer) -> bool:
        """Whether the process behind the old connection answers a ping."""
        link = peer.primary
        with trio.move_on_after(self._limits.duplicate_ping_timeout_s):
            return link is not None and await link.answers()
        return False

    def _crowded(self, link: Link) -> bool:
        """Too many connections from one address: one router may hide a lab, but not a crowd."""
        if link.initiator or self._crowds_allowed:
            return False
        host = link.pipe.info().remote[0]
        limits = self._limits
        most = limits.connections_per_ip_guests if link.guest else limits.connections_per_ip_members
        same = (
            other
            for peer in self.peers.values()
            for other in peer.all_links
            if not other.initiator and other.guest == link.guest and other.pipe.info().remote[0] == host
        )
        return sum(1 for _ in same) >= most

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
