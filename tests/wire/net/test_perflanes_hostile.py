"""Peers that lie, fall silent or leave while lines to them are measured over lanes.

Each is a `Fake`: a server of perf/1 by hand that does everything rightly but for one thing, and that only from the second rung on,
so that there is something to keep or to throw away.  The first test has it do nothing wrong.
"""

from __future__ import annotations

import pytest
import trio
import trio.testing

from tests.wire.net.test_perflanes import LINE_BYTES_PER_S, Two, rates, two
from wire.errors import Code, ConnectionLost, WireError, error_for
from wire.limits import DEFAULT_LIMITS
from wire.messages import PerfAnswer, PerfAsk, PerfPulse, PerfState, decode, encode
from wire.net import ByteStream, MessageStream, Peer
from wire.net.perf import PROTOCOL, UP
from wire.net.perfbytes import Allowance, Tally, count, pour
from wire.net.perflanes import Ladder, measure_lanes

Clock = trio.testing.MockClock
SECONDS = 0.5
GRACE_S = DEFAULT_LIMITS.perf_grace_s
PLENTY = 1 << 40


class Fake:
    """Honest.  `rung`: of the streams that are open or were the last."""

    lanes = 4

    def __init__(self) -> None:
        self.tally = Tally()
        self.streams = 0
        self.peer: Peer
        self.wrong_at = 0.0  # when the second rung began

    @property
    def rung(self) -> int:
        return next(rung for rung in range(5) if self.streams <= rung * (rung + 1))

    @property
    def wrong(self) -> bool:
        """The first rung is whole: from here on the fault shows."""
        return self.rung > 1

    async def handle(self, peer: Peer, stream: MessageStream | ByteStream) -> None:
        if isinstance(stream, MessageStream):
            self.peer = peer
            await self.control(stream)
        else:
            way = await stream.receive_some(1)
            self.streams += 1
            if self.streams == 3:
                self.wrong_at = trio.current_time()
            await (self.up(stream) if way == UP else self.down(stream))

    async def control(self, stream: MessageStream) -> None:
        ask = decode(await stream.receive(), PerfAsk)
        self.seconds = ask.millis / 1000
        await stream.send(encode(PerfAnswer(Code.OK, lanes=self.lanes)))
        async for data in stream:
            await self.pulse(stream, decode(data, PerfPulse))
        await stream.send_eof()

    async def pulse(self, stream: MessageStream, pulse: PerfPulse) -> None:
        await stream.send(encode(self.state(pulse.number)))

    def state(self, number: int) -> PerfState:
        return PerfState(number, tuple(self.tally.seconds), int(self.tally.span_s * 1e6))

    async def up(self, stream: ByteStream) -> None:
        await count(stream, self.tally, Allowance(PLENTY))

    async def down(self, stream: ByteStream) -> None:
        await pour(stream, self.seconds, Allowance(PLENTY))


async def asked(t: Two, fake: Fake, **settings: float) -> Ladder:
    t.served.serve(PROTOCOL, fake.handle)
    return await measure_lanes(t.peer, **{"seconds": SECONDS, **settings})  # type: ignore[arg-type]


async def test_a_peer_that_does_nothing_wrong(autojump_clock: Clock) -> None:
    """Else the tests below would prove nothing."""
    async with two() as t:
        fake = Fake()
        ladder = await asked(t, fake)
    assert (ladder.ended, ladder.served, [rung.lanes for rung in ladder.rungs]) == ("", 4, [1, 2, 3, 4])
    assert fake.streams == 20
    for rung in ladder.rungs:
        assert max(rates(rung)) < 1.1 * LINE_BYTES_PER_S


# -- lies that are found out


class MoreThanSent(Fake):
    def state(self, number: int) -> PerfState:
        true = super().state(number)
        return PerfState(number, (*true.seconds, (1 << 30) * self.wrong), true.micros)


class Backwards(Fake):
    """It has forgotten the first rung."""

    def state(self, number: int) -> PerfState:
        return PerfState(number, (), super().state(number).micros) if self.wrong else super().state(number)


class TimeBackwards(Fake):
    def state(self, number: int) -> PerfState:
        true = super().state(number)
        return PerfState(number, true.seconds, 0 if self.wrong else true.micros)


class WrongNumber(Fake):
    def state(self, number: int) -> PerfState:
        return super().state(number + self.wrong)


class TwoAnswers(Fake):
    async def pulse(self, stream: MessageStream, pulse: PerfPulse) -> None:
        for _ in range(1 + self.wrong):
            await super().pulse(stream, pulse)


class Garbage(Fake):
    async def pulse(self, stream: MessageStream, pulse: PerfPulse) -> None:
        await (stream.send(b"\xc1") if self.wrong else super().pulse(stream, pulse))


class Incomplete(Fake):
    """It ends each stream as if all had come, and says that half has."""

    async def up(self, stream: ByteStream) -> None:
        all_of_it = Tally()
        await count(stream, all_of_it if self.wrong else self.tally, Allowance(PLENTY))
        if self.wrong:
            self.tally.add(sum(all_of_it.seconds) // 2, trio.current_time())


class Chatty(Fake):
    async def up(self, stream: ByteStream) -> None:
        if self.wrong:
            await stream.send_all(b"!")
        await super().up(stream)


@pytest.mark.parametrize(
    ("liar", "words"),
    [
        (MoreThanSent, "that were sent"),
        (Backwards, "contradict"),
        (TimeBackwards, "contradict"),
        (WrongNumber, "contradict"),
        (TwoAnswers, "contradict"),
        (Garbage, ""),
        (Incomplete, "as complete"),
        (Chatty, "only receive"),
    ],
)
async def test_of_a_peer_that_lies_nothing_is_kept(liar: type[Fake], words: str, autojump_clock: Clock) -> None:
    async with two() as t:
        fake = liar()
        with pytest.raises(WireError) as caught:
            await asked(t, fake)
        assert fake.rung == 2  # the first was measured, and is not given out
    assert caught.value.code is Code.PROTOCOL and words in caught.value.detail


# -- lies that cannot be found out, and what they bring


class Holds(Fake):
    """Its count stands still for most of each direction, and then all comes within what it says to be a moment."""

    def __init__(self) -> None:
        super().__init__()
        self.said = PerfState(0)
        self.began = (0, 0.0)

    def state(self, number: int) -> PerfState:
        true, now = super().state(number), trio.current_time()
        if self.rung != self.began[0]:
            self.began = self.rung, now
        elapsed_s = now - self.began[1]
        if elapsed_s >= 0.8 * self.seconds:
            self.said = true
            return true
        held = (sum(self.said.seconds) + 1,) if true.seconds else ()
        return PerfState(number, held, self.said.micros if elapsed_s < 0.6 * self.seconds else true.micros)


async def test_a_count_that_is_held_back_makes_nobody_twice_as_fast(autojump_clock: Clock) -> None:
    async with two() as t:
        ladder = await asked(t, Holds(), seconds=2, lanes=2)
    assert ladder.ended == "" and len(ladder.rungs) == 2
    for rung in ladder.rungs:
        assert max(rates(rung)) < 2.1 * LINE_BYTES_PER_S  # more than 6 times, to whoever believes it


class Burst(Fake):
    """One of the streams ends soon, the others go on: the time in which all are busy is next to nothing."""

    async def down(self, stream: ByteStream) -> None:
        at = self.streams - self.rung * (self.rung - 1)  # within the rung: up first
        if self.rung == 1 or at > self.rung + 1:
            await super().down(stream)
        else:
            await stream.send_all(b"x")
            await trio.sleep(0.03)


async def test_a_stream_that_ends_soon_makes_nobody_faster(autojump_clock: Clock) -> None:
    async with two() as t:
        ladder = await asked(t, Burst(), lanes=3)
    assert ladder.ended == "" and len(ladder.rungs) == 3
    for rung in ladder.rungs[1:]:
        assert rung.down is not None and rung.down.bytes > 100_000
        assert (rung.down.bytes_per_s or 0.0) < 1.1 * LINE_BYTES_PER_S


@pytest.mark.parametrize(("said", "lanes"), [(1, 1), (0, 1), (2, 2), (65535, 4)])
async def test_a_peer_measures_over_as_many_lanes_as_it_says(said: int, lanes: int, autojump_clock: Clock) -> None:
    """One: as who knows nothing of lanes does."""
    async with two() as t:
        fake = Fake()
        fake.lanes = said
        ladder = await asked(t, fake)
    assert (ladder.had, ladder.served, ladder.ended) == (4, lanes, "")
    assert len(ladder.rungs) == lanes and fake.streams == lanes * (lanes + 1)


class Lingers(Fake):
    """Of three streams down two end by themselves; that of the third lane goes on for half a second when we have enough (128 KiB)."""

    async def down(self, stream: ByteStream) -> None:
        if self.rung != 3:
            await super().down(stream)
        elif stream._link.lane != 3:
            await stream.send_all(bytes(50 << 10))
        else:
            for _ in range(40):
                await stream.send_all(bytes(2 << 10))
                await trio.sleep(0.02)


async def test_the_next_streams_wait_until_those_of_the_last_rung_have_left_their_lanes(autojump_clock: Clock) -> None:
    """Else four would be placed over three lanes, and say so."""
    async with two() as t:
        ladder = await asked(t, Lingers(), bytes_most=1 << 20)
    assert ladder.ended == "" and len(ladder.rungs) == 4


# -- silence, endless talk, and leaving


class NoAnswer(Fake):
    async def pulse(self, stream: MessageStream, pulse: PerfPulse) -> None:
        await (trio.sleep_forever() if self.wrong else super().pulse(stream, pulse))


class NeverReads(Fake):
    async def up(self, stream: ByteStream) -> None:
        await (trio.sleep_forever() if self.wrong else super().up(stream))


class NeverStops(Fake):
    async def down(self, stream: ByteStream) -> None:
        if not self.wrong:
            await super().down(stream)
        self.wrong_at = trio.current_time()
        while self.wrong:
            await stream.send_all(b"a byte now and then")
            await trio.sleep(0.2)


class Leaves(Fake):
    """Without a goodbye."""

    async def up(self, stream: ByteStream) -> None:
        if self.wrong:
            self.peer.fail(ConnectionLost("gone"))
        await super().up(stream)


class SaysGoodbye(Fake):
    async def up(self, stream: ByteStream) -> None:
        if self.wrong:
            raise error_for(Code.SHUTDOWN, detail="going home")
        await super().up(stream)


class LosesALane(Fake):
    async def up(self, stream: ByteStream) -> None:
        if self.wrong:
            stream._link.fail(ConnectionLost("this one only"))
        await super().up(stream)


class EndsControl(Fake):
    async def pulse(self, stream: MessageStream, pulse: PerfPulse) -> None:
        if self.wrong:
            await stream.send_eof()
        else:
            await super().pulse(stream, pulse)


@pytest.mark.parametrize(
    ("kind", "why", "after_s"),
    [
        (NoAnswer, "no answer within 5 s", GRACE_S),
        (NeverReads, "the peer had not taken everything", GRACE_S + SECONDS),
        (NeverStops, "the peer still sent", GRACE_S + SECONDS),
        (Leaves, "connection lost", 0.0),
        (SaysGoodbye, "going home", 0.0),
        (LosesALane, "connection lost", 0.0),
        (EndsControl, "without a word", 0.0),
    ],
)
async def test_what_was_found_is_kept_and_it_is_said_why_there_is_no_more(
    kind: type[Fake], why: str, after_s: float, autojump_clock: Clock
) -> None:
    async with two() as t:
        fake = kind()
        ladder = await asked(t, fake)
        took_s = trio.current_time() - fake.wrong_at
    assert why in ladder.ended
    assert rates(ladder.rungs[0]) == pytest.approx((LINE_BYTES_PER_S, LINE_BYTES_PER_S), rel=0.35)  # half a second is short
    assert len(ladder.rungs) == 1 if kind is not NeverStops else [rung.down is None for rung in ladder.rungs] == [False, True]
    assert took_s == pytest.approx(after_s, abs=0.4)


class Mute(Fake):
    async def control(self, stream: MessageStream) -> None:
        await trio.sleep_forever()


class MuteAfterwards(Fake):
    async def pulse(self, stream: MessageStream, pulse: PerfPulse) -> None:
        await trio.sleep_forever()


class Busy(Fake):
    async def control(self, stream: MessageStream) -> None:
        await stream.receive()
        await stream.send(encode(PerfAnswer(Code.RATE_LIMITED, 7000)), fin=True)


class Gone(Fake):
    async def control(self, stream: MessageStream) -> None:
        raise error_for(Code.SHUTDOWN)


@pytest.mark.parametrize(
    ("kind", "code", "took_s"),
    [
        (Mute, Code.TIMEOUT, GRACE_S),
        (MuteAfterwards, Code.TIMEOUT, GRACE_S),
        (Busy, Code.RATE_LIMITED, 0.0),
        (Gone, Code.SHUTDOWN, 0.0),
    ],
)
async def test_where_nothing_was_measured_the_cause_is_raised(kind: type[Fake], code: Code, took_s: float, autojump_clock: Clock) -> None:
    async with two() as t:
        t.peer._want_lanes()
        await trio.sleep(3)  # that they are waited for is not the question here
        began = trio.current_time()
        with pytest.raises(WireError) as caught:
            await asked(t, kind())
        assert trio.current_time() - began == pytest.approx(took_s, abs=0.2)
    assert caught.value.code is code
    assert caught.value.retry_after == (7.0 if kind is Busy else None)


async def test_a_peer_that_does_not_offer_it(autojump_clock: Clock) -> None:
    async with two() as t:
        with pytest.raises(WireError) as caught:
            await measure_lanes(t.peer, seconds=SECONDS)
    assert caught.value.code is Code.PROTOCOL_UNKNOWN
