"""NAT-7 on real kernels: the relay is killed in the middle of a transfer between two homes that cannot punch.

Its kernel says goodbye for it, so both ends know at once; what takes time is finding the way through the other relay, where both hold
a place already.  Silence instead of a goodbye is the simulator's (tests/wire/sim/test_relay.py): it takes 15 s by design.
"""

from __future__ import annotations

import time

import trio

from bench.lab import Lab
from tests.net.homes import CONE, SYMMETRIC, connected, note, swarm
from tests.net.test_nodes import heard

COUNT, SIZE = 50, 2_000_000  # 100 MB
RATE = "15000000"  # bytes per second, more than the line gives
RESUMED_S = 15.0


async def test_nat_7_a_transfer_goes_on_through_the_other_relay(world: Lab) -> None:
    with trio.fail_after(90):
        async with swarm(world, "relay", RATE) as made:
            (a, a_id), (b, _) = await made.crowd(CONE, SYMMETRIC)
            via = (await connected(b, a_id))["path"]
            await b.tell({"push": COUNT, "size": SIZE, "to": a_id})
            began, killed, resumed, numbers = time.monotonic(), 0.0, 0.0, []
            while len(numbers) < COUNT:
                got = await heard(a, "got")
                assert got["whole"] is True
                numbers.append(got["got"])
                if len(numbers) == COUNT // 3:
                    first = next(index for index, peer in enumerate(made.ids) if via.endswith(peer))
                    killed = time.monotonic()
                    await made.public[first].kill()
                elif killed and not resumed and got["via"] not in ("", via):
                    resumed = got["now"]
                    assert got["via"].endswith(made.ids[1 - first])
            await heard(b, "pushed")
            took = time.monotonic() - began
            assert sorted(numbers) == list(range(COUNT))
            note(f"{COUNT * SIZE / 1e6:g} MB in {took:.1f} s; first tensor through the other relay {resumed - killed:.2f} s after the kill")
            assert 0 < resumed - killed < RESUMED_S
