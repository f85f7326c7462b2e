"""Token buckets by key: each has its own tokens, and the table is bounded."""

from __future__ import annotations

from wire.rates import Buckets


def test_each_key_has_tokens_of_its_own_and_gains_with_time() -> None:
    buckets = Buckets(per_s=0.5, burst=2, most=8)
    assert [buckets.take("a", 0.0) for _ in range(3)] == [True, True, False]
    assert buckets.take("b", 0.0)
    assert not buckets.take("a", 1.9) and buckets.take("a", 2.0)


def test_beyond_the_bound_the_first_is_forgotten_and_no_other() -> None:
    buckets = Buckets(per_s=0.0, burst=1, most=3)
    assert all(buckets.take(key, 0.0) for key in "abc")
    assert buckets.take("d", 0.0) and len(buckets) == 3
    assert not buckets.take("c", 0.0) and not buckets.take("b", 0.0), "still known"
    assert buckets.take("a", 0.0) and len(buckets) == 3, "begun anew"
