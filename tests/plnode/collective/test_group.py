"""Agreement of a stage's replicas on a step, and what happens when one of them does not keep to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from plnode.collective.accounts import pack_account
from plnode.collective.group import RoundError, Rounds, StageGroup
from plnode.collective.messages import ACCOUNT, BALLOT, ROUND_COMMIT, AccountReport, Ballot, RoundCommit
from plnode.pipeline.ledger import Account, StepPlan
from plnode.swarm.messages import Answer, Vote
from plnode.swarm.roster import Roster
from tests.plnode.direct import DirectNet
from wire.identity import Identity

RUN = bytes(32)


class Replica:
    def __init__(self, net: DirectNet, roster: Roster) -> None:
        self.net = net
        self.account = Account()
        self.rounds = Rounds(net)  # type: ignore[arg-type]
        self.group = StageGroup(
            net, net.identity, roster, 0, lambda step: self.account, lambda step: StepPlan(step, 4), call_s=lambda: 5.0  # type: ignore[arg-type]
        )
        self.rounds.attach(self.group)

    def does(self, **losses: float) -> None:
        self.account.losses.update({int(name[1:]): loss for name, loss in losses.items()})
        self.group.account_changed()


def replicas(count: int) -> list[Replica]:
    identities = sorted((Identity.generate() for _ in range(count)), key=lambda i: i.peer_id)
    world: dict[Any, DirectNet] = {}
    nets = [DirectNet(identity, world) for identity in identities]
    roster = Roster(RUN, 1, 0, tuple((net.peer_id, 0) for net in nets))
    return [Replica(net, roster) for net in nets]


async def test_all_agree_on_the_same_terms_and_losses() -> None:
    group = replicas(3)
    found: list[Any] = []
    async with trio.open_nursery() as nursery:
        async def agree(replica: Replica) -> None:
            found.append(await replica.group.agree(StepPlan(0, 4)))

        for replica in group:
            nursery.start_soon(agree, replica)
        await trio.testing.wait_all_tasks_blocked()
        group[1].does(i0=1.0, i3=4.0)
        group[2].does(i1=2.0)
        await trio.testing.wait_all_tasks_blocked()
        assert found == [], "nobody has done microbatch 2"
        group[0].does(i2=3.0)
    assert len({agreement.terms.digest for agreement in found}) == 1
    assert all(dict(agreement.losses) == {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0} for agreement in found)


async def test_a_leader_that_refuses_an_account_is_named_by_a_plain_error(autojump_clock: object) -> None:
    leader, member = replicas(2)

    async def refuse(peer: object, report: object) -> Answer:
        return Answer(False, "no such thing")

    leader.net.handlers[ACCOUNT] = refuse
    member.does(i0=1.0)
    with pytest.raises(RoundError, match="no such thing") as failure:  # not a group of exceptions: callers look for it by type
        await member.group.agree(StepPlan(0, 4))
    assert failure.value.culprit == leader.net.peer_id


async def test_a_member_that_is_silent_costs_one_deadline(autojump_clock: object) -> None:
    leader, member = replicas(2)
    leader.does(i0=1.0, i1=1.0)
    peer = member.net.peer(leader.net.peer_id)
    indices, losses = pack_account(Account({2: 1.0, 3: 1.0}))
    await leader.net.handlers[ACCOUNT](leader.net.peer(member.net.peer_id), AccountReport(1, 0, indices, losses))
    assert peer is not None
    member.net.silent = True
    with pytest.raises(RoundError, match="does not answer") as failure:
        await leader.group.agree(StepPlan(0, 4))
    assert failure.value.culprit == member.net.peer_id
    assert trio.current_time() == pytest.approx(5.0, abs=0.1)


@pytest.mark.parametrize(
    ("accounts", "reason"),
    [
        ([[0, 1], [2, 3]], "another one"),  # not what this member has done
        ([[0, 1, 2], [3]], "another one"),
        ([[0, 1], [3]], "do not make up"),
        ([[0, 1, 2, 3]], "do not make up"),
    ],
)
async def test_a_member_signs_only_its_own_account(accounts: list[list[int]], reason: str) -> None:
    leader, member = replicas(2)
    member.does(i1=1.0)
    ballot = Ballot(1, 0, 0, tuple(np.array(a, "<u4").tobytes() for a in accounts))
    vote = await member.net.handlers[BALLOT](member.net.peer(leader.net.peer_id), ballot)
    assert isinstance(vote, Vote)
    assert not vote.signature
    assert reason in vote.reason


async def test_a_commit_without_all_signatures_is_refused() -> None:
    leader, member = replicas(2)
    member.does(i1=1.0)
    peer = member.net.peer(leader.net.peer_id)
    accounts = tuple(np.array(a, "<u4").tobytes() for a in ([0, 2, 3], [1]))
    vote = await member.net.handlers[BALLOT](peer, Ballot(1, 0, 0, accounts))
    assert isinstance(vote, Vote)
    digest = member.group._terms(StepPlan(0, 4), ((0, 2, 3), (1,))).digest
    losses = np.ones(4).tobytes()
    forged = RoundCommit(1, 0, 0, digest, bytes(64) + vote.signature, losses)
    answer = await member.net.handlers[ROUND_COMMIT](peer, forged)
    assert answer == Answer(False, f"the signature of {leader.net.peer_id.short} is not valid")
