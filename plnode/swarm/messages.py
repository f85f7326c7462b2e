"""What nodes of a run say to each other about membership and generations (type numbers 64..79; 80..95 are the collectives')."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from plnode.swarm.claims import U32
from wire.messages import Count, Size, message

CLAIMS = "claims/1"
MUSTER = "muster/1"
ABORT = "abort/1"

# A control message holds 64 KiB; a claim's envelope is about 300 bytes and must never be more than 1 KiB.
MOST_CLAIMS = 56


@message(65)
@dataclass(frozen=True, slots=True)
class Claims:
    """Signed stage claims as they were received; the answer holds those that the asker may lack."""

    envelopes: Annotated[tuple[Annotated[bytes, Size(max=1024)], ...], Count(MOST_CLAIMS)]


@message(70)
@dataclass(frozen=True, slots=True)
class RosterEntry:
    peer: Annotated[bytes, Size(32)]
    stage: U32


@message(71)
@dataclass(frozen=True, slots=True)
class Propose:
    """The lowest id among the ready proposes a generation: who takes part at which stage, from which step."""

    generation: U32
    step: U32
    roster: Annotated[tuple[RosterEntry, ...], Count(900)]


@message(72)
@dataclass(frozen=True, slots=True)
class Vote:
    """A member's signature over the roster's digest, or empty with the reason why not."""

    signature: Annotated[bytes, Size(max=64)]
    reason: Annotated[str, Size(max=512)] = ""


@message(73)
@dataclass(frozen=True, slots=True)
class Commit:
    """All signatures, in roster order, 64 bytes each: the generation begins."""

    generation: U32
    digest: Annotated[bytes, Size(32)]
    signatures: Annotated[bytes, Size(max=60_000)]


@message(74)
@dataclass(frozen=True, slots=True)
class Abort:
    """The generation is broken, and why.  `culprit`: the peer id at fault, empty if unknown."""

    generation: U32
    step: U32
    reason: Annotated[str, Size(max=1024)]
    culprit: Annotated[bytes, Size(max=32)] = b""


@message(75)
@dataclass(frozen=True, slots=True)
class Answer:
    """Taken (`ok`), or why not."""

    ok: bool
    reason: Annotated[str, Size(max=512)] = ""
