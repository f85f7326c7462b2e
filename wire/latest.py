"""The newest statement of each signer.

Statements are ordered by `seq`, which the signer takes from `SequenceClock` and a receiver never reads as time.  What goes wrong:

* An old record, replayed, hides a newer one.  Only a greater `seq` is accepted.
* A signer tells two groups two different things under one number.  Both are kept as proof, which anybody can check, and nothing
  that this signer says is believed any more.
* A flood of signers fills the store.  It is bounded; what is forgotten can be replayed until it expires, and no longer.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum, auto

from wire.errors import Code, LocalProtocolError
from wire.identity import PeerId
from wire.limits import DEFAULT_LIMITS
from wire.statements import BadEnvelope, Statement, rules_of


class Equivocation(BadEnvelope):
    """Two statements of one signer, purpose and number that say different things: `proof`, forwardable."""

    default_code = Code.PROTOCOL

    def __init__(self, first: Statement, second: Statement) -> None:
        self.proof = (first, second)
        super().__init__(f"{first.signer} signed two different statements with number {first.seq}")


class Distrusted(BadEnvelope):
    """A statement by a signer that was caught signing two different ones under one number."""

    default_code = Code.PROTOCOL


class Verdict(Enum):
    """How a statement stands to the newest that is known."""

    NEWER = auto()
    SAME = auto()
    OLDER = auto()
    CONTRADICTS = auto()


_Key = tuple[PeerId, str, bytes, bytes]


class Latest:
    """The newest statement per (signer, domain, run, subject).

    capacity: statements kept; the least recently renewed is forgotten first, and could then be replayed until it expires.
    """

    def __init__(self, capacity: int = DEFAULT_LIMITS.peer_book_max) -> None:
        self._capacity = capacity
        self._known: OrderedDict[_Key, Statement] = OrderedDict()
        self._proofs: OrderedDict[PeerId, tuple[Statement, Statement]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def judge(self, statement: Statement, domain: str, subject: bytes = b"") -> Verdict:
        """How `statement`, already verified for `domain`, stands; changes nothing."""
        known = self._known.get((statement.signer, domain, statement.run, subject))
        if known is None or statement.seq > known.seq:
            return Verdict.NEWER
        if statement.seq < known.seq:
            return Verdict.OLDER
        return Verdict.SAME if statement.payload == known.payload else Verdict.CONTRADICTS

    def accept(self, statement: Statement, domain: str, subject: bytes = b"") -> bool:
        """Keep it if it is newer; True = it is now the newest, False = as new a one is known.

        Raises Equivocation (once a signer, with the proof), then Distrusted for everything of that signer; LocalProtocolError
        for a domain in which all statements count.
        """
        if not rules_of(domain).latest:
            raise LocalProtocolError(f"{domain} has no newest statement")
        signer = statement.signer
        if signer in self._proofs:
            raise Distrusted(f"{signer} has signed contradicting statements")
        verdict = self.judge(statement, domain, subject)
        key = (signer, domain, statement.run, subject)
        if verdict is Verdict.CONTRADICTS:
            proof = (self._known[key], statement)
            self._proofs[signer] = proof
            if len(self._proofs) > self._capacity:
                self._proofs.popitem(last=False)
            for mine in [other for other in self._known if other[0] == signer]:
                del self._known[mine]
            raise Equivocation(*proof)
        if verdict is not Verdict.NEWER:
            return False
        self._known[key] = statement
        self._known.move_to_end(key)
        if len(self._known) > self._capacity:
            self._known.popitem(last=False)
        return True

    def get(self, signer: PeerId, domain: str, run: bytes, subject: bytes = b"") -> Statement | None:
        return self._known.get((signer, domain, run, subject))

    def forget(self, signer: PeerId, domain: str, run: bytes, subject: bytes = b"") -> None:
        """Drop a statement, e.g. an expired one; unknown ones are ignored."""
        self._known.pop((signer, domain, run, subject), None)

    def proof(self, signer: PeerId) -> tuple[Statement, Statement] | None:
        """The two contradicting statements of a signer that is no longer trusted."""
        return self._proofs.get(signer)
