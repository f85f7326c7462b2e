"""Who reduces which part of a vector: the layout of a butterfly all-reduce, pure arithmetic.

Rank r owns one contiguous share, sums everybody's contribution to it in rank order (so that the result does not depend on
arrival order, and all members end with the same bits) and sends the sum back.  Shares travel in pieces of at most 1 MiB: small
enough to overlap sending, summing and returning, large enough that a piece's two control messages are noise beside it.

A share is as large as its owner's weight says: an owner sends its share back to everybody, so a member with a slow line upwards
gets a small one, and a member that nobody can dial (weight 0) reduces nothing and only takes part.  All members must cut alike
to the last element, so the weights come agreed from the caller, and the cut is made in whole numbers: a weight counts as so many
parts in 2**20 of the largest one (finer is below the precision of any measured rate; a smaller one reduces nothing).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

PIECE_BYTES = 1 << 20
_PARTS = 1 << 20


@dataclass(frozen=True, slots=True, order=True)
class Piece:
    """Elements [start, end) of the flat vector, reduced by rank `owner`; `number` is unique in the round."""

    number: int
    owner: int
    start: int
    end: int


def pieces(elements: int, weights: Sequence[float], itemsize: int) -> tuple[Piece, ...]:
    """Cut a vector of `elements` into shares in proportion to the ranks' `weights`, and those into pieces of at most PIECE_BYTES.

    A share is within one element of its exact size.  ValueError: no rank, a weight that is negative or not finite, or all zero.
    """
    if not weights or elements < 0 or not all(math.isfinite(w) and w >= 0 for w in weights) or not any(weights):
        raise ValueError(f"cannot share {elements} elements among ranks of weights {list(weights)}: one must be above 0, none below")
    largest = max(weights)
    parts = [round(w / largest * _PARTS) for w in weights]
    most = PIECE_BYTES // itemsize
    found: list[Piece] = []
    start = before = 0
    for owner, part in enumerate(parts):
        before += part
        end = elements * before // sum(parts)
        while start < end:
            stop = min(start + most, end)
            found.append(Piece(len(found), owner, start, stop))
            start = stop
    return tuple(found)
