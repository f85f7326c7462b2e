"""NAT-8 on real kernels: an address changes in the middle of a transfer, the old one is dead, and nobody is told.

Of the client itself, which sees it; of its router, which it cannot see; and a router that comes back with the address that it had, but
has forgotten what it translated.  In every case the transfer goes on where it was, as the same peer, and no tensor comes twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import trio

from bench.children import Child
from bench.lab import CLIENT, SERVER, Lab
from tests.net.conftest import open_hosts
from tests.net.homes import CONE_3, PORT, note, swarm
from tests.net.test_nodes import heard

COUNT, SIZE = 50, 1_000_000
MOVED_AFTER = 15  # tensors
WENT_ON_S = 15.0


async def through(sender: Child, receiver: Child, to: str, move: Callable[[], object]) -> str:
    """Push to the receiver, move after the first part, and see that all of it arrives; what there is to tell of it."""
    await sender.tell({"push": COUNT, "size": SIZE, "to": to})
    began, numbers, moved, pauses, sources = time.monotonic(), [], 0.0, [], set()
    last = began
    while len(numbers) < COUNT:
        got = await heard(receiver, "got", 60.0)
        assert got["whole"] is True
        numbers.append(got["got"])
        sources.add(got["from"])
        if moved:
            pauses.append(got["now"] - last)
        elif len(numbers) == MOVED_AFTER:
            await trio.to_thread.run_sync(move)
            moved = time.monotonic()
        last = got["now"]
    await heard(sender, "pushed")
    assert sorted(numbers) == list(range(COUNT)), "each once"
    assert len(sources) == 1, "the same peer"
    assert max(pauses) < WENT_ON_S
    return f"{COUNT * SIZE / 1e6:g} MB in {last - began:.1f} s, longest pause after it {max(pauses):.2f} s"


async def test_nat_8_a_client_gets_another_address(lab: Lab) -> None:
    with trio.fail_after(90):
        async with open_hosts(lab) as hosts:
            server = await hosts.start(SERVER, "listen", lab.addr(SERVER), PORT)
            address = (await heard(server, "ready"))["ready"]
            client = await hosts.start(CLIENT)
            await client.tell({"dial": address})
            await heard(client, "connected")
            try:
                told = await through(client, server, address.rpartition("/")[2], lab.readdress_client)
            finally:
                lab.readdress_client(2)
            note(f"client with another address: {told}")


@pytest.mark.parametrize("last", [9, 2], ids=["another address", "a reboot"])
async def test_nat_8_a_router_gets_another_address_or_forgets_its_mappings(world: Lab, last: int) -> None:
    with trio.fail_after(90):
        async with swarm(world) as made:
            home, _ = await made.home(CONE_3)
            connected = set()
            while made.ids[0] not in connected:
                connected.add((await heard(home, "connected"))["connected"])
            try:
                told = await through(home, made.public[0], made.ids[0], lambda: world.renumber(8, last))
            finally:
                world.renumber(8, 2)
            note(f"router, {'another address' if last != 2 else 'reboot'}: {told}")
