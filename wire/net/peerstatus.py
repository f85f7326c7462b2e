"""How one peer is doing, in one value: what `plnode status` shows and what a person needs to see why something is slow.

Everything is read where it is kept, at the moment of asking; nothing is counted here.  So the figures of one `PeerStatus` belong
together, and asking costs a few microseconds a connection.

What is easily misread:

* **Round trips are the control connection's.**  A lane's own would show the queue in front of it, which is the queue's figure.
* **Queued bytes are tensors that wait for a slot or a lane, and stream data that have credit and wait for the socket.**  What
  the kernel holds is not among them.  A task that is out of credit keeps its bytes itself: that is seen in the windows.
* **A window that is used up is not an error.**  The sender stands still because the reader has not read, or because the line is
  longer than the window; `receive_used` tells these apart.
* **No lane is two things.**  Nothing bulky was to be carried, then `idle` is true; or no lane could be had, then `why` says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from wire.identity import PeerId
from wire.net.link import Link
from wire.net.peer import Peer
from wire.path import Path
from wire.rtt import Rtt


@dataclass(frozen=True, slots=True)
class ConnectionStatus:
    """One connection.  Windows in bytes: what we may send now, what the peer may have under way to us, and what of that lies here
    unread.
    """

    lane: int  # 0: the control connection
    congestion: str  # congestion control in force; "" if the transport has none
    send_available: int
    receive_granted: int
    receive_used: int


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """Of one moment.  Seconds, bytes, bytes a second."""

    peer_id: PeerId
    path: Path  # of the primary connection; while there is none, of the last one
    connected: bool  # new streams can be opened now
    since_s: float  # how long that has been so, over this connection
    why: str  # what is out of order, or why nothing happens; "" if there is nothing to say
    idle: bool  # no stream and no channel
    connections: tuple[ConnectionStatus, ...]  # of the primary one: itself first, then its lanes
    rtt: Rtt | None  # minimum of 60 s, median and p99 of the last 64; None before the first answer
    in_bytes_per_s: float
    out_bytes_per_s: float
    queued_bytes: tuple[int, ...]  # by priority class 0..4
    resent_chunks: int  # by the channels that exist
    clock_offset_s: float | None  # the peer's wall clock minus ours

    @property
    def lanes(self) -> tuple[ConnectionStatus, ...]:
        return self.connections[1:]

    @property
    def mixed(self) -> bool:
        """The control connection carries all classes."""
        return not self.lanes


def peer_status(peer: Peer, now: float) -> PeerStatus:
    """The peer at `now` (trio's clock)."""
    primary = peer.primary
    shown = primary or peer.last
    lanes = [] if primary is None or peer.lanes is None else peer.lanes.usable()
    queued = [0] * 5
    for link in peer.all_links:
        queued = [have + more for have, more in zip(queued, link.session.queued_bytes(), strict=True)]
    for cls, more in peer.queued_tensor_bytes().items():
        queued[cls] += more
    idle = not any(link.ends for link in peer.all_links)
    return PeerStatus(
        peer_id=peer.peer_id,
        path=peer.path,
        connected=primary is not None,
        since_s=max(0.0, now - peer.since),
        why=_why(peer, idle, len(lanes)),
        idle=idle,
        connections=() if primary is None else tuple(_connection(link) for link in (primary, *lanes)),
        rtt=shown.session.rtt,
        in_bytes_per_s=peer.rates.in_per_s,
        out_bytes_per_s=peer.rates.out_per_s,
        queued_bytes=tuple(queued),
        resent_chunks=peer.stats.resent_chunks,
        clock_offset_s=shown.session.clock_offset,
    )


def _connection(link: Link) -> ConnectionStatus:
    windows = link.session.windows()
    return ConnectionStatus(
        link.lane, link.pipe.info().congestion, windows.send_available, windows.receive_size, windows.receive_used
    )


def _why(peer: Peer, idle: bool, lanes: int) -> str:
    if peer.closed:
        return f"gone: {peer.reason}" if peer.reason is not None else "gone"
    if not peer.links:
        return f"not reachable, dialled again and again: {peer.last.error}"
    if peer.primary is None:
        return f"going away: {peer.links[-1].goodbye}"
    refused = 0 if peer.lanes is None else peer.lanes.refused
    if refused and not lanes:
        return f"no lane could be had in {refused} tries: one connection carries everything"
    return "idle: no stream is open" if idle else ""
