"""Vouchers: a relay's word that somebody can be reached through it.

Whoever wants to reach B reads in B's record "through relay R".  Without R's own signature anybody could send the swarm's calls
to a relay that never heard of B, or name a victim as relay.  So R signs who holds a place, for what and until when; the voucher
stands in B's record, a caller checks it before it dials R, and R wants to see it back: then R is not asked for peers at random.

A place lives in the memory of one process and on one connection; a voucher is only a piece of paper.  So R checks its own table
as well (`reservations.py`), and a voucher of an earlier process of R is refused by the boot id in it, with a reason of its own:
"this relay has started anew" means "look at the target's record again", not "give up".

Times.  The expiry is R's wall clock.  Others allow the usual grace for theirs; R itself, which knows its clock, passes
`own_clock=True` and allows none.

Order of checks: size, form, signature, run, expiry (`envelope.py`), then signer, payload, peer, boot id, class.

Source: the project's wire specification, sections "Signed statements" and "Relay".
"""

from __future__ import annotations

from dataclasses import dataclass

from wire.envelope import VerifiedCache, open_envelope, seal
from wire.errors import Code, RemoteProtocolError
from wire.identity import Identity, PeerId
from wire.limits import DEFAULT_LIMITS, Limits
from wire.messages import decode, encode
from wire.relaymessages import Voucher
from wire.statements import VOUCHER, BadEnvelope, Expired, Malformed, Statement, WrongSigner

__all__ = ["NotCovered", "OpenedVoucher", "OtherBoot", "open_voucher", "seal_voucher"]


class OtherBoot(BadEnvelope):
    """Of an earlier process of the relay: the places of that one are gone."""

    default_code = Code.SUPERSEDED


class NotCovered(BadEnvelope):
    """In order, but for another peer, or for a lower class than the one asked for."""

    default_code = Code.NO_RESERVATION


@dataclass(frozen=True, slots=True)
class OpenedVoucher:
    """A voucher that was verified and parsed; `relay` holds a place for `peer`."""

    statement: Statement
    voucher: Voucher
    peer: PeerId

    @property
    def relay(self) -> PeerId:
        return self.statement.signer

    @property
    def expires_unix(self) -> int:
        return self.statement.not_after


def seal_voucher(identity: Identity, voucher: Voucher, *, run: bytes, seq: int, now_unix: float, limits: Limits = DEFAULT_LIMITS) -> bytes:
    """The relay's signed voucher, valid for one reservation's life from now.  Raises LocalProtocolError: not encodable."""
    not_after = int(now_unix + limits.relay_reservation_life_s)
    return seal(identity, VOUCHER, encode(voucher), run=run, seq=seq, not_after=not_after)


def open_voucher(
    data: bytes,
    *,
    now_unix: float,
    run: bytes | None,
    relay: PeerId,
    peer: PeerId,
    cls: int = 0,
    boot_id: bytes | None = None,
    own_clock: bool = False,
    verified: VerifiedCache | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> OpenedVoucher:
    """A voucher by `relay` that says that `peer` can be reached in class `cls` (0: any).

    boot_id: the relay's present one, None if it is not known.  own_clock: `now_unix` is the clock that the expiry was written by.
    Raises BadEnvelope as `open_envelope` does (Malformed, Forged, ForeignRun, Expired, TooLongLived), then WrongSigner, Malformed
    for the payload, NotCovered, OtherBoot; each with its code.
    """
    statement = open_envelope(data, VOUCHER, now_unix=now_unix, run=run, verified=verified, limits=limits)
    if own_clock and statement.not_after <= now_unix:
        raise Expired(f"{VOUCHER}: expired {now_unix - statement.not_after:.0f} s ago")
    if statement.signer != relay:
        raise WrongSigner(f"the voucher of {statement.signer.short} came as that of {relay.short}")
    try:
        voucher = decode(statement.payload, Voucher, max_bytes=limits.voucher_max_bytes)
        subject = PeerId(voucher.peer)
    except RemoteProtocolError as error:
        raise Malformed(f"{VOUCHER}: {error.detail}") from None
    except ValueError as error:
        raise Malformed(f"{VOUCHER}: {error}") from None
    if subject != peer:
        raise NotCovered(f"a voucher for {subject.short}, not for {peer.short}")
    if boot_id is not None and voucher.boot_id != boot_id:
        raise OtherBoot("the relay has started anew since it gave this voucher")
    if voucher.cls < cls:
        raise NotCovered(f"a voucher of class {voucher.cls}, asked for {cls}")
    return OpenedVoucher(statement, voucher, subject)
