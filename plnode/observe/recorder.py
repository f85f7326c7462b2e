"""Where events go: lines for people on stderr, JSON lines on stdout, the state behind `plnode status`, the metrics.

`Recorder.emit` may be called from anywhere on the event loop, often; so it neither awaits nor writes.  Each sink gets the
event and the wall time at which it was emitted; a sink that writes puts its line into a `LinePump`.

**The same complaint is made once per cause, not once per retry.**  A seed that is down is dialled every minute and a missing
stage is waited for every second; who emits the event need not remember that it was said before.  The recorder does: a
`Waiting` with the same `what` and `detail`, or a `SeedState` with the same state and reason, goes no further until something
about it has changed. `WaitingOver` for what nobody waits for is dropped likewise, and so is a second `NodeStopped`: the first
names the cause.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from typing import Protocol

import structlog

from plnode.observe import events as e
from plnode.observe.lines import LEVELS, sentence
from plnode.observe.pump import LinePump

__all__ = ["HumanLines", "JsonLines", "Recorder", "Sink"]


class Sink(Protocol):
    """Something that is shown every event.  Must not block."""

    def take(self, event: e.Event, time_unix: float) -> None: ...


class Recorder:
    """Passes events to its sinks, complaints once per cause.

    `clock` is the wall clock (Unix seconds): it is for readers, no decision depends on it.
    """

    def __init__(self, sinks: Iterable[Sink] = (), *, clock: Callable[[], float] = time.time) -> None:
        self._sinks = list(sinks)
        self._clock = clock
        self._stopped = False
        self._waiting: dict[str, str] = {}
        self._seeds: dict[str, tuple[str, str]] = {}

    def add(self, sink: Sink) -> None:
        """From now on `sink` is shown every event."""
        self._sinks.append(sink)

    def emit(self, event: e.Event) -> None:
        if not self._is_new(event):
            return
        now = self._clock()
        for sink in self._sinks:
            sink.take(event, now)

    def _is_new(self, event: e.Event) -> bool:
        match event:
            case e.Waiting(what, detail):
                known = self._waiting.get(what)
                self._waiting[what] = detail
                return known != detail
            case e.WaitingOver(what):
                return self._waiting.pop(what, None) is not None
            case e.SeedState(entry, state, reason):
                before = self._seeds.get(entry)
                self._seeds[entry] = (state, reason)
                return before != (state, reason)
            case e.NodeStopped():
                before_it, self._stopped = self._stopped, True
                return not before_it
        return True


class JsonLines:
    """One JSON object a line: the event with `time`, Unix seconds.  A `NodeStatus` is the first to go if nobody reads."""

    def __init__(self, pump: LinePump) -> None:
        self._pump = pump

    def take(self, event: e.Event, time_unix: float) -> None:
        document = e.to_json(event)
        document["time"] = round(time_unix, 3)
        self._pump.put(json.dumps(document, allow_nan=False) + "\n", expendable=isinstance(event, e.NodeStatus))


class HumanLines:
    """A structlog line for each event at or above `level`: time, level, a sentence, then the figures as key=value."""

    def __init__(self, pump: LinePump, level: str = "info", *, colors: bool = False) -> None:
        self._pump = pump
        self._least = _RANK[level]
        self._render = structlog.dev.ConsoleRenderer(colors=colors, pad_event_to=0, pad_level=False)

    def take(self, event: e.Event, time_unix: float) -> None:
        level = LEVELS[type(event)]
        if _RANK[level] < self._least:
            return
        text, figures = sentence(event)
        stamp = time.strftime("%H:%M:%S", time.localtime(time_unix))
        line = self._render(None, level, {"timestamp": stamp, "level": level, "event": text, **figures})
        self._pump.put(f"{line}\n", expendable=isinstance(event, e.NodeStatus))


_RANK = {"debug": 0, "info": 1, "warning": 2, "error": 3}
