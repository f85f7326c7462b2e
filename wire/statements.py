"""What can be signed for third parties, for how long, and why a statement is not believed.

The table of domains is the protocol: a new kind of statement is a new row, and code that seals or opens one can only name a row.
`envelope.py` turns statements into bytes and back, `latest.py` keeps the newest ones.

Source: the project's wire specification, section "Signed statements".
"""

from __future__ import annotations

from dataclasses import dataclass

from wire.errors import Code, LocalProtocolError, WireError, printable
from wire.identity import PeerId
from wire.limits import DEFAULT_LIMITS

RUN_BYTES = 32
NO_RUN = bytes(RUN_BYTES)
DAY_S = 86_400

@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """What a purpose allows.

    life_s: how far ahead `not_after` may lie; None = it may be absent (0).  latest: only the newest of a signer counts.
    runless: the run field is zero, whatever run it is about.
    """

    life_s: int | None
    max_bytes: int = DEFAULT_LIMITS.envelope_max_bytes
    latest: bool = False
    runless: bool = False


PEER = "plw/peer/1"
SEEDS = "plw/seeds/1"
MANIFEST = "plw/manifest/1"
VOUCHER = "plw/voucher/1"
REACH = "plw/reach/1"

DOMAINS: dict[str, Domain] = {
    PEER: Domain(life_s=int(DEFAULT_LIMITS.peer_record_life_s), max_bytes=DEFAULT_LIMITS.peer_record_max_bytes, latest=True),
    SEEDS: Domain(life_s=90 * DAY_S, latest=True),
    MANIFEST: Domain(life_s=None, runless=True),
    "plw/member/1": Domain(life_s=30 * DAY_S, latest=True),  # a subject each
    "plw/stage/1": Domain(life_s=3600, latest=True),
    "plw/receipt/1": Domain(life_s=None),
    "plw/snapshot/1": Domain(life_s=None),
    VOUCHER: Domain(life_s=int(DEFAULT_LIMITS.relay_reservation_life_s), max_bytes=DEFAULT_LIMITS.voucher_max_bytes),
    REACH: Domain(  # a subject each
        life_s=int(DEFAULT_LIMITS.reach_verdict_life_s), max_bytes=DEFAULT_LIMITS.reach_verdict_max_bytes, latest=True
    ),
}


class BadEnvelope(WireError):
    """A statement that is not to be believed; the class says for which reason."""

    default_code = Code.PROTOCOL


class Malformed(BadEnvelope):
    """Not an envelope, too large, not in the one spelling, or a payload that is not what the domain holds."""


class Forged(BadEnvelope):
    """The signature is not the signer's over these bytes and this domain."""

    default_code = Code.BAD_SIGNATURE


class ForeignRun(BadEnvelope):
    """A statement about another run."""

    default_code = Code.RUN_MISMATCH


class Expired(BadEnvelope):
    """`not_after` is more than the grace ago."""

    default_code = Code.STALE


class TooLongLived(BadEnvelope):
    """`not_after` is absent, or further ahead than the domain allows."""


class WrongSigner(BadEnvelope):
    """A statement in order, by somebody else than it is said to be from."""

    default_code = Code.PEER_MISMATCH


@dataclass(frozen=True, slots=True)
class Statement:
    """A verified envelope.  `payload` is signed, but not yet parsed; `raw` is what is stored and forwarded."""

    signer: PeerId
    run: bytes
    seq: int
    not_after: int
    payload: bytes
    raw: bytes


def rules_of(domain: str) -> Domain:
    """The row of a domain.  Raises LocalProtocolError: a verifier names its domain itself, so an unknown one is our mistake."""
    rules = DOMAINS.get(domain)
    if rules is None:
        raise LocalProtocolError(f"{printable(domain)} is not a domain of signed statements")
    return rules
