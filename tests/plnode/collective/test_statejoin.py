"""Joining with live state, over production nets: consistent, resumable, verified, bit-equal."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import trio
import trio.testing

from plnode.collective.statecheck import StateCheck
from plnode.collective.statefetch import NoHolder
from plnode.collective.statefollow import Behind, Disagreement
from plnode.collective.statemessages import STATE, StateAsk, StateOffer
from plnode.collective.statepull import Progress
from plnode.collective.stateserver import CUT_AHEAD
from tests.plnode.collective.stateworld import CHUNK, STAGE, adam, equal, follower, gradient, inline, state, take, world
from tests.wire.net.worlds import RUN
from wire.sim import Link

Clock = trio.testing.MockClock
FAST = Link(delay_s=0.01, up_bps=20e6, down_bps=100e6)


async def test_join_7_weights_optimizer_and_step_are_those_of_the_donor_and_the_next_step_is_bit_equal(
    autojump_clock: Clock, tmp_path: Path
) -> None:
    async with world(3, 1, link=FAST) as (_, donors, (joiner,)), trio.open_nursery() as nursery:
        for donor in donors:
            nursery.start_soon(donor.train, 2.0)
        await trio.sleep(5)
        mine = state(20_000, seed=9)  # rubbish
        pulled = await take(joiner, donors, tmp_path)
        assert equal(pulled.tensors, donors[0].history[pulled.step])  # one moment of it
        assert len(pulled.holders) == 3 and not pulled.odd and not pulled.liars
        mine = pulled.tensors
        reached = await follower(joiner, donors, mine).run(pulled.step)
        assert reached == donors[0].step and equal(mine, donors[0].tensors)
        assert int(mine["optimizer.w.step"]) == reached
        control = {name: tensor.clone() for name, tensor in mine.items()}
        control["optimizer.w.exp_avg"].zero_()
        for one in (mine, control):
            adam(one, gradient(reached, 20_000))
        await trio.sleep(2.1)
        assert donors[0].step == reached + 1
        assert equal(mine, donors[0].tensors) and not equal(control, donors[0].tensors)
        assert not list(tmp_path.iterdir())
        nursery.cancel_scope.cancel()


async def test_join_6_a_transfer_of_ten_steps_ends_at_the_swarms_step(autojump_clock: Clock, tmp_path: Path) -> None:
    slow = Link(delay_s=0.01, up_bps=20e6, down_bps=8e6)  # 8 MB take 8 s
    settings = {"elements": 5_000, "frozen": 2_000_000, "chunk_bytes": 4 * CHUNK}
    async with world(2, 1, link=slow, **settings) as (_, donors, (joiner,)), trio.open_nursery() as nursery:
        for donor in donors:
            nursery.start_soon(donor.train, 0.8)
        await trio.sleep(1)
        pulled = await take(joiner, donors, tmp_path)
        ended = donors[0].step
        assert ended - pulled.step >= 9
        following = follower(joiner, donors, pulled.tensors)
        reached = await following.run(pulled.step)
        assert reached <= ended + 2 and equal(pulled.tensors, donors[0].tensors)
        assert pulled.moved_bytes + following.moved_bytes <= 1.3 * pulled.statement.size_bytes
        for donor in donors:  # nobody follows: nothing is kept, neither vectors nor, after its life, the copy
            assert donor.server.log.held_bytes == 0 and donor.server.copies == 1
        await trio.sleep(130)
        assert donors[0].server.held_bytes == 0
        nursery.cancel_scope.cancel()


async def test_mem_4_fifty_steps_behind_it_takes_a_fresh_cut(autojump_clock: Clock, tmp_path: Path) -> None:
    vector = 4 * 20_000
    async with world(2, 1, link=FAST, updates_budget_bytes=10 * vector) as (_, donors, (joiner,)), trio.open_nursery() as nursery:
        for donor in donors:
            nursery.start_soon(donor.train, 0.5)
        pulled = await take(joiner, donors, tmp_path)
        await trio.sleep(25)
        assert all(donor.server.log.held_bytes <= 10 * vector for donor in donors)
        with pytest.raises(Behind, match="too far behind"):
            await follower(joiner, donors, pulled.tensors).run(pulled.step)
        again = await take(joiner, donors, tmp_path)
        assert again.step >= 50
        assert await follower(joiner, donors, again.tensors).run(again.step) == donors[0].step
        assert equal(again.tensors, donors[0].tensors)
        nursery.cancel_scope.cancel()


async def test_mem_4_vectors_that_cost_more_than_the_state_are_not_fetched(autojump_clock: Clock, tmp_path: Path) -> None:
    async with world(1, 1, link=FAST) as (_, donors, (joiner,)), trio.open_nursery() as nursery:
        nursery.start_soon(donors[0].train, 0.5)
        pulled = await take(joiner, donors, tmp_path)
        await trio.sleep(3)
        following = follower(joiner, donors, pulled.tensors)
        with pytest.raises(Behind, match="a fresh cut has"):
            await following.run(pulled.step)
        assert following.moved_bytes == 0
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
async def test_join_2_the_donor_dies_half_way(autojump_clock: Clock, tmp_path: Path, share: float) -> None:
    link = Link(delay_s=0.01, up_bps=2e6, down_bps=100e6)
    async with world(2, 1, link=link, frozen=200_000) as (net, donors, (joiner,)), trio.open_nursery() as nursery:
        for donor in donors:
            nursery.start_soon(donor.train, 30.0)
        seen: list[Progress] = []

        def kill(progress: Progress) -> None:
            seen.append(progress)
            if donors[0].host.alive and progress.verified_bytes >= share * progress.total_bytes:
                net.kill(donors[0].host)

        with trio.fail_after(100):
            pulled = await take(joiner, donors, tmp_path, on_progress=kill)
        assert equal(pulled.tensors, donors[1].history[pulled.step])
        assert pulled.moved_bytes <= pulled.statement.size_bytes + 8 * CHUNK
        assert seen[-1].verified_bytes == seen[-1].total_bytes
        nursery.cancel_scope.cancel()


async def test_join_2_a_flipped_bit_is_noticed_and_its_donor_named(autojump_clock: Clock, tmp_path: Path) -> None:
    async with world(3, 1, link=FAST) as (_, donors, (joiner,)), trio.open_nursery() as nursery:
        for donor in donors:
            nursery.start_soon(donor.train, 5.0)
        honest = donors[1].snapshot

        async def later() -> None:  # memory goes bad after the copy was signed
            while not donors[1].server._cuts or next(iter(donors[1].server._cuts.values())).cut is None:
                await trio.sleep(0.001)
            next(iter(donors[1].server._cuts.values())).tensors["w"].view(torch.int32)[::1000] ^= 1 << 7

        nursery.start_soon(later)
        pulled = await take(joiner, donors, tmp_path)
        assert pulled.liars == (donors[1].id,) and honest is not None
        assert equal(pulled.tensors, donors[0].history[pulled.step])
        nursery.cancel_scope.cancel()


async def test_join_2_a_restarted_joiner_goes_on_with_its_partial_file(autojump_clock: Clock, tmp_path: Path) -> None:
    link = Link(delay_s=0.01, up_bps=2e6, down_bps=100e6)
    async with world(2, 1, link=link, frozen=200_000) as (_, donors, (joiner,)), trio.open_nursery() as nursery:
        for donor in donors:
            nursery.start_soon(donor.train, 4.0)
        with trio.move_on_after(6.0) as stopped:
            await take(joiner, donors, tmp_path)
        (partial,) = tmp_path.iterdir()
        assert stopped.cancelled_caught
        with partial.open("r+b") as file:  # a chunk that a crash left half-written
            file.write(bytes(100))
        pulled = await take(joiner, donors, tmp_path)
        assert pulled.had_bytes >= 5 * CHUNK
        assert pulled.moved_bytes <= pulled.statement.size_bytes - pulled.had_bytes + 4 * CHUNK
        assert equal(pulled.tensors, donors[0].history[pulled.step]) and not partial.exists()
        nursery.cancel_scope.cancel()


async def test_join_2_fewer_tensors_than_this_stage_has_are_not_handed_out(autojump_clock: Clock, tmp_path: Path) -> None:
    expected = {name: (str(t.dtype), tuple(t.shape)) for name, t in state(20_000).items()}
    async with world(2, 1, link=FAST) as (_, donors, (joiner,)), trio.open_nursery() as nursery:
        for donor in donors:
            nursery.start_soon(donor.train, 2.0)
        assert (await take(joiner, donors, tmp_path, expected=expected)).step >= 1
        with pytest.raises(NoHolder, match="differs from this stage's in 1 names, the first is bias"):
            await take(joiner, donors, tmp_path, expected=expected | {"bias": ("torch.float32", (3,))})
        nursery.cancel_scope.cancel()


async def test_join_4_only_holders_of_the_root_are_asked(autojump_clock: Clock, tmp_path: Path) -> None:
    """One of another stage, one whose state is another, one that holds nothing; then all of them leave."""
    async with world(5, 1, link=FAST) as (net, donors, (joiner,)), trio.open_nursery() as nursery:
        donors[2].server.hold(STAGE + 1)
        donors[3].tensors["w"][0] += 1
        donors[4].server.hold(None)
        for donor in donors:
            nursery.start_soon(donor.train, 2.0)
        pulled = await take(joiner, donors, tmp_path)
        assert pulled.holders == tuple(sorted(d.id for d in donors[:2])) and pulled.odd == (donors[3].id,)
        assert not donors[2].server.uploaded and not donors[3].server.uploaded and not donors[4].server.uploaded
        for donor in donors:
            net.kill(donor.host)
        with trio.fail_after(300), pytest.raises(NoHolder, match="no live state of stage 2"):
            await take(joiner, donors, tmp_path)
        nursery.cancel_scope.cancel()


async def test_join_10_an_announced_state_that_is_not_there(autojump_clock: Clock, tmp_path: Path) -> None:
    """Two announce a root and have lost it; the next best that is complete is taken, each was asked once."""
    async with world(3, 1, link=FAST) as (_, donors, (joiner,)), trio.open_nursery() as nursery:
        donors[2].tensors["w"][0] += 1
        for donor in donors:
            nursery.start_soon(donor.train, 2.0)
        asked = []
        for donor in donors[:2]:
            find = donor.server._find
            donor.server._find = lambda root, find=find: asked.append(root) or None  # type: ignore[method-assign]
        pulled = await take(joiner, donors, tmp_path)
        assert pulled.holders == (donors[2].id,) and len(asked) == 2
        nursery.cancel_scope.cancel()


async def test_sealed_weights_go_to_those_who_claim_the_stage(autojump_clock: Clock, tmp_path: Path) -> None:
    claims = {}
    async with world(1, 2, link=FAST, sealed=True, claims=claims.get) as (_, donors, joiners), trio.open_nursery() as nursery:
        nursery.start_soon(donors[0].train, 1.0)
        claims[joiners[0].id], claims[joiners[1].id] = STAGE, STAGE + 1
        assert (await take(joiners[0], donors, tmp_path / "0")).tensors
        with pytest.raises(NoHolder, match="sealed"):
            await take(joiners[1], donors, tmp_path / "1")
        nursery.cancel_scope.cancel()


async def test_a_copy_at_a_step_far_ahead_is_refused_and_not_remembered(autojump_clock: Clock) -> None:
    """Each step that is asked for is kept until it comes: whoever names millions of them must not fill the donor's memory."""
    async with world(1, 1, link=FAST) as (_, (donor,), (joiner,)):
        peer = joiner.net.peer(donor.id)
        assert peer is not None
        for far in (CUT_AHEAD + 1, 2**40, 2**63 - 1):
            offer = await peer.call(STATE, StateAsk(STAGE, far), StateOffer, deadline_s=5.0)
            assert "too far ahead" in offer.reason and not offer.envelopes
        assert not donor.server._wanted


async def test_no_room_for_a_copy_is_said(autojump_clock: Clock, tmp_path: Path) -> None:
    async with world(1, 1, link=FAST, budget_bytes=1000) as (_, donors, (joiner,)), trio.open_nursery() as nursery:
        nursery.start_soon(donors[0].train, 1.0)
        with pytest.raises(NoHolder, match="a copy takes 240,008 bytes, 1,000 are left"):
            await take(joiner, donors, tmp_path)
        assert donors[0].server.held_bytes == 0
        nursery.cancel_scope.cancel()


async def test_vectors_of_donors_that_came_apart_are_not_applied(autojump_clock: Clock, tmp_path: Path) -> None:
    async with world(2, 1, link=FAST) as (_, donors, (joiner,)), trio.open_nursery() as nursery:
        for donor in donors:
            nursery.start_soon(donor.train, 2.0)
        pulled = await take(joiner, donors, tmp_path)
        add = donors[1].server.log.add
        donors[1].server.log.add = lambda step, v, now: add(step, memoryview(bytes(v.nbytes)), now)  # type: ignore[method-assign]
        await trio.sleep(3)
        before = {name: tensor.clone() for name, tensor in pulled.tensors.items()}
        with pytest.raises(Disagreement) as caught:
            await follower(joiner, donors, pulled.tensors).run(pulled.step)
        assert {peer for side in caught.value.sides for peer in side} == {d.id for d in donors}
        assert equal(before, pulled.tensors) or caught.value.step > pulled.step
        nursery.cancel_scope.cancel()


async def test_join_8_replicas_compare_and_the_one_that_drifted_is_named(autojump_clock: Clock) -> None:
    async with world(4, 0, link=FAST) as (_, donors, _):
        checks = [StateCheck(donor.net, run=RUN, offload=inline) for donor in donors]
        donors[1].tensors["w"] *= 1 + 1e-7  # other bits, the same state
        donors[2].tensors["optimizer.w.exp_avg"][5] = 0.1

        async def publish(number: int) -> None:
            await trio.sleep(number)  # the others wait for the last one
            await checks[number].publish(STAGE, 3, bytes(32), donors[number].tensors)

        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(publish, number)
            await trio.sleep(0.5)
            found = await checks[0].compare([donor.id for donor in donors[1:]])
        assert [finding.drifted for finding in found] == [False, True, False]
        assert found[0].difference is not None and 0 < found[0].difference.relative < 1e-6
        assert found[1].difference is not None and found[1].difference.name == "optimizer.w.exp_avg"
        assert found[2].difference is None and "nothing was published" in found[2].reason
        donors[1].tensors = donors[0].tensors
        await checks[1].publish(STAGE, 3, bytes(32), donors[1].tensors)
        (equal_now,) = await checks[0].compare([donors[1].id])
        assert equal_now.difference is not None and equal_now.difference.relative == 0.0
