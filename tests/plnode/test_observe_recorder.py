"""The recorder: once per cause, never blocking, nothing lost but what a bound says."""

from __future__ import annotations

import json
import os
import threading

import pytest

from plnode.observe import events as e
from plnode.observe.pump import LinePump
from plnode.observe.recorder import HumanLines, JsonLines, Recorder
from tests.plnode.test_observe_events import EXAMPLES, STATUS


class Kept:
    def __init__(self) -> None:
        self.events: list[e.Event] = []
        self.times: list[float] = []

    def take(self, event: e.Event, time_unix: float) -> None:
        self.events.append(event)
        self.times.append(time_unix)


class Lines:
    """A pump that keeps its lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def put(self, line: str, *, expendable: bool = False) -> None:
        self.lines.append(line)


def test_the_same_complaint_is_made_once_per_cause() -> None:
    kept = Kept()
    recorder = Recorder([kept], clock=lambda: 5.0)
    for _ in range(3):
        recorder.emit(e.Waiting("for stage 2", "nobody holds it"))
        recorder.emit(e.SeedState("s:1", "down", "connection refused"))
    recorder.emit(e.Waiting("for stage 2", "one replica of two"))
    recorder.emit(e.SeedState("s:1", "connected", ""))
    recorder.emit(e.WaitingOver("for stage 2"))
    recorder.emit(e.WaitingOver("for stage 2"))
    recorder.emit(e.Waiting("for stage 2", "one replica of two"))  # it comes again: said again
    assert [x.kind for x in kept.events] == ["Waiting", "SeedState", "Waiting", "SeedState", "WaitingOver", "Waiting"]
    assert kept.times == [5.0] * 6


def test_an_event_that_is_no_complaint_is_never_swallowed() -> None:
    kept = Kept()
    recorder = Recorder([kept])
    recorder.emit(e.RunFinished(1))
    recorder.emit(e.RunFinished(1))
    assert len(kept.events) == 2


def test_json_lines_carry_the_event_and_its_time() -> None:
    lines = Lines()
    sink = JsonLines(lines)  # type: ignore[arg-type]
    for event in EXAMPLES:
        sink.take(event, 1234.5678)
    documents = [json.loads(line) for line in lines.lines]
    assert [e.event_from_json(d) for d in documents] == list(EXAMPLES)
    assert {d["time"] for d in documents} == {1234.568}
    assert all(line.endswith("\n") and line.count("\n") == 1 for line in lines.lines)


@pytest.mark.parametrize(("level", "shown"), [("debug", 3), ("info", 2), ("warning", 1), ("error", 0)])
def test_human_lines_obey_the_level(level: str, shown: int) -> None:
    lines = Lines()
    sink = HumanLines(lines, level)  # type: ignore[arg-type]
    for event in (STATUS, e.Waiting("for stage 2", "nobody holds it"), e.RunAborted(3, "a member was lost", None)):
        sink.take(event, 0.0)
    assert len(lines.lines) == shown
    if shown:
        assert "a member was lost" in lines.lines[-1]
    if level == "info":
        assert "waiting for stage 2" in lines.lines[0]
        assert "nobody holds it" in lines.lines[0]


def test_the_pump_writes_lines_in_order() -> None:
    read_end, write_end = os.pipe()
    pump = LinePump(write_end)
    for i in range(100):
        pump.put(f"{i}\n")
    pump.close()
    os.close(write_end)
    with os.fdopen(read_end) as reader:
        assert reader.read().split() == [str(i) for i in range(100)]


def test_a_reader_that_does_not_read_stops_nobody_and_loses_statuses_first() -> None:
    read_end, write_end = os.pipe()
    entered = threading.Event()
    pump = LinePump(write_end, bound=4, gap="gap of {}\n".format)
    # A write larger than the pipe (64 KiB) blocks the thread; from then on the queue only fills.
    pump.put("x" * 200_000 + "\n")
    while pump._lines:  # until the thread has taken it: bounded by the test's own timeout, no clock involved
        entered.wait(0.001)
    pump.put("first\n")
    pump.put("status\n", expendable=True)
    pump.put("second\n")
    pump.put("third\n")
    pump.put("fourth\n")  # the queue is full: the status goes
    pump.put("fifth\n")  # no status is left: the oldest goes
    with os.fdopen(read_end) as reader:
        pieces = []
        closer = threading.Thread(target=lambda: (pump.close(30.0), os.close(write_end)))
        closer.start()
        pieces.append(reader.read())
        closer.join()
    assert pieces[0].split("\n")[1:] == ["gap of 2", "second", "third", "fourth", "fifth", ""]


def test_a_reader_that_is_gone_ends_nothing() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    pump = LinePump(write_end)
    for i in range(10):
        pump.put(f"{i}\n")
    pump.close()
    pump.put("after the end\n")
    os.close(write_end)
    assert not pump._thread.is_alive()
