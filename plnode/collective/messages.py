"""What the replicas of a stage say to each other before a round (type numbers 80..95)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from plnode.swarm.claims import U32
from wire.messages import Count, Size, message

ACCOUNT = "account/1"
BALLOT = "ballot/1"
ROUND_COMMIT = "round-commit/1"
REDUCE = "reduce/1"

# Indices are u32 and losses f64: 3,000 microbatches a step fit one control message of 64 KiB with room to spare.
MOST_MICROBATCHES = 3000
Indices = Annotated[bytes, Size(max=4 * MOST_MICROBATCHES)]
Losses = Annotated[bytes, Size(max=8 * MOST_MICROBATCHES)]


@message(80)
@dataclass(frozen=True, slots=True)
class AccountReport:
    """A member tells the leader what its account of `step` holds now (accounts.pack_account)."""

    generation: U32
    step: U32
    indices: Indices
    losses: Losses


@message(81)
@dataclass(frozen=True, slots=True)
class Ballot:
    """The leader asks for a signature over the round's terms; accounts in rank order."""

    generation: U32
    step: U32
    attempt: U32
    accounts: Annotated[tuple[Indices, ...], Count(64)]


@message(82)
@dataclass(frozen=True, slots=True)
class RoundCommit:
    """All signatures in rank order, and the loss of every index of the set (f64, index order; empty where a stage has none)."""

    generation: U32
    step: U32
    attempt: U32
    digest: Annotated[bytes, Size(32)]
    signatures: Annotated[bytes, Size(max=64 * 64)]
    losses: Losses
