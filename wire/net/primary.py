"""Which of several connections to one peer is the primary one, and what is counted of them all; see peer.py for the rule's reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wire.identity import PeerId
from wire.net.link import Link


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


def choose_primary(links: Sequence[Link], own: PeerId) -> Link | None:
    """The connection that new streams use; None if all are draining.  `links` in the order in which they came."""
    live = [link for link in links if not link.draining]
    if not live:
        return None
    newest = max(link.generation for link in live)
    live = [link for link in live if link.generation == newest]
    lower_is_ours = own < live[0].peer_id
    by_lower = [link for link in live if link.initiator == lower_is_ours]
    return (by_lower or live)[-1]
