"""The receiving end of a tensor channel, as tasks see it.

The application posts buffers; what arrives is decrypted straight into them (`wire.slots.ReceiverChannel` decides what may be
written where).  Here a posted buffer outlives the channel it was posted on:

* Buffers posted before the peer has opened the channel wait for it.
* When the peer opens the channel anew, on another connection, buffers into which nothing was begun are withdrawn from the old
  channel and posted on the new one; begun ones finish on the old.
* A slot without a key whose tensor was dropped or refused is posted again by itself, under the same number: the application
  wanted "the next one", and planned the memory for it.  A slot with a key ends with `on_dropped`, since nobody may want that key
  any more.

Every posted buffer comes back exactly once: in a `Received`, in a `Dropped`, or, when the channel is lost, in a `Dropped` with
the cause's code before `receive` raises it.  Until then it belongs to the channel, even after `unpost`: a chunk may be under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import trio

from wire.delivered import DeliveredKeys
from wire.errors import Code, LocalProtocolError, RemoteProtocolError, WireError, error_for
from wire.events import Kind, StreamOpened
from wire.limits import Limits
from wire.messages import Begin, Drop, Key, decode, encode
from wire.net.link import Link
from wire.slots import ChunkReady, ReceiverChannel, TensorDropped, TensorReceived
from wire.tensor import Expectation


@dataclass(frozen=True, slots=True)
class Received:
    """A tensor that is whole and authentic.  `buffer`: the first `begin.raw_len` bytes of what was posted; it is ours again."""

    slot: int
    key: Key
    begin: Begin
    buffer: memoryview


@dataclass(frozen=True, slots=True)
class Dropped:
    """A slot that ended without a tensor; the buffer, as posted, is ours again.  CANCELLED: withdrawn, or dropped by the peer."""

    slot: int
    key: Key | None
    code: Code
    buffer: memoryview


@dataclass(slots=True)
class _Post:
    slot: int
    buffer: memoryview
    key: Key | None
    side: _Side | None = None  # the channel it is posted on
    inner: int = -1  # its number there
    withdrawn: bool = False  # by the application


class _Side:
    """The channel on one connection.  Stands between the session and the automaton as `ChunkSink`."""

    def __init__(self, owner: TensorReceiver, link: Link, control: int) -> None:
        self.owner = owner
        self.link = link
        self.control = control
        self.chunks: int | None = None
        self.channel = ReceiverChannel(owner.expect, owner.delivered, owner.limits)
        self.posts: dict[int, _Post] = {}
        self.begun: set[int] = set()
        self.over = False
        self._closing = False  # we want no more
        self._fin_sent = False
        self._open_streams = {control}  # those whose end the sender has not said
        self._due = False
        self._outbox: deque[bytes] = deque()
        link.session.accept(control)
        link.attach(control, self)

    def take_chunks(self, stream: int) -> None:
        session = self.link.session
        if self.chunks is not None or self.over:
            session.refuse(stream, Code.PROTOCOL)
            return
        self.chunks = stream
        self._open_streams.add(stream)
        session.attach_sink(stream, self)
        session.accept(stream)
        self.link.attach(stream, _ChunkEnd(self, stream))

    def post(self, post: _Post) -> None:
        post.inner = self.channel.post(post.buffer, post.key)
        post.side = self
        self.posts[post.inner] = post

    # -- ChunkSink: called in the middle of `session.receive`

    def place(self, slot: int, index: int, length: int, flags: int) -> memoryview:
        return self.channel.place(slot, index, length, flags)

    def placed(self, slot: int, index: int) -> None:
        self.channel.placed(slot, index)
        if not self._due and self.channel.due(chunks=self.owner.on_chunk is not None):
            self._due = True
            self.link.soon(self._after)

    def _after(self) -> None:
        self._due = False
        self.pump()

    def pump(self) -> None:
        """Carry what the automaton has to say and what happened."""
        session = self.link.session
        if self.over or not session.is_live(self.control):
            return
        self._flush()
        for event in self.channel.events():
            self.owner.happened(self, event)
        self._flush()
        if self._closing and not self._outbox:
            self._send_fin()
        self.link.kick()

    def _flush(self) -> None:
        session = self.link.session
        self._outbox.extend(map(encode, self.channel.messages()))
        while self._outbox and session.sendable(self.control, len(self._outbox[0])) >= len(self._outbox[0]):
            session.send(self.control, self._outbox.popleft(), now=trio.current_time())

    def retire(self) -> None:
        """Another channel takes over: withdraw what nothing was begun into."""
        for inner in [inner for inner in self.posts if inner not in self.begun]:
            self.channel.unpost(inner)
        self.pump()

    def close(self) -> None:
        """We want no more: withdraw everything, say FIN behind the last Done, and wait for the sender to finish.

        A reset would be quicker and could overtake that Done; the sender would take a delivered tensor for a lost one.
        """
        self._closing = True
        for inner in list(self.posts):
            self.channel.unpost(inner)
        self.pump()

    def _send_fin(self) -> None:
        if not self._fin_sent:
            self._fin_sent = True
            self.link.session.send(self.control, b"", fin=True, now=trio.current_time())

    def finished(self, stream: int) -> None:
        """The sender sends no more on this stream.  When that is true of both, the channel is over here."""
        self.link.ends.pop(stream, None)
        self._open_streams.discard(stream)
        if not self._open_streams:
            self.end(error_for(Code.CANCELLED, detail="the sender closed the channel"))

    # -- StreamEnd of the control stream

    def on_readable(self) -> None:
        session = self.link.session
        try:
            while session.is_live(self.control) and (message := session.read_message(self.control)) is not None:
                if not message:
                    self.pump()
                    self._send_fin()
                    self.finished(self.control)
                    return
                heard = decode(message, Begin, Drop)
                if isinstance(heard, Begin):
                    self.begun.add(heard.slot)
                self.channel.on_message(heard)
        except RemoteProtocolError as error:
            self.link.fail(error)
            return
        self.pump()

    def on_writable(self) -> None:
        self.pump()

    def on_accepted(self) -> None: ...

    def on_pipe_end(self) -> None: ...

    def on_reset(self, error: WireError) -> None:
        self.end(error)

    def end(self, error: WireError) -> None:
        """The session writes no more into our buffers on this connection."""
        if self.over:
            return
        self.over = True
        self.owner.side_over(self)
        if self.link.error is None:
            for number in (self.control, self.chunks):
                if number in self._open_streams:
                    self.link.reset(number)
        self.channel.close(error.code if error.code is not Code.OK else Code.INTERNAL)
        for event in self.channel.events():
            self.owner.happened(self, event)


class _ChunkEnd:
    """The chunk stream's events: only its end matters."""

    def __init__(self, side: _Side, number: int) -> None:
        self._side = side
        self._number = number

    def on_readable(self) -> None:
        """The sender's FIN: ours goes back, and the session forgets the stream."""
        if self._side.link.session.is_live(self._number):
            self._side.link.session.send(self._number, b"", fin=True, now=trio.current_time())
            self._side.finished(self._number)

    def on_writable(self) -> None: ...

    def on_accepted(self) -> None: ...

    def on_pipe_end(self) -> None: ...

    def on_reset(self, error: WireError) -> None:
        self._side.end(error)


class TensorReceiver:
    """Made by `Peer.receiver`.  One task receives; posting is synchronous."""

    def __init__(
        self,
        protocol: str,
        name: bytes,
        expect: Callable[[Key], Expectation | None],
        delivered: DeliveredKeys,
        limits: Limits,
        forget: Callable[[], object],
    ) -> None:
        self.protocol = protocol
        self.name = name
        self.expect = expect
        self.delivered = delivered
        self.limits = limits
        self.on_chunk: Callable[[ChunkReady], None] | None = None  # bytes of a slot are final; the tensor is not whole yet
        self.on_dropped: Callable[[Dropped], None] | None = None
        self.side: _Side | None = None  # the channel in use
        self._sides: list[_Side] = []  # with those that finish what was begun on them
        self._forget = forget
        self._next = 0
        self._posts: dict[int, _Post] = {}
        self._ready: deque[Received] = deque()
        self._task: trio.lowlevel.Task | None = None
        self._error: WireError | None = None

    @property
    def posted(self) -> int:
        """Buffers that belong to the channel."""
        return len(self._posts)

    def post(self, buffer: memoryview, key: Key | None = None) -> int:
        """Offer writable, contiguous memory for one tensor, of `key` if given; returns the slot, which is never used again."""
        if self._error is not None:
            raise self._error
        if buffer.readonly or not buffer.c_contiguous or buffer.nbytes > self.limits.tensor_max_bytes:
            raise LocalProtocolError(f"a slot needs writable, contiguous memory of at most {self.limits.tensor_max_bytes} bytes")
        post = _Post(self._next, buffer.cast("B"), key)
        self._next += 1
        self._posts[post.slot] = post
        self._offer()
        return post.slot

    def unpost(self, slot: int) -> bool:
        """Withdraw a slot; its `Dropped` follows, at once or after the chunk under way.  False if it has ended already."""
        post = self._posts.get(slot)
        if post is None:
            return False
        post.withdrawn = True
        if post.side is None:
            self._drop(post, post.key, Code.CANCELLED)
        else:
            post.side.channel.unpost(post.inner)
            post.side.pump()
        return True

    async def receive(self) -> Received:
        """The next whole tensor.  Raises what ended the channel, after everything that had arrived.  A cancel loses nothing."""
        if self._task is not None:
            raise trio.BusyResourceError("another task is receiving on this channel")
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self._ready:
            if self._error is not None:
                raise self._error
            self._task = trio.lowlevel.current_task()

            def aborted(_: object) -> trio.lowlevel.Abort:
                self._task = None
                return trio.lowlevel.Abort.SUCCEEDED

            await trio.lowlevel.wait_task_rescheduled(aborted)
        return self._ready.popleft()

    def close(self) -> None:
        """End the channel: every posted buffer comes back as `Dropped`, `receive` raises CANCELLED.

        A buffer into which a chunk is under way comes back after that chunk.  A new receiver may be made at once.
        """
        self.lost(error_for(Code.CANCELLED, local=True, detail="the receiver was closed"))
        self.side = None
        for side in list(self._sides):
            side.close()

    def _offer(self) -> None:
        side = self.side
        if side is None or side.over:
            return
        for post in self._posts.values():
            if post.side is None and side.channel.open_slots < self.limits.slots_open_max:
                side.post(post)
        side.pump()

    def _wake(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            trio.lowlevel.reschedule(task)

    def _drop(self, post: _Post, key: Key | None, code: Code) -> None:
        del self._posts[post.slot]
        if self.on_dropped is not None:
            self.on_dropped(Dropped(post.slot, key, code, post.buffer))

    # -- called by the side and by the peer

    def opened(self, link: Link, event: StreamOpened) -> None:
        """The peer opened one of the channel's two streams."""
        if event.kind is Kind.MESSAGE:
            old, self.side = self.side, _Side(self, link, event.stream)
            self._sides.append(self.side)
            if old is not None and not old.over:
                old.retire()
            self._offer()
        elif event.kind is Kind.CHUNKS and self.side is not None and self.side.link is link:
            self.side.take_chunks(event.stream)
        else:
            link.session.refuse(event.stream, Code.PROTOCOL)

    def happened(self, side: _Side, event: ChunkReady | TensorReceived | TensorDropped) -> None:
        """Translate an event of a channel's slot into one of ours."""
        if isinstance(event, ChunkReady):
            if self.on_chunk is not None:
                self.on_chunk(replace(event, slot=side.posts[event.slot].slot))
            return
        post = side.posts.pop(event.slot)
        side.begun.discard(event.slot)
        post.side, post.inner = None, -1
        if isinstance(event, TensorReceived):
            del self._posts[post.slot]
            self._ready.append(Received(post.slot, event.key, event.begin, event.buffer))
            self._wake()
            self._offer_later(side)
        elif post.withdrawn or (post.key is not None and event.code is not Code.CANCELLED) or self._error is not None:
            self._drop(post, event.key, event.code)
        elif post.key is not None and not side.over and side is self.side:
            self._drop(post, event.key, event.code)  # the sender gave this key up
        else:
            self._offer_later(side)

    def _offer_later(self, side: _Side) -> None:
        """Slots that wait may go now.  Not re-entered from the pump of the same side, which flushes by itself."""
        current = self.side
        if current is None or current.over:
            return
        for post in self._posts.values():
            if post.side is None and current.channel.open_slots < self.limits.slots_open_max:
                current.post(post)
        if current is not side:
            current.pump()

    def side_over(self, side: _Side) -> None:
        self._sides.remove(side)
        if self.side is side:
            self.side = None

    def lost(self, error: WireError) -> None:
        """No connection is left: every buffer comes back, then `receive` raises."""
        if self._error is not None:
            return
        self._error = error
        for post in list(self._posts.values()):
            if post.side is None:
                self._drop(post, post.key, error.code if error.code is not Code.OK else Code.INTERNAL)
        self._wake()
        self._forget()
