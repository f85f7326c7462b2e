"""The word that a generation is broken: told once to all its members, and kept when it comes before this node has begun.

Whoever notices first tells everybody, because the others would only notice by a silence that takes a minute.  The word may arrive while
this node still builds its stage; then it is kept, and looked at before the generation runs.  Whether the reason is fatal is for each
node to see itself: nobody can stop others by saying so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import trio

from plnode.pipeline.broken import Broken
from plnode.swarm.messages import ABORT, Abort, Answer
from plnode.swarm.roster import Roster
from wire.errors import WireError, printable
from wire.identity import PeerId
from wire.net import Net, Peer

ABORT_CALL_S = 5.0
KEPT = 8  # words about generations that have not begun here


class Alarm:
    """`roster()`: the generation that this node is in.  `on_broken` is called when a member says that this very one is broken."""

    def __init__(self, net: Net, roster: Callable[[], Roster | None], on_broken: Callable[[Broken], None]) -> None:
        self._net, self._roster, self._on_broken = net, roster, on_broken
        self._heard: deque[tuple[int, PeerId, Broken]] = deque(maxlen=KEPT)
        self._spread_generation = 0
        net.serve_calls(ABORT, Abort, self._on_abort)

    def note(self, roster: Roster, broken: Broken) -> None:
        """This node has seen it itself."""
        self._heard.append((roster.generation, self._net.peer_id, broken))

    def heard_of(self, roster: Roster) -> Broken | None:
        """What a member has said of this generation, or this node has noted."""
        for generation, sender, broken in self._heard:
            if generation == roster.generation and roster.stage_of(sender) is not None:
                return broken
        return None

    def spread(self, roster: Roster, step: int, broken: Broken, tasks: trio.Nursery | None) -> None:
        """Tell the members, once a generation, by tasks of `tasks` (None: this node stops and its goodbyes tell enough)."""
        if broken.told or self._spread_generation >= roster.generation or tasks is None:
            return
        self._spread_generation = roster.generation
        culprit = broken.culprit.raw if broken.culprit is not None else b""
        abort = Abort(roster.generation, step, printable(broken.reason), culprit)
        for member, _ in roster.members:
            if (peer := self._net.peer(member)) is not None:
                tasks.start_soon(self._tell, peer, abort)

    async def _tell(self, peer: Peer, abort: Abort) -> None:
        try:
            await peer.call(ABORT, abort, Answer, deadline_s=ABORT_CALL_S)
        except WireError:
            return  # it is gone, or has noticed by itself

    async def _on_abort(self, peer: Peer, abort: Abort) -> Answer:
        roster = self._roster()
        if roster is not None and (abort.generation < roster.generation or roster.stage_of(peer.peer_id) is None):
            return Answer(False, f"generation {abort.generation} is over, or you are not in it")
        culprit = PeerId(abort.culprit) if len(abort.culprit) == 32 else None
        broken = Broken(f"{peer.peer_id.short} says: {printable(abort.reason)}", culprit, told=True)
        self._heard.append((abort.generation, peer.peer_id, broken))
        if roster is not None and abort.generation == roster.generation:
            self._on_broken(broken)
        return Answer(True)
