"""What the network says, as the events that people see."""

from __future__ import annotations

from collections.abc import Callable

from plnode.observe import events as e
from wire.identity import PeerId
from wire.net import Complaint, NetEvent, NetworkChanged, NotListening, PeerConnected, PeerLost, SeedStateChanged


def told(event: NetEvent, stage_of: Callable[[PeerId], int | None]) -> e.Event | None:
    """The event to record for `event`, or None for what is of no interest to people."""
    match event:
        case SeedStateChanged(entry, state, reason):
            return e.SeedState(entry, state, reason)
        case PeerConnected(peer):
            return e.PeerSeen(str(peer.peer_id), stage_of(peer.peer_id))
        case PeerLost(peer_id, reason):
            return e.PeerLost(str(peer_id), stage_of(peer_id), str(reason))
        case NotListening(address, why):
            return e.Notice(f"not listening on {address}: {why}")
        case NetworkChanged(added, gone):
            return e.Notice(f"this machine's addresses changed: new {', '.join(added) or 'none'}; gone {', '.join(gone) or 'none'}")
        case Complaint(text):
            return e.Notice(text)
        case _:
            return None
