"""Failure detection at work: looks at the connections, carries out what the detector decides, and helps others who ask.

The detector (suspicion.py) decides; this file is its eyes and hands.  What could go wrong here, and what holds it:

* A peer with tensor channels whose connection broke is "interrupted": the wire dials it for a minute before it says PeerLost.  So the
  connections themselves are looked at, whenever one may have become quiet, and not only the events.
* Whoever may ask us to look at somebody makes us send packets.  Only members may ask, each `ASKS_PER_S`; only about members that we
  know of; at most `HELPS_AT_ONCE` looks are under way, and those about one member share one.  A dial goes to addresses that its owner has
  signed, under the wire's own back-off (a minute's dials of one address are about six).  Whoever is over a limit is told that we did not
  look, which is no evidence for anything.
* Our own loop may stand still.  A look that comes late says so to the detector before anything else is judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random
from typing import Protocol

import trio

from plnode.swarm.claims import NodeState, StageClaim
from plnode.swarm.probemessages import PROBE, ProbeAnswer, ProbeAsk
from plnode.swarm.suspicion import HELP_S, Detector
from plnode.swarm.verdicts import SEEN_ALIVE, Ask, Decision, Failure, Judged, Ping, Seen, Standing, Verdict
from wire.errors import Code, WireError
from wire.identity import PeerId
from wire.net import DialFailed, Net, NetEvent, Peer, PeerConnected, PeerLost
from wire.rates import Buckets

LOOK_S, DOUBT_LOOK_S = 1.0, 0.25  # a reading of a few fields a connection; who is new is known for as long a time later
LEAST_S = 0.01  # whatever comes: a wait that rounding has made as good as zero would be repeated without end
LATE_S = 0.5  # a look that comes so late: the loop stood still (a step of the loop is milliseconds)
ASKS_PER_S, ASKS_BURST = 1.0, 64.0  # when a rack of 64 goes dark an honest member may ask about each at once
HELPS_AT_ONCE = 16
MOST_ASKERS = 1024
TURNED_AWAY = {"busy", "full", "rate", "banned", "duplicate"}  # kinds of `wire.net.causes`: a living process said so


class Members(Protocol):
    """Of `Membership`, what is needed here."""

    def claim_of(self, peer: PeerId) -> StageClaim | None: ...

    def seq_of(self, peer: PeerId) -> int:
        """The sequence number of its newest claim, -1 without one."""
        ...


class _Look:
    """One look at a member that several askers wait for."""

    def __init__(self) -> None:
        self.done = trio.Event()
        self.seen = Seen.SILENT


class Probing:
    """See the module.  One per node; `on_verdict` is called on the loop and must not wait."""

    def __init__(self, net: Net, membership: Members, random: Random, on_verdict: Callable[[PeerId, Verdict], None]) -> None:
        self._net = net
        self._members = membership
        self._on_verdict = on_verdict
        self._detector = Detector(random)
        self._nursery: trio.Nursery | None = None
        self._changed = trio.Event()
        self._askers = Buckets(ASKS_PER_S, ASKS_BURST, MOST_ASKERS)
        self._looks: dict[tuple[PeerId, bytes], _Look] = {}
        net.serve_calls(PROBE, ProbeAsk, self._on_ask)

    def standing(self, peer: PeerId) -> Standing | None:
        """What is thought of it now; None for one that was never connected."""
        return self._detector.standing(peer)

    @property
    def distrust(self) -> int:
        """How much this node distrusts itself: 0 is well, `suspicion.HEALTH_MOST` the most."""
        return self._detector.health.score

    # -- eyes ------------------------------------------------------------------------------------------------------------------
    async def run(self) -> None:
        """Look for ever.  A cancel leaves nothing behind; verdicts end with it."""
        async with trio.open_nursery() as self._nursery:
            try:
                while True:
                    now = trio.current_time()
                    self._look(now)
                    self._changed = trio.Event()
                    look_s = DOUBT_LOOK_S if self._detector.doubted() else LOOK_S
                    due = max(now + LEAST_S, min(now + look_s, self._detector.next_due()))
                    with trio.move_on_at(due):
                        await self._changed.wait()
                    late = trio.current_time() - due
                    if late > LATE_S:
                        self._detector.stalled(late, trio.current_time())
            finally:
                self._nursery = None

    def on_event(self, event: NetEvent) -> None:
        """The network has news; to be called with every event."""
        now = trio.current_time()
        if self._nursery is None:
            return  # the first look of `run` sees who is here
        if isinstance(event, PeerConnected):
            self._see(event.peer, now)
        elif isinstance(event, PeerLost):
            reason = event.reason
            if reason.code is Code.SHUTDOWN and reason.local:
                return  # this node stops
            goodbye = reason.code is Code.SHUTDOWN
            self._carry_out(self._detector.lost(event.peer_id, str(reason), now, goodbye=goodbye))

    def _look(self, now: float) -> None:
        for peer in self._net.peers():
            self._see(peer, now)
        for peer_id in self._detector.doubted():
            claim = self._members.claim_of(peer_id)
            if claim is not None and claim.state == NodeState.FINISHED:
                self._detector.forget(peer_id)  # it may leave without being missed
            else:
                self._carry_out(self._detector.claimed(peer_id, self._members.seq_of(peer_id), now))
        self._carry_out(self._detector.tick(now))

    def _see(self, peer: Peer, now: float) -> None:
        claim = self._members.claim_of(peer.peer_id)
        if peer.guest or claim is None or claim.state == NodeState.FINISHED:
            return
        detector = self._detector
        if peer.primary is None:
            if not peer.links:
                self._carry_out(detector.lost(peer.peer_id, f"the connection broke: {peer.last.error}", now))
            return
        heard_at = max(link.session.last_in for link in peer.all_links)
        self._carry_out(detector.heard(peer.peer_id, peer.boot_id, heard_at, peer.rtt_s or 0.0, now))
        self._carry_out(detector.claimed(peer.peer_id, self._members.seq_of(peer.peer_id), now))

    # -- hands -----------------------------------------------------------------------------------------------------------------
    def _carry_out(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            match decision:
                case Judged(peer, verdict):
                    self._on_verdict(peer, verdict)
                case Ping() if self._nursery is not None:
                    self._nursery.start_soon(self._ping, decision)
                case Ask() if self._nursery is not None:
                    for helper in decision.helpers:
                        self._nursery.start_soon(self._ask, decision, helper)
                case _:
                    pass  # not running: the detector's own deadlines go on when it is
        self._changed.set()

    async def _ping(self, ping: Ping) -> None:
        found, _ = await self._reach(ping.peer, ping.deadline_s)
        now = trio.current_time()
        if isinstance(found, Peer):
            self._carry_out(self._detector.heard(ping.peer, found.boot_id, now, found.rtt_s or 0.0, now))
            self._carry_out(self._detector.answered(ping.peer, ping.round, now))
        else:
            self._carry_out(self._detector.failed(ping.peer, ping.round, found, now))

    async def _ask(self, ask: Ask, helper: PeerId) -> None:
        peer = self._net.peer(helper)
        if peer is None:
            return
        try:
            answer = await peer.call(PROBE, ProbeAsk(ask.peer.raw, ask.boot_id), ProbeAnswer, deadline_s=ask.deadline_s)
        except WireError as failed:
            if failed.code is Code.TIMEOUT or peer.closed:
                return  # it is missing: the detector sees that by itself
            seen = Seen.BUSY  # it does not want to, or knows no such protocol
        else:
            seen = Seen(answer.how) if answer.how in tuple(Seen) else Seen.BUSY
            if answer.seen is not (seen in SEEN_ALIVE):
                seen = Seen.BUSY  # it contradicts itself
        self._carry_out(self._detector.helped(ask.peer, ask.round, helper, seen, trio.current_time()))

    async def _reach(self, peer_id: PeerId, deadline_s: float) -> tuple[Peer | Failure, bool]:
        """Ping it over the connection that stands, or dial it; with True if it had to be dialled."""
        dialled = False
        with trio.move_on_after(deadline_s):
            peer = self._net.peer(peer_id)
            if peer is None or peer.primary is None:
                dialled = True
                try:
                    peer = await self._net.connect(peer_id, deadline_s=deadline_s)
                except DialFailed as failed:
                    return _failure(failed), True
                except WireError as failed:
                    return (Failure.SILENT if failed.code is Code.TIMEOUT else Failure.TURNED_AWAY), True
            link = peer.primary
            if link is not None and await link.answers():
                return peer, dialled
        return Failure.SILENT, dialled

    # -- helping ---------------------------------------------------------------------------------------------------------------
    async def _on_ask(self, asker: Peer, ask: ProbeAsk) -> ProbeAnswer:
        seen = await self._help(asker.peer_id, ask)
        return ProbeAnswer(seen in SEEN_ALIVE, seen)

    async def _help(self, asker: PeerId, ask: ProbeAsk) -> Seen:
        if not self._askers.take(asker, trio.current_time()):
            return Seen.BUSY
        try:
            target = PeerId(ask.target)
        except ValueError:
            return Seen.UNKNOWN
        if target == self._net.peer_id or target == asker or self._members.claim_of(target) is None:
            return Seen.UNKNOWN
        look = self._looks.get((target, ask.boot_id))
        if look is None:
            if len(self._looks) >= HELPS_AT_ONCE or self._nursery is None:
                return Seen.BUSY
            look = self._looks[target, ask.boot_id] = _Look()
            self._nursery.start_soon(self._look_at, target, ask.boot_id, look)
        await look.done.wait()
        return look.seen

    async def _look_at(self, target: PeerId, boot_id: bytes, look: _Look) -> None:
        try:
            found, dialled = await self._reach(target, HELP_S)
            if isinstance(found, Peer):
                look.seen = Seen.RESTARTED if found.boot_id != boot_id else Seen.DIALLED if dialled else Seen.CONNECTED
            else:
                look.seen = Seen.REFUSED if found is Failure.REFUSED else Seen.SILENT
        finally:
            self._looks.pop((target, boot_id), None)
            look.done.set()


def _failure(failed: DialFailed) -> Failure:
    """Refused only if every address was: of a machine with several, some may lead elsewhere by now."""
    kinds = {cause.kind for cause in failed.causes.values()}
    if kinds == {"refused"}:
        return Failure.REFUSED
    return Failure.TURNED_AWAY if kinds & TURNED_AWAY else Failure.SILENT
