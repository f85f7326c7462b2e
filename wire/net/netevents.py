"""What happens in the network, as values; and how those who want to know hear of it.

Each listener has a channel of its own with a bound.  One that takes nothing for that long is stuck: it is cut off, visibly (its
channel ends) and with a warning, instead of filling memory or losing single events in silence.  What happens before anybody
listens is kept, up to the same bound, for the first listener: between the start of the network and that call lies a checkpoint.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import trio

from wire.address import Address
from wire.envelope import OpenedRecord
from wire.errors import WireError
from wire.identity import PeerId
from wire.net.interfaces import NetworkChanged
from wire.net.peer import Peer
from wire.path import Path
from wire.reachability import Finding

log = logging.getLogger("wire.net")

# A swarm of 512 connections that all come and go once while a listener computes for a second makes 1,500 events.
EVENTS_MAX = 4096


@dataclass(frozen=True, slots=True)
class PeerConnected:
    """The first connection to a peer stands."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The last connection to a peer ended, or it has said that it stops."""

    peer_id: PeerId
    reason: WireError


@dataclass(frozen=True, slots=True)
class PathChanged:
    """Another way to a peer is the primary one from now on: a relayed pair was punched, or the other way round."""

    peer_id: PeerId
    path: Path
    before: Path


@dataclass(frozen=True, slots=True)
class ClockOff:
    """This machine's wall clock disagrees with what `peers` peers have; said once until it was right again."""

    offset_s: float  # median of theirs minus ours
    peers: int


@dataclass(frozen=True, slots=True)
class SeedStateChanged:
    """A seed of the list changed its state; see `SeedStatus` for the states."""

    entry: str
    state: str
    reason: str  # in words


@dataclass(frozen=True, slots=True)
class NoSeedReachable:
    """The last seed that could be hoped for has failed.  No end: all are tried again, and known peers beside them."""

    reasons: tuple[tuple[str, str], ...]  # (entry, why), in words


@dataclass(frozen=True, slots=True)
class RecordLearned:
    """A newer signed record of another peer came."""

    record: OpenedRecord


@dataclass(frozen=True, slots=True)
class Listening:
    """An address was bound, with the real port."""

    address: Address


@dataclass(frozen=True, slots=True)
class NotListening:
    """A configured address could not be bound; others could."""

    address: Address
    reason: str


@dataclass(frozen=True, slots=True)
class Complaint:
    """Something the operator should know; said once a cause."""

    text: str


@dataclass(frozen=True, slots=True)
class ReachChanged:
    """Whether and where others can dial this node is another than before."""

    finding: Finding


@dataclass(frozen=True, slots=True)
class Punched:
    """What came of trying to reach a relayed peer directly.  `why` it failed, "" if it did not; said again only if it is another."""

    peer_id: PeerId
    why: str
    took_s: float


@dataclass(frozen=True, slots=True)
class AccessChanged:
    """How others reach this node now: `direct`, `relayed`, `unreachable` or not known yet, and why, in words for its owner."""

    verdict: str
    reason: str


@dataclass(frozen=True, slots=True)
class RelayThrottled:
    """A relay holds a circuit of ours back: more wanted to pass than its share.  Once a circuit."""

    relay: PeerId
    other: PeerId
    bytes_per_s: int


@dataclass(frozen=True, slots=True)
class RelayDisagrees:
    """A relay says that circuits of ours carried another amount than we have counted: (sent, received)."""

    relay: PeerId
    other: PeerId
    ours: tuple[int, ...]
    theirs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PortMapped:
    """What came of asking the router to forward `port`: to `outside`, or to nothing, and how or why, in words."""

    port: int
    outside: Address | None
    reason: str


NetEvent = (
    PeerConnected
    | PeerLost
    | PathChanged
    | ReachChanged
    | Punched
    | AccessChanged
    | RelayThrottled
    | RelayDisagrees
    | PortMapped
    | ClockOff
    | SeedStateChanged
    | NoSeedReachable
    | RecordLearned
    | Listening
    | NotListening
    | NetworkChanged
    | Complaint
)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes at the sockets since the start, over all peers that ever were."""

    bytes_in: int
    bytes_out: int


class Announcer:
    """Hands events to every listener.  Never waits."""

    def __init__(self) -> None:
        self._listeners: list[trio.MemorySendChannel[NetEvent]] = []
        self._past: list[NetEvent] | None = []  # until the first listener

    def subscribe(self) -> trio.MemoryReceiveChannel[NetEvent]:
        sender, receiver = trio.open_memory_channel[NetEvent](EVENTS_MAX)
        for event in self._past or ():
            sender.send_nowait(event)
        self._past = None
        self._listeners.append(sender)
        return receiver

    def emit(self, event: NetEvent) -> None:
        if self._past is not None:
            self._past.append(event)
            del self._past[:-EVENTS_MAX]
        for sender in list(self._listeners):
            try:
                sender.send_nowait(event)
            except trio.WouldBlock:
                self._listeners.remove(sender)
                sender.close()
                log.warning("a listener to network events left %d untaken and is cut off", EVENTS_MAX)
            except trio.BrokenResourceError:
                self._listeners.remove(sender)
                sender.close()

    def close(self) -> None:
        """Nothing more will happen: the channels end."""
        for sender in self._listeners:
            sender.close()
        self._listeners.clear()
