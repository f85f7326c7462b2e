"""What the network says, as the events that people see."""

from __future__ import annotations

from collections.abc import Callable

from plnode.observe import events as e
from wire.identity import PeerId
from wire.net import (
    AccessChanged,
    ClockOff,
    Complaint,
    NetEvent,
    NetworkChanged,
    NoSeedReachable,
    NotListening,
    PathChanged,
    PeerConnected,
    PeerLost,
    PortMapped,
    Punched,
    RelayDisagrees,
    RelayThrottled,
    SeedStateChanged,
)

_ACCESS = {"direct": "directly", "relayed": "through relays", "unreachable": "not at all", "unknown": "in a way not known yet"}


def told(event: NetEvent, stage_of: Callable[[PeerId], int | None]) -> e.Event | None:
    """The event to record for `event`, or None for what is of no interest to people."""
    match event:
        case SeedStateChanged(entry, state, reason):
            return e.SeedState(entry, state, reason)
        case NoSeedReachable(reasons):
            return e.Notice("no seed can be reached; all are tried again: " + "; ".join(f"{entry}: {why}" for entry, why in reasons))
        case PeerConnected(peer):
            return e.PeerSeen(str(peer.peer_id), stage_of(peer.peer_id))
        case PeerLost(peer_id, reason):
            return e.PeerLost(str(peer_id), stage_of(peer_id), str(reason))
        case PathChanged(peer_id, path, before):
            return e.PathChanged(str(peer_id), str(path), str(before))
        case ClockOff(offset_s, peers):
            behind = "behind" if offset_s > 0 else "ahead of"
            return e.Notice(
                f"this machine's clock is {abs(offset_s):.1f} s {behind} those of {peers} peers (median): "
                "set it, best by NTP, before records that it signs look expired to others"
            )
        case AccessChanged(verdict, reason):
            return e.Notice(f"others reach this node {_ACCESS[verdict]}: {reason}")
        case RelayThrottled(relay, other, rate):
            return e.Notice(f"the relay {relay.short} holds traffic with {other.short} back: about {rate / 1e6:.1f} MB/s for each pair")
        case RelayDisagrees(relay, other, ours, theirs):
            return e.Notice(f"the relay {relay.short} counted {theirs} bytes with {other.short}, this node {ours} (sent, received)")
        case Punched(peer_id, why, _) if why:
            return e.Notice(f"{peer_id.short} stays relayed: {why}")
        case PortMapped(port, outside, reason):
            if outside is None:
                return e.Notice(f"the router does not forward port {port}: {reason}")
            place = f"{outside.host}:{outside.port}"
            return e.Notice(f"the router forwards {place} to port {port} ({reason}); whether that works is asked of other nodes")
        case NotListening(address, why):
            return e.Notice(f"not listening on {address}: {why}")
        case NetworkChanged(added, gone):
            return e.Notice(f"this machine's addresses changed: new {', '.join(added) or 'none'}; gone {', '.join(gone) or 'none'}")
        case Complaint(text):
            return e.Notice(text)
        case _:
            return None
