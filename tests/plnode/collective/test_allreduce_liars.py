"""The all-reduce among members that lie: robust pooling, and pieces that do not belong to the round."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from plnode.collective import shares
from plnode.collective.allreduce import Reducer
from plnode.collective.exchange import CONTRIBUTION, REPORT, RESULT, Exchange
from plnode.collective.messages import REDUCE
from plnode.pipeline.microbatch import era
from tests.plnode.collective.reducing import accused, gradients, group, in_rank_order
from wire.errors import WireError
from wire.tensor import DType

Clock = trio.testing.MockClock


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many pieces in a short vector."""
    monkeypatch.setattr(shares, "PIECE_BYTES", 4096)


# -- robust pooling ----------------------------------------------------------------------------------------------------------------------


def updates(counts: list[int], elements: int, seed: int = 0) -> tuple[list[Any], Any]:
    """(sums over counts microbatches, their true expectation a microbatch)."""
    rng = np.random.default_rng(seed)
    truth = rng.standard_normal(elements) / np.sqrt(elements)
    sums = [c * truth + np.sqrt(c) * rng.standard_normal(elements) / np.sqrt(elements) for c in counts]
    return [s.astype(np.float32) for s in sums], truth


POOLINGS = ["mean", "huber", "pseudo-huber", "welsch", "truncated", "coordinate-huber", "coordinate-welsch"]


@pytest.mark.parametrize(("pooling", "wire"), [*((p, "fp32") for p in POOLINGS), ("huber", "int8"), ("coordinate-welsch", "bf16")])
async def test_one_byzantine_of_five_is_bounded_but_not_by_the_mean(autojump_clock: Clock, pooling: str, wire: str) -> None:
    counts = [4, 2, 4, 3, 4]
    sums, truth = updates(counts, 6000)
    sums[2] *= -10
    honest = np.linalg.norm(sum(s for i, s in enumerate(sums) if i != 2) / 13 - truth)
    async with group(5) as swarm:
        swarm.make(6000, pooling=pooling, wire=wire)
        pooled = await swarm.reduce(sums, counts=counts)
        assert all(np.array_equal(s, sums[0]) for s in sums)
        assert len(set(pooled)) == 1, "the same weights, to the bit"
        off = np.linalg.norm(sums[0] / sum(counts) - truth)
        if pooling == "mean":
            assert off > 2, "control"
            assert pooled[0].weights == pytest.approx([c / 17 for c in counts])
            return
        assert off <= (2.2 if "huber" in pooling else 1.25) * honest + (0.05 if wire != "fp32" else 0), (off, honest)
        assert pooled[0].outliers == (swarm.ids[2],)
        assert sum(pooled[0].weights) == pytest.approx(1)


@pytest.mark.parametrize("pooling", POOLINGS[1:])
async def test_with_nobody_at_fault_the_result_is_close_to_the_sum(autojump_clock: Clock, pooling: str) -> None:
    counts = [1, 8, 4, 0, 3]
    sums, truth = updates(counts, 6000)
    mean = in_rank_order(sums) / 16
    async with group(5) as swarm:
        swarm.make(6000, pooling=pooling, weights=[1, 2, 0, 1, 0])
        pooled = await swarm.reduce(sums, counts=counts)
        assert all(np.array_equal(s, sums[0]) for s in sums)
        assert np.linalg.norm(sums[0] / 16 - truth) <= 1.15 * np.linalg.norm(mean - truth)
        assert pooled[0].outliers == () and pooled[0].weights[3] == 0


async def test_fp64_is_pooled_in_fp64(autojump_clock: Clock) -> None:
    async with group(3) as swarm:
        swarm.make(3000, dtype=DType.fp64, pooling="welsch")
        vectors = [np.full(3000, 1 + 1e-12 * rank) + 1e-13 * np.random.default_rng(rank).standard_normal(3000) for rank in range(3)]
        weights = (await swarm.reduce(vectors))[0].weights
        assert abs(vectors[0].mean() / 3 - 1 - 1e-12) < 2e-12 and sum(weights) == pytest.approx(1)


# -- hostile members -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["norm", "pairs", "nan", "weights"])
async def test_an_owner_that_lies_about_inner_products_is_named(autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    honest = Exchange._report

    async def lie(self: Exchange, returns: trio.Nursery) -> None:
        if self._terms.rank == 1:
            where, value = {"norm": ((0, 0), 2.0), "pairs": ((0, 2), 1e9), "nan": ((2, 2), np.nan), "weights": ((-1, 0), 1e9)}[which]
            self._own_report[where] = self._own_report[where] * value if which == "norm" else value
        await honest(self, returns)

    monkeypatch.setattr(Exchange, "_report", lie)
    async with group(3) as swarm:
        swarm.make(3000, pooling="huber")
        assert await accused(lambda: swarm.reduce(gradients(3, 3000))) == {swarm.ids[1]}


@pytest.mark.parametrize(
    ("phase", "shape", "dtype", "codec"),
    [
        (CONTRIBUTION, (1023,), DType.fp32, 0),
        (CONTRIBUTION, (1024,), DType.fp32, 1),
        (CONTRIBUTION, (512,), DType.fp64, 0),
        (RESULT, (1,), DType.fp32, 0),
        (REPORT, (2, 2), DType.fp64, 0),
    ],
)
async def test_a_piece_that_does_not_fit_is_refused_and_its_sender_named(
    autojump_clock: Clock, phase: int, shape: tuple[int, ...], dtype: DType, codec: int
) -> None:
    async with group(2) as swarm:
        reducer = Reducer(swarm.nets[0], 1, swarm.ids, DType.fp32, 4096, lambda: None, pooling="huber")
        peer = swarm.nets[1].peer(swarm.ids[0])
        assert peer is not None
        sender = peer.sender(REDUCE, (1).to_bytes(4, "big"))
        number = {CONTRIBUTION: 0, RESULT: 2, REPORT: 0}[phase]
        size = {1: 2}.get(codec, dtype.itemsize) * int(np.prod(shape))

        async def hostile() -> None:
            with pytest.raises(WireError):
                await sender.send((era(1, 0), 0, phase, number, 1), memoryview(bytearray(size)), dtype=dtype, shape=shape, codec=codec)

        async def round_() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(hostile)
                await reducer.reduce(np.zeros(4096, np.float32), 0)

        assert await accused(round_) == {swarm.ids[1]}
        assert reducer.open == 0
        reducer.close()


async def test_what_nobody_expects_finds_no_slot(autojump_clock: Clock) -> None:
    """Pieces of another attempt, phase, number or sender wait at their sender for ever."""
    async with group(2) as swarm:
        swarm.make(4096)
        sender = swarm.reducers[1]._lines[0].sender
        vectors = gradients(2, 4096)
        wanted = in_rank_order(vectors)
        async with trio.open_nursery() as nursery:
            for key in [
                (era(1, 0), 1, 0, 0, 1),
                (era(1, 0), 0, 0, 2, 1),
                (era(1, 0), 0, 0, 0, 0),
                (era(1, 0), 0, 2, 0, 1),
                (era(2, 0), 0, 0, 0, 1),
            ]:
                junk = memoryview(bytearray(4096))
                nursery.start_soon(lambda key=key, junk=junk: sender.send(key, junk, dtype=DType.fp32, shape=(1024,)))
            await swarm.reduce(vectors)
            assert sender.pending == 5
            nursery.cancel_scope.cancel()
        assert all(np.array_equal(v, wanted) for v in vectors)


async def test_a_result_before_its_time_does_not_change_what_we_contribute(autojump_clock: Clock) -> None:
    """An owner that has not taken our contribution yet sends a result: the same memory is still to be sent."""
    async with group(2) as swarm:
        swarm.make(4096)
        vector = gradients(1, 4096)[0]
        mine = vector.copy()
        lie = np.full(1024, 7, np.float32).data.cast("B")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(swarm.reducers[0].reduce, vector, 0)
            with trio.fail_after(60):
                await swarm.reducers[1]._lines[0].sender.send((era(1, 0), 0, RESULT, 2, 1), lie, dtype=DType.fp32, shape=(1024,))
            await trio.sleep(1)
            assert np.array_equal(vector, mine)
            nursery.cancel_scope.cancel()
