"""The words of failure detection: what may be decided about a member, what has to be done for it, and what comes back.

Apart from the detector (suspicion.py), because those who act on verdicts need the words and not the method.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum

from wire.identity import PeerId


class Standing(Enum):
    ALIVE = "alive"
    SUSPECT = "suspect"
    UNREACHABLE_FROM_HERE = "unreachable from here"
    DEAD = "dead"


class Failure(Enum):
    """How our own ping failed."""

    SILENT = "it does not answer"
    REFUSED = "its machine refuses the connection: the process is gone"
    TURNED_AWAY = "it turns this node away"


class Seen(IntEnum):
    """A helper's answer; the numbers are the wire's."""

    CONNECTED = 0  # it answered me now, on the connection that I have
    DIALLED = 1  # it answered my dial
    SILENT = 2
    REFUSED = 3
    RESTARTED = 4  # another process of this identity answers
    UNKNOWN = 5  # I know of no such member
    BUSY = 6  # I did not look


SEEN_ALIVE = (Seen.CONNECTED, Seen.DIALLED)
DENIED = (Seen.SILENT, Seen.REFUSED, Seen.RESTARTED)  # looked, and found nothing


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to think of a member from now on.  `helper` heard it where we do not.  `after_s`: since the first doubt."""

    standing: Standing
    reason: str
    helper: PeerId | None = None
    after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Ping:
    """Try to reach the member; report `answered` or `failed` of this `round`."""

    peer: PeerId
    round: int
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask these whether that process answers them; report each with `helped`."""

    peer: PeerId
    boot_id: bytes
    round: int
    helpers: tuple[PeerId, ...]
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Judged:
    peer: PeerId
    verdict: Verdict


Decision = Ping | Ask | Judged
