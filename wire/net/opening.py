"""`async with open_net(...) as net`: the one way to a network, with everything that may be chosen and what it is otherwise.

The parts are made and connected in network.py.  Here stand only the defaults, so that the object itself has none: a default in
two places is two defaults one day.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from wire.address import Address, Scope
from wire.identity import Identity
from wire.limits import DEFAULT_LIMITS, Limits
from wire.net.network import Net
from wire.net.relay import RelayOffer
from wire.net.seedlist import SeedList
from wire.net.transport import TcpTransport, Transport

NOTICE_S = 7.0  # whoever stops a program waits ten seconds (docker stop), and goodbyes take one


@asynccontextmanager
async def open_net(
    identity: Identity,
    *,
    run: bytes | None,
    listen: Sequence[Address] = (),
    scope: Scope = Scope.INTERNET,
    seeds: SeedList | None = None,
    data_dir: Path | None = None,
    announce: Sequence[Address] = (),
    limits: Limits = DEFAULT_LIMITS,
    capabilities: Sequence[str] = (),
    agent: str = "plnode/0.1",
    transport: Transport | None = None,
    rng: random.Random | None = None,
    relay: RelayOffer | None = None,
    portmap: bool = False,
    notice_s: Callable[[], float] = lambda: NOTICE_S,
    wall_time: Callable[[], float] = time.time,
) -> AsyncIterator[Net]:
    """The network of this node, running while the block runs.

    `run`: run id of 32 bytes; None for a newcomer without a manifest, or a seed for all runs.  `listen`: addresses to bind, port
    0 for any; none at all for a node that only dials.  `data_dir`: where known peers and the sequence number are kept; None
    keeps nothing.  `relay`: what to do for others that cannot be dialled.  `portmap`: ask the router to forward our ports.
    `notice_s`: asked at the end, how long that may wait for those whose circuits go through this node; it waits no longer than
    `relay_notice_s`, and not at all without a circuit.  `wall_time`: Unix time, to compare clocks with peers'.  Raises
    `BindFailed` if addresses were given and none could be bound, before anything else happens.
    """
    net = Net(
        identity,
        run=run,
        scope=scope,
        seeds=seeds,
        data_dir=data_dir,
        announce=announce,
        limits=limits,
        capabilities=capabilities,
        agent=agent,
        transport=transport or TcpTransport(),
        rng=rng or random.Random(os.urandom(16)),
        relay=relay or RelayOffer(),
        portmap=portmap,
        notice_s=notice_s,
        wall_time=wall_time,
    )
    async with net.running(listen):
        yield net
