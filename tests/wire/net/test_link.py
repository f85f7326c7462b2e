"""One connection at work: stalled writes, waits that end in one tick, what had arrived before the loss, the upgrade's deadline."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from tests.wire.net.worlds import RUN, World, member, memory_pipes
from wire.errors import ConnectionLost, PeerIdMismatch, WireError
from wire.hello import preferred_ciphers
from wire.identity import Identity, PeerId
from wire.limits import DEFAULT_LIMITS
from wire.messages import SessionHello
from wire.net import ByteStream, Kind, MessageStream, Peer
from wire.net.causes import HandshakeTimeout
from wire.net.transport import send_all
from wire.net.upgrade import Local, upgrade
from wire.noise import Cipher
from wire.pipeinfo import PipeInfo

Clock = trio.testing.MockClock
CIPHERS = (Cipher.AES256GCM, Cipher.CHACHA20POLY1305)


def party(run: bytes | None = RUN) -> Local:
    def hello(peer_id: PeerId, guest: bool, info: PipeInfo) -> SessionHello:
        return SessionHello(1, bytes(8), "test", (), b"", "", DEFAULT_LIMITS.stream_window_bulk_bytes, 256)

    return Local(
        identity=Identity.generate(),
        run=run,
        ciphers=CIPHERS,
        limits=DEFAULT_LIMITS,
        hello=hello,
        serves=lambda protocol, guest: None,
    )


@pytest.mark.parametrize("capacity", [10 << 10, 1 << 20])
async def test_the_upgrade_works_through_any_pipe(capacity: int, autojump_clock: Clock) -> None:
    near, far = memory_pipes(("10.0.0.1", 1), ("10.0.0.2", 2), capacity)
    one, other = party(), party(None)
    links = []

    async def side(local: Local, pipe: object, initiator: bool) -> None:
        links.append(await upgrade(pipe, local, initiator=initiator))  # type: ignore[arg-type]

    async with trio.open_nursery() as nursery:
        nursery.start_soon(side, one, near, True)
        nursery.start_soon(side, other, far, False)
    assert {link.peer_id for link in links} == {one.identity.peer_id, other.identity.peer_id}
    assert all(link.guest for link in links)
    assert sorted(link.initiator for link in links) == [False, True]
    for link in links:
        link.discard()
        link.discard()
    assert near._closed and far._closed


@pytest.mark.parametrize("said", [0, 1, 5, 20, 100])
async def test_silence_ends_at_one_deadline_for_everything(said: int, autojump_clock: Clock) -> None:
    """WIRE-6, FIND-5: also when a byte comes now and then."""
    near, far = memory_pipes(("10.0.0.1", 1), ("10.0.0.2", 2))
    local = party()
    from wire.handshake import Handshake
    from wire.hello import Hello, run_tag

    opening = Handshake(True, Identity.generate(), Hello(ciphers=CIPHERS, run_tag=run_tag(RUN)), own_run=RUN).send()

    async def drip() -> None:
        for number in range(said):
            await send_all(far, opening[number : number + 1])
            await trio.sleep(0.3)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(drip)
        with pytest.raises(HandshakeTimeout) as late:
            await upgrade(near, local, initiator=False)
        assert trio.current_time() == pytest.approx(DEFAULT_LIMITS.handshake_timeout_s)
        assert late.value.retryable
        nursery.cancel_scope.cancel()
    assert near._closed


async def test_the_wrong_peer_learns_nothing_of_the_dialler(autojump_clock: Clock) -> None:
    near, far = memory_pipes(("10.0.0.1", 1), ("10.0.0.2", 2))
    expected = Identity.generate().peer_id
    outcome: list[BaseException] = []

    async def answer() -> None:
        try:
            await upgrade(far, party(), initiator=False)
        except WireError as error:
            outcome.append(error)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer)
        with pytest.raises(PeerIdMismatch):
            await upgrade(near, party(), initiator=True, expected=expected)
    assert isinstance(outcome[0], ConnectionLost) and near._closed and far._closed


async def test_a_write_without_progress_ends_the_connection(autojump_clock: Clock) -> None:
    """30 s; pings that cannot leave are no proof of death before that, and the reader goes on meanwhile."""

    async def deaf(peer: Peer, stream: MessageStream | ByteStream) -> None:
        await trio.sleep_forever()

    world = World(capacity=10 << 10)
    async with member(world, "10.0.0.1") as a, member(world, "10.0.0.2") as b:
        b.serve("deaf", deaf)
        peer = await a.dial(b.addresses[0])
        await trio.sleep(1)
        world.pipes[0][1].receive_into = stuck  # type: ignore[method-assign]
        stream = await peer.open("deaf", Kind.BYTE, 3)
        assert isinstance(stream, ByteStream)
        started = trio.current_time()
        with pytest.raises(ConnectionLost):
            await stream.send_all(bytes(1 << 20))
        assert 9 <= trio.current_time() - started <= 31
        await peer.wait_closed()
        assert not a.peers()


async def stuck(buffer: memoryview) -> int:
    await trio.sleep_forever()
    return 0


async def test_a_dead_connection_wakes_all_waiters_in_one_tick(autojump_clock: Clock) -> None:
    async def deaf(peer: Peer, stream: MessageStream | ByteStream) -> None:
        await trio.sleep_forever()

    world = World()
    async with member(world, "10.0.0.1") as a, member(world, "10.0.0.2") as b:
        b.serve("deaf", deaf)
        peer = await a.dial(b.addresses[0])
        times: list[float] = []

        async def wait() -> None:
            stream = await peer.open("deaf")
            with pytest.raises(ConnectionLost):
                await stream.receive()
            times.append(trio.current_time())
            with pytest.raises(ConnectionLost):
                await stream.send(b"x") if isinstance(stream, MessageStream) else None

        async with trio.open_nursery() as nursery:
            for _ in range(50):
                nursery.start_soon(wait)
            await trio.sleep(3)
            lost_at = trio.current_time()
            world.pipes[0][1].abort()
        assert times == [lost_at] * 50


async def test_what_had_arrived_before_the_loss_is_read_first(autojump_clock: Clock) -> None:
    """The reply, the goodbye and the end of the pipe come in one read: the reply is not lost."""
    world = World()
    sent = trio.Event()

    async def talk(peer: Peer, stream: MessageStream | ByteStream) -> None:
        if isinstance(stream, MessageStream):
            await stream.send(b"one")
            await stream.send(b"two")
        else:
            await stream.send_all(b"onetwo")
        sent.set()
        await trio.sleep_forever()

    async with member(world, "10.0.0.1") as a, member(world, "10.0.0.2") as b:
        b.serve("talk", talk)
        peer = await a.dial(b.addresses[0])
        messages = await peer.open("talk")
        octets = await peer.open("talk", Kind.BYTE, 3)
        assert isinstance(messages, MessageStream) and isinstance(octets, ByteStream)
        await trio.sleep(1)
        await sent.wait()
        world.pipes[0][1].close()
        await trio.sleep(1)
        assert peer.closed
        assert [await messages.receive(), await messages.receive()] == [b"one", b"two"]
        with pytest.raises(ConnectionLost):
            await messages.receive()
        assert await octets.receive_some(3) == b"one"
        buffer = memoryview(bytearray(10))
        assert await octets.receive_into(buffer) == 3 and bytes(buffer[:3]) == b"two"
        with pytest.raises(ConnectionLost):
            await octets.receive_some()
        assert octets._fin_read is False


def test_the_probe_orders_both_ciphers() -> None:
    import time

    assert set(preferred_ciphers(time.perf_counter)) == set(CIPHERS)
