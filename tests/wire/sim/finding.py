"""What the FIND tests share: nodes on the simulated internet, swept over seeds of randomness in virtual time."""

from __future__ import annotations

import ipaddress
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import trio
import trio.testing

from tests.wire.net.worlds import RUN
from wire.address import Address, Scope
from wire.errors import Code
from wire.identity import Identity, PeerId
from wire.net import Net, Peer, SeedList, SeedState, open_net
from wire.sim import Host, Internet, Link, Nat, seed_tasks

PORT = 4001
SWEEP = range(20)


def swept(main: Callable[[int], Awaitable[None]], seeds: Iterable[int] = SWEEP) -> None:
    """Run `main(seed)` under a virtual clock for each seed, tasks in the seed's order."""
    for seed in seeds:
        seed_tasks(seed)
        try:
            trio.run(main, seed, clock=trio.testing.MockClock(autojump_threshold=0))
        except BaseException as error:
            error.add_note(f"with seed {seed}")
            raise


def internet(seed: int) -> tuple[Internet, Callable[..., Host]]:
    """An internet, and what makes a machine there: a home line with delays of its own, addresses as they are given."""
    net = Internet(seed)

    def host(*addresses: str, nat: Nat | None = None) -> Host:
        return net.host(*addresses, link=Link(net.rng.uniform(0.002, 0.04), 0.005), nat=nat)

    return net, host


def identity(number: int) -> Identity:
    return Identity(number.to_bytes(4, "big").ljust(32, b"-"))


@asynccontextmanager
async def node(host: Host, who: int = 0, *, listen: Iterable[str] = (), **settings: Any) -> AsyncIterator[Net]:
    """A node of run RUN on a machine, listening on its first address; `who` makes its identity, and its chance."""
    settings.setdefault("run", RUN)
    settings.setdefault("scope", Scope.INTERNET)
    places = [Address(name, PORT) for name in listen or (host.name,)]
    if settings["scope"] is Scope.INTERNET and host.nat is None:
        settings.setdefault("announce", [Address(host.name, PORT)])  # told at once, not only when others have reached it there
    chance = random.Random(who * 2**32 + host.internet.rng.getrandbits(32))
    number = who or int(ipaddress.ip_address(host.name)) % 2**31
    async with open_net(identity(number), listen=places, transport=host.transport, rng=chance, **settings) as net:
        yield net


def at(host: Host | str, port: int = PORT) -> str:
    name = host if isinstance(host, str) else host.name
    return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"


def seeds(*places: Host | str) -> SeedList:
    return SeedList.of(*(at(place) if isinstance(place, Host) else place for place in places))


def state(net: Net, place: Host | str) -> SeedState:
    """What `net` says of the seed at a place."""
    text = str(Address.parse(place if isinstance(place, str) else at(place)))
    return next(found for entry, found in net.seed_states.items() if str(entry) == text)


async def until(condition: Callable[[], object], within_s: float, every_s: float = 0.02) -> float:
    """Wait until something holds; how long it took.  Raises `trio.TooSlowError`."""
    began = trio.current_time()
    with trio.fail_after(within_s):
        while not condition():
            await trio.sleep(every_s)
    return trio.current_time() - began


def known(net: Net) -> set[PeerId]:
    return {record.peer_id for record in net.known()}


def dials(host: Host, since: float = 0.0) -> list[str]:
    """Whom this machine dialled, in order."""
    return [entry[4][0] for entry in host.internet.log if entry[1] == "dial" and entry[2] == host.name and entry[0] >= since]


async def hang_up(*peers: Peer) -> None:
    for peer in peers:
        peer.goaway(Code.SHUTDOWN)
        await peer.wait_closed()
