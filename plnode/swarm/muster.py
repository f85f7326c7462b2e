"""Waiting for a generation of the run to begin, and agreeing on it.

The proposer is the lowest id of the nodes that could begin; it asks all others to sign, and when the signatures are complete sends
them to everybody.  Whoever signed waits for the commit for a bounded time and then forgets its vote, so a proposer that dies in
between costs a deadline, never a hang; the next attempt has a greater generation number.  When a member does not take its commit,
the proposer calls the generation off for all.  Who does not sign, or cannot be reached, is left out of the next proposals where there
are enough others: one badly connected volunteer must not keep the run from starting.

Why a node waits is said once per cause, in words, through the recorder.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from random import Random

import trio

from plnode.observe.waits import Waits
from plnode.swarm.claims import NodeState
from plnode.swarm.membership import Membership
from plnode.swarm.messages import ABORT, MUSTER, Abort, Answer, Commit, Propose, Vote
from plnode.swarm.quorum import Present, Shortage, Start, quorum
from plnode.swarm.roster import GENERATIONS_AHEAD, Roster, Voter, base_generation, next_generation, objection
from wire.errors import WireError, printable
from wire.identity import ROUND, Identity, PeerId
from wire.net import Net, Peer

VOTE_S = 10.0
RETRY_S = 1.0
VOTES_APART_S = 0.4  # less than the pause between two tries; whoever proposes faster only wants to use the numbers up
SHUNNED_S = 120.0  # who did not sign is left out for so long where there are enough others


@dataclass(slots=True)
class _Signed:
    """A vote that may still be committed.  `ended` when it was, or when a newer vote replaces it."""

    roster: Roster
    ended: trio.Event
    begins: bool = False


class Muster:
    """Agreement on generations; one per node."""

    def __init__(
        self,
        net: Net,
        identity: Identity,
        run: bytes,
        membership: Membership,
        waits: Waits,
        *,
        stages: int,
        replicas: int,
        steps: int,
        first_snapshot: int,
        data_dir: Path,
        random: Random,
    ) -> None:
        self._net = net
        self._identity = identity
        self._run = run
        self._membership = membership
        self._waits = waits
        self._stages = stages
        self._replicas = replicas
        self._steps = steps
        self._first_snapshot = first_snapshot
        self._voted_at = -math.inf
        self._tried = 0
        self._awaited: tuple[PeerId, float] | None = None
        self._file = data_dir / "generation"
        self._random = random
        self._last_voted = self._read_voted()
        self._signed: _Signed | None = None
        self._proposing = False
        self._shunned: dict[PeerId, float] = {}
        net.serve_calls(MUSTER, Propose, self._on_propose)
        net.serve_calls(f"{MUSTER}/commit", Commit, self._on_commit)

    async def begin(self) -> Roster:
        """Wait until a generation begins that this node is part of.  A cancel leaves at most a vote that is never used."""
        self._signed = None
        while True:
            changed = self._membership.changed()
            if self._signed is not None:
                roster = await self._wait_for_commit()
                if roster is not None:
                    return roster
                continue
            decision = self.decide()
            if isinstance(decision, Shortage):
                self._waits.waiting("for the swarm", decision.reason)
                await self._change(changed, None)
                continue
            me = self._net.peer_id
            members = [p for p, _ in decision.roster]
            if me not in members:
                self._waits.waiting("for a place", f"{len(members)} nodes can begin at step {decision.step} and hold every stage; "
                                       "this node has no snapshot of that step")  # fmt: skip
                await self._change(changed, None)
            elif me != min(members):
                self._waits.waiting("for the proposer", f"{min(members).short} proposes the next generation")
                self._await_proposer(min(members))
                await self._change(changed, VOTE_S)
            else:
                roster = await self._propose(decision)
                if roster is not None:
                    return roster
                # Not "until something changes": our own proposal changed something at everybody.
                await trio.sleep(RETRY_S * (0.5 + self._random.random()))

    def _await_proposer(self, proposer: PeerId) -> None:
        """A node that should propose and does not is left out like one that does not sign."""
        now = trio.current_time()
        if self._awaited is None or self._awaited[0] != proposer:
            self._awaited = (proposer, now)
        elif now - self._awaited[1] > 2 * VOTE_S:
            self._shunned[proposer] = now + SHUNNED_S
            self._awaited = None

    def decide(self) -> Start | Shortage:
        """What this node makes of the nodes it sees ready."""
        ready = [
            Present(peer, claim.stage, claim.snapshots)
            for peer, claim in self._membership.present()
            if claim.state == NodeState.READY and claim.stage is not None and max(claim.snapshots, default=0) <= self._steps
        ]
        now = trio.current_time()
        self._shunned = {peer: until for peer, until in self._shunned.items() if until > now}
        trusted = [node for node in ready if node.peer not in self._shunned]
        without = quorum(trusted, self._stages, self._replicas, self._first_snapshot)
        return without if isinstance(without, Start) else quorum(ready, self._stages, self._replicas, self._first_snapshot)

    def _generations(self) -> list[int]:
        return [claim.generation for _, claim in self._membership.present()]

    # -- proposing ------------------------------------------------------------------------------------------------------
    async def _propose(self, start: Start) -> Roster | None:
        generation = next_generation(max(self._last_voted, self._tried), self._generations())
        roster = Roster(self._run, generation, start.step, start.roster)
        self._waits.waiting("for votes", f"generation {roster.generation} from step {roster.step}, {len(roster.members)} nodes")
        self._proposing = True
        votes: dict[PeerId, bytes] = {}
        refusals: list[str] = []
        async with trio.open_nursery() as nursery:
            for peer, _ in roster.members:
                if peer != self._net.peer_id:
                    nursery.start_soon(self._ask, roster, peer, votes, refusals)
        self._proposing = False
        if refusals or len(votes) != len(roster.members) - 1:
            self._waits.waiting("for votes", "; ".join(sorted(refusals)))
            if votes:
                self._tried = roster.generation  # somebody has signed this number and will not sign it again
            for peer, _ in roster.members:
                if peer not in votes and peer != self._net.peer_id:
                    self._shunned[peer] = trio.current_time() + SHUNNED_S
            return None
        if self._signed is not None:
            return None  # a lower id has proposed meanwhile, and has our vote
        # Our own vote comes last: a number that others refused is not used up here.
        own = self._vote(roster)
        if own is None:
            return None
        votes[self._net.peer_id] = own
        signatures = b"".join(votes[p] for p, _ in roster.members)
        commit = Commit(roster.generation, roster.digest, signatures)
        unanswered: list[str] = []
        async with trio.open_nursery() as nursery:
            for peer, _ in roster.members:
                if peer != self._net.peer_id:
                    nursery.start_soon(self._tell, commit, peer, unanswered)
        if unanswered:
            reason = "not every member took the commit: " + "; ".join(sorted(unanswered))
            self._waits.waiting("for members", reason)
            abort = Abort(roster.generation, roster.step, reason[:250])
            async with trio.open_nursery() as nursery:
                for peer, _ in roster.members:
                    if peer != self._net.peer_id:
                        nursery.start_soon(self._call_off, abort, peer)
            return None
        return roster

    async def _call_off(self, abort: Abort, peer_id: PeerId) -> None:
        peer = self._net.peer(peer_id)
        try:
            if peer is not None:
                await peer.call(ABORT, abort, Answer, deadline_s=VOTE_S)
        except WireError:
            return  # it will notice that the others do not take part

    async def _ask(self, roster: Roster, peer_id: PeerId, votes: dict[PeerId, bytes], refusals: list[str]) -> None:
        peer = self._net.peer(peer_id)
        if peer is None:
            refusals.append(f"{peer_id.short} is not connected")
            return
        try:
            vote = await peer.call(MUSTER, roster.proposal(), Vote, deadline_s=VOTE_S)
        except WireError as failed:
            refusals.append(f"{peer_id.short}: {failed}")
            return
        if not vote.signature:
            refusals.append(f"{peer_id.short}: {printable(vote.reason)}")
        elif not peer_id.verify(ROUND, roster.digest, vote.signature):
            refusals.append(f"{peer_id.short}: the signature is not valid")
        else:
            votes[peer_id] = vote.signature

    async def _tell(self, commit: Commit, peer_id: PeerId, unanswered: list[str]) -> None:
        peer = self._net.peer(peer_id)
        try:
            if peer is None:
                unanswered.append(f"{peer_id.short} is gone")
                return
            answer = await peer.call(f"{MUSTER}/commit", commit, Answer, deadline_s=VOTE_S)
            if not answer.ok:
                unanswered.append(f"{peer_id.short}: {printable(answer.reason)}")
        except WireError as failed:
            unanswered.append(f"{peer_id.short}: {failed}")

    # -- voting -----------------------------------------------------------------------------------------------------------
    async def _on_propose(self, peer: Peer, proposal: Propose) -> Vote:
        try:
            roster = Roster.of(self._run, proposal)
        except ValueError as wrong:
            return Vote(b"", str(wrong))
        reason = objection(roster, peer.peer_id, self._voter(everybody=True))
        if reason is None:
            async with trio.open_nursery() as nursery:
                for member, _ in roster.members:
                    if not self._membership.connected(member):
                        nursery.start_soon(self._try_connect, member)
            reason = objection(roster, peer.peer_id, self._voter())
        if reason is not None:
            return Vote(b"", reason[:400])
        if self._proposing and peer.peer_id > self._net.peer_id:
            return Vote(b"", "my own proposal is under way")
        if self._signed is not None and self._signed.begins:
            return Vote(b"", f"generation {self._signed.roster.generation} has just begun")
        if trio.current_time() - self._voted_at < VOTES_APART_S:
            return Vote(b"", "I have signed another one a moment ago")
        signature = self._vote(roster)
        if signature is None:
            return Vote(b"", "I cannot write my vote down")
        replaced, self._signed = self._signed, _Signed(roster, trio.Event())
        if replaced is not None:
            replaced.ended.set()
        self._membership.wake()
        return Vote(signature)

    async def _try_connect(self, peer: PeerId) -> None:
        try:
            await self._net.connect(peer, deadline_s=VOTE_S / 2)
        except WireError:
            return  # the objection names it

    def _voter(self, *, everybody: bool = False) -> Voter:
        """What this node knows; with `everybody` as if all peers that it knows of were connected."""
        own = self._membership.own
        connected = frozenset(p.peer_id for p in self._net.peers())
        decision = self.decide()
        anything_later = any(
            claim.state == NodeState.READY and 0 < max(claim.snapshots, default=0) <= self._steps
            for _, claim in self._membership.present()
        )
        newest = decision.step if isinstance(decision, Start) else int(anything_later)
        return Voter(
            me=self._net.peer_id,
            ready=own.state == NodeState.READY,
            stage=own.stage,
            snapshots=own.snapshots,
            last_voted=self._last_voted,
            newest_step=newest,
            plausible_generation=base_generation(self._last_voted, self._generations()) + 2 * GENERATIONS_AHEAD,
            reachable=frozenset(r.peer_id for r in self._net.known()) | connected if everybody else connected,
            stages=self._stages,
            replicas=self._replicas,
        )

    def _vote(self, roster: Roster) -> bytes | None:
        """Sign, after the number is on disk; None when the disk refuses."""
        temporary = self._file.with_suffix(".new")
        try:
            temporary.write_text(f"{roster.generation}\n")
            os.replace(temporary, self._file)
        except OSError as refused:
            self._waits.waiting("for the disk", f"a vote cannot be written to {self._file}: {refused.strerror}")
            return None
        self._last_voted = roster.generation
        self._voted_at = trio.current_time()
        return self._identity.sign(ROUND, roster.digest)

    @property
    def last_voted(self) -> int:
        """The greatest generation number that this node has signed; told in its claim, so that others propose a greater one."""
        return self._last_voted

    async def _on_commit(self, peer: Peer, commit: Commit) -> Answer:
        signed = self._signed
        if signed is None or signed.roster.generation != commit.generation or signed.roster.digest != commit.digest:
            return Answer(False, f"I did not sign generation {commit.generation}, or no longer wait for it")
        members = signed.roster.members
        if len(commit.signatures) != 64 * len(members):
            return Answer(False, f"{len(commit.signatures)} bytes of signatures for {len(members)} members")
        for number, (member, _) in enumerate(members):
            if not member.verify(ROUND, signed.roster.digest, commit.signatures[64 * number : 64 * number + 64]):
                return Answer(False, f"the signature of {member.short} is not valid")
        signed.begins = True
        signed.ended.set()
        return Answer(True)

    async def _wait_for_commit(self) -> Roster | None:
        """Wait for the commit of whatever was signed last: a proposal that was refused by others is followed by a newer one."""
        while (signed := self._signed) is not None:
            with trio.move_on_after(2 * VOTE_S):
                await signed.ended.wait()
            if signed.begins:
                self._signed = None
                return signed.roster
            if self._signed is signed:
                self._signed = None
        return None

    async def _change(self, changed: trio.Event, at_most_s: float | None) -> None:
        with trio.move_on_after(at_most_s if at_most_s is not None else float("inf")):
            await changed.wait()

    def _read_voted(self) -> int:
        try:
            return int(self._file.read_text())
        except (FileNotFoundError, ValueError):
            # Never voted, or the disk lost it.  The others' claims name the number of the last generation that began.
            return 0
