"""Two joined sessions under everything that hypothesis thinks of: any split, any delay, any order of calls.

What must hold, whatever happens: each stream delivers a prefix of what was sent, in order; the receiver never gets more than
it granted (its window raises otherwise); after everybody has read, whatever was waiting moves; at the end every gauge is 0.
"""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from tests.wire.joined import End, Joined
from wire.chunks import OutChunk
from wire.connection import ConnectionState
from wire.errors import Code
from wire.events import Kind, StreamOpened, StreamWasReset
from wire.limits import DEFAULT_LIMITS

# Small windows, so that running out of credit is the rule and not the exception.
LIMITS = replace(
    DEFAULT_LIMITS,
    message_max_bytes=4096,
    seed_list_max_bytes=4096,
    envelope_max_bytes=4096,
    hello_frame_max_bytes=4096,
    open_meta_max_bytes=1024,
    peer_record_max_bytes=1024,
    stream_window_control_bytes=4096,
    connection_window_guest_bytes=24_000,
    connection_window_lane_bytes=4 << 20,
    record_rekey_records=50,
)
CLASSES = {Kind.MESSAGE: (1, 2, 3, 4), Kind.BYTE: (1, 2, 3, 4), Kind.CHUNKS: (2, 3, 4)}


class Source:
    def __init__(self) -> None:
        self.waiting: list[tuple[int, OutChunk]] = []

    @property
    def order(self) -> int:
        return self.waiting[0][0] if self.waiting else 2**63 - 1

    def next_chunk(self) -> OutChunk | None:
        return self.waiting.pop(0)[1] if self.waiting else None


class Sink:
    def __init__(self) -> None:
        self.place_of: dict[int, bytearray] = {}
        self.got = b""

    def place(self, slot: int, index: int, length: int, flags: int) -> memoryview:
        self.place_of[index] = bytearray(length)
        return memoryview(self.place_of[index])

    def placed(self, slot: int, index: int) -> None:
        self.got += self.place_of.pop(index)


class Way:
    """One direction of one stream: what was given to `send` and what came out."""

    def __init__(self) -> None:
        self.sent = b""
        self.got = b""
        self.fin = False
        self.ended = False  # the reader saw the end


class Talk:
    """A stream, seen by the test."""

    def __init__(self, stream: int, kind: Kind, opener: End, acceptor: End) -> None:
        self.stream, self.kind, self.opener, self.acceptor = stream, kind, opener, acceptor
        self.accepted = False
        self.dead = False
        self.ways = {id(opener): Way(), id(acceptor): Way()}  # by sender
        self.source, self.sink = Source(), Sink()
        self.index = 0

    def other(self, end: End) -> End:
        return self.acceptor if end is self.opener else self.opener


class JoinedSessions(RuleBasedStateMachine):
    talks = Bundle("talks")

    @initialize(guest=st.booleans(), seed=st.integers(0, 2**32))
    def start(self, guest: bool, seed: int) -> None:
        self.joined = Joined(LIMITS, guest=guest)
        self.rng = random.Random(seed)
        self.all: list[Talk] = []
        self.by_id: dict[int, Talk] = {}

    # -- the pipe

    @rule(a=st.booleans(), budget=st.sampled_from((1, 100, 5000, 1 << 18)))
    def pull(self, a: bool, budget: int) -> None:
        self.joined.move(self.joined.a if a else self.joined.b, budget)

    @rule(a=st.booleans(), size=st.one_of(st.none(), st.integers(0, 100), st.integers(0, 100_000)))
    def arrive(self, a: bool, size: int | None) -> None:
        end = self.joined.a if a else self.joined.b
        self.joined.deliver(end, size)
        self.notice(end)

    @rule(seconds=st.floats(0.0, 0.5))
    def wait(self, seconds: float) -> None:
        self.joined.now += seconds
        for end in (self.joined.a, self.joined.b):
            end.session.tick(self.joined.now)

    def notice(self, end: End) -> None:
        for event in end.take(StreamWasReset):
            if (talk := self.by_id.get(event.stream)) is not None:
                talk.dead = True
        for event in end.take(StreamOpened):
            talk = self.by_id[event.stream]
            assert (event.kind, talk.acceptor) == (talk.kind, end)
            if not talk.dead:
                if talk.kind is Kind.CHUNKS:
                    end.session.attach_sink(talk.stream, talk.sink)
                end.session.accept(talk.stream)
                talk.accepted = True

    # -- the application

    @rule(target=talks, a=st.booleans(), kind=st.sampled_from(Kind), which=st.integers(0, 3), order=st.integers(0, 5))
    def open(self, a: bool, kind: Kind, which: int, order: int) -> Talk:
        opener, acceptor = (self.joined.a, self.joined.b) if a else (self.joined.b, self.joined.a)
        self.joined.now += opener.session.open_delay_s(self.joined.now) + 1e-9
        cls = CLASSES[kind][which % len(CLASSES[kind])]
        if opener.session.gauges()["streams_outbound"] >= LIMITS.inbound_backlog_max:
            return self.rng.choice(self.all)
        stream = opener.session.open_stream(kind, "x/1", cls, order=order, now=self.joined.now)
        talk = Talk(stream, kind, opener, acceptor)
        if kind is Kind.CHUNKS:
            opener.session.attach_source(stream, talk.source, cls)
        self.all.append(talk)
        self.by_id[stream] = talk
        return talk

    @rule(talk=talks, opener=st.booleans(), size=st.integers(1, 20_000), fin=st.integers(0, 9))
    def send(self, talk: Talk, opener: bool, size: int, fin: int) -> None:
        end = talk.opener if opener else talk.acceptor
        way = talk.ways[id(end)]
        if talk.dead or way.fin or (not opener and not talk.accepted) or (talk.kind is Kind.CHUNKS and not opener):
            return
        session = end.session
        if talk.kind is Kind.CHUNKS:
            data = self.rng.randbytes(size)
            talk.source.waiting.append((self.rng.randrange(5), OutChunk(1, talk.index, memoryview(data), 0)))
            talk.index += 1
            session.source_ready(talk.stream)
            way.sent += data
            return
        if talk.kind is Kind.MESSAGE:
            size = min(size, LIMITS.message_max_bytes)
        room = session.sendable(talk.stream, size)
        if talk.kind is Kind.BYTE:
            size = min(size, room)
        if not 0 < size <= room:
            return
        data = self.rng.randbytes(size)
        session.send(talk.stream, data, fin=fin == 0, now=self.joined.now)
        way.sent += data
        way.fin = fin == 0

    @rule(talk=talks, opener=st.booleans(), size=st.integers(1, 30_000), how=st.sampled_from(("bytes", "into", "post", "unpost")))
    def read(self, talk: Talk, opener: bool, size: int, how: str) -> None:
        end = talk.opener if opener else talk.acceptor
        if not talk.dead and (opener or talk.accepted):
            self.read_once(talk, end, size, how)

    def read_once(self, talk: Talk, end: End, size: int, how: str) -> bool:
        """Read once; True if there was something."""
        way = talk.ways[id(talk.other(end))]
        session, stream = end.session, talk.stream
        if way.ended or talk.kind is Kind.CHUNKS:
            return False
        if talk.kind is Kind.MESSAGE:
            data = session.read_message(stream)
        elif how == "bytes":
            data = session.read_bytes(stream, size)
        else:
            buffer = memoryview(bytearray(size))
            count = session.read_into(stream, buffer)
            if count is None and how != "into":
                session.post(stream, buffer, at_least=min(size, self.rng.randint(1, size)))
                self.joined.move(self.joined.other(end))
                self.joined.deliver(end, self.rng.randrange(50_000))
                self.notice(end)
                if talk.dead:
                    return False
                if how == "unpost":
                    session.unpost(stream)
                    return False
                count = session.take_posted(stream)
                way.got += buffer[:count]
                return count > 0
            data = None if count is None else bytes(buffer[:count])
        if data is None:
            return False
        way.got += data
        if not data:
            assert way.fin and way.got == way.sent, "the end came before the data"
            way.ended = True
        return bool(data)

    @rule(talk=consumes(talks), opener=st.booleans())
    def reset(self, talk: Talk, opener: bool) -> None:
        end = talk.opener if opener else talk.acceptor
        if talk.dead or (not opener and not talk.accepted):
            return
        # Both ends may have finished, and this one have forgotten the stream.
        if all(way.fin for way in talk.ways.values()) and talk.ways[id(talk.other(end))].ended:
            return
        end.session.reset(talk.stream, Code.CANCELLED)
        talk.dead = True

    # -- what must hold

    @precondition(lambda self: hasattr(self, "joined"))
    @invariant()
    def order_is_kept_and_credit_is_never_exceeded(self) -> None:
        for end in (self.joined.a, self.joined.b):
            session = end.session
            assert session.state is not ConnectionState.CLOSED
            connection = session._conn
            assert connection.recv.unread <= connection.recv.size
            assert connection.send.sent <= connection.send.limit
            for stream in connection.streams.values():
                assert stream.recv.arrived <= stream.recv.limit and stream.send.sent <= stream.send.limit
        for talk in self.all:
            if talk.kind is Kind.CHUNKS:
                assert talk.ways[id(talk.opener)].sent.startswith(talk.sink.got)
            for way in talk.ways.values():
                assert way.sent.startswith(way.got)

    def teardown(self) -> None:
        if not hasattr(self, "joined"):
            return
        joined = self.joined
        # Everybody reads: nobody may be left waiting.
        for _ in range(1000):
            joined.settle()
            self.notice(joined.a)
            self.notice(joined.b)
            moved = False
            for talk in self.all:
                for end in (talk.opener, talk.acceptor):
                    while not talk.dead and self.read_once(talk, end, 1 << 20, "bytes"):
                        moved = True
            if not moved and not joined.a.session.wants_write and not joined.b.session.wants_write:
                break
        for talk in self.all:
            if talk.dead:
                continue
            for end in (talk.opener, talk.acceptor):
                way = talk.ways[id(end)]
                got = talk.sink.got if talk.kind is Kind.CHUNKS and end is talk.opener else way.got
                assert got == way.sent, "something that was sent has not come"
                if way.fin or talk.kind is Kind.CHUNKS or (end is talk.acceptor and not talk.accepted):
                    continue
                # And whoever wants to send can: the credit of everything that was read is back.
                least = LIMITS.message_max_bytes if talk.kind is Kind.MESSAGE else end.session._conn.sure_bytes
                assert end.session.sendable(talk.stream, least) >= least
                assert not end.session._conn.streams[talk.stream].need
        for talk in self.all:
            for end in (talk.opener, talk.acceptor):
                if talk.stream in end.session._conn.streams:
                    end.session.reset(talk.stream, Code.CANCELLED)
                    joined.settle()
        joined.settle()
        for end in (joined.a, joined.b):
            assert not any(end.session.gauges().values()), end.session.gauges()
        assert joined.a.session._conn.send.sent == joined.b.session._conn.recv.arrived
        assert joined.b.session._conn.send.sent == joined.a.session._conn.recv.arrived


TestJoinedSessions = JoinedSessions.TestCase
# 200 x 50 = 10,000 steps.
TestJoinedSessions.settings = settings(
    max_examples=200, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
