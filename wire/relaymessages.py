"""The messages of the relay, field by field: how a place is asked for, a circuit opened, and what the relay tells afterwards.

`relay/1` is a message stream that stays open: Reserve, answered by Reserved, again before the place runs out.  `circuit/1`
(from the caller to the relay) and `circuit-in/1` (from the relay to the target) are byte streams whose OPEN carries CircuitAsk
and CircuitIn as meta; what flows through them afterwards is the two ends' own handshake, of which the relay sees ciphertext
only.  `relay-note/1` is a message stream of RelayNotes, from the relay.
A Voucher is the payload of a signed statement and stands in a peer record (`vouchers.py`).

Classes and purposes are plain small numbers here, not ranges: one that was invented later is refused by the relay with a code,
and not treated as a violation.  Numbers 40..47 of the wire's own (`messages.py`) are the relay's.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated

from wire.limits import DEFAULT_LIMITS
from wire.schema import Range, Size, message

U8 = Annotated[int, Range(0, 2**8 - 1)]
U16 = Annotated[int, Range(0, 2**16 - 1)]
U32 = Annotated[int, Range(0, 2**32 - 1)]
U64 = Annotated[int, Range(0, 2**64 - 1)]
PeerBytes = Annotated[bytes, Size(32)]
VoucherBytes = Annotated[bytes, Size(max=DEFAULT_LIMITS.voucher_max_bytes)]

BOOT_ID_BYTES = 8
SEEN_MAX_BYTES = 45  # the longest text of an IPv6 address


class RelayClass(IntEnum):
    """What a circuit is for.  A place of a class holds for the classes below it too."""

    SIGNAL = 1
    """For anyone: slow, short and small, enough to find out how to connect directly."""
    BULK = 2
    """Between members of the relay's run: no end, a fair share of the relay's rate."""


class Purpose(IntEnum):
    """Which of the connections of a pair a circuit carries."""

    CONTROL = 0
    LANE = 1


class Note(IntEnum):
    """What a RelayNote says."""

    THROTTLED = 1
    """Once a circuit: more wanted to pass than its share."""
    ENDED = 2


@message(40, extensible=True)
@dataclass(frozen=True, slots=True)
class Reserve:
    """Client to relay: keep a place for me, as long as this connection lives."""

    cls: U8
    """`RelayClass`."""


@message(41, extensible=True)
@dataclass(frozen=True, slots=True)
class Reserved:
    """Relay to client: OK, or why not and when to ask again."""

    code: U16
    """`errors.Code`."""
    cls: U8
    millis: U32
    """How long the place is held from now; 0 if it is not."""
    rate: U64
    """Bytes per second that a circuit to this place can expect now."""
    voucher: VoucherBytes
    """The sealed Voucher for the client's peer record; empty if there is no place."""
    retry_ms: U32 = 0


@message(42, extensible=True)
@dataclass(frozen=True, slots=True)
class CircuitAsk:
    """Meta of the OPEN of `circuit/1`: connect me to `target`."""

    target: PeerBytes
    cls: U8
    purpose: U8
    """`Purpose`."""
    voucher: VoucherBytes
    """As it stands in the target's record."""


@message(43, extensible=True)
@dataclass(frozen=True, slots=True)
class CircuitIn:
    """Meta of the OPEN of `circuit-in/1`: `source` would like to connect to you.  It proves itself in its handshake only."""

    source: PeerBytes
    cls: U8
    purpose: U8
    seen: Annotated[str, Size(max=SEEN_MAX_BYTES)] = ""
    """The host as which the relay sees the source, "" if it does not tell."""


@message(44, extensible=True)
@dataclass(frozen=True, slots=True)
class RelayNote:
    """Relay to both ends of a circuit."""

    kind: U8
    """`Note`; an unknown one is ignored."""
    peer: PeerBytes
    """The other end of the circuit."""
    up: U64
    """Bytes from the end that is told to the other, so far."""
    down: U64
    rate: U64
    """Bytes per second that this pair can expect now."""


@message(45, extensible=True)
@dataclass(frozen=True, slots=True)
class Voucher:
    """Payload of `plw/voucher/1`: its signer, a relay, holds a place for `peer` until the statement expires."""

    peer: PeerBytes
    cls: U8
    rate: U64
    boot_id: Annotated[bytes, Size(BOOT_ID_BYTES)]
    """Of the relay's process: places end with it, and so do their vouchers."""
