"""One of eight peers floods; the others notice nothing.  WIRE-10."""

from __future__ import annotations

from dataclasses import replace

import trio

from tests.wire.sim.cases import SELF, Clock, Hostile, echo, every_seed, met
from wire.errors import Code
from wire.identity import Identity
from wire.messages import OpenBody, encode
from wire.net import Kind, Peer
from wire.records import FrameType
from wire.replies import PING_BODY
from wire.sim import Link

HOSTILE = Identity(b"hostile".ljust(32, b"-")).peer_id
PER_S = 10_000
FLOODS = (FrameType.PING, FrameType.OPEN, FrameType.HELLO)


async def answers(peer: Peer, count: int, into: list[float]) -> None:
    async with await peer.open("p") as stream:
        for _ in range(count):
            began = trio.current_time()
            await stream.send(bytes(200))
            await stream.receive()
            into.append(trio.current_time() - began)
            await trio.sleep(0.02)


async def p99(peers: list[Peer]) -> float:
    times: list[float] = []
    async with trio.open_nursery() as nursery:
        for peer in peers:
            nursery.start_soon(answers, peer, 20, times)
    return sorted(times)[int(len(times) * 0.99)]


@every_seed
async def test_wire_10_a_flood_of_small_frames_is_cut_and_delays_nobody(seed: int, autojump_clock: Clock) -> None:
    """Pings, open-and-resets and HELLO updates by turns, 10,000 a second, from a peer that comes back as soon as it was cut."""
    line = Link(0.01, 0.002, 20e6, 20e6)
    async with met(seed, count=7, line=line, serve=lambda hub: hub.serve("p", echo)) as m:
        quiet_s = await p99(m.peers)
        flooder = m.net.host("10.0.9.9", link=line)
        reasons: list[Code] = []
        begun: list[FrameType] = []
        flooded = 0

        async def watch(peer: Peer) -> None:
            reasons.append((await peer.wait_closed()).code)

        async def flood(nursery: trio.Nursery) -> None:
            nonlocal flooded
            while True:
                hostile = await Hostile.dial(flooder, m.hub)
                await trio.sleep(0.1)
                peer = m.hub.peer(HOSTILE)
                assert peer is not None
                nursery.start_soon(watch, peer)
                what = FLOODS[len(begun) % len(FLOODS)]
                begun.append(what)
                try:
                    for number in range(PER_S):
                        if what is FrameType.PING:
                            data = hostile.record(what, 0, PING_BODY.pack(number, 0))
                        elif what is FrameType.HELLO:
                            data = hostile.record(what, 0, encode(replace(SELF, revision=number + 2)))
                        else:
                            opening = encode(OpenBody(Kind.MESSAGE, "p", 1, 1 << 17, b""))
                            data = hostile.record(FrameType.OPEN, 2 * number + 1, opening)
                            data += hostile.record(FrameType.RESET, 2 * number + 1, int(Code.CANCELLED).to_bytes(2, "big"))
                        await hostile.say(data)
                        flooded += 1
                        if number % 10 == 9:
                            await trio.sleep(10 / PER_S)
                            if peer.primary is None:
                                break  # cut; what it still sends in the last second is read and dropped
                except trio.BrokenResourceError:
                    pass
                hostile.pipe.abort()
                await trio.sleep(0.1)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(flood, nursery)
            await trio.sleep(0.2)
            loud_s = await p99(m.peers)
            nursery.cancel_scope.cancel()
        assert flooded > 1000 and set(begun) == set(FLOODS), "each kind, and in earnest"
        assert len(reasons) >= len(begun) - 1 and set(reasons) == {Code.EXCESSIVE}
        assert loud_s < 2 * quiet_s
        assert all(not peer.closed for peer in m.peers)
        await trio.sleep(40)
