"""Records in: from the bytes of the pipe to streams and events.

`receive` takes whole records off the front of what the link has read.  For each, the header chooses a destination, the record
is decrypted there, and only then does anything change that the peer could have made up.  (Credit is checked before: a header
that claims too much ends the connection whether it is true or forged.)

Never waits: everything that arrives is either covered by credit, a posted slot, or a bounded number of answers.  What an
answer costs is taken from a token bucket by kind; a peer that empties one is told EXCESSIVE.

Hot paths (DATA, CHUNK) are written out here, on purpose: a call costs as much as everything else that is done for a small message.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from .connection import FORGOTTEN_CHUNK_STREAMS, Connection, ConnectionInput, ConnectionState
from .errors import Code, LocalProtocolError, RemoteProtocolError, error_for, known_code
from .events import GoAwayReceived, HelloReceived, Kind, RttMeasured, StreamAccepted, StreamFinished, StreamOpened, StreamWasReset
from .flow import MESSAGE_OVERHEAD_BYTES, ReceiveWindow, SendWindow
from .messages import AcceptBody, OpenBody, SessionHello, decode
from .rates import Bucket
from .records import HEADER_BYTES, FrameType, Opener, frame_rules, parse_header
from .replies import CREDIT_BODY, GOAWAY_HEAD, PING_BODY, PONG_BODY, RESET_HEAD
from .streams import Input, State, Stream, move_remote

DATA, CHUNK = int(FrameType.DATA), int(FrameType.CHUNK)
CHUNK_BODY = struct.Struct(">IIII")
TAG_BYTES = 16
CREDITS_EARNED_MAX = 4096  # credits that sent bytes can save up: those of a 32 MiB window


class Inbound:
    """The receiving half of a session; `serves(protocol, guest)` says whether we serve a protocol (None) or why not (a code)."""

    __slots__ = (
        "_bulk_window", "_conn", "_credits", "_earned_at", "_guest", "_handlers", "_hellos", "_opener", "_opens", "_pings",
        "_resets", "_rules", "_scratch", "_serves", "missing",
    )  # fmt: skip

    def __init__(
        self,
        conn: Connection,
        opener: Opener,
        *,
        bulk_window: int,
        guest: bool,
        serves: Callable[[str, bool], Code | None],
        now: float,
    ) -> None:
        limits = conn.limits
        self._conn = conn
        self._opener = opener
        self._guest = guest
        self._serves = serves
        self._bulk_window = bulk_window
        self._rules = frame_rules(limits)
        self._scratch = memoryview(bytearray(limits.message_max_bytes))
        self._opens = Bucket(limits.opens_per_s, limits.opens_burst, now)
        self._resets = Bucket(limits.resets_per_s, limits.resets_burst, now)
        self._pings = Bucket(limits.pings_per_s, limits.pings_burst, now)
        self._credits = Bucket(limits.credits_per_s, limits.credits_burst + CREDITS_EARNED_MAX, now)
        self._credits.tokens = limits.credits_burst
        self._hellos = Bucket(1.0 / limits.hello_update_interval_s, limits.hello_update_burst, now)
        self._earned_at = 0
        self.missing = 0  # bytes that the record at the end of the last `receive` lacks, 0 if not even its header is here
        self._handlers: dict[int, Callable[[int, memoryview, float], None]] = {
            FrameType.PING: self._on_ping,
            FrameType.PONG: self._on_pong,
            FrameType.CREDIT: self._on_credit,
            FrameType.REKEY: self._on_rekey,
            FrameType.OPEN: self._on_open,
            FrameType.ACCEPT: self._on_accept,
            FrameType.RESET: self._on_reset,
        }

    def receive(self, data: memoryview, now: float) -> int:
        """Consume whole records at the front of `data`; returns the bytes consumed.  A violation is a RemoteProtocolError."""
        rules, streams, open_into, scratch = self._rules, self._conn.streams, self._opener.open_into, self._scratch
        conn = self._conn
        self.missing = 0
        at, end = 0, len(data)
        while end - at >= HEADER_BYTES:
            body_at = at + HEADER_BYTES
            header = data[at:body_at]
            size, number, kind, flags = parse_header(header, rules)
            stop = body_at + size
            if stop > end:
                self.missing = stop - end
                break
            body = data[body_at:stop]
            size -= TAG_BYTES
            at = stop
            if conn.state is ConnectionState.HELLO and kind in (DATA, CHUNK):
                raise RemoteProtocolError(Code.PROTOCOL, f"{FrameType(kind).name} before HELLO")
            if kind == DATA:
                stream = streams.get(number)
                if stream is None or stream.state is State.CLOSED:
                    self._drop(number, header, body, size)
                elif not stream.receiving:
                    move_remote(stream, Input.RECV_DATA)  # raises
                elif stream.kind is Kind.MESSAGE:
                    if size > len(scratch):
                        raise RemoteProtocolError(Code.TOO_LARGE, f"message of {size} bytes")
                    if size:
                        conn.recv.arrive(size)
                        stream.recv.arrive(size + MESSAGE_OVERHEAD_BYTES)
                        view = scratch[:size]
                        open_into(header, body, view)
                        messages = stream.messages
                        messages.append(bytes(view))
                        if len(messages) == 1:
                            conn.events.append(stream.readable)
                    else:
                        open_into(header, body, scratch[:0])
                    conn.bytes_in[stream.cls] += size
                    if flags:
                        self._finished(stream)
                else:
                    if stream.kind is Kind.BYTE:
                        self._on_bytes(stream, header, body, size)
                    else:
                        self._on_chunk_data(stream, header, body, size)
                    conn.bytes_in[stream.cls] += size
                    if flags:
                        self._finished(stream)
            elif kind == CHUNK:
                open_into(header, body, scratch[:size])
                conn.bytes_in[0] += size
                self._on_chunk(number, scratch[:size])
            else:
                self._on_frame(number, kind, header, body, size, now)
            conn.last_in = now
            if conn.state is ConnectionState.CLOSED:
                break
        return at

    # -- data

    def _on_bytes(self, stream: Stream, header: memoryview, body: memoryview, size: int) -> None:
        conn = self._conn
        conn.recv.arrive(size)
        stream.recv.arrive(size)
        quiet = stream.has_unread or stream.posted_filled >= stream.least
        self._opener.open_into(header, body, stream.destination(size))
        if stream.commit(size):
            # A waiting reader has it: that is as good as read.
            if stream.recv.read(size):
                conn.renew(stream)
            conn.consumed(size)
            if not quiet and stream.posted_filled >= stream.least:
                conn.events.append(stream.readable)
        elif size and not quiet:
            conn.events.append(stream.readable)

    def _on_chunk_data(self, stream: Stream, header: memoryview, body: memoryview, size: int) -> None:
        place = stream.arriving
        slot, index, filled = stream.filled
        if size > (0 if place is None else len(place) - filled):
            raise RemoteProtocolError(Code.PROTOCOL, f"{size} bytes of data on stream {stream.id} without a CHUNK for them")
        if place is None:
            self._opener.open_into(header, body, self._scratch[:0])
            return
        self._opener.open_into(header, body, place[filled : filled + size])
        filled += size
        stream.filled = slot, index, filled
        if filled == len(place):
            stream.arriving = None
            if stream.sink is not None:
                stream.sink.placed(slot, index)

    def _finished(self, stream: Stream) -> None:
        if stream.arriving is not None:
            raise RemoteProtocolError(Code.PROTOCOL, f"FIN of stream {stream.id} inside a chunk")
        quiet = stream.has_unread
        move_remote(stream, Input.RECV_FIN)
        stream.fin_received = True
        self._conn.events.append(StreamFinished(stream.id))
        if not quiet:
            self._conn.events.append(stream.readable)
        if stream.kind is Kind.CHUNKS:  # nobody reads a chunk stream: its end is all there was to read
            stream.eof_read = True
            self._conn.forget_if_done(stream)

    def _drop(self, number: int, header: memoryview, body: memoryview, size: int) -> None:
        """DATA of a stream that is closed: counted, thrown away, its credit returned at once."""
        conn = self._conn
        self._check_closed(number)
        if number not in conn.forgotten_chunks:
            conn.recv.arrive(size)
        scratch = self._scratch if size <= len(self._scratch) else memoryview(bytearray(size))
        self._opener.open_into(header, body, scratch[:size])
        if number not in conn.forgotten_chunks:
            conn.consumed(size)

    def _check_closed(self, number: int) -> None:
        conn = self._conn
        own = conn.is_own(number)
        if number >= (conn.next_own if own else conn.next_peer):
            raise RemoteProtocolError(Code.PROTOCOL, f"frame for stream {number}, which was never opened")

    # -- frames

    def _on_frame(self, number: int, kind: int, header: memoryview, body: memoryview, size: int, now: float) -> None:
        conn = self._conn
        if size > len(self._scratch):  # only types that we ignore may be as long as a bulk record
            self._opener.open_into(header, body, memoryview(bytearray(size)))
            return
        plain = self._scratch[:size]
        self._opener.open_into(header, body, plain)
        conn.bytes_in[0] += size
        if kind == FrameType.HELLO:
            self._on_hello(plain, now)
            return
        if kind == FrameType.GOAWAY:
            self._on_goaway(plain, now)
            return
        if not conn.move(ConnectionInput.RECV_FRAME):
            raise RemoteProtocolError(Code.PROTOCOL, f"frame of type {kind:#04x} before HELLO")
        handler = self._handlers.get(kind)
        if handler is not None:
            handler(number, plain, now)
            if len(conn.replies) > conn.limits.replies_waiting_max:
                raise RemoteProtocolError(Code.EXCESSIVE, "more answers are due than a peer may ask for")

    def _on_hello(self, body: memoryview, now: float) -> None:
        conn = self._conn
        if not self._hellos.take(now):
            raise RemoteProtocolError(Code.EXCESSIVE, "HELLO too often")
        hello = decode(body, SessionHello)
        known = conn.hello
        if known is not None and hello.revision <= known.revision:
            raise RemoteProtocolError(Code.PROTOCOL, f"HELLO revision {hello.revision} after {known.revision}")
        if hello.bulk_window < conn.limits.stream_window_min_bytes:
            raise RemoteProtocolError(Code.PROTOCOL, f"bulk window of {hello.bulk_window} bytes")
        if known is not None and (hello.boot_id, hello.bulk_window) != (known.boot_id, known.bulk_window):
            raise RemoteProtocolError(Code.PROTOCOL, "a later HELLO changes what is fixed for the connection")
        if not conn.move(ConnectionInput.RECV_HELLO):
            raise RemoteProtocolError(Code.PROTOCOL, "HELLO not expected")
        conn.hello = hello
        conn.events.append(HelloReceived(hello))
        if known is None:
            # Streams that were opened before the peer's windows were known.
            for stream in conn.streams.values():
                size, _ = conn.window_for(stream.kind, stream.cls, hello.bulk_window)
                if size > stream.send.limit:
                    stream.send.raise_to(size)
                    conn.wake_if_writable(stream)

    def _on_ping(self, _number: int, body: memoryview, now: float) -> None:
        if not self._pings.take(now):
            raise RemoteProtocolError(Code.EXCESSIVE, "PING too often")
        self._conn.replies.add_pong(PING_BODY.unpack(body)[0], now)

    def _on_pong(self, _number: int, body: memoryview, now: float) -> None:
        token, hold_us, wall_us = PONG_BODY.unpack(body)
        rtt_s = self._conn.rtt.answered(token, hold_us, wall_us, now)
        if rtt_s is not None:
            self._conn.events.append(RttMeasured(rtt_s))
        elif not self._pings.take(now):
            raise RemoteProtocolError(Code.EXCESSIVE, "PONG without PING too often")

    def _on_credit(self, number: int, body: memoryview, now: float) -> None:
        conn = self._conn
        sent = sum(conn.bytes_out)
        self._credits.earn((sent - self._earned_at) / conn.limits.credits_free_bytes)
        self._earned_at = sent
        if not self._credits.take(now):
            raise RemoteProtocolError(Code.EXCESSIVE, "CREDIT too often")
        (limit,) = CREDIT_BODY.unpack(body)
        if number == 0:
            if conn.send.raise_to(limit):
                conn.wake_writable()
            return
        stream = conn.streams.get(number)
        if stream is None:
            self._check_closed(number)
            return
        move_remote(stream, Input.RECV_CREDIT)
        if stream.kind is Kind.CHUNKS:
            raise RemoteProtocolError(Code.PROTOCOL, f"CREDIT on chunk stream {number}")
        if stream.send.raise_to(limit):
            conn.wake_if_writable(stream)

    def _on_rekey(self, _number: int, _body: memoryview, _now: float) -> None:
        self._opener.rekey()

    def _on_open(self, number: int, body: memoryview, now: float) -> None:
        conn = self._conn
        if not self._opens.take(now):
            raise RemoteProtocolError(Code.EXCESSIVE, "OPEN too often")
        if number != conn.next_peer:
            raise RemoteProtocolError(Code.PROTOCOL, f"OPEN of stream {number}, {conn.next_peer} was due")
        opened = decode(body, OpenBody)
        try:
            kind = Kind(opened.kind)
        except ValueError:
            raise RemoteProtocolError(Code.PROTOCOL, f"unknown kind of stream {opened.kind}") from None
        if not 1 <= opened.cls <= 4 or (kind is Kind.CHUNKS and opened.cls < 2):
            raise RemoteProtocolError(Code.PROTOCOL, f"class {opened.cls} for a stream of kind {kind.name}")
        conn.next_peer = number + 2
        code = self._refusal(opened.protocol)
        if code is not None:
            if kind is Kind.CHUNKS:
                self.remember_chunks(number)
            conn.replies.add(FrameType.RESET, number, RESET_HEAD.pack(code))
            return
        size, quarter = conn.window_for(kind, opened.cls, self._bulk_window)
        recv = ReceiveWindow(size, quarter=quarter)
        stream = Stream(number, kind, opened.cls, opened.protocol, 0, SendWindow(opened.credit), recv)
        move_remote(stream, Input.RECV_OPEN)
        conn.add(stream, own=False)
        conn.events.append(StreamOpened(number, kind, opened.protocol, opened.cls, opened.meta))

    def _refusal(self, protocol: str) -> Code | None:
        conn = self._conn
        if conn.state is not ConnectionState.OPEN:
            return Code.SHUTDOWN  # its OPEN has crossed our GOAWAY
        if conn.inbound_live >= conn.limits.inbound_streams_max or conn.pending >= conn.limits.inbound_backlog_max:
            return Code.REFUSED
        return self._serves(protocol, self._guest)

    def remember_chunks(self, number: int) -> None:
        """Data may still come for a chunk stream that we reset."""
        forgotten = self._conn.forgotten_chunks
        forgotten[number] = None
        if len(forgotten) > FORGOTTEN_CHUNK_STREAMS:
            del forgotten[next(iter(forgotten))]

    def _on_accept(self, number: int, body: memoryview, _now: float) -> None:
        conn = self._conn
        accepted = decode(body, AcceptBody)
        stream = conn.streams.get(number)
        if stream is None:
            self._check_closed(number)
            return
        move_remote(stream, Input.RECV_ACCEPT)
        if stream.accepted:
            return
        stream.accepted = True
        if accepted.credit > stream.send.limit:
            stream.send.raise_to(accepted.credit)
        conn.events.append(StreamAccepted(number))
        conn.wake_if_writable(stream)
        if stream.source is not None and stream.sending:  # a second FIN would be a violation
            conn.scheduler.push(stream, stream.cls, stream.source.order)

    def _on_reset(self, number: int, body: memoryview, now: float) -> None:
        conn = self._conn
        stream = conn.streams.get(number)
        # A reset of a stream that we opened is free: how many there are is up to us.
        if (stream is None or not conn.is_own(number)) and not self._resets.take(now):
            raise RemoteProtocolError(Code.EXCESSIVE, "RESET too often")
        if stream is None:
            self._check_closed(number)
            return
        move_remote(stream, Input.RECV_RESET)
        code, detail = known_code(RESET_HEAD.unpack_from(body)[0], bytes(body[RESET_HEAD.size :]))
        conn.forget(stream)
        conn.events.append(StreamWasReset(number, code, detail))

    def _on_chunk(self, number: int, body: memoryview) -> None:
        conn = self._conn
        stream = conn.streams.get(number)
        if stream is None:
            self._check_closed(number)
            return
        move_remote(stream, Input.RECV_DATA)
        if stream.state is State.CLOSED:
            return
        slot, index, length, flags = CHUNK_BODY.unpack(body)
        if stream.sink is None or stream.arriving is not None:
            raise RemoteProtocolError(Code.PROTOCOL, f"CHUNK on stream {number}, where none is due")
        if not 0 < length <= conn.limits.chunk_bytes:
            raise RemoteProtocolError(Code.PROTOCOL, f"chunk of {length} bytes")
        place = stream.sink.place(slot, index, length, flags)
        if len(place) != length:
            raise LocalProtocolError(f"the sink gave {len(place)} bytes for a chunk of {length}")
        stream.arriving = place
        stream.filled = slot, index, 0

    def _on_goaway(self, body: memoryview, now: float) -> None:
        conn = self._conn
        if not conn.move(ConnectionInput.RECV_GOAWAY):
            raise RemoteProtocolError(Code.PROTOCOL, "GOAWAY before HELLO")
        number, last, retry_ms = GOAWAY_HEAD.unpack_from(body)
        code, detail = known_code(number, bytes(body[GOAWAY_HEAD.size :]))
        conn.goaway_received = True
        conn.end = error_for(code, detail=detail, retry_after=retry_ms / 1000 if retry_ms else None)
        if conn.drain_until is None:
            conn.drain_until = now + conn.limits.draining_timeout_s
        conn.events.append(GoAwayReceived(code, last, retry_ms, detail))
        for stream in [s for s in conn.streams.values() if conn.is_own(s.id) and s.id > last]:
            move_remote(stream, Input.RECV_RESET)
            conn.forget(stream)
            conn.events.append(StreamWasReset(stream.id, Code.SHUTDOWN, "not looked at before the peer went away", unseen=True))

