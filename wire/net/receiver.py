"""The receiving end of a tensor channel, as tasks see it.

The application posts buffers; what arrives is decrypted straight into them (`wire.slots.ReceiverChannel` decides what may be
written where).  The automaton lives as long as this object; connections come and go under it:

* Buffers posted before the peer has opened the channel wait for it.
* The peer opens the channel by a message stream on a control connection; that is an *attachment* (`wire.net.landing`).  Chunks
  come over chunk streams of that connection's lanes, or of itself.  A new attachment ends the one before: we say anew what is
  posted and what of it is here, and the sender goes on from there.
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
from wire.errors import Code, LocalProtocolError, WireError, error_for
from wire.limits import Limits
from wire.messages import Begin, Key
from wire.net.features import FEATURES
from wire.net.landing import Landing
from wire.net.link import Link
from wire.slots import ChunkReady, ReceiverChannel, ReceiverEvent, TensorReceived
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
    inner: int | None = None  # its number in the automaton; None while that has as many open slots as it may
    withdrawn: bool = False  # by the application


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
        self.limits = limits
        self.on_chunk: Callable[[ChunkReady], None] | None = None  # bytes of a slot are final; the tensor is not whole yet
        self.on_dropped: Callable[[Dropped], None] | None = None
        self.channel = ReceiverChannel(expect, delivered, limits, features=FEATURES)
        self.at: Landing | None = None
        self._forget = forget
        self._next = 0
        self._posts: dict[int, _Post] = {}
        self._by_inner: dict[int, _Post] = {}
        self._ready: deque[Received] = deque()
        self._task: trio.lowlevel.Task | None = None
        self._error: WireError | None = None

    @property
    def posted(self) -> int:
        """Buffers that belong to the channel."""
        return len(self._posts)

    @property
    def closed(self) -> bool:
        """We want no more."""
        return self._error is not None

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
        if post.inner is None:
            self._drop(post, post.key, Code.CANCELLED)
        else:
            self.channel.unpost(post.inner)
            self.pump()
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

    def _offer(self) -> None:
        """Post what the automaton has room for.  A channel that we close takes no more."""
        if self._error is None:
            for post in self._posts.values():
                if post.inner is None and self.channel.open_slots < self.limits.slots_open_max:
                    post.inner = self.channel.post(post.buffer, post.key)
                    self._by_inner[post.inner] = post
        self.pump()

    def pump(self) -> None:
        """Carry what the automaton has to say and what happened."""
        at = self.at
        if at is not None:
            at.flush()
        again = False
        for event in self.channel.events():
            again |= self._happened(event)
        if again:
            self._offer()
        elif at is not None:
            at.flush()
            at.link.kick()

    def _happened(self, event: ReceiverEvent) -> bool:
        """Turn an event of a channel's slot into one of ours; True if there is room for slots that wait."""
        post = self._by_inner.get(event.slot)
        if post is None:
            return False
        if isinstance(event, ChunkReady):
            if self.on_chunk is not None:
                self.on_chunk(replace(event, slot=post.slot))
            return False
        del self._by_inner[event.slot]
        post.inner = None
        if isinstance(event, TensorReceived):
            del self._posts[post.slot]
            self._ready.append(Received(post.slot, event.key, event.begin, event.buffer))
            self._wake()
        elif post.withdrawn or post.key is not None or self._error is not None:
            self._drop(post, event.key, event.code)
        return True

    def _wake(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            trio.lowlevel.reschedule(task)

    def _drop(self, post: _Post, key: Key | None, code: Code) -> None:
        del self._posts[post.slot]
        if self.on_dropped is not None:
            self.on_dropped(Dropped(post.slot, key, code, post.buffer))

    # -- called by the attachment and by the peer

    def land(self, link: Link, control: int) -> None:
        """The peer opened the channel on a control connection; an attachment before that one is over."""
        if self.at is not None:
            self.at.leave()
        self.at = Landing(self, link, control)
        self.channel.attach()
        self.pump()

    def detached(self, at: Landing) -> None:
        """Nothing can be written any more by that attachment; what is posted waits for the next."""
        if self.at is at:
            self.at = None
            self.channel.detach()
            if self._error is not None:
                self.channel.close(Code.CANCELLED)
            self.pump()

    def lost(self, error: WireError) -> None:
        """Nothing more will come: every buffer comes back, at the latest when the sender has finished its streams."""
        if self._error is not None:
            return
        self._error = error
        for post in list(self._posts.values()):
            if post.inner is None:
                self._drop(post, post.key, error.code if error.code is not Code.OK else Code.INTERNAL)
            elif self.at is not None:
                self.channel.unpost(post.inner)
        if self.at is None:
            self.channel.close(error.code if error.code is not Code.OK else Code.INTERNAL)
        self.pump()
        if self.at is not None:
            self.at.retire()
        self._wake()
        self._forget()
