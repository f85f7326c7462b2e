"""What the tests of the in-memory internet share."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import trio

from tests.wire.net.worlds import RUN
from wire.address import Address, Scope
from wire.identity import Identity
from wire.limits import DEFAULT_LIMITS, Limits
from wire.net import Net, TensorReceiver, open_net
from wire.sim import Host, Internet, Link, SimListener, SimPipe

FAST = Link(delay_s=0.02)


def member(host: Host, limits: Limits = DEFAULT_LIMITS) -> AbstractAsyncContextManager[Net]:
    """A member of run RUN on this machine, listening there."""
    return open_net(
        Identity(host.name.encode().ljust(32, b"-")),
        run=RUN,
        listen=[Address(host.name, 4001)],
        scope=Scope.HOST,
        transport=host.transport,
        rng=random.Random(1),
        wall_time=host.wall_time,
        limits=limits,
    )


async def collect(receiver: TensorReceiver, count: int, size: int, *, ahead: int, came: Callable[[int], None]) -> list[bytes]:
    """So many tensors of `size` bytes, whose keys end in 0 .. count - 1, each once, in order of these.  `ahead`: slots posted at once.
    `came(so far)` after each."""
    got: dict[int, bytes] = {}
    for _ in range(ahead):
        receiver.post(memoryview(bytearray(size)))
    while len(got) < count:
        received = await receiver.receive()
        number = received.key[-1]
        assert isinstance(number, int) and number not in got
        got[number] = bytes(received.buffer)
        came(len(got))
        receiver.post(memoryview(bytearray(size)))
    return [got[number] for number in range(count)]


async def joined(one: Host, other: Host, port: int = 4001) -> tuple[SimPipe, SimPipe, SimListener]:
    """A connection from `one` to `other`, both ends, and the listener."""
    listener = await other.transport.listen(Address(other.addresses[0], port))
    near = await one.transport.dial(listener.address)
    return near, await listener.accept(), listener


def two(net: Internet, link: Link = FAST, **settings: object) -> tuple[Host, Host]:
    return net.host("192.0.2.1", link=link, **settings), net.host("192.0.2.2", link=link, **settings)


async def send(pipe: SimPipe, data: bytes) -> None:
    rest = memoryview(data)
    while rest := rest[pipe.send_now((rest,)) :]:
        await pipe.wait_writable()


async def receive(pipe: SimPipe, count: int) -> bytes:
    """Exactly this many bytes, or what comes until the end."""
    data = bytearray(count)
    view, filled = memoryview(data), 0
    while filled < count:
        got = await pipe.receive_into(view[filled:])
        if not got:
            break
        filled += got
    return bytes(data[:filled])


async def flood(pipe: SimPipe, piece: bytes = bytes(1 << 20)) -> None:
    """Send for ever."""
    while True:
        await send(pipe, piece)


class Meter:
    """Counts what arrives."""

    def __init__(self) -> None:
        self.bytes = 0

    async def run(self, pipe: SimPipe) -> None:
        room = memoryview(bytearray(1 << 20))
        while count := await pipe.receive_into(room):
            self.bytes += count


async def rate(net: Internet, one: Host, other: Host, connections: int = 1, *, warm_s: float, for_s: float) -> float:
    """Bits per second of payload that arrive over so many connections after a warm-up."""
    meter = Meter()
    async with net.running(), trio.open_nursery() as nursery:
        for number in range(connections):
            near, far, _ = await joined(one, other, 4001 + number)
            nursery.start_soon(flood, near)
            nursery.start_soon(meter.run, far)
        await trio.sleep(warm_s)
        before = meter.bytes
        await trio.sleep(for_s)
        carried = (meter.bytes - before) * 8 / for_s
        nursery.cancel_scope.cancel()
    return carried
