"""Listeners while the network changes faster than addresses are bound."""

from __future__ import annotations

import errno
from typing import cast

import pytest
import trio
import trio.testing

from wire.address import Address
from wire.net.bound import Listeners
from wire.net.interfaces import NetworkChanged
from wire.net.netevents import Listening, NotListening
from wire.net.transport import Listener, Transport

HOME = Address("10.0.0.1", 4001)
CAME, WENT = NetworkChanged(("10.0.0.1",), ()), NetworkChanged((), ("10.0.0.1",))


class Bound:
    def __init__(self, address: Address) -> None:
        self.address, self.closed = address, False

    def close(self) -> None:
        self.closed = True


class Gated:
    """A transport whose `listen` waits for the gate; `exclusive`: an address can be bound once, as kernels have it."""

    def __init__(self, *, exclusive: bool) -> None:
        self.gate, self.made, self.exclusive = trio.Event(), list[Bound](), exclusive

    async def listen(self, address: Address) -> Bound:
        await self.gate.wait()
        if self.exclusive and any(not item.closed and item.address == address for item in self.made):
            raise OSError(errno.EADDRINUSE, "in use")
        self.made.append(Bound(address))
        return self.made[-1]


class Case:
    def __init__(self, *, exclusive: bool = False) -> None:
        self.transport = Gated(exclusive=exclusive)
        self.said: list[Listening | NotListening] = []
        self.served: list[Listener] = []
        self.listeners = Listeners(cast(Transport, self.transport), self.served.append, self.said.append)
        self.listeners.start([], [(HOME, "not there")])
        self.said.clear()

    async def run(self, *changes: NetworkChanged, close: bool = False) -> None:
        """Each change is under way, in this order, before anything is bound."""
        async with trio.open_nursery() as nursery:
            for change in changes:
                nursery.start_soon(self.listeners.follow, change)
                await trio.testing.wait_all_tasks_blocked()
            if close:
                self.listeners.close()
            self.transport.gate.set()

    @property
    def open(self) -> list[Bound]:
        return [item for item in self.transport.made if not item.closed]


@pytest.mark.parametrize("exclusive", [False, True])
async def test_nat_4_an_address_that_comes_twice_is_bound_once(exclusive: bool) -> None:
    case = Case(exclusive=exclusive)
    await case.run(CAME, CAME)
    assert len(case.open) == len(case.served) == 1 and case.listeners.addresses == (HOME,)
    assert case.said == [Listening(HOME)], "nothing is said to be missing that is listened on"


async def test_nat_4_an_address_that_goes_while_it_is_bound_gets_no_listener() -> None:
    case = Case()
    await case.run(CAME, WENT)
    assert not case.open and not case.served and not case.said and case.listeners.addresses == ()
    await case.run(CAME)
    assert len(case.open) == 1 and case.said == [Listening(HOME)], "and is bound when it is back"


async def test_nat_4_an_address_that_goes_and_comes_back_while_it_is_bound_is_listened_on() -> None:
    case = Case(exclusive=True)
    await case.run(CAME, WENT, CAME)
    assert len(case.open) == 1 and case.listeners.addresses == (HOME,)


async def test_what_is_bound_after_the_end_is_closed() -> None:
    case = Case()
    await case.run(CAME, close=True)
    assert not case.open and not case.served
