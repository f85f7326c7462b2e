"""Why a generation ends early: one reason, the first one, with whose fault it is."""

from __future__ import annotations

from plnode.stage.errors import StageError
from wire.identity import PeerId


class Broken(Exception):
    """The generation cannot go on.

    `culprit`: the peer at fault, if known.  `fatal`: a new generation would break the same way.  `failed`: this node's own device or
    memory gave up; it cannot take part in a new one.  `told`: another node said so, the members know.
    """

    def __init__(
        self,
        reason: str,
        culprit: PeerId | None = None,
        *,
        fatal: bool = False,
        failed: StageError | None = None,
        told: bool = False,
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.culprit = culprit
        self.fatal = fatal
        self.failed = failed
        self.told = told


def short(peer_id: PeerId | None) -> str:
    """A peer in a sentence."""
    return peer_id.short if peer_id is not None else "a neighbour"
