"""Which way the bytes of a connection take.

Three ways lead to a peer, and who chooses among peers must tell them apart: a relay's line is shared with strangers and its
owner pays for it, so what need not hurry does not go over it.  A punched connection is as good as a direct one once it stands,
but to make a second one costs another punch, so lanes are few there.

The path belongs to the pipe: whoever made the pipe knows it (`PipeInfo.path`), and nobody above asks how.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from .identity import PeerId


class PathKind(StrEnum):
    DIRECT = "direct"
    PUNCHED = "punched"
    RELAYED = "relayed"


@dataclass(frozen=True, slots=True)
class Path:
    """`relay`: who forwards, of a relayed path and only of that; ValueError otherwise."""

    kind: PathKind
    relay: PeerId | None = None

    def __post_init__(self) -> None:
        if (self.kind is PathKind.RELAYED) != (self.relay is not None):
            raise ValueError(f"a {self.kind} path {'without' if self.relay is None else 'with'} a relay")

    def __str__(self) -> str:
        return str(self.kind) if self.relay is None else f"relayed via {self.relay}"

    @property
    def relayed(self) -> bool:
        return self.relay is not None


DIRECT = Path(PathKind.DIRECT)
PUNCHED = Path(PathKind.PUNCHED)


def relayed_via(relay: PeerId) -> Path:
    """The path through a circuit of that relay."""
    return Path(PathKind.RELAYED, relay)
