"""Stage claims: what each node says of itself, signed, and what this node knows of the others.

Sans-IO.  A claim is a signed statement (wire.md, section 4): the greater sequence number wins, a claim of another run or one
that lied about its signer is refused before it is parsed.  Two claims with one number and different bodies are kept as proof
and their signer is no longer believed; the envelope store does that, here it shows as a signer without a claim.

What a claim says is a hint for assignment and screens.  Nothing that must be exact rests on it: the roster and the accounts are
agreed by signatures of their own.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated

from wire.envelope import BadEnvelope, Equivocation, Latest, open_envelope
from wire.identity import PeerId
from wire.messages import Count, Range, Size, decode, encode, message

DOMAIN = "plw/stage/1"
LIFE_S = 1800
"""Half of the longest life that the statement may have; renewed at half of this."""

U32 = Annotated[int, Range(0, 2**32 - 1)]
U64 = Annotated[int, Range(0, 2**63 - 1)]


class NodeState(IntEnum):
    """What a node is doing, as it tells the others."""

    STARTING = 0  # has no stage yet
    READY = 1  # waits for a generation to begin
    ACTIVE = 2  # trains in a generation
    FINISHED = 3  # the run is complete; this node may leave without being missed


@message(64)
@dataclass(frozen=True, slots=True)
class StageClaim:
    """One node's claim.  `stage` is None before assignment; `snapshots` are the steps it can restart its stage from;
    `loss_micronats` is the last step's mean loss where this node knows it (last stage), in millionths of a nat a token."""

    boot_id: Annotated[bytes, Size(8)]
    name: Annotated[str, Size(max=64)]
    state: Annotated[int, Range(0, 3)]
    stage: U32 | None
    generation: U32
    step: U32
    snapshots: Annotated[tuple[U32, ...], Count(8)]
    memory_bytes: U64
    microbatches_per_hour: U32
    loss_micronats: U64 | None = None


@dataclass(frozen=True, slots=True)
class Claimed:
    """A verified claim and the bytes to forward it by."""

    peer: PeerId
    seq: int
    not_after: int
    claim: StageClaim
    raw: bytes


class ClaimTable:
    """The newest believable claim of every node, own one included."""

    def __init__(self, run: bytes, capacity: int = 4096) -> None:
        self._run = run
        self._capacity = capacity
        self._latest = Latest()
        self._claims: dict[PeerId, Claimed] = {}

    def accept(self, raw: bytes, now_unix: float) -> Claimed | None:
        """Verify and keep a claim.  Returns it when it is news, None when something as new is known.

        Raises BadEnvelope (bad signature, run, expiry, an equivocation, a foreign body) - the sender's or signer's fault.
        """
        statement = open_envelope(raw, DOMAIN, now_unix=now_unix, run=self._run)
        known = self._claims.get(statement.signer)
        if known is not None and known.raw == raw:
            return None
        try:
            if not self._latest.accept(statement, DOMAIN):
                return None
        except Equivocation:
            self._claims.pop(statement.signer, None)
            raise
        claim = decode(statement.payload, StageClaim)
        if known is None and len(self._claims) >= self._capacity:
            self.expire(now_unix)
            if len(self._claims) >= self._capacity:
                return None
        claimed = Claimed(statement.signer, statement.seq, statement.not_after, claim, raw)
        self._claims[statement.signer] = claimed
        return claimed

    @property
    def full(self) -> bool:
        return len(self._claims) >= self._capacity

    def drop_all_but(self, peers: Container[PeerId]) -> None:
        """Make room: claims of nodes that are not connected are worth least, and anybody can make thousands of them."""
        self._claims = {peer: claimed for peer, claimed in self._claims.items() if peer in peers}

    def expire(self, now_unix: float) -> None:
        for peer in [p for p, c in self._claims.items() if c.not_after and c.not_after + 300 < now_unix]:
            del self._claims[peer]

    def get(self, peer: PeerId) -> StageClaim | None:
        claimed = self._claims.get(peer)
        return claimed.claim if claimed else None

    def seq_of(self, peer: PeerId) -> int:
        """The sequence number of its newest claim, -1 without one."""
        claimed = self._claims.get(peer)
        return claimed.seq if claimed else -1

    def all(self) -> tuple[Claimed, ...]:
        """Every claim, ordered by peer id."""
        return tuple(self._claims[p] for p in sorted(self._claims))


def pack(claim: StageClaim) -> bytes:
    return encode(claim)


__all__ = ["DOMAIN", "LIFE_S", "BadEnvelope", "ClaimTable", "Claimed", "NodeState", "StageClaim", "pack"]
