"""The sending end of a tensor channel, as tasks see it.

A channel is two streams of one connection: a message stream of class 1 for Begin, Done and slots, and a chunk stream that
pulls bytes straight out of the caller's buffer.  The automaton is `wire.sending.SenderChannel`; here stand the waiting and
the connection.

* `send` waits for a slot, then for the receiver's Done.  Of several waiting sends the one with the lowest `order` gets the next
  slot that fits, because the oldest microbatch holds up the most work; the choice is made when the slot arrives, not when some
  task happens to run.
* A cancel before the slot leaves nothing; afterwards it becomes a Drop, the slot is burned at both ends, and at most the chunk
  under way is still sent.  Its rest is copied, and the buffer is the caller's at once: to wait instead would hold up the cancel for
  as long as the peer likes; to seal from memory in new use could deliver a cancelled tensor with foreign bytes.
* When another connection becomes the primary one, the channel is opened anew there.  Transfers that were begun finish where they
  are; the receiver withdraws its unused slots from the old channel and posts them on the new one, and a transfer that met such
  a withdrawal (REFUSED) waits for a slot again by itself.
* A peer that does not know the protocol yet (PROTOCOL_UNKNOWN) may be about to: the channel is opened again, ever more rarely.
* A lost connection ends begun transfers with its cause.  Taking them up where they were would need the bitmaps of `wire.slots`.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence

import trio

from wire.errors import Code, ConnectionLost, LimitExceeded, LocalProtocolError, RemoteProtocolError, WireError, error_for
from wire.events import Kind
from wire.limits import Limits
from wire.messages import Done, Key, Slot, Unslot, decode, encode
from wire.net.link import Link
from wire.net.ready import ReadyBytes
from wire.sending import SendEnded, SenderChannel
from wire.tensor import DType

# A peer that has just met us may not have got round to making its receiver: opened again after 50 ms, then ever more rarely.
REOPEN_MIN_S = 0.05
REOPEN_MAX_S = 2.0


class _Send:
    """One call of `send`."""

    __slots__ = (
        "age", "codec", "data", "done", "dtype", "error", "key", "order", "ready", "shape", "side", "tags", "task", "transfer",
    )  # fmt: skip

    def __init__(
        self, age: int, key: Key, data: memoryview, dtype: DType, shape: tuple[int, ...], codec: int, order: int,
        tags: tuple[int, ...], ready: ReadyBytes | None,
    ) -> None:  # fmt: skip
        self.age, self.key, self.data, self.dtype, self.shape = age, key, data, dtype, shape
        self.codec, self.order, self.tags, self.ready = codec, order, tags, ready
        self.side: _Side | None = None  # set once a slot was taken
        self.transfer = -1
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


class _Side:
    """The channel on one connection: the automaton, its two streams, and the sends that have a slot there."""

    def __init__(self, owner: TensorSender, link: Link) -> None:
        self.owner = owner
        self.link = link
        self.channel = SenderChannel(os.urandom, owner.limits, on_change=lambda: link.soon(self.on_writable))
        self.sends: dict[int, _Send] = {}
        self.over = False
        self._outbox: deque[bytes] = deque()
        now = trio.current_time()
        session = link.session
        self.control = session.open_stream(Kind.MESSAGE, owner.protocol, 1, meta=owner.name, now=now)
        link.attach(self.control, self)
        self.chunks = session.open_stream(Kind.CHUNKS, owner.protocol, owner.cls, meta=owner.name, now=now)
        link.attach(self.chunks, _ChunkEnd(self))
        session.attach_source(self.chunks, self.channel, owner.cls)
        link.kick()

    def begin(self, send: _Send) -> None:
        send.transfer = self.channel.begin(
            send.key,
            send.data,
            dtype=send.dtype,
            shape=send.shape,
            codec=send.codec,
            order=send.order,
            tags=send.tags,
            ready_bytes=None if send.ready is None else send.ready.ready_bytes,
        )
        send.side = self
        self.sends[send.transfer] = send
        if send.ready is not None:
            send.ready.listen(lambda ready_bytes: self._advance(send, ready_bytes))

    def _advance(self, send: _Send, ready_bytes: int) -> None:
        if not self.over:
            self.channel.advance(send.transfer, ready_bytes)
            self.pump()

    def cancel(self, send: _Send) -> None:
        if self.sends.pop(send.transfer, None) is not None and not self.over:
            self._copy_chunk()
            self.channel.cancel(send.transfer)
            self.pump()

    def _copy_chunk(self) -> None:
        """A buffer is about to be its owner's again while the session may still be sealing from it."""
        if self.link.session.is_live(self.chunks):
            self.link.session.copy_unsent(self.chunks)

    def pump(self) -> None:
        """Carry what the automaton has to say, as far as there is credit, and what happened to the sends."""
        session = self.link.session
        self._outbox.extend(map(encode, self.channel.messages()))
        if not session.is_live(self.control) or not session.is_live(self.chunks):
            return  # reset by the peer, in the batch that is being carried: that event follows
        while self._outbox and session.sendable(self.control, len(self._outbox[0])) >= len(self._outbox[0]):
            session.send(self.control, self._outbox.popleft(), now=trio.current_time())
        if self.channel.has_chunk:
            session.source_ready(self.chunks)
        self._tell()
        if self.owner.side is not self:
            self.retire()
        self.link.kick()

    def _tell(self) -> None:
        changed = False
        for event in self.channel.events():
            if isinstance(event, SendEnded):
                send = self.sends.pop(event.transfer, None)
                if send is not None:
                    self.owner.ended(send, event.code, self.link.error)
            else:
                changed = True
        if changed and self.owner.side is self:
            self.owner.slots_changed()

    def retire(self) -> None:
        """Close the streams once nothing is under way: another connection carries the channel, or it is closed."""
        if self.over or self.sends or self._outbox:
            return
        self.over = True
        session, now = self.link.session, trio.current_time()
        for number in (self.control, self.chunks):
            if session.is_live(number):  # the connection may have ended within the kick that brought us here
                session.send(number, b"", fin=True, now=now)
        self.link.kick()

    # -- StreamEnd

    def on_readable(self) -> None:
        session = self.link.session
        try:
            while session.is_live(self.control) and (message := session.read_message(self.control)) is not None:
                if not message:
                    self._closed_by_receiver()
                    return
                self.channel.on_message(decode(message, Slot, Unslot, Done))
        except RemoteProtocolError as error:
            self.link.fail(error)
            return
        if not self.over:
            self.pump()

    def _closed_by_receiver(self) -> None:
        """It wants no more.  What it has acknowledged stands; the rest is cancelled, and we finish both streams."""
        self.link.ends.pop(self.control, None)
        if self.over:
            return
        self.pump()
        self._copy_chunk()
        self.channel.close(Code.CANCELLED)  # nothing more is read from the buffers, whether their slots were withdrawn or not
        error = error_for(Code.CANCELLED, detail="the receiver closed the channel")
        for send in list(self.sends.values()):
            send.finish(error)
        self.sends.clear()
        self._outbox.clear()
        self.retire()
        if self.owner.side is self:
            self.owner.lost(error)

    def on_writable(self) -> None:
        if not self.over:
            self.pump()

    def on_accepted(self) -> None: ...
    def on_pipe_end(self) -> None:
        self.on_readable()  # a last Done may lie there

    def on_reset(self, error: WireError) -> None:
        self.end(error)

    def end(self, error: WireError) -> None:
        """The channel is gone on this connection."""
        if self.over:
            return
        self.over = True
        self.channel.close(error.code if error.code is not Code.OK else Code.INTERNAL)
        self.channel.events()
        sends, self.sends = self.sends, {}
        for send in sends.values():
            send.finish(error)
        if self.link.error is None:
            for number in (self.control, self.chunks):
                self.link.reset(number)
            self.owner.refused(self, error)


class _ChunkEnd:
    """The chunk stream's events: only its end matters."""

    def __init__(self, side: _Side) -> None:
        self._side = side

    def on_readable(self) -> None:
        self._side.link.ends.pop(self._side.chunks, None)  # the receiver's FIN

    def on_writable(self) -> None: ...
    def on_accepted(self) -> None: ...
    def on_pipe_end(self) -> None: ...

    def on_reset(self, error: WireError) -> None:
        self._side.end(error)


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
        self.side: _Side | None = None
        self._forget = forget
        self._later = later
        self._refusals = 0
        self._age = 0
        self._waiting: list[_Send] = []
        self._error: WireError | None = None

    def free_slots(self, key: Key | None = None) -> int:
        """Slots posted and not taken: those for `key` and those for any; without a key only the latter."""
        return 0 if self.side is None or self.side.over else self.side.channel.free_slots(key)

    @property
    def pending(self) -> int:
        """Calls of `send` that have not ended."""
        return len(self._waiting) + (len(self.side.sends) if self.side is not None else 0)

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
        TOO_LARGE), of a reset channel or of a lost connection; `LocalProtocolError` for a buffer that cannot be sent.
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
            elif send.side is not None and not send.done:
                send.side.cancel(send)
            raise
        if send.error is not None:
            raise send.error

    def close(self) -> None:
        """End the channel: waiting sends are cancelled (CANCELLED), the streams closed.  A new sender may be made afterwards."""
        self._forget()
        error = error_for(Code.CANCELLED, local=True, detail="the sender was closed")
        side, self.side = self.side, None
        if side is not None and not side.over:
            for send in list(side.sends.values()):
                side.cancel(send)
                send.finish(error)
            side.pump()
        self.lost(error)

    def _assign(self) -> None:
        """Give free slots to waiting sends, oldest first."""
        side = self.side
        if side is None or side.over:
            return
        begun = False
        for send in sorted(self._waiting, key=lambda item: (item.order, item.age)):
            if side.channel.free_slots(send.key, len(send.data)):
                side.begin(send)
                self._waiting.remove(send)
                begun = True
        if begun:
            side.pump()

    # -- called by the side and by the peer

    def slots_changed(self) -> None:
        if self._waiting:
            self._assign()
        if self.on_slots is not None:
            self.on_slots()

    def ended(self, send: _Send, code: Code, lost: WireError | None) -> None:
        """The receiver's word on a transfer."""
        if code is Code.REFUSED and lost is None and self._error is None:
            send.side = None  # its slot was withdrawn while our Begin was under way: into another
            self._waiting.append(send)
            self._assign()
        else:
            send.finish(None if code is Code.OK else lost or error_for(code, detail=f"{self.protocol} {send.key!r}"))

    def refused(self, side: _Side, error: WireError) -> None:
        """The peer ended the channel, the connection stands.  If nobody there knows of it yet, it is opened again."""
        if self.side is not side or self._error is not None:
            return
        if error.code is Code.PROTOCOL_UNKNOWN:
            self.side = None
            delay_s = min(REOPEN_MAX_S, REOPEN_MIN_S * 2.0 ** min(self._refusals, 16))
            self._refusals += 1
            self._later(delay_s, lambda: self._reopen(side.link))
        else:
            self.lost(error)

    def _reopen(self, link: Link) -> None:
        if self.side is None and link.error is None and not link.draining:
            self.move_to(link)

    def move_to(self, link: Link) -> None:
        """This connection carries the channel from now on."""
        old = self.side
        if self._error is not None or (old is not None and old.link is link):
            return
        try:
            self.side = _Side(self, link)
        except (LimitExceeded, LocalProtocolError) as error:
            self.side = None
            self.lost(error)
        if old is not None and not old.over:
            old.retire()

    def lost(self, error: WireError) -> None:
        """No connection is left, or the peer refuses the channel: whatever waits gets `error`, so does every later call."""
        if self._error is not None:
            return
        self._error = error if isinstance(error, WireError) else ConnectionLost(error)
        waiting, self._waiting = self._waiting, []
        for send in waiting:
            send.finish(self._error)
        self._forget()
        if self.on_slots is not None:
            self.on_slots()
