"""What the demo knows about its swarm: a fold over the events of all nodes, without a clock of its own.

Every node tells its own story; the same step is told by all of them, the loss only by some, and in any order.  Here the stories
become one: a step counts once, its loss is the first one told, bytes are the sum over nodes.  Screen, report, and the decision
that nothing moves any more read this and nothing else, so each of them is tested with a list of events.

**When is a swarm stuck?**  A constant would be too short for a slow machine or too long for a person.  Before the first step the
deadline is `patience_s`: importing torch in many processes at once takes most of it.  Afterwards it is 20 times the median step,
at least a third of `patience_s`: a step in which a node is lost includes its detection and a new start.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from plnode.observe import events as e

__all__ = ["HeldOutPoint", "NodeView", "StepPoint", "SwarmView"]

_RECENT = 20  # steps over which the current speed is taken


@dataclass(frozen=True, slots=True)
class StepPoint:
    """One step of the run; `at_s` is when the first node told it (seconds since the demo began)."""

    step: int
    loss: float | None
    tokens: int
    seconds: float
    at_s: float
    skipped: bool


@dataclass(frozen=True, slots=True)
class HeldOutPoint:
    step: int
    loss: float
    tokens: int


@dataclass(slots=True)
class NodeView:
    """One process.  `status` is its last full status; `exit_code` None while it runs."""

    name: str
    peer_id: str = ""
    addresses: tuple[str, ...] = ()
    stage: int | None = None
    status: e.NodeStatus | None = None
    waiting: dict[str, str] = field(default_factory=dict)
    finished: bool = False
    stopped: str = ""
    exit_code: int | None = None
    last_lines: tuple[str, ...] = ()

    @property
    def state(self) -> str:
        """One word or a few: what this node is doing."""
        if self.exit_code is not None:
            return "done" if self.exit_code == 0 else f"exit code {self.exit_code}"
        if self.finished:
            return "finished"
        if self.waiting:
            return "waits " + next(iter(self.waiting))
        return self.status.state if self.status else ("started" if self.peer_id else "starting")

    @property
    def reason(self) -> str:
        """Why it does not move, in its own words."""
        causes = [f"{what}: {detail}" if detail else what for what, detail in self.waiting.items()]
        return "waits " + "; ".join(causes) if causes else self.state


class SwarmView:
    """`nodes` by name in the order of starting; the seed is not among them.  Times are seconds since the demo began.

    `snapshots`: step -> stage -> path of the newest file told.
    """

    def __init__(self, names: list[str], *, steps: int, patience_s: float) -> None:
        self.nodes = {name: NodeView(name) for name in names}
        self.steps = steps
        self.points: dict[int, StepPoint] = {}
        self.heldout: dict[int, HeldOutPoint] = {}
        self.aborts: list[e.RunAborted] = []
        self.snapshots: dict[int, dict[int, str]] = {}
        self.moved_at = 0.0
        self._patience_s = patience_s
        self._recent: deque[StepPoint] = deque(maxlen=_RECENT)

    def apply(self, name: str, event: e.Event, now_s: float) -> None:
        """Takes one event of node `name`."""
        node = self.nodes[name]
        match event:
            case e.NodeStarted():
                node.peer_id, node.addresses = event.peer_id, event.addresses
            case e.NodeStatus():
                node.status = event
            case e.StageAssigned():
                node.stage = event.stage
            case e.Waiting(what, detail):
                node.waiting[what] = detail
            case e.WaitingOver(what):
                node.waiting.pop(what, None)
            case e.StepDone():
                self._take_step(event, now_s)
            case e.HeldOut():
                self.heldout.setdefault(event.step, HeldOutPoint(event.step, event.loss, event.tokens))
            case e.SnapshotWritten():
                if node.stage is not None:
                    self.snapshots.setdefault(event.step, {})[node.stage] = event.path
            case e.RunAborted():
                self.aborts.append(event)
            case e.RunFinished():
                node.finished = True
                self.moved_at = now_s
            case e.NodeStopped(reason):
                node.stopped = reason

    def exited(self, name: str, code: int, last_lines: tuple[str, ...], now_s: float) -> None:
        node = self.nodes[name]
        node.exit_code, node.last_lines = code, last_lines
        self.moved_at = now_s

    def _take_step(self, done: e.StepDone, now_s: float) -> None:
        known = self.points.get(done.step)
        if known is None:
            point = StepPoint(done.step, done.loss, done.tokens, done.seconds, now_s, done.skipped)
            self._recent.append(point)
            self.moved_at = now_s
        elif known.loss is None and done.loss is not None:
            point = StepPoint(known.step, done.loss, known.tokens, known.seconds, known.at_s, known.skipped)
        else:
            return
        self.points[done.step] = point

    @property
    def done(self) -> int:
        """Steps done."""
        return len(self.points)

    @property
    def loss(self) -> float | None:
        """Of the last step whose loss is known."""
        return next((p.loss for p in reversed(self.series()) if p.loss is not None), None)

    def series(self) -> list[StepPoint]:
        return [self.points[step] for step in sorted(self.points)]

    @property
    def tokens(self) -> int:
        return sum(p.tokens for p in self.points.values())

    @property
    def seconds(self) -> float:
        """From the beginning of the first step to the end of the last: without the start of the processes."""
        return _span(self.series())

    @property
    def tokens_per_s(self) -> float:
        """Over the last steps."""
        elapsed = _span(list(self._recent))
        return sum(p.tokens for p in self._recent) / elapsed if elapsed > 0 else 0.0

    @property
    def eta_s(self) -> float | None:
        """Seconds until the last step at the speed of the last steps; None before the first."""
        rate = self.tokens_per_s
        if not self._recent or rate <= 0:
            return None
        return (self.steps - self.done) * self._recent[-1].tokens / rate

    @property
    def all_finished(self) -> bool:
        return all(node.finished for node in self.nodes.values())

    def dead(self) -> list[NodeView]:
        """Nodes that ended before the run did, or with a failure."""
        return [n for n in self.nodes.values() if n.exit_code is not None and (n.exit_code != 0 or not n.finished)]

    def deadline_s(self) -> float:
        """How long nothing may move."""
        if len(self._recent) < 3:
            return self._patience_s
        return max(self._patience_s / 3, 20 * statistics.median(p.seconds for p in self._recent))

    def is_stuck(self, now_s: float) -> bool:
        return not self.all_finished and now_s - self.moved_at > self.deadline_s()

    def boundary_bytes_per_token(self) -> dict[str, dict[str, float]]:
        """Bytes of payload a token by boundary and direction, over all nodes that sent over it."""
        moved: dict[str, dict[str, float]] = {}
        tokens: dict[tuple[str, str], int] = {}
        for node in self.nodes.values():
            if node.status is None:
                continue
            for boundary, sent in node.status.boundary_bytes.items():
                for direction, figure in (("forward", sent.forward), ("backward", sent.backward)):
                    if figure:
                        moved.setdefault(boundary, {"forward": 0.0, "backward": 0.0})[direction] += figure
                        key = (boundary, direction)
                        tokens[key] = tokens.get(key, 0) + node.status.boundary_tokens
        return {
            boundary: {d: figure / tokens[boundary, d] if tokens.get((boundary, d)) else 0.0 for d, figure in directions.items()}
            for boundary, directions in sorted(moved.items())
        }

    def total(self, figure: str) -> int:
        """The sum of one whole-number field of `NodeStatus` over all nodes."""
        return sum(int(getattr(n.status, figure)) for n in self.nodes.values() if n.status is not None)


def _span(points: Sequence[StepPoint]) -> float:
    """Seconds from the beginning of the first step to when the last one was told."""
    return max(p.at_s for p in points) - points[0].at_s + points[0].seconds if points else 0.0
