"""Who may say that a generation is broken, what is kept of it, and that it is said once."""

from __future__ import annotations

from random import Random
from typing import Any

import trio

from plnode.alarm import Alarm
from plnode.pipeline.broken import Broken
from plnode.swarm.messages import Abort, Answer
from plnode.swarm.roster import Roster
from wire.errors import Code, error_for
from wire.identity import Identity, PeerId

RANDOM = Random(3)
ME, OTHER, GONE, STRANGER = (Identity(RANDOM.randbytes(32)).peer_id for _ in range(4))


class Room:
    """A net that hands words over by hand.  `sent`: (to whom, what)."""

    def __init__(self) -> None:
        self.peer_id = ME
        self.sent: list[tuple[PeerId, Abort]] = []
        self.handler: Any = None

    def serve_calls(self, protocol: str, request: type, handler: Any) -> None:
        self.handler = handler

    def peer(self, peer_id: PeerId) -> Any:
        return FakePeer(self, peer_id) if peer_id != ME else None


class FakePeer:
    def __init__(self, room: Room, peer_id: PeerId) -> None:
        self._room, self.peer_id = room, peer_id

    async def call(self, protocol: str, abort: Abort, reply: type, deadline_s: float) -> Answer:
        self._room.sent.append((self.peer_id, abort))
        if self.peer_id == GONE:
            raise error_for(Code.TIMEOUT, detail="gone")
        return Answer(True)


def roster(generation: int = 5) -> Roster:
    return Roster(bytes(32), generation, 0, tuple(sorted(((ME, 0), (OTHER, 1), (GONE, 2)), key=lambda e: e[1])))


def alarm(now: Roster | None) -> tuple[Room, Alarm, list[Broken]]:
    room, found = Room(), list[Broken]()
    return room, Alarm(room, lambda: now, found.append), found  # type: ignore[arg-type]


async def test_a_member_says_so_and_the_generation_is_broken() -> None:
    room, _, found = alarm(roster())
    assert (await room.handler(FakePeer(room, OTHER), Abort(5, 1, "lost one", GONE.raw))).ok
    (broken,) = found
    assert broken.told and broken.culprit == GONE and not broken.fatal and "lost one" in broken.reason


async def test_who_is_not_in_it_and_what_is_over_is_refused() -> None:
    room, word, found = alarm(roster())
    assert not (await room.handler(FakePeer(room, STRANGER), Abort(5, 1, "no"))).ok
    assert not (await room.handler(FakePeer(room, OTHER), Abort(4, 1, "late"))).ok
    assert found == [] and word.heard_of(roster()) is None


async def test_a_word_before_this_node_has_begun_is_kept_for_that_generation_only() -> None:
    room, word, found = alarm(None)
    await room.handler(FakePeer(room, STRANGER), Abort(5, 1, "a lie"))
    assert word.heard_of(roster()) is None, "a stranger's word counts nothing once the roster is known"
    assert (await room.handler(FakePeer(room, OTHER), Abort(5, 1, "early"))).ok
    assert found == [] and word.heard_of(roster(6)) is None
    kept = word.heard_of(roster())
    assert kept is not None and "early" in kept.reason


async def test_it_is_told_once_a_generation_to_all_others_and_never_when_it_was_heard() -> None:
    room, word, _ = alarm(roster())
    async with trio.open_nursery() as nursery:
        word.spread(roster(), 7, Broken("heard", told=True), nursery)
        word.spread(roster(), 7, Broken("nobody can be told any more"), None)
        for reason in ("first", "second"):
            word.spread(roster(), 7, Broken(reason, OTHER), nursery)
    assert sorted(room.sent, key=lambda s: s[0]) == [(peer, Abort(5, 7, "first", OTHER.raw)) for peer in sorted((OTHER, GONE))]
    async with trio.open_nursery() as nursery:
        word.spread(roster(6), 8, Broken("the next generation"), nursery)
    assert len(room.sent) == 4
