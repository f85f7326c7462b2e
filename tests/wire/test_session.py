"""One session against another: streams, ends, credit, chunks, pings, priorities on the wire, and the virtual day."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace

import pytest

from tests.wire.joined import HELLO, End, Joined, Puppet
from wire.chunks import OutChunk
from wire.connection import ConnectionState
from wire.errors import Code, ConnectionLost, LimitExceeded, LocalProtocolError, RemoteProtocolError
from wire.events import (
    GoAwayReceived,
    HelloReceived,
    Kind,
    Readable,
    RttMeasured,
    SessionClosed,
    StreamAccepted,
    StreamFinished,
    StreamOpened,
    StreamWasReset,
    Writable,
)
from wire.limits import DEFAULT_LIMITS
from wire.messages import AcceptBody, encode
from wire.records import FLAG_FIN, FrameType
from wire.replies import CREDIT_BODY, PONG_BODY

MIB = 1 << 20


def pair(kind: Kind = Kind.MESSAGE, cls: int = 1, **kwargs) -> tuple[Joined, int]:
    """Two sessions and a stream that a opened and b accepted."""
    joined = Joined(**kwargs)
    joined.settle()
    stream = joined.a.session.open_stream(kind, "x/1", cls, now=joined.now)
    joined.settle()
    joined.b.session.accept(stream)
    joined.settle()
    joined.a.seen.clear()
    joined.b.seen.clear()
    return joined, stream


def assert_idle(joined: Joined) -> None:
    joined.settle()
    for end in (joined.a, joined.b):
        assert not any(end.session.gauges().values()), end.session.gauges()


# -- opening


def test_an_opener_may_send_before_it_is_accepted_and_costs_no_extra_round_trip() -> None:
    joined = Joined()
    stream = joined.a.session.open_stream(Kind.MESSAGE, "px/1", 1, meta=b"why", now=joined.now)
    joined.a.session.send(stream, b"question", fin=True, now=joined.now)
    joined.move(joined.a)
    joined.move(joined.b)
    joined.deliver(joined.b)  # one flight
    assert joined.b.take(HelloReceived)
    assert joined.b.take(StreamOpened) == [StreamOpened(stream, Kind.MESSAGE, "px/1", 1, b"why")]
    joined.b.session.accept(stream)
    assert joined.b.session.read_message(stream) == b"question"
    assert joined.b.session.read_message(stream) == b""
    joined.b.session.send(stream, b"answer", fin=True, now=joined.now)
    joined.settle()
    assert joined.a.take(StreamAccepted) == [StreamAccepted(stream)]
    assert joined.a.session.read_message(stream) == b"answer"
    assert joined.a.session.read_message(stream) == b""
    assert_idle(joined)


def test_ids_are_odd_for_the_initiator_and_ascend() -> None:
    joined = Joined()
    joined.settle()
    ours = [joined.a.session.open_stream(Kind.BYTE, "x/1", 3, now=joined.now) for _ in range(3)]
    theirs = [joined.b.session.open_stream(Kind.BYTE, "x/1", 3, now=joined.now) for _ in range(3)]
    assert (ours, theirs) == ([1, 3, 5], [2, 4, 6])
    joined.settle()
    assert [event.stream for event in joined.b.take(StreamOpened)] == ours


@pytest.mark.parametrize("code", [Code.PROTOCOL_UNKNOWN, Code.NOT_MEMBER, Code.REFUSED])
def test_a_protocol_that_is_not_served_is_reset_with_the_code(code: Code) -> None:
    asked = []

    def serves(protocol: str, guest: bool) -> Code | None:
        asked.append((protocol, guest))
        return code

    joined = Joined(serves=serves, guest=True)
    stream = joined.a.session.open_stream(Kind.MESSAGE, "members/1", 1, now=joined.now)
    joined.a.session.send(stream, b"hello?", now=joined.now)
    joined.settle()
    assert asked == [("members/1", True)]
    assert joined.a.take(StreamWasReset) == [StreamWasReset(stream, code, "")]
    assert not joined.b.take(StreamOpened)
    assert_idle(joined)


def test_the_backlog_is_bounded_and_what_is_over_it_is_refused() -> None:
    joined = Joined()
    joined.settle()
    most = DEFAULT_LIMITS.inbound_backlog_max
    streams = [joined.a.session.open_stream(Kind.MESSAGE, "x/1", 1, now=joined.now) for _ in range(most + 3)]
    joined.settle()
    assert joined.b.session.gauges()["streams_pending"] == most
    assert [event.stream for event in joined.a.take(StreamWasReset)] == streams[most:]
    joined.b.session.refuse(streams[0], Code.REFUSED)
    joined.settle()
    assert joined.a.take(StreamWasReset) == [StreamWasReset(streams[0], Code.REFUSED, "")]
    for stream in streams[1:most]:
        joined.b.session.accept(stream)
        joined.b.session.reset(stream, Code.CANCELLED, "done")
    assert_idle(joined)


def test_we_never_open_more_than_the_peer_keeps_or_faster_than_it_allows() -> None:
    joined = Joined(max_streams=3)
    joined.settle()
    session = joined.a.session
    streams = [session.open_stream(Kind.MESSAGE, "x/1", 1, now=joined.now) for _ in range(3)]
    with pytest.raises(LimitExceeded):
        session.open_stream(Kind.MESSAGE, "x/1", 1, now=joined.now)
    opened = 3
    session.reset(streams.pop(), Code.CANCELLED)
    while session.open_delay_s(joined.now) == 0.0:
        session.reset(session.open_stream(Kind.MESSAGE, "x/1", 1, now=joined.now), Code.CANCELLED)
        opened += 1
    with pytest.raises(LimitExceeded) as caught:
        session.open_stream(Kind.MESSAGE, "x/1", 1, now=joined.now)
    assert caught.value.code is Code.RATE_LIMITED
    assert 50 < opened < DEFAULT_LIMITS.opens_burst
    joined.settle()
    assert joined.b.session.state is ConnectionState.OPEN, "the peer does not take that for a flood"
    joined.now += session.open_delay_s(joined.now) + 1e-6
    session.open_stream(Kind.MESSAGE, "x/1", 1, now=joined.now)


# -- the end of a stream


def test_wire_12_data_before_fin_are_delivered_and_after_reset_never() -> None:
    """WIRE-12."""
    joined, stream = pair()
    joined.a.session.send(stream, b"one", now=joined.now)
    joined.a.session.send(stream, b"two", fin=True, now=joined.now)
    joined.settle()
    assert joined.b.take(StreamFinished) == [StreamFinished(stream)]
    assert [joined.b.session.read_message(stream) for _ in range(3)] == [b"one", b"two", b""]
    joined.b.session.send(stream, b"unread", now=joined.now)
    joined.settle()
    joined.b.session.reset(stream, Code.CANCELLED, "changed my mind\n")
    joined.settle()
    assert joined.a.take(StreamWasReset) == [StreamWasReset(stream, Code.CANCELLED, "changed my mind\\x0a")]
    with pytest.raises(LocalProtocolError):
        joined.a.session.read_message(stream)
    assert_idle(joined)


def test_data_then_reset_before_anything_left_sends_nothing_but_open_and_reset() -> None:
    joined = Joined()
    joined.settle()
    stream = joined.a.session.open_stream(Kind.BYTE, "x/1", 3, now=joined.now)
    joined.a.session.send(stream, bytes(50_000), now=joined.now)
    joined.a.session.reset(stream, Code.CANCELLED)
    joined.settle()
    assert joined.b.take(StreamWasReset)
    assert (stream, FrameType.DATA) not in [(number, kind) for number, kind, _, _ in joined.a.sealer.sealed]
    assert_idle(joined)


def test_resets_that_cross_and_data_under_way_leave_nothing_behind() -> None:
    joined, stream = pair(Kind.BYTE, 3)
    before = joined.a.session._conn.send.limit
    joined.a.session.send(stream, bytes(100_000), now=joined.now)
    joined.move(joined.a)  # under way
    joined.b.session.reset(stream, Code.CANCELLED)
    joined.a.session.send(stream, bytes(100_000), now=joined.now)
    joined.a.session.reset(stream, Code.CANCELLED)
    assert_idle(joined)
    assert joined.a.session._conn.send.sent == joined.b.session._conn.recv.arrived, "both ends have counted the same bytes"
    # And what was dropped came back as credit.
    big = joined.a.session.open_stream(Kind.BYTE, "x/1", 3, now=joined.now)
    joined.settle()
    joined.b.session.accept(big)
    for _ in range(8):
        joined.settle()
        joined.a.session.send(big, bytes(joined.a.session.sendable(big)), now=joined.now)
        joined.settle()
        while joined.b.session.read_bytes(big, 1 << 20) is not None:
            pass
    joined.settle()
    assert joined.a.session._conn.send.limit > before


def test_half_close_keeps_the_other_direction() -> None:
    joined, stream = pair(Kind.BYTE, 2)
    joined.b.session.send(stream, b"", fin=True, now=joined.now)
    joined.settle()
    assert joined.a.session.read_bytes(stream, 10) == b""
    with pytest.raises(LocalProtocolError):
        joined.b.session.send(stream, b"more", now=joined.now)
    joined.a.session.send(stream, b"still here", fin=True, now=joined.now)
    joined.settle()
    assert bytes(joined.b.session.read_bytes(stream, 100)) == b"still here"
    assert joined.b.session.read_bytes(stream, 100) == b""
    assert_idle(joined)


def test_wire_8_ten_thousand_cycles_of_open_close_reset_and_refusal_leave_every_gauge_at_zero() -> None:
    """WIRE-8."""
    rng = random.Random(8)
    joined = Joined(serves=lambda protocol, guest: Code.PROTOCOL_UNKNOWN if protocol == "no/1" else None)
    joined.settle()
    for cycle in range(10_000):
        joined.now += 0.02
        one, two = (joined.a, joined.b) if rng.random() < 0.5 else (joined.b, joined.a)
        end = rng.randrange(5)
        kind = rng.choice((Kind.MESSAGE, Kind.BYTE))
        stream = one.session.open_stream(kind, "no/1" if end == 0 else "x/1", rng.randint(1, 4), now=joined.now)
        one.session.send(stream, bytes(rng.randint(1, 100)), fin=end == 1, now=joined.now)
        if end == 2:
            one.session.reset(stream, Code.CANCELLED)
        joined.settle()
        if end == 1:
            two.session.accept(stream)
            read = two.session.read_message if kind is Kind.MESSAGE else lambda s, t=two: t.session.read_bytes(s, 1000)
            while read(stream) != b"":
                pass
            two.session.send(stream, b"", fin=True, now=joined.now)
            joined.settle()
            assert (one.session.read_message(stream) if kind is Kind.MESSAGE else one.session.read_bytes(stream, 1)) == b""
        elif end == 3:
            two.session.refuse(stream, Code.REFUSED)
        elif end == 4:
            two.session.accept(stream)
            two.session.reset(stream, Code.CANCELLED)
            one.session.reset(stream, Code.CANCELLED)
        if cycle % 500 == 0 or cycle == 9_999:
            assert_idle(joined)
        joined.a.seen.clear()
        joined.b.seen.clear()
    joined.a.session.open_stream(Kind.MESSAGE, "x/1", 1, now=joined.now)


# -- credit


def fill(joined: Joined, stream: int, end: End) -> int:
    """Send on a byte stream as much as goes without the reader."""
    sent = 0
    while (room := end.session.sendable(stream, 1)) > 0:
        end.session.send(stream, bytes(room), now=joined.now)
        sent += room
        joined.settle()
    return sent


def test_a_stream_stops_at_its_window_and_goes_on_when_the_reader_has_read() -> None:
    joined, stream = pair(Kind.BYTE, 3)
    assert fill(joined, stream, joined.a) == DEFAULT_LIMITS.stream_window_bulk_bytes
    with pytest.raises(LocalProtocolError):
        joined.a.session.send(stream, b"x", now=joined.now)
    joined.a.seen.clear()
    read = 0
    while read < DEFAULT_LIMITS.stream_window_bulk_bytes // 4:
        assert not joined.a.take(Writable)
        read += len(joined.b.session.read_bytes(stream, 100_000))
        joined.settle()
    assert joined.a.take(Writable) == [Writable(stream)]
    assert joined.a.session.sendable(stream) == read


def test_hello_may_lower_the_bulk_window() -> None:
    joined, stream = pair(Kind.BYTE, 3, bulk_window=64 << 10)
    assert fill(joined, stream, joined.a) == 64 << 10


def test_before_the_peers_hello_a_bulk_stream_uses_the_smallest_window() -> None:
    joined = Joined()
    stream = joined.a.session.open_stream(Kind.BYTE, "x/1", 3, now=joined.now)
    assert joined.a.session.sendable(stream) == DEFAULT_LIMITS.stream_window_min_bytes
    joined.settle()
    # The connection's first credit and the peer's window are known now; OPEN is not even accepted.
    assert joined.a.session.sendable(stream) == DEFAULT_LIMITS.stream_window_bulk_bytes


def test_a_guest_gets_a_small_connection_window() -> None:
    joined, stream = pair(Kind.BYTE, 3, guest=True)
    assert fill(joined, stream, joined.a) == DEFAULT_LIMITS.connection_window_guest_bytes


def test_bulk_leaves_credit_to_message_streams_where_there_are_any() -> None:
    joined, stream = pair(Kind.BYTE, 3, guest=True)
    joined.a.session.open_stream(Kind.MESSAGE, "x/1", 1, now=joined.now)
    kept = DEFAULT_LIMITS.message_max_bytes
    assert fill(joined, stream, joined.a) == DEFAULT_LIMITS.connection_window_guest_bytes - kept


def test_one_stream_that_is_not_read_does_not_stop_another() -> None:
    joined, stuck = pair(Kind.BYTE, 3)
    fill(joined, stuck, joined.a)
    other = joined.a.session.open_stream(Kind.MESSAGE, "x/1", 1, now=joined.now)
    joined.a.session.send(other, b"through", now=joined.now)
    joined.settle()
    joined.b.session.accept(other)
    assert joined.b.session.read_message(other) == b"through"


def test_credit_that_a_reset_gives_back_wakes_who_waits_for_it() -> None:
    joined, first = pair(Kind.BYTE, 3, guest=True)
    second = joined.a.session.open_stream(Kind.BYTE, "x/1", 3, now=joined.now)
    joined.settle()
    joined.a.session.send(first, bytes(joined.a.session.sendable(first)), now=joined.now)
    assert joined.a.session.sendable(second, 100) == 0
    assert not joined.a.session.events()
    joined.a.session.reset(first, Code.CANCELLED)
    assert joined.a.session.events() == [Writable(second)]
    assert joined.a.session.sendable(second, 100) >= 100


def test_what_is_queued_is_bounded_whatever_credit_the_peer_gives() -> None:
    peer = Puppet()
    peer.say(FrameType.CREDIT, 0, CREDIT_BODY.pack(1 << 40))
    stream = peer.session.open_stream(Kind.BYTE, "x/1", 3, now=peer.now)
    peer.frames()
    peer.say(FrameType.ACCEPT, stream, encode(AcceptBody(1 << 40)))
    peer.end.seen.clear()
    room = peer.session.sendable(stream)
    assert room == DEFAULT_LIMITS.stream_window_bulk_bytes
    peer.session.send(stream, bytes(room), now=peer.now)
    assert peer.session.sendable(stream, 1) == 0
    peer.session.pull(1, peer.now)
    assert peer.session.events() == [Writable(stream)]


def test_a_largest_message_goes_whenever_all_was_read() -> None:
    joined, stream = pair()
    for size in (1, 100, 16_000, DEFAULT_LIMITS.message_max_bytes, 3, DEFAULT_LIMITS.message_max_bytes):
        assert joined.a.session.sendable(stream, size) >= size
        joined.a.session.send(stream, bytes(size), now=joined.now)
        joined.settle()
        assert len(joined.b.session.read_message(stream)) == size
        joined.settle()
    with pytest.raises(LocalProtocolError):
        joined.a.session.send(stream, bytes(DEFAULT_LIMITS.message_max_bytes + 1), now=joined.now)


def test_a_send_that_is_refused_leaves_everything_as_it_was() -> None:
    joined, stream = pair()
    before = joined.a.session.gauges(), joined.a.session.sendable(stream)
    for data, kwargs in ((b"", {}), (bytes(70_000), {"fin": True})):
        with pytest.raises(LocalProtocolError):
            joined.a.session.send(stream, data, now=joined.now, **kwargs)
    assert (joined.a.session.gauges(), joined.a.session.sendable(stream)) == before
    assert not joined.a.session.wants_write


# -- bytes


def test_bulk_is_sealed_from_the_callers_memory_and_decrypted_into_the_readers() -> None:
    joined, stream = pair(Kind.BYTE, 3)
    data = random.Random(1).randbytes(300_000)
    target = bytearray(len(data))
    assert joined.b.session.read_into(stream, memoryview(target)) is None
    joined.b.session.post(stream, memoryview(target), at_least=len(target))
    joined.a.session.send(stream, memoryview(data), now=joined.now)
    assert joined.a.session.unsent(stream) == len(data)
    joined.settle()
    assert joined.a.take(Writable) == [Writable(stream)] and joined.a.session.unsent(stream) == 0
    assert joined.b.take(Readable) == [Readable(stream)], "once, when it is whole"
    assert joined.b.session.take_posted(stream) == len(data)
    assert target == data
    assert joined.b.session.gauges()["unread_bytes"] == 0


def test_what_does_not_fit_into_the_posted_buffer_waits_behind_it_in_order() -> None:
    joined, stream = pair(Kind.BYTE, 3)
    data = random.Random(2).randbytes(200_000)
    target = memoryview(bytearray(70_000))
    joined.b.session.post(stream, target)
    joined.a.session.send(stream, data, fin=True, now=joined.now)
    joined.settle()
    got = bytes(target[: joined.b.session.take_posted(stream)])
    assert got
    while count := joined.b.session.read_into(stream, target):
        got += target[:count]
    assert count == 0 and got == data


def test_a_reader_that_is_cancelled_loses_nothing_and_credit_is_not_given_twice() -> None:
    joined, stream = pair(Kind.BYTE, 3)
    target = memoryview(bytearray(100_000))
    for round_number in range(100):
        data = random.Random(round_number).randbytes(60_000)
        joined.b.session.post(stream, target, at_least=100_000)
        joined.a.session.send(stream, data[:50_000], now=joined.now)
        joined.settle()
        assert not joined.b.take(Readable)
        joined.b.session.unpost(stream)
        assert joined.b.session.gauges()["unread_bytes"] == 50_000
        joined.a.session.send(stream, data[50_000:], now=joined.now)
        joined.settle()
        got = b""
        while (piece := joined.b.session.read_bytes(stream, 7_000)) is not None:
            got += piece
        assert got == data
        joined.settle()
    assert joined.a.session.sendable(stream) <= DEFAULT_LIMITS.stream_window_bulk_bytes


def test_small_writes_become_few_records_and_may_reuse_their_buffer() -> None:
    joined, stream = pair(Kind.BYTE, 3)
    joined.a.sealer.sealed.clear()
    buffer = bytearray(100)
    expected = b""
    for number in range(300):
        buffer[:] = bytes([number % 256]) * 100
        expected += buffer
        joined.a.session.send(stream, buffer, now=joined.now)
    joined.settle()
    assert sum(kind == FrameType.DATA for _, kind, _, _ in joined.a.sealer.sealed) <= 3
    got = b""
    while (piece := joined.b.session.read_bytes(stream, 1000)) is not None:
        got += piece
    assert got == expected


def test_a_sender_that_is_cancelled_may_reuse_its_buffer_at_once() -> None:
    joined, stream = pair(Kind.BYTE, 3)
    data = bytearray(random.Random(3).randbytes(200_000))
    original = bytes(data)
    joined.a.session.send(stream, memoryview(data), now=joined.now)
    joined.move(joined.a)
    joined.a.session.copy_unsent(stream)
    data[:] = bytes(len(data))
    joined.settle()
    got = b""
    while (piece := joined.b.session.read_bytes(stream, MIB)) is not None:
        got += piece
    assert got == original


# -- chunks


class Source:
    """Chunks of several tensors; the oldest first."""

    def __init__(self) -> None:
        self.waiting: list[tuple[int, OutChunk]] = []

    @property
    def order(self) -> int:
        return min((order for order, _ in self.waiting), default=2**63 - 1)

    def next_chunk(self) -> OutChunk | None:
        if not self.waiting:
            return None
        best = min(range(len(self.waiting)), key=lambda i: self.waiting[i][0])
        return self.waiting.pop(best)[1]


class Sink:
    def __init__(self) -> None:
        self.places: dict[tuple[int, int], bytearray] = {}
        self.done: list[tuple[int, int]] = []

    def place(self, slot: int, index: int, length: int, flags: int) -> memoryview:
        if slot == 666:
            raise RemoteProtocolError(Code.PROTOCOL, "never posted")
        place = self.places[slot, index] = bytearray(length)
        return memoryview(place)

    def placed(self, slot: int, index: int) -> None:
        self.done.append((slot, index))


def chunk_pair() -> tuple[Joined, int, Source, Sink]:
    joined = Joined()
    joined.settle()
    stream, source, sink = joined.a.session.open_stream(Kind.CHUNKS, "t/1", 2, now=joined.now), Source(), Sink()
    joined.a.session.attach_source(stream, source, 2)
    joined.settle()
    return joined, stream, source, sink


def chunk(slot: int, index: int, size: int) -> OutChunk:
    return OutChunk(slot, index, memoryview(random.Random(slot * 1000 + index).randbytes(size)), 0)


def test_chunks_are_placed_and_announced_only_when_whole() -> None:
    joined, stream, source, sink = chunk_pair()
    chunks = [chunk(7, 0, 262_144), chunk(7, 1, 262_144), chunk(7, 2, 5)]
    source.waiting = [(0, c) for c in chunks]
    joined.a.session.source_ready(stream)
    joined.settle()
    assert FrameType.CHUNK not in [kind for _, kind, _, _ in joined.a.sealer.sealed], "not before ACCEPT: the sink may be missing"
    with pytest.raises(LocalProtocolError):
        joined.b.session.accept(stream)
    joined.b.session.attach_sink(stream, sink)
    joined.b.session.accept(stream)
    seen_whole = []
    while joined.move(joined.b) or joined.move(joined.a) or joined.a.inbox or joined.b.inbox:
        joined.deliver(joined.a)
        while joined.b.inbox:
            before = len(joined.b.inbox)
            joined.deliver(joined.b, 70_000)
            if len(joined.b.inbox) == before:
                break
            seen_whole.append(list(sink.done))
    assert sink.done == [(7, 0), (7, 1), (7, 2)]
    assert [bytes(sink.places[7, i]) for i in range(3)] == [bytes(c.data) for c in chunks]
    assert not joined.b.session.gauges()["unread_bytes"] and not joined.a.session.gauges()["streams_ready"]
    joined.a.session.send(stream, b"", fin=True, now=joined.now)
    joined.settle()
    assert joined.b.take(StreamFinished) == [StreamFinished(stream)]
    joined.b.session.reset(stream, Code.CANCELLED)
    assert_idle(joined)


def test_a_chunk_stream_that_is_finished_before_it_is_accepted_says_so_once() -> None:
    """A lane takes over while the stream is opened: a FIN for its ACCEPT, too, would end the connection."""
    joined, stream, _, sink = chunk_pair()
    joined.a.session.send(stream, b"", fin=True, now=joined.now)
    joined.settle()
    joined.b.session.attach_sink(stream, sink)
    joined.b.session.accept(stream)
    joined.settle()
    assert joined.b.take(StreamFinished) == [StreamFinished(stream)]
    assert [flags for number, kind, flags, _ in joined.a.sealer.sealed if number == stream and kind == FrameType.DATA] == [FLAG_FIN]
    joined.b.session.reset(stream, Code.CANCELLED)
    joined.settle()
    assert_idle(joined)


def test_chunks_of_the_oldest_microbatch_go_first_across_channels() -> None:
    joined, first, source, sink = chunk_pair()
    second, other, other_sink = joined.a.session.open_stream(Kind.CHUNKS, "t/1", 2, now=joined.now), Source(), Sink()
    joined.a.session.attach_source(second, other, 2)
    joined.settle()
    for stream, place in ((first, sink), (second, other_sink)):
        joined.b.session.attach_sink(stream, place)
        joined.b.session.accept(stream)
    joined.settle()
    source.waiting = [(5, chunk(1, 0, 1000)), (9, chunk(1, 1, 1000))]
    other.waiting = [(7, chunk(2, 0, 1000)), (3, chunk(2, 1, 1000))]
    joined.a.session.source_ready(first)
    joined.a.session.source_ready(second)
    joined.a.sealer.sealed.clear()
    joined.settle()
    assert [stream for stream, kind, _, _ in joined.a.sealer.sealed if kind == FrameType.CHUNK] == [second, first, second, first]


def test_a_chunk_stream_that_is_reset_drops_what_is_under_way_and_counts_none_of_it() -> None:
    joined, stream, source, sink = chunk_pair()
    joined.b.session.attach_sink(stream, sink)
    joined.b.session.accept(stream)
    joined.settle()
    source.waiting = [(0, chunk(1, index, 262_144)) for index in range(20)]
    joined.a.session.source_ready(stream)
    joined.move(joined.a, MIB)
    joined.deliver(joined.b, 100_000)
    joined.b.session.reset(stream, Code.CANCELLED)
    joined.move(joined.a, MIB)
    joined.settle()
    assert joined.b.session._conn.recv.arrived == 0 and joined.a.session._conn.send.sent == 0
    assert_idle(joined)


def test_a_sink_that_refuses_ends_the_connection() -> None:
    joined, stream, source, sink = chunk_pair()
    joined.b.session.attach_sink(stream, sink)
    joined.b.session.accept(stream)
    joined.settle()
    source.waiting = [(0, chunk(666, 0, 1000))]
    joined.a.session.source_ready(stream)
    with pytest.raises(RemoteProtocolError):
        joined.settle()
    assert joined.b.session.state is ConnectionState.CLOSED


# -- the end of the connection


def test_goaway_lets_live_streams_finish_and_then_ends_cleanly() -> None:
    """WIRE-12."""
    joined, stream = pair()
    joined.b.session.goaway(Code.SHUTDOWN, retry_ms=2500, detail="restart", now=joined.now)
    crossing = joined.a.session.open_stream(Kind.MESSAGE, "x/1", 1, now=joined.now)
    joined.settle()
    assert joined.a.take(GoAwayReceived) == [GoAwayReceived(Code.SHUTDOWN, stream, 2500, "restart")]
    assert joined.a.take(StreamWasReset)[0].stream == crossing, "it may be tried elsewhere"
    with pytest.raises(LocalProtocolError):
        joined.a.session.open_stream(Kind.MESSAGE, "x/1", 1, now=joined.now)
    with pytest.raises(LocalProtocolError):
        joined.b.session.open_stream(Kind.MESSAGE, "x/1", 1, now=joined.now)
    joined.a.session.send(stream, b"last words", fin=True, now=joined.now)
    joined.settle()
    assert joined.b.session.read_message(stream) == b"last words"
    assert joined.b.session.read_message(stream) == b""
    joined.b.session.send(stream, b"bye", fin=True, now=joined.now)
    joined.settle()
    assert joined.a.session.read_message(stream) == b"bye" and joined.a.session.read_message(stream) == b""
    joined.settle()
    assert joined.a.session.state is joined.b.session.state is ConnectionState.CLOSED
    (closed,) = joined.a.take(SessionClosed)
    assert closed.error.code is Code.SHUTDOWN and closed.error.retry_after == 2.5 and not closed.error.local
    assert joined.b.take(SessionClosed) == [SessionClosed(None)]
    assert not any(joined.a.session.gauges().values())


def test_draining_ends_at_its_deadline() -> None:
    joined, _ = pair()
    joined.b.session.goaway(Code.SHUTDOWN, now=joined.now)
    joined.settle()
    joined.now += DEFAULT_LIMITS.draining_timeout_s
    assert joined.a.session.next_timer() <= joined.now
    joined.a.session.tick(joined.now)
    assert joined.a.session.state is ConnectionState.CLOSED


def test_an_end_without_goaway_is_a_lost_connection() -> None:
    """WIRE-7."""
    joined, stream = pair()
    joined.a.session.send(stream, b"unsent", now=joined.now)
    joined.b.session.send(stream, b"arrived and not read", now=joined.now)
    joined.settle()
    cause = ConnectionResetError("reset by peer")
    joined.a.session.receive_end(cause)
    (closed,) = [event for event in joined.a.session.events() if isinstance(event, SessionClosed)]
    assert isinstance(closed.error, ConnectionLost) and closed.error.cause is cause
    assert not any(joined.a.session.gauges().values())
    assert not joined.a.session.wants_write and joined.a.session.pull(1000, joined.now) == []
    assert joined.a.session.next_timer() is None


def test_an_end_after_goaway_is_clean() -> None:
    joined = Joined()
    joined.settle()
    joined.a.session.goaway(Code.IDLE, now=joined.now)
    joined.settle()
    joined.b.session.receive_end()
    joined.b.seen += joined.b.session.events()
    (closed,) = joined.b.take(SessionClosed)
    assert closed.error.code is Code.IDLE


def test_a_newer_hello_is_told_and_needs_a_higher_revision() -> None:
    joined = Joined()
    joined.settle()
    joined.b.take(HelloReceived)
    newer = replace(HELLO, revision=2, observed="/ip4/1.2.3.4/tcp/5")
    joined.a.session.update_hello(newer)
    joined.settle()
    assert joined.b.take(HelloReceived) == [HelloReceived(newer)]
    assert joined.b.session.peer_hello == newer
    for bad in (newer, replace(newer, revision=3, boot_id=b"another!"), replace(newer, revision=3, bulk_window=70_000)):
        with pytest.raises(LocalProtocolError):
            joined.a.session.update_hello(bad)


# -- pings


def test_rtt_leaves_out_what_the_peer_held_and_the_clock_offset_is_the_peers() -> None:
    peer = Puppet()
    peer.frames()
    for number, (way, hold) in enumerate(((0.040, 0.5), (0.020, 0.0), (0.030, 2.0))):
        peer.session.ping(peer.now)
        ((_, _, body),) = [frame for frame in peer.frames() if frame[0] == FrameType.PING]
        sent_wall_us = int.from_bytes(body[8:], "big")
        peer.now += 2 * way + hold
        peer_wall_us = sent_wall_us + int((way + hold + 7.5) * 1e6)  # its clock is 7.5 s ahead
        peer.say(FrameType.PONG, 0, body[:8] + PONG_BODY.pack(0, int(hold * 1e6), peer_wall_us)[8:])
        assert [event.rtt_s for event in peer.end.take(RttMeasured)] == [pytest.approx(2 * way, abs=1e-5)]
        assert peer.session.rtt.count == number + 1
    assert peer.session.rtt.minimum == pytest.approx(0.040, abs=1e-5)
    assert peer.session.rtt.median == pytest.approx(0.060, abs=1e-5)
    assert peer.session.clock_offset == pytest.approx(7.5, abs=1e-4)


def test_silence_is_pinged_at_5_and_10_s_and_ends_at_15() -> None:
    peer = Puppet()
    start = peer.now
    peer.frames()
    pings = []
    while peer.session.state is ConnectionState.OPEN:
        peer.now = peer.session.next_timer()
        peer.session.tick(peer.now)
        pings += [peer.now - start for kind, _, _ in peer.frames() if kind == FrameType.PING]
    assert pings == [5.0, 10.0]
    assert peer.now - start == 15.0
    (closed,) = peer.end.take(SessionClosed)
    assert isinstance(closed.error, ConnectionLost) and closed.error.code is Code.TIMEOUT


def test_any_record_counts_as_life() -> None:
    peer = Puppet()
    for _ in range(100):
        peer.now += 4.0
        peer.say(0x99, 0, b"ignored")
        peer.session.tick(peer.now)
    assert not [kind for kind, _, _ in peer.frames() if kind == FrameType.PING]
    assert peer.session.state is ConnectionState.OPEN


def test_a_ping_that_cannot_leave_is_queued_once_and_kills_nobody() -> None:
    peer = Puppet()
    peer.frames()
    for _ in range(100):
        peer.now += 5.0
        peer.session.tick(peer.now)
    assert peer.session.gauges()["queued_frames"] == 1
    assert peer.session.state is ConnectionState.OPEN, "a stuck writer has its own deadline"


def test_wire_11_a_default_sender_is_never_cut_in_a_virtual_day() -> None:
    """WIRE-11: idle hours, busy seconds, and pings held up in the network that arrive in one burst."""
    joined, stream = pair()
    rng = random.Random(11)
    end_of_day = joined.now + 86_400
    sent = 0
    while joined.now < end_of_day:
        joined.now = min(joined.a.session.next_timer(), joined.b.session.next_timer())
        joined.a.session.tick(joined.now)
        joined.b.session.tick(joined.now)
        if rng.random() < 0.003:  # busy: request and answer as fast as both can
            for _ in range(400):
                joined.now += 0.0005
                joined.a.session.send(stream, bytes(rng.choice((40, 9_000, 60_000))), now=joined.now)
                joined.settle()
                joined.b.session.send(stream, joined.b.session.read_message(stream), now=joined.now)
                joined.settle()
                joined.a.session.read_message(stream)
                sent += 1
        elif rng.random() < 0.02:  # the way to b stands still, almost as long as b bears silence
            for _ in range(18):
                joined.now += 0.5
                joined.a.session.ping(joined.now)  # many more than a timer would send
                joined.move(joined.a)
                joined.b.session.tick(joined.now)
                joined.move(joined.b)
                joined.deliver(joined.a)
                joined.a.session.tick(joined.now)
        joined.settle()
        joined.a.seen.clear()
        joined.b.seen.clear()
    assert sent > 10_000
    assert joined.a.session.state is joined.b.session.state is ConnectionState.OPEN


# -- on the wire


def test_wire_4_a_message_overtakes_everything_but_the_record_that_is_being_sent() -> None:
    """WIRE-4."""
    joined, bulk = pair(Kind.BYTE, 3)
    messages = joined.a.session.open_stream(Kind.MESSAGE, "x/1", 1, now=joined.now)
    joined.settle()
    joined.a.session.send(bulk, bytes(2 * MIB), now=joined.now)
    joined.move(joined.a, 1)
    joined.a.sealer.sealed.clear()
    joined.a.session.send(messages, b"urgent", now=joined.now)
    joined.move(joined.a, 1)
    assert joined.a.sealer.sealed[0][0] == messages


def test_the_record_size_follows_the_rate_of_the_socket() -> None:
    joined, stream = pair(Kind.BYTE, 3)
    assert joined.a.session.record_bytes == DEFAULT_LIMITS.record_plaintext_start_bytes

    def run(rate: float) -> int:
        for _ in range(60):
            room = joined.a.session.sendable(stream)
            if room:
                joined.a.session.send(stream, bytes(room), now=joined.now)
            joined.now += joined.move(joined.a) / rate
            joined.deliver(joined.b)
            while joined.b.session.read_bytes(stream, MIB) is not None:
                pass
            joined.move(joined.b)
            joined.deliver(joined.a)
        return joined.a.session.record_bytes

    assert run(1e9) == DEFAULT_LIMITS.record_plaintext_max_bytes
    assert run(25e6) == pytest.approx(125_000, rel=0.1)
    assert run(1e6) == DEFAULT_LIMITS.record_plaintext_min_bytes


def test_keys_change_at_the_limit_in_both_directions() -> None:
    joined, stream = pair(limits=replace(DEFAULT_LIMITS, record_rekey_records=16))
    for number in range(200):
        joined.a.session.send(stream, b"%d" % number, now=joined.now)
        joined.settle()
        assert joined.b.session.read_message(stream) == b"%d" % number
    assert joined.a.sealer.epoch > 10
    assert joined.a.sealer.sealed.count((0, FrameType.REKEY, 0, 0)) == joined.a.sealer.epoch


def test_pulled_bytes_are_about_the_budget_and_the_large_buffer_is_given_up() -> None:
    joined, stream = pair(Kind.BYTE, 3)
    joined.a.session.send(stream, bytes(3 * MIB), now=joined.now)
    while size := joined.move(joined.a, 200_000):
        assert size <= 200_000 + DEFAULT_LIMITS.record_plaintext_max_bytes + 100
    assert joined.a.session._out.has_large_buffer
    joined.now = joined.a.session.next_timer()
    joined.a.session.tick(joined.now)
    assert not joined.a.session._out.has_large_buffer


def test_wire_13_sixteen_mebibytes_are_echoed_on_32_streams_through_pipes_of_ten_kibibytes() -> None:
    """WIRE-13: both ends write much and read only what was granted; reading never waits for writing."""
    joined = Joined()
    joined.settle()
    rng = random.Random(13)
    data = {}
    for _ in range(32):
        stream = joined.a.session.open_stream(Kind.BYTE, "echo/1", 3, now=joined.now)
        joined.a.session.sendable(stream)
        data[stream] = rng.randbytes(MIB // 2)
    joined.settle()
    for stream in data:
        joined.b.session.accept(stream)
    left = {stream: memoryview(block) for stream, block in data.items()}
    owed: dict[int, deque[bytes]] = {stream: deque() for stream in data}
    echoed = {stream: bytearray() for stream in data}
    pipe = {id(joined.a): bytearray(), id(joined.b): bytearray()}  # sealed bytes that the 10 KiB pipe has not taken yet

    def step(end: End) -> int:
        other = joined.other(end)
        rest = pipe[id(end)]
        if not rest:
            for view in end.session.pull(4096, joined.now):
                rest += view
        taken = min(len(rest), 10_240 - len(other.inbox))
        other.inbox += rest[:taken]
        del rest[:taken]
        if end.inbox:
            # A link's read buffer holds what is not a whole record yet; only the pipe is small.
            held[id(end)] += end.inbox
            end.inbox.clear()
            used = end.session.receive(memoryview(bytes(held[id(end)])), joined.now)
            del held[id(end)][:used]
        end.session.events()
        return taken

    held = {id(joined.a): bytearray(), id(joined.b): bytearray()}
    done = 0
    for turn in range(200_000):
        joined.now += 0.0005
        if turn % 100 == 0:
            joined.a.session.ping(joined.now)
        for stream, view in left.items():
            if view and (room := joined.a.session.sendable(stream)):
                joined.a.session.send(stream, view[:room], now=joined.now)
                left[stream] = view[room:]
        step(joined.a)
        for stream, queue in owed.items():
            piece = joined.b.session.read_bytes(stream, MIB)
            if piece is not None:
                queue.append(bytes(piece))
            if queue and (room := joined.b.session.sendable(stream)):
                piece = queue.popleft()
                joined.b.session.send(stream, piece[:room], now=joined.now)
                if piece[room:]:
                    queue.appendleft(piece[room:])
        step(joined.b)
        for stream, got in echoed.items():
            if (piece := joined.a.session.read_bytes(stream, MIB)) is not None:
                got += piece
                done += len(piece)
        assert joined.a.session.gauges()["queued_frames"] < 100
        if done == 16 * MIB:
            break
    assert all(echoed[stream] == data[stream] for stream in data)
