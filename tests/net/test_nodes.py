"""Two nodes as processes on two hosts: they find each other, exchange, and dead seeds do not keep them."""

from __future__ import annotations

from typing import Any

import trio

from bench.children import Child
from bench.lab import CLIENT, SERVER, Lab
from tests.net.conftest import START_S, open_hosts

PORT = "4001"
MEBIBYTE = 1 << 20


async def heard(child: Child, key: str, patience_s: float = START_S) -> dict[str, Any]:
    """The child's next line with this key; others are passed over."""
    while key not in (line := await child.hear(patience_s)):
        pass
    return line


async def test_two_nodes_exchange_over_a_line(lab: Lab) -> None:
    with trio.fail_after(60):
        async with open_hosts(lab) as hosts:
            server = await hosts.start(SERVER, "listen", lab.addr(SERVER), PORT)
            address = (await heard(server, "ready"))["ready"]
            client = await hosts.start(CLIENT)
            await heard(client, "ready")
            await client.tell({"dial": address})
            assert (await heard(client, "connected"))["connected"] == address.rpartition("/")[2]
            await client.tell({"send": 2 * MEBIBYTE})
            answer = await heard(client, "echoed")
            assert answer["echoed"] is True
            assert answer["seconds"] > 0.08  # no less than the line's round trip: it did not go around the lab


async def test_a_node_behind_a_router_reaches_a_public_one(lab: Lab) -> None:
    with trio.fail_after(60):
        async with open_hosts(lab) as hosts:
            server = await hosts.start(SERVER, "listen", lab.addr(SERVER), PORT)
            address = (await heard(server, "ready"))["ready"]
            client = await hosts.start("a", "seed", f"{lab.addr(SERVER)}:{PORT}")
            assert (await heard(client, "connected"))["connected"] == address.rpartition("/")[2]


async def test_a_silent_black_hole_among_the_seeds_does_not_keep_a_node(lab: Lab) -> None:
    """FIND-2: the first seed never answers, the second is a closed port, the third lives."""
    hole = lab.addr("nb")
    lab.black_hole(hole)
    try:
        with trio.fail_after(60):
            async with open_hosts(lab) as hosts:
                server = await hosts.start(SERVER, "listen", lab.addr(SERVER), PORT)
                await heard(server, "ready")
                seeds = (f"{hole}:{PORT}", f"{lab.addr(SERVER)}:9", f"{lab.addr(SERVER)}:{PORT}")
                client = await hosts.start(CLIENT, *(word for seed in seeds for word in ("seed", seed)))
                await heard(client, "ready")
                began = trio.current_time()
                await heard(client, "connected", patience_s=5.0)  # the kernel alone would try the first for two minutes
                assert trio.current_time() - began < 5.0
    finally:
        lab.unblock(hole)
