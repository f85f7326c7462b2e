"""The last known peers on disk: with them a node comes back to its swarm when every seed is silent (FIND-3).

Written whole and atomically (a new file, then a rename), every 60 s if something changed and at the end, at most 1,000 peers.  A
file that cannot be read or makes no sense is complained of once and ignored: losing hints is no reason not to start.
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
                file.write(self._book.to_bytes())
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

    async def dial_some(
        self,
        delay_s: float,
        peers: Callable[[], Sequence[Peer]],
        connect: Callable[[PeerId], Awaitable[Peer]],
        rng: random.Random,
    ) -> None:
        """After `delay_s`, if nobody is connected: dial four random ones.  That the others fail is no news."""

        async def one(peer_id: PeerId) -> None:
            try:
                await connect(peer_id)
            except WireError as error:
                log.debug("known peer %s: %s", peer_id, error)

        await trio.sleep(delay_s)
        if peers():
            return
        async with trio.open_nursery() as nursery:
            for peer_id in self._book.candidates(self._limits.known_peers_dialled, time.time(), rng):
                nursery.start_soon(one, peer_id)
