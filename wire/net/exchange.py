"""Peer exchange, `px/1`: how everybody comes to know everybody from one introduction.

`Want(run, n)` is answered with at most 24 peer records, each signed by the peer it is about and handed on byte for byte.  A
record that does not verify is counted and dropped, one by one, and the others are taken: the sender may have been deceived in
turn.

Rhythm: at 1, 2, 4 and 8 s after the start and then every 60 s +- 20 %, to a random peer; and once to every peer that we have just
met, because nodes that start in the same tick know nobody yet when they first ask (FIND-1).  A node that was alone and meets
somebody begins anew with the 1, 2, 4 and 8 s: the others come in the same minute, when a seed is back (FIND-3).  A peer that could
not be reached by what is known of it (it had no place at a relay yet when we heard of it) is worth a question before the minute is
over, but not within `exchange_again_s` of the one before.  Answering is
limited to one in 5 s with burst 5 a peer, which that rhythm can never exceed: the limit is derived from it, so that a
well-behaved peer is never told RATE_LIMITED (WIRE-11).

A run of zeros means any: a seed for all runs asks and answers so.  Guests may use `px/1`; that is how a newcomer begins.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence

import trio

from wire.envelope import BadEnvelope, OpenedRecord, VerifiedCache, open_peer_record
from wire.errors import Code, WireError, error_for
from wire.identity import PeerId
from wire.limits import Limits
from wire.messages import Records, Want
from wire.net.book import PeerBook
from wire.net.peer import Peer
from wire.net.services import EXCHANGE
from wire.rates import Bucket
from wire.statements import NO_RUN

PROTOCOL = EXCHANGE
# The answer is made from memory; a peer that needs longer than this is not worth waiting for.
DEADLINE_S = 5.0
# +- 20 %, so that a swarm that started in one tick does not ask in one tick for ever.
JITTER = 0.2


class PeerExchange:
    """Asks and answers.  `peers` gives the connected peers, `learned` hears of each newer record.

    `own_seen` hears the number of each record of our own that somebody hands us.
    """

    def __init__(
        self,
        book: PeerBook,
        run: bytes | None,
        limits: Limits,
        *,
        peers: Callable[[], Sequence[Peer]],
        learned: Callable[[OpenedRecord], None],
        own_record: Callable[[], bytes],
        own: PeerId,
        own_seen: Callable[[int], None],
        rng: random.Random,
        counts: Counter[str],
    ) -> None:
        self._book = book
        self._run = NO_RUN if run is None else run
        self._limits = limits
        self._peers = peers
        self._learned = learned
        self._own_record = own_record
        self._own = own
        self._own_seen = own_seen
        self._rng = rng
        self._counts = counts
        self._verified = VerifiedCache(limits.verified_cache_max)
        self._buckets: dict[PeerId, Bucket] = {}
        self._company = trio.Event()
        self._missed = trio.Event()

    # -- answering

    async def answer(self, peer: Peer, want: Want) -> Records:
        """The handler of `px/1`."""
        limits, now = self._limits, trio.current_time()
        bucket = self._buckets.get(peer.peer_id)
        if bucket is None:
            bucket = Bucket(1.0 / limits.exchange_answer_interval_s, limits.exchange_answer_burst, now)
            self._buckets[peer.peer_id] = bucket
        if not bucket.take(now):
            raise error_for(Code.RATE_LIMITED, detail=f"one px/1 in {limits.exchange_answer_interval_s:g} s")
        run = want.run if self._run == NO_RUN else self._run
        if want.run not in (NO_RUN, run):
            return Records(())
        found = self._book.sample(want.n, run, (peer.peer_id,), now, time.time(), self._rng)
        own = self._own_record()
        return Records(tuple([own, *found][: want.n] if own else found))

    def forget(self, peer_id: PeerId) -> None:
        """A peer is gone.  Its bucket stays while it is not full again, or reconnecting would refill it."""
        now = trio.current_time()
        full_after_s = self._limits.exchange_answer_interval_s * self._limits.exchange_answer_burst
        for known in [known for known, bucket in self._buckets.items() if now - bucket.last > full_after_s]:
            del self._buckets[known]

    # -- asking

    def company(self) -> None:
        """There is somebody again after there was nobody: what there is to learn has begun anew."""
        self._company.set()

    def missed(self) -> None:
        """A peer cannot be reached by what is known of it: somebody may know better."""
        self._missed.set()

    async def run(self) -> None:
        """Ask in the rhythm above, for ever."""
        while True:
            started = trio.current_time()
            for after_s in self._limits.exchange_first_s:
                await trio.sleep_until(started + after_s)
                await self._ask_somebody()
            self._company = trio.Event()
            while not self._company.is_set():
                await self._pause()
                if not self._company.is_set():
                    await self._ask_somebody()

    async def _pause(self) -> None:
        """Until the next question: a minute, less if somebody was missed, and at once if there is company again."""
        asked = trio.current_time()

        async def earlier() -> None:
            await self._missed.wait()
            await trio.sleep_until(asked + self._limits.exchange_again_s)
            nursery.cancel_scope.cancel()

        with trio.move_on_after(self._limits.exchange_interval_s * self._rng.uniform(1 - JITTER, 1 + JITTER)):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(earlier)
                await self._company.wait()
                nursery.cancel_scope.cancel()
        self._missed = trio.Event()

    async def _ask_somebody(self) -> None:
        peers = self._peers()
        if peers:
            await self.ask(self._rng.choice(peers))

    async def ask(self, peer: Peer) -> int:
        """Ask one peer; returns how many of its records were new.  A peer that does not answer is counted, no more."""
        try:
            want = Want(self._run, self._limits.exchange_records_max)
            records = await peer.call(PROTOCOL, want, Records, deadline_s=DEADLINE_S)
        except WireError as error:
            self._counts[f"px-{error.code.name.lower()}"] += 1
            return 0
        return sum(self.take(data) for data in records.records)

    def take(self, data: bytes, signer: PeerId | None = None) -> bool:
        """Verify and keep one record; True if it is newer.  What does not verify is counted by its reason."""
        now_unix = time.time()
        run = None if self._run == NO_RUN else self._run
        try:
            opened = open_peer_record(
                data, now_unix=now_unix, run=run, signer=signer, verified=self._verified, limits=self._limits
            )
            if opened.peer_id == self._own:
                # Never taken over (FIND-10).  But a higher number than ours would make all that we sign now stale for its readers.
                self._own_seen(opened.statement.seq)
                return False
            newer = self._book.learn(opened, trio.current_time(), now_unix)
        except BadEnvelope as error:
            self._counts[f"record-{type(error).__name__.lower()}"] += 1
            return False
        if newer:
            self._learned(opened)
        return newer
