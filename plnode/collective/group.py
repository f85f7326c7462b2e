"""The replicas of one stage in one generation: they agree on each step's accounts before they add gradients up.

The leader is the lowest id.  Members report their accounts to it as they grow; when the accounts cover the step's set it puts the
terms to the vote, and the round begins with a full set of signatures, checked by every member.  A group of one needs no words.

Handlers are registered once per node (`Rounds`) and look up the group of the generation that a message names: a word for a
generation that is just beginning here waits for it, a word of a past one is refused.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import trio

from plnode.collective.accounts import (
    INDEX,
    LOSS,
    AccountBook,
    AccountError,
    RoundTerms,
    covers,
    pack_account,
    unpack_account,
)
from plnode.collective.messages import ACCOUNT, BALLOT, ROUND_COMMIT, AccountReport, Ballot, RoundCommit
from plnode.pipeline.ledger import Account, StepPlan
from plnode.swarm.messages import Answer, Vote
from plnode.swarm.roster import Roster
from wire.errors import WireError, printable
from wire.identity import ROUND, Identity, PeerId
from wire.net import Net, Peer

Reply = TypeVar("Reply")
BEGIN_S = 20.0
"""How long a word for a generation may wait until that generation has begun here; more than muster's vote and commit together."""


class RoundError(Exception):
    """The round cannot be held.  `culprit` is the member at fault where it is known; the text says what happened."""

    def __init__(self, text: str, culprit: PeerId | None = None) -> None:
        super().__init__(text)
        self.culprit = culprit


@dataclass(frozen=True, slots=True)
class Agreement:
    """A step's round: its terms, signed by all, and the loss of every index of the set."""

    terms: RoundTerms
    losses: Mapping[int, float]


class StageGroup:
    """One stage's replicas in one generation, as one of them sees it."""

    def __init__(
        self,
        net: Net,
        identity: Identity,
        roster: Roster,
        stage: int,
        account: Callable[[int], Account],
        plan: Callable[[int], StepPlan],
        *,
        call_s: Callable[[], float],
    ) -> None:
        self._net = net
        self._identity = identity
        self._account = account
        self._plan = plan
        self._call_s = call_s
        self.generation = roster.generation
        self.stage = stage
        self.members = roster.group(stage)
        self.rank = self.members.index(net.peer_id)
        self.leader = self.members[0]
        self._run = roster.run
        self._books: dict[int, AccountBook] = {}
        self._committed: dict[int, Agreement] = {}
        self._done_before = roster.step
        self._changed = trio.Event()
        self._fault: RoundError | None = None
        self.on_change: Callable[[], None] = lambda: None
        """Called at every change: a sign of life of the group."""

    def account_changed(self) -> None:
        """This node's account has grown (or something arrived): whoever waits in `agree` looks again."""
        self._changed.set()
        self._changed = trio.Event()
        self.on_change()

    async def agree(self, plan: StepPlan) -> Agreement:
        """Wait until the group's accounts cover the step, then agree on the round.

        Raises RoundError when a member's words do not fit or it cannot be reached in time.  A cancel leaves the group as it was.
        """
        if len(self.members) == 1:
            while not covers(plan, [self._account(plan.step).indices]):
                await self._look_again()
            account = self._account(plan.step)
            return Agreement(self._terms(plan, (account.indices,)), account.losses)
        agreement = await (self._lead(plan) if self.rank == 0 else self._follow(plan))
        self._books.pop(plan.step, None)
        self._committed.pop(plan.step, None)
        self._done_before = plan.step + 1
        return agreement

    def waits_for(self, plan: StepPlan) -> tuple[int, ...]:
        """What the leader still misses for the step, as far as it was told; empty elsewhere."""
        return self._books[plan.step].missing if plan.step in self._books else ()

    # -- leader -----------------------------------------------------------------------------------------------------------
    async def _lead(self, plan: StepPlan) -> Agreement:
        book = self._book(plan.step)
        while True:
            self._report_own(book, plan)
            if not book.missing:
                break
            await self._look_again()
        terms = self._terms(plan, book.accounts())
        ballot = Ballot(self.generation, plan.step, terms.attempt, tuple(np.array(a, INDEX).tobytes() for a in terms.accounts))
        votes: dict[PeerId, bytes] = {self._net.peer_id: self._identity.sign(ROUND, terms.digest)}

        async def ask(member: PeerId) -> None:
            vote = await self._call(member, BALLOT, ballot, Vote)
            if not vote.signature or not member.verify(ROUND, terms.digest, vote.signature):
                raise RoundError(f"{member.short} does not sign step {plan.step}: {printable(vote.reason) or 'invalid signature'}", member)
            votes[member] = vote.signature

        await self._ask_all(ask)
        losses = book.losses()
        commit = RoundCommit(
            self.generation,
            plan.step,
            terms.attempt,
            terms.digest,
            b"".join(votes[m] for m in self.members),
            np.array([losses[i] for i in range(plan.total)], LOSS).tobytes(),
        )

        async def tell(member: PeerId) -> None:
            answer = await self._call(member, ROUND_COMMIT, commit, Answer)
            if not answer.ok:
                raise RoundError(f"{member.short} does not take the commit of step {plan.step}: {printable(answer.reason)}", member)

        await self._ask_all(tell)
        return Agreement(terms, losses)

    async def _ask_all(self, ask: Callable[[PeerId], Awaitable[None]]) -> None:
        failed: list[RoundError] = []

        async def guarded(member: PeerId, scope: trio.CancelScope) -> None:
            try:
                await ask(member)
            except RoundError as wrong:
                failed.append(wrong)
                scope.cancel()

        async with trio.open_nursery() as nursery:
            for member in self.members:
                if member != self._net.peer_id:
                    nursery.start_soon(guarded, member, nursery.cancel_scope)
        if failed:
            raise failed[0]

    def _report_own(self, book: AccountBook, plan: StepPlan) -> None:
        try:
            book.report(self._net.peer_id, self._account(plan.step))
        except AccountError as wrong:
            raise RoundError(str(wrong)) from None

    # -- member -----------------------------------------------------------------------------------------------------------
    async def _follow(self, plan: StepPlan) -> Agreement:
        # A fault is raised after the nursery: out of it, it would come as a group of exceptions.
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._report, plan)
            while plan.step not in self._committed and self._fault is None:
                await self._changed.wait()
            nursery.cancel_scope.cancel()
        if plan.step not in self._committed:
            assert self._fault is not None
            raise self._fault
        return self._committed[plan.step]

    async def _report(self, plan: StepPlan) -> None:
        told: tuple[int, ...] = ()
        while True:
            changed = self._changed
            account = self._account(plan.step)
            if account.indices != told:
                told = account.indices
                indices, losses = pack_account(account)
                report = AccountReport(self.generation, plan.step, indices, losses)
                try:
                    answer = await self._call(self.leader, ACCOUNT, report, Answer)
                    if not answer.ok:
                        why = printable(answer.reason)
                        raise RoundError(f"{self.leader.short} refuses my account of step {plan.step}: {why}", self.leader)
                except RoundError as wrong:
                    self._fail(wrong)
                    return
            else:
                await changed.wait()

    # -- what the others say (called by Rounds) ---------------------------------------------------------------------------
    def on_account(self, peer: PeerId, report: AccountReport) -> Answer:
        if self.rank != 0:
            return Answer(False, f"{self.leader.short} leads this group")
        if not self._near(report.step):
            return Answer(False, f"the group works on step {self._done_before}")
        try:
            self._book(report.step).report(peer, unpack_account(report.indices, report.losses))
        except AccountError as wrong:
            self._fail(RoundError(str(wrong), peer))
            return Answer(False, str(wrong)[:512])
        self.account_changed()
        return Answer(True)

    def on_ballot(self, peer: PeerId, ballot: Ballot) -> Vote:
        if peer != self.leader:
            return Vote(b"", f"{self.leader.short} leads this group")
        try:
            accounts = tuple(tuple(int(i) for i in np.frombuffer(a, INDEX)) for a in ballot.accounts)
        except ValueError:
            return Vote(b"", "an account is cut in the middle of an index")
        if not self._near(ballot.step):
            return Vote(b"", f"I work on step {self._done_before}")
        plan = self._plan(ballot.step)
        if len(accounts) != len(self.members) or not covers(plan, accounts):
            return Vote(b"", f"the accounts do not make up the {plan.total} microbatches of step {ballot.step}")
        if accounts[self.rank] != self._account(ballot.step).indices:
            return Vote(b"", f"my account of step {ballot.step} is another one")
        return Vote(self._identity.sign(ROUND, self._terms(plan, accounts, ballot.attempt).digest))

    def on_commit(self, peer: PeerId, commit: RoundCommit, ballot: Ballot | None) -> Answer:
        if peer != self.leader or ballot is None or ballot.step != commit.step or ballot.attempt != commit.attempt:
            return Answer(False, "no such ballot")
        plan = self._plan(commit.step)
        accounts = tuple(tuple(int(i) for i in np.frombuffer(a, INDEX)) for a in ballot.accounts)
        terms = self._terms(plan, accounts, commit.attempt)
        if terms.digest != commit.digest or len(commit.signatures) != 64 * len(self.members):
            return Answer(False, "the commit is not of the ballot that I signed")
        for rank, member in enumerate(self.members):
            if not member.verify(ROUND, terms.digest, commit.signatures[64 * rank : 64 * rank + 64]):
                return Answer(False, f"the signature of {member.short} is not valid")
        losses = np.frombuffer(commit.losses, LOSS) if len(commit.losses) % LOSS.itemsize == 0 else np.empty(0, LOSS)
        if len(losses) != plan.total or not np.isfinite(losses).all():
            return Answer(False, f"{len(losses)} losses, not all finite, for {plan.total} microbatches")
        mine = self._account(commit.step).losses
        if any(losses[index] != loss for index, loss in mine.items()):
            return Answer(False, "the losses of my own microbatches are other ones")
        self._committed[commit.step] = Agreement(terms, {i: float(v) for i, v in enumerate(losses)})
        self.account_changed()
        return Answer(True)

    def _near(self, step: int) -> bool:
        return self._done_before <= step <= self._done_before + 1

    # -- both --------------------------------------------------------------------------------------------------------------
    def _fail(self, wrong: RoundError) -> None:
        if self._fault is None:
            self._fault = wrong
        self.account_changed()

    async def _look_again(self) -> None:
        if self._fault is not None:
            raise self._fault
        await self._changed.wait()
        if self._fault is not None:
            raise self._fault

    def _book(self, step: int) -> AccountBook:
        if step not in self._books:
            self._books[step] = AccountBook(self._plan(step), self.members)
        return self._books[step]

    def _terms(self, plan: StepPlan, accounts: tuple[tuple[int, ...], ...], attempt: int = 0) -> RoundTerms:
        return RoundTerms(self._run, self.generation, self.stage, plan.step, attempt, self.members, accounts)

    async def _call(self, member: PeerId, protocol: str, request: object, reply: type[Reply]) -> Reply:
        peer = self._net.peer(member)
        if peer is None:
            raise RoundError(f"{member.short} is not connected", member)
        try:
            return await peer.call(protocol, request, reply, deadline_s=self._call_s())
        except WireError as failed:
            raise RoundError(f"{member.short} does not answer {protocol}: {failed}", member) from None


class Rounds:
    """The node's ear for rounds: finds the group that a message means."""

    def __init__(self, net: Net) -> None:
        self._group: StageGroup | None = None
        self._ballots: dict[int, Ballot] = {}
        self._attached = trio.Event()
        net.serve_calls(ACCOUNT, AccountReport, self._on_account)
        net.serve_calls(BALLOT, Ballot, self._on_ballot)
        net.serve_calls(ROUND_COMMIT, RoundCommit, self._on_commit)

    def attach(self, group: StageGroup) -> None:
        self._group = group
        self._ballots.clear()
        self._attached.set()
        self._attached = trio.Event()

    def detach(self) -> None:
        self._group = None
        self._ballots.clear()

    async def _find(self, peer: Peer, generation: int) -> StageGroup | str:
        with trio.move_on_after(BEGIN_S):
            while self._group is None or self._group.generation < generation:
                await self._attached.wait()
        group = self._group
        if group is None or group.generation != generation:
            return f"generation {generation} is not under way here"
        if peer.peer_id not in group.members:
            return f"you are not a replica of stage {group.stage} in generation {generation}"
        return group

    async def _on_account(self, peer: Peer, report: AccountReport) -> Answer:
        group = await self._find(peer, report.generation)
        return Answer(False, group) if isinstance(group, str) else group.on_account(peer.peer_id, report)

    async def _on_ballot(self, peer: Peer, ballot: Ballot) -> Vote:
        group = await self._find(peer, ballot.generation)
        if isinstance(group, str):
            return Vote(b"", group)
        vote = group.on_ballot(peer.peer_id, ballot)
        if vote.signature:
            self._ballots = {ballot.step: ballot}
        return vote

    async def _on_commit(self, peer: Peer, commit: RoundCommit) -> Answer:
        group = await self._find(peer, commit.generation)
        if isinstance(group, str):
            return Answer(False, group)
        return group.on_commit(peer.peer_id, commit, self._ballots.get(commit.step))
