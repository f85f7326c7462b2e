"""How many connections a line to a peer needs: `perf/1` over one lane, over two at once, and so on.

Why it is asked.  A TCP connection under a congestion control that takes loss for congestion carries ~MSS/RTT x sqrt(1.5/p) (Mathis et
al. 1997), and no more than its buffers hold in a round trip: on a long or lossy way one of them fills a fraction of the line, and n
carry n times that.  On a line that is simply full a second one brings nothing.  Neither can be seen from one figure; the rates over
1, 2, 3 and 4 lanes side by side tell which it is.

How.  The net that asks has to want the lanes (`Limits.lanes_start`); they are waited for before the peer is asked, so that it is kept
no longer than needed.  Streams opened one after the other go to different lanes (the one with the fewest streams takes the next), and
since we open those of both directions, the placing is ours both ways.  Every lane but those measured stays idle.  Whether they do lie
side by side is looked at: if a lane has gone meanwhile, the rates that were to come would be those of fewer.

What is believed.  Downwards we count what arrives.  Upwards the peer says what has arrived, and may lie: it cannot have received more
than was sent until then, nor less than before, and after its own end of a stream nothing of that one may be missing; such an answer
ends the measurement with PROTOCOL, and nothing of it is kept.  The time its count took is its own figure, but held within what our
clock allows.  A liar can still hold its count back and let all of it come at once; so no rate is more than everything over half of our
time, which leaves a long way room for its slow start.  It can make itself slower than it is, which it could by being slow; and faster,
but less than twice as fast, and by what lay in buffers at the end.

What it costs.  `seconds` for each direction and number of lanes, `perf_seconds_max` a direction together, and `bytes_most` in all,
shared out evenly; what is under way when they are used comes on top.  A slow line with large buffers would take ever longer to
empty, since each lane brings buffers of its own; a queue of `FULL_S` says that the line is full, and no more lanes are tried.

A peer that does not answer, sends for ever, never reads or goes away ends the measurement at the next
deadline; what was found until then is kept and `Ladder.ended` says why there is no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import trio

from wire.errors import Code, ConnectionLost, LocalProtocolError, WireError, error_for
from wire.events import Kind
from wire.limits import DEFAULT_LIMITS, Limits
from wire.messages import PerfAsk, PerfPulse, PerfState, decode, encode
from wire.net.bytestream import ByteStream
from wire.net.peer import Peer
from wire.net.perf import CLASS, DOWN, IDLE_PULSES, PROTOCOL, PULSE_EVERY_S, UP, Progress, first_cause, granted, median, most_s
from wire.net.perfbytes import SLOW_START_SHARE, Allowance, Tally, count, pour
from wire.net.stream import MessageStream

__all__ = ["Flow", "Ladder", "Rung", "best", "measure_lanes"]

LANES_WAIT_S = 8.0  # four dials one after the other at half a second of round trip
SETTLE_S = 1.0  # for streams that have ended to leave their lanes
LEAST_S = 0.05  # of a time over which a rate is taken
POINT_S = 0.01  # between two points of what has arrived
FULL_S = 1.5  # what still comes so long after its time stood in a queue; 5 s of it would be too late, and one more lane can double it
NAMES = {UP: "up", DOWN: "down"}


@dataclass(frozen=True, slots=True)
class Flow:
    """One direction over some lanes.  `bytes_per_s` without the slow start, None if too little came to say; `rtt_s`: median round
    trip of control messages meanwhile, None if none came back."""

    bytes_per_s: float | None
    bytes: int
    rtt_s: float | None


@dataclass(frozen=True, slots=True)
class Rung:
    """`lanes` streams at once, each on a lane of its own.  `down`: None if the measurement ended before it."""

    lanes: int
    up: Flow
    down: Flow | None


@dataclass(frozen=True, slots=True)
class Ladder:
    """All that was measured with a peer.  `rungs` ascend from one lane."""

    rtt_idle_s: float
    """Median round trip of control messages, before anything was sent."""
    wanted: int
    """How many lanes this pair is to have; 0: the control connection carries everything."""
    had: int
    """How many of them could be had."""
    served: int
    """Over how many the peer measures."""
    rungs: tuple[Rung, ...]
    ended: str
    """Why there are not as many rungs as there could be; "" if there are, or `full` is why."""
    full: bool = False
    """More lanes were not tried: what was under way stood in a queue for long, so nothing but the line holds it back."""


def best(rungs: tuple[Rung, ...], gain: float = DEFAULT_LIMITS.lane_gain) -> Rung:
    """The fewest lanes that no other number beats by more than `gain` in either direction; if there are none such, because one way
    gains where the other loses, those that lose least.  Rungs without `down` do not count, unless there is no other.  `rungs` is not
    empty."""
    whole = [rung for rung in rungs if rung.down is not None] or list(rungs[:1])
    most = [max(_rate(flow) for flow in way) for way in ([rung.up for rung in whole], [rung.down for rung in whole])]

    def share(rung: Rung) -> float:
        return min(_rate(flow) / top if top else 1.0 for flow, top in zip((rung.up, rung.down), most, strict=True))

    return next((rung for rung in whole if share(rung) * (1 + gain) >= 1), max(whole, key=share))


def _rate(flow: Flow | None) -> float:
    return 0.0 if flow is None or flow.bytes_per_s is None else flow.bytes_per_s


async def measure_lanes(
    peer: Peer,
    *,
    lanes: int = 4,
    seconds: float = 3.0,
    most_time_s: float = float("inf"),
    bytes_most: int = DEFAULT_LIMITS.perf_lanes_bytes,
    limits: Limits = DEFAULT_LIMITS,
    progress: Callable[[Progress], None] = lambda progress: None,
) -> Ladder:
    """Measure the line to `peer` over 1 .. `lanes` lanes, up then down for each.

    `seconds`: for each direction and number of lanes, cut so that a direction takes `perf_seconds_max` in all.  `most_time_s`: for
    everything, with the waits.  Raises as `measure` does; EXCESSIVE and TIMEOUT only when nothing was measured yet.
    """
    if not (0.1 <= seconds <= limits.perf_seconds_max and 1 <= lanes <= limits.lanes_max):
        raise LocalProtocolError(f"0.1 to {limits.perf_seconds_max:g} s over 1 to {limits.lanes_max} lanes, not {seconds:g} s over {lanes}")
    ends = trio.current_time() + most_time_s
    with trio.move_on_at(min(trio.current_time() + LANES_WAIT_S, ends)):
        await _lanes_there(peer, lanes)
    wanted, had = _lanes(peer, lanes)
    asked = max(1, had)
    seconds = min(seconds, limits.perf_seconds_max / asked)
    climb = _Climb(peer, had, seconds, limits, progress)
    try:
        with trio.move_on_at(min(trio.current_time() + most_s(seconds, asked, limits), ends)) as patience:
            await climb.run(asked, bytes_most)
    except WireError as error:
        if error.code is Code.PROTOCOL or not climb.flows:
            raise
        climb.ended = str(error)
    if patience.cancelled_caught:
        climb.ended = "the time for it was over"
        if not climb.flows:
            raise error_for(Code.TIMEOUT, detail=f"{PROTOCOL}: the measurement with {peer.peer_id.short} did not end in time")
    return Ladder(median(climb.idle) or 0.0, wanted, had, climb.served, tuple(climb.rungs()), climb.ended, climb.full)


def _lanes(peer: Peer, most: int) -> tuple[int, int]:
    """How many there are to be, and are."""
    lanes = peer.lanes
    return (0, 0) if lanes is None else (min(most, lanes.target), min(most, len(lanes.usable())))


async def _lanes_there(peer: Peer, most: int) -> None:
    while not peer.closed and (lanes := peer.lanes) is not None:
        lanes.want()
        wanted, had = _lanes(peer, most)
        if had >= wanted:
            return
        await trio.sleep(LEAST_S)


@dataclass(slots=True)
class _Point:
    """An answer to a pulse: asked and heard at these times, so much had arrived, the peer's time between its first byte and last."""

    asked_at: float
    heard_at: float
    bytes: int
    span_s: float


@dataclass(slots=True)
class _Phase:
    """Streams of one direction at once."""

    way: bytes
    began: float
    left: int  # streams that have not ended
    allowance: Allowance
    base: int  # what had arrived up there before
    points: list[_Point] = field(default_factory=list)
    came: list[tuple[float, int]] = field(default_factory=list)  # downwards: time, bytes so far
    down: int = 0
    over_at: float | None = None  # the first stream has said or heard all: from then on not all lanes are busy


class _Climb:
    """One measurement, rung by rung."""

    def __init__(self, peer: Peer, had: int, seconds: float, limits: Limits, progress: Callable[[Progress], None]) -> None:
        self.flows: list[tuple[int, bytes, Flow]] = []
        self.idle: list[float] = []
        self.served = 1
        self.ended = ""
        self.full = False
        self._peer = peer
        self._had = had
        self._seconds = seconds
        self._limits = limits
        self._progress = progress
        self._control: MessageStream
        self._number = 0
        self._sent = 0  # upwards, in all: the most that the peer can have received
        self._heard = PerfState(0)
        self._late_s = 0.0  # after its time, the last of a direction has come
        self._every_s = min(PULSE_EVERY_S, seconds / 8)

    def rungs(self) -> Iterator[Rung]:
        flows = {(lanes, way): flow for lanes, way, flow in self.flows}
        return (Rung(lanes, flow, flows.get((lanes, DOWN))) for (lanes, way), flow in flows.items() if way == UP)

    async def run(self, lanes: int, bytes_most: int) -> None:
        control = await self._peer.open(PROTOCOL, Kind.MESSAGE, 1)
        assert isinstance(control, MessageStream)
        async with control:
            self._control = control
            lanes = self.served = await self._served(lanes)
            for _ in range(IDLE_PULSES):
                point = await self._pulse()
                self.idle.append(point.heard_at - point.asked_at)
            for count_ in range(1, lanes + 1):
                for way in (UP, DOWN):
                    await self._settled()
                    flow = await self._one(way, count_, Allowance(bytes_most // (2 * lanes)))
                    self.flows.append((count_, way, flow))
                self.full = self._late_s > FULL_S and count_ < lanes
                if self.full:
                    break
            await control.send_eof()

    async def _served(self, lanes: int) -> int:
        """Ask; over how many lanes the peer measures."""
        with trio.move_on_after(self._limits.perf_grace_s):
            answer = await granted(self._peer, self._control, PerfAsk(int(self._seconds * 1000), lanes))
            return max(1, min(answer.lanes, lanes))
        raise self._silent()

    def _silent(self) -> WireError:
        return error_for(Code.TIMEOUT, detail=f"{PROTOCOL}: no answer within {self._limits.perf_grace_s:g} s")

    async def _settled(self) -> None:
        """Until no lane carries a stream of the last rung: the next one's would be placed beside it."""
        for _ in range(round(SETTLE_S / POINT_S)):
            lanes = self._peer.lanes
            if lanes is None or not any(link.ends for link in lanes.usable()):
                return
            await trio.sleep(POINT_S)

    async def _pulse(self) -> _Point:
        self._number += 1
        asked_at, before = trio.current_time(), self._heard
        with trio.move_on_after(self._limits.perf_grace_s) as patience:
            await self._control.send(encode(PerfPulse(self._number)))
            try:
                self._heard = state = decode(await self._control.receive(), PerfState)
            except trio.EndOfChannel:
                raise error_for(Code.CANCELLED, detail=f"{PROTOCOL}: the peer ended the measurement without a word") from None
        if patience.cancelled_caught:
            raise self._silent()
        received = sum(state.seconds)
        if state.number != self._number or state.micros < before.micros or received < sum(before.seconds):
            raise _lie("its answers contradict each other")
        if received > self._sent:
            raise _lie(f"it says that {received} bytes have arrived, of {self._sent} that were sent")
        return _Point(asked_at, trio.current_time(), received, state.micros / 1e6)

    async def _one(self, way: bytes, lanes: int, allowance: Allowance) -> Flow:
        """`lanes` streams at once, with pulses beside them."""
        phase = _Phase(way, trio.current_time(), lanes, allowance, sum(self._heard.seconds))
        what = f"{NAMES[way]} over {lanes} lane(s)"
        with trio.move_on_after(self._seconds + self._limits.perf_grace_s) as patience:
            async with AsyncExitStack() as stack:
                streams = [await self._stream(stack) for _ in range(lanes)]
                if self._had and self._beside(streams) < lanes:
                    raise ConnectionLost(f"{PROTOCOL}: {what}: a lane has gone meanwhile")
                phase.began = trio.current_time()
                try:
                    async with trio.open_nursery() as nursery:
                        for stream in streams:
                            nursery.start_soon(self._stream_up if way == UP else self._stream_down, stream, phase)
                        while phase.left:
                            phase.points.append(await self._pulse())
                            self._progress(self._shown(what, phase))
                            await trio.sleep(self._every_s)
                except BaseExceptionGroup as group:
                    raise first_cause(group) from None
        if patience.cancelled_caught:
            late = f"{self._limits.perf_grace_s:g} s after its time the peer {'had not taken everything' if way == UP else 'still sent'}"
            raise error_for(Code.TIMEOUT, detail=f"{PROTOCOL}: {what}: {late}")
        self._late_s = max(self._late_s, trio.current_time() - phase.began - self._seconds)
        rtt_s = median([point.heard_at - point.asked_at for point in phase.points])
        if way == DOWN:
            return Flow(_arrived(phase), phase.down, rtt_s)
        phase.points.append(last := await self._pulse())
        if last.bytes != self._sent:
            raise _lie(f"it has ended streams as complete, and says that {last.bytes} bytes have arrived, of {self._sent}")
        return Flow(_told(phase), last.bytes - phase.base, rtt_s)

    async def _stream(self, stack: AsyncExitStack) -> ByteStream:
        stream = await self._peer.open(PROTOCOL, Kind.BYTE, CLASS)
        assert isinstance(stream, ByteStream)
        return await stack.enter_async_context(stream)

    def _beside(self, streams: list[ByteStream]) -> int:
        """How many lanes carry them."""
        lanes = self._peer.lanes
        usable = () if lanes is None else lanes.usable()
        return sum(any(link.ends.get(stream.number) is stream for stream in streams) for link in usable)

    async def _stream_up(self, stream: ByteStream, phase: _Phase) -> None:
        await stream.send_all(UP)
        mine = _Sent(self, phase.allowance)
        await pour(stream, self._seconds, mine)
        phase.over_at = phase.over_at or trio.current_time()
        if await stream.receive_some(1):
            raise _lie("it sends where it should only receive")
        phase.left -= 1

    async def _stream_down(self, stream: ByteStream, phase: _Phase) -> None:
        await stream.send_all(DOWN)
        await stream.send_eof()
        await count(stream, _Curve(phase), phase.allowance)  # when the allowance is used, the rest is not waited for
        phase.over_at = phase.over_at or trio.current_time()
        phase.left -= 1

    def _shown(self, what: str, phase: _Phase) -> Progress:
        elapsed = trio.current_time() - phase.began
        so_far = (phase.down if phase.way == DOWN else phase.points[-1].bytes - phase.base) / max(elapsed, LEAST_S)
        return Progress(what, elapsed, self._seconds, so_far if phase.way == UP else 0.0, so_far if phase.way == DOWN else 0.0)


class _Sent(Allowance):
    """What is taken of an allowance is about to be sent: known before the peer can have it."""

    __slots__ = ("_climb", "_shared")

    def __init__(self, climb: _Climb, shared: Allowance) -> None:
        super().__init__(shared.left)
        self._climb = climb
        self._shared = shared

    def take(self, most: int) -> int:
        taken = self._shared.take(most)
        self._climb._sent += taken
        return taken


class _Curve(Tally):
    """What arrives over all streams of a phase, by hundredths of a second."""

    __slots__ = ("_phase",)

    def __init__(self, phase: _Phase) -> None:
        super().__init__()
        self._phase = phase

    def add(self, count: int, now: float) -> None:
        phase = self._phase
        phase.down += count
        if phase.came and now - phase.came[-1][0] < POINT_S:
            phase.came[-1] = (phase.came[-1][0], phase.down)
        else:
            phase.came.append((now, phase.down))


def _arrived(phase: _Phase) -> float | None:
    """Bytes a second that came, from behind the slow start to the first stream's end."""
    if not phase.came:
        return None
    first_at, end_at = phase.came[0][0], phase.over_at or phase.came[-1][0]
    start = first_at + SLOW_START_SHARE * (end_at - first_at)
    window = [point for point in phase.came if start <= point[0] <= end_at]
    if len(window) > 1 and window[-1][0] - window[0][0] >= LEAST_S:
        return (window[-1][1] - window[0][1]) / (window[-1][0] - window[0][0])
    until = [so_far for at, so_far in phase.came if at <= end_at]  # what came later did not come in this time
    return until[-1] / (end_at - phase.began) if until and end_at - phase.began >= LEAST_S else None


def _told(phase: _Phase) -> float | None:
    """Bytes a second that the peer says to have received, over its time as far as our clock allows that."""
    busy = [point for point in phase.points if point.bytes > phase.base]
    if not busy:
        return None
    start_s = busy[0].span_s + SLOW_START_SHARE * (busy[-1].span_s - busy[0].span_s)
    window = [p for p in busy if p.span_s >= start_s and (phase.over_at is None or p.heard_at <= phase.over_at)]
    if len(window) > 1:
        first, last = window[0], window[-1]
        took_s = min(max(last.span_s - first.span_s, last.asked_at - first.heard_at), last.heard_at - first.asked_at)
        if took_s >= LEAST_S:
            return min((last.bytes - first.bytes) / took_s, 2 * (last.bytes - phase.base) / (last.heard_at - phase.began))
    took_s = busy[-1].heard_at - phase.began
    return (busy[-1].bytes - phase.base) / took_s if took_s >= LEAST_S else None


def _lie(what: str) -> WireError:
    return error_for(Code.PROTOCOL, detail=f"{PROTOCOL}: {what}")
