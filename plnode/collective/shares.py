"""Who reduces which part of a vector: the layout of a butterfly all-reduce, pure arithmetic.

Rank r owns one contiguous share, sums everybody's contribution to it in rank order (so that the result does not depend on
arrival order, and all members end with the same bits) and sends the sum back.  Shares travel in pieces of at most 1 MiB: small
enough to overlap sending, summing and returning, large enough that a piece's two control messages are noise beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, order=True)
class Piece:
    """Elements [start, end) of the flat vector, reduced by rank `owner`; `number` is unique in the round."""

    number: int
    owner: int
    start: int
    end: int


def pieces(elements: int, ranks: int, itemsize: int) -> tuple[Piece, ...]:
    """Cut a vector of `elements` into equal shares (the first ones one element longer) and those into pieces."""
    if ranks < 1 or elements < 0:
        raise ValueError(f"cannot share {elements} elements among {ranks} ranks")
    most = PIECE_BYTES // itemsize
    found: list[Piece] = []
    start = 0
    for owner in range(ranks):
        end = start + elements // ranks + (1 if owner < elements % ranks else 0)
        while start < end:
            stop = min(start + most, end)
            found.append(Piece(len(found), owner, start, stop))
            start = stop
    return tuple(found)
