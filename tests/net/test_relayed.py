"""What a relay gives on real kernels: the same to every pair, all that was sent, and no bulk over a circuit for signals."""

from __future__ import annotations

import time

import trio

from bench.children import Child
from bench.lab import Lab
from tests.net.homes import CONE, SYMMETRIC, SYMMETRIC_2, connected, note, swarm
from tests.net.test_nodes import heard

PAIRS = 4
COUNT, SIZE = 50, 500_000  # of each pair: 100 MB in all
RATE = 6_000_000  # bytes per second, half of what each line gives
SHARE = 0.2


async def test_four_pairs_get_alike_shares_of_a_relay_and_nothing_is_lost(world: Lab) -> None:
    with trio.fail_after(90):
        async with swarm(world, "relay", str(RATE), second=("relay", "off")) as made:
            nodes = await made.crowd(*[CONE] * PAIRS, *[SYMMETRIC] * PAIRS)
            targets, sources = nodes[:PAIRS], nodes[PAIRS:]
            for (source, _), (_, target) in zip(sources, targets, strict=True):
                assert (await connected(source, target))["path"].endswith(made.ids[0])
            arrived: list[list[float]] = [[] for _ in range(PAIRS)]

            async def follow(target: Child, times: list[float]) -> None:
                numbers = []
                while len(numbers) < COUNT:
                    got = await heard(target, "got", 60.0)
                    assert got["whole"] is True and got["via"].startswith("relayed via")
                    numbers.append(got["got"])
                    times.append(got["now"])
                assert sorted(numbers) == list(range(COUNT))

            began = time.monotonic()
            async with trio.open_nursery() as nursery:
                for (source, _), (target, target_id), times in zip(sources, targets, arrived, strict=True):
                    nursery.start_soon(follow, target, times)
                    await source.tell({"push": COUNT, "size": SIZE, "to": target_id})
            took = max(map(max, arrived)) - began
            # The relay has saved up one second of its rate; until that is used up the line is what is scarce, and TCP shares a line as
            # it likes.  At double the rate that takes a second, so 2 RATE bytes: count from 3 RATE until the first pair is done.
            since, until = sorted(at for times in arrived for at in times)[3 * RATE // SIZE], min(times[-1] for times in arrived)
            parts = [sum(since < at <= until for at in times) for times in arrived]
            shares = [part * PAIRS / sum(parts) for part in parts]
            total = PAIRS * COUNT * SIZE / 1e6
            shown = ", ".join(f"{share:.2f}" for share in shares)
            note(f"{total:g} MB of {PAIRS} pairs in {took:.1f} s through {RATE / 1e6:g} MB/s")
            note(f"shares of a fourth: {shown}, over {until - since:.1f} s")
            assert all(abs(share - 1) <= SHARE for share in shares)


async def test_a_signal_circuit_refuses_bulk_with_its_code(world: Lab) -> None:
    """The relay gives no bulk; what a circuit may carry is cut to an eighth, so that 64 KiB/s need no 16 s for it."""
    with trio.fail_after(60):
        async with swarm(world, "relay", "0", "signal", "131072", second=("relay", "off")) as made:
            (a, a_id), (b, _) = await made.crowd(SYMMETRIC, SYMMETRIC_2)
            assert (await connected(b, a_id))["path"].endswith(made.ids[0])
            await b.tell({"send": 1_000_000, "to": a_id})
            for node in (a, b):
                broken = await heard(node, "broken")
                note(f"{broken['broken']}: {broken['why']}")
                assert broken["broken"] == "RELAY_LIMIT"
