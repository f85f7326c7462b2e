"""Why a relay says no.

A caller that is refused has to know what to do: look the target's record up again, come back in a while, take another relay, or
not ask like this at all.  So each rule of the relay has a name here, one code on the wire and one sentence, and code that
refuses can only name a rule.  The five of NAT-5 (never reserved, expired, gone, chained, of an earlier process) differ in their
codes; the last is `vouchers.OtherBoot`, since a voucher alone shows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from wire.errors import Code

__all__ = ["CODES", "Refusal", "Why"]


class Why(StrEnum):
    """Which rule refused; the text is what a person reads."""

    STOPPING = "this relay is about to stop"
    CHAIN = "relays are not chained: ask over a direct connection"
    SELF = "source and target are one"
    CLASS = "no such class or purpose"
    NOT_MEMBER = "bulk is relayed between members of this relay's run only"
    NO_BULK = "this relay gives no bulk"
    RATE = "reservations are asked for too often"
    PLACES = "all places are taken"
    NETWORK = "all places for this network are taken"
    NO_VOUCHER = "no valid voucher of the target was shown"
    NEVER = "the target holds no place here"
    EXPIRED = "the target's place has expired"
    GONE = "the target's connection has just ended"
    LOWER = "the target's place is of a lower class"
    SOURCE_FULL = "the source has too many circuits"
    TARGET_FULL = "the target has too many circuits"
    PAIR_FULL = "the pair has too many circuits"
    SHARE = "one more pair would leave all too little"
    CLOSED = "the circuit is closed"
    BYTES = "a signal circuit has carried all that it may"
    TIME = "a signal circuit has stood as long as it may"


CODES: dict[Why, Code] = {
    Why.STOPPING: Code.SHUTDOWN,
    Why.CHAIN: Code.PROTOCOL,
    Why.SELF: Code.SELF,
    Why.CLASS: Code.PROTOCOL_UNKNOWN,
    Why.NOT_MEMBER: Code.NOT_MEMBER,
    Why.NO_BULK: Code.RELAY_LIMIT,
    Why.RATE: Code.RATE_LIMITED,
    Why.PLACES: Code.RELAY_LIMIT,
    Why.NETWORK: Code.RESOURCE_LIMIT,
    Why.NO_VOUCHER: Code.NO_RESERVATION,
    Why.NEVER: Code.NO_RESERVATION,
    Why.EXPIRED: Code.STALE,
    Why.GONE: Code.REFUSED,
    Why.LOWER: Code.NO_RESERVATION,
    Why.SOURCE_FULL: Code.RESOURCE_LIMIT,
    Why.TARGET_FULL: Code.RESOURCE_LIMIT,
    Why.PAIR_FULL: Code.RESOURCE_LIMIT,
    Why.SHARE: Code.RELAY_LIMIT,
    Why.CLOSED: Code.CANCELLED,
    Why.BYTES: Code.RELAY_LIMIT,
    Why.TIME: Code.TIMEOUT,
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """No, by which rule.  `retry_s`: when asking again makes sense, 0 if it does not, or nobody knows."""

    why: Why
    retry_s: float = 0.0
    detail: str = ""

    @property
    def code(self) -> Code:
        return CODES[self.why]

    def __str__(self) -> str:
        return f"{self.why.value}{': ' if self.detail else ''}{self.detail}"
