"""TCP as pipes: partial sends, ends, closes from another task, busy ports.  FIND-13."""

from __future__ import annotations

import errno
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from tests.wire.net.worlds import descriptors
from wire.address import Address
from wire.net.sockoptions import NOTSENT_LOWAT_BYTES, NOTSENT_LOWAT_MOST_BYTES, congestion_for, unsent_most
from wire.net.transport import TcpPipe, TcpTransport, literal, send_all, unsent

LOOPBACK = Address("127.0.0.1", 0)


@asynccontextmanager
async def joined(congestion: str | None = None) -> AsyncIterator[tuple[TcpPipe, TcpPipe]]:
    transport = TcpTransport(congestion)
    listener = await transport.listen(LOOPBACK)
    near = await transport.dial(listener.address)
    far = await listener.accept()
    listener.close()
    try:
        yield near, far
    finally:
        near.close()
        far.close()


@given(st.lists(st.binary(max_size=10), max_size=6), st.integers(0, 60))
def test_unsent_is_what_is_left(pieces: list[bytes], count: int) -> None:
    whole = b"".join(pieces)
    count = min(count, len(whole))
    rest = unsent([memoryview(piece) for piece in pieces], count)
    assert b"".join(rest) == whole[count:]


async def test_bytes_arrive_in_order_and_then_the_end() -> None:
    async with joined() as (near, far):
        assert near.info().kind == "tcp" and near.info().remote == far.info().local and near.info().local == far.info().remote
        assert near.send_now([memoryview(b"ab"), memoryview(b"c")]) == 3
        await near.send_eof()
        buffer = memoryview(bytearray(2))
        got = b""
        while count := await far.receive_into(buffer):
            got += bytes(buffer[:count])
        assert got == b"abc"
        assert far.send_now([memoryview(b"still")]) == 5  # half-closed


async def test_a_full_socket_takes_nothing_and_then_says_when() -> None:
    async with joined() as (near, far):
        block = memoryview(bytes(1 << 20))
        sent = 0
        while count := near.send_now([block, block]):
            sent += count
        async with trio.open_nursery() as nursery:

            async def drain() -> None:
                buffer = memoryview(bytearray(1 << 20))
                got = 0
                while got < sent + 1000:
                    got += await far.receive_into(buffer)
                assert got == sent + 1000

            nursery.start_soon(drain)
            await send_all(near, bytes(1000))


async def test_more_buffers_than_the_kernel_takes_at_once() -> None:
    async with joined() as (near, far):
        views = [memoryview(bytes([number % 256])) for number in range(3000)]
        sent = near.send_now(views)
        assert 0 < sent <= 1024
        buffer = memoryview(bytearray(4096))
        count = await far.receive_into(buffer)
        assert bytes(buffer[:count]) == bytes(number % 256 for number in range(count))


async def test_a_close_wakes_waiters_and_later_calls_say_closed() -> None:
    async with joined() as (near, far):
        async with trio.open_nursery() as nursery:

            async def receive() -> None:
                with pytest.raises(trio.ClosedResourceError):
                    await near.receive_into(memoryview(bytearray(10)))

            nursery.start_soon(receive)
            await trio.testing.wait_all_tasks_blocked()
            near.close()
        near.close()
        near.abort()
        with pytest.raises(trio.ClosedResourceError):
            near.send_now([memoryview(b"x")])
        with pytest.raises(trio.ClosedResourceError):
            await near.receive_into(memoryview(bytearray(10)))
        with pytest.raises(trio.ClosedResourceError):
            await near.wait_writable()
        assert await far.receive_into(memoryview(bytearray(10))) == 0


async def test_an_abort_is_not_an_end_at_the_other_side() -> None:
    """WIRE-7."""
    async with joined() as (near, far):
        near.send_now([memoryview(b"lost")])
        near.abort()
        with pytest.raises(trio.BrokenResourceError) as broken:
            while await far.receive_into(memoryview(bytearray(10))):
                pass
        assert isinstance(broken.value.__cause__, OSError) and broken.value.__cause__.errno == errno.ECONNRESET


async def test_a_cancelled_receive_loses_no_byte() -> None:
    async with joined() as (near, far):
        buffer = memoryview(bytearray(10))
        with trio.move_on_after(0.01):
            await far.receive_into(buffer)
        near.send_now([memoryview(b"abc")])
        with trio.move_on_after(0):
            await far.receive_into(buffer)
        assert await far.receive_into(buffer) == 3


async def test_options_of_the_socket() -> None:
    async with joined() as (near, _):
        sock = near._sock
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == NOTSENT_LOWAT_BYTES
            near.taking(1e9)
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == NOTSENT_LOWAT_MOST_BYTES
            near.taking(1e6)
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == NOTSENT_LOWAT_BYTES
        if hasattr(socket, "TCP_CONGESTION"):
            named = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).partition(b"\0")[0].decode()
            assert near.info().congestion == named != ""


@pytest.mark.skipif(not hasattr(socket, "TCP_CONGESTION"), reason="the system has no choice of congestion control")
async def test_a_congestion_control_is_asked_for_at_both_ends() -> None:
    async with joined("reno") as (near, far):  # built into every Linux kernel, and what no other test asks for
        assert near.info().congestion == far.info().congestion == "reno"
    async with joined("no-such-control") as (near, far):
        assert near.info().congestion not in ("", "no-such-control")


async def test_a_refused_dial_and_a_busy_port_leave_no_descriptor() -> None:
    transport = TcpTransport()
    before = descriptors()
    listener = await transport.listen(LOOPBACK)
    with pytest.raises(OSError) as busy:
        await transport.listen(listener.address)
    assert busy.value.errno == errno.EADDRINUSE
    listener.close()
    with pytest.raises(OSError) as refused:
        await transport.dial(listener.address)
    assert refused.value.errno == errno.ECONNREFUSED
    assert descriptors() == before


async def test_a_dial_that_hangs_can_be_cancelled() -> None:
    """FIND-2: shutting down while an attempt hangs takes no time.  192.0.2.0/24 answers nobody (RFC 5737)."""
    before = descriptors()
    with trio.move_on_after(0.05):
        with suppress(OSError):  # no route at all is as good
            await TcpTransport().dial(Address("192.0.2.1", 9))
    assert descriptors() == before


async def test_names_resolve_to_literals_and_literals_to_themselves() -> None:
    transport = TcpTransport()
    assert await transport.resolve(Address("127.0.0.1", 5)) == (Address("127.0.0.1", 5),)
    found = await transport.resolve(Address("localhost", 5))
    assert found and all(address.is_literal and address.port == 5 for address in found)


def test_socket_names_become_addresses() -> None:
    """FIND-13: zone ids are cut off, v4-mapped addresses are IPv4, four-part names are fine."""
    assert str(literal("fe80::1%lo", 4)) == "/ip6/fe80::1/tcp/4"
    assert str(literal("::ffff:127.0.0.1", 4)) == "/ip4/127.0.0.1/tcp/4"
    assert "127.0.0.1" in TcpTransport().local_addresses()


@pytest.mark.parametrize(
    ("bytes_per_s", "bytes_unsent"),
    [(0, 16 << 10), (25e6, 16 << 10), (32.8e6, 32 << 10), (125e6, 64 << 10), (263e6, 256 << 10), (4e9, 256 << 10)],
)
def test_unsent_bytes_are_a_millisecond_of_the_line(bytes_per_s: float, bytes_unsent: int) -> None:
    assert unsent_most(bytes_per_s) == bytes_unsent


@pytest.mark.parametrize(
    ("local", "remote", "wanted"),
    [
        ("127.0.0.1", "127.0.0.1", "cubic"),
        ("127.0.0.1", "127.0.0.2", "cubic"),
        ("::1", "::1", "cubic"),
        ("10.0.0.5", "10.0.0.5", "cubic"),
        ("10.0.0.5", "10.0.0.6", "bbr"),
        ("2001:db8::1", "2001:db8::2", "bbr"),
    ],
)
def test_bbr_is_for_lines(local: str, remote: str, wanted: str) -> None:
    assert congestion_for(local, remote) == wanted
