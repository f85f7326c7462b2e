"""Streams over long, full and tiny lines of the in-memory internet.  WIRE-4, WIRE-5, WIRE-12, WIRE-13."""

from __future__ import annotations

import random

import pytest
import trio

from tests.wire.sim.cases import Clock, Hostile, echo, every_seed, met
from wire.errors import Code, StreamReset
from wire.limits import DEFAULT_LIMITS, KIB, MIB
from wire.messages import OpenBody, encode
from wire.net import ByteStream, Kind, MessageStream, Net, Peer
from wire.records import FrameType, Sealer
from wire.replies import PING_BODY
from wire.sim import Link

POOL_BYTES = 8 * MIB + 4093  # not a multiple of anything that the protocol cuts by
POOL = random.Random(4).randbytes(POOL_BYTES)
POOL += POOL
GIGABIT = 1e9
WARM_S = 2.0  # slow start of bbr to 1 Gbit/s x 100 ms takes 12 round trips


def ours(stream: int, at: int, size: int) -> bytes:
    """What the writer of a stream has to say from `at` on; each stream says something else."""
    start = (stream * 999_983 + at) % POOL_BYTES
    return POOL[start : start + size]


class Readers:
    """Compares every byte, counts them, tells of messages."""

    def __init__(self) -> None:
        self.bytes = 0
        self.heard = trio.Event()

    async def read(self, peer: Peer, stream: MessageStream | ByteStream) -> None:
        if isinstance(stream, MessageStream):
            async for _ in stream:
                self.heard.set()
            return
        at, place = 0, memoryview(bytearray(256 * KIB))
        (number,) = await stream.receive_some(1)
        while count := await stream.receive_into(place):
            assert place[:count] == ours(number, at, count), (number, at)
            at += count
            self.bytes += count


async def write(peer: Peer, number: int, rng: random.Random, numbers: set[int]) -> None:
    """Pieces of 1 B to 8 MiB, evenly spread over the orders of magnitude, for ever."""
    stream = await peer.open("bulk", Kind.BYTE, 3)
    assert isinstance(stream, ByteStream)
    numbers.add(stream.number)
    async with stream:
        await stream.send_all(bytes([number]))
        at = 0
        while True:
            size = int(2 ** rng.uniform(0, 23))
            await stream.send_all(ours(number, at, size))
            at += size


@every_seed
async def test_wire_4_eight_writers_of_all_sizes_fill_a_long_line_and_messages_overtake(
    seed: int, autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 Gbit/s x 100 ms for every 20th seed, which takes seconds; a twentieth of that rate at the same distance for the others.

    What could fail differently at the full rate is the growth of windows (12 MB are under way), and that hangs on no seed.
    """
    bps = GIGABIT if seed % 20 == 0 else GIGABIT / 20
    readers = Readers()
    bulk: set[int] = set()
    sealed: list[int] = []
    seal = Sealer.seal_into

    def recording(self: Sealer, stream: int, kind: int, flags: int, plaintext: bytes, out: memoryview) -> int:
        if kind == FrameType.DATA:
            sealed.append(stream)
        return seal(self, stream, kind, flags, plaintext, out)

    # Two lines in a row, so their delays add up to 50 ms one way.  A socket holds two round trips, as `tcp_wmem` must for such a line.
    line = Link(0.025, 0.0, bps, bps, queue_bytes=32 * MIB)
    buffers = {"send_buffer": 32 * MIB, "receive_buffer": 64 * MIB}
    async with met(seed, line=line, serve=lambda hub: hub.serve("bulk", readers.read), **buffers) as m, trio.open_nursery() as nursery:
        for number in range(8):
            nursery.start_soon(write, m.peer, number, random.Random(seed * 8 + number), bulk)
        await trio.sleep(WARM_S)
        before = readers.bytes
        await trio.sleep(1)
        assert (readers.bytes - before) * 8 >= 0.9 * bps
        link = m.peer.primary
        assert link is not None
        messages = await m.peer.open("bulk")
        await trio.sleep(0.2)
        monkeypatch.setattr(Sealer, "seal_into", recording)
        for _ in range(5):
            await trio.sleep(m.rng.uniform(0.05, 0.1))
            assert link.session.bulk_waiting, "the line was to be full"
            sealed.clear()
            began, waiting = trio.current_time(), sum(map(len, link._rest))
            assert waiting < 2 * (link.session.record_bytes + 28), "one record, and a small one before it"
            await messages.send(b"urgent")
            await readers.heard.wait()
            took_s, readers.heard = trio.current_time() - began, trio.Event()
            assert not bulk & set(sealed[: sealed.index(messages.number)]), "nothing that was not sealed before is in front of it"
            # ... and what was: half a round trip, what the writer holds, and up to a round trip's worth in the line's queue.
            assert took_s < 0.05 + 0.12
        messages.reset()
        nursery.cancel_scope.cancel()


@every_seed
async def test_wire_5_a_second_sender_is_busy_and_the_first_message_arrives_whole(seed: int, autojump_clock: Clock) -> None:
    go, got, before = trio.Event(), [], []

    async def slow(peer: Peer, stream: MessageStream | ByteStream) -> None:
        assert isinstance(stream, MessageStream)
        await go.wait()
        got.extend([message async for message in stream])

    async with met(seed, serve=lambda hub: hub.serve("p", slow)) as m, await m.peer.open("p") as stream:
        size = DEFAULT_LIMITS.message_max_bytes
        first, second = m.rng.randbytes(m.rng.randint(size // 2, size)), m.rng.randbytes(size)
        link = m.peer.primary
        assert link is not None
        while link.session.sendable(stream.number, size) >= size:
            await stream.send(first)
            before.append(first)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.send, second)  # waits for credit
            await trio.sleep(m.rng.uniform(0.001, 1))
            for _ in range(3):
                with pytest.raises(trio.BusyResourceError):
                    await stream.send(b"third")
            go.set()
        await stream.send(b"fourth")
        await stream.send_eof()
        await trio.sleep(1)
    assert got == [*before, second, b"fourth"]


@every_seed
async def test_wire_12_data_before_fin_arrive_and_after_a_reset_never(
    seed: int, autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    got: dict[str, object] = {}

    async def late(peer: Peer, stream: MessageStream | ByteStream) -> None:
        """Reads only when all has arrived and the sender is gone."""
        await trio.sleep(1)
        assert isinstance(stream, MessageStream)
        try:
            got[stream.protocol] = [message async for message in stream]
        except StreamReset as reset:
            got[stream.protocol] = reset.code

    def serve(hub: Net) -> None:
        for name in ("fin", "reset", "both"):
            hub.serve(name, late)

    async with met(seed, serve=serve) as m:
        sent = [m.rng.randbytes(m.rng.randint(1, 5000)) for _ in range(m.rng.randint(1, 9))]
        for name in ("fin", "reset", "both"):
            stream = await m.peer.open(name)
            for message in sent:
                await stream.send(message)
            await trio.sleep(0.2)  # all has arrived; nobody has read it
            if name != "reset":
                await stream.send_eof()
            if name != "fin":
                stream.reset(Code.TOO_LARGE)
            else:
                stream.close()
        await trio.sleep(2)
        m.peer.goaway(Code.SHUTDOWN)
        await trio.sleep(1)
    assert got == {"fin": sent, "reset": Code.TOO_LARGE, "both": Code.TOO_LARGE}
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


@every_seed
async def test_wire_13_thirty_two_streams_echo_over_pipes_of_ten_kibibytes(seed: int, autojump_clock: Clock) -> None:
    """Both ends write much, pings and credit go in between: 16 MiB for every 20th seed, 1 MiB for the others."""
    total = 16 * MIB if seed % 20 == 0 else MIB
    each = total // 32
    line = Link(0.0005, 0.0002, 200e6, 200e6)
    left = 32

    async def one(peer: Peer, number: int) -> None:
        nonlocal left
        stream = await peer.open("echo", Kind.BYTE, 1 + number % 4)
        assert isinstance(stream, ByteStream)
        async with stream, trio.open_nursery() as nursery:

            async def write() -> None:
                await stream.send_all(ours(number, 0, each))
                await stream.send_eof()

            nursery.start_soon(write)
            got = bytearray()
            while piece := await stream.receive_some():
                got += piece
            assert bytes(got) == ours(number, 0, each)
        left -= 1

    async def pings(m_peer: Peer, hub_peer: Peer) -> None:
        while left:
            for peer in (m_peer, hub_peer):
                if peer.primary is not None:
                    peer.primary.ping()
                    assert peer.gauges()["queued_frames"] <= 100
            await trio.sleep(0.1)

    buffers = {"send_buffer": 10 * KIB, "receive_buffer": 10 * KIB}
    async with met(seed, line=line, serve=lambda hub: hub.serve("echo", echo), **buffers) as m:
        back = m.hub.peer(m.a.peer_id)
        assert back is not None
        with trio.fail_after(600):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(pings, m.peer, back)
                for number in range(32):
                    nursery.start_soon(one, m.peer, number)


@every_seed
async def test_wire_13_a_blocked_writer_goes_on_reading_and_its_answers_are_bounded(seed: int, autojump_clock: Clock) -> None:
    """A peer that reads nothing any more, and goes on sending data and pings at a rate that is allowed.

    All it sends is read and answered into a queue with a bound; after `write_stalled_s` the connection ends, with the cause.
    """
    read = 0
    buffers = {"send_buffer": 64 * KIB, "receive_buffer": 64 * KIB}

    async def sink(peer: Peer, stream: MessageStream | ByteStream) -> None:
        nonlocal read
        assert isinstance(stream, ByteStream)
        await stream.receive_some()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.send_all, bytes(4 * MIB))  # blocks our own output
            while data := await stream.receive_some():
                read += len(data)

    async with met(seed, count=2, serve=lambda hub: hub.serve("sink", sink), **buffers) as m:
        hostile = await Hostile.dial(m.net.host("10.0.9.9", **buffers), m.hub)
        peer = m.hub.peer(m.hub.manager.peers[next(reversed(m.hub.manager.peers))].peer_id)
        assert peer is not None and peer.peer_id not in (net.peer_id for net in m.members)
        say, record = hostile.say, hostile.record
        await say(record(FrameType.OPEN, 1, encode(OpenBody(Kind.BYTE, "sink", 3, 32 * MIB, b""))))
        await say(record(FrameType.CREDIT, 0, (64 * MIB).to_bytes(8, "big")))
        await trio.sleep(1)
        # Within the start credit, which is never renewed for one who does not listen: 256 pieces of 1 KiB.
        await say(record(FrameType.DATA, 1, bytes(KIB)))
        blocked_at = None
        sent, most = KIB, 0
        began = trio.current_time()
        try:
            while trio.current_time() - began < 60:
                piece = bytes(KIB) if sent < 250 * KIB else b""
                if piece:
                    await say(record(FrameType.DATA, 1, piece))
                    sent += len(piece)
                await say(record(FrameType.PING, 0, PING_BODY.pack(sent, 0)))
                await trio.sleep(m.rng.uniform(0.08, 0.12))
                most = max(most, peer.gauges().get("queued_frames", 0))
                blocked_at = blocked_at or next((link.blocked_at for link in peer.links if link.blocked_at is not None), None)
                if peer.closed:
                    break
        except trio.BrokenResourceError:
            pass
        assert blocked_at is not None and peer.closed
        assert trio.current_time() - blocked_at == pytest.approx(DEFAULT_LIMITS.write_stalled_s, abs=3)
        assert peer.reason is not None and "sent" in str(peer.reason), peer.reason
        assert read >= sent - 2 * KIB, "reading never waits for writing"
        assert most <= 32
        assert all(not other.closed for other in m.peers)
        hostile.pipe.abort()
