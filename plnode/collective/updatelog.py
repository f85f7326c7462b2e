"""Reduced gradient vectors that a donor keeps for those who follow it from a cut.

Theory.  While a joiner fetches the state of step t, training goes on to t+n.  All replicas add the same reduced vector, so n vectors
are all that separates the cut from now.  They are kept from the moment that somebody asks for a cut, and only as far back as the last
of those who follow needs them.

A follower that is too slow would make the donor keep ever more: over the budget the one *furthest behind* is given up and told so when
it asks next; it takes a fresh cut (MEM-4).  One that has not been heard of for `life_s` is forgotten.  With nobody following nothing is
kept, and a vector costs nothing.

Sans-IO; time is an argument, in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from plnode.collective.statecut import Chunked, chunk_size
from wire.identity import PeerId


@dataclass(slots=True)
class _Follower:
    next: int
    heard: float


class UpdateLog:
    """Vectors by step; the vector of step t leads from t applied steps to t + 1."""

    def __init__(self, budget_bytes: int, *, life_s: float, chunk_bytes: int | None = None) -> None:
        self._budget, self._life_s, self._chunk = budget_bytes, life_s, chunk_bytes
        self._followers: dict[PeerId, _Follower] = {}
        self._given_up: set[PeerId] = set()
        self._vectors: dict[int, Chunked] = {}  # ascending, without a gap
        self.held_bytes = 0

    @property
    def followers(self) -> tuple[PeerId, ...]:
        return tuple(self._followers)

    @property
    def wanted(self) -> bool:
        return bool(self._followers)

    def begin(self, who: PeerId, step: int, now: float) -> None:
        """`who` takes a cut at `step` and will need the vectors from there on."""
        self._given_up.discard(who)
        self._followers[who] = _Follower(step, now)
        self._trim()

    def follow(self, who: PeerId, step: int, now: float) -> bool:
        """`who` asks for vectors from `step` on; False if it was given up, which is said once.  A new one is taken in."""
        if who in self._given_up:
            self._given_up.discard(who)
            return False
        self._followers[who] = _Follower(step, now)
        self._trim()
        return True

    def heard(self, who: PeerId, now: float) -> None:
        """A sign of life, for example a request for a chunk of the cut."""
        if who in self._followers:
            self._followers[who].heard = now

    def forget(self, who: PeerId) -> None:
        self._followers.pop(who, None)
        self._given_up.discard(who)
        self._trim()

    def clear(self) -> None:
        """Another stage or state: nobody can follow any more."""
        self._given_up.update(self._followers)
        self._followers.clear()
        self._trim()

    def expire(self, now: float) -> None:
        for who in [w for w, f in self._followers.items() if f.heard + self._life_s < now]:
            del self._followers[who]
        self._trim()

    def add(self, step: int, vector: memoryview, now: float) -> bool:
        """The reduced vector of `step`, copied if somebody needs it; whether it was.  Steps come in order."""
        self.expire(now)
        while self._followers and self.held_bytes + vector.nbytes > self._budget:
            self._give_up_one()
        if not any(f.next <= step for f in self._followers.values()):
            return False
        if self._vectors and step != next(reversed(self._vectors)) + 1:
            self._vectors.clear()  # a gap: what was before leads nowhere
            self.held_bytes = 0
        self._vectors[step] = Chunked([memoryview(bytes(vector))], self._chunk or chunk_size(vector.nbytes))
        self.held_bytes += vector.nbytes
        return True

    def since(self, step: int) -> list[tuple[int, Chunked]]:
        """Vectors of `step` and later, in order; empty if that of `step` is not here."""
        return [(s, v) for s, v in self._vectors.items() if s >= step] if step in self._vectors else []

    def covers(self, step: int, open_step: int) -> bool:
        """Whether somebody with the state of `step` can get to `open_step` from here."""
        return step == open_step or (step in self._vectors and open_step - 1 in self._vectors)

    def find(self, root: bytes) -> Chunked | None:
        return next((v for v in self._vectors.values() if v.root == root), None)

    def _give_up_one(self) -> None:
        last = min(self._followers, key=lambda who: (self._followers[who].next, who))
        del self._followers[last]
        self._given_up.add(last)
        self._trim()

    def _trim(self) -> None:
        least = min((f.next for f in self._followers.values()), default=None)
        for step in [s for s in self._vectors if least is None or s < least]:
            self.held_bytes -= self._vectors.pop(step).size_bytes
