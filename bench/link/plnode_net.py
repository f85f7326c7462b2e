"""Our own: two `Net`s of the package `wire`, one connection, encrypted records with streams, credit and priorities.

Messages go over a byte stream of class 2 (what tensors have), round trips over a message stream of class 1 (what control has). A
handshake is `Net.dial` of another node: TCP, clear hello, Noise XX, both HELLOs, and its place among the peers.

Questions beside a flow are calls (`Peer.call`), each on a stream of its own, as between nodes.  A node asks for bbr; here it has the
congestion control of the other contestants, for the reason given in `sockets.py`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any

from bench.link import settings
from bench.link.bytepipe import EndOfPipe, PipeClient, answer, drain
from bench.link.child import TRIO, main
from bench.link.competitor import ROUND_TRIP_BYTES, Heard, Job
from wire.address import Address, Scope
from wire.errors import Code
from wire.identity import Identity
from wire.messages import Size, message
from wire.net import ByteStream, Kind, MessageStream, Net, Peer, open_net
from wire.net.transport import TcpTransport

__all__ = ["CALL", "PATIENCE_S", "TENSOR_CLASS", "Plnode", "Question", "answer_call", "call", "congestion_of", "counts", "open_node"]

BYTES = "bench/bytes/1"
ECHO = "bench/echo/1"
CALL = "bench/call/1"
RUN = bytes(range(32))
CONTROL_CLASS = 1
TENSOR_CLASS = 2
PATIENCE_S = 10.0


def open_node(listen: tuple[Address, ...] = ()) -> AbstractAsyncContextManager[Net]:
    """A node's network as the bench wants it."""
    return open_net(
        Identity.generate(),
        run=RUN,
        listen=listen,
        scope=Scope.HOST,
        agent="bench",
        limits=settings.limits(),
        transport=TcpTransport(settings.congestion()),
    )


def congestion_of(peer: Peer) -> str:
    """The congestion control in force on its connection."""
    assert peer.primary is not None
    return peer.primary.pipe.info().congestion


@message(60_000)
@dataclass(frozen=True, slots=True)
class Question:
    """A call and its answer; the bench runs among its own processes, so the number only has to be no other's here."""

    filling: Annotated[bytes, Size(ROUND_TRIP_BYTES)]


QUESTION = Question(bytes(ROUND_TRIP_BYTES))


async def answer_call(peer: Peer, question: Question) -> Question:
    """The server's half of `call`."""
    return question


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
    async for heard in stream:
        await stream.send(heard)


class PlnodeClient(PipeClient):
    def __init__(self, peer: Peer, bulk: ByteStream, control: MessageStream, stranger: Net, where: Address) -> None:
        super().__init__(StreamPipe(bulk))
        self.congestion = congestion_of(peer)
        self._peer = peer
        self._control = control
        self._stranger = stranger
        self._where = where

    async def round_trips(self, count: int) -> list[float]:
        send, receive = self._control.send, self._control.receive
        filling = bytes(ROUND_TRIP_BYTES)
        trips = []
        for _ in range(count):
            began = time.perf_counter()
            await send(filling)
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


    def pull(self, message_bytes: int, heard: Heard) -> Sequence[Job]:
        async def take() -> None:
            async with await self._peer.open(BYTES, Kind.BYTE, TENSOR_CLASS) as stream:
                assert isinstance(stream, ByteStream)
                await drain(StreamPipe(stream), message_bytes, heard)

        return [take]

    async def control(self) -> float | None:
        return await call(self._peer)

    def counts(self) -> dict[str, float]:
        return counts(self._peer)


async def call(peer: Peer) -> float:
    """A question of the size that control messages have; seconds to its answer."""
    began = time.perf_counter()
    await peer.call(CALL, QUESTION, Question, deadline_s=PATIENCE_S)
    return time.perf_counter() - began


def counts(peer: Peer) -> dict[str, float]:
    """What our node counts beyond bytes, as far as this version does."""
    stats = peer.stats
    found = {"connections": stats.connections, "resent": float(stats.resent_chunks)}
    if stats.packed.raw_bytes:
        found["wire_percent"] = 100 * stats.packed.wire_bytes / stats.packed.raw_bytes
    return found


class Plnode:
    name = "plnode"
    loop = TRIO

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[dict[str, Any]]:
        async with open_node((Address(settings.listen_host(), 0),)) as net:
            net.serve(BYTES, _answer)
            net.serve(ECHO, _echo)
            net.serve_calls(CALL, Question, answer_call)
            yield {"address": str(net.addresses[0].with_peer(net.peer_id))}

    @asynccontextmanager
    async def connect(self, where: dict[str, Any]) -> AsyncIterator[PlnodeClient]:
        address = Address.parse(where["address"])
        async with open_node() as net, open_node() as stranger:
            peer = await net.dial(address, deadline_s=PATIENCE_S)
            bulk = await peer.open(BYTES, Kind.BYTE, TENSOR_CLASS)
            control = await peer.open(ECHO, Kind.MESSAGE, CONTROL_CLASS)
            assert isinstance(bulk, ByteStream) and isinstance(control, MessageStream)
            async with bulk, control:
                yield PlnodeClient(peer, bulk, control, stranger, address)


if __name__ == "__main__":
    main(Plnode())
