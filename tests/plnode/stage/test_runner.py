"""The runner under trouble: cancels, errors, late and double work, close; and the loop that must stay awake meanwhile."""

import gc
import math
import sys
import threading
import weakref

import numpy as np
import pytest
import torch
import trio
import trio.testing

from plnode.stage import (
    AccountClosed,
    AlreadyCounted,
    BadPayload,
    MemoryPlanError,
    PoolExhausted,
    RunnerClosed,
    RunnerFailed,
    RunnerFull,
    StageError,
    StageMemoryError,
    StaleStep,
    StepDiscarded,
    UnknownMicrobatch,
    Where,
    open_runner,
)


def activation(lab, value=0.5):
    payload = bytearray(lab.boundary.forward_bytes)
    lab.boundary.write_forward(torch.full(lab.boundary.shape, value), torch.from_numpy(lab.ids(0, 0)), memoryview(payload))
    return memoryview(payload)


def gradient(lab, value=0.01):
    payload = bytearray(lab.boundary.backward_bytes)
    lab.boundary.write_backward(torch.full(lab.boundary.shape, value), memoryview(payload))
    return memoryview(payload)


async def idle(runner):
    """Until the device thread has done all it has: a barrier is the last in its queue."""
    await runner.digest()


# --- cancellation -------------------------------------------------------------------------------------------------------


async def test_cancelled_while_queued_is_withdrawn_and_has_done_nothing(lab, gated, make_gate):
    context, part = gated(2, 0)
    async with context as runner, trio.open_nursery() as nursery:
        part.gate = make_gate()
        results = []

        async def forward(index, scope):
            with scope:
                results.append((index, await runner.forward((0, index), None, lab.ids(0, index))))

        scopes = [trio.CancelScope() for _ in range(2)]
        nursery.start_soon(forward, 0, scopes[0])
        await part.gate.entered.wait()
        nursery.start_soon(forward, 1, scopes[1])
        await trio.testing.wait_all_tasks_blocked()
        assert runner.counters.queued_jobs == 1
        scopes[1].cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert scopes[1].cancelled_caught and runner.counters.queued_jobs == 0
        part.gate.open()
        part.gate = None
        await idle(runner)
        await trio.testing.wait_all_tasks_blocked()
        assert [index for index, _ in results] == [0]
        assert runner.counters.forwards == 1 and runner.counters.live_microbatches == 1


async def test_cancelled_while_running_drops_the_result_and_its_buffers(lab, gated, make_gate):
    """The running forward ends, its payload returns to the pool, its graph is forgotten."""
    context, part = gated(2, 0)
    async with context as runner, trio.open_nursery() as nursery:
        gate = part.gate = make_gate()
        scope = trio.CancelScope()

        async def forward():
            with scope:
                await runner.forward((0, 0), None, lab.ids(0, 0))

        nursery.start_soon(forward)
        await gate.entered.wait()
        scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert not scope.cancelled_caught  # it still reads our ids
        part.gate = None
        gate.open()
        await idle(runner)
        await trio.testing.wait_all_tasks_blocked()
        await idle(runner)
        counters = runner.counters
        assert scope.cancelled_caught and counters.forwards == 1
        assert (counters.pool_lent, counters.live_microbatches, counters.live_graph_bytes) == (0, 0, 0)


async def test_cancelled_backward_stays_counted(lab, gated, make_gate):
    context, part = gated(3, 1, memory_bytes=None)
    async with context as runner, trio.open_nursery() as nursery:
        forward = await runner.forward((0, 0), activation(lab))
        runner.release(forward.payload)
        with trio.CancelScope() as scope:
            scope.cancel()
            await runner.backward((0, 0), gradient(lab))
        assert scope.cancelled_caught and runner.account == frozenset() and runner.counters.queued_jobs == 0
        # Now while it runs: a hook on a weight's gradient holds the device thread.
        gate = make_gate()
        weight = next(part.parameters())
        handle = weight.register_hook(lambda grad: gate.pass_())

        async def backward(inner):
            with inner:
                await runner.backward((0, 0), gradient(lab))

        inner = trio.CancelScope()
        nursery.start_soon(backward, inner)
        await gate.entered.wait()
        inner.cancel()
        gate.open()
        await idle(runner)
        await trio.testing.wait_all_tasks_blocked()
        handle.remove()
        assert inner.cancelled_caught and runner.account == {(0, 0)} and runner.counters.pool_lent == 0
        with pytest.raises(AlreadyCounted):
            await runner.backward((0, 0), gradient(lab))


async def test_every_call_can_be_cancelled_before_it_begins(lab):
    async with lab.runner(2, 0) as runner:
        calls = [
            lambda: runner.forward((0, 0), None, lab.ids(0, 0)),
            lambda: runner.evaluate((0, 0), None, lab.ids(0, 0)),
            lambda: runner.step(0),
            lambda: runner.discard(),
            lambda: runner.snapshot(),
            lambda: runner.digest(),
        ]
        for call in calls:
            with trio.CancelScope() as scope:
                scope.cancel()
                await call()
            assert scope.cancelled_caught
        assert runner.open_step == 0 and runner.counters.queued_jobs == 0 and runner.counters.pool_lent == 0


# --- errors, late and double work -----------------------------------------------------------------------------------------


async def test_errors_reach_their_awaiter_and_no_one_else(lab, gated):
    context, part = gated(2, 0, pool_bytes=lab.boundary.forward_bytes)
    async with context as runner:
        part.raises = ZeroDivisionError("a kernel failed")
        with pytest.raises(ZeroDivisionError, match="a kernel failed"):
            await runner.forward((0, 0), None, lab.ids(0, 0))
        assert runner.counters.pool_lent == 0
        part.raises = torch.OutOfMemoryError("CUDA out of memory")
        with pytest.raises(StageMemoryError, match=r"forward of microbatch \(0, 0\).*lower the memory setting"):
            await runner.forward((0, 0), None, lab.ids(0, 0))
        part.raises = None
        forward = await runner.forward((0, 0), None, lab.ids(0, 0))
        with pytest.raises(PoolExhausted, match="do not fit the pool"):
            await runner.forward((0, 1), None, lab.ids(0, 1))
        runner.release(forward.payload)
        with pytest.raises(StageError, match="not lent"):
            runner.release(forward.payload)
        await runner.forward((0, 1), None, lab.ids(0, 1))


async def test_a_real_refusal_of_the_cpu_allocator_is_explained(lab, gated):
    context, part = gated(2, 0)
    async with context as runner:
        part.register_forward_pre_hook(lambda *_: torch.empty(1 << 60, dtype=torch.uint8))
        with pytest.raises(StageMemoryError) as failure:
            await runner.forward((0, 0), None, lab.ids(0, 0))
        assert isinstance(failure.value.__cause__, RuntimeError)


async def test_late_early_double_and_unknown_work(lab):
    async with lab.runners(2) as (first, last):
        with pytest.raises(UnknownMicrobatch):
            await first.backward((0, 0), gradient(lab))
        await lab.pass_through([first, last], 0, 0)
        with pytest.raises(AlreadyCounted):
            await last.forward((0, 0), activation(lab))
        with pytest.raises(StageError, match="step 1 cannot be applied, step 0 is open"):
            await first.step(1)
        async with trio.open_nursery() as nursery:
            early = []

            async def forward():
                early.append(await first.forward((1, 0), None, lab.ids(1, 0)))

            nursery.start_soon(forward)
            await trio.testing.wait_all_tasks_blocked()
            await idle(first)
            assert not early and first.counters.queued_jobs == 1
            await first.step(0)
        assert early and first.open_step == 1 and first.account == frozenset()
        with pytest.raises(StaleStep):
            await first.forward((0, 1), None, lab.ids(0, 1))
        with pytest.raises(StaleStep):
            await first.step(0)


async def test_wrong_payloads_are_the_peers_fault_and_change_nothing(lab):
    async with lab.runner(3, 1) as runner:
        with pytest.raises(BadPayload, match="bytes"):
            await runner.forward((0, 0), activation(lab)[:-1])
        foreign = activation(lab)
        foreign[lab.boundary.backward_bytes :][:2] = (60_000).to_bytes(2, "little")
        with pytest.raises(BadPayload, match="token id 60000; the vocabulary has 50"):
            await runner.forward((0, 0), foreign)
        await runner.forward((0, 0), activation(lab))
        with pytest.raises(BadPayload):
            await runner.backward((0, 0), gradient(lab)[4:])
        assert (await runner.backward((0, 0), gradient(lab))).finite  # the microbatch is still there


async def test_discard_refuses_what_is_queued_and_empties_the_account(lab, gated, make_gate):
    context, part = gated(3, 1)
    async with context as runner, trio.open_nursery() as nursery:
        await runner.forward((0, 0), activation(lab))
        await runner.backward((0, 0), gradient(lab))
        gate = part.gate = make_gate()
        ended = []

        async def forward(index):
            try:
                await runner.forward((0, index), activation(lab))
                ended.append((index, None))
            except StepDiscarded as error:
                ended.append((index, type(error)))

        nursery.start_soon(forward, 1)
        await gate.entered.wait()
        nursery.start_soon(forward, 2)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(runner.discard)
        await trio.testing.wait_all_tasks_blocked()
        part.gate = None
        gate.open()
        await idle(runner)
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(ended, key=lambda e: e[0]) == [(1, None), (2, StepDiscarded)]
        assert runner.account == frozenset() and runner.counters.live_microbatches == 0 and runner.open_step == 0
        await runner.forward((0, 0), activation(lab))
        again = await runner.backward((0, 0), gradient(lab))
        assert again.finite and runner.account == {(0, 0)}


async def test_an_error_inside_a_backward_closes_the_account_until_discarded(lab, gated):
    context, part = gated(3, 1)
    async with context as runner:
        await runner.forward((0, 0), activation(lab))

        def fail(grad):
            raise MemoryError

        handle = next(part.parameters()).register_hook(fail)
        with pytest.raises(StageMemoryError):
            await runner.backward((0, 0), gradient(lab))
        handle.remove()
        assert runner.counters.pool_lent == 1  # the forward's payload; the backward's went back
        for call in (
            lambda: runner.backward((0, 0), gradient(lab)),
            lambda: runner.export_gradients(memoryview(bytearray(runner.gradient_bytes))),
            lambda: runner.step(0),
        ):
            with pytest.raises(AccountClosed, match="discard"):
                await call()
        await runner.discard()
        await runner.forward((0, 0), activation(lab))
        assert (await runner.backward((0, 0), gradient(lab))).finite


async def test_nothing_is_added_to_an_imported_sum(lab):
    async with lab.runner(1, 0) as runner:
        await runner.forward((0, 0), None, lab.ids(0, 0))
        vector = np.ones(runner.gradient_elements, np.float32)
        await runner.import_gradients(memoryview(vector).cast("B"))
        with pytest.raises(AccountClosed, match="round"):
            await runner.forward((0, 1), None, lab.ids(0, 1))
        with pytest.raises(StageError, match="bytes"):
            await runner.import_gradients(memoryview(vector).cast("B")[:-4])
        stepped = await runner.step(0)
        assert stepped.grad_norm == pytest.approx(math.sqrt(runner.gradient_elements), rel=1e-5)


async def test_the_job_set_is_bounded(lab, gated, make_gate):
    context, part = gated(2, 0, job_limit=2)
    async with context as runner, trio.open_nursery() as nursery:
        gate = part.gate = make_gate()
        for index in range(3):
            nursery.start_soon(runner.forward, (0, index), None, lab.ids(0, index))
            await gate.entered.wait()
            await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(RunnerFull, match="2 jobs are queued, the limit is 2"):
            await runner.forward((0, 3), None, lab.ids(0, 3))
        part.gate = None
        gate.open()


# --- not finite ------------------------------------------------------------------------------------------------------------


async def test_nonfinite_names_who_produced_it_and_the_step_is_skipped(lab):
    async with lab.runner(3, 1) as runner:
        before = await runner.digest()
        poisoned = await runner.forward((0, 0), activation(lab, math.nan))
        assert not poisoned.finite and poisoned.nonfinite.where is Where.INPUT and poisoned.payload is not None
        await runner.forward((0, 1), activation(lab))
        back = await runner.backward((0, 1), gradient(lab, math.inf))
        assert not back.finite and back.nonfinite.where is Where.GRADIENT_IN
        assert np.isnan(np.frombuffer(back.payload, np.float32)).all()  # whoever is upstream learns of it
        assert runner.account == frozenset()
        vector = np.zeros(runner.gradient_elements, np.float32)
        exported = await runner.export_gradients(memoryview(vector).cast("B"))
        assert exported.nonfinite is not None and np.isnan(vector).all()
        # The same microbatch again, finite this time: the step is whole.
        assert (await runner.backward((0, 1), gradient(lab))).finite
        assert (await runner.export_gradients(memoryview(vector).cast("B"))).nonfinite is None
        assert np.isfinite(vector).all() and runner.account == {(0, 1)}
        back = await runner.backward((0, 0), gradient(lab))
        assert back.nonfinite.where is Where.INPUT
        stepped = await runner.step(0)
        assert stepped.skipped_nonfinite and math.isnan(stepped.grad_norm) and runner.open_step == 1
        assert await runner.digest() == before and runner.counters.steps_skipped == 1


async def test_nonfinite_output_loss_and_account(lab):
    async with lab.runner(3, 1) as runner:
        tensors = await runner.snapshot()
        tensors["layers.1.ffn.down.weight"].fill_(math.inf)
        await runner.restore(tensors)
        forward = await runner.forward((0, 0), activation(lab))
        assert forward.nonfinite.where is Where.OUTPUT
    async with lab.runner(1, 0) as runner:
        before = await runner.digest()
        vector = np.ones(runner.gradient_elements, np.float32)
        vector[-1] = math.nan
        await runner.import_gradients(memoryview(vector).cast("B"))
        stepped = await runner.step(0)
        assert stepped.skipped_nonfinite and stepped.nonfinite.where is Where.ACCOUNT
        assert stepped.nonfinite.names == (runner.gradient_names[-1],) and runner.gradient_names[-1] in str(stepped.nonfinite)
        assert await runner.digest() == before
        vector[:] = 1e38  # finite, but the norm is not
        await runner.import_gradients(memoryview(vector).cast("B"))
        assert (await runner.step(1)).skipped_nonfinite and await runner.digest() == before
        tensors = await runner.snapshot()
        tensors["head.weight"].fill_(math.nan)
        await runner.restore(tensors, 0)
        forward = await runner.forward((0, 0), None, lab.ids(0, 0))
        assert forward.nonfinite.where is Where.LOSS and runner.account == frozenset()
        assert (await runner.step(0)).skipped_nonfinite


# --- state ------------------------------------------------------------------------------------------------------------------


async def test_restored_state_goes_on_bit_equal_including_the_optimizer(lab):
    """JOIN-7: pre-filled with rubbish, everything replaced, the next step bit-equal."""
    async with lab.runner(1, 0) as donor, lab.runner(1, 0) as joiner:
        await lab.train([donor], 2)
        await joiner.forward((0, 0), None, lab.ids(5, 5))
        await joiner.step(0)
        await joiner.forward((1, 0), None, lab.ids(5, 6))
        assert await joiner.digest() != await donor.digest()
        state = await donor.snapshot()
        assert any(name.startswith("optimizer.") for name in state)
        await joiner.restore(state, 2)
        assert joiner.open_step == 2 and joiner.account == frozenset()
        for runner in (donor, joiner):
            await runner.forward((2, 0), None, lab.ids(2, 0))
            await runner.step(2)
        assert await joiner.digest() == await donor.digest()
        mine, theirs = await joiner.snapshot(), await donor.snapshot()
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


async def test_a_foreign_state_is_refused_by_name_and_changes_nothing(lab):
    async with lab.runner(2, 0) as runner, lab.runner(2, 1) as other:
        before = await runner.digest()
        with pytest.raises(StageError, match="differ in"):
            await runner.restore(await other.snapshot())
        state = await runner.snapshot()
        state["embedding.weight"] = state["embedding.weight"][:, :1]
        with pytest.raises(StageError, match=r"embedding.weight is \(50, 1\)"):
            await runner.restore(state)
        state = {name: tensor for name, tensor in (await runner.snapshot()).items() if not name.startswith("optimizer.")}
        with pytest.raises(StageError, match="optimizer state"):
            await runner.restore(state)
        assert await runner.digest() == before


# --- start and end ------------------------------------------------------------------------------------------------------------


async def test_close_with_jobs_queued_ends_them_and_joins_the_thread(lab, gated, make_gate):
    """RUN-1, RUN-2: the running job ends, the queued ones are told, the thread is gone, later calls are refused."""
    context, part = gated(2, 0)
    gate = make_gate()
    ended = []
    before = threading.active_count()
    async with trio.open_nursery() as nursery, context as runner:
        part.gate = gate
        assert threading.active_count() == before + 1

        async def forward(index):
            try:
                await runner.forward((0, index), None, lab.ids(0, index))
                ended.append((index, None))
            except RunnerClosed as error:
                ended.append((index, type(error)))

        for index in range(3):
            nursery.start_soon(forward, index)
            await gate.entered.wait()
            await trio.testing.wait_all_tasks_blocked()
        trio.lowlevel.current_trio_token().run_sync_soon(gate.open)
    assert sorted(ended, key=lambda e: e[0]) == [(0, None), (1, RunnerClosed), (2, RunnerClosed)]
    assert threading.active_count() == before
    with pytest.raises(RunnerClosed):
        await runner.digest()
    runner.forget((0, 0))


async def test_an_error_while_building_is_raised_and_leaves_no_thread(lab):
    before = threading.active_count()

    def build():
        raise OSError("no such model")

    with pytest.raises(OSError, match="no such model"):
        async with open_runner(build, lambda part: part, boundary_in=None, boundary_out=None, tokens_per_step=1):
            raise AssertionError
    with pytest.raises(StageError, match="cpu or cuda"):
        async with lab.runner(1, 0, device="meta"):
            raise AssertionError
    if not torch.cuda.is_available():
        with pytest.raises(StageError, match="no CUDA device"):
            async with lab.runner(1, 0, device="cuda"):
                raise AssertionError
    assert threading.active_count() == before


async def test_a_dead_thread_fails_every_call_with_its_cause(lab, monkeypatch):
    """RUN-1: an error that is no job's own."""
    async with lab.runner(1, 0) as runner:

        def broken(*_):
            raise OSError("the policy failed")

        monkeypatch.setattr("plnode.stage.thread.choose", broken)
        for _ in range(2):
            with pytest.raises(RunnerFailed, match="the policy failed") as failure:
                await runner.digest()
            assert isinstance(failure.value.__cause__, OSError)


async def test_what_does_not_fit_is_refused_with_the_list(lab):
    """MEM-2."""
    weights = sum(p.numel() * 4 for p in lab.part(1, 0).parameters())
    async with lab.runner(1, 0, memory_bytes=4 * weights):
        pass
    with pytest.raises(MemoryPlanError, match=rf"weights {weights:,}.*optimizer {2 * weights:,}.*allow 1 more"):
        async with lab.runner(1, 0, memory_bytes=4 * weights - 1):
            raise AssertionError


async def test_a_runners_weights_go_with_it(lab):
    """MEM-1: freed by the last reference, not at some later garbage collection: the next generation needs the room."""
    alive = []

    def build():
        part = lab.part(2, 0)
        alive.extend(weakref.ref(p) for p in part.parameters())
        return part

    async def live_and_die():
        boundary, tokens = lab.boundary, lab.tokens_per_step
        async with open_runner(
            build, lambda p: lab.optimizer(p, 2), boundary_in=None, boundary_out=boundary, tokens_per_step=tokens
        ) as runner:
            await runner.forward((0, 0), None, lab.ids(0, 0))

    lab.optimizer(lab.part(2, 0), 2)  # torch's own first-time imports leave cycles
    gc.collect()
    gc.disable()
    try:
        await live_and_die()
        await trio.lowlevel.checkpoint()
        assert alive and not any(ref() is not None for ref in alive)
    finally:
        gc.enable()


async def test_the_loop_runs_on_while_the_device_computes(lab, gated, make_gate):
    """While a job holds the device thread the loop passes a thousand checkpoints."""
    context, part = gated(2, 0)
    async with context as runner, trio.open_nursery() as nursery:
        assert sys.getswitchinterval() <= 0.0005
        gate = part.gate = make_gate()
        nursery.start_soon(runner.forward, (0, 0), None, lab.ids(0, 0))
        await gate.entered.wait()
        for _ in range(1000):
            await trio.lowlevel.checkpoint()
        assert runner.counters.forwards == 0
        gate.open()
    assert runner.counters.forwards == 1


async def test_progress_of_a_payload_and_pieces_of_an_input(lab):
    """On the CPU a payload is complete with its job; an input may be announced piece by piece."""
    async with lab.runners(2) as (first, last):
        forward = await first.forward((0, 0), None, lab.ids(0, 0))
        seen = []
        forward.ready.watch(seen.append)
        assert forward.ready.complete and seen == [lab.boundary.forward_bytes]
        inflow = last.inflow(forward.payload)
        inflow.landed(0, 100)
        with pytest.raises(StageError):
            inflow.landed(100, lab.boundary.forward_bytes + 1)
        inflow.landed(100, lab.boundary.forward_bytes)
        assert (await last.forward((0, 0), inflow)).finite


async def test_many_runners_at_once_share_nothing(lab):
    """S x R device threads in one process, each with one torch thread: all equal the plain loop."""
    losses, _ = lab.reference(3, 2)
    async with trio.open_nursery() as nursery:

        async def swarm():
            async with lab.runners(3) as runners:
                assert await lab.train(runners, 2) == losses

        for _ in range(4):
            nursery.start_soon(swarm)
