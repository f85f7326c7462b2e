"""What is known about the two ends of a pipe, whatever carries it.

A file of its own because two rooms need it that do not know each other: sockets (`wire.net`) and the in-memory internet
(`wire.sim`) are two implementations of one transport interface.
"""

from __future__ import annotations

from dataclasses import dataclass

from wire.identity import PeerId
from wire.path import DIRECT, Path


@dataclass(frozen=True, slots=True)
class PipeInfo:
    """Hosts are numeric, without a zone id; empty in a circuit."""

    kind: str  # "tcp", or what another transport calls itself
    local: tuple[str, int]  # host and port of our end
    remote: tuple[str, int]  # host and port of the other end
    congestion: str = ""  # congestion control in force, "" if the transport has none
    path: Path = DIRECT  # said by who made the pipe, if it was not dialled or accepted in the usual way; relayed: no hosts

    @property
    def relay(self) -> PeerId | None:
        """Through whom it goes."""
        return self.path.relay

    @property
    def same_machine(self) -> bool:
        """Whether both ends are on one machine, where nothing is lost and nothing takes time on the way."""
        return self.relay is None and same_machine(self.local[0], self.remote[0])


def same_machine(local: str, remote: str) -> bool:
    """Whether two numeric hosts at the ends of one connection are the same machine."""
    return local == remote or remote == "::1" or remote.startswith("127.")
