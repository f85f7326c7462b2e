"""`perf/1`: how fast the line between two members of a run is, measured by time and not by bytes.

Why by time.  TCP starts slowly: a fixed amount of bytes that suits a home line is over on a fast one before the congestion window
has opened, and takes minutes on a slow one.  So each direction sends for a fixed time (10 s), the receiver counts bytes by second,
and the *steady* rate leaves out the first fifth.  The sender's count would contain what still lies in buffers.

The shape.  A message stream of class 1 is the measurement: `PerfAsk`, `PerfAnswer`, then pulses, each answered with what the
served side has received so far; its end, however it comes, ends everything.  The pulses are also the round trip that control
messages see, before and under load.  The bytes go over byte streams of class 4, the lowest: training and snapshots go first, so a
measured rate is what a run leaves over.  A stream begins with one byte: we send (`UP`) or you send (`DOWN`).  Bytes are zeros;
they are encrypted, so nothing on the way can make them smaller.

What goes wrong and what holds it: a peer that measures for ever (each direction has a deadline on the served side), never reads
(the same), ends in the middle (the control stream's end cancels its byte streams), floods pulses (counted), asks again and again
(one in 60 s a peer), together with others (one at a time a node).  Memory is one fixed buffer a direction.  Guests are refused by
the table of services.  Seeds for all runs do not serve it: whoever is connected to them is a guest, and they have no run to serve.
"""

from __future__ import annotations

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
from wire.net.stream import MessageStream

__all__ = ["PROTOCOL", "Measured", "PerfService", "Progress", "Rate", "measure", "serve_perf"]

PROTOCOL = "perf/1"
CLASS = 4  # background
UP, DOWN = b"U", b"D"
BUFFER_BYTES = 256 * 1024  # the largest record
SLOW_START_SHARE = 0.2  # 2 of 10 s: at 200 ms of round trip TCP has doubled ten times by then
PULSE_EVERY_S = 0.2
IDLE_PULSES = 10
_ZEROS = memoryview(bytes(BUFFER_BYTES))


@dataclass(slots=True)
class Tally:
    """What one direction has received, by second since its first byte."""

    seconds: list[int] = field(default_factory=list)
    first_at: float | None = None
    last_at: float = 0.0
    over: bool = False

    def add(self, count: int, now: float) -> None:
        if self.first_at is None:
            self.first_at = now
        self.last_at = now
        at = int(now - self.first_at)
        self.seconds.extend([0] * (at + 1 - len(self.seconds)))
        self.seconds[at] += count

    @property
    def span_s(self) -> float:
        return 0.0 if self.first_at is None else self.last_at - self.first_at


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


def steady(seconds: tuple[int, ...], span_s: float) -> float | None:
    """Bytes a second after the slow start; None for less than a tenth of a second."""
    skip = int(span_s * SLOW_START_SHARE)
    rest = span_s - skip
    return sum(seconds[skip:]) / rest if rest >= 0.1 else None


# -- the served side


@dataclass(slots=True)
class _Run:
    """The one measurement that is under way here."""

    peer: Peer
    seconds: float
    up: Tally = field(default_factory=Tally)
    used: set[bytes] = field(default_factory=set)
    scopes: set[trio.CancelScope] = field(default_factory=set)


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
        run = self._run = _Run(peer, ask.millis / 1000)
        self._last[peer.peer_id] = trio.current_time()
        total_s = self._total_s(run.seconds)
        try:
            with trio.move_on_after(total_s) as deadline:
                await stream.send(encode(PerfAnswer(Code.OK)))
                await self._pulses(stream, run, self._limits.perf_pulses_per_s * total_s)
            if deadline.cancelled_caught:
                raise error_for(Code.TIMEOUT, detail=f"a measurement may take {total_s:g} s")
        finally:
            self._run = None
            for scope in run.scopes:
                scope.cancel()

    def _total_s(self, seconds: float) -> float:
        """Both directions, one after the other, each with what is under way at its end."""
        return 2 * (seconds + self._limits.perf_grace_s)

    def _refusal(self, peer_id: PeerId, now: float) -> PerfAnswer | None:
        interval_s = self._limits.perf_peer_interval_s
        self._last = {peer: at for peer, at in self._last.items() if now - at < interval_s}
        if self._run is not None:
            return PerfAnswer(Code.REFUSED, int(self._total_s(self._run.seconds) * 1000))
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
                if way not in (UP, DOWN) or way in run.used:
                    raise error_for(Code.PROTOCOL, detail="no direction, or one that was measured already")
                run.used.add(way)
                if way == UP:
                    await _count(stream, run.up)
                else:
                    await _pour(stream, run.seconds)
            finally:
                run.scopes.discard(scope)
        if scope.cancelled_caught:
            raise error_for(Code.CANCELLED, detail="the measurement has ended")
        if deadline.cancelled_caught:
            raise error_for(Code.TIMEOUT, detail="this direction's time is over")


def serve_perf(net: Net) -> PerfService:
    """Serve `perf/1` on a net; guests are refused."""
    service = PerfService(net.limits)
    net.serve(PROTOCOL, service.handle)
    return service


async def _pour(stream: ByteStream, seconds: float) -> None:
    """Send for so long, then the end.  A piece grows while pieces are quick: a slow line must notice the end of its time."""
    ends, piece = trio.current_time() + seconds, 16 * 1024
    while (began := trio.current_time()) < ends:
        await stream.send_all(_ZEROS[:piece])
        await trio.lowlevel.checkpoint()  # a line that is never full must not keep the loop
        if trio.current_time() - began < 0.05:
            piece = min(2 * piece, BUFFER_BYTES)
    await stream.send_eof()


async def _count(stream: ByteStream, tally: Tally) -> None:
    """Receive until the end, into one buffer."""
    buffer = memoryview(bytearray(BUFFER_BYTES))
    while count := await stream.receive_into(buffer):
        tally.add(count, trio.current_time())
        await trio.lowlevel.checkpoint()
    tally.over = True


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
            await control.send(encode(PerfAsk(int(seconds * 1000))))
            answer = decode(await _received(control), PerfAnswer)
            if answer.code != Code.OK:
                code = Code(answer.code) if answer.code in Code._value2member_map_ else Code.REFUSED
                raise WireError(f"{peer.peer_id.short} does not measure now", code=code, retry_after=answer.retry_ms / 1000)
            measured = await _Asker(peer, control, seconds, both_at_once, progress).run()
            await control.send_eof()
            return measured
    raise error_for(Code.TIMEOUT, detail=f"{PROTOCOL}: the measurement with {peer.peer_id.short} did not end in time")


async def _received(control: MessageStream) -> bytes:
    try:
        return await control.receive()
    except trio.EndOfChannel:
        raise error_for(Code.PROTOCOL, detail=f"{PROTOCOL}: the peer ended the measurement without a word") from None


class _Asker:
    """One measurement, as the side that asked for it sees it."""

    def __init__(
        self, peer: Peer, control: MessageStream, seconds: float, both: bool, progress: Callable[[Progress], None]
    ) -> None:
        self._peer = peer
        self._control = control
        self._seconds = seconds
        self._both = both
        self._progress = progress
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
            _median(idle) or 0.0,
            _median(under[0]),
            _median(under[1]),
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
        self._state = state = decode(await _received(self._control), PerfState)
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
                    await _pour(stream, self._seconds)
                    await stream.receive_some(1)  # the end: everything has come
                else:
                    await stream.send_eof()
                    await _count(stream, self._down)
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
            raise _first(group) from None
        if UP in ways:
            await self._pulse()  # the whole of what the peer counted
        return trips


def _latest(seconds: tuple[int, ...]) -> float:
    """Bytes in the last full second; 0 before there is one."""
    return float(seconds[-2]) if len(seconds) > 1 else 0.0


def _median(values: list[float]) -> float | None:
    return sorted(values)[len(values) // 2] if values else None


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
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
