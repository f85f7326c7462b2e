"""Seed lists and the keeper of seeds, in virtual time.  FIND-3, FIND-5, FIND-6, FIND-7, FIND-8, FIND-10."""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from tests.wire.net.worlds import OTHER_RUN, World, member
from wire.address import Address
from wire.errors import Code, WireError, error_for
from wire.identity import Identity, PeerId
from wire.limits import DEFAULT_LIMITS
from wire.net import SeedEntry, SeedList, SeedListError, SeedState, SeedStatus
from wire.net.seedlist import parse_seed_list
from wire.net.seeds import SeedKeeper

Clock = trio.testing.MockClock
IDS = [Identity.generate().peer_id for _ in range(3)]


# -- lists


def test_a_plain_list() -> None:
    text = f"""
# the seeds
seed.example:4001   # a name
{IDS[0]}@8.0.0.1:4001
/ip4/8.0.0.2/tcp/4001

seed.example:4001
"""
    entries = parse_seed_list(text, "seeds.txt")
    assert [str(entry) for entry in entries] == [
        "/dns/seed.example/tcp/4001",
        f"/ip4/8.0.0.1/tcp/4001/p2p/{IDS[0]}",
        "/ip4/8.0.0.2/tcp/4001",
    ]
    assert [entry.where for entry in entries] == ["seeds.txt:3", "seeds.txt:4", "seeds.txt:5"]


@pytest.mark.parametrize("line", ["seed.example", "seed.example:", "seed.example:99999", "x@8.0.0.1:4001", "8.0.0.1:0", "a b:1"])
def test_a_mistake_is_named_with_file_and_line(line: str) -> None:
    with pytest.raises(SeedListError) as wrong:
        parse_seed_list(f"8.0.0.1:4001\n{line}\n\n{line}", "seeds.txt")
    assert len(wrong.value.problems) == 2
    assert wrong.value.problems[0].startswith("seeds.txt:2: ") and wrong.value.problems[1].startswith("seeds.txt:4: ")
    assert all(problem in str(wrong.value) for problem in wrong.value.problems)


def test_an_empty_list_and_a_too_long_one() -> None:
    with pytest.raises(SeedListError, match="no seed in it"):
        parse_seed_list("# nothing\n")
    with pytest.raises(SeedListError, match="at most 64"):
        parse_seed_list("\n".join(f"8.0.0.{number}:4001" for number in range(65)))


@given(st.text(max_size=200))
def test_any_text_is_entries_or_one_kind_of_error(text: str) -> None:
    with suppress(SeedListError):
        assert parse_seed_list(text)


def test_a_file_is_read_again_when_it_changed(tmp_path: Path) -> None:
    path = tmp_path / "seeds.txt"
    path.write_text("8.0.0.1:4001\n")
    seeds = SeedList.read(path)
    assert not seeds.reread()
    path.write_text("8.0.0.1:4001 # the same\n")
    assert not seeds.reread()
    path.write_text("8.0.0.2:4001\n")
    assert seeds.reread() and [str(entry) for entry in seeds.entries] == ["/ip4/8.0.0.2/tcp/4001"]
    path.write_text("rubbish\n")
    with pytest.raises(SeedListError, match=r"seeds\.txt:1"):
        seeds.reread()
    assert [str(entry) for entry in seeds.entries] == ["/ip4/8.0.0.2/tcp/4001"]
    assert not seeds.reread()  # said once


@pytest.mark.parametrize(
    ("content", "words"), [(b"\xff\xfe", "not UTF-8"), (b"#" * 70_000, "not a seed list"), (None, "No such file")]
)
def test_a_file_that_is_no_list(content: bytes | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / "seeds.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SeedListError, match=words):
        SeedList.read(path)


# -- the keeper alone


class FakeReach:
    """Seeds that answer as `answers` says; connections end when `lost` is set."""

    def __init__(self, answers: dict[str, WireError | PeerId]) -> None:
        self.answers = answers
        self.dials: list[tuple[float, str]] = []
        self.others = 0
        self.lost: dict[PeerId, trio.Event] = {}

    async def dial_seed(self, entry: SeedEntry) -> PeerId:
        self.dials.append((trio.current_time(), str(entry)))
        await trio.sleep(0.1)
        answer = self.answers[str(entry)]
        if isinstance(answer, WireError):
            raise answer
        self.lost.setdefault(answer, trio.Event())
        return answer

    async def wait_lost(self, peer_id: PeerId) -> None:
        await self.lost[peer_id].wait()
        del self.lost[peer_id]

    def connected_peers(self) -> int:
        return self.others + len(self.lost)

    async def moved(self, entry: SeedEntry, peer_id: PeerId) -> bool:
        return False

    async def ask_list(self, peer_id: PeerId, newer_than: int) -> bytes:
        return b""


ONE, TWO, THREE = (f"/ip4/8.0.0.{number}/tcp/4001" for number in (1, 2, 3))
SILENT = error_for(Code.TIMEOUT)


@asynccontextmanager
async def keeping(
    reach: FakeReach, *texts: str, seeds: SeedList | None = None
) -> AsyncIterator[tuple[SeedKeeper, list[SeedState]]]:
    states: list[SeedState] = []
    keeper = SeedKeeper(
        seeds or SeedList.of(*texts), reach, DEFAULT_LIMITS, report=states.append, complain=print, rng=random.Random(0)
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keeper.run)
        yield keeper, states
        nursery.cancel_scope.cancel()


async def test_all_seeds_are_tried_in_parallel_a_quarter_second_apart(autojump_clock: Clock) -> None:
    reach = FakeReach({ONE: IDS[0], TWO: IDS[1], THREE: IDS[2]})
    async with keeping(reach, ONE, TWO, THREE) as (keeper, _):
        await trio.sleep(1)
        assert [at for at, _ in reach.dials] == pytest.approx([0.0, 0.25, 0.5])
        assert {state.status for state in keeper.states.values()} == {SeedStatus.CONNECTED} and keeper.any_connected


async def test_failures_are_retried_for_ever_with_jitter_and_said_once(autojump_clock: Clock) -> None:
    """FIND-3: never an exit; the pause grows to 60 s; the same complaint once, not once a retry."""
    reach = FakeReach({ONE: SILENT})
    async with keeping(reach, ONE) as (keeper, states):
        await trio.sleep(3600)
        pauses = [later - earlier - 0.1 for (earlier, _), (later, _) in itertools.pairwise(reach.dials)]
        assert all(0 <= pause <= 60 for pause in pauses) and max(pauses) > 40 and len(set(pauses)) == len(pauses)
        assert pauses[0] <= 2 and 80 < len(reach.dials) < 200
        assert [state.status for state in states] == [SeedStatus.DIALLING, SeedStatus.FAILED]
        assert states[1].kinds == ("silent",) and "no answer" in states[1].reason
        reach.answers[ONE] = IDS[0]
        await trio.sleep(61)
        assert keeper.any_connected and len(states) == 3


async def test_a_lost_seed_is_dialled_again_soon(autojump_clock: Clock) -> None:
    reach = FakeReach({ONE: IDS[0]})
    async with keeping(reach, ONE) as (_, states):
        await trio.sleep(100)
        assert len(reach.dials) == 1
        reach.lost[IDS[0]].set()
        await trio.sleep(1.5)
        assert len(reach.dials) == 2
        assert [state.status for state in states] == [
            SeedStatus.DIALLING, SeedStatus.CONNECTED, SeedStatus.FAILED, SeedStatus.CONNECTED,
        ]  # fmt: skip


async def test_with_eight_peers_seeds_are_released_but_one_is_contacted_now_and_then(autojump_clock: Clock) -> None:
    reach = FakeReach({ONE: SILENT, TWO: SILENT})
    reach.others = 8
    async with keeping(reach, ONE, TWO) as (keeper, _):
        await trio.sleep(5)
        assert not reach.dials and {state.status for state in keeper.states.values()} == {SeedStatus.RELEASED}
        await trio.sleep(7200)
        assert 6 <= len(reach.dials) <= 12  # every 10 to 20 minutes
        reach.others = 7
        await trio.sleep(60)
        assert len(reach.dials) >= 8


async def test_the_node_itself_is_left_alone(autojump_clock: Clock) -> None:
    """FIND-10."""
    reach = FakeReach({ONE: error_for(Code.SELF)})
    async with keeping(reach, ONE) as (keeper, _):
        await trio.sleep(3600)
        assert len(reach.dials) == 1
        assert [state.status for state in keeper.states.values()] == [SeedStatus.SELF]


async def test_a_changed_file_takes_effect_within_a_minute(tmp_path: Path, autojump_clock: Clock) -> None:
    path = tmp_path / "seeds.txt"
    path.write_text(f"{ONE}\n{TWO}\n")
    reach = FakeReach({ONE: IDS[0], TWO: SILENT, THREE: IDS[2]})
    async with keeping(reach, seeds=SeedList.read(path)) as (keeper, states):
        await trio.sleep(5)
        path.write_text(f"{ONE}\n{THREE}\n")
        await trio.sleep(60)
        assert {str(entry) for entry in keeper.states} == {ONE, THREE}
        dials = len(reach.dials)
        await trio.sleep(600)
        assert not any(place == TWO for _, place in reach.dials[dials:])
        assert sum(place == ONE for _, place in reach.dials) == 1  # what stayed was not touched
        assert SeedState(SeedEntry(Address.parse(TWO)), SeedStatus.REMOVED) in states


# -- the keeper in a net


def status_of(states: dict[SeedEntry, SeedState], place: str) -> SeedState:
    return next(state for entry, state in states.items() if str(entry) == place)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
async def test_joined_within_two_seconds_in_every_order(order: tuple[int, ...], autojump_clock: Clock) -> None:
    """FIND-5, FIND-6: [mute, closed port, another run, good] in all 24 orders; each is told apart."""
    world = World()
    world.mutes.add(("10.0.0.1", 4001))
    places = [f"/ip4/10.0.0.{number}/tcp/4001" for number in (1, 2, 3, 4)]
    seeds = SeedList.of(*(places[index] for index in order))
    async with (
        member(world, "10.0.0.3", run=OTHER_RUN),
        member(world, "10.0.0.4") as good,
        member(world, "10.0.0.9", seeds=seeds) as node,
    ):
        with trio.move_on_after(2):
            while good.peer(node.peer_id) is None:
                await trio.sleep(0.01)
        assert node.peer(good.peer_id) is not None
        await trio.sleep(15)
        kinds = [status_of(node.seed_states, place).kinds for place in places[:3]]
        assert kinds == [("no-handshake",), ("refused",), ("run-mismatch",)]
        assert status_of(node.seed_states, places[3]).status is SeedStatus.CONNECTED


async def test_a_new_key_is_noted_without_a_pin_and_refused_with_one(autojump_clock: Clock) -> None:
    """FIND-7."""
    world = World()
    old, new = Identity.generate(), Identity.generate()
    pinned = f"{old.peer_id}@10.0.0.2:4001"
    async with (
        member(world, "10.0.0.2", identity=new),
        member(world, "10.0.0.8", seeds=SeedList.of("10.0.0.2:4001")) as free,
        member(world, "10.0.0.9", seeds=SeedList.of(pinned)) as strict,
    ):
        await trio.sleep(1)
        (state,) = free.seed_states.values()
        assert (state.status, state.peer_id) == (SeedStatus.CONNECTED, new.peer_id)
        (state,) = strict.seed_states.values()
        assert state.status is SeedStatus.FAILED and state.kinds == ("peer-mismatch",)
        assert str(old.peer_id) in state.reason and str(new.peer_id) in state.reason
        assert not strict.peers()


async def test_one_name_with_a_black_hole_and_a_live_address(autojump_clock: Clock) -> None:
    """FIND-2: as one name with both records; afterwards the dead address is not tried first again."""
    world = World(names={"seed.example": ["2001:db9::1", "10.0.0.2"]})
    world.black_holes.add(("2001:db9::1", 4001))
    async with member(world, "10.0.0.2") as seed, member(world, "10.0.0.9", seeds=SeedList.of("seed.example:4001")) as node:
        await trio.sleep(0.5)
        assert node.peer(seed.peer_id) is not None
        await trio.sleep(10)
        for peer in node.peers():
            peer.fail(error_for(Code.INTERNAL))
        world.dials.clear()
        await trio.sleep(3)
        assert node.peer(seed.peer_id) is not None
        assert {host for _, host, _ in world.dials} == {"10.0.0.2"}


async def test_all_seeds_down_at_start_and_one_back_after_a_minute(autojump_clock: Clock) -> None:
    """FIND-3: joined at most 60 s after it returns; then it goes away again and the swarm does not notice."""
    world = World()
    seeds = SeedList.of("10.0.0.1:4001", "10.0.0.2:4001")
    async with member(world, "10.0.0.8", seeds=seeds) as one, member(world, "10.0.0.9", seeds=seeds) as other:
        await trio.sleep(60)
        assert not one.peers() and not other.peers()
        async with member(world, "10.0.0.2", run=None) as seed:
            with trio.fail_after(61):
                while len(seed.peers()) < 2:
                    await trio.sleep(0.1)
            with trio.fail_after(75):
                while not any(record.peer_id == other.peer_id for record in one.known()):
                    await trio.sleep(0.1)
            peer = await one.connect(other.peer_id)
        await trio.sleep(30)
        assert not peer.closed


async def test_with_known_peers_on_disk_no_seed_is_needed(tmp_path: Path, autojump_clock: Clock) -> None:
    world, identity = World(), Identity.generate()
    limits = replace(DEFAULT_LIMITS, known_peers_write_s=1.0)
    async with member(world, "10.0.0.8") as other:
        async with member(world, "10.0.0.9", identity=identity, data_dir=tmp_path, limits=limits) as node:
            await node.dial(other.addresses[0])
        await trio.sleep(5)
        assert not other.peers()
        dead = SeedList.of("10.0.0.1:4001")
        async with member(world, "10.0.0.9", identity=identity, data_dir=tmp_path, seeds=dead) as node:
            with trio.fail_after(5):
                while node.peer(other.peer_id) is None:
                    await trio.sleep(0.1)
