"""Circuits whose end never reads: they hold their own windows at the relay, and the circuits beside them go on.

The end is hostile: its node answers pings, takes circuits and reads nothing of them; whoever calls it sends as fast as he may.
"""

from __future__ import annotations

import trio
import trio.testing

from tests.wire.sim.test_relay import QUESTION, ask, town, until
from tests.wire.sim.test_relay_windows import PIECE, held
from wire.limits import DEFAULT_LIMITS
from wire.messages import Want
from wire.net import ByteStream, Kind, MessageStream, Peer
from wire.net.circuits import OPENED
from wire.net.relay import RelayOffer
from wire.net.services import Service

Clock = trio.testing.MockClock
STUCK = 8


async def test_readers_that_stand_still_hold_their_windows_and_nobody_else(autojump_clock: Clock) -> None:
    async with town() as t:
        relay = await t.relay(relay=RelayOffer(bulk_rate=20_000_000))
        a, b, deaf = nets = [await t.house(number, "symmetric") for number in range(1, 4)]
        for net in nets:
            net.access.punch._peers = lambda: ()
        await until(lambda: all(net.access.relays.places for net in nets))
        await trio.sleep(15)  # an asker is heard so often
        await ask(a)
        await until(lambda: all(a.book.vouchers(net.peer_id) for net in (b, deaf)))
        got = 0
        room = memoryview(bytearray(len(PIECE)))

        async def sink(_: Peer, stream: ByteStream | MessageStream) -> None:
            nonlocal got
            assert isinstance(stream, ByteStream)
            while count := await stream.receive_into(room):
                got += count

        async def hold(_: Peer, stream: ByteStream | MessageStream) -> None:
            await trio.sleep_forever()

        b.serve("sink", sink)
        deaf.services._table[OPENED] = Service(hold, guest=True)
        good = await a.connect(b.peer_id)

        async def push() -> None:
            async with await good.open("sink", Kind.BYTE, 3) as stream:
                assert isinstance(stream, ByteStream)
                while True:
                    await stream.send_all(PIECE)

        async def stuff(polite: bool) -> None:
            pipe = await a.access.circuits.open(relay.peer_id, deaf.peer_id, True)
            try:
                while True:
                    if not pipe.send_now([memoryview(PIECE)]):
                        await pipe.wait_writable()
            finally:
                pipe.close() if polite else pipe.abort()

        async def rate(seconds: float) -> float:
            before = got
            await trio.sleep(seconds)
            return (got - before) / seconds

        async with trio.open_nursery() as nursery:
            nursery.start_soon(push)
            await trio.sleep(2)
            alone = await rate(0.5)
            before = sum(stream.recv.unread for stream in held(relay))
            for number in range(STUCK):
                nursery.start_soon(stuff, number < 2)
            await trio.sleep(4)
            assert await rate(0.5) > 0.7 * alone
            with trio.fail_after(1):
                assert await good.call("echo", QUESTION, Want, deadline_s=5) == QUESTION
            stuck = [stream.recv.unread for stream in held(relay) if stream.recv.unread]
            assert sum(stuck) - before > STUCK << 19, "they do stand still"
            assert max(stuck) <= DEFAULT_LIMITS.relay_bulk_window_bytes, "what nobody reads grows no window"
            nursery.cancel_scope.cancel()
        # The callers go.  Who breaks off takes along what waits at the relay; an end that is said behind it has a minute.
        await until(lambda: relay.gauges()["relay_circuits_bulk"] == 4, 5)
        stalled = await until(lambda: relay.gauges()["relay_circuits_bulk"] == 2, 90)
        assert stalled < DEFAULT_LIMITS.relay_stall_s + 1 and not relay.gauges()["unread_bytes"]
        assert not relay.counts["internal-error"]
