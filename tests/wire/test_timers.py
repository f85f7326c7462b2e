"""When silence is death (wire/timers.py): with lanes, alone, on a slow line, and after a loop that did not listen."""

from __future__ import annotations

import pytest

from tests.wire.joined import make_end
from wire.connection import ConnectionState
from wire.events import Kind
from wire.session import Session

PART = memoryview(b"\0" * 5)  # the beginning of a record


def alone() -> Session:
    """A connection that carries a tensor channel and has no lanes."""
    session = make_end(initiator=True).session
    session.open_stream(Kind.CHUNKS, "t", 2, meta=b"edge", now=0.0)
    return session


def with_lanes(*since: float) -> tuple[Session, list[Session]]:
    """A control connection and its lanes, made at these times; the first has a tensor channel."""
    control = make_end(initiator=True).session
    lanes = [make_end(initiator=True, now=each).session for each in since]
    for lane, each in zip(lanes, since, strict=True):
        lane.join(control, each)
    lanes[0].open_stream(Kind.CHUNKS, "t", 2, meta=b"edge", now=since[0])
    return control, lanes


def runs(session: Session, until: float = 60.0) -> tuple[float | None, list[float]]:
    """Tick it in time; when it was dead, and when it pinged."""
    pings: list[float] = []
    session.pull(1 << 20, 0.0)
    while (now := session.next_timer()) is not None and now <= until:
        session.tick(now)
        if session.gauges()["queued_frames"]:
            pings.append(now)
            session.pull(1 << 20, now)
        if session.state is ConnectionState.CLOSED:
            return now, pings
    return None, pings


def test_with_lanes_silence_is_asked_about_every_2_s_and_is_death_after_8() -> None:
    control, _ = with_lanes(0.0, 0.0)
    assert runs(control) == (8.0, [2.0, 4.0, 6.0])


def test_alone_it_is_death_after_10_s_and_later_where_tcp_repeats_later() -> None:
    assert runs(alone())[0] == 10.0
    slow = alone()
    slow._conn.rtt.answered(slow._conn.rtt.sent(0.0, 0), 0, 0, 0.2)
    assert runs(slow)[0] == pytest.approx(2 * 0.2 + 31 * 0.4)


def test_alone_it_is_death_too_if_no_ping_can_leave() -> None:
    """The other side pings by itself as long as channels exist."""
    session = alone()
    while session.state is not ConnectionState.CLOSED:
        now = session.next_timer()
        assert now is not None
        session.tick(now)
    assert now == 10.0


def test_a_byte_over_a_lane_shows_that_the_peer_is_there() -> None:
    control, (lane, other) = with_lanes(0.0, 0.0)
    for now in (1.0, 6.0, 11.0):
        lane.receive(PART, now)
        assert runs(control, now + 3.9)[0] is None
    assert runs(control)[0] == 15.0, "one connection alone among others that live"
    assert runs(other)[0] == 15.0, "and so a lane, which judges itself only"


def test_a_lane_that_was_made_in_the_silence_says_nothing_of_the_old_path() -> None:
    control, (lane,) = with_lanes(3.0)
    lane.receive(PART, 5.0)
    assert runs(control)[0] == 8.0
    control, (lane,) = with_lanes(3.0)
    control.receive(PART, 4.0)
    lane.receive(PART, 5.0)
    assert runs(control)[0] == 13.0, "the old path has been heard since"


def test_who_loses_the_last_lane_is_alone() -> None:
    control, (lane,) = with_lanes(0.0)
    lane.leave()
    control.open_stream(Kind.CHUNKS, "t", 2, meta=b"edge", now=0.0)
    assert runs(control)[0] == 10.0


@pytest.mark.parametrize("heard", [True, False])
def test_a_loop_that_was_busy_asks_once_more_and_listens(heard: bool) -> None:
    control, _ = with_lanes(0.0, 0.0)
    assert runs(control, 3.0) == (None, [2.0])
    control.tick(20.0)
    assert control.state is not ConnectionState.CLOSED
    assert control.gauges()["queued_frames"] == 1, "it asks"
    if heard:
        control.receive(PART, 20.001)  # what lay in the kernel
    assert runs(control)[0] == (28.001 if heard else 22.0)


def test_nobody_waits_nobody_hurries() -> None:
    session = make_end(initiator=True).session
    assert runs(session) == (15.0, [5.0, 10.0])
    lane = make_end(initiator=True).session
    lane.join(session := make_end(initiator=True).session, 0.0)
    assert runs(session) == (15.0, [5.0, 10.0]), "bytes only"
