"""What joiners and donors of live state say to each other (type numbers 100..107).

Chunks do not travel in messages: a byte stream of protocol ``state-bytes/1`` is opened with a `ChunkAsk` as its meta, and the answer
is the bytes and an end, or a reset with the reason.  Its class is 4, the lowest: on one connection, training has 16 times its weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from plnode.swarm.claims import U32
from wire.messages import Count, Range, Size, message

STATE = "state/1"
STATE_BYTES = "state-bytes/1"
UPDATES = "updates/1"
STATE_SKETCH = "state-sketch/1"

U63 = Annotated[int, Range(0, 2**63 - 1)]
Root = Annotated[bytes, Size(32)]
Reason = Annotated[str, Size(max=512)]
BACKGROUND = 4  # the lowest class of wire/scheduler.py
# An index in `ChunkAsk` that means the table of hashes; as a chunk it would lie 4 PiB behind the start.
HASHES = 2**32 - 1
# Statements that a donor keeps at once: more cuts than this are never alive.
MOST_CUTS = 4
# Vectors in one answer: a follower further behind takes a fresh cut or asks again.
MOST_UPDATES = 64
# 200 tensors of 64 fp32 a page.
SKETCH_BYTES = 56_000


@message(100)
@dataclass(frozen=True, slots=True)
class StateAsk:
    """What do you hold of `stage`?  `cut_at` > 0: make a copy at that step boundary if you have none, and answer then."""

    stage: U32
    cut_at: U63 = 0


@message(101)
@dataclass(frozen=True, slots=True)
class StateOffer:
    """Signed roots (domain plw/snapshot/1) of what can be fetched, the step that is open here, or why there is nothing."""

    step: U63
    envelopes: Annotated[tuple[Annotated[bytes, Size(max=1024)], ...], Count(MOST_CUTS)]
    reason: Reason = ""
    holds: bool = True
    """Whether this stage is here and may be given to the asker at all, now or later."""


@message(102)
@dataclass(frozen=True, slots=True)
class ChunkAsk:
    """Meta of a byte stream: chunk `index` of what has this root, or its table of hashes (`HASHES`)."""

    root: Root
    index: U32


@message(103)
@dataclass(frozen=True, slots=True)
class UpdateAsk:
    """Which reduced vectors of `stage` do you hold from `step` on?  The asker needs none before it (it is the watermark)."""

    stage: U32
    step: U63
    done: bool = False
    """Nothing more is wanted."""


@message(104)
@dataclass(frozen=True, slots=True)
class UpdateRoot:
    """One reduced vector, cut into chunks like a state."""

    step: U63
    size_bytes: U63
    chunk_bytes: U32
    root: Root


@message(105)
@dataclass(frozen=True, slots=True)
class UpdateOffer:
    """Vectors from the asked step on, without a gap; `at` is the donor's open step.  `lost`: some that are needed are gone."""

    at: U63
    updates: Annotated[tuple[UpdateRoot, ...], Count(MOST_UPDATES)]
    lost: bool = False
    reason: Reason = ""


@message(106)
@dataclass(frozen=True, slots=True)
class SketchAsk:
    """Hash and sketch of the state at `step`, seeded by a round id; `page` counts pages of `SKETCH_BYTES`."""

    stage: U32
    step: U63
    seed: Annotated[bytes, Size(32)]
    page: U32 = 0


@message(107)
@dataclass(frozen=True, slots=True)
class SketchAnswer:
    """`root` is that of a cut of that step; the sketch's bytes follow in `pages` pages."""

    root: Annotated[bytes, Size(max=32)]
    pages: U32
    sketch: Annotated[bytes, Size(max=SKETCH_BYTES)]
    reason: Reason = ""
