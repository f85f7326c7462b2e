"""The messages of `reach/1`: try to dial me, and what came of it.

A conversation on one message stream: ReachAsk; perhaps ReachMore, answered by that many bytes of padding; ReachAnswer.  The dial-back
itself is no session: see `wire/net/reach.py`.  Numbers 52..55 of the wire's own (`messages.py`) belong to this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from wire.limits import DEFAULT_LIMITS as _L
from wire.schema import Count, Range, Size, message

U16 = Annotated[int, Range(0, 2**16 - 1)]
U32 = Annotated[int, Range(0, 2**32 - 1)]
AddressText = Annotated[str, Size(max=_L.address_max_bytes)]
Nonce = Annotated[bytes, Size(16)]


@message(52, extensible=True)
@dataclass(frozen=True, slots=True)
class ReachAsk:
    """Dial the first of these that you may, and say `nonce` there."""

    addresses: Annotated[tuple[AddressText, ...], Count(_L.reach_addresses_max)]
    nonce: Nonce


@message(53, extensible=True)
@dataclass(frozen=True, slots=True)
class ReachMore:
    """That address is not the one you come from: send so many bytes first, so that nobody is dialled for free."""

    bytes: U32


@message(54, extensible=True)
@dataclass(frozen=True, slots=True)
class ReachVerdict:
    """Payload of `plw/reach/1`: whether its signer could dial `address` and found `subject` there."""

    subject: Annotated[bytes, Size(32)]
    address: AddressText
    ok: bool
    cause: Annotated[str, Size(max=128)] = ""
    """In words, for people only."""


@message(55, extensible=True)
@dataclass(frozen=True, slots=True)
class ReachAnswer:
    """The sealed verdict with code OK, or why there is none and when to ask again."""

    code: U16
    verdict: Annotated[bytes, Size(max=_L.reach_verdict_max_bytes)] = b""
    retry_ms: U32 = 0
