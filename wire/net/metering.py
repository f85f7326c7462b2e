"""What went through relays, counted at our end and compared with what the relay says.

A relay tells both ends of a circuit how much it forwarded (`relay-note/1`), because work that it did for others is to be shown, and
later perhaps to be paid.  Nobody has to believe it: each end counts what it sent and received itself.  More than a hundredth of a
difference, beyond what may have been under way when a circuit broke, is an event.

What goes wrong: a pair has two circuits, control and bulk, and notes name the pair.  So sums are compared, and only while none of the
pair's circuits is open; a relay that was lost has said nothing, and its sums are dropped.  A relay that never tells, or brings
circuits of ever new names that it has made up, would have us keep sums without end: of each relay the oldest that wait for nothing
but its word are dropped.  One that says "throttled" for ever is heard once for each direction of each circuit, as an honest one says it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from wire.errors import Code, error_for
from wire.identity import PeerId
from wire.limits import Limits
from wire.messages import decode
from wire.net.bytestream import ByteStream
from wire.net.netevents import NetEvent, RelayDisagrees, RelayThrottled
from wire.net.peer import Peer
from wire.net.stream import MessageStream
from wire.relaymessages import Note, RelayNote

PROTOCOL = "relay-note/1"
TOLERANCE = 0.01
PAIRS_MOST = 256  # of one relay, whose circuits have all ended: as many as the streams that it may have open here


@dataclass(slots=True)
class _Sums:
    opened: int = 0
    open_now: int = 0
    ours: list[int] = field(default_factory=lambda: [0, 0])  # sent, received
    theirs: list[int] = field(default_factory=lambda: [0, 0])
    ended: int = 0  # circuits that we have seen end
    noted: int = 0  # and of which the relay has told
    throttled: int = 0  # notes that said so


class Metering:
    """Of all circuits of this node.  `emit` hears of relays that throttle or disagree."""

    def __init__(self, limits: Limits, emit: Callable[[NetEvent], None]) -> None:
        self._limits = limits
        self._emit = emit
        self._sums: dict[tuple[PeerId, PeerId], _Sums] = {}  # (relay, other end)
        self.total = [0, 0]  # sent and received through relays since the start

    def opened(self, relay: PeerId, other: PeerId) -> None:
        """A circuit stands."""
        sums = self._sums.get((relay, other))
        if sums is None:
            self._bound(relay)
            sums = self._sums[relay, other] = _Sums()
        sums.opened += 1
        sums.open_now += 1

    def closed(self, relay: PeerId, other: PeerId, sent: int, received: int) -> None:
        """It has ended, having carried so many bytes."""
        self.total[0] += sent
        self.total[1] += received
        sums = self._sums.get((relay, other))
        if sums is not None:
            sums.open_now -= 1
            sums.ended += 1
            sums.ours[0] += sent
            sums.ours[1] += received
            self._compare(relay, other, sums)

    def relay_lost(self, relay: PeerId) -> None:
        """It cannot tell any more."""
        for key in [key for key in self._sums if key[0] == relay]:
            del self._sums[key]

    async def noted(self, peer: Peer, stream: MessageStream | ByteStream) -> None:
        """The handler of `relay-note/1`."""
        if not isinstance(stream, MessageStream):
            raise error_for(Code.PROTOCOL, detail="this protocol is made of messages")
        note = decode(await stream.receive(), RelayNote)
        try:
            other = PeerId(note.peer)
        except ValueError:
            raise error_for(Code.PROTOCOL, detail="no peer id") from None
        sums = self._sums.get((peer.peer_id, other))
        if sums is None:
            return  # no circuit of ours: whatever it says
        if note.kind == Note.THROTTLED:
            if sums.throttled < 2 * sums.opened:
                sums.throttled += 1
                self._emit(RelayThrottled(peer.peer_id, other, note.rate))
        elif note.kind == Note.ENDED:
            sums.noted += 1
            sums.theirs[0] += note.up
            sums.theirs[1] += note.down
            self._compare(peer.peer_id, other, sums)

    def _bound(self, relay: PeerId) -> None:
        silent = [key for key, sums in self._sums.items() if key[0] == relay and not sums.open_now]
        for key in silent[: max(0, len(silent) - PAIRS_MOST + 1)]:
            del self._sums[key]

    def _compare(self, relay: PeerId, other: PeerId, sums: _Sums) -> None:
        if sums.open_now or sums.noted < sums.ended:
            return
        del self._sums[relay, other]
        for ours, theirs in zip(sums.ours, sums.theirs, strict=True):
            # What was sent and not forwarded when a circuit broke: a stream window and what the relay held.
            slack = max(TOLERANCE * ours, self._limits.relay_bulk_window_max_bytes * sums.ended)
            if abs(ours - theirs) > slack:
                self._emit(RelayDisagrees(relay, other, tuple(sums.ours), tuple(sums.theirs)))
                return
