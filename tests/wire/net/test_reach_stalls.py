"""Whoever asks to be dialled back and then says nothing is not waited for."""

from __future__ import annotations

import random
from typing import Any

import pytest
import trio
import trio.testing

from wire.address import Address, Scope
from wire.errors import Code, WireError
from wire.identity import Identity
from wire.limits import DEFAULT_LIMITS
from wire.messages import encode
from wire.net.dial import DialRate
from wire.net.reach import NONCE_BYTES, ReachService
from wire.net.stream import MessageStream
from wire.reachmessages import ReachAsk

LIMITS = DEFAULT_LIMITS
ASK = encode(ReachAsk((str(Address("8.8.4.4", 4001)),), bytes(NONCE_BYTES)))


class Stalls(MessageStream):
    """Says so many messages, and then nothing."""

    def __init__(self, *said: bytes) -> None:
        self._said = list(said)

    async def receive(self) -> bytes:
        if not self._said:
            await trio.sleep_forever()
        return self._said.pop(0)

    async def send(self, data: Any, *, fin: bool = False) -> None:
        await trio.lowlevel.checkpoint()


class Caller:
    def __init__(self) -> None:
        self.peer_id = Identity.generate().peer_id
        self.primary = None


@pytest.mark.parametrize("said", [(), (ASK,)], ids=["no question", "no padding"])
def test_nat_a_dial_back_whose_asker_says_nothing_ends(said: tuple[bytes, ...], autojump_clock: trio.testing.MockClock) -> None:
    unused: Any = None
    caller: Any = Caller()

    async def main() -> None:
        service = ReachService(
            Identity.generate(), LIMITS, Scope.INTERNET, unused, rate=DialRate(LIMITS, Scope.INTERNET), announce=(), peers=unused,
            changed=unused, rng=random.Random(0),
        )  # fmt: skip
        with trio.fail_after(LIMITS.reach_ask_s + 1.0), pytest.raises(WireError) as caught:
            await service._answer(caller, Stalls(*said))
        assert caught.value.code == Code.TIMEOUT

    trio.run(main, clock=autojump_clock)
