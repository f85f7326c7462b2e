"""Windows on a long line: two sessions, a rate and a delay between them, virtual time (WIRE-4)."""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from tests.wire.joined import End, Joined, Puppet, make_end
from wire.budget import Reservation, UnreadBudget
from wire.connection import ConnectionState
from wire.errors import Code, ConnectionLost, RemoteProtocolError, error_for
from wire.events import Kind, StreamOpened
from wire.limits import DEFAULT_LIMITS, MIB, Limits
from wire.messages import AcceptBody, OpenBody, decode
from wire.records import FrameType
from wire.remembered import RememberedWindows

GBIT = 125_000_000  # bytes per second
STEP_S = 0.001
CONTROL = DEFAULT_LIMITS.connection_window_control_bytes
GUEST = DEFAULT_LIMITS.connection_window_guest_bytes
BULK = DEFAULT_LIMITS.stream_window_bulk_bytes
PAYLOAD = random.Random(4).randbytes(8 * MIB + 1)
FIXED = replace(DEFAULT_LIMITS, stream_window_max_bytes=BULK)  # a stream's window that stays as it starts


class Line:
    """One direction: bytes leave at a rate and arrive a delay later."""

    def __init__(self, source: End, target: End, delay_s: float) -> None:
        self.source, self.target, self.delay_s = source, target, delay_s
        self.free_at = 0.0
        self.flight: deque[tuple[float, bytes]] = deque()

    def step(self, now: float) -> None:
        while self.flight and self.flight[0][0] <= now:
            self.target.inbox += self.flight.popleft()[1]
        if self.target.inbox:
            view = memoryview(self.target.inbox)
            used = self.target.session.receive(view, now)
            view.release()
            del self.target.inbox[:used]
            self.target.seen += self.target.session.events()
        self.free_at = max(self.free_at, now - STEP_S)
        while self.free_at < now and (views := self.source.session.pull(1 << 17, now)):
            data = b"".join(views)
            self.free_at += len(data) / GBIT
            self.flight.append((self.free_at + self.delay_s, data))


class Path:
    """`a` writes, `b` reads."""

    def __init__(self, rtt_s: float, limits: Limits = DEFAULT_LIMITS, *, pinged: bool = True, guest: bool = False, **reader) -> None:
        self.now = 0.0
        start = GUEST if guest else CONTROL
        self.a = make_end(initiator=True, limits=limits, guest=guest, window_bytes=start)
        self.b = make_end(initiator=False, limits=limits, guest=guest, **({"window_bytes": start} | reader))
        self.lines = Line(self.a, self.b, rtt_s / 2), Line(self.b, self.a, rtt_s / 2)
        if pinged:
            self.b.session.ping(0.0)

    def run(self, seconds: float, *apps: Callable[[float], None]) -> None:
        for _ in range(round(seconds / STEP_S)):
            self.now += STEP_S
            for line in self.lines:
                line.step(self.now)
            for app in apps:
                app(self.now)

    def open(self, cls: int = 3, protocol: str = "bulk/1") -> int:
        stream = self.a.session.open_stream(Kind.BYTE, protocol, cls, now=self.now)
        self.run(0.2, self.accept)
        return stream

    def accept(self, _now: float) -> None:
        for opened in self.b.take(StreamOpened):
            self.b.session.accept(opened.stream)


@dataclass
class Flow:
    """A writer that always has more, and a reader."""

    path: Path
    stream: int
    sizes: random.Random | None = None
    every_s: float = 0.0  # the reader comes by so often
    sent: int = 0
    got: int = 0
    sent_crc: int = 0
    got_crc: int = 0
    rest: int = 0
    read_at: float = 0.0

    def write(self, _now: float) -> None:
        session = self.path.a.session
        while True:
            if not self.rest:
                self.rest = MIB if self.sizes is None else round(2 ** self.sizes.uniform(0, 23))
            size = min(self.rest, session.sendable(self.stream))
            if not size:
                return
            at = self.sent % (len(PAYLOAD) - size)
            piece = memoryview(PAYLOAD)[at : at + size]
            session.send(self.stream, piece, now=self.path.now)
            self.sent_crc = zlib.crc32(piece, self.sent_crc)
            self.sent += size
            self.rest -= size

    def read(self, now: float) -> None:
        if now < self.read_at:
            return
        self.read_at = now + self.every_s
        while (data := self.path.b.session.read_bytes(self.stream, 1 << 20)) is not None:
            self.got += len(data)
            self.got_crc = zlib.crc32(data, self.got_crc)

    def finish(self) -> None:
        self.path.run(5.0, lambda now: self.read(now) if self.got < self.sent else None)
        assert (self.got, self.got_crc) == (self.sent, self.sent_crc)


def rate(path: Path, flows: list[Flow], warm_up_s: float, measured_s: float) -> float:
    """Share of the line that the readers got."""
    apps = [app for flow in flows for app in (flow.write, flow.read)]
    path.run(warm_up_s, *apps)
    before = sum(flow.got for flow in flows)
    path.run(measured_s, *apps)
    return (sum(flow.got for flow in flows) - before) / (measured_s * GBIT)


def test_one_stream_fills_a_gigabit_at_a_hundred_milliseconds() -> None:
    path = Path(0.1)
    flow = Flow(path, path.open())
    assert rate(path, [flow], 1.5, 0.6) >= 0.9
    assert path.b.session.windows().largest_stream > BULK


def test_a_window_that_stays_does_not_fill_it() -> None:
    """The negative control of the test above."""
    path = Path(0.1, FIXED)
    assert rate(path, [Flow(path, path.open())], 1.5, 0.3) < 0.5
    assert path.b.session.windows().largest_stream == BULK


def test_eight_writers_on_eight_streams_fill_the_line_and_arrive_byte_for_byte() -> None:
    path = Path(0.1)
    flows = [Flow(path, path.open(), random.Random(number)) for number in range(8)]
    assert rate(path, flows, 1.5, 0.5) >= 0.9
    for flow in flows:
        flow.path.run(1.0, *(other.read for other in flows))
    assert min(flow.got for flow in flows) > MIB
    for flow in flows:
        assert (flow.got, flow.got_crc) == (flow.sent, flow.sent_crc)


def test_without_a_round_trip_nothing_grows_but_one_is_asked_for() -> None:
    path = Path(0.1, pinged=False)
    assert path.b.session.rtt is None
    flow = Flow(path, path.open())
    assert path.b.session.rtt is None, "silence of 5 s would be needed"
    path.run(1.5, flow.write, flow.read)
    assert path.b.session.rtt is not None and path.b.session.rtt.count == 1, "one is enough for a minute"
    assert path.b.session.windows().largest_stream > BULK


@pytest.mark.parametrize("every_s", [0.25, 1.0])
def test_a_slow_reader_is_never_granted_more_not_even_one_that_reads_in_bursts(every_s: float) -> None:
    """Reading half a window in no time must not count: what is read lay there (fails if only reads are counted)."""
    path = Path(0.1)
    flow = Flow(path, path.open(), every_s=every_s)
    path.run(4.0, flow.write, flow.read)
    windows = path.b.session.windows()
    assert (windows.receive_size, windows.largest_stream) == (CONTROL, BULK)


def test_a_guest_keeps_its_window() -> None:
    path = Path(0.1, guest=True)
    path.run(2.0, (flow := Flow(path, path.open())).write, flow.read)
    assert flow.got > 10 * GUEST
    windows = path.b.session.windows()
    assert (windows.receive_size, windows.largest_stream) == (GUEST, BULK)


@pytest.mark.parametrize(("kind", "cls"), [(Kind.BYTE, 1), (Kind.MESSAGE, 1), (Kind.MESSAGE, 3)])
def test_other_streams_do_not_grow(kind: Kind, cls: int) -> None:
    joined = Joined()
    stream = joined.a.session.open_stream(kind, "x/1", cls, now=joined.now)
    joined.settle()
    recv = joined.b.session._conn.streams[stream].recv
    assert not recv.grows
    size = recv.size
    recv.arrive(size)
    assert recv.read(size) and joined.b.session._conn.windows.renew_stream(recv)
    assert recv.size == size


def budget_of(total: int) -> tuple[UnreadBudget, Reservation]:
    budget = UnreadBudget(total)
    reservation = budget.reserve(CONTROL)
    assert reservation is not None
    return budget, reservation


def test_growth_stops_at_the_budget() -> None:
    budget, reservation = budget_of(12 * MIB)
    path = Path(0.1, reservation=reservation)
    flow = Flow(path, path.open())
    path.run(2.0, flow.write, flow.read)
    windows = path.b.session.windows()
    assert windows.receive_size == budget.used == 8 * MIB, "16 would be more than there is"
    assert windows.largest_stream <= windows.receive_size
    path.b.session.abort(error_for(Code.SHUTDOWN))
    assert (budget.used, budget.reservations) == (0, 0)


def test_under_pressure_windows_fall_back_as_they_are_renewed_and_nothing_is_lost() -> None:
    budget, reservation = budget_of(100 * MIB)
    path = Path(0.1, reservation=reservation)
    flow = Flow(path, path.open())
    path.run(1.2, flow.write, flow.read)
    grown = path.b.session.windows()
    assert grown.receive_size > 16 * MIB and grown.largest_stream > BULK
    others: list[Reservation | None] = []

    def press(_now: float) -> None:
        if budget.used < budget.total:
            others.append(budget.reserve(budget.total - budget.used))

    press(path.now)
    assert budget.short and budget.reserve(1) is None, "now new connections are refused"
    assert path.b.session.windows() == grown, "credit that was given cannot be taken"
    path.run(1.2, flow.write, flow.read, press)
    shrunk = path.b.session.windows()
    assert (shrunk.receive_size, shrunk.largest_stream) == (CONTROL, BULK)
    assert reservation.size == CONTROL
    got = flow.got
    path.run(1.0, flow.write, flow.read, press)
    assert flow.got > got, "it still moves"
    for other in others:
        assert other is not None
        other.release()
    path.run(1.0, flow.write, flow.read)
    assert path.b.session.windows().receive_size >= grown.receive_size, "and grows again"
    flow.finish()


def test_what_falls_back_gives_its_reservation_back() -> None:
    budget, reservation = budget_of(16 * MIB)
    end = make_end(initiator=True, window_bytes=CONTROL, reservation=reservation)
    windows = end.session._conn.windows
    assert windows._grow_connection(8 * MIB) and budget.used == 8 * MIB
    pressure = budget.reserve(8 * MIB)
    assert pressure is not None
    for _ in range(8):
        room = windows.connection.limit - windows.connection.arrived
        windows.connection.arrive(room)
        end.session._conn.consumed(room)
        assert reservation.size >= windows.connection.limit - windows.connection.consumed, "all that is granted is reserved"
    assert windows.connection.size == reservation.size == CONTROL


@pytest.mark.parametrize("how", ["abort", "lost", "goaway", "violation", "silence"])
def test_the_reservation_is_back_however_it_ends(how: str) -> None:
    budget, reservation = budget_of(64 * MIB)
    puppet = Puppet(window_bytes=CONTROL, reservation=reservation)
    session = puppet.session
    puppet.open(1, Kind.BYTE, 3)
    assert budget.used == CONTROL
    if how == "abort":
        session.abort(error_for(Code.SHUTDOWN))
    elif how == "lost":
        session.receive_end(OSError("reset"))
    elif how == "violation":
        with pytest.raises(RemoteProtocolError):
            puppet.say(FrameType.DATA, 9)
    elif how == "goaway":
        session.goaway(Code.SHUTDOWN, now=puppet.now)
        session.tick(puppet.now + DEFAULT_LIMITS.draining_timeout_s + 1.0)
    else:
        for second in range(40):
            session.tick(puppet.now + second)
            session.pull(1 << 16, puppet.now + second)
    assert session.state is ConnectionState.CLOSED
    assert (budget.used, budget.reservations) == (0, 0)
    session.receive_end(ConnectionLost("again"))
    assert budget.used == 0


def test_a_reset_stream_leaves_the_connection_its_window_and_its_credit() -> None:
    budget, reservation = budget_of(64 * MIB)
    joined = Joined(window_bytes=CONTROL)
    joined.b = make_end(initiator=False, now=joined.now, window_bytes=CONTROL, reservation=reservation)
    for _ in range(5):  # more than the window in all
        stream = joined.a.session.open_stream(Kind.BYTE, "x/1", 3, now=joined.now)
        joined.settle()
        joined.b.session.accept(stream)
        joined.settle()
        assert joined.a.session.sendable(stream) > CONTROL // 2
        joined.a.session.send(stream, PAYLOAD[: CONTROL // 2], now=joined.now)
        joined.settle()
        joined.b.session.reset(stream, Code.CANCELLED)
        joined.settle()
    assert budget.used == CONTROL == joined.b.session.windows().receive_size


def test_a_session_starts_with_a_control_connections_window_or_a_guests() -> None:
    for guest, start in ((False, CONTROL), (True, GUEST)):
        joined = Joined(guest=guest, window_bytes=start)
        joined.settle()
        assert joined.a.session.windows().send_available == start
        assert joined.a.session.windows().receive_size == start


@pytest.mark.parametrize("start", [0, GUEST - 1, DEFAULT_LIMITS.connection_window_max_bytes + 1, CONTROL + 1])
def test_a_start_window_out_of_bounds_or_beyond_its_reservation_is_a_mistake(start: int) -> None:
    budget, reservation = budget_of(256 * MIB)
    with pytest.raises(ValueError, match="start window"):
        make_end(initiator=True, window_bytes=start, reservation=reservation)
    reservation.release()
    assert budget.used == 0


def test_a_connection_that_turns_out_to_be_a_lane_is_widened_if_the_budget_has_it() -> None:
    budget, reservation = budget_of(20 * MIB)
    joined = Joined(window_bytes=CONTROL)
    joined.b = make_end(initiator=False, now=joined.now, window_bytes=CONTROL, reservation=reservation)
    joined.settle()
    assert not joined.b.session.widen(21 * MIB)
    assert budget.used == CONTROL
    assert joined.b.session.widen(16 * MIB)
    joined.settle()
    assert budget.used == 16 * MIB == joined.a.session.windows().send_available


def test_the_next_stream_starts_with_the_last_ones_window_on_either_side() -> None:
    table = RememberedWindows()
    path = Path(0.1, remembered=table)
    flow = Flow(path, path.open())
    path.run(1.2, flow.write, flow.read)
    size = path.b.session.windows().largest_stream
    assert size > BULK and table.get("bulk/1") == 0
    path.b.session.reset(flow.stream, Code.CANCELLED)
    assert table.get("bulk/1") == size

    puppet = Puppet(remembered=table, window_bytes=CONTROL)
    puppet.open(1, Kind.BYTE, 3, protocol="bulk/1")
    puppet.open(3, Kind.BYTE, 3, protocol="other/1")
    for stream in (1, 3):
        puppet.session.accept(stream)
    puppet.session.open_stream(Kind.BYTE, "bulk/1", 3, now=puppet.now)
    puppet.session.open_stream(Kind.BYTE, "bulk/1", 1, now=puppet.now)
    frames = puppet.frames()
    accepted = {stream: decode(body, AcceptBody).credit for kind, stream, body in frames if kind == FrameType.ACCEPT}
    assert accepted == {1: size, 3: BULK}
    opened = [decode(body, OpenBody).credit for kind, _, body in frames if kind == FrameType.OPEN]
    assert opened == [size, DEFAULT_LIMITS.stream_window_control_bytes]
    assert puppet.session.windows().receive_size == size, "a window above the connection's would be worth nothing"


def test_a_remembered_window_is_bounded_by_the_limits_and_the_budget() -> None:
    table = RememberedWindows()
    table.put("x/1", 1 << 40)
    for total, expected in ((256 * MIB, DEFAULT_LIMITS.stream_window_max_bytes), (8 * MIB, BULK)):
        _, reservation = budget_of(total)
        puppet = Puppet(remembered=table, window_bytes=CONTROL, reservation=reservation)
        puppet.open(1, Kind.BYTE, 3)
        puppet.session.accept(1)
        assert puppet.session.windows().largest_stream == expected


def test_a_stream_that_was_never_read_is_not_remembered() -> None:
    table = RememberedWindows()
    table.put("x/1", 8 * MIB)
    puppet = Puppet(remembered=table, window_bytes=CONTROL)
    puppet.open(1, Kind.BYTE, 3)
    puppet.session.refuse(1, Code.REFUSED)
    assert table.get("x/1") == 8 * MIB


def carry(path: Path, start: int = MIB, most: int = 4 * MIB) -> int:
    """A stream that the reader passes on."""
    stream = path.open(protocol="circuit/1")
    path.b.session.pass_on(stream, start, most)
    path.run(0.2)
    return stream


def test_what_is_passed_on_has_a_window_of_its_own_and_a_bound() -> None:
    path = Path(0.1)
    flow = Flow(path, carry(path))
    assert path.b.session.windows().receive_size == CONTROL + MIB
    path.run(3.0, flow.write, flow.read)
    windows = path.b.session.windows()
    assert windows.largest_stream == 4 * MIB and windows.receive_size >= CONTROL + 4 * MIB
    flow.finish()


@pytest.mark.parametrize("apart", [True, False])
def test_a_reader_of_circuits_that_stands_still_holds_nobody_else(apart: bool) -> None:
    """Two on one connection; the first has grown, and its far end dies.  Without windows apart the other one has no credit left."""
    path = Path(0.02)
    first, second = (Flow(path, carry(path, most=16 * MIB) if apart else path.open()) for _ in range(2))
    path.run(1.0, first.write, first.read)
    path.run(0.5, first.write)
    unread = path.b.session._conn.streams[first.stream].recv.unread
    assert path.b.session.windows().largest_stream == 16 * MIB and unread > 12 * MIB, "what it was given it has used"
    path.run(1.0, first.write, second.write, second.read)
    assert second.got > 40 * MIB if apart else second.got < 4 * MIB


def test_a_window_of_a_stranger_shrinks_as_it_is_used() -> None:
    """The start was announced before anybody knew what the stream is for."""
    path = Path(0.1)
    flow = Flow(path, carry(path, 64 * 1024, 64 * 1024), every_s=0.5)
    path.run(20.0, flow.write, flow.read)
    recv = path.b.session._conn.streams[flow.stream].recv
    assert recv.size == 64 * 1024 and recv.limit - recv.consumed <= 64 * 1024
    assert flow.got <= BULK + 40 * 64 * 1024
    flow.finish()


def test_windows_apart_need_budget_and_give_it_back() -> None:
    budget, reservation = budget_of(8 * MIB)
    path = Path(0.1, reservation=reservation)
    flows = [Flow(path, carry(path)) for _ in range(8)]
    path.run(2.0, *(flow.write for flow in flows))
    sizes = [path.b.session._conn.streams[flow.stream].recv.size for flow in flows]
    assert budget.used <= 8 * MIB and max(sizes) == MIB
    windows = path.b.session._conn.windows
    assert windows._apart == sum(sizes)
    for flow in flows:
        path.b.session.reset(flow.stream, Code.CANCELLED)
    path.run(0.5)
    assert windows._apart == 0
    path.b.session.abort(error_for(Code.SHUTDOWN))
    assert (budget.used, budget.reservations) == (0, 0)
