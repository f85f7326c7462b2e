"""No schedule deadlocks, none loses a microbatch or counts one twice (training.md, section 3, bar c).

Production code on pipes in memory under a virtual clock; hypothesis draws the shape.  A deadlock shows as the generation's own
"nothing has happened for 600 s", which costs no real time.
"""

from __future__ import annotations

import pytest
import trio
import trio.testing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plnode.pipeline import hops
from plnode.pipeline.broken import Broken
from tests.swarm.virtual import Replica, run_generation

# 2 x 8 x dim x 4 bytes: 256 B, far below a chunk; 640 KiB, three chunks and more than a pipe of 64 KiB holds.
SMALL, LARGE = 4, 10_240


def run(**shape: object) -> list[Replica]:
    return trio.run(lambda: run_generation(**shape), clock=trio.testing.MockClock(autojump_threshold=0))  # type: ignore[arg-type]


def check(replicas: list[Replica], train: int, evaluate: int, steps: int) -> None:
    for replica in replicas:
        assert replica.runner.counted == [[1.0] * train] * steps, f"stage {replica.stage}: {replica.runner.counted}"
        assert not replica.ledger.under_way()
        assert [a.step for a in replica.applied] == list(range(steps + 1 if evaluate else steps))
    last = max(r.stage for r in replicas)
    for replica in replicas:
        losses = [a.loss for a in replica.applied if a.trained]
        expected = sum(range(1, train + 1)) / (train * 16)
        assert losses == [pytest.approx(expected) if replica.stage == last else None] * steps
    done = sum(r.ledger.counts.done for r in replicas if r.stage == 0)
    assert done == train * steps


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    replicas=st.integers(1, 6).flatmap(lambda stages: st.lists(st.integers(1, 3), min_size=stages, max_size=stages)),
    train=st.integers(1, 8),
    evaluate=st.integers(0, 3),
    dim=st.sampled_from([SMALL, SMALL, SMALL, LARGE]),
    seed=st.integers(0, 2**32),
)
def test_parity_no_schedule_deadlocks_or_miscounts(replicas: list[int], train: int, evaluate: int, dim: int, seed: int) -> None:
    steps = 2
    shape = {"stages": len(replicas), "replicas": replicas, "train": train, "evaluate": evaluate, "steps": steps, "dim": dim}
    check(run(**shape, seed=seed, capacity=1 << 16), train, evaluate, steps)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_parity_one_replica_a_stage_adds_up_in_index_order(stages: int) -> None:
    for seed in range(5):
        replicas = run(stages=stages, replicas=[1] * stages, train=6, evaluate=1, steps=2, dim=SMALL, seed=seed)
        assert all(r.runner.order == [*range(6), *range(6)] for r in replicas)


def test_parity_a_deadlock_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: without slots for activations nothing can flow, and the generation says so."""
    monkeypatch.setattr(hops, "AHEAD", 0)
    with pytest.raises(BaseExceptionGroup) as failure:
        run(stages=2, replicas=[1, 1], train=2, evaluate=0, steps=1, dim=SMALL, seed=0)
    assert all("nothing has happened for 600 s" in str(broken) for broken in _leaves(failure.value.split(Broken)[0]))


def _leaves(group: BaseExceptionGroup | None) -> list[BaseException]:  # type: ignore[type-arg]
    assert group is not None
    return [leaf for e in group.exceptions for leaf in (_leaves(e) if isinstance(e, BaseExceptionGroup) else [e])]
