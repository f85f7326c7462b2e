"""Counters and gauges of a node, folded from its events, in the text format that Prometheus reads.

One more view of the same events: nothing counts anything here that an event does not say, so the metrics cannot disagree with
the status or the log.  The format is written by hand: it is one line a figure, and a client library would bring its own
threads and HTTP server, while a node has an event loop and a status socket (`plnode status --metrics`).
"""

from __future__ import annotations

import math
import statistics

from plnode.observe import events as e

__all__ = ["Metrics"]

# name -> (type, help).  Names follow Prometheus' habit: a unit at the end, `_total` on what only grows.
_FAMILIES: dict[str, tuple[str, str]] = {
    "plnode_step": ("gauge", "Optimizer steps done."),
    "plnode_loss": ("gauge", "Token mean of the training loss of the last step."),
    "plnode_heldout_loss": ("gauge", "Mean loss a token on held-out text."),
    "plnode_tokens_total": ("counter", "Tokens of all steps seen by this node."),
    "plnode_tokens_per_second": ("gauge", "Tokens of the whole run a second."),
    "plnode_step_seconds": ("gauge", "Length of the last step."),
    "plnode_skipped_steps_total": ("counter", "Steps left out for a non-finite gradient."),
    "plnode_aborts_total": ("counter", "Steps given up."),
    "plnode_snapshot_failures_total": ("counter", "Snapshots that could not be written."),
    "plnode_peers": ("gauge", "Connected peers."),
    "plnode_peers_lost_total": ("counter", "Peers that went."),
    "plnode_peers_by_path": ("gauge", "Peers with a connection, by the way it takes."),
    "plnode_lanes": ("gauge", "Bulk connections, over all peers."),
    "plnode_peer_rtt_seconds": ("gauge", "Round trip: median over peers of each one's median."),
    "plnode_peer_rtt_worst_p99_seconds": ("gauge", "Round trip: the highest of the peers' 99th percentiles."),
    "plnode_peer_queued_bytes": ("gauge", "Bytes for all peers that no connection has taken yet, by priority class."),
    "plnode_resent_chunks": ("gauge", "Chunks sent again by the tensor channels that exist."),
    "plnode_clock_offset_seconds": ("gauge", "Median of the peers' wall clocks minus ours."),
    "plnode_waiting": ("gauge", "Causes that this node waits for."),
    "plnode_received_bytes_total": ("counter", "Bytes received at the sockets."),
    "plnode_sent_bytes_total": ("counter", "Bytes sent at the sockets."),
    "plnode_boundary_bytes_total": ("counter", "Bytes of payload sent over a boundary."),
    "plnode_queue": ("gauge", "Jobs that wait for the device."),
    "plnode_in_flight_microbatches": ("gauge", "Microbatches not finished at this node."),
    "plnode_kept_graphs_total": ("counter", "Backward passes that found their graph."),
    "plnode_recomputed_total": ("counter", "Backward passes that repeated the forward."),
    "plnode_lost_microbatches_total": ("counter", "Microbatches given up."),
    "plnode_loop_blocked_p99_seconds": ("gauge", "99th percentile of the time a task step held the event loop."),
}


class Metrics:
    """A sink of the recorder.  `text()` is the exposition."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, str], float] = {}
        self._waiting: set[str] = set()

    def take(self, event: e.Event, time_unix: float) -> None:
        match event:
            case e.StepDone():
                self._set("plnode_step", event.step)
                self._set("plnode_step_seconds", event.seconds)
                self._set("plnode_loss", event.loss)
                self._add("plnode_tokens_total", event.tokens)
                self._add("plnode_skipped_steps_total", event.skipped)
            case e.HeldOut():
                self._set("plnode_heldout_loss", event.loss)
            case e.RunAborted():
                self._add("plnode_aborts_total", 1)
            case e.SnapshotFailed():
                self._add("plnode_snapshot_failures_total", 1)
            case e.PeerLost():
                self._add("plnode_peers_lost_total", 1)
            case e.Waiting(what, _):
                self._waiting.add(what)
            case e.WaitingOver(what):
                self._waiting.discard(what)
            case e.NodeStatus():
                self._take_status(event)
        self._set("plnode_waiting", len(self._waiting))

    def _take_status(self, s: e.NodeStatus) -> None:
        self._set("plnode_tokens_per_second", s.tokens_per_s)
        self._set("plnode_peers", len(s.peers))
        self._take_peers(s.peers)
        self._set("plnode_received_bytes_total", s.bytes_in)
        self._set("plnode_sent_bytes_total", s.bytes_out)
        self._set("plnode_queue", s.queue)
        self._set("plnode_in_flight_microbatches", s.in_flight)
        self._set("plnode_kept_graphs_total", s.kept_graphs)
        self._set("plnode_recomputed_total", s.recomputed)
        self._set("plnode_lost_microbatches_total", s.lost_microbatches)
        self._set("plnode_loop_blocked_p99_seconds", s.loop_blocked_p99_ms / 1000)
        for boundary, moved in s.boundary_bytes.items():
            for direction, figure in (("forward", moved.forward), ("backward", moved.backward)):
                self._set("plnode_boundary_bytes_total", figure, f'{{boundary="{boundary}",direction="{direction}"}}')

    def _take_peers(self, peers: tuple[e.PeerLine, ...]) -> None:
        # Without the peers' ids: a family that grows with everybody who ever came is more than a time series database likes.
        for path in ("direct", "punched", "relayed"):
            self._set("plnode_peers_by_path", sum(p.connected and p.path == path for p in peers), f'{{path="{path}"}}')
        self._set("plnode_lanes", sum(len(p.connections[1:]) for p in peers))
        self._set("plnode_resent_chunks", sum(p.resent_chunks for p in peers))
        for cls in range(1, 5):
            self._set("plnode_peer_queued_bytes", sum(p.queued_bytes[cls] for p in peers), f'{{class="{cls}"}}')
        medians = [p.rtt_median_ms for p in peers if p.rtt_median_ms is not None]
        slowest = [p.rtt_p99_ms for p in peers if p.rtt_p99_ms is not None]
        offsets = [p.clock_offset_ms for p in peers if p.clock_offset_ms is not None]
        self._figure("plnode_peer_rtt_seconds", statistics.median(medians) / 1000 if medians else None)
        self._figure("plnode_peer_rtt_worst_p99_seconds", max(slowest) / 1000 if slowest else None)
        self._figure("plnode_clock_offset_seconds", statistics.median(offsets) / 1000 if offsets else None)

    def _figure(self, name: str, value: float | None) -> None:
        """As `_set`, but what is not known any more goes."""
        if value is None:
            self._values.pop((name, ""), None)
        self._set(name, value)

    def value(self, name: str, labels: str = "") -> float | None:
        return self._values.get((name, labels))

    def text(self) -> str:
        lines = []
        for family, (kind, help_text) in _FAMILIES.items():
            samples = [(labels, v) for (name, labels), v in self._values.items() if name == family]
            if samples:
                lines += [f"# HELP {family} {help_text}", f"# TYPE {family} {kind}"]
                lines += [f"{family}{labels} {v:.17g}" for labels, v in samples]
        return "\n".join(lines) + "\n"

    def _set(self, name: str, value: float | None, labels: str = "") -> None:
        if value is not None and math.isfinite(value):
            self._values[name, labels] = float(value)

    def _add(self, name: str, value: float) -> None:
        self._values[name, ""] = self._values.get((name, ""), 0.0) + float(value)
