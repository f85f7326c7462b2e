"""The donor's side: one copy of the state for all who ask, given away in the gaps that training leaves.

What goes wrong.  Twenty joiners make a donor copy its state twenty times, or keep a copy for ever; the uploads of one node delay the
step that the whole swarm waits for; a node serves what it does not hold, or sealed weights to anybody.  Hence:

* *A cut is made when asked for*, at the next step boundary that the joiner names to all donors, so that they hold the same root.  It is
  one host copy, shared by all who ask while it lives, dropped when nobody has used it for `life_s`.  No room in the budget: no.
* *Uploads*: `uploads` at once, `waiting` in a queue, first come first served; beyond that "busy".  An upload holds views, no bytes.
* *Training first.*  Streams are of class 4, which orders what shares a connection.  What goes to *other* peers shares only the line: while
  any tensor of training waits to be sent, uploads together get 3 % of what the line has shown (`statepace.py`).
* *Who*: members of the run (the wire refuses others); with sealed weights only nodes that claim this stage.

What the owner (participant) calls:

    server.hold(stage)                                    a stage was taken; None: none.  Drops every cut
    await server.boundary(step, generation, snapshot)     at every boundary, when `step` steps are applied and none is begun
    server.on_reduced(step, vector)                       each reduced vector, before or after it is applied; copied only if needed

Everything runs in the caller's loop; what takes long (hashing) goes through `offload`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import trio
from torch import Tensor

from plnode.collective.statecut import Chunked, Cut, Offload, seal_cut, state_bytes
from plnode.collective.statemessages import (
    BACKGROUND,
    HASHES,
    MOST_CUTS,
    MOST_UPDATES,
    STATE,
    STATE_BYTES,
    UPDATES,
    ChunkAsk,
    StateAsk,
    StateOffer,
    UpdateAsk,
    UpdateOffer,
    UpdateRoot,
)
from plnode.collective.statepace import Pace
from plnode.collective.updatelog import UpdateLog
from wire.errors import Code
from wire.identity import PeerId
from wire.messages import decode
from wire.net import ByteStream, MessageStream, Net, Peer

UPLOADS = 4  # of chunks at once: enough to fill a line at 100 ms, few enough that each is done soon
WAITING = 128  # requests in the queue: 20 joiners with 4 requests each, and some
LIFE_S = 120.0  # a joiner asks every few seconds; a reconnect may take 60 s
CUT_AHEAD = 64  # steps; a joiner asks for the next 8 at most, and each step that is asked for is remembered until it comes
PIECE_BYTES = 256 << 10  # one largest record
SMALL_PIECE_BYTES = 32 << 10  # while training waits: 0.05 s at 5 Mbit/s
LOOK_S = 0.05  # training may be through before the pause is over


@dataclass(slots=True, eq=False)
class _Held:
    tensors: Mapping[str, Tensor]
    generation: int
    size_bytes: int
    used: float
    users: int = 0
    lock: trio.Lock = field(default_factory=trio.Lock)
    cut: Cut | None = None


class StateServer:
    """See the module.  One a node, made once: it registers its protocols with `net`."""

    def __init__(
        self,
        net: Net,
        *,
        run: bytes,
        seal: Callable[[bytes, int], bytes],
        open_step: Callable[[], int],
        budget_bytes: int,
        updates_budget_bytes: int,
        sealed: bool = False,
        claims: Callable[[PeerId], int | None] = lambda peer: None,
        uploads: int = UPLOADS,
        waiting: int = WAITING,
        life_s: float = LIFE_S,
        chunk_bytes: int | None = None,
        offload: Offload = trio.to_thread.run_sync,
    ) -> None:
        """`seal(payload, step)`: an envelope of domain plw/snapshot/1.  `claims(peer)`: the stage that it has claimed."""
        self._net, self._run, self._seal, self._open_step = net, run, seal, open_step
        self._budget, self._sealed, self._claims = budget_bytes, sealed, claims
        self._life_s, self._chunk, self._offload = life_s, chunk_bytes, offload
        self._stage: int | None = None
        self._cuts: dict[int, _Held] = {}
        self._wanted: dict[int, trio.Event] = {}
        self._refusals: dict[int, str] = {}
        self._limiter = trio.CapacityLimiter(uploads)
        self._most_waiting = waiting
        self._line = trio.Lock()
        self._pace = Pace()
        self._hashing = trio.Lock()
        self.log = UpdateLog(updates_budget_bytes, life_s=life_s, chunk_bytes=chunk_bytes)
        self.uploaded: dict[PeerId, int] = {}  # bytes, whatever became of them
        self.most_at_once = 0
        self.copies = 0
        net.serve_calls(STATE, StateAsk, self._on_ask)
        net.serve_calls(UPDATES, UpdateAsk, self._on_updates)
        net.serve(STATE_BYTES, self._on_bytes)

    # -- what the owner calls

    @property
    def held_bytes(self) -> int:
        """Of cuts; vectors are counted by `log.held_bytes`."""
        return sum(held.size_bytes for held in self._cuts.values())

    def hold(self, stage: int | None) -> None:
        """Serve this stage from now on.  What was held of another one, or of a state that was replaced, is dropped."""
        self._stage = stage
        self._cuts.clear()
        self.log.clear()
        for event in self._wanted.values():
            event.set()
        self._wanted.clear()

    async def boundary(self, step: int, generation: int, snapshot: Callable[[], Awaitable[Mapping[str, Tensor]]]) -> None:
        """`step` steps are applied.  Makes the copy if somebody waits for it and returns when training may go on."""
        await trio.lowlevel.checkpoint()
        self.expire(trio.current_time())
        due = [s for s in self._wanted if s <= step]
        if step in due:
            await self._copy(step, generation, snapshot)
        for s in due:
            self._wanted.pop(s).set()

    def on_reduced(self, step: int, vector: memoryview) -> None:
        """The reduced vector of `step`; copied if somebody follows."""
        self.log.add(step, vector, trio.current_time())

    def expire(self, now: float) -> None:
        """Drop cuts that nobody uses and followers that are gone.  Called at every boundary and ask."""
        for step in [s for s, h in self._cuts.items() if not h.users and h.used + self._life_s < now]:
            del self._cuts[step]
        self.log.expire(now)

    # -- cuts

    async def _copy(self, step: int, generation: int, snapshot: Callable[[], Awaitable[Mapping[str, Tensor]]]) -> None:
        # The size is that of the last copy; of the first one it is known only when it is there.
        expected = max((held.size_bytes for held in self._cuts.values()), default=0)
        if self.held_bytes + expected > self._budget or len(self._cuts) >= MOST_CUTS:
            self._refusals = {step: f"no room for another copy: {self.held_bytes:,} of {self._budget:,} bytes are in use"}
            return
        tensors = await snapshot()
        size = state_bytes(tensors)
        if self.held_bytes + size > self._budget:
            self._refusals = {step: f"a copy takes {size:,} bytes, {self._budget - self.held_bytes:,} are left"}
            return
        self.copies += 1
        self._cuts[step] = _Held(tensors, generation, size, trio.current_time())

    async def _sealed_cut(self, step: int, held: _Held) -> Cut:
        """Hash and sign once, by whoever comes first."""
        async with held.lock:
            if held.cut is None:
                stage = self._stage or 0
                make = partial(
                    seal_cut, held.tensors, self._seal,
                    run=self._run, stage=stage, step=step, generation=held.generation, chunk_bytes=self._chunk,
                )  # fmt: skip
                held.cut = await self._offload(make)
            return held.cut

    # -- questions

    def _refusal(self, peer: PeerId, stage: int) -> str:
        if stage != self._stage:
            return f"I hold stage {self._stage}, not {stage}" if self._stage is not None else "I hold no stage"
        if self._sealed and self._claims(peer) != stage:
            return f"the weights of this run are sealed: claim stage {stage} first"
        return ""

    async def _on_ask(self, peer: Peer, ask: StateAsk) -> StateOffer:
        now = trio.current_time()
        self.expire(now)
        if reason := self._refusal(peer.peer_id, ask.stage):
            return StateOffer(self._open_step(), (), reason, holds=False)
        if ask.cut_at and ask.cut_at not in self._cuts:
            if ask.cut_at <= self._open_step():
                return StateOffer(self._open_step(), (), f"step {ask.cut_at} is over")
            if ask.cut_at > self._open_step() + CUT_AHEAD:
                return StateOffer(self._open_step(), (), f"step {ask.cut_at} is too far ahead; step {self._open_step()} is open")
            self.log.begin(peer.peer_id, ask.cut_at, now)
            await self._wanted.setdefault(ask.cut_at, trio.Event()).wait()
            if reason := self._refusal(peer.peer_id, ask.stage) or self._refusals.get(ask.cut_at, ""):
                self.log.forget(peer.peer_id)
                return StateOffer(self._open_step(), (), reason)
        envelopes = []
        for step, held in sorted(self._cuts.items(), reverse=True):
            if self.log.covers(step, self._open_step()):
                cut = await self._sealed_cut(step, held)
                held.used = trio.current_time()
                envelopes.append(cut.envelope)
                # From the oldest that it may choose; it says which when it follows.
                self.log.begin(peer.peer_id, step, held.used)
        return StateOffer(self._open_step(), tuple(envelopes), "" if envelopes else "there is no copy now")

    async def _on_updates(self, peer: Peer, ask: UpdateAsk) -> UpdateOffer:
        if reason := self._refusal(peer.peer_id, ask.stage):
            return UpdateOffer(self._open_step(), (), True, reason)
        if ask.done:
            self.log.forget(peer.peer_id)
            return UpdateOffer(self._open_step(), ())
        if not self.log.follow(peer.peer_id, ask.step, trio.current_time()):
            return UpdateOffer(self._open_step(), (), True, "you were too far behind; take a fresh cut")
        if not self.log.covers(ask.step, self._open_step()) and ask.step < self._open_step():
            self.log.forget(peer.peer_id)
            return UpdateOffer(self._open_step(), (), True, f"the vector of step {ask.step} is not here; take a fresh cut")
        found = []
        for step, data in self.log.since(ask.step)[:MOST_UPDATES]:
            async with self._hashing:
                if not data.root:
                    await self._offload(data.hash)
            found.append(UpdateRoot(step, data.size_bytes, data.chunk_bytes, data.root))
        return UpdateOffer(self._open_step(), tuple(found))

    # -- bytes

    def _find(self, root: bytes) -> tuple[Chunked, _Held | None] | None:
        for held in self._cuts.values():
            if held.cut is not None and held.cut.statement.root == root:
                return held.cut.data, held
        vector = self.log.find(root)
        return None if vector is None else (vector, None)

    async def _on_bytes(self, peer: Peer, stream: MessageStream | ByteStream) -> None:
        if not isinstance(stream, ByteStream):
            stream.reset(Code.PROTOCOL, "chunks come on byte streams")
            return
        ask = decode(stream.meta, ChunkAsk)
        if self._stage is None or (reason := self._refusal(peer.peer_id, self._stage)):
            stream.reset(Code.NOT_MEMBER, reason if self._stage is not None else "I hold no stage")
            return
        found = self._find(ask.root)
        if found is None or (ask.index != HASHES and ask.index >= found[0].count):
            stream.reset(Code.STALE, "I do not hold that")
            return
        if self._limiter.statistics().tasks_waiting >= self._most_waiting:
            stream.reset(Code.RESOURCE_LIMIT, "too many wait already")
            return
        data, held = found
        self.log.heard(peer.peer_id, trio.current_time())
        try:
            if held is not None:
                held.users += 1
            async with self._limiter:
                self.most_at_once = max(self.most_at_once, int(self._limiter.borrowed_tokens))
                views = [memoryview(data.hashes)] if ask.index == HASHES else data.chunk(ask.index)
                for view in views:
                    await self._send(peer, stream, view)
                await stream.send_eof()
        finally:
            if held is not None:
                held.users -= 1
                held.used = trio.current_time()
            self.log.heard(peer.peer_id, trio.current_time())

    async def _send(self, peer: Peer, stream: ByteStream, piece: memoryview) -> None:
        while piece:
            if not self._training_waits():
                part, piece = piece[:PIECE_BYTES], piece[PIECE_BYTES:]
                await stream.send_all(part)
            else:
                part, piece = piece[:SMALL_PIECE_BYTES], piece[SMALL_PIECE_BYTES:]
                async with self._line:
                    await stream.send_all(part)
                    until = trio.current_time() + self._pace.pause_s(part.nbytes)
                    # Queues say nothing when they run empty.
                    while self._training_waits() and (left := until - trio.current_time()) > 0:  # noqa: ASYNC110
                        await trio.sleep(min(left, LOOK_S))
            self.uploaded[peer.peer_id] = self.uploaded.get(peer.peer_id, 0) + part.nbytes

    def _training_waits(self) -> bool:
        waits = any(size for peer in self._net.peers() for cls, size in peer.queued_tensor_bytes().items() if cls < BACKGROUND)
        return self._pace.look(self._net.traffic().bytes_out, trio.current_time(), waits)
