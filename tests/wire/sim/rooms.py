"""What the tests of the in-memory internet share."""

from __future__ import annotations

import trio

from wire.address import Address
from wire.sim import Host, Internet, Link, SimListener, SimPipe

FAST = Link(delay_s=0.02)


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
