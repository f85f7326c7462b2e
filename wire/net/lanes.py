"""The bulk connections of a peer pair: made, counted, watched, ended.

Why they exist: a lost segment stalls a whole connection, so control messages get one of their own; and one connection fills few
lines (`wire/lanecount.py`).  They belong to one control connection, which vouches for them (`wire/tickets.py`), and end with it.
The side that dialled that one dials them, to the same address or through holes of their own (morelanes.py); the other asks
(`lane/1`).

When no lane can be had, because a firewall allows one connection or the peer is full, the control connection carries all classes:
priorities still hold, a lost segment stalls everything.  That is tried anew after `lane_retry_s`.  A lane that the peer ends within
`lane_trial_s` counts as one that could not be had: a peer that turns lanes away says so behind the handshake, and a hostile one would
have us make four handshakes a second.

A lane that stands still while another moves is closed after `lane_stalled_s` (or 8 RTT): its socket takes nothing, or the kernel has
taken everything and the peer confirms nothing and answers no ping.  Its missing chunks then go over the others.  A lane that is
alone has 30 s, like any connection.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import trio

from wire.errors import Code, ConnectionLost, WireError
from wire.events import Kind
from wire.lanecount import LaneCount
from wire.limits import Limits
from wire.messages import LaneAsk, encode
from wire.net.link import Link
from wire.net.services import LANES
from wire.net.stream import MessageStream

if TYPE_CHECKING:
    from wire.net.peer import Peer

log = logging.getLogger("wire.net")

SAMPLE_S = 0.25  # eight looks while chunks have to wait
RETRY_S = 1.0  # between tries
WANTED_S = 5.0  # a byte stream of a bulk class has begun on the control connection: the next ones find a lane
PING_QUIET_S = 1.0  # a lane with unconfirmed chunks from which nothing comes for so long is pinged


class Lanes:
    """Of one control connection.  `dial(lane)` makes one; `changed()` is told when `links` is another."""

    def __init__(
        self,
        control: Link,
        limits: Limits,
        *,
        dial: Callable[[Link, bytes], Awaitable[Link]],
        run: Callable[[Link], None],
        changed: Callable[[], None],
        in_doubt: Callable[[int], bool],
        ask: Callable[[int], Awaitable[None]],
        needed: Callable[[], bool],
    ) -> None:
        self.control = control
        self.links: list[Link] = []  # in the order in which they came
        self.refused = 0  # tries that failed, each within `lane_retry_s` of the one before
        info = control.pipe.info()
        self._limits = limits
        self._count = LaneCount(limits, congestion=info.congestion, same_machine=info.same_machine, path=info.path)
        self._dial = dial
        self._run = run
        self._changed = changed
        self._in_doubt = in_doubt
        self._ask = ask
        self._needed = needed
        self._asked = 0  # what the side that does not dial wants
        self._dialling = False
        self._retry_at = 0.0
        self._missed_at = 0.0
        self._dialled: dict[Link, float] = {}  # since when those that we made stand
        self._pinged: dict[Link, float] = {}
        self._wanted = trio.Event()
        self._wanted_at = 0.0

    def want(self) -> None:
        """There is, or soon will be, something bulky to carry."""
        self._wanted_at = trio.current_time()
        self._wanted.set()

    def asked(self, count: int) -> None:
        """The peer wants so many."""
        self._asked = min(count, self._limits.lanes_max)
        self.want()

    def usable(self) -> list[Link]:
        return [link for link in self.links if not link.draining]

    @property
    def target(self) -> int:
        """How many there are to be, as far as this side has a say."""
        return self._count.target

    # -- lanes come and go

    def adopt(self, link: Link) -> bool:
        """A bulk connection came in; False if its ticket is none of this control connection's, or there are enough."""
        found = self.control.tickets.redeem(link.ticket)
        if found is None or self.control.draining or len(self.links) > self._limits.lanes_max:
            return False
        self._add(link, found[1])
        return True

    def _add(self, link: Link, number: int) -> None:
        link.lane = number
        link.home = self.control
        link.session.join(self.control.session, trio.current_time())
        link.taken = True
        self.links.append(link)
        self._run(link)
        self._changed()

    def ended(self, link: Link) -> None:
        self.links.remove(link)
        link.session.leave()
        self._pinged.pop(link, None)
        since = self._dialled.pop(link, None)
        if self.control.error is None:
            now = trio.current_time()
            ours = link.goodbye is not None and link.goodbye.local
            if since is not None and not ours and now - since < self._limits.lane_trial_s:
                self._missed(now)
            self._changed()

    def close(self, error: WireError) -> None:
        """The control connection has ended."""
        for link in list(self.links):
            link.fail(error)

    # -- the task

    async def run(self, nursery: trio.Nursery) -> None:
        """Keep the number right, in the peer's nursery, until the control connection ends."""
        await self._wanted.wait()
        idle_since = trio.current_time()
        while self.control.error is None:
            now = trio.current_time()
            if self._needed() or now - self._wanted_at < WANTED_S:
                idle_since = now
                self._adjust(nursery, now)
                self._watch(now)
            elif now - idle_since >= self._limits.lane_idle_s and self.links:
                for link in self.usable():
                    link.goaway(Code.IDLE)
                self._changed()
            await trio.sleep(SAMPLE_S)

    def _adjust(self, nursery: trio.Nursery, now: float) -> None:
        usable = self.usable()
        links = [self.control, *usable]
        sent = sum(link.bytes_out for link in links)
        waiting = any(link.session.bulk_waiting for link in links)
        target = self._count.sample(now, sent, waiting=waiting, lanes=len(usable))
        if not self.control.initiator:
            if target != self._asked:
                self._asked = target
                nursery.start_soon(self._ask, target)
            return
        target = max(target, self._asked)
        if len(usable) > target:
            usable[-1].goaway(Code.OK, detail="this lane brings nothing")
            self._changed()
        elif len(usable) < target and not self._dialling and now >= self._retry_at and not self.control.draining:
            self._dialling = True
            nursery.start_soon(self._dial_one, len(usable) + 1)

    async def _dial_one(self, lane: int) -> None:
        try:
            number, ticket = self.control.tickets.issue(min(lane, self._limits.lanes_max))
            link = await self._dial(self.control, ticket)
        except (WireError, OSError, trio.TooSlowError) as error:
            log.debug("lane to %s: %s", self.control.peer_id, error)
            self._missed(trio.current_time())
        else:
            if self.control.error is None and not self.control.draining:
                self._dialled[link] = trio.current_time()
                self._add(link, number)
            else:
                link.discard()
        finally:
            self._dialling = False

    def _missed(self, now: float) -> None:
        """A lane could not be had, or the other end took it and ended it at once."""
        limits = self._limits
        if now - self._missed_at > limits.lane_retry_s:
            self.refused = 0
        self._missed_at = now
        self.refused += 1
        wait_s = RETRY_S
        if self.refused % limits.lane_dials == 0:
            wait_s = limits.lane_retry_s
            self._count.failed(now)
        self._retry_at = now + wait_s

    def _watch(self, now: float) -> None:
        """Close a lane that stands still while something else moves."""
        limits = self._limits
        links = [self.control, *self.links]
        for link in self.usable():
            allowed_s = max(limits.lane_stalled_s, limits.lane_stalled_rtts * (self.control.session.rtt_s or 0.0))
            others = (other for other in links if other is not link)
            if not any(now - other.session.last_in < allowed_s for other in others):
                continue
            quiet_s = now - link.session.last_in
            if quiet_s < PING_QUIET_S:
                self._pinged.pop(link, None)
            elif self._in_doubt(link.lane) and link not in self._pinged:
                self._pinged[link] = now
                link.ping()
                self.control.ping()
            blocked_s = 0.0 if link.blocked_at is None else now - link.blocked_at
            unanswered_s = now - self._pinged.get(link, now)
            if blocked_s >= allowed_s or unanswered_s >= allowed_s:
                link.fail(ConnectionLost(f"no progress for {max(blocked_s, unanswered_s):.1f} s while other connections moved"))


async def ask_for_lanes(peer: Peer, count: int) -> None:
    """The side that does not dial says how many it would like."""
    try:
        async with await peer.open(LANES, Kind.MESSAGE, 1) as stream:
            assert isinstance(stream, MessageStream)
            await stream.send(encode(LaneAsk(count)), fin=True)
    except (WireError, trio.BrokenResourceError, trio.ClosedResourceError):
        pass  # the control connection carries everything
