"""py-libp2p: Noise XX and yamux over TCP, on trio as we are; the library we would have used.

A host with the security and muxer options reduced to that pair (no other negotiation to lose time in), identify's discovery of
addresses off.  `write` of a whole message (yamux cuts it), `read(n)` with what is missing.

For each handshake a fresh host dials, since a host keeps the connections it has; making the host is not counted.  In release 0.8
250 ms of it are the head start that the dialler gives a first transport and waits out even where there is only one address.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio
from libp2p import create_yamux_muxer_option, new_host
from libp2p.abc import IHost, INetStream
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_new_noise_pair
from libp2p.custom_types import TProtocol
from libp2p.network.stream.exceptions import StreamError
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.security.noise.transport import Transport as NoiseTransport
from multiaddr import Multiaddr  # type: ignore[import-untyped]

from bench.link import settings, sockets
from bench.link.bytepipe import EndOfPipe, PipeClient, answer
from bench.link.child import TRIO, main

__all__ = ["PyLibp2p"]

PROTOCOL = TProtocol("/bench/1")


def _host() -> IHost:
    key = create_new_key_pair()
    noise = NoiseTransport(key, noise_privkey=create_new_noise_pair().private_key)
    return new_host(
        key_pair=key, sec_opt={NOISE: noise}, muxer_opt=create_yamux_muxer_option(), disable_identify_address_discovery=True
    )


class NetStreamPipe:
    """A `BytePipe`."""

    def __init__(self, stream: INetStream) -> None:
        self._stream = stream

    async def send(self, data: memoryview) -> None:
        await self._stream.write(data.obj if isinstance(data.obj, bytes) else bytes(data))

    async def receive(self, place: memoryview) -> int:
        data = await self._stream.read(len(place))
        place[: len(data)] = data
        return len(data)


async def _answer(stream: INetStream) -> None:
    try:
        await answer(NetStreamPipe(stream))
    except (EndOfPipe, StreamError):
        return


class PyLibp2pClient(PipeClient):
    def __init__(self, stream: INetStream, beside: INetStream, address: str) -> None:
        super().__init__(NetStreamPipe(stream))
        self._beside = PipeClient(NetStreamPipe(beside))
        self._turn = trio.Lock()  # a new stream costs round trips of its own: one standing stream, one question at a time
        with sockets.SteadyFactory().socket(trio.socket.AF_INET, trio.socket.SOCK_STREAM) as like_its_own:
            self.congestion = sockets.congestion_of(like_its_own)
        self._address = address

    async def handshake(self) -> float | None:
        host = _host()
        peer = info_from_p2p_addr(Multiaddr(self._address))
        async with host.run([]):
            began = time.perf_counter()
            await host.connect(peer)
            return time.perf_counter() - began


    async def control(self) -> float | None:
        async with self._turn:
            (took,) = await self._beside.round_trips(1)
            return took


class PyLibp2p:
    name = "py-libp2p"
    loop = TRIO

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[dict[str, Any]]:
        trio.socket.set_custom_socket_factory(sockets.SteadyFactory())
        host = _host()
        async with host.run([Multiaddr(f"/ip4/{settings.listen_host()}/tcp/0")]):
            host.set_stream_handler(PROTOCOL, _answer)
            yield {"address": str(host.get_addrs()[0])}

    @asynccontextmanager
    async def connect(self, where: dict[str, Any]) -> AsyncIterator[PyLibp2pClient]:
        trio.socket.set_custom_socket_factory(sockets.SteadyFactory())
        host = _host()
        async with host.run([]):
            peer = info_from_p2p_addr(Multiaddr(where["address"]))
            await host.connect(peer)
            streams = [await host.new_stream(peer.peer_id, [PROTOCOL]) for _ in range(2)]
            yield PyLibp2pClient(*streams, where["address"])


if __name__ == "__main__":
    main(PyLibp2p())
