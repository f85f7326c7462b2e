"""Strangers on the port, on real sockets.  WIRE-1, WIRE-2, WIRE-6, WIRE-7."""

from __future__ import annotations

import logging
import os
import struct

import pytest
import trio

from tests.wire.net.worlds import RUN, descriptors, held, local
from wire.hello import Hello, preferred_ciphers, run_tag
from wire.identity import Identity
from wire.limits import DEFAULT_LIMITS
from wire.messages import Want
from wire.net import ByteStream, MessageStream, Net, Peer
from wire.net.transport import TcpTransport, send_all
from wire.noise import Cipher

FOREIGN = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "tls": bytes.fromhex("16030100c8010000c403035f") + os.urandom(190),
    "ssh": b"SSH-2.0-OpenSSH_9.6\r\n",
    "zeros": bytes(4096),
    "almost": b"PLW2\x00\x10",
    "random": bytes(range(255, 0, -1)) * 8,
    "long-hello": b"PLW1\xff\xff" + bytes(600),
    "hello-of-rubbish": b"PLW1\x00\x20" + bytes(range(32)),
}


def a_hello() -> bytes:
    return Hello(ciphers=(Cipher.AES256GCM, Cipher.CHACHA20POLY1305), run_tag=run_tag(RUN)).encode()


async def knock(net: Net, data: bytes, *, end: str = "read") -> bytes:
    """Connect, send, and read until the net closes; the bytes that came back.  `end`: read, fin, rst, close."""
    try:
        stream = await trio.open_tcp_stream("127.0.0.1", net.addresses[0].port)
    except OSError:  # closed while we were connecting
        return b""
    answer = b""
    async with stream:
        try:
            if data:
                await stream.send_all(data)
            if end == "rst":
                stream.socket.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_LINGER, struct.pack("ii", 1, 0))
                return b""
            if end == "close":
                return b""
            if end == "fin":
                await stream.send_eof()
            while piece := await stream.receive_some(4096):
                answer += piece
        except trio.BrokenResourceError:
            pass
    return answer


async def good_peer_gets_in(net: Net) -> None:
    with trio.fail_after(10):
        async with local() as friend:
            peer = await friend.dial(net.addresses[0])
            assert await peer.call("echo", Want(RUN, 1), Want, deadline_s=10) == Want(RUN, 1)


async def echo(peer: Peer, want: Want) -> Want:
    return want


@pytest.mark.parametrize("kind", FOREIGN)
async def test_wire_2_a_foreign_protocol_is_closed_at_once_and_learns_nothing(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """WIRE-2: closed at the first impossible byte, not at a deadline; nothing is answered; the process lives."""
    async with local() as net:
        net.serve_calls("echo", Want, echo)
        with trio.fail_after(10):
            assert await knock(net, FOREIGN[kind]) == b""
        await good_peer_gets_in(net)
        assert sum(count for name, count in net.counts.items() if name.startswith("handshake-")) == 1
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_the_first_impossible_byte_closes() -> None:
    async with local() as net:
        for data in (b"G", b"P", b"PL", b"PLW", b"PLW1", b"PLW1\x00"):
            with trio.move_on_after(0.1) as scope:
                await knock(net, data)
            assert scope.cancelled_caught == (data != b"G")  # what may still become a hello is waited for


async def test_wire_1_a_connection_cut_at_every_offset_of_the_hello_leaves_nothing() -> None:
    """WIRE-1: FIN, RST and close at every offset, then a good peer within a second."""
    hello = a_hello()
    message_1 = struct.pack(">H", 32) + os.urandom(32)
    opening = hello + message_1
    async with local() as net:
        net.serve_calls("echo", Want, echo)
        before = descriptors()
        async with trio.open_nursery() as nursery:
            limit = trio.CapacityLimiter(4)

            async def cut(size: int, end: str) -> None:
                async with limit:
                    await knock(net, opening[:size], end=end)

            for size in range(0, len(opening), 3):
                for end in ("fin", "rst", "close"):
                    nursery.start_soon(cut, size, end)
        await good_peer_gets_in(net)
        with trio.fail_after(10):
            while descriptors() > before or net.peers():
                await trio.sleep(0.01)
        assert net.counts["accepted"] >= len(opening) // 3
        assert net.counts["internal-error"] == 0


async def test_wire_1_a_hundred_garbage_connections_then_a_good_peer() -> None:
    """WIRE-1."""
    async with local() as net:
        net.serve_calls("echo", Want, echo)
        async with trio.open_nursery() as nursery:
            limit = trio.CapacityLimiter(4)

            async def one(number: int) -> None:
                async with limit:
                    data = list(FOREIGN.values())[number % len(FOREIGN)]
                    await knock(net, data, end=("read", "fin", "rst", "close")[number % 4])

            for number in range(100):
                nursery.start_soon(one, number)
        await good_peer_gets_in(net)
        # Those that were reset before we looked were never there.
        assert 50 < net.counts["accepted"] <= 101 and net.counts["internal-error"] == 0


async def test_silent_connections_are_capped_and_closed_before_reading() -> None:
    """Half-open handshakes: 8 an address; the ninth is closed at once, the eight keep their deadline."""
    async with local() as net:
        streams = [await trio.open_tcp_stream("127.0.0.1", net.addresses[0].port) for _ in range(8)]
        while net.counts["accepted"] < 8:
            await trio.sleep(0.001)
        with trio.fail_after(10):
            assert await knock(net, b"") == b""
        assert net.counts["refused-resource_limit"] == 1
        for stream in streams:
            await stream.aclose()
        net.serve_calls("echo", Want, echo)
        while sum(net.counts[name] for name in net.counts if name.startswith("handshake-")) < 8:
            await trio.sleep(0.001)
        await good_peer_gets_in(net)


class Half:
    """A dialler that goes through the handshake by hand, to misbehave afterwards."""

    def __init__(self, net: Net) -> None:
        self.net = net

    async def __aenter__(self) -> Half:
        from wire.handshake import Handshake
        from wire.records import Opener, Sealer

        self.pipe = await TcpTransport().dial(self.net.addresses[0])
        hello = Hello(ciphers=preferred_ciphers(trio.current_time), run_tag=run_tag(RUN))
        handshake = Handshake(True, Identity.generate(), hello, own_run=RUN)
        buffer = memoryview(bytearray(8192))
        while True:
            if data := handshake.send():
                await send_all(self.pipe, data)
            if handshake.done:
                break
            count = await self.pipe.receive_into(buffer[: handshake.room])
            handshake.receive(buffer[:count])
        secrets = handshake.result
        self.sealer = Sealer(secrets.cipher, secrets.send_key)
        self.opener = Opener(secrets.cipher, secrets.recv_key)
        self.peer_id = secrets.peer_id
        self._data = bytearray()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.pipe.close()

    async def send(self, stream: int, kind: int, body: bytes, flags: int = 0) -> None:
        out = memoryview(bytearray(len(body) + 64))
        size = self.sealer.seal_into(stream, kind, flags, body, out)
        await send_all(self.pipe, bytes(out[:size]))

    async def send_hello(self) -> None:
        from wire.messages import SessionHello, encode

        hello = SessionHello(1, os.urandom(8), "test", (), b"", "", DEFAULT_LIMITS.stream_window_bulk_bytes, 256)
        await self.send(0, 1, encode(hello))

    async def records(self) -> list[tuple[int, int, bytes]]:
        """(stream, type, body) of everything until the net closes."""
        from wire.records import HEADER_BYTES, parse_header

        found = []
        buffer = memoryview(bytearray(65536))
        with trio.fail_after(10):
            try:
                while count := await self.pipe.receive_into(buffer):
                    self._data += buffer[:count]
            except trio.BrokenResourceError:
                pass
        at = 0
        while len(self._data) - at >= HEADER_BYTES:
            header = bytes(self._data[at : at + HEADER_BYTES])
            size, stream, kind, _ = parse_header(header)
            body = bytes(self._data[at + HEADER_BYTES : at + HEADER_BYTES + size])
            plain = memoryview(bytearray(size - 16))
            self.opener.open_into(header, body, plain)
            found.append((stream, kind, bytes(plain)))
            at += HEADER_BYTES + size
        return found


def goaway(records: list[tuple[int, int, bytes]]) -> int | None:
    """The code of the GOAWAY among them."""
    bodies = [body for _, kind, body in records if kind == 5]
    return struct.unpack_from(">H", bodies[-1])[0] if bodies else None


@pytest.mark.parametrize(
    ("stream", "kind", "body", "code"),
    [
        (5, 0x12, b"data on a stream that was never opened", 2),
        (4, 0x10, b"an id of the wrong parity", 2),
        (0, 0x03, bytes(20), None),  # an unasked pong is counted, not punished
        (1, 0x10, b"\xc1 not msgpack", 2),
        (0, 0x04, bytes(8), 2),  # credit that falls
    ],
)
async def test_a_violation_after_authentication_ends_that_connection_with_a_code(
    stream: int, kind: int, body: bytes, code: int | None
) -> None:
    """WIRE-6: closed with code and reason, which the peer can read; others notice nothing."""
    async with local() as net, local() as friend:
        net.serve_calls("echo", Want, echo)
        peer = await friend.dial(net.addresses[0])
        async with Half(net) as half:
            await half.send_hello()
            await half.send(stream, kind, body)
            if code is None:
                await half.send(0, 5, struct.pack(">HII", 15, 0, 0))  # a goodbye of ours ends it cleanly
            records = await half.records()
            assert goaway(records) == code
        assert await peer.call("echo", Want(RUN, 1), Want, deadline_s=10) == Want(RUN, 1)
        assert not peer.closed
        assert net.counts["internal-error"] == 0


@pytest.mark.parametrize(
    "header",
    [
        struct.pack(">IIBBH", 2**32 - 1, 0, 1, 0, 0),
        struct.pack(">IIBBH", 200 * 1024, 0, 1, 0, 0),
        struct.pack(">IIBBH", 0, 0, 1, 0, 0),
        struct.pack(">IIBBH", 64, 0, 0x33, 0, 0),
        struct.pack(">IIBBH", 64, 0, 1, 0xFF, 0),
        struct.pack(">IIBBH", 64, 0, 1, 0, 1),
    ],
)
async def test_a_hostile_header_is_refused_before_its_body_comes(header: bytes) -> None:
    """WIRE-6: sizes up to 2^32 - 1, unknown types and reserved bits end the connection without waiting for a body."""
    async with local() as net:
        async with Half(net) as half:
            with trio.fail_after(10):
                await send_all(half.pipe, header)
                await half.records()
        assert not net.peers()


async def test_a_changed_byte_ends_the_connection() -> None:
    async with local() as net:
        async with Half(net) as half:
            await half.send_hello()
            out = memoryview(bytearray(256))
            size = half.sealer.seal_into(0, 2, 0, bytes(16), out)
            out[size - 1] ^= 1
            await send_all(half.pipe, bytes(out[:size]))
            assert goaway(await half.records()) == 4  # AUTH
        assert not net.peers()


@pytest.mark.parametrize("end", ["fin", "rst"])
async def test_a_cut_in_mid_message_raises_and_never_reads_as_an_end(end: str) -> None:
    """WIRE-7: a message comes whole or not at all; the loss raises with its cause."""
    from wire.errors import ConnectionLost
    from wire.messages import OpenBody, encode

    outcome: list[object] = []
    done = trio.Event()

    async def listen(peer: Peer, stream: MessageStream | ByteStream) -> None:
        assert isinstance(stream, MessageStream)
        try:
            async for message in stream:
                outcome.append(message)
            outcome.append("end")
        except ConnectionLost as error:
            outcome.append(error)
        finally:
            done.set()

    async with local() as net:
        net.serve("listen", listen)
        async with Half(net) as half:
            await half.send_hello()
            await half.send(1, 0x10, encode(OpenBody(0, "listen", 1, 65536, b"")))
            await half.send(1, 0x12, b"whole")
            out = memoryview(bytearray(256))
            size = half.sealer.seal_into(1, 0x12, 0, b"half", out)
            await send_all(half.pipe, bytes(out[: size - 5]))
            await trio.sleep(0.05)
            if end == "rst":
                half.pipe.abort()
            else:
                await half.pipe.send_eof()
            with trio.fail_after(10):
                await done.wait()
        assert outcome[0] == b"whole" and len(outcome) == 2 and isinstance(outcome[1], ConnectionLost)
        assert held(net) == {}


@pytest.mark.parametrize("kind", [0, 1, 2])
@pytest.mark.parametrize("protocol", ["echo", "tensors"])
async def test_streams_opened_and_reset_in_one_segment_leave_nothing(kind: int, protocol: str) -> None:
    """Rapid reset: OPEN, a byte and RESET, or OPEN and FIN, arrive in one read."""
    from wire.messages import OpenBody, encode

    async with local() as net:
        net.serve_calls("echo", Want, echo)
        net.serve_channel("tensors")
        async with Half(net) as half:
            await half.send_hello()
            out = memoryview(bytearray(65536))
            at = 0
            for number in range(1, 61, 2):
                cls = 2 if kind == 2 else 1
                body = encode(OpenBody(kind, protocol, cls, 65536, b"name"))
                at += half.sealer.seal_into(number, 0x10, 0, body, out[at:])
                if number % 4 == 1:
                    if kind != 2:
                        at += half.sealer.seal_into(number, 0x12, 0, b"x", out[at:])
                    at += half.sealer.seal_into(number, 0x13, 0, struct.pack(">H", 12), out[at:])
                elif number % 8 == 3:
                    at += half.sealer.seal_into(number, 0x12, 1, b"", out[at:])
                    at += half.sealer.seal_into(number, 0x13, 0, struct.pack(">H", 12), out[at:])
                else:
                    at += half.sealer.seal_into(number, 0x12, 1, b"", out[at:])
            await send_all(half.pipe, bytes(out[:at]))
            with trio.fail_after(10):
                while not net.peers() or held(net).get("streams_inbound") or net.peers()[0]._channels.waiting:
                    await trio.sleep(0.005)
            assert net.counts["internal-error"] == 0
            assert not net.peers()[0].closed
