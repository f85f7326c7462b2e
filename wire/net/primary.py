"""Which of several connections to one peer is the primary one, and what is counted of them all.

Two nodes that dial each other at the same moment have two connections.  The rule is a pure function of what both ends know, so both
keep the same one:

* a higher generation wins: it was made after one side had lost all connections, so the others are dead, seen or unseen;
* of one generation a direct connection wins over one through a relay;
* connections dialled by the peer with the lower id win over those dialled by the other, so both ends keep the same one;
* among connections of one initiator the newest wins, because it made a new one for a reason.

The initiator of the winner tells the loser goodbye (SUPERSEDED), as soon as the winner has answered its first ping.  Before that the
other end may not have it: it is done when the initiator's HELLO has come, and a lost packet makes that later than the goodbye, which
comes another way.  So no end is ever without a connection.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from wire.errors import Code, ConnectionLost
from wire.identity import PeerId
from wire.net.link import Link
from wire.packing import PackingStats


@dataclass(frozen=True, slots=True)
class PeerStats:
    """Counts since the peer was connected."""

    socket_in_bytes: int  # everything, headers and tags included
    socket_out_bytes: int
    class_in_bytes: tuple[int, ...]  # by priority class 0..4: plaintext received
    class_out_bytes: tuple[int, ...]  # sealed records sent
    rtt_s: float | None
    congestion: str  # congestion control in force
    connections: int  # lanes included
    lanes: int
    resent_chunks: int
    packed: PackingStats  # of the chunks of tensors that we sent


def choose_primary(links: Sequence[Link], own: PeerId) -> Link | None:
    """The connection that new streams use; None if all are draining.  `links` in the order in which they came."""
    live = [link for link in links if not link.draining]
    if not live:
        return None
    newest = max(link.generation for link in live)
    live = [link for link in live if link.generation == newest]
    live = [link for link in live if link.relay is None] or live
    lower_is_ours = own < live[0].peer_id
    by_lower = [link for link in live if link.initiator == lower_is_ours]
    return (by_lower or live)[-1]


def retire(links: Sequence[Link], primary: Link) -> bool:
    """Let the others drain if we dialled `primary`; what is of an older generation is dead and ends now.

    False if it is too early for the former: call it again when `primary` has answered.
    """
    others = [link for link in links if link is not primary]
    for link in others:
        if link.generation < primary.generation:
            link.fail(ConnectionLost("the peer has lost this connection and made another"))
    if not primary.initiator or all(link.draining for link in others):
        return True
    if primary.session.rtt_s is None:
        return False
    for link in others:
        link.goaway(Code.SUPERSEDED)
    return True


def gauges(links: Sequence[Link]) -> dict[str, int]:
    """What is held for a peer now, over all its connections."""
    total: Counter[str] = Counter()
    for link in links:
        total.update(link.session.gauges())
        total["waiting"] += len(link.ends)
    return dict(total)


class Tally:
    """Bytes of the connections that have ended; with those that stand it gives the peer's figures."""

    def __init__(self) -> None:
        self._in: Counter[int] = Counter()
        self._out: Counter[int] = Counter()
        self.socket = [0, 0]  # in, out

    def add(self, link: Link) -> None:
        """A connection has ended."""
        self._in.update(dict(enumerate(link.session.bytes_in)))
        self._out.update(dict(enumerate(link.session.bytes_out)))
        self.socket[0] += link.bytes_in
        self.socket[1] += link.bytes_out

    def stats(self, links: Sequence[Link], primary: Link, resent_chunks: int, packed: PackingStats) -> PeerStats:
        """With the connections that stand.  `primary`: or the last one, if there is none."""
        total = Tally()
        total._in.update(self._in)
        total._out.update(self._out)
        total.socket = list(self.socket)
        for link in links:
            total.add(link)
        return PeerStats(
            total.socket[0],
            total.socket[1],
            tuple(total._in[cls] for cls in range(5)),
            tuple(total._out[cls] for cls in range(5)),
            primary.session.rtt_s,
            next((link for link in links if link.lane), primary).pipe.info().congestion,
            len(links),
            sum(1 for link in links if link.lane),
            resent_chunks,
            packed,
        )
