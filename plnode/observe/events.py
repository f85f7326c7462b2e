"""What a node says about itself: one frozen dataclass for each thing that can happen, and their JSON form.

No decision is taken from log text, and no test reads it.  A change of state is one of these events; the line on stderr, the
JSON line on stdout, `plnode status`, the metrics and the demo's screen are views of them (`recorder.py`).  That is why an
event carries figures and short reasons, and never a sentence made for one reader.

Peers, stages and addresses are in their text forms here, so that an event is JSON as it is: `to_json` gives a dict with a
`kind`, `event_from_json` takes it back.  An event has no time of its own: the recorder stamps it when it is emitted.  A float
that is not finite becomes null: JSON has no NaN, and a reader that met one would have to guess.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from dataclasses import dataclass
from typing import Any, ClassVar

__all__ = [
    "KINDS", "BadEvent", "BoundaryBytes", "ConnectionLine", "Event", "HeldOut", "NodeStarted", "NodeStatus", "NodeStopped",
    "Notice", "PathChanged", "PeerLine", "PeerLost", "PeerSeen", "RunAborted", "RunFinished", "RunStarted", "SeedState",
    "SnapshotFailed", "SnapshotLoaded", "SnapshotWritten", "StageAssigned", "StepDone", "Waiting", "WaitingOver",
    "event_from_json", "to_json",
]  # fmt: skip


class BadEvent(ValueError):
    """A line that should be an event is none: it was not written by this version of the program."""


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events.  `kind` is the class's name, the one word by which every reader tells them apart."""

    kind: ClassVar[str] = "Event"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        cls.kind = cls.__name__


@dataclass(frozen=True, slots=True)
class NodeStarted(Event):
    """The node listens.  `addresses` are the bound ones with real ports; `device` is "none" for a seed."""

    peer_id: str
    name: str
    addresses: tuple[str, ...]
    device: str
    threads: int


@dataclass(frozen=True, slots=True)
class SeedState(Event):
    """A seed of the list changed its state ("connected", "refused", "silent", "down", ...); `reason` says why, in words."""

    entry: str
    state: str
    reason: str


@dataclass(frozen=True, slots=True)
class PeerSeen(Event):
    """A peer is connected; `stage` is None until its claim is known, and for a seed."""

    peer_id: str
    stage: int | None


@dataclass(frozen=True, slots=True)
class PeerLost(Event):
    peer_id: str
    stage: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class Waiting(Event):
    """The node cannot go on.  `what` is the cause in a few words ("for the swarm"), `detail` what is known about it."""

    what: str
    detail: str


@dataclass(frozen=True, slots=True)
class WaitingOver(Event):
    """The cause that `Waiting` named is gone."""

    what: str


@dataclass(frozen=True, slots=True)
class StageAssigned(Event):
    """This node holds layers `first_layer` up to but not including `end_layer`; `memory_bytes` is the plan's figure."""

    stage: int
    first_layer: int
    end_layer: int
    parameters: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class RunStarted(Event):
    """A roster was agreed and work begins at `step`; `roster` holds (peer id, stage)."""

    generation: int
    step: int
    roster: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class StepDone(Event):
    """An optimizer step.

    `loss` is the token mean over the whole step's set (None: not known at this node), `seconds` wall time, `grad_norm` that of
    this stage before clipping, `skipped` true if the whole swarm left the step out for a non-finite gradient.
    """

    step: int
    loss: float | None
    tokens: int
    seconds: float
    grad_norm: float | None
    skipped: bool


@dataclass(frozen=True, slots=True)
class HeldOut(Event):
    """Mean loss a token over `tokens` tokens of held-out text, with the weights after `step` steps."""

    step: int
    loss: float
    tokens: int


@dataclass(frozen=True, slots=True)
class SnapshotWritten(Event):
    step: int
    path: str
    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class SnapshotFailed(Event):
    """The snapshot of `step` could not be written; training goes on, the older ones are unchanged."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class SnapshotLoaded(Event):
    step: int
    path: str
    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RunAborted(Event):
    """Work at `step` was given up; `peer_id` is who caused it, if that is known."""

    step: int
    reason: str
    peer_id: str | None


@dataclass(frozen=True, slots=True)
class RunFinished(Event):
    """All steps are done."""

    step: int


@dataclass(frozen=True, slots=True)
class Notice(Event):
    """Something that the person who runs the node should know, in words; said once a cause by whoever noticed it."""

    text: str


@dataclass(frozen=True, slots=True)
class NodeStopped(Event):
    """The node is about to exit."""

    reason: str


@dataclass(frozen=True, slots=True)
class PathChanged(Event):
    """A connected peer is reached another way; `path` and `before` are "direct", "punched" or "relayed via" and the relay's id."""

    peer_id: str
    path: str
    before: str


@dataclass(frozen=True, slots=True)
class ConnectionLine:
    """One connection of a peer; bytes of its windows.  Lane 0 is the control connection."""

    lane: int
    congestion: str
    send_available: int
    receive_granted: int
    receive_used: int


@dataclass(frozen=True, slots=True)
class PeerLine:
    """A connected peer as `plnode status` shows it; the figures are explained in `wire.net.peerstatus`."""

    peer_id: str
    stage: int | None
    rtt_ms: float | None
    """Smoothed; the other three are the minimum of the last minute, median and p99 of the last 64."""
    path: str = "direct"
    """"direct", "punched" or "relayed", then `relay` says by whom."""
    relay: str | None = None
    connected: bool = True
    since_s: float = 0.0
    """Seconds since that connection stands, or since there is none."""
    idle: bool = True
    """No stream is open."""
    why: str = ""
    """What is out of order, or why nothing happens; empty if there is nothing to say."""
    connections: tuple[ConnectionLine, ...] = ()
    """First the control connection, then its lanes; no lane: it carries everything."""
    rtt_min_ms: float | None = None
    rtt_median_ms: float | None = None
    rtt_p99_ms: float | None = None
    in_bytes_per_s: float = 0.0
    out_bytes_per_s: float = 0.0
    queued_bytes: tuple[int, ...] = (0, 0, 0, 0, 0)
    """By priority class 0..4, not yet taken by any connection."""
    resent_chunks: int = 0
    clock_offset_ms: float | None = None
    """The peer's wall clock minus ours."""


@dataclass(frozen=True, slots=True)
class BoundaryBytes:
    """Bytes of payload over one boundary since the start, as the sender counts them."""

    forward: int
    backward: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus(Event):
    """The whole state of a node, once a second.  Bytes are at the sockets, since the start; rates are of the last steps."""

    name: str
    peer_id: str
    stage: int | None
    """None until a stage is assigned, and for a seed."""
    state: str
    """One word: "starting", "joining", "waiting", "training", "stopping", "seeding"."""
    waiting_for: str | None
    waiting_since_s: float | None
    """Seconds since it waits."""
    step: int
    """Steps done."""
    steps: int
    """Steps of the run; 0 for a seed."""
    loss: float | None
    tokens_per_s: float
    """Tokens of the whole run a second."""
    bytes_in: int
    bytes_out: int
    queue: int
    """Jobs that wait for the device."""
    in_flight: int
    """Microbatches at this node that are not finished."""
    credits: int
    """Microbatches that neighbours may send to this node now."""
    kept_graphs: int
    """Backward passes so far that found their graph in memory."""
    recomputed: int
    """Backward passes so far that repeated the forward."""
    lost_microbatches: int
    """Microbatches that had to be given up; not 0 is a fault."""
    boundary_bytes: dict[str, BoundaryBytes]
    """By boundary ("0-1"), what this node sent over it."""
    boundary_tokens: int
    """Tokens that this node's microbatches held, counted once a microbatch: what a forward and a backward together are for."""
    peers: tuple[PeerLine, ...]
    loop_blocked_p99_ms: float
    eta_s: float | None
    access: str = ""
    """How others reach this node: "direct", "relayed", "unreachable", or "unknown" for a while after the start."""
    access_reason: str = ""
    """Why, and what would help, for its owner."""


KINDS: dict[str, type[Event]] = {cls.__name__: cls for cls in Event.__subclasses__()}


def to_json(event: Event) -> dict[str, Any]:
    """The event as a dict that `json.dumps` takes, with `kind` first."""
    return {"kind": event.kind, **{f.name: _plain(getattr(event, f.name)) for f in dataclasses.fields(event)}}


def event_from_json(document: Any) -> Event:
    """The event of `to_json`'s dict; keys beyond the event's own (the recorder's time) are ignored.  Raises `BadEvent`."""
    if not isinstance(document, dict) or not isinstance(document.get("kind"), str):
        raise BadEvent("an event is an object with a kind")
    cls = KINDS.get(document["kind"])
    if cls is None:
        raise BadEvent(f"unknown kind of event: {document['kind'][:40]}")
    return typing.cast(Event, _built(cls, document, cls.__name__))


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return value


def _built(cls: type[Any], document: dict[str, Any], path: str) -> Any:
    hints = _hints(cls)
    values = {}
    for field in dataclasses.fields(cls):
        if field.name not in document:
            raise BadEvent(f"{path}.{field.name} is missing")
        values[field.name] = _typed(hints[field.name], document[field.name], f"{path}.{field.name}")
    return cls(**values)


def _typed(hint: Any, value: Any, path: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if type(None) in arguments:
        return None if value is None else _typed(next(a for a in arguments if a is not type(None)), value, path)
    if origin is tuple and isinstance(value, list):
        kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else list(arguments)
        if len(kinds) == len(value):
            return tuple(_typed(k, v, path) for k, v in zip(kinds, value, strict=True))
    elif origin is dict and isinstance(value, dict):
        return {k: _typed(arguments[1], v, path) for k, v in value.items()}
    elif dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return _built(typing.cast(type[Any], hint), value, path)
    elif hint is float and type(value) in (int, float):
        return float(value)
    elif hint is float and value is None:
        return math.nan  # what was not finite when it was written
    elif type(value) is hint:
        return value
    raise BadEvent(f"{path} has the wrong type: {type(value).__name__}")


_HINTS: dict[type[Any], dict[str, Any]] = {}


def _hints(cls: type[Any]) -> dict[str, Any]:
    if cls not in _HINTS:
        _HINTS[cls] = typing.get_type_hints(cls)
    return _HINTS[cls]
