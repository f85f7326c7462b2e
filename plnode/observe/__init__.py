"""What a node says about itself: typed events, and the views of them.  Called by all rooms, calls none."""

from __future__ import annotations

from plnode.observe.events import Event, NodeStatus
from plnode.observe.loopwatch import LoopFigures, LoopWatch
from plnode.observe.metrics import Metrics
from plnode.observe.pump import LinePump
from plnode.observe.recorder import HumanLines, JsonLines, Recorder
from plnode.observe.status import Status, ask, serve_status

__all__ = [
    "Event", "HumanLines", "JsonLines", "LinePump", "LoopFigures", "LoopWatch", "Metrics", "NodeStatus", "Recorder", "Status",
    "ask", "serve_status",
]  # fmt: skip
