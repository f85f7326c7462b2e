"""The all-reduce: sums to the bit, shares, lossy wires, and what failed rounds leave behind."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from plnode.collective import shares
from plnode.collective.exchange import CONTRIBUTION
from plnode.collective.feedback import Feedback
from plnode.pipeline.microbatch import era
from tests.plnode.collective.reducing import accused, gradients, group, in_rank_order, leaves
from wire.errors import WireError
from wire.net.ready import ReadyBytes
from wire.tensor import DType

Clock = trio.testing.MockClock


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many pieces in a short vector."""
    monkeypatch.setattr(shares, "PIECE_BYTES", 4096)


# -- sums -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("members", "dtype"), [(1, DType.fp32), (2, DType.fp32), (3, DType.fp64), (5, DType.fp32)])
async def test_all_ranks_end_with_the_sum_in_rank_order(autojump_clock: Clock, members: int, dtype: DType) -> None:
    async with group(members) as swarm:
        swarm.make(20_011, dtype=dtype)
        for step in range(2):
            vectors = gradients(members, 20_011, step, dtype.numpy)
            wanted = in_rank_order(vectors)
            pooled = await swarm.reduce(vectors, step)
            assert all(np.array_equal(vector, wanted) for vector in vectors)
            assert {p.weights for p in pooled} == {(1 / members,) * members}
            assert {p.outliers for p in pooled} == {()}
        assert not any(r.open for r in swarm.reducers)


async def test_shares_follow_the_weights_and_clients_need_no_connection_to_each_other(autojump_clock: Clock) -> None:
    async with group(4, apart=[(1, 3)]) as swarm:
        with pytest.raises(LookupError):
            swarm.make(40_000)
        swarm.reducers.clear()
    async with group(4, apart=[(1, 3)]) as swarm:
        swarm.make(40_000, weights=[3e6, 0, 1e6, 0], pooling="huber")
        vectors = gradients(4, 40_000)
        vectors = [v + np.float32(3) for v in vectors]
        await swarm.reduce(vectors)
        assert all(np.array_equal(vector, vectors[0]) for vector in vectors)
        sent = [r.bytes_sent for r in swarm.reducers]
        report = 5 * 4 * 8
        assert sent == [10_000 * 4 + 3 * (30_000 * 4 + report), 160_000, 30_000 * 4 + 3 * (10_000 * 4 + report), 160_000]


async def test_a_sum_that_overflows_accuses_nobody_a_contribution_that_is_not_finite_does(autojump_clock: Clock) -> None:
    async with group(3) as swarm:
        swarm.make(6000)
        vectors = [np.full(6000, 3e38 if rank != 1 else -3e38, np.float32) for rank in range(3)]
        await swarm.reduce(vectors)
        assert all(np.array_equal(v, np.full(6000, 3e38, np.float32)) for v in vectors), "3e38 - 3e38 + 3e38, in rank order"
        vectors = [np.full(6000, 3e38, np.float32) for _ in range(3)]
        await swarm.reduce(vectors, 1)
        assert all(np.isinf(v).all() for v in vectors)


@pytest.mark.parametrize(("wire", "value"), [("fp32", np.nan), ("bf16", np.inf), ("int8", -np.inf)])
@pytest.mark.parametrize("element", [0, 2500, 5999])
async def test_a_contribution_that_is_not_finite_is_found_by_whoever_owns_the_share(
    autojump_clock: Clock, wire: str, element: int, value: float
) -> None:
    """Element 2500 is of the member's own share: it names itself."""
    async with group(3) as swarm:
        swarm.make(6000, wire=wire)
        vectors = gradients(3, 6000)
        vectors[1][element] = value
        assert await accused(lambda: swarm.reduce(vectors)) == {swarm.ids[1]}


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"pooling": "median"}, "no pooling"),
        ({"wire": "fp16"}, "no wire"),
        ({"weights": [1.0]}, "1 weights"),
        ({"weights": [0.0, 0.0]}, "cannot share"),
        ({"feedback": Feedback(3), "wire": "int8"}, "debt of 3"),
    ],
)
async def test_settings_that_cannot_be_are_refused(autojump_clock: Clock, settings: dict[str, Any], complaint: str) -> None:
    async with group(2) as swarm:
        with pytest.raises(ValueError, match=complaint):
            swarm.make(10, **settings)
        swarm.reducers.clear()


async def test_vectors_and_counts_that_do_not_fit_are_refused(autojump_clock: Clock) -> None:
    async with group(1) as swarm:
        swarm.make(10)
        for vector in (np.zeros(10), np.zeros(9, np.float32), np.zeros((10, 1), np.float32)):
            with pytest.raises(ValueError, match="reduces 10 elements"):
                await swarm.reducers[0].reduce(vector, 0)
        with pytest.raises(ValueError, match="counts"):
            await swarm.reducers[0].reduce(np.zeros(10, np.float32), 0, counts=[1, 2])


# -- lossy wires --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("wire", "share"), [("bf16", 0.5), ("int8", 0.266)])
async def test_what_a_lossy_wire_takes_is_given_back_in_later_rounds(autojump_clock: Clock, wire: str, share: float) -> None:
    """Whatever the number of rounds, the sum of what was applied is off the true sum by one round's quanta, which is what is owed."""
    members, elements, rounds = 3, 5000, 25
    true, applied = np.zeros(elements), np.zeros(elements)
    async with group(members) as swarm:
        swarm.make(elements, wire=wire)
        constant = gradients(members, elements)  # the same error each round, without feedback
        for step in range(rounds):
            vectors = [v.copy() for v in constant]
            true += np.sum(vectors, axis=0, dtype=np.float64)
            await swarm.reduce(vectors, step)
            assert all(np.array_equal(v, vectors[0]) for v in vectors), "equal bits everywhere"
            applied += vectors[0]
            if step == 0:
                once = np.abs(true - applied)
        owed = np.sum([r.feedback.owed for r in swarm.reducers if r.feedback], axis=0, dtype=np.float64)
        # At most one quantum of each of the values that were encoded: 2**-8 of bf16, of int8 half of max|block| / 127 .
        encoded = [*constant, true / rounds]
        quantum = sum(np.abs(c) for c in encoded) * 2.0**-8 if wire == "bf16" else _int8_quanta(encoded)
        rounding = (sum(np.abs(c) for c in encoded) + quantum) * rounds * 2.0**-22  # of fp32 sums, a few a round
        assert (np.abs(true - applied - owed) <= rounding).all()
        assert (np.abs(true - applied) <= 1.1 * quantum + rounding).all()
        assert once.max() > 0 and np.abs(true - applied).mean() < 3 * once.mean(), "control: errors do not add up over rounds"
        plain = 4 * elements * (members - 1) * 2 / members
        assert swarm.reducers[0].bytes_sent / rounds == pytest.approx(share * plain, rel=0.02)


def _int8_quanta(values: list[Any]) -> Any:
    """Generous: blocks lie within pieces, so a block's maximum is at most that of the 64 elements on either side."""
    total = np.zeros(len(values[0]))
    for value in values:
        padded = np.pad(np.abs(value), 63)
        total += np.lib.stride_tricks.sliding_window_view(padded, 127).max(axis=1) / 127
    return total


async def test_a_failed_round_neither_loses_nor_doubles_what_is_owed(autojump_clock: Clock) -> None:
    """A swarm with failed attempts in between ends with the very bits of one without."""

    async def run(fails: bool) -> tuple[Any, list[Any]]:
        debts = [Feedback(5000) for _ in range(3)]
        applied = np.zeros(5000, np.float32)
        async with group(3) as swarm:
            swarm.make(5000, wire="int8", own=[{"feedback": debt} for debt in debts])
            for step in range(6):
                attempt = 0
                if fails and step == 1:  # a member is missing
                    with trio.move_on_after(0.5):
                        await swarm.reduce(gradients(3, 5000, step), step, only=[0, 1])
                    attempt = 1
                if fails and step in (2, 3, 5):  # broken off in the middle
                    await swarm.broken(gradients(3, 5000, step), step, after=4 * step)
                    attempt = 1
                if fails and step == 4:  # succeeded at all members, yet thrown away
                    await swarm.reduce(gradients(3, 5000, step), step)
                    attempt = 1
                vectors = gradients(3, 5000, step)
                await swarm.reduce(vectors, step, attempt=attempt)
                applied += vectors[0]
        return applied, [debt.owed for debt in debts]

    (applied, owed), (without, owed_without) = await run(True), await run(False)
    assert np.array_equal(applied, without)
    assert all(np.array_equal(a, b) for a, b in zip(owed, owed_without, strict=True))
    assert any(debt.any() for debt in owed)


# -- rounds that fail ------------------------------------------------------------------------------------------------------------------


async def test_hundreds_of_failed_rounds_leave_nothing(autojump_clock: Clock) -> None:
    """Broken off after one to eleven of its sixteen pieces, or with a member missing; then a round of the same step works."""
    async with group(3) as swarm:
        swarm.make(3500, weights=[3, 2, 1])
        vectors = gradients(3, 3500)
        wanted = in_rank_order(vectors)
        living: list[tuple[int, int]] = []
        for attempt in range(204):
            copies = [v.copy() for v in vectors]
            if attempt % 12:
                await swarm.broken(copies, 3, attempt=attempt, after=attempt % 12)
            else:
                with trio.move_on_after(0.05) as limit:
                    await swarm.reduce(copies, 3, attempt=attempt, only=[0, 2])
                assert limit.cancelled_caught
            await swarm.settled()
            assert [r.open for r in swarm.reducers] == [0, 0, 0], attempt
            if attempt in (101, 203):
                gc.collect()
                buffers = sum(type(o) in (memoryview, bytearray, np.ndarray) for o in gc.get_objects())
                living.append((trio.lowlevel.current_statistics().tasks_living, buffers))
        assert living[1][0] == living[0][0]
        assert living[1][1] <= living[0][1] + 20, "what arrived at the very end of a round stays until the next"
        await swarm.reduce(vectors, 3, attempt=204)
        assert all(np.array_equal(v, wanted) for v in vectors)


async def test_a_piece_of_an_earlier_attempt_is_never_taken_for_one_of_this(autojump_clock: Clock) -> None:
    """Rank 1 still offers pieces of attempt 0 while rank 0 is in attempt 1 already."""
    async with group(2) as swarm:
        swarm.make(6000)
        stale = [np.full(6000, 1000.0, np.float32) for _ in range(2)]
        fresh = gradients(2, 6000)
        wanted = in_rank_order(fresh)
        with trio.move_on_after(0.05):
            await swarm.reduce(stale, only=[0])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(swarm.reducers[0].reduce, fresh[0], 0, attempt=1))
            with trio.move_on_after(1):
                await swarm.reducers[1].reduce(stale[1], 0)
            nursery.start_soon(partial(swarm.reducers[1].reduce, fresh[1], 0, attempt=1))
        assert all(np.array_equal(v, wanted) for v in fresh)


async def test_a_member_that_gives_up_in_the_middle_of_a_piece_ends_the_round_at_once(autojump_clock: Clock) -> None:
    async with group(2) as swarm:
        swarm.make(4096)
        vectors = gradients(2, 4096)
        sender = swarm.reducers[1]._lines[0].sender
        with pytest.raises(ExceptionGroup) as failed, trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(swarm.reducers[0].reduce, vectors[0], 0)
                with trio.move_on_after(1):
                    piece = vectors[1][:1024].data.cast("B")
                    await sender.send((era(1, 0), 0, CONTRIBUTION, 0, 1), piece, dtype=DType.fp32, shape=(1024,), ready=ReadyBytes(0))
                await trio.sleep_forever()
        assert [isinstance(error, WireError) for error in leaves(failed.value)] == [True]
        assert f"{swarm.ids[1].short} gave the all-reduce up" in str(next(leaves(failed.value)))
        assert 1 <= trio.current_time() < 2
        await swarm.settled()
        assert [r.open for r in swarm.reducers] == [0, 0]


async def test_two_rounds_at_once_are_the_callers_mistake(autojump_clock: Clock) -> None:
    async with group(2) as swarm:
        swarm.make(100)
        with pytest.raises(ExceptionGroup) as failed:
            async with trio.open_nursery() as nursery:
                for step in range(2):
                    nursery.start_soon(swarm.reducers[0].reduce, np.zeros(100, np.float32), step)
        assert [type(error) for error in leaves(failed.value)] == [trio.BusyResourceError]
        await swarm.reduce(gradients(2, 100), 5)
