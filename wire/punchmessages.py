"""The messages of `punch/1`, a message stream through the circuit of the two who want to meet.

From the side that the circuit came in to: Punch, Go.  From the other: Punch.  The same nonce in both; it also opens the two ends of
the hole (`wire/net/punch.py`).  Numbers 56 and 57 of the wire's own (`messages.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from wire.limits import DEFAULT_LIMITS as _L
from wire.schema import Count, Size, message

NONCE_BYTES = 16


@message(56, extensible=True)
@dataclass(frozen=True, slots=True)
class Punch:
    """Where I can be dialled at the right moment, best first."""

    candidates: Annotated[tuple[Annotated[str, Size(max=_L.address_max_bytes)], ...], Count(_L.punch_candidates_max)]
    nonce: Annotated[bytes, Size(NONCE_BYTES)]


@message(57, extensible=True)
@dataclass(frozen=True, slots=True)
class Go:
    """Dial now; I do so in half a round trip."""
