"""A session under a peer that holds the right keys and says what it likes.

`session`: a pair of real sessions with real keys.  The input is a program of one-byte op codes: the fuzzer's own frames, sealed in the
name of the peer; calls of the application at either end; records of the honest peer; time that passes.  So mutated frames meet streams
in every state and half-done transfers.  Two ops exist for bulk: a DATA record of a size that is named and not spelt, and the last frame
many times over, which is what floods are.

`session_raw`: unauthenticated bytes, in pieces, before or after a true HELLO.

What must hold: our own misuse raises LocalProtocolError and nothing else; a violation closes the session, after which all gauges are 0,
all bytes are swallowed and nothing is said but one GOAWAY; what we send can be opened with the keys; the peer never has more unread
bytes with us than its window.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace

from tests.fuzz.engine import Outcome, Target
from tests.wire.joined import HELLO
from wire.connection import ConnectionState
from wire.errors import Code, RemoteProtocolError, WireError
from wire.events import Kind, StreamOpened
from wire.inbound import CHUNK_BODY
from wire.limits import DEFAULT_LIMITS, KIB
from wire.messages import AcceptBody, OpenBody, encode
from wire.noise import Cipher
from wire.records import HEADER_BYTES, FrameType, Opener, Sealer, parse_header
from wire.replies import CREDIT_BODY, GOAWAY_HEAD, PING_BODY, PONG_BODY, RESET_HEAD
from wire.session import Session

CIPHER = Cipher.CHACHA20POLY1305
TO_US, TO_PEER = bytes([3]) * 32, bytes([4]) * 32
# Windows small enough that a program of 4 KiB reaches their ends.
LIMITS = replace(
    DEFAULT_LIMITS,
    stream_window_bulk_bytes=256 * KIB,
    connection_window_guest_bytes=256 * KIB,
    connection_window_control_bytes=512 * KIB,
    connection_window_lane_bytes=512 * KIB,
    inbound_streams_max=8,
    inbound_backlog_max=4,
    opens_burst=20,
    resets_burst=12,
    pings_burst=12,
    credits_burst=16,
    replies_waiting_max=24,
)
RECORD_MOST = DEFAULT_LIMITS.record_plaintext_max_bytes
ZEROS = memoryview(bytes(RECORD_MOST))
_FRAME = struct.Struct(">BBIH")
FRAME, RAW, CALL, PEER_CALL, EXCHANGE, BULK, REPEAT, TIME = range(8)
REPEATS_MOST = 64
OPS_MOST = 256
TAG = 16


class _Sink:
    """A place for chunks, as a channel gives it: eight slots, 256 KiB of memory that exists already."""

    memory = memoryview(bytearray(DEFAULT_LIMITS.chunk_bytes))

    def place(self, slot: int, index: int, length: int, flags: int) -> memoryview:
        if slot >= 8 or index >= 1024 or flags > 1:
            raise RemoteProtocolError(Code.PROTOCOL, "no such place")
        return self.memory[:length]

    def placed(self, slot: int, index: int) -> None:
        pass


class _End:
    """One side: the session, the keys, and what was received but not consumed."""

    def __init__(self, initiator: bool, send: bytes, receive: bytes) -> None:
        self.sealer = Sealer(CIPHER, send, LIMITS)
        self.session = Session(
            initiator=initiator,
            sealer=self.sealer,
            opener=Opener(CIPHER, receive, LIMITS),
            hello=replace(HELLO, bulk_window=256 * KIB, max_streams=8),
            limits=LIMITS,
            now=0.0,
            serves=lambda protocol, guest: Code.PROTOCOL_UNKNOWN if protocol == "no/1" else None,
        )
        self.rest = b""
        self.joined = 0
        self.dead: WireError | None = None
        self.buffer = memoryview(bytearray(16 * KIB))

    def feed(self, data: bytes | memoryview, now: float) -> None:
        if self.rest:
            self.joined = max(self.joined, 3 * (len(self.rest) + len(data)))
            data = self.rest + bytes(data)
        used = 0
        try:
            used = self.session.receive(memoryview(data), now)
        except RemoteProtocolError as error:
            self.dead = error
        self.rest = b"" if self.dead is not None or used == len(data) else bytes(data[used:])

    def call(self, which: int, argument: int, now: float) -> str:
        """One call of the application; a misuse of ours must be told as one, and the session goes on."""
        session, stream = self.session, argument & 0x1F
        size = argument >> 5
        calls: tuple[Callable[[], object], ...] = (
            lambda: session.accept(stream),
            lambda: session.refuse(stream, Code.REFUSED),
            lambda: session.read_message(stream),
            lambda: session.read_bytes(stream, 1 + size * 64),
            lambda: session.send(stream, bytes(size * 40), now=now),
            lambda: session.send(stream, bytes(size), fin=True, now=now),
            lambda: session.reset(stream, Code.CANCELLED, "enough"),
            lambda: session.open_stream(Kind(size % 3), "x/1", 1 + stream % 4, now=now),
            lambda: session.attach_sink(stream, _Sink()),
            lambda: session.post(stream, self.buffer[: 1 + size * 64]),
            lambda: session.take_posted(stream),
            lambda: session.unpost(stream),
            lambda: session.sendable(stream, size * 1000),
            lambda: session.read_into(stream, self.buffer[: 1 + size]),
            lambda: session.ping(now),
            lambda: session.goaway(Code.SHUTDOWN, retry_ms=size, now=now),
            lambda: session.copy_unsent(stream),
            lambda: session.unsent(stream),
        )
        try:
            calls[which % len(calls)]()
        except WireError as error:
            assert error.code is not Code.INTERNAL
            return "misuse"
        return "done"


class _World:
    """Us (responder), the peer (initiator), and the harness that speaks in the peer's name."""

    def __init__(self) -> None:
        self.now = 1.0
        self.us = _End(False, TO_PEER, TO_US)
        self.peer = _End(True, TO_US, TO_PEER)
        self.out = memoryview(bytearray(RECORD_MOST + HEADER_BYTES + TAG))
        self.fed = 0
        self.opened = 0
        self.own: dict[_End, int] = {}
        self.last: tuple[int, int, int, bytes | memoryview] = (FrameType.PING, 0, 0, bytes(16))
        self.seen: set[object] = set()
        self.exchange()
        self.drain()

    def say(self, kind: int, flags: int, stream: int, body: bytes | memoryview) -> None:
        """A frame of the fuzzer's, sealed with the peer's key."""
        self.last = kind, flags, stream, body
        size = self.peer.sealer.seal_into(stream, kind, flags, body, self.out)
        self.fed += size + 200  # what an object of each costs
        if kind == FrameType.REKEY and not body and not flags and not stream:
            self.peer.sealer.rekey()
        self.us.feed(self.out[:size], self.now)

    def exchange(self) -> None:
        """What both honest sessions have to say to each other; the peer's own may long be confused, and end."""
        for source, sink in ((self.peer, self.us), (self.us, self.peer)):
            for view in source.session.pull(64 * KIB, self.now):
                self.fed += len(view)
                sink.feed(view, self.now)
            self.count_own(source)

    def count_own(self, end: _End) -> None:
        """The buffer from which bulk is sent is made when there is some; no peer chooses its size."""
        large = end.session._out._large
        self.own[end] = max(self.own.get(end, 0), 0 if large is None else len(large))

    def held(self) -> int:
        """Bytes that credit covers, that we asked for ourselves, or that this harness copied."""
        return self.fed + sum(self.own.values()) + self.us.joined + self.peer.joined

    def drain(self) -> None:
        for event in self.us.session.events():
            self.seen.add(type(event).__name__)
            if isinstance(event, StreamOpened):
                assert event.stream % 2 and event.stream > self.opened, "ids of the peer are odd and ascend"
                self.opened = event.stream
        self.peer.session.events()

    def step(self, data: bytes, at: int) -> int:
        """Run the op at `at`; returns where the next one is."""
        op = data[at] % 8
        at += 1
        argument = int.from_bytes(data[at + 1 : at + 3], "big")
        if op == FRAME:
            if len(data) - at < _FRAME.size:
                return len(data)
            kind, flags, stream, size = _FRAME.unpack_from(data, at)
            at += _FRAME.size
            self.say(kind, flags, stream, data[at : at + size])
            return at + size
        if op == RAW:
            size = data[at] if at < len(data) else 0
            self.fed += size
            self.us.feed(data[at + 1 : at + 1 + size], self.now)
            return at + 1 + size
        if op in (CALL, PEER_CALL):
            end = self.us if op == CALL else self.peer
            if at < len(data):
                self.fed += (argument >> 5) * 40  # what `send` queues
                self.seen.add((op, end.call(data[at], argument, self.now)))
            return at + 3
        if op == EXCHANGE:
            self.exchange()
            return at
        if op == BULK:
            stream = data[at] if at < len(data) else 1
            self.say(FrameType.DATA, 0, stream, ZEROS[: max(1, min(argument * 8, RECORD_MOST))])
            return at + 3
        if op == REPEAT:
            for _ in range(min(data[at] if at < len(data) else 1, REPEATS_MOST)):
                self.say(*self.last)
            return at + 1
        self.now += (data[at] if at < len(data) else 1) / 4
        self.us.session.tick(self.now)
        self.peer.session.tick(self.now)
        return at + 1

    def check(self) -> None:
        gauges = self.us.session.gauges()
        assert all(value >= 0 for value in gauges.values()), gauges
        assert gauges["unread_bytes"] <= LIMITS.connection_window_lane_bytes, gauges

    def end(self) -> None:
        """The end, however it came: nothing is left, and nothing happens any more."""
        session = self.us.session
        if self.us.dead is not None:
            assert session.state is ConnectionState.CLOSED
            assert not any(value for name, value in session.gauges().items() if name != "queued_frames"), session.gauges()
        said = [bytes(view) for view in session.pull(1 << 16, self.now)]
        self.count_own(self.us)
        self.fed += sum(map(len, said))
        if self.us.dead is not None:
            data = b"".join(said)
            assert len(data) < 1 << 10 and session.receive(memoryview(b"more"), self.now) == 4
            kinds = []
            while data:
                size, _, kind, _ = parse_header(data[:HEADER_BYTES])
                kinds.append(kind)
                data = data[HEADER_BYTES + size :]
            assert kinds in ([], [FrameType.GOAWAY], [FrameType.HELLO, FrameType.GOAWAY]), kinds
        session.receive_end()
        session.events()
        session.pull(1 << 16, self.now)
        assert session.state is ConnectionState.CLOSED and not any(session.gauges().values()), session.gauges()


def _signature(world: _World) -> object:
    """The kinds of events seen, and for what the session ended (the sentence without its numbers)."""
    cause = world.us.dead
    reason = "" if cause is None else "".join(char for char in cause.detail if not char.isdigit())[:60]
    return world.us.session.state, reason, len(world.seen)


def _prepare() -> Callable[[bytes], Outcome]:
    world = _World()
    world.fed = 0

    def run(data: bytes) -> Outcome:
        at = ops = 0
        while at < len(data) and world.us.dead is None and ops < OPS_MOST:
            at = world.step(data, at)
            ops += 1
            world.drain()
            world.check()
        signature = _signature(world)
        world.end()
        return Outcome(signature, world.held())

    return run


def _prepare_raw() -> Callable[[bytes], Outcome]:
    world = _World()
    fresh = _End(False, TO_PEER, TO_US)

    def run(data: bytes) -> Outcome:
        mode, rest = (data[0], data[1:]) if data else (0, b"")
        if not mode & 1:
            world.us = fresh
        step = (1, 13, 1 << 12, 200)[mode >> 6]
        for at in range(0, len(rest), step):
            world.us.feed(rest[at : at + step], world.now)
            assert not world.us.session.events() or world.us.dead is not None, "an unauthenticated byte made an event"
            if world.us.dead is not None:
                break
        missing = world.us.session.missing_bytes
        assert 0 <= missing <= RECORD_MOST + TAG
        outcome = Outcome(_signature(world))
        world.end()
        return outcome

    return run


# -- programs to begin with


def frame(kind: int, stream: int, body: bytes = b"", flags: int = 0) -> bytes:
    return bytes([FRAME]) + _FRAME.pack(kind, flags, stream, len(body)) + body


def call(which: int, stream: int, size: int = 0, op: int = CALL) -> bytes:
    return bytes([op, which]) + (size << 5 | stream).to_bytes(2, "big")


def bulk(stream: int, size: int) -> bytes:
    return bytes([BULK, stream]) + (size // 8).to_bytes(2, "big")


def _open(stream: int, kind: Kind, cls: int, protocol: str = "x/1") -> bytes:
    return frame(FrameType.OPEN, stream, encode(OpenBody(kind, protocol, cls, 1 << 17, b"meta")))


def _seeds() -> list[bytes]:
    exchange = bytes([EXCHANGE])
    chunk = frame(FrameType.CHUNK, 1, CHUNK_BODY.pack(1, 0, 4096, 0))
    chunks = _open(1, Kind.CHUNKS, 2) + call(8, 1) + call(0, 1)
    posted = _open(1, Kind.BYTE, 3) + call(0, 1) + call(9, 1, 100)
    no = RESET_HEAD.pack(12) + b"no"
    message, many = _open(1, Kind.MESSAGE, 1), bytes([REPEAT, 64])
    return [
        message + call(0, 1) + frame(FrameType.DATA, 1, b"hello") + call(2, 1) + frame(FrameType.DATA, 1, b"end", 1) + call(2, 1) * 2,
        _open(1, Kind.BYTE, 2) + call(0, 1) + bulk(1, 65536) * 3 + call(3, 1, 700) * 3 + exchange + call(5, 1, 9) + exchange,
        posted + bulk(1, 3000) + call(10, 1) + call(9, 1) + bulk(1, 800) + call(11, 1) + call(13, 1, 200),
        chunks + chunk + bulk(1, 4096) + chunk + bulk(1, 2048) + frame(FrameType.DATA, 1, b"", 1),
        chunks + call(6, 1) + chunk + bulk(1, 4096) + exchange,
        call(7, 1, 1) + exchange + frame(FrameType.ACCEPT, 2, encode(AcceptBody(1 << 20))) + call(4, 2, 90) + exchange,
        call(7, 0, 0) + frame(FrameType.ACCEPT, 2, encode(AcceptBody(1 << 17))) + call(4, 2, 9) + frame(FrameType.RESET, 2, no),
        call(7, 1, 1, PEER_CALL) + exchange + call(0, 1) + exchange + call(4, 1, 900, PEER_CALL) + exchange + call(3, 1, 900) + exchange,
        frame(FrameType.PING, 0, PING_BODY.pack(7, 0)) + many,
        call(14, 0) + exchange + frame(FrameType.PONG, 0, PONG_BODY.pack(1, 5, 5)) + many,
        frame(FrameType.CREDIT, 0, CREDIT_BODY.pack(1 << 30)) + many,
        message + frame(FrameType.CREDIT, 1, CREDIT_BODY.pack(1 << 30)) + frame(FrameType.CREDIT, 1, CREDIT_BODY.pack(5)),
        frame(FrameType.HELLO, 0, encode(replace(HELLO, revision=2, bulk_window=256 * KIB))) + many,
        frame(FrameType.REKEY, 0) + frame(FrameType.PING, 0, PING_BODY.pack(7, 0)) + frame(FrameType.REKEY, 0) + many,
        message + frame(FrameType.RESET, 1, RESET_HEAD.pack(12)) + frame(FrameType.DATA, 1, b"late") + many,
        frame(FrameType.GOAWAY, 0, GOAWAY_HEAD.pack(15, 0, 100) + b"bye") + message + exchange + bytes([TIME, 200]),
        call(15, 0, 3) + exchange + message + exchange + bytes([TIME, 200]),
        bytes([TIME, 24, EXCHANGE, TIME, 24, TIME, 80, TIME, 80]),
        b"".join(_open(1 + 2 * at, Kind(at % 3), 2) for at in range(12)),
        _open(1, Kind.MESSAGE, 1, "no/1") + frame(0x85, 9, b"later version", 0xFF) + frame(0x85, 0, b"", 1),
        bytes([RAW, 12]) + struct.pack(">IIBBH", 2**32 - 1, 1, FrameType.DATA, 0, 0),
        bytes([RAW, 5]) + bytes(5) + frame(FrameType.PING, 0, PING_BODY.pack(7, 0)),
        message + frame(FrameType.DATA, 1, b"x") + bytes([REPEAT, 255]) * 4,
    ]


def _raw_seeds() -> list[bytes]:
    def head(size: int, stream: int, kind: int, flags: int = 0) -> bytes:
        return struct.pack(">IIBBH", size, stream, kind, flags, 0)

    sizes = (0, 15, 16, 17, 36, 65552, 262160, 262161, 2**31 - 1, 2**32 - 1)
    heads = [head(size, stream, kind) for size in sizes for stream, kind in ((0, FrameType.PING), (1, FrameType.DATA))]
    records = [head(32, 0, FrameType.PING) + bytes(32), head(16, 0, 0x90) + bytes(16), head(20, 0, FrameType.HELLO) + bytes(20)]
    return [bytes([mode]) + data for mode in (0, 1, 64, 65, 192) for data in (*records, *heads[:: 1 + mode // 64])]


SESSION = Target("session", _prepare, (), _seeds)
SESSION_RAW = Target("session_raw", _prepare_raw, (), _raw_seeds)
