"""Events in words: for each kind its level and its sentence.  Only people read these; nothing in the program does.

Expected trouble (a peer goes, a seed is down, a stage is missing) is at most a warning: a swarm in which people come and go
would otherwise print errors all day, and the one that matters would drown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from plnode.observe import events as e

__all__ = ["LEVELS", "quantity", "sentence", "short_id"]

LEVELS: dict[type[e.Event], str] = {
    e.NodeStarted: "info",
    e.SeedState: "info",
    e.PeerSeen: "info",
    e.PeerLost: "info",
    e.PathChanged: "info",
    e.Waiting: "info",
    e.WaitingOver: "info",
    e.StageAssigned: "info",
    e.RunStarted: "info",
    e.StepDone: "info",
    e.HeldOut: "info",
    e.SnapshotWritten: "info",
    e.SnapshotLoaded: "info",
    e.SnapshotFailed: "warning",
    e.RunAborted: "warning",
    e.RunFinished: "info",
    e.NodeStopped: "info",
    e.Notice: "warning",
    e.NodeStatus: "debug",
}


def sentence(event: e.Event) -> tuple[str, dict[str, Any]]:
    """The sentence and the figures that stand behind it as key=value."""
    return _SENTENCES[type(event)](event)


def short_id(peer_id: str) -> str:
    """The end of a peer id, where ids differ (all begin alike)."""
    return peer_id[-6:]


def quantity(value: float, unit: str = "") -> str:
    """1234567 -> "1.23 M"; three significant digits, decimal prefixes."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(value) < 999.5 or prefix == "T":
            return f"{value:.3g} {prefix}{unit}".rstrip() if prefix or value != int(value) else f"{int(value)} {unit}".rstrip()
        value /= 1000
    raise AssertionError("the last prefix returns")


def _at(stage: int | None) -> str:
    return "" if stage is None else f" (stage {stage})"


def _file(v: e.SnapshotWritten | e.SnapshotLoaded) -> dict[str, Any]:
    return {"path": v.path, "size": quantity(v.size_bytes, "B"), "seconds": round(v.seconds, 2)}


_SENTENCES: dict[type[e.Event], Callable[[Any], tuple[str, dict[str, Any]]]] = {
    e.NodeStarted: lambda v: (
        f"{v.name} is up",
        {"id": v.peer_id, "listen": ", ".join(v.addresses), "device": v.device, "threads": v.threads},
    ),
    e.Notice: lambda v: (v.text, {}),
    e.SnapshotFailed: lambda v: (f"the snapshot of step {v.step} could not be written", {"reason": v.reason}),
    e.SeedState: lambda v: (f"seed {v.entry}: {v.state}", {"reason": v.reason} if v.reason else {}),
    e.PeerSeen: lambda v: (f"peer {short_id(v.peer_id)}{_at(v.stage)} is here", {}),
    e.PeerLost: lambda v: (f"peer {short_id(v.peer_id)}{_at(v.stage)} is gone", {"reason": v.reason}),
    e.PathChanged: lambda v: (f"peer {short_id(v.peer_id)} is reached another way", {"path": v.path, "before": v.before}),
    e.Waiting: lambda v: (f"waiting {v.what}", {"detail": v.detail} if v.detail else {}),
    e.WaitingOver: lambda v: (f"no longer waiting {v.what}", {}),
    e.StageAssigned: lambda v: (
        f"stage {v.stage}: layers {v.first_layer} to {v.end_layer - 1}",
        {"parameters": quantity(v.parameters), "memory": quantity(v.memory_bytes, "B")},
    ),
    e.RunStarted: lambda v: (f"the run goes on at step {v.step}", {"nodes": len(v.roster), "generation": v.generation}),
    e.StepDone: lambda v: (
        f"step {v.step}" + (" left out: a gradient was not finite" if v.skipped else ""),
        {
            "loss": "not known here" if v.loss is None else round(v.loss, 4),
            "tokens_per_s": round(v.tokens / v.seconds) if v.seconds > 0 else 0,
            "seconds": round(v.seconds, 3),
            **({} if v.grad_norm is None else {"grad_norm": round(v.grad_norm, 3)}),
        },
    ),
    e.HeldOut: lambda v: (f"held-out loss {v.loss:.4f} after step {v.step}", {"tokens": v.tokens}),
    e.SnapshotWritten: lambda v: (f"snapshot of step {v.step} written", _file(v)),
    e.SnapshotLoaded: lambda v: (f"snapshot of step {v.step} loaded", _file(v)),
    e.RunAborted: lambda v: (f"step {v.step} given up: {v.reason}", {"peer": short_id(v.peer_id)} if v.peer_id else {}),
    e.RunFinished: lambda v: (f"the run is finished after {v.step} steps", {}),
    e.NodeStopped: lambda v: (f"stopped: {v.reason}", {}),
    e.NodeStatus: lambda v: (
        v.state,
        {"step": f"{v.step}/{v.steps}", "tokens_per_s": round(v.tokens_per_s), "in_flight": v.in_flight, "peers": len(v.peers)},
    ),
}
