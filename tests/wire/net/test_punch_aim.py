"""Addresses that a peer names for a punch must neither aim us at somebody nor keep us from dialling him ourselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import trio
import trio.testing

from wire.address import Address, Scope
from wire.identity import Identity
from wire.limits import DEFAULT_LIMITS
from wire.net.dial import DialRate
from wire.net.punch import PunchService
from wire.reachability import Reachability

LIMITS = DEFAULT_LIMITS
SOMEBODY = "8.8.4.4"
ATTEMPTS = 30


class Nowhere:
    """A network that answers nobody."""

    def __init__(self) -> None:
        self.dials = 0

    async def dial(self, address: Address, *, local_port: int = 0) -> Any:
        self.dials += 1
        await trio.sleep_forever()


def service(transport: Any, rate: DialRate, own: Identity) -> PunchService:
    unused: Any = None
    listening: Sequence[Address] = (Address("0.0.0.0", 4001),)
    return PunchService(
        own.peer_id, LIMITS, Scope.INTERNET, transport, rate=rate, finding=lambda: Reachability(LIMITS).finding((), 0.0),
        listening=lambda: listening, record=unused, addresses=unused, seen=lambda peer: (), peers=unused, dial=unused,
        authenticate=unused, adopt=unused, emit=unused,
    )  # fmt: skip


def test_nat_attempts_that_are_broken_off_do_not_use_up_the_dials_to_somebody(autojump_clock: trio.testing.MockClock) -> None:
    """A place in the queue of dials is not given back: a member that names one host, says Go and resets would fill it for minutes."""
    rate, transport = DialRate(LIMITS, Scope.INTERNET), Nowhere()
    punch = service(transport, rate, Identity.generate())
    other = Identity.generate().peer_id
    named = [str(Address(SOMEBODY, 4000 + number)) for number in range(LIMITS.punch_candidates_max)]

    async def main() -> None:
        for number in range(ATTEMPTS):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(punch._meet, other, bytes([number]) * 16, named)
                await trio.testing.wait_all_tasks_blocked()
                nursery.cancel_scope.cancel()
        assert transport.dials >= 1  # it does dial
        assert rate.delay_s(Address(SOMEBODY, 4001), trio.current_time()) <= LIMITS.punch_dial_s + 1.0

    trio.run(main, clock=autojump_clock)
