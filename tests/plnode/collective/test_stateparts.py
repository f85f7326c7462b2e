"""The parts of a join that need no network: roots, cuts, the log of updates, sketches, the pace of uploads, messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from plnode.collective import sketch
from plnode.collective import statemessages as m
from plnode.collective.statecut import Chunked, chunk_length, chunk_size, header_of, root_of, seal_cut
from plnode.collective.statepace import HOLD_S, LEAST, SHARE, Pace
from plnode.collective.stateroots import Offer, ranking
from plnode.collective.updatelog import UpdateLog
from plnode.stage.snapshot_file import SnapshotRoot, hash_file
from tests.plnode.collective.pulling import peers
from tests.plnode.collective.stateworld import equal, state
from wire.messages import decode, encode

RUN = bytes(32)


def offer(donor: Any, root: int, step: int = 5) -> Offer:
    return Offer(donor, SnapshotRoot(RUN, 1, step, 1, 100, 10, bytes([root]) * 32))


# -- roots


def test_join_8_the_root_of_most_wins_and_others_of_the_step_are_named() -> None:
    a, b, c, d = sorted(peers(4))
    best, *rest = ranking([offer(a, 1), offer(b, 2), offer(c, 1), offer(d, 9, step=6)])
    assert best.holders == (a, c) and best.odd == (b,)
    assert [choice.holders for choice in rest] == [(d,), (b,)]  # the newer before the odd one
    assert ranking([offer(a, 1), offer(a, 1), offer(b, 2), offer(b, 2)])[0].holders == (a,)  # once a donor


def test_roots_of_another_size_are_other_states() -> None:
    a, b = sorted(peers(2))
    bigger = Offer(b, SnapshotRoot(RUN, 1, 5, 1, 101, 10, bytes([1]) * 32))
    assert len(ranking([offer(a, 1), bigger])) == 2


# -- cuts


def test_a_cut_is_a_safetensors_file_and_equal_states_have_equal_roots(tmp_path: Path) -> None:
    def cut(tensors: dict[str, torch.Tensor]) -> Any:
        return seal_cut(tensors, lambda p, s: p, run=RUN, stage=2, step=7, generation=1, chunk_bytes=1000)

    tensors = state(500) | {"half": torch.ones(3, 5, dtype=torch.bfloat16), "none": torch.zeros(0), "odd": torch.tensor([True])}
    one, other = cut(tensors), cut(dict(reversed(list({n: t.clone() for n, t in tensors.items()}.items()))))
    assert one.statement == other.statement and one.data.count > 5
    path = tmp_path / "cut"
    path.write_bytes(b"".join(bytes(view) for index in range(one.data.count) for view in one.data.chunk(index)))
    assert equal(load_file(path), tensors)
    assert hash_file(path, 1000) == (one.statement.size_bytes, one.statement.root)
    tensors["optimizer.w.step"] += 1
    assert cut(tensors).statement.root != one.statement.root


@given(st.lists(st.binary(max_size=30), max_size=6), st.integers(1, 17))
def test_chunks_are_the_bytes_in_order(parts: list[bytes], chunk: int) -> None:
    whole = b"".join(parts)
    if not whole:
        with pytest.raises(ValueError, match="nothing"):
            Chunked([memoryview(part) for part in parts], chunk)
        return
    data = Chunked([memoryview(part) for part in parts], chunk)
    data.hash()
    got = [b"".join(bytes(v) for v in data.chunk(index)) for index in range(data.count)]
    assert b"".join(got) == whole and all(len(c) == chunk_length(i, len(whole), chunk) for i, c in enumerate(got))
    assert data.root == root_of(data.hashes) and len(data.hashes) == 32 * data.count
    with pytest.raises(IndexError):
        data.chunk(data.count)


def test_num_9_offsets_beyond_2_to_31_and_2_to_32() -> None:
    """Stand-ins: tensors without memory, and one page that is there many times."""
    tensors = {"big": torch.empty(700_000_000, device="meta"), "rest": torch.empty(1 << 30, dtype=torch.bfloat16, device="meta")}
    header, names = header_of(tensors, run=RUN, stage=0, step=1)
    assert names == ["big", "rest"] and b"[2800000000,4947483648]" in header
    page = memoryview(bytes(1 << 24))
    data = Chunked([page] * 320, chunk_size(5 << 30))
    assert data.size_bytes == 5 << 30 and data.count == 1280
    assert sum(view.nbytes for view in data.chunk(1279)) == 4 << 20
    statement = SnapshotRoot(RUN, 0, 1, 1, data.size_bytes, data.chunk_bytes, bytes(32))
    assert decode(encode(statement), SnapshotRoot).size_bytes == 5 << 30
    update = m.UpdateRoot(2**40, 5 << 30, 4 << 20, bytes(32))
    assert decode(encode(update), m.UpdateRoot) == update


# -- the log of updates


def vector(size: int = 100) -> memoryview:
    return memoryview(bytes(size))


def test_nothing_is_kept_for_nobody_and_only_what_is_needed() -> None:
    log, (a, b) = UpdateLog(1000, life_s=10), peers(2)
    assert not log.add(0, vector(), 0.0) and log.held_bytes == 0
    log.begin(a, 2, 0.0)
    assert not log.add(1, vector(), 0.0)
    for step in (2, 3, 4):
        assert log.add(step, vector(), 0.0)
    assert [s for s, _ in log.since(3)] == [3, 4] and log.since(1) == [] and log.covers(2, 5) and not log.covers(1, 5)
    assert log.follow(a, 4, 1.0) and log.held_bytes == 100
    log.begin(b, 5, 1.0)
    log.forget(a)
    assert log.held_bytes == 0 and log.followers == (b,)


def test_mem_4_over_the_budget_the_one_furthest_behind_is_given_up_and_told_once() -> None:
    log, (slow, fast) = UpdateLog(350, life_s=1e9), peers(2)
    log.begin(slow, 0, 0.0)
    log.begin(fast, 0, 0.0)
    for step in range(50):
        log.add(step, vector(), float(step))
        log.follow(fast, step, float(step))
        assert log.held_bytes <= 350
    assert log.followers == (fast,)
    assert not log.follow(slow, 0, 50.0) and log.follow(slow, 50, 50.0)


def test_a_follower_that_is_gone_is_forgotten() -> None:
    log, (a, _) = UpdateLog(1000, life_s=10), peers(2)
    log.begin(a, 0, 0.0)
    log.add(0, vector(), 9.0)
    log.heard(a, 9.0)
    log.expire(18.0)
    assert log.held_bytes == 100
    log.expire(19.1)
    assert log.held_bytes == 0 and not log.wanted


# -- sketches


def test_join_7_equal_states_have_equal_sketches_and_a_drift_is_measured() -> None:
    one = state(200_000)
    one["optimizer.w.exp_avg_sq"] += 1e-8
    noise = torch.randn(200_000, generator=torch.Generator().manual_seed(3))
    for scale, alarm in ((0.0, False), (1e-6, False), (1e-4, True)):
        other = {name: tensor.clone() for name, tensor in one.items()}
        tensor = other["optimizer.w.exp_avg_sq"]
        tensor += scale * 1e-8 * noise
        found = sketch.compare(sketch.sketch(one, b"s"), sketch.sketch(other, b"s"))
        assert (found.relative > sketch.TOLERANCE) is alarm
        if scale:
            true = float((other["optimizer.w.exp_avg_sq"] - one["optimizer.w.exp_avg_sq"]).norm() / tensor.norm())
            assert found.name == "optimizer.w.exp_avg_sq" and found.relative == pytest.approx(true, rel=0.5)


def test_sketches_depend_on_the_seed_and_travel() -> None:
    one, other = sketch.sketch(state(1000), b"1"), sketch.sketch(state(1000), b"2")
    assert one["w"] != other["w"]
    assert sketch.unpack(sketch.pack(one), one) == one
    assert sketch.unpack(sketch.pack({"x": b""}), one) is None and sketch.unpack(sketch.pack(one)[:-1], one) is None


def test_steps_and_what_is_not_finite_are_not_close() -> None:
    one, other, broken = state(10), state(10), state(10)
    other["optimizer.w.step"] += 1
    broken["w"][3] = float("nan")
    mine = sketch.sketch(one, b"s")
    assert sketch.compare(mine, sketch.sketch(other, b"s")) == sketch.Difference("optimizer.w.step", float("inf"))
    assert sketch.compare(mine, sketch.sketch(broken, b"s")) == sketch.Difference("w", float("inf"))
    assert sketch.compare(mine, {}).relative == float("inf")
    assert sketch.compare(sketch.sketch({}, b"s"), {}).relative == 0.0


# -- the pace of uploads


def test_uploads_take_a_share_of_what_the_line_has_shown() -> None:
    pace = Pace()
    assert not pace.look(0, 0.0, False)
    for second in range(20):
        assert pace.look(second * 1_000_000, float(second), True)
    assert pace.line == pytest.approx(1e6, rel=0.01)
    assert pace.pause_s(32 << 10) == pytest.approx((32 << 10) / (SHARE * 1e6), rel=0.01)
    assert pace.look(0, 19.0 + HOLD_S - 0.1, False) and not pace.look(0, 19.0 + HOLD_S, False)
    pace.line = 1.0
    assert pace.pause_s(LEAST) == 1.0  # never nothing


# -- messages

R = bytes(range(32))
HEX = "c420" + R.hex()
GOLDEN = [
    (m.StateAsk(2, 7), "93640207"),
    (m.StateOffer(9, (b"one", b"two"), "why", False), "95650992c4036f6e65c40374776fa3776879c2"),
    (m.ChunkAsk(R, m.HASHES), f"9366{HEX}ceffffffff"),
    (m.UpdateAsk(2, 7, True), "94670207c3"),
    (m.UpdateRoot(7, 2**40, 1 << 20, R), f"956807cf0000010000000000ce00100000{HEX}"),
    (m.UpdateOffer(9, (m.UpdateRoot(7, 5, 1, R),), True, "gone"), f"956909919568070501{HEX}c3a4676f6e65"),
    (m.SketchAsk(2, 7, R, 3), f"956a0207{HEX}03"),
    (m.SketchAnswer(R, 2, b"abc", ""), f"956b{HEX}02c403616263a0"),
]


@pytest.mark.parametrize(("message", "expected"), GOLDEN, ids=lambda value: type(value).__name__)
def test_golden_bytes(message: Any, expected: str) -> None:
    assert encode(message).hex() == expected
    assert decode(bytes.fromhex(expected), type(message)) == message
