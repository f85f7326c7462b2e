"""The shell's part of the budget: reserved with the connection, back however the connection or its making ends, refused when full."""

from __future__ import annotations

import errno
from dataclasses import replace

import pytest
import trio
import trio.testing

from tests.wire.net.test_link import party
from tests.wire.net.worlds import World, member, memory_pipes
from wire.budget import UnreadBudget
from wire.errors import Code, WireError
from wire.identity import PeerId
from wire.limits import DEFAULT_LIMITS
from wire.messages import SessionHello
from wire.net.causes import heard_nothing
from wire.net.link import Link
from wire.net.transport import Pipe
from wire.net.upgrade import Local, upgrade
from wire.pipeinfo import PipeInfo

Clock = trio.testing.MockClock
CONTROL = DEFAULT_LIMITS.connection_window_control_bytes
GUEST = DEFAULT_LIMITS.connection_window_guest_bytes


async def shake(one: Local, other: Local) -> list[Link | BaseException]:
    """What either side's upgrade came to."""
    outcome: list[Link | BaseException] = [RuntimeError(), RuntimeError()]

    async def side(at: int, local: Local, pipe: Pipe) -> None:
        try:
            outcome[at] = await upgrade(pipe, local, initiator=at == 0)
        except (WireError, LookupError) as error:
            outcome[at] = error

    near, far = memory_pipes(("10.0.0.1", 1), ("10.0.0.2", 2))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(side, 0, one, near)
        nursery.start_soon(side, 1, other, far)
    return outcome


@pytest.mark.parametrize("guest", [False, True])
async def test_a_connection_is_reserved_and_comes_back_with_its_end(guest: bool, autojump_clock: Clock) -> None:
    budget = UnreadBudget(64 << 20)
    links = await shake(replace(party(), budget=budget), party(None) if guest else party())
    assert (budget.used, budget.reservations) == (GUEST if guest else CONTROL, 1)
    for link in links:
        assert isinstance(link, Link)
        link.discard()
    assert (budget.used, budget.reservations) == (0, 0)


async def test_a_full_budget_refuses_a_new_connection_and_both_sides_know_why(autojump_clock: Clock) -> None:
    budget = UnreadBudget(CONTROL + CONTROL // 2)
    local = replace(party(), budget=budget)
    first = await shake(party(), local)
    for outcome in await shake(party(), local):
        assert isinstance(outcome, WireError) and outcome.code is Code.RESOURCE_LIMIT and outcome.retryable
    assert (budget.used, budget.reservations, budget.refused) == (CONTROL, 1, 1)
    assert isinstance(first[1], Link)
    first[1].discard()
    for outcome in await shake(party(), local):
        assert isinstance(outcome, Link), "there is room again"
        outcome.discard()
    assert budget.used == 0


async def test_an_upgrade_that_fails_behind_the_handshake_keeps_nothing(autojump_clock: Clock) -> None:
    def broken(peer_id: PeerId, guest: bool, info: PipeInfo) -> SessionHello:
        raise LookupError("no record yet")

    budget, broken_budget = UnreadBudget(64 << 20), UnreadBudget(64 << 20)
    lost, raised = await shake(replace(party(), budget=budget), replace(party(), budget=broken_budget, hello=broken))
    assert isinstance(lost, WireError) and isinstance(raised, LookupError)
    assert (budget.used, budget.refused, broken_budget.used) == (0, 0, 0)


async def test_an_upgrade_that_is_cancelled_keeps_nothing(autojump_clock: Clock) -> None:
    budget = UnreadBudget(64 << 20)
    seen: list[int] = []
    near, far = memory_pipes(("10.0.0.1", 1), ("10.0.0.2", 2))
    async with trio.open_nursery() as nursery:

        def late(peer_id: PeerId, guest: bool, info: PipeInfo) -> SessionHello:
            seen.append(budget.used)
            nursery.cancel_scope.cancel()
            return party().hello(peer_id, guest, info)

        nursery.start_soon(lambda: upgrade(near, party(), initiator=True))
        nursery.start_soon(lambda: upgrade(far, replace(party(), budget=budget, hello=late), initiator=False))
    assert nursery.cancel_scope.cancelled_caught
    assert seen == [CONTROL], "it was reserved before the HELLO"
    assert budget.used == 0


async def test_what_a_protocol_needed_is_remembered_over_connections(autojump_clock: Clock) -> None:
    world = World()
    async with member(world, "10.0.0.1") as a, member(world, "10.0.0.2") as b:
        peer = await a.dial(b.addresses[0])
        peer.remembered.put("big", 8 << 20)
        peer.sender("t", b"edge")
        await trio.sleep(2)
        assert len(peer.all_links) > 1 and all(link.remembered is peer.remembered for link in peer.all_links)
        assert b.peers()[0].remembered.get("big") == 0, "it is this side's knowledge"


@pytest.mark.parametrize(
    ("cause", "silent"),
    [
        (OSError(errno.ETIMEDOUT, ""), True),
        (OSError(errno.EHOSTUNREACH, ""), True),
        (OSError(errno.ECONNRESET, ""), False),
        ("the peer closed the connection without a goodbye", False),
    ],
)
def test_silence_is_told_from_an_end_that_was_heard(cause: OSError | str, silent: bool) -> None:
    assert heard_nothing(cause) is silent
