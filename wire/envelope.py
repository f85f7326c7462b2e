"""Signed statements: what somebody who was not there will rely on.

A channel proves who speaks, but only to the one at its other end.  Peer records, seed lists, run manifests and stage claims are
passed on by third parties, so they carry their signer's signature and are forwarded byte for byte.

What goes wrong.  X's record is sent by Y as Y's; an old record returns after a newer one; a statement of one run or one purpose
is shown in another; it is valid for years; the parser of the payload is attacked with bytes that nobody signed; a signer tells
two groups two different things under one number.  Hence:

* The order of checks is fixed: size, form, signature, run, expiry; only then somebody parses the payload.
* The domain (the purpose) is signed, but not sent: the verifier says what it is looking for.
* There is one spelling: an envelope in another msgpack encoding of the same values is refused, so that nobody but the signer can
  make a second one out of it.  The received bytes are kept and forwarded, never encoded again.
* "Latest" statements (`latest.py`) are ordered by `seq`, never by anybody's clock.

    [1, signer(32), run(32), seq u64, not_after u64, payload bin, signature(64)]          msgpack, at most 64 KiB
    signed: "plw-signed/1" || u8 len(domain) || domain || signer || run || u64 seq || u64 not_after || u32 len(payload) || payload

`not_after` is Unix seconds: with 5 minutes' grace for contributors' clocks, and at most the domain's life ahead, so that a stolen
key's statements end.  One verification costs ~0.1 ms: one signature a statement, never per record, and bytes that were verified
before are known by their hash.

Source: the project's wire specification, section "Signed statements".
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from wire.address import Address, Network
from wire.errors import Code, LocalProtocolError, RemoteProtocolError, WireError
from wire.identity import ID_BYTES, SIGNATURE_BYTES, SIGNED, Identity, PeerId
from wire.latest import Distrusted, Equivocation, Latest, Verdict
from wire.limits import DEFAULT_LIMITS, Limits
from wire.messages import PeerRecord, decode, encode, pack, unpack
from wire.sequence import SequenceClock
from wire.statements import (
    DOMAINS,
    NO_RUN,
    PEER,
    RUN_BYTES,
    BadEnvelope,
    Domain,
    Expired,
    ForeignRun,
    Forged,
    Malformed,
    Statement,
    TooLongLived,
    WrongSigner,
    rules_of,
)

__all__ = [
    "DOMAINS",
    "NO_RUN",
    "BadEnvelope",
    "Distrusted",
    "Domain",
    "Equivocation",
    "Expired",
    "ForeignRun",
    "Forged",
    "Latest",
    "Malformed",
    "OpenedRecord",
    "SequenceClock",
    "Statement",
    "TooLongLived",
    "Verdict",
    "VerifiedCache",
    "WrongSigner",
    "open_envelope",
    "open_peer_record",
    "seal",
    "seal_peer_record",
]

VERSION = 1
U64_MAX = 2**64 - 1

_HEAD = struct.Struct(f">{ID_BYTES}s{RUN_BYTES}sQQI")


class VerifiedCache:
    """The hashes of envelopes whose signature was in order; least recently used ones are forgotten.  32 bytes each."""

    __slots__ = ("_capacity", "_hashes")

    def __init__(self, capacity: int = DEFAULT_LIMITS.verified_cache_max) -> None:
        self._capacity = capacity
        self._hashes: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._hashes)

    def knows(self, digest: bytes) -> bool:
        if digest not in self._hashes:
            return False
        self._hashes.move_to_end(digest)
        return True

    def add(self, digest: bytes) -> None:
        self._hashes[digest] = None
        if len(self._hashes) > self._capacity:
            self._hashes.popitem(last=False)


def _signed(domain: str, signer: bytes, run: bytes, seq: int, not_after: int, payload: bytes) -> bytes:
    """What the signature covers, after the prefix that `Identity` puts before it."""
    name = domain.encode()
    return bytes([len(name)]) + name + _HEAD.pack(signer, run, seq, not_after, len(payload)) + payload


def seal(identity: Identity, domain: str, payload: bytes, *, run: bytes = NO_RUN, seq: int, not_after: int) -> bytes:
    """A signed envelope.

    run: 32 bytes, zeros where the domain is runless.  seq: from `SequenceClock`.  not_after: Unix seconds, 0 = never, only where
    the domain allows it.  Raises LocalProtocolError for anything that a verifier would refuse (how far ahead it lies excepted).
    """
    rules = rules_of(domain)
    if len(run) != RUN_BYTES or (rules.runless and run != NO_RUN):
        raise LocalProtocolError(f"{domain}: the run field has 32 bytes" + (", all zero" if rules.runless else ""))
    if not 0 <= seq <= U64_MAX or not 0 <= not_after <= U64_MAX:
        raise LocalProtocolError(f"{domain}: seq {seq} or not_after {not_after} is no u64")
    if not_after == 0 and rules.life_s is not None:
        raise LocalProtocolError(f"{domain}: a statement of this kind must expire")
    signer = identity.peer_id.raw
    signature = identity.sign(SIGNED, _signed(domain, signer, run, seq, not_after, payload))
    raw = pack((VERSION, signer, run, seq, not_after, payload, signature))
    if len(raw) > rules.max_bytes:
        raise LocalProtocolError(f"{domain}: {len(raw)} bytes, at most {rules.max_bytes}", code=Code.TOO_LARGE)
    return raw


def _parse(data: bytes, domain: str, rules: Domain) -> tuple[Statement, bytes]:
    """(statement, signature) of bytes in the right form; nothing is verified yet."""
    if len(data) > rules.max_bytes:
        raise Malformed(f"{domain}: {len(data)} bytes, at most {rules.max_bytes}", code=Code.TOO_LARGE)
    try:
        items = unpack(data, rules.max_bytes)
    except RemoteProtocolError as error:
        raise Malformed(f"{domain}: {error.detail}") from None
    match items:
        case (_, bytes(signer), bytes(run), int(seq), int(not_after), bytes(payload), bytes(signature)):
            pass
        case _:
            raise Malformed(f"{domain}: not an envelope")
    if len(run) != RUN_BYTES or len(signature) != SIGNATURE_BYTES or seq < 0 or not_after < 0:
        raise Malformed(f"{domain}: a field of the envelope is not in order")
    # One comparison holds the version and the spelling: 1.0 and True equal 1, and 1 can be written in nine bytes.
    if pack((VERSION, signer, run, int(seq), int(not_after), payload, signature)) != data:
        raise Malformed(f"{domain}: another version, or not in the one spelling")
    try:
        return Statement(PeerId(signer), run, seq, not_after, payload, data), signature
    except ValueError as error:
        raise Malformed(f"{domain}: signer: {error}") from None


def open_envelope(
    data: bytes,
    domain: str,
    *,
    now_unix: float,
    run: bytes | None,
    verified: VerifiedCache | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> Statement:
    """The statement in `data`, verified for `domain`.

    now_unix: wall time in seconds, for the expiry only.  run: the run it must be about, None = any (the caller looks).  verified:
    remembers good signatures.  Raises BadEnvelope (Malformed, Forged, ForeignRun, Expired, TooLongLived), checked in this order.
    """
    rules = rules_of(domain)
    statement, signature = _parse(bytes(data), domain, rules)
    signer, not_after = statement.signer, statement.not_after

    digest = hashlib.sha256(domain.encode() + b"\x00" + statement.raw).digest()
    if verified is None or not verified.knows(digest):
        content = _signed(domain, signer.raw, statement.run, statement.seq, not_after, statement.payload)
        if not signer.verify(SIGNED, content, signature):
            raise Forged(f"{domain}: not signed by {signer} for this purpose")
        if verified is not None:
            verified.add(digest)

    if statement.run != NO_RUN if rules.runless else run is not None and statement.run != run:
        raise ForeignRun(f"{domain}: of run {statement.run.hex()[:16]}")
    if not_after == 0:
        if rules.life_s is not None:
            raise TooLongLived(f"{domain}: without an expiry")
    elif not_after + limits.expiry_grace_s < now_unix:
        raise Expired(f"{domain}: expired {now_unix - not_after:.0f} s ago")
    elif rules.life_s is not None and not_after > now_unix + rules.life_s + limits.expiry_grace_s:
        raise TooLongLived(f"{domain}: for {not_after - now_unix:.0f} s, at most {rules.life_s}")
    return statement


@dataclass(frozen=True, slots=True)
class OpenedRecord:
    """A peer record that was verified and parsed.  `addresses` are the record's, canonical and classified, none judged yet."""

    statement: Statement
    record: PeerRecord
    addresses: tuple[Address, ...]

    @property
    def peer_id(self) -> PeerId:
        return self.statement.signer


def seal_peer_record(
    identity: Identity, record: PeerRecord, *, run: bytes, seq: int, now_unix: float, limits: Limits = DEFAULT_LIMITS
) -> bytes:
    """The signed record, valid for its whole life from now.  Raises LocalProtocolError: too large, or not encodable."""
    not_after = int(now_unix + limits.peer_record_life_s)
    return seal(identity, PEER, encode(record), run=run, seq=seq, not_after=not_after)


def open_peer_record(
    data: bytes,
    *,
    now_unix: float,
    run: bytes | None,
    signer: PeerId | None = None,
    verified: VerifiedCache | None = None,
    limits: Limits = DEFAULT_LIMITS,
    treat_as_global: Sequence[Network] = (),
) -> OpenedRecord:
    """A verified peer record.  `signer`: who it must be from (None: whoever signed it).

    Raises BadEnvelope as `open_envelope` does, WrongSigner, and Malformed for an address that is not canonical or names another.
    """
    statement = open_envelope(data, PEER, now_unix=now_unix, run=run, verified=verified, limits=limits)
    if signer is not None and statement.signer != signer:
        raise WrongSigner(f"the record of {statement.signer.short} came as that of {signer.short}")
    try:
        record = decode(statement.payload, PeerRecord, max_bytes=limits.peer_record_max_bytes)
        addresses = tuple(Address.parse_received(text, treat_as_global=treat_as_global) for text in record.addresses)
    except (WireError, ValueError) as error:
        raise Malformed(f"{PEER}: {error.detail if isinstance(error, WireError) else error}") from None
    for address in addresses:
        if address.peer_id not in (None, statement.signer):
            raise Malformed(f"{PEER}: {address} names another peer than the signer")
    return OpenedRecord(statement, record, addresses)
