"""A chain of runners equals a plain loop to the bit, whatever is kept or recomputed (NUM-1, NUM-2, NUM-3)."""

import math

import numpy as np
import pytest
import torch
import trio

from plnode.stage import DenseBoundary, Order, id_dtype_for
from wire.tensor import DType


async def weights_of(runners):
    tensors = {}
    for runner in runners:
        tensors |= {name: t for name, t in (await runner.snapshot()).items() if not name.startswith("optimizer.")}
    return tensors


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("dtype", ["fp32", "fp64", "bf16"])
@pytest.mark.parametrize("stages", [1, 2, 4])
async def test_parity_of_a_chain_with_a_plain_loop(make_lab, stages, dtype):
    lab = make_lab(dtype=dtype)
    losses, weights = lab.reference(stages, 5)
    async with lab.runners(stages) as runners:
        assert await lab.train(runners, 5) == losses
        assert equal(await weights_of(runners), weights)
        assert losses[-1] < losses[0]
        for runner in runners:
            assert runner.counters.pool_lent == 0 and runner.counters.live_microbatches == 0


async def test_parity_fails_for_another_order_of_sums(make_lab):
    """The negative control: the comparison sees the last bit."""
    lab = make_lab()
    _, weights = lab.reference(2, 1)
    async with lab.runners(2) as runners:
        for index in (2, 0, 1):
            await lab.pass_through(runners, 0, index)
        for runner in runners:
            await runner.step(0)
        assert not equal(await weights_of(runners), weights)


async def test_parity_in_index_order_whatever_arrives_first(make_lab):
    """With ``in_index_order`` a lone replica adds up as one process does, also if everything comes in reverse."""
    lab = make_lab()
    _, weights = lab.reference(2, 2)
    async with lab.runners(2, order=Order(in_index_order=True)) as (first, last):
        for step in range(2):
            payloads = {}
            for index in (2, 1, 0):
                forward = await first.forward((step, index), None, lab.ids(step, index))
                payloads[index] = forward.payload
            async with trio.open_nursery() as nursery:

                async def rest(step, index, payload):
                    forward = await last.forward((step, index), payload)
                    await first.backward((step, index), forward.gradient)

                for index in (2, 1, 0):
                    nursery.start_soon(rest, step, index, payloads[index])
                    await trio.testing.wait_all_tasks_blocked()
            await first.step(step)
            await last.step(step)
        assert equal(await weights_of([first, last]), weights)


@pytest.mark.parametrize("dtype", ["fp32", "fp64", "bf16"])
async def test_parity_of_kept_and_recomputed_graphs(make_lab, dtype):
    """The choice changes memory and time, never a bit of the gradient."""
    lab = make_lab(dtype=dtype, microbatches=4)

    async def gradients(memory_bytes):
        async with lab.runner(3, 1, memory_bytes=memory_bytes) as runner:
            rng = np.random.default_rng(3)
            out = bytearray(runner.gradient_bytes)
            for index in range(4):
                payload = bytearray(lab.boundary.forward_bytes)
                x = torch.from_numpy(rng.standard_normal(lab.boundary.shape)).to(torch.float64)
                lab.boundary.write_forward(x, torch.from_numpy(lab.ids(0, index)), memoryview(payload))
                await runner.forward((0, index), memoryview(payload))
            held = runner.counters
            for index in range(4):
                g = torch.from_numpy(rng.standard_normal(lab.boundary.shape))
                payload = bytearray(lab.boundary.backward_bytes)
                lab.boundary.write_backward(g, memoryview(payload))
                back = await runner.backward((0, index), memoryview(payload))
                out += bytes(back.payload)
            await runner.export_gradients(memoryview(out)[: runner.gradient_bytes])
            return bytes(out), held, runner.counters, back

    part = lab.part(3, 1)
    fixed = 4 * sum(p.numel() * p.element_size() for p in part.parameters())
    kept, held, counters, _ = await gradients(None)
    assert (counters.graphs_kept, counters.graphs_recomputed) == (4, 0) and held.live_graph_bytes == 4 * held.graph_estimate_bytes
    none, held_none, counters_none, _ = await gradients(fixed)
    assert counters_none.graphs_kept == 0 and counters_none.graphs_recomputed == 4 and held_none.live_graph_bytes == 0
    two, held_two, counters_two, last = await gradients(fixed + 2 * held.graph_estimate_bytes)
    assert counters_two.graphs_kept == 2 and counters_two.graphs_recomputed == 2 and last.recomputed
    assert held_two.live_graph_bytes == 2 * held.graph_estimate_bytes
    assert kept == none == two
    assert any(kept)


async def test_parity_of_an_exported_and_imported_sum(make_lab):
    """Two replicas that add their vectors equal one that has all microbatches, within rounding; and in fp64 much closer."""
    for dtype, tolerance in (("fp32", 1e-5), ("fp64", 1e-10)):
        lab = make_lab(dtype=dtype, microbatches=4)
        _, weights = lab.reference(1, 1)
        async with lab.runner(1, 0) as a, lab.runner(1, 0) as b:
            for runner, indices in ((a, (0, 1)), (b, (2, 3))):
                for index in indices:
                    await runner.forward((0, index), None, lab.ids(0, index))
            assert a.account == {(0, 0), (0, 1)} and a.gradient_dtype is DType[dtype]
            vectors = []
            for runner in (a, b):
                vector = np.empty(runner.gradient_elements, runner.gradient_dtype.numpy)
                exported = await runner.export_gradients(memoryview(vector).cast("B"))
                assert exported.account == tuple(sorted(runner.account)) and exported.nonfinite is None
                vectors.append(vector)
            total = vectors[0] + vectors[1]
            for runner in (a, b):
                await runner.import_gradients(memoryview(total).cast("B"))
                stepped = await runner.step(0)
                assert stepped.grad_norm > 0 and not stepped.skipped_nonfinite
            assert await a.digest() == await b.digest()
            mine = await weights_of([a])
            for name, tensor in weights.items():
                assert torch.allclose(mine[name], tensor, rtol=tolerance, atol=tolerance)


async def test_exported_vector_is_in_order_of_names(lab):
    async with lab.runner(1, 0) as runner:
        await runner.forward((0, 0), None, lab.ids(0, 0))
        vector = np.empty(runner.gradient_elements, np.float32)
        await runner.export_gradients(memoryview(vector).cast("B"))
        part = lab.part(1, 0)
        (part(None, torch.from_numpy(lab.ids(0, 0))).loss_sum / lab.tokens_per_step).backward()
        named = dict(part.named_parameters())
        assert list(runner.gradient_names) == sorted(named)
        assert np.array_equal(vector, torch.cat([named[n].grad.flatten() for n in sorted(named)]).numpy())


async def test_evaluation_changes_nothing_and_sees_the_open_steps_weights(lab):
    losses, weights = lab.reference(2, 1)
    async with lab.runners(2) as (first, last):
        forward = await first.evaluate((0, 0), None, lab.ids(9, 9))
        before = await last.evaluate((0, 0), forward.payload)
        assert await lab.train([first, last], 1) == losses
        forward = await first.evaluate((1, 0), None, lab.ids(9, 9))
        after = await last.evaluate((1, 0), forward.payload)
        assert equal(await weights_of([first, last]), weights)
        assert before.loss_sum != after.loss_sum and math.isfinite(before.loss_sum)
        assert before.gradient is None and last.counters.evaluations == 2


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "fp64"])
@pytest.mark.parametrize(("vocab", "batch", "length", "dim"), [(65_536, 2, 3, 4), (70_000, 1, 3, 5), (300, 3, 1, 1)])
def test_boundary_round_trip(dtype, vocab, batch, length, dim):
    """Sizes, both id widths, also where the ids are not aligned to their own width (bf16, odd count)."""
    boundary = DenseBoundary(batch, length, dim, DType[dtype], id_dtype_for(vocab), vocab)
    x = torch.randn(boundary.shape).to({"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype, torch.float32))
    ids = torch.randint(0, vocab, boundary.id_shape)
    ids[0, 0] = vocab - 1
    payload = bytearray(boundary.forward_bytes)
    boundary.write_forward(x, ids, memoryview(payload))
    got, got_ids = boundary.read_forward(memoryview(bytes(payload)))
    assert torch.equal(got.to(x.dtype), x) and torch.equal(got_ids, ids)
    numpy = np.frombuffer(payload[boundary.backward_bytes :], boundary.id_dtype.numpy).reshape(boundary.id_shape)
    assert np.array_equal(numpy, ids.numpy())
    expectation = boundary.expectation(0)
    assert expectation.raw_len == len(payload) and expectation.shape == boundary.shape
    gradient = bytearray(boundary.backward_bytes)
    boundary.write_backward(x, memoryview(gradient))
    assert torch.equal(boundary.read_backward(memoryview(gradient)).to(x.dtype), x)
    assert boundary.expectation(1).raw_len == len(gradient) < len(payload)
