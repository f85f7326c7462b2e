"""The loop watch: its buckets against a sorted list, its hooks against trio."""

from __future__ import annotations

import trio
from hypothesis import given
from hypothesis import strategies as st

from plnode.observe.loopwatch import LoopWatch, _bucket, _upper_edge


@given(st.integers(0, 1 << 46))
def test_a_bucket_holds_its_numbers_to_an_eighth(ns: int) -> None:
    edge = _upper_edge(_bucket(ns))
    assert ns <= edge <= ns * 1.125 + 1
    assert _bucket(edge) == _bucket(ns)
    assert _bucket(edge + 1) == _bucket(ns) + 1


class FakeTask:
    def __init__(self, name: str) -> None:
        self.name = name


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=200))
def test_quantiles_against_a_sorted_list(spans: list[int]) -> None:
    now = 1
    watch = LoopWatch(clock_ns=lambda: now)
    for span in spans:
        watch.before_task_step(FakeTask("t"))  # type: ignore[arg-type]
        now += span
        watch.after_task_step(FakeTask(str(span)))  # type: ignore[arg-type]
    figures = watch.take()
    ordered = sorted(spans)
    for got, share in ((figures.p50_ms, 0.50), (figures.p99_ms, 0.99)):
        exact = ordered[next(i for i in range(len(ordered)) if i + 1 >= share * len(ordered))]
        assert exact <= got * 1e6 + 1
        assert got * 1e6 <= exact * 1.125 + 2
    assert figures.steps == len(spans)
    assert figures.slowest == str(max(spans))
    assert watch.read().steps == 0  # taken: a new window


def test_trio_calls_it_and_a_blocking_step_is_named() -> None:
    now = 1
    watch = LoopWatch(clock_ns=lambda: now)

    async def blocks() -> None:
        nonlocal now
        await trio.lowlevel.checkpoint()
        now += 50_000_000  # as if it computed for 50 ms
        await trio.lowlevel.checkpoint()

    async def polite() -> None:
        for _ in range(200):
            await trio.lowlevel.checkpoint()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(blocks)
            nursery.start_soon(polite)

    trio.run(main, instruments=[watch])
    figures = watch.read()
    assert figures.max_ms == 50.0
    assert figures.p99_ms == 0.0
    assert figures.slowest.endswith("blocks")
    assert figures.steps > 200


async def test_it_can_be_installed_from_within_a_step() -> None:
    watch = LoopWatch()
    trio.lowlevel.add_instrument(watch)
    await trio.lowlevel.checkpoint()
    trio.lowlevel.remove_instrument(watch)
    assert watch.read().max_ms < 10_000
