"""Error feedback: a debt is paid once, whatever rounds come to."""

from __future__ import annotations

import numpy as np
import pytest

from plnode.collective.feedback import WIRES, Feedback, codec_for, encode, shortfall
from wire.tensor import DType


def test_a_round_of_the_same_step_throws_the_earlier_one_away_a_later_step_does_not() -> None:
    feedback = Feedback(2)
    assert feedback.begin(3).tolist() == [0, 0]
    feedback.propose(np.array([1, 2], np.float32))
    assert feedback.owed.tolist() == [1, 2]
    assert feedback.begin(3).tolist() == [0, 0], "it was not the round that counted"
    feedback.propose(np.array([3, 4], np.float32))
    assert feedback.begin(4).tolist() == [3, 4]
    assert feedback.begin(4).tolist() == [3, 4], "a failed round changes nothing"
    feedback.propose(np.array([5, 6], np.float32))
    feedback.commit()
    feedback.commit()
    assert feedback.begin(4).tolist() == [5, 6]
    feedback.reset()
    assert feedback.begin(5).tolist() == [0, 0]


def test_an_older_step_after_a_restart_throws_it_away() -> None:
    feedback = Feedback(1)
    feedback.begin(9)
    feedback.propose(np.ones(1, np.float32))
    assert feedback.begin(7).tolist() == [0]


@pytest.mark.parametrize("wire", WIRES)
def test_what_is_seen_and_what_is_missing_are_what_was_wanted(wire: str) -> None:
    codec = codec_for(wire, DType.fp32)
    part = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    raw, seen = encode(codec, part)
    assert len(raw) == codec.wire_size((1000,))
    assert np.array_equal(codec.decode(raw, (1000,)), seen)
    assert np.array_equal(seen + shortfall(part, seen), part) == (wire != "int8") or np.allclose(seen + shortfall(part, seen), part)
    assert (shortfall(part, seen) == 0).all() == (wire == "fp32")


@pytest.mark.parametrize("wire", ["bf16", "int8"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, np.finfo(np.float32).max])
def test_a_diverged_element_owes_nothing(wire: str, value: float) -> None:
    part = np.array([1.0, value, 2.0], np.float32)
    _, seen = encode(codec_for(wire, DType.fp32), part)
    assert np.isfinite(shortfall(part, seen)).all()


def test_fp64_is_never_lossy() -> None:
    assert codec_for("fp32", DType.fp64).wire_size((3,)) == 24
    for wire in ("bf16", "int8"):
        with pytest.raises(ValueError, match="fp64 only as it is"):
            codec_for(wire, DType.fp64)
    with pytest.raises(ValueError, match="no wire 'fp16'"):
        codec_for("fp16", DType.fp32)
