"""Who is met, how often, and what is left: dials, restarts, garbage, cycles.  WIRE-1, WIRE-3, WIRE-8; wire.md section 23, items 8 and 9."""

from __future__ import annotations

import random

import pytest
import trio

from tests.wire.sim.cases import HOUSE, Clock, echo, every_seed, met
from tests.wire.sim.rooms import member
from wire.errors import WireError
from wire.identity import Identity
from wire.net import DialFailed
from wire.sim import Internet, seed_tasks


@every_seed
async def test_wire_3_the_dialled_peer_is_somebody_else(seed: int, autojump_clock: Clock) -> None:
    """Both ids are named before any stream; the address stays good for whoever it is."""
    async with met(seed) as m:
        absent = Identity(m.rng.randbytes(32)).peer_id
        with pytest.raises(DialFailed) as failure:
            await m.a.dial(m.hub.addresses[0].with_peer(absent))
        (cause,) = failure.value.causes.values()
        assert cause.kind == "peer-mismatch" and str(absent) in cause.words and str(m.hub.peer_id) in cause.words
        assert (await m.a.dial(m.hub.addresses[0])).peer_id == m.hub.peer_id


@every_seed
async def test_wire_8_section_23_8_cycles_of_streams_leave_every_gauge_at_zero(seed: int, autojump_clock: Clock) -> None:
    """10,000 for every 20th seed, 500 for the others: opened and closed, reset, refused, cancelled at a random moment."""
    async with met(seed, serve=lambda hub: hub.serve("p", echo)) as m:
        for _ in range(10_000 if seed % 20 == 0 else 500):
            match m.rng.randrange(4):
                case 0:
                    async with await m.peer.open("p") as stream:
                        await stream.send(b"x")
                case 1:
                    (await m.peer.open("p")).reset()
                case 2:
                    async with await m.peer.open("nobody") as stream:
                        with pytest.raises(WireError):
                            await stream.receive()
                        stream.reset()
                case _:
                    with trio.move_on_after(m.rng.choice((0, 0.01, 0.03, 0.05))):
                        async with await m.peer.open("p") as stream:
                            await stream.send(b"x")
                            await stream.receive()
        await trio.sleep(3)
        assert m.held() == {} and not m.peer.closed
        async with await m.peer.open("p") as stream:
            await stream.send(b"the next one")
            assert await stream.receive() == b"the next one"


@every_seed
async def test_wire_1_section_23_9_a_hundred_garbage_connections_then_a_good_peer(seed: int, autojump_clock: Clock) -> None:
    async with met(seed, count=0) as m:
        stranger, friend = m.net.host("10.0.9.9", link=HOUSE), m.net.host("10.0.9.8", link=HOUSE)

        async def garbage() -> None:
            pipe = await stranger.transport.dial(m.hub.addresses[0])
            try:
                pipe.send_now((memoryview(m.rng.choice((b"", b"PLW1", b"PLW1\0\x20" + bytes(32), m.rng.randbytes(300)))),))
                await trio.sleep(m.rng.uniform(0, 0.2))
            except trio.BrokenResourceError:
                pass
            m.rng.choice((pipe.close, pipe.abort))()

        async with trio.open_nursery() as nursery:
            for _ in range(100):
                nursery.start_soon(garbage)
        began = trio.current_time()
        async with member(friend) as good:
            await good.dial(m.hub.addresses[0])
            assert trio.current_time() - began < 1
        counts = m.hub.counts
        assert counts["internal-error"] == 0
        assert sum(count for name, count in counts.items() if name.startswith(("handshake-", "refused-"))) >= 50
        await trio.sleep(15)


@every_seed
async def test_section_23_9_a_restart_with_the_same_identity_is_back_within_five_seconds(seed: int, autojump_clock: Clock) -> None:
    seed_tasks(seed)
    net, rng = Internet(seed), random.Random(seed)
    here, there = net.host("10.0.0.1", link=HOUSE), net.host("10.0.0.2", link=HOUSE)
    async with net.running(), member(here) as hub:
        hub.serve("p", echo)
        async with member(there) as first:
            await first.dial(hub.addresses[0])
            await trio.sleep(rng.uniform(0, 3))
            net.kill(there)  # without a word
        net.restart(there)
        await trio.sleep(rng.uniform(0, 5))
        async with member(there) as second:
            began = trio.current_time()
            peer = await second.dial(hub.addresses[0])
            async with await peer.open("p") as stream:
                await stream.send(b"again")
                assert await stream.receive() == b"again"
            assert trio.current_time() - began <= 5
            assert [known.boot_id for known in hub.peers()] == [second._boot_id]
