"""A sending channel on its connections: the streams under a `TensorSender`.

An `Attachment` is the channel on one control connection: its message stream, and a `_Carrier` for each connection that carries
chunks.  Chunks travel on lanes when there are any, else on the control connection (number 0, "mixed"): with the first lane the
mixed carrier is retired, without the last it is made again.

A chunk stream names its control stream in its meta data (`CHUNKS_META`), because the two travel on different connections and
neither waits for the other: without it a stream of an older opening of the same channel could be taken for one of the new.

*Retired* means: nothing more is pulled, the chunk under way is finished, then comes FIN.  What was written stays in doubt until the
receiver's Done; if the connection ends before that, the automaton asks.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import trio

from wire.chunks import OutChunk
from wire.errors import Code, LimitExceeded, LocalProtocolError, RemoteProtocolError, WireError
from wire.events import Kind
from wire.messages import Done, Have, Posted, Slot, Unslot, decode, encode
from wire.net.link import Link

if TYPE_CHECKING:
    from wire.net.sender import TensorSender

# Lanes count from 1 (wire/tickets.py).  The control connection carries chunks under a number of its own for each stream, since a
# number may not be used again while the channel is attached: an old Ask would be taken for one about the new stream.
MIXED = 1 << 31
CHUNKS_META = struct.Struct(">I")  # the control stream, before the channel's name


def carrier_number(link: Link, stream: int) -> int:
    """By what both ends name a connection that carries chunks: the lane's number, or one made of the stream on the control connection."""
    return link.lane or MIXED + stream


def unread(protocol: str) -> RemoteProtocolError:
    """What ends a connection whose peer makes us say ever more on a channel and does not read it."""
    return RemoteProtocolError(Code.EXCESSIVE, detail=f"{protocol}: the peer makes us say more than it reads")


class _Carrier:
    """One chunk stream.  A `ChunkSource` towards its session, a `StreamEnd` towards its link."""

    def __init__(self, at: Attachment, link: Link) -> None:
        self.at = at
        self.link = link
        self._fin_sent = False
        owner = at.owner
        meta = CHUNKS_META.pack(at.control) + owner.name
        self.stream = link.session.open_stream(Kind.CHUNKS, owner.protocol, owner.cls, meta=meta, now=trio.current_time())
        self.number = carrier_number(link, self.stream)
        self._lane = owner.channel.lane(self.number)
        link.attach(self.stream, self)
        link.session.attach_source(self.stream, self, owner.cls)
        link.kick()

    # -- ChunkSource

    @property
    def order(self) -> int:
        return self._lane.order

    def next_chunk(self) -> OutChunk | None:
        owner = self.at.owner
        owner.packing.rate(self.at.bytes_per_s)
        chunk = self._lane.next_chunk()
        if owner.changed:
            owner.changed = False
            self.link.soon(owner.pump)
        return chunk

    @property
    def retired(self) -> bool:
        """Nothing more is pulled."""
        return self._lane.paused

    # --

    def offer(self) -> None:
        """There may be chunks to pull."""
        if not self.retired and self.link.session.is_live(self.stream):
            self.link.session.source_ready(self.stream)
            self.link.kick()

    def retire(self) -> None:
        """No more chunks; FIN behind the one under way."""
        self._lane.paused = True
        session = self.link.session
        if not self._fin_sent and session.is_live(self.stream):
            self._fin_sent = True
            session.send(self.stream, b"", fin=True, now=trio.current_time())
            self.link.kick()

    def leave(self) -> None:
        """The receiver hears of the channel elsewhere: this stream is void."""
        self._lane.paused = True
        self.link.reset(self.stream)

    def copy_chunk(self) -> None:
        if self.link.session.is_live(self.stream):
            self.link.session.copy_unsent(self.stream)

    # -- StreamEnd

    def on_readable(self) -> None:
        self.link.ends.pop(self.stream, None)  # the receiver's FIN

    def on_writable(self) -> None: ...
    def on_accepted(self) -> None: ...
    def on_pipe_end(self) -> None: ...

    def on_reset(self, error: WireError) -> None:
        self.at.carrier_lost(self)


class Attachment:
    """See the module.  Raises LimitExceeded or LocalProtocolError if the connection takes no new stream."""

    def __init__(self, owner: TensorSender, link: Link) -> None:
        self.owner = owner
        self.link = link
        self.over = False
        self.carriers: dict[int, _Carrier] = {}
        self._retiring = False
        self._outbox: deque[bytes] = deque()
        self.control = link.session.open_stream(Kind.MESSAGE, owner.protocol, 1, meta=owner.name, now=trio.current_time())
        link.attach(self.control, self)
        link.kick()

    def use(self, lanes: Sequence[Link]) -> None:
        """Carry chunks over exactly these connections; over the control connection if there are none."""
        links = [link for link in lanes if not link.draining] or [self.link]
        carrying = {carrier.link for carrier in self.carriers.values() if not carrier.retired}
        for link in links:
            if link not in carrying:
                try:
                    carrier = _Carrier(self, link)
                except (LimitExceeded, LocalProtocolError):
                    continue  # it ends just now, or is full: the others carry
                self.carriers[carrier.number] = carrier
        for carrier in list(self.carriers.values()):
            if carrier.link not in links:
                carrier.retire()

    @property
    def bytes_per_s(self) -> float:
        """What the connections that carry chunks took when they were measured last, together; 0.0 before that."""
        return sum(carrier.link.session.send_bytes_per_s for carrier in self.carriers.values() if not carrier.retired)

    def carrier_lost(self, carrier: _Carrier) -> None:
        """Its session reads no more."""
        if self.carriers.get(carrier.number) is carrier:
            del self.carriers[carrier.number]
        if self.over or self._retiring or self.owner.at is not self:
            return
        self.owner.channel.lane_lost(carrier.number)
        if all(other.retired for other in self.carriers.values()) and not self.link.draining:
            self.use(())
        self.owner.pump()

    def copy_chunks(self) -> None:
        for carrier in self.carriers.values():
            carrier.copy_chunk()

    def flush(self) -> None:
        """Messages as far as there is credit; then let the carriers pull."""
        session = self.link.session
        self._outbox.extend(map(encode, self.owner.channel.messages()))
        if self.over or not session.is_live(self.control):
            return  # reset by the peer, in the batch that is being carried: that event follows
        while self._outbox and session.sendable(self.control, len(self._outbox[0])) >= len(self._outbox[0]):
            session.send(self.control, self._outbox.popleft(), now=trio.current_time())
        if len(self._outbox) > self.owner.limits.channel_messages_waiting_max:
            self.link.fail(unread(self.owner.protocol))
        elif self._retiring and not self._outbox:
            self._finish()
        elif self.owner.channel.has_chunk:
            for carrier in list(self.carriers.values()):
                carrier.offer()

    def kick(self) -> None:
        self.link.kick()

    def retire(self) -> None:
        """We want no more: the last messages, then FIN on every stream."""
        if self.over or self._retiring:
            return
        self._retiring = True
        for carrier in list(self.carriers.values()):  # a write that fails takes its carrier out at once
            carrier.copy_chunk()
            carrier.retire()
        self.flush()
        self.kick()

    def _finish(self) -> None:
        self.over = True
        if self.link.session.is_live(self.control):
            self.link.session.send(self.control, b"", fin=True, now=trio.current_time())
            self.link.kick()

    def leave(self) -> None:
        """Another attachment takes over: these streams are void at once."""
        self.over = True
        for carrier in list(self.carriers.values()):
            carrier.copy_chunk()
            carrier.leave()
        self.carriers.clear()
        self.link.reset(self.control)

    # -- StreamEnd of the control stream

    def on_readable(self) -> None:
        session, channel = self.link.session, self.owner.channel
        try:
            while session.is_live(self.control) and (message := session.read_message(self.control)) is not None:
                if not message:
                    self.link.ends.pop(self.control, None)
                    if self.owner.at is self:
                        self.owner.closed_by_receiver()
                    return
                if self.owner.at is self:
                    channel.on_message(decode(message, Slot, Unslot, Done, Have, Posted))
        except RemoteProtocolError as error:
            self.link.fail(error)
            return
        if self.owner.at is self:
            self.owner.pump()

    def on_writable(self) -> None:
        if self.owner.at is self:
            self.owner.pump()
        elif self._retiring and not self.over:
            self.flush()

    def on_accepted(self) -> None: ...
    def on_pipe_end(self) -> None:
        self.on_readable()  # a last Done may lie there

    def on_reset(self, error: WireError) -> None:
        if self.over:
            return
        if self.link.error is not None:
            self.over = True
            self.carriers.clear()
            self.owner.detached(self)
        else:
            self.owner.refused(self, error)
