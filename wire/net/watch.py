"""A look at every peer once a second: how fast bytes go, what their clocks say, which way they are reached.

The figures of a peer are read when somebody asks (peerstatus.py); two of them need somebody who looks regularly: a rate is a
difference, and an operator should hear of a wrong clock without asking.  With five hundred peers a look takes about two milliseconds.

**Our own wall clock may be set while connections stand.**  A session stamps its pings with the wall clock as it was when the
connection was made; so the look also tells sessions when the two clocks have parted, or a node that was put right would go on
seeing everybody's clock as wrong.  What is smaller than `WALL_STEP_S` is the time between two readings.

Bytes of peers that are gone are kept here, so that the node's traffic never falls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import trio

from wire.limits import Limits
from wire.net.clockwatch import ClockWatch
from wire.net.netevents import ClockOff, NetEvent, PathChanged, Traffic
from wire.net.peer import Peer
from wire.path import Path

LOOK_S = 1.0
WALL_STEP_S = 0.01  # nothing here is judged finer than seconds


class Watch:
    """One of a node.  `peers` gives all that exist, also those whose connections are just being made again."""

    def __init__(
        self,
        limits: Limits,
        *,
        peers: Callable[[], Iterable[Peer]],
        wall_time: Callable[[], float],
        emit: Callable[[NetEvent], None],
    ) -> None:
        self._peers = peers
        self._wall_time = wall_time
        self._emit = emit
        self._clock = ClockWatch(limits)
        self._ended = [0, 0]  # bytes in and out of peers that are gone

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            self.look()
            await trio.sleep(LOOK_S)

    def look(self) -> None:
        """Once over all peers."""
        now = trio.current_time()
        wall_offset_s = self._wall_time() - now
        offsets = []
        for peer in self._peers():
            peer.rates.look(now, *_bytes(peer))
            for link in peer.all_links:
                if abs(link.session.wall_offset_s - wall_offset_s) > WALL_STEP_S:
                    link.session.set_wall_offset(wall_offset_s)
            primary = peer.primary
            if primary is not None and (offset := primary.session.clock_offset) is not None:
                offsets.append(offset)
        if (median := self._clock.look(offsets)) is not None:
            self._emit(ClockOff(median, len(offsets)))

    def traffic(self) -> Traffic:
        """Bytes at the sockets since the start, over all peers that ever were."""
        now = [_bytes(peer) for peer in self._peers()]
        return Traffic(self._ended[0] + sum(each[0] for each in now), self._ended[1] + sum(each[1] for each in now))

    def gauges(self) -> dict[str, int]:
        """What is held now; all 0 in a node without peers."""
        peers = list(self._peers())
        total: Counter[str] = Counter(peers=len(peers), connections=sum(len(peer.all_links) for peer in peers))
        for peer in peers:
            total.update(peer.gauges())
        return dict(total)

    def joined(self, peer: Peer) -> None:
        """A peer is new."""
        peer.moved = self._moved
        peer.rates.look(trio.current_time(), *_bytes(peer))

    def left(self, peer: Peer) -> None:
        """A peer is gone, with all its connections."""
        self._ended[0] += peer.tally.socket[0]
        self._ended[1] += peer.tally.socket[1]

    def _moved(self, peer: Peer, before: Path) -> None:
        self._emit(PathChanged(peer.peer_id, peer.path, before))


def _bytes(peer: Peer) -> tuple[int, int]:
    """In and out, over all its connections."""
    links, (past_in, past_out) = peer.all_links, peer.tally.socket
    return past_in + sum(link.bytes_in for link in links), past_out + sum(link.bytes_out for link in links)
