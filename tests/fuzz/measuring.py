"""Tickets of lanes and the messages of `perf/1` as targets.

`perf/1` is state behind tasks, so its program runs under trio with a clock that jumps: streams are played by hand, a served one says
what the program says, then nothing, its end or a reset.  What comes out is what `wire/net/supervise.py` takes for granted: the
errors of the wire and those of a stream that ended.  Afterwards nobody measures, and all streams were left.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import trio
import trio.testing

from tests.fuzz.engine import Outcome, Target
from tests.fuzz.programs import Program
from wire.errors import Code, StreamReset, WireError
from wire.events import Kind
from wire.identity import PeerId
from wire.limits import DEFAULT_LIMITS
from wire.messages import PerfAnswer, PerfAsk, PerfPulse, PerfState, encode
from wire.net.bytestream import ByteStream
from wire.net.perf import DOWN, UP, Measured, PerfService, measure
from wire.net.perfbytes import BUFFER_BYTES
from wire.net.stream import MessageStream
from wire.tickets import ATTEMPTS_AHEAD, Tickets

# -- tickets: u8 op (issue, redeem one that was issued, redeem the bytes that follow)

SECRET = bytes(range(32))


class _Lanes:
    def __init__(self) -> None:
        self.dialling, self.accepting = Tickets(SECRET, DEFAULT_LIMITS), Tickets(SECRET, DEFAULT_LIMITS)
        self.issued: list[tuple[int, int, bytes]] = []
        self.redeemed: set[int] = set()

    def __call__(self, data: bytes) -> Outcome:
        at, seen = 0, set()
        while at + 1 < len(data) and len(self.issued) < 64 and at < 256:
            op, operand = data[at], data[at + 1]
            at += 2
            if op % 3 == 0:
                lane = operand % DEFAULT_LIMITS.lanes_max + 1
                self.issued.append((lane, *self.dialling.issue(lane)))
                continue
            if op % 3 == 1 and self.issued:
                ticket = self.issued[operand % len(self.issued)][2]
            else:
                ticket = data[at : at + operand % 20]
                at += operand % 20
            found = self.accepting.redeem(ticket)
            last = max(self.redeemed, default=0)
            known = [(lane, number) for lane, number, true in self.issued if true == ticket]
            if found is None:
                assert not known or not last < known[0][1] <= last + ATTEMPTS_AHEAD
            else:
                assert known == [found] and found[1] not in self.redeemed and found[1] > last, "a ticket of nobody, or a second time"
                self.redeemed.add(found[1])
            seen.add((op % 3, found is None))
        return Outcome(frozenset(seen))


def _ticket_seeds() -> list[bytes]:
    wrong = bytes(range(16))
    return [
        bytes([0, 0, 0, 1, 1, 0, 1, 1, 1, 0]),
        bytes([0, 2]) * 20 + bytes([1, 19, 1, 15, 1, 3, 1, 19]),
        bytes([2, len(wrong)]) + wrong + bytes([2, 0]),
        bytes([0, 0, 2, 16]) + wrong + bytes([1, 0]),
    ]


# -- perf/1

BUFFERS = 4 * BUFFER_BYTES + (64 << 10)  # what tasks and two streams each way may hold


class _Script:
    """What a stream says, in order: a message, or a pause in seconds.  `end`: silence, FIN, or a reset."""

    def __init__(self, said: list[bytes | float], end: int) -> None:
        self.said, self.end, self.left = said, end % 3, False

    async def next(self) -> bytes | None:
        await trio.lowlevel.checkpoint()
        while self.said:
            item = self.said.pop(0)
            if isinstance(item, bytes):
                return item
            await trio.sleep(item)
        if self.end == 0:
            await trio.sleep_forever()
        if self.end == 1:
            return None
        raise StreamReset(Code.CANCELLED)


class _Control(MessageStream):
    __slots__ = ("script",)

    def __init__(self, script: _Script) -> None:
        self.script = script

    async def receive(self) -> bytes:
        said = await self.script.next()
        if said is None:
            raise trio.EndOfChannel
        return said

    async def send(self, message: bytes, *, fin: bool = False) -> None:
        await trio.lowlevel.checkpoint()
        assert len(message) <= DEFAULT_LIMITS.message_max_bytes

    async def send_eof(self) -> None:
        await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        self.script.left = True

    async def __aenter__(self) -> Any:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class _Bytes(ByteStream):
    __slots__ = ("script",)

    def __init__(self, script: _Script) -> None:
        self.script = script

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        return (await self.script.next() or b"")[:max_bytes]

    async def receive_into(self, buffer: memoryview) -> int:
        said = (await self.script.next() or b"")[: len(buffer)]
        buffer[: len(said)] = said
        return len(said)

    async def send_all(self, data: object) -> None:
        await trio.sleep(0.5)

    async def send_eof(self) -> None:
        await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        self.script.left = True

    async def __aenter__(self) -> Any:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def _served(program: Program) -> tuple[int, list[bytes | float], int]:
    """A stream of the asking side: which peer and kind, what it says, how it ends."""
    how, said = program.byte(), list[bytes | float]()
    for _ in range(program.byte() % 8):
        op, operand = program.byte(), program.byte()
        match op % 5:
            case 0:
                said.append(encode(PerfAsk(100 + 58 * operand)))
            case 1:
                said += [encode(PerfPulse(operand))] * (1 + op // 5 * 20)
            case 2:
                said.append(program.take(operand % 64))
            case 3:
                said.append(operand / 4)
            case 4:
                said += [(UP, DOWN, b"?")[operand % 3], *[bytes(operand)] * (op // 5)]
    return how & 7, said, how >> 3


def _serving(data: bytes) -> Outcome:
    program, scripts = Program(data), list[tuple[int, float, _Script]]()
    at_s = 0.0
    while program and len(scripts) < 12:
        at_s += program.byte() / 16
        how, said, end = _served(program)
        scripts.append((how, at_s, _Script(said, end)))
    service = PerfService()
    peers: list[Any] = [SimpleNamespace(peer_id=PeerId(bytes([at + 1]) * 32)) for at in range(4)]
    ended: set[str] = set()

    async def one(how: int, after_s: float, script: _Script) -> None:
        await trio.sleep(after_s)
        stream = _Bytes(script) if how & 4 else _Control(script)
        try:
            async with stream:
                await service.handle(peers[how & 3], stream)
            ended.add("ok")
        except (trio.EndOfChannel, WireError) as error:
            ended.add(f"{type(error).__name__}{getattr(error, 'code', '')}")

    async def main() -> None:
        with trio.move_on_after(200) as patience:  # no silence of a peer keeps a task for longer
            async with trio.open_nursery() as nursery:
                for script in scripts:
                    nursery.start_soon(one, *script)
        assert not patience.cancelled_caught, "a measurement without end"

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert not any(service.gauges().values()) and all(script.left for _, _, script in scripts)
    return Outcome(frozenset(ended), BUFFERS * (1 + sum(how >> 2 for how, _, _ in scripts)))


def _asking(data: bytes) -> Outcome:
    """u8 mode, then what the served side says: states as a fuzzer likes them."""
    program = Program(data)
    mode, said = program.byte(), list[bytes | float]()
    while program and len(said) < 600:
        op, operand = program.byte(), program.byte()
        match op % 4:
            case 0:
                said.append(encode(PerfAnswer(operand if op >= 64 else 0, operand)))
            case 1:
                seconds = tuple(int.from_bytes(program.take(1 + op // 32), "big") for _ in range(operand % 65))
                said += [encode(PerfState(operand, seconds, int.from_bytes(program.take(op // 32), "big"), op >= 128))] * (1 + op // 8)
            case 2:
                said.append(program.take(operand % 64))
            case 3:
                said.append(operand / 4)
    control = _Script(said, mode)
    streams = [control]

    async def open_(protocol: str, kind: Kind, cls: int) -> object:
        await trio.lowlevel.checkpoint()
        if kind is Kind.MESSAGE:
            return _Control(control)
        streams.append(_Script([bytes(1000), 0.4] * (mode >> 4), mode >> 2))
        return _Bytes(streams[-1])

    async def main() -> str:
        peer: Any = SimpleNamespace(open=open_, peer_id=PeerId(bytes([1]) * 32))
        began = trio.current_time()
        try:
            measured = await measure(peer, seconds=1.0, both_at_once=bool(mode & 64), progress=lambda progress: None)
        except WireError as error:
            assert error.code in Code
            return error.code.name
        finally:
            assert trio.current_time() - began <= 2 * (1.0 + DEFAULT_LIMITS.perf_grace_s) + 0.01
        assert isinstance(measured, Measured) and measured.rtt_idle_s >= 0
        return f"measured {measured.up.steady_bytes_per_s is None} {measured.down.steady_bytes_per_s is None}"

    ended = trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert all(script.left for script in streams)
    return Outcome(ended, BUFFERS + 2 * sum(len(item) + 100 for item in said if isinstance(item, bytes)) + (128 << 10))


def _serving_seeds() -> list[bytes]:
    ask = bytes([0, 15])
    return [
        bytes([0, 8, 2]) + ask + bytes([1, 1]) + bytes([4, 12, 1, 24, 0]),
        bytes([0, 0, 1]) + ask + bytes([8, 12, 2, 254, 100, 3, 9, 8, 12, 1, 4, 1]),
        bytes([0, 0, 1]) + ask + bytes([0, 1, 1]) + ask + bytes([200, 8, 1]) + ask,
        bytes([0, 8, 2]) + ask + bytes([251, 1]),
        bytes([0, 0, 1, 2, 8]) + b"12345678" + bytes([0, 16, 0]),
        bytes([0, 16, 2]) + ask + bytes([3, 255]),
    ]


def _asking_seeds() -> list[bytes]:
    state = bytes([17, 2, 9, 9])
    return [
        bytes([16]) + bytes([0, 0]) + state * 12,
        bytes([1]) + bytes([0, 0]) + bytes([241, 3]) + b"\xff" * 60 + state * 4,
        bytes([66]) + bytes([0, 0]) + state * 8,
        bytes([0, 64, 8]),
        bytes([1, 2, 3, 1, 2, 3]),
        bytes([0, 0, 0, 3, 255]),
    ]


def _plain(run: Callable[[bytes], Outcome]) -> Callable[[], Callable[[bytes], Outcome]]:
    return lambda: run


TICKETS = Target("tickets", _Lanes, (), _ticket_seeds)
PERF_SERVING = Target("perf_serving", _plain(_serving), (), _serving_seeds)
PERF_ASKING = Target("perf_asking", _plain(_asking), (), _asking_seeds)
