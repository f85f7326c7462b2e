"""A peer's status as the event that `plnode status` shows: seconds become milliseconds, ids and paths their text."""

from __future__ import annotations

from plnode.observe import events as e
from wire.net import PeerStatus

__all__ = ["peer_line"]


def peer_line(status: PeerStatus, stage: int | None) -> e.PeerLine:
    """`stage`: what the peer claims to hold, None if it has claimed none."""
    rtt, path = status.rtt, status.path
    return e.PeerLine(
        peer_id=str(status.peer_id),
        stage=stage,
        rtt_ms=None if rtt is None else rtt.ewma * 1000,
        path=str(path.kind),
        relay=None if path.relay is None else str(path.relay),
        connected=status.connected,
        since_s=status.since_s,
        idle=status.idle,
        why=status.why,
        connections=tuple(
            e.ConnectionLine(each.lane, each.congestion, each.send_available, each.receive_granted, each.receive_used)
            for each in status.connections
        ),
        rtt_min_ms=None if rtt is None else rtt.minimum * 1000,
        rtt_median_ms=None if rtt is None else rtt.median * 1000,
        rtt_p99_ms=None if rtt is None else rtt.p99 * 1000,
        in_bytes_per_s=status.in_bytes_per_s,
        out_bytes_per_s=status.out_bytes_per_s,
        queued_bytes=status.queued_bytes,
        resent_chunks=status.resent_chunks,
        clock_offset_ms=None if status.clock_offset_s is None else status.clock_offset_s * 1000,
    )
