"""Accounts of one stage for one step, and the terms of the round that adds them up.

Sans-IO.  A round may begin only when the accounts of its members are disjoint and cover the step's set (training.md, section
3): anything else would count a microbatch twice or lose it, silently.  The terms are hashed and signed by every member, so
that a round has one meaning for all of them; the round id contains run, stage, step, members and attempt and is never reused.
Losses are not part of what is signed for the update, but they ride along so that the whole group reports one number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgpack
import numpy as np

from plnode.pipeline.ledger import Account, StepPlan
from wire.identity import PeerId

INDEX = np.dtype("<u4")
LOSS = np.dtype("<f8")


class AccountError(Exception):
    """Accounts that no round may be built on; the text names the member and the microbatches."""


@dataclass(frozen=True, slots=True)
class RoundTerms:
    """What every member of a round signs.  `members` ascend by peer id; `accounts` are in the same order."""

    run: bytes
    generation: int
    stage: int
    step: int
    attempt: int
    members: tuple[PeerId, ...]
    accounts: tuple[tuple[int, ...], ...]

    @property
    def round_id(self) -> bytes:
        """SHA-256 over run, generation, stage, step, attempt and members: the name of this round, never reused."""
        return hashlib.sha256(self._pack(with_accounts=False)).digest()

    @property
    def digest(self) -> bytes:
        """SHA-256 over the terms including the accounts: what the members sign."""
        return hashlib.sha256(self._pack(with_accounts=True)).digest()

    def _pack(self, *, with_accounts: bool) -> bytes:
        members = [m.raw for m in self.members]
        accounts = [list(a) for a in self.accounts] if with_accounts else []
        packed: bytes = msgpack.packb([self.run, self.generation, self.stage, self.step, self.attempt, members, accounts])
        return packed


class AccountBook:
    """The leader's view of the group's accounts for one step.

    An account only grows.  `missing` is what no member has done yet; the book is complete when nothing is missing.
    """

    def __init__(self, plan: StepPlan, members: Sequence[PeerId]) -> None:
        self._plan = plan
        self._members = tuple(members)
        self._accounts: dict[PeerId, Account] = {m: Account() for m in self._members}

    def report(self, member: PeerId, account: Account) -> None:
        """Take a member's account.  AccountError when it shrinks, leaves the set or overlaps another's."""
        if member not in self._accounts:
            raise AccountError(f"{member} is not a member of this group")
        have = set(account.losses)
        outside = sorted(i for i in have if not 0 <= i < self._plan.total)
        if outside:
            raise AccountError(f"{member} reports microbatches {outside} outside the set of step {self._plan.step}")
        vanished = sorted(set(self._accounts[member].losses) - have)
        if vanished:
            raise AccountError(f"{member} no longer reports microbatches {vanished} of step {self._plan.step}")
        for other, theirs in self._accounts.items():
            twice = sorted(have & set(theirs.losses)) if other != member else []
            if twice:
                raise AccountError(f"{member} and {other} both report microbatches {twice} of step {self._plan.step}")
        self._accounts[member] = account

    @property
    def missing(self) -> tuple[int, ...]:
        done = {i for a in self._accounts.values() for i in a.losses}
        return tuple(i for i in range(self._plan.total) if i not in done)

    def accounts(self) -> tuple[tuple[int, ...], ...]:
        return tuple(self._accounts[m].indices for m in self._members)

    def losses(self) -> Mapping[int, float]:
        return {i: loss for a in self._accounts.values() for i, loss in a.losses.items()}


def covers(plan: StepPlan, accounts: Sequence[Sequence[int]]) -> bool:
    """Whether the accounts are disjoint and make up the step's set exactly."""
    flat = sorted(i for account in accounts for i in account)
    return flat == list(range(plan.total))


def summed(losses: Mapping[int, float], indices: range) -> float:
    """Sum of the losses of `indices` in index order (float64), so that it does not depend on who did them."""
    total = 0.0
    for index in indices:
        total += losses[index]
    return total


def pack_account(account: Account) -> tuple[bytes, bytes]:
    """`(indices as u32, losses as f64)`, little-endian, in index order."""
    indices = account.indices
    return np.array(indices, INDEX).tobytes(), np.array([account.losses[i] for i in indices], LOSS).tobytes()


def unpack_account(indices: bytes, losses: bytes) -> Account:
    """Inverse of `pack_account`.  AccountError on lengths that do not fit, doubled indices or losses that are not finite."""
    if len(indices) % INDEX.itemsize or len(losses) % LOSS.itemsize or len(indices) * 2 != len(losses):
        raise AccountError(f"an account of {len(indices)} index bytes and {len(losses)} loss bytes does not fit together")
    numbers = [int(i) for i in np.frombuffer(indices, INDEX)]
    values = [float(v) for v in np.frombuffer(losses, LOSS)]
    if len(set(numbers)) != len(numbers):
        raise AccountError("an account names a microbatch twice")
    if not np.isfinite(values).all():
        bad = [i for i, v in zip(numbers, values, strict=True) if not np.isfinite(v)]
        raise AccountError(f"the loss of microbatches {bad} is not finite")
    return Account(dict(zip(numbers, values, strict=True)))
