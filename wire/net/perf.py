"""`perf/1`: how fast the line between two members of a run is, measured by time and not by bytes.

Why by time.  TCP starts slowly: a fixed amount of bytes that suits a home line is over on a fast one before the congestion window
has opened, and takes minutes on a slow one.  So each direction sends for a fixed time (10 s), the receiver counts bytes by second,
and the *steady* rate leaves out the first fifth.  The sender's count would contain what still lies in buffers.

The shape.  A message stream of class 1 is the measurement: `PerfAsk`, `PerfAnswer`, then pulses, each answered with what the
served side has received so far; its end, however it comes, ends everything.  The pulses are also the round trip that control
messages see, before and under load.  The bytes go over byte streams of class 4, the lowest: training and snapshots go first, so a
measured rate is what a run leaves over.  A stream begins with one byte: we send (`UP`) or you send (`DOWN`).  Bytes are zeros;
they are encrypted, so nothing on the way can make them smaller.

Over lanes.  An ask may name up to four lanes: first one stream each way, then two at once, and so on (perflanes.py asks so).  All of
it shares the time and the bytes of a single measurement, so that it costs the served side no more.

What goes wrong and what holds it: a peer that measures for ever (each direction has a deadline on the served side), never reads
(the same), ends in the middle (the control stream's end cancels its byte streams), floods pulses (counted), asks again and again
(one in 60 s a peer), together with others (one at a time a node).  Memory is one fixed buffer a stream.  Guests are refused by
the table of services.  Seeds for all runs do not serve it: whoever is connected to them is a guest, and they have no run to serve.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from wire.errors import Code, LocalProtocolError, WireError, error_for
from wire.events import Kind
from wire.identity import PeerId
from wire.limits import DEFAULT_LIMITS, Limits
from wire.messages import PerfAnswer, PerfAsk, PerfPulse, PerfState, decode, encode
from wire.net.bytestream import ByteStream
from wire.net.network import Net
from wire.net.peer import Peer
from wire.net.perfbytes import Allowance, Tally, count, pour, steady
from wire.net.stream import MessageStream

__all__ = ["PROTOCOL", "Measured", "PerfService", "Progress", "Rate", "measure", "serve_perf"]

PROTOCOL = "perf/1"
CLASS = 4  # background
UP, DOWN = b"U", b"D"
PULSE_EVERY_S = 0.2
IDLE_PULSES = 10


@dataclass(frozen=True, slots=True)
class Rate:
    """One direction.  `first_byte_s`: from asking for it to its first byte (upwards: to the first news of one).
    `steady_bytes_per_s`: without the slow start; None when too little came to say.  `series`: bytes by second."""

    first_byte_s: float | None
    steady_bytes_per_s: float | None
    bytes: int
    span_s: float
    series: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """A whole measurement.  Round trips in seconds, medians; None if no pulse came back under that load."""

    up: Rate
    down: Rate
    rtt_idle_s: float
    rtt_up_s: float | None
    rtt_down_s: float | None
    both_at_once: bool


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a measurement stands: `what` is up, down or both; bytes a second over the last full second."""

    what: str
    elapsed_s: float
    total_s: float
    up_bytes_per_s: float
    down_bytes_per_s: float


# -- the served side


@dataclass(slots=True)
class _Run:
    """The one measurement that is under way here."""

    peer: Peer
    seconds: float
    lanes: int
    allowed: dict[bytes, Allowance]
    up: Tally = field(default_factory=Tally)
    used: Counter[bytes] = field(default_factory=Counter)  # streams so far, by direction
    open: Counter[bytes] = field(default_factory=Counter)  # at this moment
    scopes: set[trio.CancelScope] = field(default_factory=set)

    def may(self, way: bytes) -> bool:
        """One stream, then two at once, ... up to `lanes`."""
        return way in self.allowed and self.open[way] < self.lanes and self.used[way] < self.lanes * (self.lanes + 1) // 2


class PerfService:
    """Answers `perf/1`.  `gauges()` is all 0 when nobody measures."""

    def __init__(self, limits: Limits = DEFAULT_LIMITS) -> None:
        self._limits = limits
        self._run: _Run | None = None
        self._last: dict[PeerId, float] = {}  # start of a peer's last measurement; older than the interval: forgotten

    def gauges(self) -> dict[str, int]:
        run = self._run
        return {"perf_runs": int(run is not None), "perf_streams": 0 if run is None else len(run.scopes)}

    async def handle(self, peer: Peer, stream: MessageStream | ByteStream) -> None:
        """The handler of both kinds of streams."""
        if isinstance(stream, ByteStream):
            await self._bytes(peer, stream)
        else:
            await self._control(peer, stream)

    async def _control(self, peer: Peer, stream: MessageStream) -> None:
        with trio.move_on_after(self._limits.perf_grace_s) as patience:
            ask = decode(await stream.receive(), PerfAsk)
        if patience.cancelled_caught:
            raise error_for(Code.TIMEOUT, detail="nothing was asked")
        refusal = self._refusal(peer.peer_id, trio.current_time())
        if refusal is not None:
            await stream.send(encode(refusal), fin=True)
            return
        limits = self._limits
        if ask.lanes > 1 and ask.lanes * ask.millis > limits.perf_seconds_max * 1000:
            raise error_for(Code.PROTOCOL, detail=f"more than {limits.perf_seconds_max:g} s a direction over all lanes")
        allowed = {way: Allowance(limits.perf_bytes_max) for way in (UP, DOWN)}
        run = self._run = _Run(peer, ask.millis / 1000, ask.lanes, allowed)
        self._last[peer.peer_id] = trio.current_time()
        total_s = most_s(run.seconds, run.lanes, limits)
        try:
            with trio.move_on_after(total_s) as deadline:
                await stream.send(encode(PerfAnswer(Code.OK, lanes=run.lanes)))
                await self._pulses(stream, run, limits.perf_pulses_per_s * total_s)
            if deadline.cancelled_caught:
                raise error_for(Code.TIMEOUT, detail=f"a measurement may take {total_s:g} s")
        finally:
            self._run = None
            for scope in run.scopes:
                scope.cancel()

    def _refusal(self, peer_id: PeerId, now: float) -> PerfAnswer | None:
        interval_s = self._limits.perf_peer_interval_s
        self._last = {peer: at for peer, at in self._last.items() if now - at < interval_s}
        if self._run is not None:
            return PerfAnswer(Code.REFUSED, int(most_s(self._run.seconds, self._run.lanes, self._limits) * 1000))
        if peer_id in self._last:
            return PerfAnswer(Code.RATE_LIMITED, int((self._last[peer_id] + interval_s - now) * 1000) + 1)
        return None

    async def _pulses(self, stream: MessageStream, run: _Run, most: float) -> None:
        count = 0
        async for data in stream:
            pulse = decode(data, PerfPulse)
            count += 1
            if count > most:
                raise error_for(Code.EXCESSIVE, detail=f"more than {most:g} pulses")
            up = run.up
            await stream.send(encode(PerfState(pulse.number, tuple(up.seconds), int(up.span_s * 1e6), up.over)))
        await stream.send_eof()

    async def _bytes(self, peer: Peer, stream: ByteStream) -> None:
        run = self._run
        if run is None or run.peer is not peer:
            raise error_for(Code.REFUSED, detail="ask for a measurement first")
        with trio.CancelScope() as scope, trio.move_on_after(run.seconds + self._limits.perf_grace_s) as deadline:
            run.scopes.add(scope)
            try:
                way = await stream.receive_some(1)
                if not run.may(way):
                    raise error_for(Code.PROTOCOL, detail="no direction, or one that was measured already")
                run.used[way] += 1
                run.open[way] += 1
                try:
                    await self._one_way(stream, run, way)
                finally:
                    run.open[way] -= 1
            finally:
                run.scopes.discard(scope)
        if scope.cancelled_caught:
            raise error_for(Code.CANCELLED, detail="the measurement has ended")
        if deadline.cancelled_caught:
            raise error_for(Code.TIMEOUT, detail="this direction's time is over")

    async def _one_way(self, stream: ByteStream, run: _Run, way: bytes) -> None:
        if way == DOWN:
            await pour(stream, run.seconds, run.allowed[way])
        elif await count(stream, run.up, run.allowed[way]):
            run.up.over = run.open[way] == 1
        else:
            raise error_for(Code.EXCESSIVE, detail=f"more than {self._limits.perf_bytes_max} bytes")


def most_s(seconds: float, lanes: int, limits: Limits) -> float:
    """How long a measurement may take: both directions for each number of lanes, each pair with what is under way at its end."""
    return 2 * lanes * seconds + (lanes + 1) * limits.perf_grace_s


def serve_perf(net: Net) -> PerfService:
    """Serve `perf/1` on a net; guests are refused."""
    service = PerfService(net.limits)
    net.serve(PROTOCOL, service.handle)
    return service


# -- the asking side


async def measure(
    peer: Peer,
    *,
    seconds: float = 10.0,
    both_at_once: bool = False,
    limits: Limits = DEFAULT_LIMITS,
    progress: Callable[[Progress], None] = lambda progress: None,
) -> Measured:
    """Measure the line to `peer`: up, then down, or both at once.

    Raises `WireError`: REFUSED (it measures with somebody else) and RATE_LIMITED with `retry_after`, NOT_MEMBER,
    PROTOCOL_UNKNOWN, TIMEOUT, what ended the connection; LocalProtocolError for `seconds` out of [0.1, 15].  A cancel ends the
    measurement on both sides.
    """
    if not 0.1 <= seconds <= limits.perf_seconds_max:
        raise LocalProtocolError(f"a direction is measured for 0.1 to {limits.perf_seconds_max:g} s, not {seconds:g}")
    with trio.move_on_after(2 * (seconds + limits.perf_grace_s)):
        control = await peer.open(PROTOCOL, Kind.MESSAGE, 1)
        assert isinstance(control, MessageStream)
        async with control:
            await granted(peer, control, PerfAsk(int(seconds * 1000)))
            measured = await _Asker(peer, control, seconds, both_at_once, progress, limits.perf_bytes_max).run()
            await control.send_eof()
            return measured
    raise error_for(Code.TIMEOUT, detail=f"{PROTOCOL}: the measurement with {peer.peer_id.short} did not end in time")


async def granted(peer: Peer, control: MessageStream, ask: PerfAsk) -> PerfAnswer:
    """Ask.  Raises what `measure` raises if the peer does not measure now."""
    await control.send(encode(ask))
    answer = decode(await received(control), PerfAnswer)
    if answer.code != Code.OK:
        code = Code(answer.code) if answer.code in Code._value2member_map_ else Code.REFUSED
        raise WireError(f"{peer.peer_id.short} does not measure now", code=code, retry_after=answer.retry_ms / 1000)
    return answer


async def received(control: MessageStream) -> bytes:
    try:
        return await control.receive()
    except trio.EndOfChannel:
        raise error_for(Code.PROTOCOL, detail=f"{PROTOCOL}: the peer ended the measurement without a word") from None


class _Asker:
    """One measurement, as the side that asked for it sees it."""

    def __init__(
        self, peer: Peer, control: MessageStream, seconds: float, both: bool, progress: Callable[[Progress], None], most_bytes: int
    ) -> None:
        self._peer = peer
        self._control = control
        self._seconds = seconds
        self._both = both
        self._progress = progress
        self._most_bytes = most_bytes
        self._number = 0
        self._state = PerfState(0)
        self._down = Tally()
        self._began: dict[bytes, float] = {}
        self._up_first_at: float | None = None

    async def run(self) -> Measured:
        idle = [await self._pulse() for _ in range(IDLE_PULSES)]
        if self._both:
            under = [await self._phase("both", (UP, DOWN))] * 2
        else:
            under = [await self._phase("up", (UP,)), await self._phase("down", (DOWN,))]
        state, down = self._state, self._down
        return Measured(
            self._rate(UP, self._up_first_at, state.seconds, state.micros / 1e6),
            self._rate(DOWN, down.first_at, tuple(down.seconds), down.span_s),
            median(idle) or 0.0,
            median(under[0]),
            median(under[1]),
            self._both,
        )

    def _rate(self, way: bytes, first_at: float | None, series: tuple[int, ...], span_s: float) -> Rate:
        first_s = None if first_at is None else first_at - self._began[way]
        return Rate(first_s, steady(series, span_s), sum(series), span_s, series)

    async def _pulse(self) -> float:
        """One round trip in seconds; keeps what the answer says."""
        self._number += 1
        began = trio.current_time()
        await self._control.send(encode(PerfPulse(self._number)))
        self._state = state = decode(await received(self._control), PerfState)
        now = trio.current_time()
        if state.seconds and self._up_first_at is None:
            self._up_first_at = now
        return now - began

    async def _phase(self, what: str, ways: tuple[bytes, ...]) -> list[float]:
        """Run the streams of `ways` with pulses beside them; the round trips of that time."""
        trips: list[float] = []
        began = trio.current_time()
        open_ways = set(ways)

        async def one(way: bytes) -> None:
            self._began[way] = trio.current_time()
            stream = await self._peer.open(PROTOCOL, Kind.BYTE, CLASS)
            assert isinstance(stream, ByteStream)
            async with stream:
                await stream.send_all(way)
                if way == UP:
                    await pour(stream, self._seconds, Allowance(self._most_bytes))
                    await stream.receive_some(1)  # the end: everything has come
                else:
                    await stream.send_eof()
                    if not await count(stream, self._down, Allowance(self._most_bytes)):
                        raise error_for(Code.EXCESSIVE, detail=f"{PROTOCOL}: the peer sends more than {self._most_bytes} bytes")
            open_ways.discard(way)

        async def all_ways() -> None:
            async with trio.open_nursery() as nursery:
                for way in ways:
                    nursery.start_soon(one, way)

        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(all_ways)
                while open_ways:
                    trips.append(await self._pulse())
                    up, down = _latest(self._state.seconds), _latest(tuple(self._down.seconds))
                    shown = Progress(what, trio.current_time() - began, self._seconds, up, down)
                    self._progress(shown)
                    await trio.sleep(PULSE_EVERY_S)
        except BaseExceptionGroup as group:
            raise first_cause(group) from None
        if UP in ways:
            await self._pulse()  # the whole of what the peer counted
        return trips


def _latest(seconds: tuple[int, ...]) -> float:
    """Bytes in the last full second; 0 before there is one."""
    return float(seconds[-2]) if len(seconds) > 1 else 0.0


def median(values: list[float]) -> float | None:
    return sorted(values)[len(values) // 2] if values else None


def first_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that says why: of a wire's rather than the cancels that followed it."""
    leaves: list[BaseException] = []
    waiting: list[BaseException] = [group]
    while waiting:
        error = waiting.pop()
        if isinstance(error, BaseExceptionGroup):
            waiting.extend(error.exceptions)
        else:
            leaves.append(error)
    return next((e for e in leaves if isinstance(e, WireError)), leaves[0])
