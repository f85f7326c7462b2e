"""The plan of a pull: which chunk is asked of which donor, and what follows from what came.

Sans-IO: time is an argument, bytes never pass through here, only the hash of what arrived.  One plan serves states and reduced
vectors, as both are chunks under a root.

What goes wrong, and what is done:

* *One donor is slow* and holds the last chunk.  Requests follow completions, so shares follow rates; a donor is not given a chunk that
  the others would all have done before it; and when nothing is left to ask, idle donors are asked for what another has under way,
  if they will be done sooner.  At most two copies of a chunk are under way, so what is wasted is bounded by the requests outstanding.
* *A donor dies* or is silent: what it had under way is asked elsewhere.  Verified chunks stay verified.
* *A donor lies*: one chunk that does not hash to what the root says is proof, for the transport is authenticated.  It is named and not
  asked again.
* *A donor has not got it* (JOIN-10): it is never asked for that chunk again, and it is named as having claimed what it lacks.
* *A donor is busy*: it is asked again after a pause that doubles.
* *Memory*: what is under way together is at most `most_outstanding` chunks, whatever the number of donors.

States of a donor; GONE, LIAR are final here (a new pull begins anew):

    ACTIVE --lost, silent too often--> GONE       ACTIVE --wrong bytes--> LIAR
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from plnode.collective.statecut import HASH_BYTES, chunk_count, chunk_length, root_of
from wire.identity import PeerId

OUTSTANDING = 4  # requests a donor: with 1 MiB chunks 160 Mbit/s at 200 ms
LOOKAHEAD_S = 2.0  # a donor's requests are at most about this long together; a slow one has one
PAUSE_FIRST_S, PAUSE_MOST_S = 0.5, 8.0  # after "busy", and after a silence
# Without a byte of a chunk.  The wire notices a death within 10 s, so this is for donors that live and do not serve; one whose training
# leaves it little may have a long queue, so the second time it gets twice as long.
SILENCE_S, SILENCES = 60.0, 4
SMOOTHING = 0.3  # of the newest time a chunk took
RATE_WINDOW_S = 10.0
UNKNOWN_S = 1.0  # after this a chunk of a donor that has not shown its rate is asked elsewhere, too


class Standing(Enum):
    ACTIVE = auto()
    GONE = auto()
    LIAR = auto()


class Verdict(Enum):
    GOOD = auto()  # write it
    DUPLICATE = auto()  # another copy came first
    LIE = auto()  # drop it


class Failure(Enum):
    BUSY = auto()
    MISSING = auto()  # the donor says that it has not got this chunk
    SILENT = auto()
    LOST = auto()  # the connection is gone, or the donor refuses altogether


@dataclass(frozen=True, slots=True)
class Request:
    """Ask `donor` for chunk `index`; fail it as SILENT after `deadline_s` without a byte."""

    donor: PeerId
    index: int
    deadline_s: float = SILENCE_S


@dataclass(frozen=True, slots=True)
class DonorView:
    donor: PeerId
    standing: Standing
    verified_bytes: int
    rate: float  # bytes/s, 0 until its first chunk
    outstanding: int


@dataclass(frozen=True, slots=True)
class Progress:
    """For people.  `rate` in bytes/s over the last seconds; `eta_s` None while unknown; `bottleneck`: the slowest of several."""

    verified_bytes: int
    total_bytes: int
    rate: float
    eta_s: float | None
    bottleneck: PeerId | None
    donors: tuple[DonorView, ...]


@dataclass(slots=True, eq=False)
class _Donor:
    id: PeerId
    standing: Standing = Standing.ACTIVE
    under_way: dict[int, float] = field(default_factory=dict)  # index -> when asked, in this order
    lacks: set[int] = field(default_factory=set)
    last: float = 0.0  # when a chunk of it came last
    service_s: float | None = None  # between two chunks of it while it is busy
    verified_bytes: int = 0
    pause_until: float = 0.0
    pauses: int = 0
    silences: int = 0

    def window(self, most: int) -> int:
        if self.service_s is None:
            return min(2, most)
        return max(1, min(most, int(LOOKAHEAD_S / max(self.service_s, 1e-9))))

    def rest_s(self, index: int, now: float) -> float:
        """How long until a chunk under way is here: by its place in the queue, or as long again as it is late."""
        since = max(self.last, next(iter(self.under_way.values())))
        if self.service_s is None:
            return now - self.under_way[index] if now - self.under_way[index] > UNKNOWN_S else 0.0
        place = list(self.under_way).index(index) + 1
        expected = since + place * self.service_s
        return expected - now if expected > now else now - since


class Plan:
    """See the module.  All donors are believed to hold everything until they say otherwise."""

    def __init__(
        self,
        hashes: bytes,
        size_bytes: int,
        chunk_bytes: int,
        donors: Iterable[PeerId],
        *,
        have: Iterable[int] = (),
        outstanding: int = OUTSTANDING,
        most_outstanding: int = 64,
    ) -> None:
        """`hashes`: 32 bytes a chunk, already checked against the root.  `have`: chunks verified before."""
        count = chunk_count(size_bytes, chunk_bytes)
        if len(hashes) != count * HASH_BYTES:
            raise ValueError(f"{len(hashes)} bytes of hashes for {count} chunks")
        self.size_bytes, self.chunk_bytes, self.count = size_bytes, chunk_bytes, count
        self.duplicate_bytes = 0
        self._hashes = hashes
        self._outstanding, self._most = outstanding, most_outstanding
        self._missing = set(range(count)) - set(have)
        self._fresh = deque(sorted(self._missing))  # missing and not under way
        self._asked: dict[int, list[_Donor]] = {}  # under way
        self._cancels: list[Request] = []
        self._arrivals: deque[tuple[float, int]] = deque()
        self.verified_bytes = sum(self.length(i) for i in range(count) if i not in self._missing)
        self._donors = {donor: _Donor(donor) for donor in donors}

    # -- what there is

    def length(self, index: int) -> int:
        return chunk_length(index, self.size_bytes, self.chunk_bytes)

    @property
    def done(self) -> bool:
        return not self._missing

    @property
    def under_way(self) -> int:
        return sum(len(d.under_way) for d in self._donors.values())

    def named(self, standing: Standing) -> tuple[PeerId, ...]:
        return tuple(d.id for d in self._donors.values() if d.standing is standing)

    @property
    def lacking(self) -> tuple[PeerId, ...]:
        """Donors that claimed a root and had not got all of it."""
        return tuple(d.id for d in self._donors.values() if d.lacks)

    @property
    def hopeless(self) -> bool:
        """A chunk is missing that no donor can still give."""
        active = [d for d in self._donors.values() if d.standing is Standing.ACTIVE]
        if not active:
            return bool(self._missing)
        return bool(set.intersection(*(d.lacks for d in active)) & self._missing)

    # -- what to do

    def next(self, now: float) -> Request | None:
        """The next request to make, None if there is none now; ask again after each event and every quarter of a second."""
        if self.under_way >= self._most or not self._missing:
            return None
        able = [
            d for d in self._donors.values()
            if d.standing is Standing.ACTIVE and d.pause_until <= now and len(d.under_way) < d.window(self._outstanding)
        ]  # fmt: skip
        # The emptiest first, the fastest of these: all are at work before one has its second request.
        able.sort(key=lambda d: (len(d.under_way), d.service_s or 0.0))
        for donor in able:
            index = self._pick(donor, now)
            if index is not None:
                donor.under_way[index] = now
                self._asked.setdefault(index, []).append(donor)
                return Request(donor.id, index, SILENCE_S * 2**donor.silences)
        return None

    def take_cancels(self) -> list[Request]:
        """Requests whose answer is no longer wanted; each is reported once and needs no `failed`."""
        found, self._cancels = self._cancels, []
        return found

    # -- what happened

    def received(self, donor: PeerId, index: int, digest: bytes, now: float) -> Verdict:
        """A whole chunk came, with this SHA-256.  A wrong length is a wrong hash: pass b""."""
        one = self._donors[donor]
        asked = one.under_way.pop(index, None)
        if index in self._asked:
            self._forget(one, index)
        if digest != self._hashes[index * HASH_BYTES : (index + 1) * HASH_BYTES]:
            self._end(one, Standing.LIAR)
            self._give_back(index)
            return Verdict.LIE
        if asked is not None:
            took = now - max(asked, one.last)
            one.service_s = took if one.service_s is None else one.service_s + SMOOTHING * (took - one.service_s)
        one.last, one.pauses, one.silences = now, 0, 0
        if index not in self._missing:
            self.duplicate_bytes += self.length(index)
            return Verdict.DUPLICATE
        self._missing.discard(index)
        for other in self._asked.pop(index, []):
            del other.under_way[index]
            self._cancels.append(Request(other.id, index))
        if asked is None:  # it was cancelled, and asked again: the late answer serves as well
            self._fresh = deque(i for i in self._fresh if i != index)
        one.verified_bytes += self.length(index)
        self.verified_bytes += self.length(index)
        self._arrivals.append((now, self.length(index)))
        return Verdict.GOOD

    def failed(self, donor: PeerId, index: int, why: Failure, now: float) -> None:
        """A request came to nothing."""
        one = self._donors[donor]
        if one.under_way.pop(index, None) is not None:
            self._forget(one, index)
            self._give_back(index)
        match why:
            case Failure.MISSING:
                one.lacks.add(index)
            case Failure.LOST:
                self._end(one, Standing.GONE)
            case Failure.SILENT if one.silences + 1 >= SILENCES:
                self._end(one, Standing.GONE)
            case Failure.BUSY | Failure.SILENT:
                one.silences += why is Failure.SILENT
                one.pause_until = now + min(PAUSE_MOST_S, PAUSE_FIRST_S * 2**one.pauses)
                one.pauses = min(one.pauses + 1, 8)

    def progress(self, now: float) -> Progress:
        while self._arrivals and self._arrivals[0][0] < now - RATE_WINDOW_S:
            self._arrivals.popleft()
        since = now - self._arrivals[0][0] if self._arrivals else 0.0
        rate = sum(size for _, size in self._arrivals) / max(since, 1.0) if self._arrivals else 0.0
        views = tuple(
            DonorView(d.id, d.standing, d.verified_bytes, self.chunk_bytes / d.service_s if d.service_s else 0.0, len(d.under_way))
            for d in self._donors.values()
        )
        rated = [view for view in views if view.standing is Standing.ACTIVE and view.rate]
        left = self.size_bytes - self.verified_bytes
        return Progress(
            self.verified_bytes, self.size_bytes, rate, left / rate if rate else (0.0 if self.done else None),
            min(rated, key=lambda view: view.rate).donor if len(rated) > 1 else None, views,
        )  # fmt: skip

    # -- choices

    def _pick(self, donor: _Donor, now: float) -> int | None:
        if self._fresh:
            if self._would_delay(donor, now):
                return None
            for _ in range(len(self._fresh)):
                index = self._fresh.popleft()
                if index not in donor.lacks:
                    return index
                self._fresh.append(index)
            # Everything that nobody was asked for is what this one lacks: it may still help with the rest.
        if donor.under_way:
            return None
        late = [
            (other.rest_s(index, now), index)
            for index, by in self._asked.items()
            if len(by) == 1 and (other := by[0]) is not donor and index not in donor.lacks
        ]
        rest_s, index = max(late, default=(0.0, -1))
        return index if rest_s > (donor.service_s or 0.0) and rest_s > 0.0 else None

    def _would_delay(self, donor: _Donor, now: float) -> bool:
        """Whether the others would be done with everything before this donor is with one more chunk."""
        if donor.service_s is None:
            return False
        speed, queued, soonest = 0.0, len(self._fresh), float("inf")
        for other in self._donors.values():
            able = other.standing is Standing.ACTIVE and other.service_s and not other.lacks and other.pause_until <= now
            if other is not donor and able and other.service_s:
                speed += 1.0 / other.service_s
                queued += len(other.under_way)
                soonest = min(soonest, (len(other.under_way) + 1) * other.service_s)
        # Not before the soonest could do one: chunks cannot be split, and somebody must take the last one.
        return speed > 0.0 and (len(donor.under_way) + 1) * donor.service_s > max(soonest, queued / speed)

    # -- books

    def _forget(self, donor: _Donor, index: int) -> None:
        by = self._asked[index]
        if donor in by:
            by.remove(donor)
        if not by:
            del self._asked[index]

    def _give_back(self, index: int) -> None:
        if index in self._missing and index not in self._asked and index not in self._fresh:
            self._fresh.appendleft(index)

    def _end(self, donor: _Donor, standing: Standing) -> None:
        if donor.standing is not Standing.ACTIVE:
            return
        donor.standing = standing
        for index in list(donor.under_way):
            del donor.under_way[index]
            self._forget(donor, index)
            self._give_back(index)
            self._cancels.append(Request(donor.id, index))


def checked_hashes(table: bytes, root: bytes, size_bytes: int, chunk_bytes: int) -> bool:
    """Whether a table of hashes is the one that `root` was made of."""
    return len(table) == HASH_BYTES * chunk_count(size_bytes, chunk_bytes) and root_of(table) == root
