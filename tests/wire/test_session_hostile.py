"""Peers that lie: every (state, frame) pair, hostile lengths, floods, and memory that stays flat under all of it."""

from __future__ import annotations

import random
import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.wire.joined import HEADER, HELLO, Puppet
from wire.connection import CONNECTION, ConnectionInput, ConnectionState
from wire.errors import Code, LocalProtocolError, RemoteProtocolError
from wire.events import Event, Kind, Readable, SessionClosed, StreamOpened, StreamWasReset
from wire.limits import DEFAULT_LIMITS
from wire.messages import AcceptBody, OpenBody, encode
from wire.records import FLAG_FIN, FrameType
from wire.replies import CREDIT_BODY, GOAWAY_HEAD, PING_BODY, PONG_BODY, RESET_HEAD
from wire.streams import LIVE, TRANSITIONS, Input, State

KIB = 1 << 10


def refused(peer: Puppet) -> Code:
    """The session has closed with a reason, for us and for the peer; returns it."""
    (closed,) = peer.end.take(SessionClosed)
    frames = peer.frames()
    assert [kind for kind, _, _ in frames if kind != FrameType.HELLO] == [FrameType.GOAWAY]
    (code, _, _) = GOAWAY_HEAD.unpack_from(frames[-1][2])
    assert code == closed.error.code
    assert peer.session.state is ConnectionState.CLOSED
    assert not any(peer.session.gauges().values())
    assert peer.frames() == [] and not peer.session.wants_write
    assert peer.feed(b"anything") == 8, "what comes later is ignored"
    return Code(code)


# -- the tables


def in_state(state: State, kind: Kind = Kind.BYTE) -> tuple[Puppet, int]:
    """A session with one stream in `state`, and its id."""
    peer = Puppet()
    session = peer.session
    if state in (State.OPENING, State.OPENING_LOCAL):
        stream = session.open_stream(kind, "x/1", 2, now=peer.now)
    elif state in (State.PENDING, State.PENDING_REMOTE):
        stream = 1
        peer.open(stream, kind, 2)
    else:
        stream = session.open_stream(kind, "x/1", 2, now=peer.now)
        peer.frames()
        peer.say(FrameType.ACCEPT, stream, encode(AcceptBody(1 << 30)))
    if state in (State.OPENING_LOCAL, State.HALF_LOCAL):
        session.send(stream, b"", fin=True, now=peer.now)
    if state in (State.PENDING_REMOTE, State.HALF_REMOTE):
        peer.say(FrameType.DATA, stream, b"", FLAG_FIN)
    if state is State.CLOSED:
        session.reset(stream, Code.CANCELLED)
    peer.frames()
    peer.end.seen.clear()
    if state is State.CLOSED:
        assert stream not in session._conn.streams
    elif state is not State.IDLE:
        assert session._conn.streams[stream].state is state
    return peer, stream


# What a frame means for the automaton; two inputs = both must be allowed, one after the other.
INPUTS: dict[str, tuple[int, bytes, int, tuple[Input, ...]]] = {
    "OPEN": (FrameType.OPEN, encode(OpenBody(1, "x/1", 2, 0, b"")), 0, (Input.RECV_OPEN,)),
    "ACCEPT": (FrameType.ACCEPT, encode(AcceptBody(1 << 30)), 0, (Input.RECV_ACCEPT,)),
    "DATA": (FrameType.DATA, b"x", 0, (Input.RECV_DATA,)),
    "DATA+FIN": (FrameType.DATA, b"x", FLAG_FIN, (Input.RECV_DATA, Input.RECV_FIN)),
    "FIN": (FrameType.DATA, b"", FLAG_FIN, (Input.RECV_DATA, Input.RECV_FIN)),
    "RESET": (FrameType.RESET, RESET_HEAD.pack(Code.CANCELLED), 0, (Input.RECV_RESET,)),
    "CREDIT": (FrameType.CREDIT, CREDIT_BODY.pack(1 << 40), 0, (Input.RECV_CREDIT,)),
}


@pytest.mark.parametrize("state", [*LIVE, State.CLOSED])
@pytest.mark.parametrize("frame", INPUTS)
def test_every_frame_in_every_state_of_a_stream_does_what_the_table_says(state: State, frame: str) -> None:
    peer, stream = in_state(state)
    kind, body, flags, inputs = INPUTS[frame]
    expected: State | None = state
    for symbol in inputs:
        expected = TRANSITIONS.get((expected, symbol)) if expected is not None else None
    if expected is None:
        with pytest.raises(RemoteProtocolError):
            peer.say(kind, stream, body, flags)
        assert refused(peer) is Code.PROTOCOL
        return
    peer.say(kind, stream, body, flags)
    assert peer.session.state is ConnectionState.OPEN
    live = peer.session._conn.streams.get(stream)
    assert (State.CLOSED if live is None else live.state) is expected
    if state is State.CLOSED:
        assert not peer.end.seen, "a closed stream makes no events"


@pytest.mark.parametrize("state", LIVE)
@pytest.mark.parametrize("call", ["accept", "refuse", "send", "fin", "read", "reset"])
def test_every_call_in_every_state_is_allowed_as_the_table_says_or_changes_nothing(state: State, call: str) -> None:
    peer, stream = in_state(state)
    session = peer.session
    symbol = {
        "accept": Input.SEND_ACCEPT,
        "refuse": Input.SEND_RESET,
        "send": Input.SEND_DATA,
        "fin": Input.SEND_FIN,
        "read": Input.READ,
        "reset": Input.SEND_RESET,
    }[call]
    calls = {
        "accept": lambda: session.accept(stream),
        "refuse": lambda: session.refuse(stream, Code.REFUSED),
        "send": lambda: session.send(stream, b"x", now=peer.now),
        "fin": lambda: session.send(stream, b"", fin=True, now=peer.now),
        "read": lambda: session.read_bytes(stream, 10),
        "reset": lambda: session.reset(stream, Code.CANCELLED),
    }
    allowed = (state, symbol) in TRANSITIONS
    if call == "refuse":
        allowed = state in (State.PENDING, State.PENDING_REMOTE)
    if allowed:
        calls[call]()
        return
    before = session.gauges(), session._conn.streams[stream].state
    with pytest.raises(LocalProtocolError):
        calls[call]()
    assert (session.gauges(), session._conn.streams[stream].state) == before
    assert peer.frames() == []


CONNECTION_FRAMES: dict[str, tuple[int, int, bytes, ConnectionInput]] = {
    "HELLO": (FrameType.HELLO, 0, encode(replace(HELLO, revision=9)), ConnectionInput.RECV_HELLO),
    "PING": (FrameType.PING, 0, PING_BODY.pack(1, 0), ConnectionInput.RECV_FRAME),
    "PONG": (FrameType.PONG, 0, PONG_BODY.pack(1, 0, 0), ConnectionInput.RECV_FRAME),
    "CREDIT": (FrameType.CREDIT, 0, CREDIT_BODY.pack(1 << 40), ConnectionInput.RECV_FRAME),
    "GOAWAY": (FrameType.GOAWAY, 0, GOAWAY_HEAD.pack(Code.SHUTDOWN, 0, 0), ConnectionInput.RECV_GOAWAY),
    "REKEY": (FrameType.REKEY, 0, b"", ConnectionInput.RECV_FRAME),
    "OPEN": (FrameType.OPEN, 3, encode(OpenBody(1, "x/1", 2, 0, b"")), ConnectionInput.RECV_FRAME),
    "DATA": (FrameType.DATA, 1, b"x", ConnectionInput.RECV_FRAME),
    "IGNORED": (0xF0, 12345, b"later version", ConnectionInput.RECV_FRAME),
}


@pytest.mark.parametrize("state", [ConnectionState.HELLO, ConnectionState.OPEN, ConnectionState.DRAINING])
@pytest.mark.parametrize("frame", CONNECTION_FRAMES)
def test_every_frame_in_every_state_of_the_connection_does_what_the_table_says(state: ConnectionState, frame: str) -> None:
    peer = Puppet(hello=state is not ConnectionState.HELLO)
    if state is not ConnectionState.HELLO:
        peer.open(1, Kind.BYTE, 2)
    if state is ConnectionState.DRAINING:
        peer.session.goaway(Code.SHUTDOWN, now=peer.now)
    peer.frames()
    assert peer.session.state is state
    kind, stream, body, symbol = CONNECTION_FRAMES[frame]
    expected = CONNECTION.get((state, symbol))
    if expected is None:
        with pytest.raises(RemoteProtocolError):
            peer.say(kind, stream, body)
        assert refused(peer) is Code.PROTOCOL
        return
    peer.say(kind, stream, body)
    assert peer.session.state is expected
    if frame == "OPEN" and state is ConnectionState.DRAINING:
        assert peer.frames() == [(FrameType.RESET, 3, RESET_HEAD.pack(Code.SHUTDOWN))]


# -- single violations


def violation(name: str, peer: Puppet) -> None:
    session = peer.session
    if name == "OPEN of our parity":
        peer.open(2)
    elif name == "OPEN that skips an id":
        peer.open(3)
    elif name == "OPEN of stream 1 again":
        peer.open(1)
        peer.open(1)
    elif name == "OPEN of class 0":
        peer.say(FrameType.OPEN, 1, b"\x95\x00\xa3x/1\x00\x00\xc4\x00")
    elif name == "OPEN of an unknown kind":
        peer.say(FrameType.OPEN, 1, b"\x95\x03\xa3x/1\x01\x00\xc4\x00")
    elif name == "chunks of class 1":
        peer.open(1, Kind.CHUNKS, 1)
    elif name == "OPEN that is no msgpack":
        peer.say(FrameType.OPEN, 1, b"\xc1\xc1")
    elif name == "DATA for a stream above the next":
        peer.say(FrameType.DATA, 1, b"x")
    elif name == "DATA for a stream of ours that was never opened":
        peer.say(FrameType.DATA, 2, b"x")
    elif name == "RESET of a stream that was never opened":
        peer.say(FrameType.RESET, 7, RESET_HEAD.pack(1))
    elif name == "credit that falls":
        peer.say(FrameType.CREDIT, 0, CREDIT_BODY.pack(1 << 20))
        peer.say(FrameType.CREDIT, 0, CREDIT_BODY.pack((1 << 20) - 1))
    elif name == "a message over the credit":
        peer.open(1, Kind.MESSAGE)
        for _ in range(3):
            peer.say(FrameType.DATA, 1, bytes(64 * KIB))
    elif name == "bytes over the stream's credit":
        peer.open(1, Kind.BYTE, 1)
        peer.say(FrameType.DATA, 1, bytes(64 * KIB))
        peer.say(FrameType.DATA, 1, b"x")
    elif name == "bytes over the connection's credit":
        for stream in range(1, 20, 2):
            peer.open(stream, Kind.BYTE, 3)
            for _ in range(16):
                peer.say(FrameType.DATA, stream, bytes(256 * KIB))
    elif name == "a message of more than 64 KiB":
        peer.open(1, Kind.MESSAGE)
        peer.say(FrameType.DATA, 1, bytes(64 * KIB + 1))
    elif name == "chunk data without CHUNK":
        chunks(peer)
        peer.say(FrameType.DATA, 1, b"x")
    elif name == "more data than the CHUNK said":
        chunks(peer)
        peer.say(FrameType.CHUNK, 1, bytes(11) + b"\x05" + bytes(4))
        peer.say(FrameType.DATA, 1, b"123456")
    elif name == "a CHUNK inside a chunk":
        chunks(peer)
        peer.say(FrameType.CHUNK, 1, bytes(11) + b"\x05" + bytes(4))
        peer.say(FrameType.DATA, 1, b"1234")
        peer.say(FrameType.CHUNK, 1, bytes(11) + b"\x05" + bytes(4))
    elif name == "FIN inside a chunk":
        chunks(peer)
        peer.say(FrameType.CHUNK, 1, bytes(11) + b"\x05" + bytes(4))
        peer.say(FrameType.DATA, 1, b"1234", FLAG_FIN)
    elif name == "an empty chunk":
        chunks(peer)
        peer.say(FrameType.CHUNK, 1, bytes(16))
    elif name == "a chunk of 4 GiB":
        chunks(peer)
        peer.say(FrameType.CHUNK, 1, bytes(8) + b"\xff" * 4 + bytes(4))
    elif name == "CREDIT on a chunk stream":
        chunks(peer)
        peer.say(FrameType.CREDIT, 1, CREDIT_BODY.pack(1 << 40))
    elif name == "CHUNK on a byte stream":
        peer.open(1, Kind.BYTE, 2)
        session.accept(1)
        peer.say(FrameType.CHUNK, 1, bytes(11) + b"\x05" + bytes(4))
    elif name == "HELLO with the same revision":
        peer.say(FrameType.HELLO, 0, encode(HELLO))
    elif name == "HELLO that changes the bulk window":
        peer.say(FrameType.HELLO, 0, encode(replace(HELLO, revision=2, bulk_window=1 << 20)))
    elif name == "HELLO with a tiny bulk window":
        peer.say(FrameType.HELLO, 0, b"\x98\x02\xc4\x08bootboot\xa0\x90\xc4\x00\xa0\x01\x10")
    elif name == "a record type of nobody":
        peer.say(0x33, 0, b"x")
    elif name == "flags that do not exist":
        peer.say(FrameType.PING, 0, PING_BODY.pack(1, 0), 2)
    else:
        raise AssertionError(name)


def chunks(peer: Puppet) -> None:
    class Sink:
        def place(self, slot: int, index: int, length: int, flags: int) -> memoryview:
            return memoryview(bytearray(length))

        def placed(self, slot: int, index: int) -> None:
            pass

    peer.open(1, Kind.CHUNKS, 2)
    peer.session.attach_sink(1, Sink())
    peer.session.accept(1)
    peer.frames()


def names_in(function: object) -> list[str]:
    return [c for c in function.__code__.co_consts if isinstance(c, str) and " " in c]


@pytest.mark.parametrize("name", names_in(violation))
def test_a_violation_closes_the_connection_with_a_reason(name: str) -> None:
    peer = Puppet()
    peer.frames()
    with pytest.raises(RemoteProtocolError) as caught:
        violation(name, peer)
    expected = Code.TOO_LARGE if name == "a message of more than 64 KiB" else Code.PROTOCOL
    assert caught.value.code is expected and not caught.value.local
    assert refused(peer) is expected


def test_a_bad_tag_ends_the_connection_and_delivers_nothing() -> None:
    peer = Puppet()
    peer.open(1)
    good = peer.record(FrameType.DATA, 1, b"good")
    bad = bytearray(peer.record(FrameType.DATA, 1, b"evil"))
    bad[-1] ^= 1
    peer.end.seen.clear()
    peer.frames()
    with pytest.raises(RemoteProtocolError) as caught:
        peer.feed(good + bad)
    assert caught.value.code is Code.AUTH
    assert peer.end.take(Readable) == [Readable(1)], "what verified before it was delivered"
    assert refused(peer) is Code.AUTH


def test_a_bad_tag_never_touches_what_was_verified() -> None:
    peer = Puppet()
    peer.open(1, Kind.BYTE, 2)
    peer.session.accept(1)
    peer.say(FrameType.DATA, 1, b"a" * 1000)
    view = peer.session.read_bytes(1, 10)
    peer.say(FrameType.DATA, 1, b"b" * 1000)
    rest = peer.session.read_bytes(1, 10_000)
    record = bytearray(peer.record(FrameType.DATA, 1, b"!" * 1000))
    record[-1] ^= 1
    with pytest.raises(RemoteProtocolError):
        peer.feed(record)
    assert bytes(view) + bytes(rest) == b"a" * 1000 + b"b" * 1000


# -- floods


def flood(peer: Puppet, per_s: float, seconds: float, say) -> None:
    for number in range(int(per_s * seconds)):
        peer.now += 1 / per_s
        say(number)
        if number % 100 == 0:
            peer.frames()
    peer.frames()


def rapid_reset(peer: Puppet):
    def say(number: int) -> None:
        peer.open(2 * number + 1)
        peer.say(FrameType.RESET, 2 * number + 1, RESET_HEAD.pack(Code.CANCELLED))

    return say


FLOODS = {
    "PING": (lambda peer: lambda n: peer.say(FrameType.PING, 0, PING_BODY.pack(n, 0)), DEFAULT_LIMITS.pings_per_s),
    "PONG": (lambda peer: lambda n: peer.say(FrameType.PONG, 0, PONG_BODY.pack(n, 0, 0)), DEFAULT_LIMITS.pings_per_s),
    "CREDIT": (lambda peer: lambda n: peer.say(FrameType.CREDIT, 0, CREDIT_BODY.pack(1 << 40)), DEFAULT_LIMITS.credits_per_s),
    "HELLO": (lambda peer: lambda n: peer.say(FrameType.HELLO, 0, encode(replace(HELLO, revision=2 + n))), 0.2),
    "OPEN and RESET": (rapid_reset, DEFAULT_LIMITS.resets_per_s),
    "RESET of closed streams": (
        lambda peer: lambda n: peer.say(FrameType.RESET, 1, RESET_HEAD.pack(Code.CANCELLED)),
        DEFAULT_LIMITS.resets_per_s,
    ),
}


@pytest.mark.parametrize("name", FLOODS)
def test_wire_10_a_flood_is_cut_as_excessive_and_the_allowed_rate_is_not(name: str) -> None:
    """WIRE-10."""
    make, per_s = FLOODS[name]
    peer = Puppet()
    if name == "RESET of closed streams":
        peer.open(1)
        peer.session.reset(1, Code.CANCELLED)
    else:
        peer.now += 60.0
    flood(peer, per_s, 20.0, make(peer))
    assert peer.session.state is ConnectionState.OPEN

    peer = Puppet()
    if name == "RESET of closed streams":
        peer.open(1)
        peer.session.reset(1, Code.CANCELLED)
    with pytest.raises(RemoteProtocolError) as caught:
        flood(peer, 10_000.0, 1.0, make(peer))
    assert caught.value.code is Code.EXCESSIVE


def test_opens_faster_than_allowed_are_cut() -> None:
    peer = Puppet(serves=lambda protocol, guest: Code.PROTOCOL_UNKNOWN)
    with pytest.raises(RemoteProtocolError) as caught:
        flood(peer, 10_000.0, 1.0, lambda n: peer.open(2 * n + 1))
    assert caught.value.code is Code.EXCESSIVE


def test_wire_13_answers_are_bounded_while_our_output_is_blocked() -> None:
    """WIRE-13: nothing is pulled, yet the peer goes on asking, at a rate that is allowed."""
    peer = Puppet(serves=lambda protocol, guest: Code.PROTOCOL_UNKNOWN)
    number = 0
    with pytest.raises(RemoteProtocolError) as caught:
        while True:
            peer.now += 0.006
            peer.open(2 * number + 1)
            if number % 10 == 0:
                peer.say(FrameType.PING, 0, PING_BODY.pack(number, 0))
            number += 1
            assert peer.session.gauges()["queued_frames"] <= DEFAULT_LIMITS.replies_waiting_max
    assert caught.value.code is Code.EXCESSIVE
    assert refused(peer) is Code.EXCESSIVE


def test_pongs_coalesce_to_the_newest_and_credits_to_the_highest() -> None:
    peer = Puppet()
    peer.open(1, Kind.BYTE, 3)
    peer.session.accept(1)
    peer.frames()
    for number in range(50):
        peer.say(FrameType.PING, 0, PING_BODY.pack(number, 0))
        peer.say(FrameType.DATA, 1, bytes(200 * KIB))
        peer.say(FrameType.DATA, 1, bytes(200 * KIB))
        while peer.session.read_bytes(1, 1 << 20) is not None:
            pass
    frames = peer.frames()
    assert [PONG_BODY.unpack(body)[0] for kind, _, body in frames if kind == FrameType.PONG] == [46, 47, 48, 49]
    credits = {stream: CREDIT_BODY.unpack(body)[0] for kind, stream, body in frames if kind == FrameType.CREDIT}
    assert len([kind for kind, _, _ in frames if kind == FrameType.CREDIT]) == 2
    assert credits[1] > 20_000_000 and credits[0] > 20_000_000


# -- memory


def growth(peer: Puppet, act) -> int:
    """Most traced memory above the start, in bytes, while `act` runs."""
    peer.frames()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        act()
        _, peak = tracemalloc.get_traced_memory()
        return peak - before
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("length", [0, 1, 15, 2**16, 2**31 - 1, 2**32 - 1])
@pytest.mark.parametrize("kind", [*FrameType, 0x00, 0x07, 0x7F, 0x80, 0xFF])
def test_wire_6_a_hostile_length_allocates_nothing(kind: int, length: int) -> None:
    """WIRE-6."""
    peer = Puppet()
    header = HEADER.pack(length, 0 if kind < 0x10 else 1, kind, 0, 0)
    data = memoryview(header + bytes(100))

    def act() -> None:
        for _ in range(3):
            try:
                peer.session.receive(data, peer.now)
            except RemoteProtocolError:
                return

    assert growth(peer, act) < 64 * KIB


def test_messages_of_one_byte_cost_about_their_credit() -> None:
    """Without a cost for each message, 256 streams hold sixteen million objects."""
    peer = Puppet()
    peer.open(1, Kind.MESSAGE)
    record = [peer.record(FrameType.DATA, 1, b"x") for _ in range(3000)]

    def act() -> None:
        with pytest.raises(RemoteProtocolError):
            for one in record:
                peer.feed(one)

    assert growth(peer, act) < 300 * KIB


def test_bytes_one_at_a_time_cost_at_most_twice_their_number() -> None:
    peer = Puppet()
    peer.open(1, Kind.BYTE, 1)
    records = [peer.record(FrameType.DATA, 1, b"x") for _ in range(60_000)]

    def act() -> None:
        for one in records:
            peer.session.receive(memoryview(one), peer.now)

    assert growth(peer, act) < 2 * 64 * KIB


def test_records_that_do_not_fit_into_the_rest_of_a_segment_waste_at_most_half() -> None:
    peer = Puppet()
    peer.open(1, Kind.BYTE, 3)
    records = [peer.record(FrameType.DATA, 1, bytes(size)) for _ in range(60) for size in (8 * KIB + 1, 16 * KIB, 1)]
    total = 60 * (8 * KIB + 1 + 16 * KIB + 1)

    def act() -> None:
        for one in records:
            peer.session.receive(memoryview(one), peer.now)

    assert growth(peer, act) < 2 * total


def test_ten_thousand_refused_streams_leave_memory_flat() -> None:
    peer = Puppet(serves=lambda protocol, guest: Code.NOT_MEMBER)
    body = encode(OpenBody(2, "x/1", 2, 0, b""))
    rounds = []
    for first in range(1, 20_000, 200):
        streams = range(first, first + 200, 2)
        rounds.append(b"".join(peer.record(FrameType.OPEN, n, body) + peer.record(FrameType.DATA, n, bytes(10)) for n in streams))

    def act(first: int, end: int) -> None:
        for one in rounds[first:end]:
            peer.now += 1.0
            peer.session.receive(memoryview(one), peer.now)
            peer.session.events()
            peer.session.pull(1 << 16, peer.now)
            peer.end.sealer.sealed.clear()

    # The first quarter fills what is bounded: the table of streams just refused, the interpreter's list of free tuples.
    act(0, 25)
    assert growth(peer, lambda: act(25, 100)) < 128 * KIB
    assert not any(peer.session.gauges().values())


# -- anything at all


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 60))
def test_random_frames_end_in_a_violation_or_in_nothing(seed: int, count: int) -> None:
    """Well-sealed nonsense: only RemoteProtocolError comes out, and every event is of a known kind."""
    rng = random.Random(seed)
    peer = Puppet()
    bodies = [b"", b"x", bytes(8), PING_BODY.pack(1, 2), PONG_BODY.pack(1, 2, 3), GOAWAY_HEAD.pack(99, 1, 2) + b"\xff" * 50]
    bodies += [encode(OpenBody(kind, "x/1", cls, 1 << 20, b"m")) for kind in range(3) for cls in (1, 3)]
    bodies += [encode(AcceptBody(1 << 22)), encode(replace(HELLO, revision=7)), RESET_HEAD.pack(12), CREDIT_BODY.pack(2**64 - 1)]
    for _ in range(3):
        peer.session.open_stream(rng.choice(list(Kind)[:2]), "x/1", 2, now=peer.now)
    opened = []
    try:
        for _ in range(count):
            kind = rng.choice([*FrameType, 0x80, 0xFF, rng.randrange(256)])
            body = rng.choice(bodies) if rng.random() < 0.8 else rng.randbytes(rng.randrange(100))
            stream = rng.choice((0, 1, 2, 3, 4, 5, rng.randrange(2**32)))
            peer.say(kind, stream, body, rng.choice((0, 0, 0, 1, rng.randrange(256))))
            if rng.random() < 0.3:
                peer.frames()
            for event in peer.end.take(StreamOpened):
                opened.append(event.stream)
                if event.kind is not Kind.CHUNKS:
                    peer.session.accept(event.stream)
            for event in peer.end.take(StreamWasReset):
                assert event.code in Code
    except RemoteProtocolError:
        assert peer.session.state is ConnectionState.CLOSED
        assert not any(value for name, value in peer.session.gauges().items() if name != "queued_frames")
    assert all(isinstance(event, Event) for event in peer.end.seen)
    assert len(opened) == len(set(opened))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes_never_raise_anything_but_a_violation(data: bytes) -> None:
    peer = Puppet(hello=False)
    try:
        assert peer.feed(data) <= len(data)
    except RemoteProtocolError:
        assert refused(peer) in (Code.PROTOCOL, Code.TOO_LARGE, Code.AUTH)
