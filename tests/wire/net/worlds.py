"""Places for nets to meet without sockets: pipes in memory, under a mock clock, with the troubles of real ones.

`MemoryPipe` is a `Pipe` over trio's memory streams with a bound like a socket buffer's.  `MemoryTransport` is a small internet
of one address space: listeners by (host, port), addresses that swallow, refuse, or accept and say nothing, pipes that can be cut
or silenced.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import trio
import trio.testing

from wire.address import Address, Scope
from wire.identity import Identity
from wire.net import Net, open_net
from wire.pipeinfo import PipeInfo

RUN = bytes(range(32))
OTHER_RUN = bytes(range(1, 33))


class MemoryPipe:
    """One end; see `memory_pipes`."""

    def __init__(self, info: PipeInfo, capacity: int) -> None:
        self._info = info
        self._capacity = capacity
        self._in = trio.testing.MemoryReceiveStream()
        self._unread = 0
        self._room = trio.Event()
        self._closed = False
        self._broken = False
        self.other: MemoryPipe
        self.silent = False  # what we send vanishes
        self.sent_bytes = 0

    def info(self) -> PipeInfo:
        return self._info

    def _check(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError
        if self._broken or self.other._closed:
            raise trio.BrokenResourceError("broken pipe")

    async def receive_into(self, buffer: memoryview) -> int:
        data = await self._in.receive_some(len(buffer))
        buffer[: len(data)] = data
        self._unread -= len(data)
        if data:
            room, self._room = self._room, trio.Event()
            room.set()
        elif self._broken:
            raise trio.BrokenResourceError from OSError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        return len(data)

    def send_now(self, views: Sequence[memoryview]) -> int:
        self._check()
        other, sent = self.other, 0
        for view in views:
            piece = view[: self._capacity - other._unread]
            if self.silent:
                piece = view
            elif piece:
                other._in.put_data(bytes(piece))
                other._unread += len(piece)
            sent += len(piece)
            if len(piece) < len(view):
                break
        self.sent_bytes += sent
        return sent

    async def wait_writable(self) -> None:
        await trio.lowlevel.checkpoint()
        while self.other._unread >= self._capacity:
            self._check()
            await self.other._room.wait()

    def taking(self, bytes_per_s: float) -> None: ...

    async def send_eof(self) -> None:
        await trio.lowlevel.checkpoint()
        self.other._in.put_eof()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._in.close()
            self._room.set()
            if not self.silent:
                self.other._in.put_eof()
                self.other._room.set()

    def abort(self) -> None:
        if not self._closed:
            self.other._broken = True
            self.close()


def memory_pipes(one: tuple[str, int], other: tuple[str, int], capacity: int = 1 << 20) -> tuple[MemoryPipe, MemoryPipe]:
    near = MemoryPipe(PipeInfo("memory", one, other), capacity)
    far = MemoryPipe(PipeInfo("memory", other, one), capacity)
    near.other, far.other = far, near
    return near, far


@dataclass
class World:
    """What `MemoryTransport`s share."""

    capacity: int = 1 << 20
    delay_s: float = 0.001
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    jitter_s: float = 0.0
    listeners: dict[tuple[str, int], MemoryListener] = field(default_factory=dict)
    black_holes: set[tuple[str, int]] = field(default_factory=set)
    mutes: set[tuple[str, int]] = field(default_factory=set)
    names: dict[str, list[str]] = field(default_factory=dict)
    pipes: list[tuple[MemoryPipe, MemoryPipe]] = field(default_factory=list)
    dials: list[tuple[float, str, int]] = field(default_factory=list)
    next_port: int = 40000

    def open_pipes(self) -> int:
        return sum(not end._closed for pair in self.pipes for end in pair)

    def silence_all(self) -> None:
        """Every line goes dead without a word."""
        for pair in self.pipes:
            for end in pair:
                end.silent = True


class MemoryListener:
    def __init__(self, world: World, address: Address) -> None:
        self.address = address
        self._world = world
        self._send, self._receive = trio.open_memory_channel[MemoryPipe](512)

    async def accept(self) -> MemoryPipe:
        try:
            return await self._receive.receive()
        except trio.EndOfChannel:
            raise trio.ClosedResourceError from None

    def close(self) -> None:
        self._world.listeners.pop((self.address.host, self.address.port), None)
        self._send.close()


class MemoryTransport:
    """A `Transport` in a `World`, for a machine with one address."""

    def __init__(self, world: World, host: str) -> None:
        self.world = world
        self.host = host

    async def dial(self, address: Address, *, local_port: int = 0) -> MemoryPipe:
        world, place = self.world, (address.host, address.port)
        world.dials.append((trio.current_time(), *place))
        await trio.sleep(world.delay_s + world.rng.random() * world.jitter_s)
        if place in world.black_holes:
            await trio.sleep_forever()
        world.next_port += 1
        near, far = memory_pipes((self.host, world.next_port), place, world.capacity)
        if place not in world.mutes:
            listener = world.listeners.get(place)
            if listener is None:
                raise OSError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
            listener._send.send_nowait(far)
        world.pipes.append((near, far))
        return near

    async def listen(self, address: Address) -> MemoryListener:
        await trio.lowlevel.checkpoint()
        port = address.port
        if not port:
            self.world.next_port += 1
            port = self.world.next_port
        if (address.host, port) in self.world.listeners:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        listener = MemoryListener(self.world, Address(address.host, port))
        self.world.listeners[address.host, port] = listener
        return listener

    async def resolve(self, address: Address) -> tuple[Address, ...]:
        await trio.lowlevel.checkpoint()
        if address.is_literal:
            return (address,)
        if address.host not in self.world.names:
            raise OSError("no such name")
        return tuple(Address(host, address.port) for host in self.world.names[address.host])

    def local_addresses(self) -> tuple[str, ...]:
        return ("127.0.0.1", self.host)


def wall_time() -> float:
    """A wall clock that goes as fast as trio's does."""
    return 1.7e9 + trio.current_time()


@asynccontextmanager
async def member(
    world: World, host: str, *, port: int = 4001, identity: Identity | None = None, **settings: Any
) -> AsyncIterator[Net]:
    """A net of run RUN in a world, listening on host:port."""
    settings.setdefault("run", RUN)
    settings.setdefault("scope", Scope.HOST)
    settings.setdefault("wall_time", wall_time)  # in virtual time the real one stands still
    async with open_net(
        identity or Identity.generate(),
        listen=[Address(host, port)],
        transport=MemoryTransport(world, host),
        rng=random.Random(1),
        **settings,
    ) as net:
        yield net


@asynccontextmanager
async def local(**settings: Any) -> AsyncIterator[Net]:
    """A net of run RUN on a real loopback socket."""
    settings.setdefault("run", RUN)
    identity = settings.pop("identity", None) or Identity.generate()
    async with open_net(identity, listen=[Address("127.0.0.1", 0)], scope=Scope.HOST, **settings) as net:
        yield net


def held(*nets: Net) -> dict[str, int]:
    """Gauges of the nets that are not zero, connections aside."""
    total: dict[str, int] = {}
    for net in nets:
        for name, value in net.gauges().items():
            if value and name not in ("peers", "connections"):
                total[name] = total.get(name, 0) + value
    return total


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
