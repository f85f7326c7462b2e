"""The tensor channels with one peer: who sends, who receives, and streams that came before their time.

A table that outlives connections.  What goes wrong without one place for it: a chunk stream on a lane may be here before the message
stream that it belongs to, because they travel on different connections; a channel may be opened before anybody has made its
receiver; and when connections change, every channel has to change with them, in one step, or tensors go into the void.

Streams that wait are not accepted, so nothing can arrive on them; the session's backlog bounds how many there are.  A chunk
stream whose control stream is over already is refused: it was under way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from wire.delivered import DeliveredKeys
from wire.errors import Code, LocalProtocolError, WireError
from wire.events import Kind, StreamOpened
from wire.limits import Limits
from wire.messages import Key
from wire.net.carrier import CHUNKS_META
from wire.net.causes import spent
from wire.net.link import Link
from wire.net.receiver import TensorReceiver
from wire.net.sender import TensorSender
from wire.packing import PackingStats
from wire.tensor import Expectation

Name = tuple[str, bytes]


@dataclass(slots=True, eq=False)
class _Waiting:
    """A stream that is not accepted yet.  `control`: the control stream that a chunk stream belongs to, None for that itself."""

    table: Channels
    link: Link
    event: StreamOpened
    name: Name
    control: int | None

    def on_readable(self) -> None:
        """Only its end can be news: a slot was never posted, so nothing can be sent."""
        self.link.reset(self.event.stream, Code.REFUSED)
        self.table.waiting.remove(self)

    def on_writable(self) -> None: ...

    def on_accepted(self) -> None: ...

    def on_pipe_end(self) -> None: ...

    def on_reset(self, error: WireError) -> None:
        self.table.waiting.remove(self)


class Channels:
    """Of one peer.  `later(delay_s, action)` runs an action in the peer's nursery."""

    def __init__(self, limits: Limits, later: Callable[[float, Callable[[], None]], None]) -> None:
        self.waiting: list[_Waiting] = []
        self._limits = limits
        self._later = later
        self._senders: dict[Name, TensorSender] = {}
        self._receivers: dict[Name, TensorReceiver] = {}

    def __bool__(self) -> bool:
        """Whether there is any channel."""
        return bool(self._senders or self._receivers or self.waiting)

    def sender(self, protocol: str, name: bytes, cls: int) -> tuple[TensorSender, bool]:
        """The sender of that name, and whether it was made now."""
        key = protocol, name
        known = self._senders.get(key)
        if known is not None:
            return known, False
        sender = TensorSender(protocol, name, cls, self._limits, lambda: self._forget(self._senders, key, sender), self._later)
        self._senders[key] = sender
        return sender, True

    def receiver(
        self, protocol: str, name: bytes, expect: Callable[[Key], Expectation | None], delivered: DeliveredKeys
    ) -> TensorReceiver:
        """A new receiver; once a name.  What the peer has opened already is taken up at once."""
        key = protocol, name
        if key in self._receivers:
            raise LocalProtocolError(f"there is a receiver for {protocol} {name!r} already")
        receiver = TensorReceiver(
            protocol, name, expect, delivered, self._limits, lambda: self._forget(self._receivers, key, receiver)
        )
        self._receivers[key] = receiver
        for waiting in [item for item in self.waiting if item.name == key and item.control is None]:
            self.waiting.remove(waiting)
            waiting.link.ends.pop(waiting.event.stream, None)
            self._land(receiver, waiting.link, waiting.event.stream)
        return receiver

    def _forget(self, table: dict[Name, TensorSender] | dict[Name, TensorReceiver], key: Name, what: object) -> None:
        if table.get(key) is what:
            del table[key]

    # -- streams that the peer opens

    def opened(self, link: Link, event: StreamOpened) -> Name | None:
        """Give a stream its place.  Returns the channel's name if nobody has made its receiver and it is new."""
        if event.kind is Kind.MESSAGE:
            key = event.protocol, event.meta
            receiver = self._receivers.get(key)
            if receiver is not None:
                self._land(receiver, link, event.stream)
                return None
            new = not any(item.name == key for item in self.waiting)
            self._keep(link, event, key, None)
            return key if new else None
        if event.kind is not Kind.CHUNKS or len(event.meta) <= CHUNKS_META.size:
            link.session.refuse(event.stream, Code.PROTOCOL)
            return None
        (control,) = CHUNKS_META.unpack_from(event.meta)
        key = event.protocol, event.meta[CHUNKS_META.size :]
        home = link.home
        receiver = self._receivers.get(key)
        at = receiver.at if receiver is not None else None
        if at is not None and at.link is home and at.control == control:
            at.take_chunks(link, event.stream)
        elif home.session.was_opened(control) and not home.session.is_live(control):
            link.session.refuse(event.stream, Code.CANCELLED)
        else:
            self._keep(link, event, key, control)
        return None

    def _keep(self, link: Link, event: StreamOpened, name: Name, control: int | None) -> None:
        waiting = _Waiting(self, link, event, name, control)
        self.waiting.append(waiting)
        link.attach(event.stream, waiting)

    def _land(self, receiver: TensorReceiver, link: Link, control: int) -> None:
        receiver.land(link, control)
        at = receiver.at
        key = receiver.protocol, receiver.name
        for waiting in [item for item in self.waiting if item.name == key and item.control is not None]:
            if at is not None and waiting.link.home is link and waiting.control == control:
                self.waiting.remove(waiting)
                waiting.link.ends.pop(waiting.event.stream, None)
                at.take_chunks(waiting.link, waiting.event.stream)
        link.kick()

    # -- connections

    def move_to(self, link: Link, lanes: Sequence[Link]) -> None:
        """This control connection carries every channel of ours from now on."""
        for sender in list(self._senders.values()):
            sender.move_to(link, lanes)

    def use(self, link: Link, lanes: Sequence[Link]) -> None:
        """The lanes of a control connection have changed."""
        for sender in list(self._senders.values()):
            sender.use(link, lanes)

    def lane_ended(self, lane: Link) -> None:
        """If its circuit is spent, the channels that it carried end: a lane after the other would end so, and nothing arrive."""
        if lane.error is None or not spent(lane.error):
            return
        ends: list[TensorSender | TensorReceiver] = [*self._senders.values(), *self._receivers.values()]
        for end in ends:
            if end.at is not None and end.at.link is lane.home:
                end.lost(lane.error)

    def in_doubt(self, lane: int) -> bool:
        """Whether something was written to that lane that no receiver has confirmed."""
        return any(sender.channel.in_doubt(lane) for sender in self._senders.values())

    @property
    def resent_chunks(self) -> int:
        """Chunks that were sent a second time, by the channels that exist."""
        return sum(sender.channel.resent_chunks for sender in self._senders.values())

    def queued_bytes(self) -> Counter[int]:
        """What our senders still have to send, by class."""
        queued: Counter[int] = Counter()
        for sender in self._senders.values():
            queued[sender.cls] += sender.queued_bytes
        return queued

    @property
    def packed(self) -> PackingStats:
        """Of the sending channels that exist, together; on if any of them is."""
        stats = [sender.packed for sender in self._senders.values()]
        return PackingStats(
            sum(one.raw_bytes for one in stats),
            sum(one.wire_bytes for one in stats),
            sum(one.packed_chunks for one in stats),
            any(one.on for one in stats),
        )

    def lost(self, error: WireError) -> None:
        """The peer is gone."""
        for sender in list(self._senders.values()):
            sender.lost(error)
        for receiver in list(self._receivers.values()):
            receiver.lost(error)
