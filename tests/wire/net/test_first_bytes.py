"""Two hundred strangers of as many networks on one port: what each of them costs until somebody has proved who he is.

They say a part of everything that a port understands, then nothing, a byte a second, or as much as is taken from them.
"""

from __future__ import annotations

import struct

import pytest
import trio
import trio.testing

from tests.wire.net.worlds import RUN, MemoryPipe, MemoryTransport, World, held, member
from wire.address import Scope
from wire.hello import Hello, run_tag
from wire.limits import DEFAULT_LIMITS
from wire.net.transport import send_all
from wire.noise import Cipher

Clock = trio.testing.MockClock
HELLO = Hello(ciphers=(Cipher.AES256GCM, Cipher.CHACHA20POLY1305), run_tag=run_tag(RUN)).encode()
MESSAGE_1 = struct.pack(">H", 32) + bytes(range(1, 33))
FIRST = {
    "nothing": b"",
    "half a greeting": b"PL",
    "a session": b"PLW1",
    "a hello": HELLO,
    "a hello and a key": HELLO + MESSAGE_1,
    "a hole": b"PLP1",
    "a hole that nobody expects": b"PLP1" + bytes(16),
    "a dial-back": b"PLR1",
    "a dial-back that nobody asked for": b"PLR1\x00" + bytes(16),
    "as whom": b"PLR1\x01" + bytes(16),
    "garbage": b"\xff",
}
STRANGERS = 200


def serving() -> int:
    """Tasks of connections that a listener has taken."""
    tasks = [trio.lowlevel.current_root_task()]
    for task in tasks:
        tasks += [child for nursery in task.child_nurseries for child in nursery.child_tasks] if task else []
    return sum("supervise" in task.name for task in tasks if task)


@pytest.mark.parametrize("then", ["silence", "a drip", "a flood"])
async def test_two_hundred_strangers(then: str, autojump_clock: Clock) -> None:
    world = World()
    async with member(world, "8.1.0.1", scope=Scope.INTERNET) as host, member(world, "9.9.0.1", scope=Scope.INTERNET) as friend:
        pipes: list[MemoryPipe] = []

        async def stranger(number: int) -> None:
            pipe = await MemoryTransport(world, f"9.{number}.0.1").dial(host.addresses[0])
            pipes.append(pipe)
            with_what = list(FIRST.values())[number % len(FIRST)]
            try:
                await send_all(pipe, with_what)
                while then == "a drip":
                    await send_all(pipe, b"\x01")
                    await trio.sleep(1)
                while then == "a flood":
                    await send_all(pipe, bytes(4096))
            except trio.BrokenResourceError:
                return

        async with trio.open_nursery() as nursery:
            for number in range(STRANGERS):
                nursery.start_soon(stranger, number)
            await trio.sleep(0.5)
            assert host._admission.half_open <= DEFAULT_LIMITS.half_open_max
            assert (serving() == host._admission.half_open) and (then == "a flood" or serving() > 40)
            await trio.sleep(DEFAULT_LIMITS.handshake_timeout_s * 2 + 1)
            nursery.cancel_scope.cancel()
        assert len(pipes) == STRANGERS and host._admission.half_open == 0
        assert all(pipe.other._closed for pipe in pipes), "none has a task for ever"
        taken = [pipe.sent_bytes - pipe.other._unread for pipe in pipes]
        assert max(taken) <= DEFAULT_LIMITS.preauth_max_bytes
        assert serving() == 0
        assert held(host) == {} and not host.counts["internal-error"] and not host.peers()
        assert (await friend.dial(host.addresses[0])).peer_id == host.peer_id
