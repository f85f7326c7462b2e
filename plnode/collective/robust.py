"""Robust pooling: what replaces the mean of the members' updates when some of them may lie.

`y = argmin_u sum_i phi(sqrt(c_i) ||u - x_i||; alpha)`, where x_i is member i's mean gradient over its c_i microbatches.  The noise of
such a mean falls with sqrt(c_i), so distances are measured in units of one microbatch's noise, and a member without fault weighs
as much as it did work: with nobody at fault the result is close to the plain mean over all microbatches.

**Vector-wise** (`huber`, `welsch`, ...; Gould et al., "Exploiting Problem Structure in Deep Declarative Networks"): y lies in the span
of the x_i, so only their inner products matter.  They add up over shares of the vector: each owner computes the Gram matrix of its
share, all members add those and find the same weights.  *The same* is meant to the bit, or two owners could keep different
members where the objective has two minima: `weigh` uses only +, -, *, / and sqrt on Python floats, which IEEE 754 defines exactly on
every machine, and an exp of its own.  Groups have at most some tens of members, so that this costs milliseconds.
**Coordinate-wise** (`coordinate-*`): the same in one dimension for each element, by its owner alone, around the median.

Scale, vector-wise: r = the smallest over i of the median distance to the others (the lower median: with a majority honest it is
bounded by honest pairs), alpha = 0.25 r, 0.5 r, 1.0 r, 1.5 r (robust-pooling).  Coordinate-wise: 1.4826 times the median absolute
deviation, and the constants of 95 % efficiency for normal noise (Holland and Welsch 1977).

What no rule on distances sees: a small drift that many members agree on.  An owner is also believed about the inner products of its
share, within what `check_gram` can see; whoever reduces a share may falsify that share anyway, which is for audits to find.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wire.identity import PeerId
from wire.tensor import Array

VECTOR = ("pseudo-huber", "huber", "welsch", "truncated")
COORDINATE = ("coordinate-huber", "coordinate-welsch")
POOLINGS = ("mean", *VECTOR, *COORDINATE)
"""Values of the manifest's `collective.pooling`."""

_SCALE = {"pseudo-huber": 0.25, "huber": 0.5, "welsch": 1.0, "truncated": 1.5}
_TUNING = {"coordinate-huber": 1.345, "coordinate-welsch": 2.985}
_REDESCENDING = ("welsch", "truncated")
# Closer than this part of r to each other are copies of one update, which count once: colluders would win by number otherwise.
_COPY = 1e-3
# 8 to 40 iterations reach 1e-13 on data without structure; two clusters at equal distance converge slowly and do not matter.
_ITERATIONS_MAX = 200
_TOLERANCE = 1e-13
# Of one coordinate's value little is left to gain after these, and its owner alone computes it.
_COORDINATE_ITERATIONS = 8
# Outliers: less than a tenth of the weight of its work (robust-pooling), a norm three times off (honest ones of a large vector lie
# within percents), a direction clearly against the others' (random ones in 10,000 dimensions have a cosine of 0.01).
_LITTLE, _NORM, _AGAINST = 0.1, 3.0, -0.2
_SLACK = 1e-6  # of sums of products in another order, in float64
SQUARE_MAX = 1e150
"""Of an inner product: products of two of them still are numbers.  fp32 vectors of 1e60 elements reach it."""

Gram = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class Pooled:
    """What a round did: the share of each member in the result (rank order, sums to 1), and whose update does not fit the others'."""

    weights: tuple[float, ...]
    outliers: tuple[PeerId, ...]


def means(products: Gram, counts: Sequence[int]) -> list[list[float]]:
    """Inner products of the means, from those of sums over `counts` microbatches; zero for whoever did none."""
    n = range(len(counts))
    return [[products[min(i, j)][max(i, j)] / (counts[i] * counts[j]) if counts[i] and counts[j] else 0.0 for j in n] for i in n]


def by_work(counts: Sequence[int]) -> tuple[float, ...]:
    """The weights of the plain mean over microbatches."""
    total = sum(counts)
    return tuple(c / total if total else 1 / len(counts) for c in counts)


def weigh(gram: Gram, counts: Sequence[int], kind: str) -> tuple[float, ...]:
    """Weights (sum 1) of the members' means `gram` is of, by a kind of VECTOR.  The same bits on every machine."""
    voters = [i for i, c in enumerate(counts) if c > 0 and gram[i][i] > 0]
    if len(voters) < 2:
        return tuple(1.0 if i in voters else 0.0 for i in range(len(counts))) if voters else by_work(counts)
    g = [[gram[i][j] for j in voters] for i in voters]
    found = _Search(g, [counts[i] for i in voters], kind).best()
    weights = [0.0] * len(counts)
    for i, w in zip(voters, found, strict=True):
        weights[i] = w
    return tuple(weights)


class _Search:
    """Iteratively reweighted means in the n-space of the voters."""

    def __init__(self, g: list[list[float]], counts: list[int], kind: str) -> None:
        self.g, self.counts, self.kind = g, counts, kind
        self.n = range(len(g))
        distance = [
            [math.sqrt(max(0.0, g[i][i] + g[j][j] - 2.0 * g[i][j]) / (1.0 / counts[i] + 1.0 / counts[j])) for j in self.n] for i in self.n
        ]
        typical = [_low_median([distance[i][j] for j in self.n if j != i]) for i in self.n]
        self.r = min(typical)
        self.medoid = typical.index(self.r)
        # A majority of exact copies has no scale; the copies are the result.
        self.same = [distance[self.medoid][j] <= 0.0 for j in self.n]
        self.alpha = _SCALE[kind] * self.r
        first = [next(i for i in self.n if i == j or distance[i][j] < _COPY * self.r) for j in self.n]
        self.votes = [1.0 / first.count(first[j]) for j in self.n]

    def best(self) -> list[float]:
        prior = [v * c for v, c in zip(self.votes, self.counts, strict=True)]
        if self.r <= 0.0:
            return _normal([p if same else 0.0 for p, same in zip(prior, self.same, strict=True)])
        starts = [_normal(prior)]
        if self.kind in _REDESCENDING:
            starts.append([1.0 if i == self.medoid else 0.0 for i in self.n])
        ends = [self._descend(w, prior) for w in starts]
        return min(ends, key=self._objective)

    def _descend(self, w: list[float], prior: list[float]) -> list[float]:
        for _ in range(_ITERATIONS_MAX):
            raw = [p * _k1(self.kind, z, self.alpha) for p, z in zip(prior, self._distances(w), strict=True)]
            if sum(raw) <= 0.0:
                return [1.0 if i == self.medoid else 0.0 for i in self.n]
            new = _normal(raw)
            moved = max(abs(a - b) for a, b in zip(new, w, strict=True))
            w = new
            if moved < _TOLERANCE:
                break
        return w

    def _distances(self, w: list[float]) -> list[float]:
        """sqrt(c_i) ||y - x_i|| of y = sum w_i x_i."""
        gw = [_dot(row, w) for row in self.g]
        square = _dot(w, gw)
        return [math.sqrt(max(0.0, self.g[i][i] - 2.0 * gw[i] + square) * self.counts[i]) for i in self.n]

    def _objective(self, w: list[float]) -> float:
        return _dot(self.votes, [_phi(self.kind, z, self.alpha) for z in self._distances(w)])


def _k1(kind: str, z: float, a: float) -> float:
    """phi'(z) / z, up to a factor."""
    if kind == "pseudo-huber":
        return 1.0 / math.sqrt(1.0 + (z / a) * (z / a))
    if kind == "huber":
        return 1.0 if z <= a else a / z
    if kind == "welsch":
        return _exp(-0.5 * (z / a) * (z / a))
    return 1.0 if z <= a else 0.0


def _phi(kind: str, z: float, a: float) -> float:
    t = (z / a) * (z / a)
    if kind == "pseudo-huber":
        return math.sqrt(1.0 + t) - 1.0
    if kind == "huber":
        return 0.5 * t if z <= a else z / a - 0.5
    if kind == "welsch":
        return 1.0 - _exp(-0.5 * t)
    return 0.5 * min(t, 1.0)


_LN2_HIGH, _LN2_LOW = 0.6931471803691238, 1.9082149292705877e-10  # their sum is ln 2, the first has 33 bits (fdlibm)


def _exp(x: float) -> float:
    """exp of x <= 0 to 1e-15, the same bits on every machine: libraries differ in the last one."""
    if x < -700.0:
        return 0.0
    k = round(x / (_LN2_HIGH + _LN2_LOW))
    r = (x - k * _LN2_HIGH) - k * _LN2_LOW
    total = 1.0
    for i in range(17, 0, -1):  # |r| < 0.35: 0.35**18 / 18! < 1e-23
        total = 1.0 + r / i * total
    return math.ldexp(total, k)


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    total = 0.0
    for x, y in zip(a, b, strict=True):  # not sum(): its rounding is another one from Python 3.12 on
        total += x * y
    return total


def _normal(raw: list[float]) -> list[float]:
    total = _dot(raw, [1.0] * len(raw))
    return [x / total for x in raw]


def _low_median(values: list[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]


def outliers(gram: Gram, counts: Sequence[int], weights: Sequence[float]) -> tuple[int, ...]:
    """Ranks whose mean has little weight for its work, a norm or a direction unlike the others', or is nothing at all."""
    working = [i for i, c in enumerate(counts) if c > 0]
    voters = [i for i in working if gram[i][i] > 0]
    fair = by_work(counts)
    found = {i for i in working if i not in voters and len(voters) * 2 > len(working)}
    found |= {i for i in voters if weights[i] < _LITTLE * fair[i]}
    if len(voters) > 2:
        # Signal alone: norms are equal.  Noise alone: they fall with sqrt(count).  Only who is off under both readings is named.
        norms = [{i: math.sqrt(gram[i][i] * scale(counts[i])) for i in voters} for scale in (lambda c: 1, lambda c: c)]
        middles = [_low_median(list(by_rank.values())) for by_rank in norms]
        pairs = list(zip(norms, middles, strict=True))
        found |= {i for i in voters if all(n[i] > _NORM * m for n, m in pairs) or all(n[i] * _NORM < m for n, m in pairs)}
        found |= {i for i in voters if _cosine(gram, weights, i) < _AGAINST}
    return tuple(sorted(found))


def _cosine(gram: Gram, weights: Sequence[float], i: int) -> float:
    """Between member i's mean and the pooled means of all others."""
    w = [0.0 if j == i else x for j, x in enumerate(weights)]
    square = _dot(w, [_dot(row, w) for row in gram]) * gram[i][i]
    return _dot(gram[i], w) / math.sqrt(square) if square > 0 else 0.0


def coordinates(x_NM: Array, counts: Sequence[int], kind: str) -> tuple[Array, Array]:
    """Pool each column of the members' means (float64) by a kind of COORDINATE: (y_M, the sum over columns of each member's weight)."""
    c_N1 = np.asarray(counts, np.float64)[:, None]
    here = c_N1[:, 0] > 0
    x, c = x_NM[here], c_N1[here]
    shares = np.zeros(len(counts))
    if not len(x):
        return np.zeros(x_NM.shape[1]), shares
    y = middle = np.median(x, axis=0)
    alpha = _TUNING[kind] * 1.4826 * np.median(np.sqrt(c) * np.abs(x - middle), axis=0)
    exact = alpha <= 0  # more than half of them agree: on the median
    safe = np.where(exact, 1.0, alpha)
    w = c * np.ones_like(x)
    for _ in range(_COORDINATE_ITERATIONS):
        z = np.sqrt(c) * np.abs(x - y) / safe
        w = c * (1.0 / np.maximum(z, 1.0) if kind == "coordinate-huber" else np.exp(-0.5 * np.minimum(z, 1e3) ** 2))
        w = np.where(exact, c * (x == middle) + np.finfo(float).tiny, w)
        w = w / w.sum(axis=0)
        y = (w * x).sum(axis=0)
    y = np.where(exact, middle, y)
    shares[here] = w.sum(axis=1)
    return y, shares


def check_gram(products: Gram, own: int, own_square: float) -> str | None:
    """What cannot be right in an owner's inner products of its share (upper triangle), seen by rank `own` with that norm there."""
    n = range(len(products))
    if not all(abs(products[i][j]) <= SQUARE_MAX for i in n for j in n if j >= i) or any(products[i][i] < 0 for i in n):
        return "inner products that are no numbers"
    if any(products[i][j] * products[i][j] > products[i][i] * products[j][j] * (1 + _SLACK) + 1e-300 for i in n for j in n if j > i):
        return "inner products that no vectors have"
    if abs(products[own][own] - own_square) > _SLACK * own_square:
        return "another norm of our contribution than it has"
    return None
