"""The last known peers on disk: with them a node comes back to its swarm when every seed is silent (FIND-3).

Written whole and atomically (a new file, then a rename), every 60 s if something changed and at the end, at most 1,000 peers.  A
file that cannot be read or makes no sense is complained of once and ignored: losing hints is no reason not to start.

Four random ones are dialled as soon as somebody is connected, so that a node with one seed hangs on more than that seed, and 2 s
after the start if nobody is.  While the node is alone, four more again and again in the rhythm of the seeds, those that failed
least first: of 1,000 peers of last week, four are dead more often than not.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import trio

from wire.errors import WireError
from wire.identity import PeerId
from wire.limits import Limits
from wire.net.book import FILE_MAX_BYTES, PeerBook
from wire.net.peer import Peer

log = logging.getLogger("wire.net")


class KnownPeers:
    """`path` None keeps nothing."""

    def __init__(self, book: PeerBook, path: Path | None, run: bytes | None, limits: Limits) -> None:
        self._book = book
        self._path = path
        self._run = run
        self._limits = limits
        self._complained = False
        self._met = trio.Event()
        self._alone = trio.Event()

    def load(self, complain: Callable[[str], None]) -> None:
        if self._path is None:
            return
        try:
            with self._path.open("rb") as file:
                data = file.read(FILE_MAX_BYTES + 1)
            self._book.load(data, self._run, time.time())
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            complain(f"{self._path} is not used: {error}")

    def write(self, complain: Callable[[str], None]) -> None:
        """Write now if something changed."""
        if self._path is None or not self._book.changed:
            return
        scratch = self._path.with_name(f".{self._path.name}.new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with scratch.open("wb") as file:
                file.write(self._book.to_bytes(time.time()))
                file.flush()
                os.fsync(file.fileno())
            scratch.replace(self._path)
            self._book.changed = False
        except OSError as error:
            if not self._complained:
                self._complained = True
                complain(f"known peers cannot be written to {self._path}: {error.strerror or error}")

    async def write_regularly(self, complain: Callable[[str], None]) -> None:
        """For ever."""
        while True:
            await trio.sleep(self._limits.known_peers_write_s)
            self.write(complain)

    def connected(self) -> None:
        """A peer is here."""
        self._met.set()

    def alone(self) -> None:
        """The last peer is gone."""
        self._alone.set()

    async def dial_some(
        self,
        delay_s: float,
        peers: Callable[[], Sequence[Peer]],
        connect: Callable[[PeerId], Awaitable[Peer]],
        rng: random.Random,
        *,
        lasting: bool,
    ) -> None:
        """As the module says, `delay_s` at most before the first four.  That some fail is no news.

        `lasting`: for ever.  A node that neither keeps peers nor has seeds is somebody's tool, and dials whom it is told to.
        """

        async def one(peer_id: PeerId) -> None:
            try:
                await connect(peer_id)
            except WireError as error:
                log.debug("known peer %s: %s", peer_id, error)

        limits, rounds = self._limits, 0
        with trio.move_on_after(delay_s):
            await self._met.wait()
        while True:
            async with trio.open_nursery() as nursery:
                for peer_id in self._book.candidates(limits.known_peers_dialled, time.time(), rng):
                    nursery.start_soon(one, peer_id)
            rounds += 1
            if not lasting:
                return
            if peers():
                rounds, self._alone = 0, trio.Event()
                await self._alone.wait()
            await trio.sleep(rng.uniform(0, min(limits.seed_retry_max_s, limits.seed_retry_min_s * 2.0 ** min(rounds, 16))))
