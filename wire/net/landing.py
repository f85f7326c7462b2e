"""A receiving channel on its connections: the streams under a `TensorReceiver`.

A `Landing` is the channel on one control connection of the peer: its message stream, and a chunk stream for each lane.  Chunk streams
name the control stream that they belong to (`carrier.CHUNKS_META`), and may come before it, since they travel elsewhere; the
peer's table of channels keeps them until then, unaccepted, so that no chunk can come.

The end that *we* want says FIN behind the last Done and waits for the sender to finish its streams: a reset would be quicker and
could overtake that Done, and the sender would take a delivered tensor for a lost one.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import trio

from wire.errors import Code, ConnectionLost, RemoteProtocolError, WireError
from wire.landing import LaneSink
from wire.messages import Ask, Begin, Drop, decode, encode
from wire.net.carrier import carrier_number, unread
from wire.net.link import Link

if TYPE_CHECKING:
    from wire.net.receiver import TensorReceiver


class _ChunkEnd:
    """One chunk stream.  A `ChunkSink` towards its session, a `StreamEnd` towards its link."""

    def __init__(self, at: Landing, link: Link, stream: int) -> None:
        self.at = at
        self.link = link
        self.stream = stream
        self.number = carrier_number(link, stream)
        self._due = False
        self.sink: LaneSink = at.owner.channel.lane(self.number)
        self.sink.divert = lambda view: link.session.divert(stream, view)
        link.session.attach_sink(stream, self)
        link.session.accept(stream)
        link.attach(stream, self)

    # -- ChunkSink: called in the middle of `session.receive`

    def place(self, slot: int, index: int, length: int, flags: int) -> memoryview:
        return self.sink.place(slot, index, length, flags)

    def placed(self, slot: int, index: int) -> None:
        self.sink.placed(slot, index)
        owner = self.at.owner
        if not self._due and owner.channel.due(chunks=owner.on_chunk is not None):
            self._due = True
            self.link.soon(self._after)

    def _after(self) -> None:
        self._due = False
        self.at.owner.pump()

    # -- StreamEnd

    def on_readable(self) -> None:
        """The sender's FIN: ours goes back, and the session forgets the stream."""
        if self.link.session.is_live(self.stream):
            self.link.session.send(self.stream, b"", fin=True, now=trio.current_time())
        self.link.ends.pop(self.stream, None)
        self.at.chunks_over(self)

    def on_writable(self) -> None: ...

    def on_accepted(self) -> None: ...

    def on_pipe_end(self) -> None: ...

    def on_reset(self, error: WireError) -> None:
        self.at.chunks_over(self, lost=True)


class Landing:
    """See the module."""

    def __init__(self, owner: TensorReceiver, link: Link, control: int) -> None:
        self.owner = owner
        self.link = link
        self.control = control
        self.chunks: dict[int, _ChunkEnd] = {}  # by the carrier's number
        self.used: set[int] = set()  # numbers, of which each comes once
        self.over = False
        self._finished = False  # the sender sends no more on the control stream
        self._retiring = False
        self._fin_sent = False
        self._outbox: deque[bytes] = deque()
        link.session.accept(control)
        link.attach(control, self)

    def take_chunks(self, link: Link, stream: int) -> None:
        """A chunk stream of this opening of the channel."""
        if self.over or carrier_number(link, stream) in self.used:
            link.session.refuse(stream, Code.PROTOCOL)  # one for each lane, once
        else:
            end = _ChunkEnd(self, link, stream)
            self.chunks[end.number] = end
            self.used.add(end.number)
        link.kick()

    def chunks_over(self, end: _ChunkEnd, *, lost: bool = False) -> None:
        """Nothing more comes on this chunk stream."""
        if self.chunks.get(end.number) is end:
            del self.chunks[end.number]
            if lost and not self.over:
                self.owner.channel.lane_lost(end.number)
                self.owner.pump()
        self._end_if_done()

    def flush(self) -> None:
        session = self.link.session
        self._outbox.extend(map(encode, self.owner.channel.messages()))
        if self.over or not session.is_live(self.control) or self._fin_sent:
            return
        while self._outbox and session.sendable(self.control, len(self._outbox[0])) >= len(self._outbox[0]):
            session.send(self.control, self._outbox.popleft(), now=trio.current_time())
        if len(self._outbox) > self.owner.limits.channel_messages_waiting_max:
            self.link.fail(unread(self.owner.protocol))
        elif (self._retiring or self._finished) and not self._outbox:
            self._fin_sent = True
            session.send(self.control, b"", fin=True, now=trio.current_time())

    def retire(self) -> None:
        """We want no more: FIN behind the last Done."""
        self._retiring = True
        self.flush()
        self.link.kick()
        self._end_if_done()

    def leave(self) -> None:
        """Another attachment takes over: nothing may be written by this one any more."""
        self.end()
        for end in list(self.chunks.values()):
            end.link.reset(end.stream)
        self.chunks.clear()
        # Openings on two connections may come in the wrong order, so this may end the one that counts: the code says to try again.
        self.link.reset(self.control, Code.SUPERSEDED)

    def end(self) -> None:
        if not self.over:
            self.over = True
            for end in self.chunks.values():
                end.link.reset(end.stream)
            self.chunks.clear()
            self.owner.detached(self)

    def _end_if_done(self) -> None:
        if self._finished and not self.chunks and not self.over:
            self.flush()
            self.link.kick()
            self.end()

    # -- StreamEnd of the control stream

    def on_readable(self) -> None:
        session, channel = self.link.session, self.owner.channel
        try:
            while session.is_live(self.control) and (message := session.read_message(self.control)) is not None:
                if not message:
                    self.link.ends.pop(self.control, None)
                    self._finished = True
                    self.owner.pump()
                    self.flush()
                    self._end_if_done()
                    return
                heard = decode(message, Begin, Drop, Ask)
                if isinstance(heard, Ask):
                    self._close_lane(heard.lane)
                channel.on_message(heard)
        except RemoteProtocolError as error:
            self.link.fail(error)
            return
        self.owner.pump()

    def _close_lane(self, lane: int) -> None:
        """The sender has given a lane up: our end must be closed before we say what came over it."""
        end = self.chunks.pop(lane, None)
        if end is None:
            return
        if end.link is self.link:
            end.link.reset(end.stream)
        else:
            end.link.fail(ConnectionLost("the peer gave this lane up"))

    def on_writable(self) -> None:
        self.owner.pump()

    def on_accepted(self) -> None: ...

    def on_pipe_end(self) -> None: ...

    def on_reset(self, error: WireError) -> None:
        self.end()
