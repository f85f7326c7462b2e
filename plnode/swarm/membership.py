"""Who is here: spreads this node's stage claim, keeps everybody else's, and keeps connections to the nodes of the run.

Claims spread by flooding news to the connected peers, and by a full exchange whenever a connection is new: a claim made while two
nodes were apart arrives with their first words.  What a connected peer has not answered is told again (greeting.py).  (A swarm of
hundreds needs samples instead of a full mesh; the table and the exchange do not depend on it.)  Of two nodes that know each other's
address the lower id dials at once and the other one a moment later, so that the usual case needs no tie-break between two connections.

Others wait on `changed()`: one event per change of what is known, nothing polls.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from random import Random

import trio

from plnode.swarm.claims import DOMAIN, LIFE_S, Claimed, ClaimTable, StageClaim, pack
from plnode.swarm.greeting import Greetings
from plnode.swarm.messages import CLAIMS, MOST_CLAIMS, Claims
from wire.envelope import SequenceClock, seal
from wire.errors import WireError
from wire.identity import Identity, PeerId
from wire.net import Net, NetEvent, Peer, PeerConnected, PeerLost

MOST_PEERS = 64
CALL_S = 10.0
SECOND_DIALLER_WAITS_S = 1.0
DIAL_AGAIN_S = 5.0  # the first back-off of an address


class Membership:
    """Membership of one run as this node sees it."""

    def __init__(
        self,
        net: Net,
        identity: Identity,
        run: bytes,
        sequence: SequenceClock,
        own: StageClaim,
        *,
        wall: Callable[[], float] = time.time,
        random: Random | None = None,
    ) -> None:
        self._net = net
        self._identity = identity
        self._run = run
        self._sequence = sequence
        self._own = own
        self._wall = wall
        self._table = ClaimTable(run)
        self._changed = trio.Event()
        self._nursery: trio.Nursery | None = None
        self._dialling: set[PeerId] = set()
        self._greetings = Greetings(self._tell_all, random or Random())
        self._sealed_own: Claimed | None = None
        self._reseal()
        net.serve_calls(CLAIMS, Claims, self._on_claims)

    # -- what is known ------------------------------------------------------------------------------------------------
    @property
    def own(self) -> StageClaim:
        return self._own

    def claim_of(self, peer: PeerId) -> StageClaim | None:
        return self._table.get(peer)

    def present(self) -> tuple[tuple[PeerId, StageClaim], ...]:
        """This node and every connected node whose claim is known, ordered by id."""
        here = {p.peer_id for p in self._net.peers()} | {self._net.peer_id}
        return tuple((c.peer, c.claim) for c in self._table.all() if c.peer in here)

    def connected(self, peer: PeerId) -> bool:
        return peer == self._net.peer_id or self._net.peer(peer) is not None

    def changed(self) -> trio.Event:
        """An event that is set at the next change of `present()`."""
        return self._changed

    # -- what this node says ----------------------------------------------------------------------------------------------
    def say(self, claim: StageClaim) -> None:
        """Replace this node's claim and send it to everybody connected."""
        if claim == self._own:
            return
        self._own = claim
        self._reseal()
        self._spread((self._sealed(),), apart_from=None)

    async def say_and_wait(self, claim: StageClaim) -> None:
        """As `say`, but returns when every connected peer has answered or its call has failed: for the last words of a node."""
        self._own = claim
        self._reseal()
        raw = self._sealed()
        async with trio.open_nursery() as nursery:
            for peer in self._net.peers():
                if not peer.guest:
                    nursery.start_soon(self._pass_on, peer, (raw,))

    def _reseal(self) -> None:
        now = self._wall()
        raw = seal(
            self._identity,
            DOMAIN,
            pack(self._own),
            run=self._run,
            seq=self._sequence.next(now),
            not_after=int(now) + LIFE_S,
        )
        self._sealed_own = self._table.accept(raw, now)
        self._notify()

    def _sealed(self) -> bytes:
        assert self._sealed_own is not None
        return self._sealed_own.raw

    # -- tasks ----------------------------------------------------------------------------------------------------------------
    async def run(self) -> None:
        """Spread, renew and dial for ever.  A cancel leaves nothing behind."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                nursery.start_soon(self._renew)
                nursery.start_soon(self._dial_again)
                for peer in self._net.peers():
                    if not peer.guest:
                        nursery.start_soon(self._greet, peer)
                self._dial_known()
                await trio.sleep_forever()
            finally:
                # Peers that still talk to us are answered, but nothing new is begun.  Here, because behind the block it would be too
                # late: a nursery whose tasks have ended takes no others, and says so with an error.
                self._nursery = None

    def on_event(self, event: NetEvent) -> None:
        """The network has news: greet who came, forget who went, dial whom we now know."""
        if isinstance(event, PeerConnected) and not event.peer.guest and self._nursery is not None:
            self._nursery.start_soon(self._greet, event.peer)
        elif isinstance(event, PeerLost):
            self._notify()
        self._dial_known()

    async def _renew(self) -> None:
        while True:
            await trio.sleep(LIFE_S / 2)
            self._reseal()
            self._table.expire(self._wall())
            self._spread((self._sealed(),), apart_from=None)

    async def _dial_again(self) -> None:
        """A dial that failed is news to nobody: look for whom to dial now and then (addresses have their own back-off)."""
        while True:
            await trio.sleep(DIAL_AGAIN_S)
            self._dial_known()

    def _dial_known(self) -> None:
        if self._nursery is None:
            return
        room = MOST_PEERS - len(self._net.peers()) - len(self._dialling)
        for record in self._net.known():
            peer = record.peer_id
            if room <= 0:
                return
            if peer == self._net.peer_id or peer in self._dialling or self._net.wanted.barred(peer) or self._net.peer(peer) is not None:
                continue
            room -= 1
            self._dialling.add(peer)
            self._nursery.start_soon(self._dial, peer)

    async def _dial(self, peer: PeerId) -> None:
        try:
            if peer < self._net.peer_id:
                await trio.sleep(SECOND_DIALLER_WAITS_S)
            if self._net.peer(peer) is None:
                await self._net.connect(peer, deadline_s=30.0)
        except WireError:
            # The peer book keeps the causes and the back-off; whoever needs this very peer gets them from `connect`.
            await trio.sleep(SECOND_DIALLER_WAITS_S)
        finally:
            self._dialling.discard(peer)

    async def _greet(self, peer: Peer) -> None:
        self._notify()
        await self._greetings.greet(peer)

    async def _tell_all(self, peer: Peer) -> bool:
        raws = tuple(c.raw for c in self._table.all())
        for start in range(0, max(len(raws), 1), MOST_CLAIMS):
            if not await self._exchange(peer, raws[start : start + MOST_CLAIMS]):
                return False
        return True

    async def _pass_on(self, peer: Peer, raws: tuple[bytes, ...]) -> None:
        if not await self._exchange(peer, raws) and self._nursery is not None:
            self._nursery.start_soon(self._greetings.greet, peer)

    async def _exchange(self, peer: Peer, raws: tuple[bytes, ...]) -> bool:
        try:
            reply = await peer.call(CLAIMS, Claims(raws), Claims, deadline_s=CALL_S)
        except WireError:
            return False  # a lost peer is an event of its own
        self._take(reply.envelopes, peer)
        return True

    async def _on_claims(self, peer: Peer, request: Claims) -> Claims:
        self._take(request.envelopes, peer)
        theirs = set(request.envelopes)
        answer = [self._sealed()] + [c.raw for c in self._table.all() if c.peer not in (self._net.peer_id, peer.peer_id)]
        return Claims(tuple([raw for raw in answer if raw not in theirs][:MOST_CLAIMS]))

    def _take(self, raws: tuple[bytes, ...], source: Peer) -> None:
        news = []
        for raw in raws:
            if self._table.full:
                self._table.drop_all_but({p.peer_id for p in self._net.peers()} | {self._net.peer_id})
            try:
                claimed = self._table.accept(raw, self._wall())
            except WireError:
                continue  # not signed by whom it says, of another run, expired, contradicting: worth nothing, harms nothing
            if claimed is None:
                continue
            if claimed.peer == self._net.peer_id:
                self._outlive(claimed)
                continue
            news.append(raw)
        if news:
            self._notify()
            self._spread(tuple(news), apart_from=source.peer_id)

    def _outlive(self, claimed: Claimed) -> None:
        # A claim of this identity with a greater number than ours: from before a restart.  Ours must be the newest.
        self._sequence.at_least(claimed.seq)
        self._reseal()
        self._spread((self._sealed(),), apart_from=None)

    def _spread(self, raws: tuple[bytes, ...], apart_from: PeerId | None) -> None:
        if self._nursery is None:
            return
        for peer in self._net.peers():
            if not peer.guest and peer.peer_id != apart_from:
                self._nursery.start_soon(self._pass_on, peer, raws)

    def wake(self) -> None:
        """Let everybody who waits for a change look again (something else than a claim has changed)."""
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


def micronats(loss: float | None) -> int | None:
    """A mean loss in nats as the integer that a claim carries; None for unknown or not finite."""
    if loss is None or not math.isfinite(loss) or loss < 0:
        return None
    return min(round(loss * 1e6), 2**53)
