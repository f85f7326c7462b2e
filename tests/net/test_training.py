"""The table of home routers with nodes that train: two stages in two homes, two public seeds that relay, three steps over the path
that the routers allow.

Each row is `plnode seed` and `plnode join` as a person starts them, on a run without an end: a row is over when both nodes have done
their steps over the path that it asks for.  A run of three steps would often be over before a hole is punched.

What must hold in every row: the nodes hold both stages, every loss is finite, no generation is given up, no microbatch is lost, also
while the path under the run changes.  The rows are those of the hole punching table: routers that keep a mapping are punched, also
over lines that lose; a symmetric one stays relayed and its owner is told why; a port that is mapped is dialled; routers that answer
strangers may be punched or not; two symmetric routers without a relay train nothing, are told so, and begin by themselves once one of
the seeds relays.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from bench.children import open_children
from bench.homes.swarm import Swarm, new_run
from bench.lab import Lab, Network, open_lab
from tests.net.conftest import available
from tests.net.followed import Followed, Trainers, open_trainers
from tests.net.homes import CONE, CONE_2, FULL, SHIFT, SHIFT_2, SYMMETRIC, SYMMETRIC_2, note

STEPS = 3
ROW_S = 90.0  # two interpreters with torch on a busy machine take most of it
VERDICT_S = 30.0  # until the owner of a symmetric router knows
UNREACHABLE_S = 20.0  # until both know that nothing can be done
SEEDS = ("p1", "p2")
PUNCHED, RELAYED, UNRELAYED = frozenset({"punched"}), frozenset({"relayed"}), frozenset({"direct", "punched"})
SYMMETRIC_TOLD = "the router gives each connection another port"
TINY = (
    "steps=1000000", "stages.count=2", "stages.replicas=1", "model.dim=16", "model.layers=2", "model.heads=2", "model.kv_heads=1",
    "model.ffn_dim=24", "model.seq_len=16", "batch.microbatches=4", "batch.sequences=2", "evaluation.every=0", "snapshot.every=0",
)  # fmt: skip


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of all rows; they are one after the other."""
    return trio.run(new_run, tmp_path_factory.mktemp("run"), *TINY)


@pytest.fixture(scope="module")
def lossy() -> Iterator[Lab]:
    """Two homes behind cone routers, on lines that lose one packet in twenty."""
    available()
    with open_lab(Network(rate_mbit=100.0, rtt_ms=80.0, loss_percent=5.0, public=2, routers=("cone", "cone"))) as made:
        yield made


def check(made: Trainers) -> None:
    """What holds in every row of a swarm that trains."""
    for node in made.nodes:
        assert node.of("RunAborted") == []
        assert len(node.of("RunStarted")) == 1
        assert node.of("NodeStatus")[-1]["lost_microbatches"] == 0
        assert not any(step["skipped"] for step in node.of("StepDone"))
    assert {node.of("NodeStatus")[-1]["stage"] for node in made.nodes} == {0, 1}
    last = next(node for node in made.nodes if node.of("NodeStatus")[-1]["stage"] == 1)
    assert all(step["loss"] is not None for step in last.of("StepDone")), "a loss that is not finite is written as none"


async def steps(made: Trainers, kinds: frozenset[str], after: Sequence[int] = (0, 0)) -> None:
    """Both nodes do their steps over such paths to each other; a relay is one of ours."""

    async def one(node: Followed, other: Followed, since: int) -> None:
        status = await node.steps_over(kinds, other, STEPS, since)
        line = next(line for line in status["peers"] if line["peer_id"] == other.peer_id)
        assert line["relay"] in ([seed.peer_id for seed in made.seeds] if line["path"] == "relayed" else [None])

    async with trio.open_nursery() as nursery:
        for node, other, since in zip(made.nodes, reversed(made.nodes), after, strict=True):
            nursery.start_soon(one, node, other, since)


@asynccontextmanager
async def row(lab: Lab, signed: Path, root: Path, one: str, other: str, *relay: str) -> AsyncIterator[Trainers]:
    """The processes of a row; what holds in every row is checked at its end."""
    with trio.fail_after(ROW_S):
        async with open_children() as children, open_trainers(Swarm(lab, children, root, signed, SEEDS), (one, other), *relay) as made:
            try:
                yield made
                check(made)
            except BaseException:
                for node in (*made.seeds, *made.nodes):
                    note(node.tale())
                raise


def here(made: Trainers) -> tuple[int, ...]:
    """How many events each has told so far."""
    return tuple(len(node.events) for node in made.nodes)


def figures(made: Trainers, kinds: frozenset[str], row: str) -> None:
    first = max(node.of("StepDone")[0]["after"] for node in made.nodes)
    path = max(node.first_over(kinds, other) for node, other in zip(made.nodes, reversed(made.nodes), strict=True))
    started = max(node.of("NodeStarted")[0]["after"] for node in made.nodes)
    done = min(len(node.of("StepDone")) for node in made.nodes)
    note(f"{row}: up {started:.1f} s, {'/'.join(sorted(kinds))} {path:.1f} s, first step {first:.1f} s; {done} steps seen")


async def told(node: Followed, text: str, within_s: float) -> dict[str, Any]:
    """Wait until its status has these words for its owner; that status."""
    started = (await node.wait_for("NodeStarted"))["after"]
    status = await node.until(lambda event: event["kind"] == "NodeStatus" and text in event["access_reason"])
    assert status["after"] - started < within_s
    return status


@pytest.mark.parametrize(
    ("one", "other", "kinds"),
    [
        pytest.param(CONE, CONE_2, PUNCHED, id="cone/cone"),
        pytest.param(CONE, SHIFT, PUNCHED, id="cone/shift"),
        pytest.param(SHIFT, SHIFT_2, PUNCHED, id="shift/shift"),
        pytest.param(FULL, SYMMETRIC, UNRELAYED, id="full/symmetric"),
    ],
)
async def test_stages_train_over_the_direct_path_that_their_routers_allow(
    world: Lab, signed: Path, tmp_path: Path, one: str, other: str, kinds: frozenset[str], request: pytest.FixtureRequest
) -> None:
    async with row(world, signed, tmp_path, one, other) as made:
        await steps(made, kinds)
        figures(made, kinds, request.node.name)


async def test_stages_train_over_a_punched_path_on_lines_that_lose(lossy: Lab, signed: Path, tmp_path: Path) -> None:
    async with row(lossy, signed, tmp_path, "h1", "h2") as made:
        await steps(made, PUNCHED)
        figures(made, PUNCHED, "cone/cone, 5 % loss")


@pytest.mark.parametrize(
    ("one", "other"), [pytest.param(CONE, SYMMETRIC, id="cone/symmetric"), pytest.param(SYMMETRIC, SYMMETRIC_2, id="symmetric/symmetric")]
)
async def test_nat_3_a_symmetric_router_trains_through_a_relay_and_its_owner_is_told_why(
    world: Lab, signed: Path, tmp_path: Path, one: str, other: str, request: pytest.FixtureRequest
) -> None:
    """The steps that count are those after the verdict: until then nobody could know that the relay is for good."""
    async with row(world, signed, tmp_path, one, other) as made:
        status = await told(made.nodes[1], SYMMETRIC_TOLD, VERDICT_S)
        assert status["access"] == "relayed"
        await steps(made, RELAYED, here(made))
        figures(made, RELAYED, f"{request.node.name}: told {status['after']:.1f} s")


async def test_routers_that_answer_strangers_do_not_keep_the_stages_from_training(lossy: Lab, signed: Path, tmp_path: Path) -> None:
    """Whether such a hole opens hangs on which packet is first, to some 40 ms: both ways are right, as long as the work goes on."""
    for number in (1, 2):
        lossy.answer_strangers(number)
    async with row(lossy, signed, tmp_path, "h1", "h2") as made:
        await steps(made, PUNCHED | RELAYED)
        figures(made, PUNCHED | RELAYED, "routers that answer, 5 % loss")
        ways = {line["path"] for line in made.nodes[0].of("NodeStatus")[-1]["peers"] if line["peer_id"] == made.nodes[1].peer_id}
        note(f"routers that answer: {', '.join(ways)}")


async def test_nat_1_two_homes_without_a_relay_are_told_so_train_nothing_and_begin_once_one_relays(
    world: Lab, signed: Path, tmp_path: Path
) -> None:
    """The seeds relay nothing at first; then one of them is started again as one that does."""
    async with row(world, signed, tmp_path, SYMMETRIC, SYMMETRIC_2, "--relay", "off") as made:
        for node in made.nodes:
            status = await told(node, "no relay is known", UNREACHABLE_S)
            assert status["access"] == "unreachable" and SYMMETRIC_TOLD in status["access_reason"]
            assert status["state"] == "waiting" and "stage" in status["waiting_for"]
            note(f"no relay, {node.host}: {status['after']:.1f} s: {status['waiting_for']}")
        assert not any(node.of("RunStarted") or node.of("StepDone") for node in made.nodes)
        await made.seeds[1].child.end()
        seed = await made.seed(SEEDS[1], "--relay", "on")
        await steps(made, RELAYED)
        begun = max(node.of("StepDone")[0]["after"] for node in made.nodes) - (seed.began - made.nodes[1].began)
        note(f"no relay, then one: first step {begun:.1f} s after its start")
