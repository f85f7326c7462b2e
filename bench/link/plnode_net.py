"""Our own: two `Net`s of the package `wire`, one connection, encrypted records with streams, credit and priorities.

Messages go over a byte stream of class 2 (what tensors have), round trips over a message stream of class 1 (what control has). A
handshake is `Net.dial` of another node: TCP, clear hello, Noise XX, both HELLOs, and its place among the peers.

A node asks for bbr.  Here it has the congestion control of the other contestants, for the reason given in `sockets.py`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from bench.link import sockets
from bench.link.bytepipe import EndOfPipe, PipeClient, answer
from bench.link.child import TRIO, main
from bench.link.competitor import ROUND_TRIP_BYTES
from wire.address import Address, Scope
from wire.errors import Code
from wire.identity import Identity
from wire.net import ByteStream, Kind, MessageStream, Net, Peer, open_net
from wire.net.transport import TcpListener, TcpPipe, TcpTransport

__all__ = ["Plnode"]

class SteadyListener:
    """A `Listener` whose pipes are steady."""

    def __init__(self, inner: TcpListener) -> None:
        self._inner = inner
        self.address = inner.address

    async def accept(self) -> TcpPipe:
        return _steady(await self._inner.accept())

    def close(self) -> None:
        self._inner.close()


class SteadyTransport(TcpTransport):
    """TCP as nodes use it, but for the congestion control."""

    async def dial(self, address: Address) -> TcpPipe:
        return _steady(await super().dial(address))

    async def listen(self, address: Address) -> SteadyListener:  # type: ignore[override]
        return SteadyListener(await super().listen(address))


def _steady(pipe: TcpPipe) -> TcpPipe:
    sockets.steady(pipe._sock)  # the bench reaches inside: no node has a reason to change this after the start
    return pipe


BYTES = "bench/bytes/1"
ECHO = "bench/echo/1"
RUN = bytes(range(32))
CONTROL_CLASS = 1
TENSOR_CLASS = 2
PATIENCE_S = 10.0


def _net(listen: tuple[Address, ...] = ()) -> Any:
    return open_net(
        Identity.generate(), run=RUN, listen=listen, scope=Scope.HOST, agent="bench", transport=SteadyTransport()
    )


class StreamPipe:
    """A `BytePipe`: a message is sealed from where it lies and opened into where it shall lie."""

    def __init__(self, stream: ByteStream) -> None:
        self.send = stream.send_all
        self._receive_into = stream.receive_into

    async def receive(self, place: memoryview) -> int:
        return await self._receive_into(place, at_least=len(place))


async def _answer(peer: Peer, stream: ByteStream | MessageStream) -> None:
    assert isinstance(stream, ByteStream)
    try:
        await answer(StreamPipe(stream))
    except EndOfPipe:
        return


async def _echo(peer: Peer, stream: ByteStream | MessageStream) -> None:
    assert isinstance(stream, MessageStream)
    async for message in stream:
        await stream.send(message)


class PlnodeClient(PipeClient):
    def __init__(self, peer: Peer, bulk: ByteStream, control: MessageStream, stranger: Net, where: Address) -> None:
        super().__init__(StreamPipe(bulk))
        assert peer.primary is not None and isinstance(peer.primary.pipe, TcpPipe)
        self.congestion = sockets.congestion_of(peer.primary.pipe._sock)
        self._control = control
        self._stranger = stranger
        self._where = where

    async def round_trips(self, count: int) -> list[float]:
        send, receive = self._control.send, self._control.receive
        message = bytes(ROUND_TRIP_BYTES)
        trips = []
        for _ in range(count):
            began = time.perf_counter()
            await send(message)
            await receive()
            trips.append(time.perf_counter() - began)
        return trips

    async def handshake(self) -> float | None:
        began = time.perf_counter()
        peer = await self._stranger.dial(self._where, deadline_s=PATIENCE_S)
        took = time.perf_counter() - began
        peer.goaway(Code.SHUTDOWN)
        await peer.wait_closed()
        return took


class Plnode:
    name = "plnode"
    loop = TRIO

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[dict[str, Any]]:
        async with _net((Address.parse("/ip4/127.0.0.1/tcp/0"),)) as net:
            net.serve(BYTES, _answer)
            net.serve(ECHO, _echo)
            yield {"address": str(net.addresses[0].with_peer(net.peer_id))}

    @asynccontextmanager
    async def connect(self, where: dict[str, Any]) -> AsyncIterator[PlnodeClient]:
        address = Address.parse(where["address"])
        async with _net() as net, _net() as stranger:
            peer = await net.dial(address, deadline_s=PATIENCE_S)
            bulk = await peer.open(BYTES, Kind.BYTE, TENSOR_CLASS)
            control = await peer.open(ECHO, Kind.MESSAGE, CONTROL_CLASS)
            assert isinstance(bulk, ByteStream) and isinstance(control, MessageStream)
            async with bulk, control:
                yield PlnodeClient(peer, bulk, control, stranger, address)


if __name__ == "__main__":
    main(Plnode())
