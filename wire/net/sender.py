"""The sending end of a tensor channel, as tasks see it.

The automaton `wire.sending.SenderChannel` lives as long as this object; connections come and go under it.  At any time the channel
is attached to at most one control connection, by a message stream for Begin, Done and slots, and pulls chunks over *carriers*: one
chunk stream on each lane of that connection, or on the control connection itself while there is no lane.

* `send` waits for a slot, then for the receiver's Done.  Of several waiting sends the one with the lowest `order` gets the next
  slot that fits, because the oldest microbatch holds up the most work; the choice is made when the slot arrives, not when some
  task happens to run.
* A cancel before the slot leaves nothing; afterwards it becomes a Drop, the slot is burned at both ends, and at most the chunk
  under way on each lane is still sent.  Its rest is copied, and the buffer is the caller's at once: to wait instead would hold up
  the cancel for as long as the peer likes; to seal from memory in new use could deliver a cancelled tensor with foreign bytes.
* A lane that ends puts its chunks in doubt: the automaton asks what came (Ask, Have), and only the rest is sent again.
* Another control connection (the first was lost, or superseded) is a new attachment: the receiver says what it has, and what is
  missing goes over the new carriers.  A transfer whose slot was withdrawn meanwhile (REFUSED) waits for a slot again by itself.
* Openings on two connections overtake each other: the receiver, which believes the one that came last, may then end the one that
  counts (SUPERSEDED).  It is opened again; by then the other one has been reset.
* A peer that does not know the protocol yet (PROTOCOL_UNKNOWN) may be about to: the channel is opened again, ever more rarely.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import trio

from wire.errors import Code, ConnectionLost, LimitExceeded, LocalProtocolError, WireError, error_for
from wire.limits import Limits
from wire.messages import Key
from wire.net.carrier import Attachment
from wire.net.link import Link
from wire.net.ready import ReadyBytes
from wire.packing import Packing, PackingStats
from wire.sending import SendEnded, SenderChannel
from wire.tensor import DType

# A peer that has just met us may not have got round to making its receiver: opened again after 50 ms, then ever more rarely.
REOPEN_MIN_S = 0.05
REOPEN_MAX_S = 2.0


class _Send:
    """One call of `send`."""

    __slots__ = (
        "age", "codec", "data", "done", "dtype", "error", "key", "moved", "order", "ready", "shape", "tags", "task", "transfer",
    )  # fmt: skip

    def __init__(
        self, age: int, key: Key, data: memoryview, dtype: DType, shape: tuple[int, ...], codec: int, order: int,
        tags: tuple[int, ...], ready: ReadyBytes | None,
    ) -> None:  # fmt: skip
        self.age, self.key, self.data, self.dtype, self.shape = age, key, data, dtype, shape
        self.codec, self.order, self.tags, self.ready = codec, order, tags, ready
        self.transfer = -1  # its number once a slot was taken
        self.moved = False  # it had a slot before, so the receiver may have it already
        self.task: trio.lowlevel.Task | None = None
        self.done = False
        self.error: WireError | None = None

    def aborted(self, _: object) -> trio.lowlevel.Abort:
        """The sending task was cancelled: from now on its end wakes nobody, also before that task runs again."""
        self.task = None
        return trio.lowlevel.Abort.SUCCEEDED

    def finish(self, error: WireError | None) -> None:
        self.done = True
        self.error = error
        if self.ready is not None:
            self.ready.listen(None)
        task, self.task = self.task, None
        if task is not None:
            trio.lowlevel.reschedule(task)


class TensorSender:
    """Made by `Peer.sender`.  Any number of tasks may send at once."""

    def __init__(
        self,
        protocol: str,
        name: bytes,
        cls: int,
        limits: Limits,
        forget: Callable[[], object],
        later: Callable[[float, Callable[[], None]], None],
    ) -> None:
        self.protocol = protocol
        self.name = name
        self.cls = cls
        self.limits = limits
        self.on_slots: Callable[[], None] | None = None  # called when slots were posted or withdrawn
        self.packing = Packing(time.perf_counter, limits)
        self.channel = SenderChannel(os.urandom, limits, on_change=self._changed, packing=self.packing)
        self.changed = False  # something happened in the middle of a pull
        self.at: Attachment | None = None
        self._lanes: tuple[Link, ...] = ()
        self._sends: dict[int, _Send] = {}  # by transfer
        self._forget = forget
        self._later = later
        self._refusals = 0
        self._age = 0
        self._waiting: list[_Send] = []
        self._error: WireError | None = None

    def free_slots(self, key: Key | None = None) -> int:
        """Slots posted and not taken: those for `key` and those for any; without a key only the latter."""
        return 0 if self.at is None else self.channel.free_slots(key)

    @property
    def pending(self) -> int:
        """Calls of `send` that have not ended."""
        return len(self._waiting) + len(self._sends)

    @property
    def queued_bytes(self) -> int:
        """Of those calls: what waits for a slot, or for a lane to take it."""
        return sum(len(send.data) for send in self._waiting) + self.channel.unsent_bytes

    @property
    def packed(self) -> PackingStats:
        """Bytes of tensors and what they were on the wire, and whether chunks are packed now."""
        return self.packing.stats()

    async def send(
        self,
        key: Key,
        buffer: memoryview,
        *,
        dtype: DType,
        shape: Sequence[int],
        codec: int = 0,
        order: int = 0,
        tags: Sequence[int] = (),
        ready: ReadyBytes | None = None,
    ) -> None:
        """Send one encoded tensor; returns when the receiver has all of it and handed it over.

        `buffer`: contiguous, <= 256 MiB, unchanged until this returns or raises.  `order`: age, lowest first.  `ready`: for a
        buffer that is still being filled.  Raises the `WireError` of the receiver's Done (EXPECTATION, DUPLICATE, STALE,
        TOO_LARGE), of a reset channel, or of the peer's loss; a connection that is lost and made again within
        `resume_silent_s` is not noticed here.  `LocalProtocolError` for a buffer that cannot be sent.
        A cancel drops the tensor at both ends; whether the receiver had it already is then unknown.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._error is not None:
            raise self._error
        self._age += 1
        send = _Send(self._age, key, buffer.cast("B"), dtype, tuple(shape), codec, order, tuple(tags), ready)
        self._waiting.append(send)
        try:
            self._assign()
            while not send.done:
                send.task = trio.lowlevel.current_task()
                await trio.lowlevel.wait_task_rescheduled(send.aborted)
        except BaseException:
            send.task = None
            if send.ready is not None:
                send.ready.listen(None)
            if send in self._waiting:
                self._waiting.remove(send)
            elif self._sends.pop(send.transfer, None) is not None:
                self._cancel(send)
            raise
        if send.error is not None:
            raise send.error

    def close(self) -> None:
        """End the channel: waiting sends are cancelled (CANCELLED), the streams closed.  A new sender may be made afterwards."""
        self._forget()
        error = error_for(Code.CANCELLED, local=True, detail="the sender was closed")
        sends, self._sends = self._sends, {}
        for send in sends.values():
            self._cancel(send)
            send.finish(error)
        at = self.at
        if at is not None:
            at.retire()
        self.lost(error)

    def _cancel(self, send: _Send) -> None:
        """The buffer is about to be its owner's again while sessions may still be sealing from it."""
        if self.at is not None:
            self.at.copy_chunks()
        self.channel.cancel(send.transfer)
        self.pump()

    def _assign(self) -> None:
        """Give free slots to waiting sends, oldest first."""
        if self.at is None or self.at.over:
            return
        begun = False
        for send in sorted(self._waiting, key=lambda item: (item.order, item.age)):
            if self.channel.free_slots(send.key, len(send.data)):
                self._begin(send)
                self._waiting.remove(send)
                begun = True
        if begun:
            self.pump()

    def _begin(self, send: _Send) -> None:
        send.transfer = self.channel.begin(
            send.key,
            send.data,
            dtype=send.dtype,
            shape=send.shape,
            codec=send.codec,
            order=send.order,
            tags=send.tags,
            ready_bytes=None if send.ready is None else send.ready.ready_bytes,
            moved=send.moved,
        )
        self._sends[send.transfer] = send
        if send.ready is not None:
            send.ready.listen(lambda ready_bytes: self._advance(send, ready_bytes))

    def _advance(self, send: _Send, ready_bytes: int) -> None:
        if not send.done and send.transfer in self._sends:
            self.channel.advance(send.transfer, ready_bytes)
            self.pump()

    def pump(self) -> None:
        """Carry what the automaton has to say, as far as there is credit, and what happened to the sends."""
        at = self.at
        if at is not None:
            at.flush()
        self._tell()
        if at is not None:
            at.kick()

    def _tell(self) -> None:
        changed = False
        for event in self.channel.events():
            if isinstance(event, SendEnded):
                send = self._sends.pop(event.transfer, None)
                if send is not None:
                    self._ended(send, event.code)
            else:
                changed = True
        if changed:
            self._assign()
            if self.on_slots is not None:
                self.on_slots()

    def _ended(self, send: _Send, code: Code) -> None:
        """The receiver's word on a transfer."""
        if code is Code.REFUSED and self._error is None:
            send.moved = True  # its slot was withdrawn while our Begin was under way: into another
            self._waiting.append(send)
            self._assign()
        else:
            send.finish(None if code is Code.OK else error_for(code, detail=f"{self.protocol} {send.key!r}"))

    def _changed(self) -> None:
        self.changed = True

    # -- connections: called by the attachment and by the peer

    def move_to(self, link: Link, lanes: Sequence[Link]) -> None:
        """This control connection, with these lanes, carries the channel from now on."""
        old = self.at
        if self._error is not None or (old is not None and old.link is link):
            return
        if old is not None:
            old.leave()
            self.detached(old)
        self._lanes = tuple(lanes)
        self.packing.meets(link.hello.features)
        try:
            self.at = Attachment(self, link)
        except (LimitExceeded, LocalProtocolError) as error:
            self.lost(error)
            return
        self.channel.attach()
        self.at.use(lanes)
        self.pump()

    def use(self, link: Link, lanes: Sequence[Link]) -> None:
        """The lanes of a control connection have changed."""
        if self.at is not None and self.at.link is link and not self.at.over:
            self._lanes = tuple(lanes)
            self.at.use(lanes)
            self.pump()

    def detached(self, at: Attachment) -> None:
        """The control connection is gone, or not ours any more.  What was begun waits for the next."""
        if self.at is at:
            self.at = None
            self.channel.detach()
            self._tell()

    def refused(self, at: Attachment, error: WireError) -> None:
        """The peer ended the channel, the connection stands.  If nobody there knows of it yet, it is opened again."""
        if self.at is not at or self._error is not None:
            return
        at.leave()
        self.detached(at)
        if error.code in (Code.PROTOCOL_UNKNOWN, Code.SUPERSEDED):
            delay_s = min(REOPEN_MAX_S, REOPEN_MIN_S * 2.0 ** min(self._refusals, 16))
            self._refusals += 1
            self._later(delay_s, lambda: self._reopen(at.link))
        else:
            self.lost(error)

    def _reopen(self, link: Link) -> None:
        if self.at is None and link.error is None and not link.draining:
            self.move_to(link, self._lanes)

    def closed_by_receiver(self) -> None:
        """It wants no more.  What it has acknowledged stands; the rest is cancelled, and we finish our streams."""
        self.pump()
        if self.at is not None:
            self.at.copy_chunks()
        self.lost(error_for(Code.CANCELLED, detail="the receiver closed the channel"))

    def lost(self, error: WireError) -> None:
        """Nothing is left to wait for: whatever waits gets `error`, so does every later call."""
        if self._error is not None:
            return
        self._error = error if isinstance(error, WireError) else ConnectionLost(error)
        self.channel.close(Code.CANCELLED)  # nothing more is read from the buffers
        self.channel.events()
        waiting, self._waiting = [*self._waiting, *self._sends.values()], []
        self._sends.clear()
        for send in waiting:
            send.finish(self._error)
        at, self.at = self.at, None
        if at is not None:
            at.retire()
        self._forget()
        if self.on_slots is not None:
            self.on_slots()
