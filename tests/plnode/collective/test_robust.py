"""Robust pooling as mathematics: another minimiser, bounds against liars, symmetries, and the same bits everywhere."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plnode.collective.robust import COORDINATE, VECTOR, _exp, by_work, check_gram, coordinates, means, outliers, weigh

Array = np.ndarray[Any, np.dtype[np.float64]]


def pool(x: Array, kind: str, counts: list[int] | None = None) -> tuple[Array, tuple[float, ...]]:
    """Of rows that are means."""
    counts = counts or [1] * len(x)
    w = weigh((x @ x.T).tolist(), counts, kind)
    return np.asarray(w) @ x, w


def swarm(seed: int, n: int, m: int, bad: int, attack: str) -> tuple[Array, Array]:
    """(updates, mean of the honest): a common gradient of length 1, noise of length about 1."""
    rng = np.random.default_rng(seed)
    truth = rng.standard_normal(m) / math.sqrt(m)
    x = truth + rng.standard_normal((n, m)) / math.sqrt(m)
    if attack == "flip":
        x[:bad] *= -10
    elif attack == "noise":
        x[:bad] = rng.standard_normal((bad, m)) * 100 / math.sqrt(m)
    elif attack == "collude":
        x[:bad] = truth + 5 * rng.standard_normal(m) / math.sqrt(m) + rng.standard_normal((bad, m)) * 0.1 / math.sqrt(m)
    return x, truth


@pytest.mark.parametrize("kind", ["huber", "pseudo-huber"])
@pytest.mark.parametrize("counts", [[1] * 12, [1, 2, 4, 8] * 3])
def test_the_convex_ones_find_what_another_minimiser_finds(kind: str, counts: list[int]) -> None:
    x = np.random.default_rng(1).standard_normal((12, 3)) * 3
    c = np.asarray(counts)
    distance = np.linalg.norm(x[:, None] - x[None], axis=2) / np.sqrt(1 / c[:, None] + 1 / c[None])
    r = min(sorted(np.delete(row, i))[(len(c) - 2) // 2] for i, row in enumerate(distance))
    alpha = {"huber": 0.5, "pseudo-huber": 0.25}[kind] * r

    def objective(u: Array) -> float:
        z = np.sqrt(c) * np.linalg.norm(x - u, axis=1)
        if kind == "huber":
            return float(np.where(z <= alpha, z * z / 2, alpha * z - alpha * alpha / 2).sum())
        return float((alpha * alpha * (np.sqrt(1 + z * z / alpha**2) - 1)).sum())

    assert pool(x, kind, counts)[0] == pytest.approx(compass(objective, x.mean(axis=0)), abs=1e-5)


def compass(objective: Callable[[Array], float], start: Array) -> Array:
    """The least of a convex smooth function: step along the axes while that helps, then half as far (Hooke and Jeeves 1961)."""
    best, step = start, 1.0
    while step > 1e-8:
        tries = [best + step * way for axis in np.eye(len(best)) for way in (axis, -axis)]
        nearest = min(tries, key=objective)
        if objective(nearest) < objective(best):
            best = nearest
        else:
            step /= 2
    return best


@pytest.mark.parametrize("attack", ["flip", "noise", "collude"])
@pytest.mark.parametrize("bad", [4, 6])
@pytest.mark.parametrize(("kind", "factor"), [("welsch", 1.10), ("truncated", 1.10), ("huber", 2.2), ("pseudo-huber", 2.2)])
def test_liars_are_bounded_and_the_mean_is_not(attack: str, bad: int, kind: str, factor: float) -> None:
    x, truth = swarm(3, 20, 4000, bad, attack)
    best = float(np.linalg.norm(x[bad:].mean(axis=0) - truth))
    y, w = pool(x, kind)
    assert np.linalg.norm(y - truth) <= factor * best
    assert np.linalg.norm(x.mean(axis=0) - truth) >= 1.0, "control: the plain mean is off"
    assert sum(w) == pytest.approx(1)
    if kind in ("welsch", "truncated") or attack != "collude":
        assert set(range(bad)) <= set(outliers((x @ x.T).tolist(), [1] * 20, w)), "and they are named"
    assert not set(range(bad, 20)) & set(outliers((x @ x.T).tolist(), [1] * 20, w)), "and nobody else"


@pytest.mark.parametrize("kind", VECTOR)
@pytest.mark.parametrize("counts", [[1] * 8, [1, 1, 2, 2, 4, 4, 16, 16]])
def test_with_nobody_at_fault_it_is_the_mean_over_microbatches(kind: str, counts: list[int]) -> None:
    rng = np.random.default_rng(5)
    x = np.stack([1 / math.sqrt(4000) + rng.standard_normal(4000) / math.sqrt(4000 * c) for c in counts])
    y, w = pool(x, kind, counts)
    mean = np.asarray(by_work(counts)) @ x
    truth = np.full(4000, 1 / math.sqrt(4000))
    assert np.linalg.norm(y - truth) <= 1.02 * np.linalg.norm(mean - truth)
    assert outliers((x @ x.T).tolist(), counts, w) == ()


@pytest.mark.parametrize("kind", VECTOR)
def test_symmetries(kind: str) -> None:
    x, _ = swarm(7, 9, 50, 2, "collude")
    y, _ = pool(x, kind)
    order = np.random.default_rng(0).permutation(9)
    assert pool(x[order], kind)[0] == pytest.approx(y, abs=1e-6)
    assert pool(x + 1.0, kind)[0] == pytest.approx(y + 1.0, abs=1e-6)
    assert pool(8 * x, kind)[0] == pytest.approx(8 * y, abs=1e-6)
    turned = np.linalg.qr(np.random.default_rng(1).standard_normal((50, 50)))[0]
    assert pool(x @ turned, kind)[0] == pytest.approx(y @ turned, abs=1e-6)
    parts = sum(part @ part.T for part in np.array_split(x, 4, axis=1))
    assert weigh(parts.tolist(), [1] * 9, kind) == pytest.approx(weigh((x @ x.T).tolist(), [1] * 9, kind), abs=1e-10)


@pytest.mark.parametrize("kind", VECTOR)
def test_copies_count_once(kind: str) -> None:
    x, _ = swarm(2, 9, 1000, 0, "none")
    x[:4] = x[0] + 6 * np.ones(1000) / math.sqrt(1000)  # four exact copies, far off
    _, w = pool(x, kind)
    assert sum(w[:4]) <= 1 / 6 + 1e-9
    assert w[0] == pytest.approx(w[3])


def test_those_who_did_nothing_or_say_nothing() -> None:
    x, _ = swarm(2, 5, 100, 0, "none")
    x[1] = 0
    gram = (x @ x.T).tolist()
    w = weigh(gram, [2, 3, 0, 2, 2], "huber")
    assert w[1] == w[2] == 0 and sum(w) == pytest.approx(1)
    assert outliers(gram, [2, 3, 0, 2, 2], w) == (1,), "no microbatches is no fault, an update of zeros is"
    zeros = [[0.0] * 3 for _ in range(3)]
    assert weigh(zeros, [1, 2, 1], "welsch") == (0.25, 0.5, 0.25)
    assert outliers(zeros, [1, 2, 1], (0.25, 0.5, 0.25)) == ()
    assert weigh([[4.0, 0.0], [0.0, 0.0]], [1, 0], "welsch") == (1.0, 0.0)
    same = [[1.0] * 3 for _ in range(3)]
    assert weigh(same, [1, 1, 1], "welsch") == pytest.approx((1 / 3,) * 3)


def test_means_of_sums() -> None:
    sums = np.random.default_rng(0).standard_normal((3, 10))
    upper = np.triu(sums @ sums.T).tolist()
    mean = sums / np.array([[2], [4], [1]])
    assert np.asarray(means(upper, [2, 4, 1])) == pytest.approx(mean @ mean.T)


@given(st.floats(-750, 0))
def test_exp_is_exp(x: float) -> None:
    assert _exp(x) == pytest.approx(math.exp(x), rel=2e-15, abs=1e-300)


@given(st.integers(0, 2**32), st.sampled_from(VECTOR), st.integers(2, 16))
def test_weights_are_weights_whatever_comes(seed: int, kind: str, n: int) -> None:
    rng = random.Random(seed)
    x = np.array([[rng.choice([0.0, 1.0, rng.gauss(0, 1), 1e30, 1e-30]) for _ in range(4)] for _ in range(n)])
    counts = [rng.choice([0, 1, 1, 7]) for _ in range(n)]
    w = weigh((x @ x.T).tolist(), counts, kind)
    assert all(v >= 0 for v in w) and sum(w) == pytest.approx(1)
    outliers((x @ x.T).tolist(), counts, w)


@pytest.mark.parametrize(("kind", "factor"), [("coordinate-huber", 2.2), ("coordinate-welsch", 1.6)])
def test_coordinate_wise_is_bounded_too(kind: str, factor: float) -> None:
    x, truth = swarm(4, 20, 3000, 4, "flip")
    y, shares = coordinates(x, [1] * 20, kind)
    best = float(np.linalg.norm(x[4:].mean(axis=0) - truth))
    assert np.linalg.norm(y - truth) <= factor * best
    assert np.linalg.norm(x.mean(axis=0) - truth) >= 1.0
    assert shares.sum() == pytest.approx(3000)
    assert shares[:4].max() < shares[4:].min()


@pytest.mark.parametrize("kind", COORDINATE)
def test_coordinates_on_which_most_agree_keep_their_value(kind: str) -> None:
    x = np.array([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [9.0, 5.0], [-70.0, 0.0]])
    y, _ = coordinates(x, [1, 1, 1, 1, 1], kind)
    assert y.tolist() == [1.0, 0.0]
    y, shares = coordinates(x, [0] * 5, kind)
    assert y.tolist() == [0.0, 0.0] and shares.tolist() == [0.0] * 5


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({}, None),
        ({(0, 0): -1.0}, "no numbers"),
        ({(1, 2): math.nan}, "no numbers"),
        ({(1, 1): math.inf}, "no numbers"),
        ({(1, 1): 1e200, (2, 2): 1e200}, "no numbers"),
        ({(0, 2): 1e9}, "no vectors have"),
        ({(1, 1): 1e9}, "another norm"),
    ],
)
def test_inner_products_that_cannot_be(change: dict[tuple[int, int], float], complaint: str | None) -> None:
    x = np.random.default_rng(3).standard_normal((3, 8))
    products = (x @ x.T).tolist()
    for (i, j), value in change.items():
        products[i][j] = value
    wrong = check_gram(products, 1, float(x[1] @ x[1]))
    assert wrong is None if complaint is None else (wrong is not None and complaint in wrong)
