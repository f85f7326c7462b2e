"""One connection at work: the session between a pipe and the tasks that wait for something to happen on a stream.

A `Link` has three tasks.  The *reader* fills one reused buffer, gives whole records to the session and carries the session's
events to whoever waits; it never waits for an application and never for the writer, so no deadlock of two full pipes can exist
(WIRE-13).  The *writer* asks the session for the next records only when the pipe takes some.  The *ticker* tells the session
the time when the session asked for it.

What costs time in such a design is task switches, about 15 us each in trio, against 2 us to seal a short record.  So:

* `kick` sends inline, in the caller's own task, when the writer sleeps: seal, one `sendmsg`, done.  What the kernel does not
  take at once is left to the writer.  One call takes at most `INLINE_BYTES`, so that a caller with much to send does not
  keep the loop for itself.
* A task that waits for a stream is rescheduled directly by the event; no queue, no condition variable, no notifier task.
* The reader and the writer go on while the pipe gives or takes, and yield after 1 MiB or 2 ms.
* Bulk is decrypted straight into the buffer that a waiting task has posted.  When it is full, its task must run before the next
  record is opened, or that record needs memory of its own and a copy: the reader gives way (`give_way`) for two rounds of the
  scheduler, because within one trio runs tasks in random order.  It waits for nobody: without a buffer in time bytes are
  kept, up to the credit.  A receiver needs 275 us a MiB with this, 330 with one round or none (`python -m bench link`).

Who hears what: `Owner` (the manager) hears of the connection, a `StreamEnd` hears of its stream.  All these calls are made
synchronously from the reader, the writer or a sender's own task: they may call the session and `kick`, and must not block.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import trio

from wire.address import Address
from wire.connection import ConnectionState
from wire.errors import Code, ConnectionLost, RemoteProtocolError, WireError, error_for
from wire.events import Event, GoAwayReceived, HelloReceived, RttMeasured, SessionClosed, StreamOpened
from wire.identity import PeerId
from wire.intake import Intake
from wire.limits import Limits
from wire.messages import SessionHello
from wire.net.causes import heard_nothing
from wire.net.ends import STREAM_EVENTS, Owner, StreamEnd, tell
from wire.net.linger import linger
from wire.net.transport import Pipe, unsent
from wire.remembered import RememberedWindows
from wire.session import Session
from wire.tickets import Tickets

# Fairness: other tasks run at least this often while bytes keep coming or going.
YIELD_BYTES = 1 << 20
YIELD_S = 0.002
GIVE_WAY_BYTES = 64 * 1024  # the reader gives way only behind so much: two rounds cost about as much (15 us) as copying it
# The last pull of a connection that ends, and what one caller may seal inline.  64 KiB takes ~50 us to seal and send.
PULL_BYTES = 256 * 1024
INLINE_BYTES = 64 * 1024


class Link:
    """One authenticated connection.  Made by `upgrade`, driven by `run`."""

    def __init__(
        self,
        pipe: Pipe,
        session: Session,
        limits: Limits,
        *,
        peer_id: PeerId,
        initiator: bool,
        peer_run: bytes | None,
        hello: SessionHello,
        generation: int,
        bulk: bool,
        ticket: bytes,
        tickets: Tickets,
        remembered: RememberedWindows,
        guest: bool,
        leftover: bytes,
        pending: list[Event],
    ) -> None:
        self.pipe, self.session, self.relay = pipe, session, pipe.info().relay
        self.peer_id = peer_id
        self.initiator = initiator  # we dialled
        self.peer_run = peer_run
        self.hello = hello  # the peer's newest
        self.generation = generation  # how often the two had lost each other when it was made
        self.bulk, self.ticket = bulk, ticket  # it wants to be a lane, and what the peer showed for it
        self.tickets = tickets  # for lanes that belong to this connection
        self.remembered = remembered  # of the peer
        self.lane = 0  # its number as a lane; 0: a control connection
        self.home: Link = self  # the control connection that it belongs to
        self.guest = guest
        self.ends: dict[int, StreamEnd] = {}
        self.error: WireError | None = None  # why it ended
        self.closed = trio.Event()
        self.goodbye: WireError | None = None  # GOAWAY was sent or received
        self.told = False  # it ended by a FIN or RST, not in silence
        self.taken = False  # somebody runs it, or will
        self.dialled: Address | None = None  # where we reached the peer
        self.bytes_in = self.bytes_out = 0
        self._used_at = trio.current_time()  # the last time a stream was opened
        self.limits = limits
        self._owner: Owner | None = None
        self._leftover = leftover
        self._pending = pending
        self._rest: list[memoryview] = []  # sealed and not yet taken by the pipe: first of all
        self._writer: trio.lowlevel.Task | None = None  # set while the writer sleeps
        self._dispatching = self._giving_way = False
        self._pong: trio.Event | None = None
        self._after: list[Callable[[], None]] = []
        self.blocked_at: float | None = None  # since when the pipe takes nothing
        self._scope = trio.CancelScope()
        self._over = False

    @property
    def draining(self) -> bool:
        """No new streams."""
        return self.goodbye is not None or self._over

    # -- towards streams

    def attach(self, stream: int, end: StreamEnd) -> None:
        """From now on `end` hears of that stream."""
        self.ends[stream] = end
        self._used_at = trio.current_time()

    def kick(self) -> None:
        """Send what the session has ready as far as the pipe takes it now; the writer does the rest.  Never blocks or raises."""
        writer = self._writer
        if writer is None or self._over:
            return  # the writer is at work and looks again by itself
        session = self.session
        if not session.wants_write:
            return
        try:
            views = session.pull(INLINE_BYTES, trio.current_time())
            self._push(views)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._pipe_ended(error.__cause__ or error)
            return
        if self._rest or session.wants_write:
            self._writer = None
            trio.lowlevel.reschedule(writer)
        self._dispatch()

    def reset(self, stream: int, code: Code = Code.CANCELLED, detail: str = "") -> None:
        """End a stream in both directions and forget who waits for it.  Nothing happens if it has ended already."""
        self.ends.pop(stream, None)
        if self.session.is_live(stream):
            self.session.reset(stream, code, detail)
            self.kick()

    def soon(self, callback: Callable[[], None]) -> None:
        """For what is told of chunks in the middle of `receive` or `pull`: run as soon as the session may be called again."""
        self._after.append(callback)

    def give_way(self) -> None:
        """A task that reads bulk was woken: let it run before more is read."""
        self._giving_way = True

    async def answers(self) -> bool:
        """Ping, and wait for the answer or for the end of the connection; whether it lives.  The caller sets the deadline."""
        if self._over:
            return False
        pong = self._pong = trio.Event() if self._pong is None else self._pong  # an event has no truth value
        self.ping()
        await pong.wait()
        return not self._over

    def ping(self) -> None:
        """Measure the round trip, or notice that the peer is gone."""
        if not self._over:
            self.session.ping(trio.current_time())
            self.kick()

    def discard(self) -> None:
        """Close a connection that nobody took.  Idempotent; nothing happens to one that is running."""
        if not self.taken:
            self.fail(ConnectionLost("this connection is not needed"))
            self.pipe.close()

    def fail(self, error: WireError) -> None:
        """End the connection now.  Waiters are told in this very call; idempotent, the first cause stays."""
        if self._over:
            return
        self._over = True
        self.error = error
        if self.session.state is not ConnectionState.CLOSED:
            self.session.abort(error)
        ends, self.ends = self.ends, {}
        for end in ends.values():
            end.on_reset(error)
        if self._pong is not None:
            self._pong.set()
        self.closed.set()
        self._scope.cancel()

    def goaway(self, code: Code, *, detail: str = "", retry_ms: int = 0) -> None:
        """Say goodbye: no new streams; live ones have `draining_timeout_s`, then the connection ends.  Idempotent."""
        if self.draining:
            return
        self.goodbye = error_for(code, local=True, detail=detail)
        self.session.goaway(code, retry_ms=retry_ms, detail=detail, now=trio.current_time())
        self.kick()
        self._dispatch()

    def update_hello(self, hello: SessionHello) -> None:
        """Tell the peer what changed about us."""
        if not self._over and not self.draining:
            self.session.update_hello(hello)
            self.kick()

    # -- the tasks

    async def run(self, owner: Owner) -> None:
        """Drive the connection until it ends; then `error` says why.  A cancel ends it without a goodbye.

        Never raises what the network or the peer does: that is in `error`.
        """
        self._owner = owner
        self.ping()  # whoever chooses among peers wants to know how far they are
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write)
                    nursery.start_soon(self._tick)
                    try:
                        await self._read()
                    except RemoteProtocolError as error:
                        self._dispatch()
                        self.fail(error)
                    nursery.cancel_scope.cancel()
            if not isinstance(self.error, ConnectionLost):
                await linger(self.pipe, self._push_rest)
        finally:
            self.fail(ConnectionLost("this node closed the connection"))
            self.pipe.close()

    async def _read(self) -> None:
        intake = Intake(self.session, self.limits, self._leftover)
        self._leftover = b""
        self._dispatch(self._pending)
        pipe = self.pipe
        count, unyielded, since = 0, 0, trio.current_time()
        while True:
            now = trio.current_time()
            consumed = intake.feed(count, now)
            self._dispatch()
            self.kick()
            if self._over:
                return
            rounds = 1 if unyielded >= YIELD_BYTES or now - since >= YIELD_S else 0
            if self._giving_way:
                self._giving_way = False
                rounds = 2 if consumed >= GIVE_WAY_BYTES else rounds
            if rounds:
                for _ in range(rounds):
                    await trio.lowlevel.checkpoint()
                unyielded, since = 0, trio.current_time()
            try:
                count = await pipe.receive_into(intake.room())
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                self._pipe_ended(error.__cause__ or error)
                return
            if not count:
                self._pipe_ended("the peer closed the connection without a goodbye")
                return
            self.bytes_in += count
            unyielded += count

    def _push(self, views: list[memoryview]) -> None:
        size = sum(map(len, views))
        sent = self.pipe.send_now(views) if size else 0
        self.bytes_out += sent
        self._rest = list(unsent(views, sent)) if sent < size else []

    async def _write(self) -> None:
        session, pipe = self.session, self.pipe
        sent, since = 0, 0.0  # at the last time that others could run
        try:
            while True:
                now = trio.current_time()
                if not self._rest and not session.wants_write:
                    self._writer = trio.lowlevel.current_task()
                    await trio.lowlevel.wait_task_rescheduled(self._wake_aborted)
                elif self.bytes_out - sent < YIELD_BYTES and now - since < YIELD_S:
                    self._push(self._rest or session.pull(session.record_bytes, now))  # what is sealed, no message overtakes
                    self._dispatch()
                    if not self._rest:
                        continue
                    pipe.taking(session.send_bytes_per_s)
                    self.blocked_at = now
                    await pipe.wait_writable()
                    self.blocked_at = None
                else:
                    await trio.lowlevel.checkpoint()
                sent, since = self.bytes_out, trio.current_time()
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._pipe_ended(error.__cause__ or error)

    def _pipe_ended(self, cause: BaseException | str, *, told: bool = True) -> None:
        """Nothing comes or goes any more.  What arrived before stays with the streams; the session says whether it was clean."""
        if self._over:
            return
        # The end of a circuit says something about the relay, nothing about the peer.
        self.told = told and not heard_nothing(cause) and self.relay is None
        for end in list(self.ends.values()):  # an end may close its stream
            end.on_pipe_end()
        self.session.receive_end(cause)
        self._dispatch()

    def _wake_aborted(self, _: object) -> trio.lowlevel.Abort:
        self._writer = None
        return trio.lowlevel.Abort.SUCCEEDED

    async def _tick(self) -> None:
        session = self.session
        while True:
            due = session.next_timer()
            now = trio.current_time()
            stalled = math.inf if self.blocked_at is None else self.blocked_at + self.limits.write_stalled_s
            # The session may want to be called earlier after what happens meanwhile: look at least every second.
            await trio.sleep_until(min(now + 1.0, stalled, math.inf if due is None else due))
            now = trio.current_time()
            if self.blocked_at is not None and now >= self.blocked_at + self.limits.write_stalled_s:
                self._pipe_ended(f"nothing could be sent for {self.limits.write_stalled_s:g} s", told=False)
                return
            session.tick(now)
            self._dispatch()
            if not self.ends and session.idle_since() is not None and now - self._used_at >= self.limits.idle_connection_s:
                self.goaway(Code.IDLE)
            self.kick()

    def _push_rest(self) -> bool:
        while self._rest or self.session.wants_write:
            self._push(self._rest or self.session.pull(PULL_BYTES, trio.current_time()))
            if self._rest:
                return True
        return False

    # -- events

    def _dispatch(self, events: list[Event] | None = None) -> None:
        """Carry events to their ends.  What an end does may make new events: they are carried by the same loop."""
        if self._dispatching:
            return
        self._dispatching = True
        try:
            for event in events or ():
                self._carry(event)
            while True:
                for event in self.session.events():
                    self._carry(event)
                if not self._after:
                    break
                after, self._after = self._after, []
                for callback in after:
                    callback()
        finally:
            self._dispatching = False

    def _carry(self, event: Event) -> None:
        if isinstance(event, STREAM_EVENTS):
            tell(self.ends, event)
        elif isinstance(event, StreamOpened):
            if self._owner is not None:
                self._owner.on_opened(self, event)
        elif isinstance(event, HelloReceived):
            self.hello = event.hello
            if self._owner is not None:
                self._owner.on_hello(self, event)
        elif isinstance(event, GoAwayReceived):
            self.goodbye = error_for(event.code, detail=event.detail, retry_after=event.retry_ms / 1000 or None)
            if self._owner is not None:
                self._owner.on_goaway(self, event)
        elif isinstance(event, SessionClosed):
            self.fail(event.error or self.goodbye or error_for(Code.SHUTDOWN, detail="the connection was closed"))
        else:
            assert isinstance(event, RttMeasured)  # the session keeps the figures
            if self._pong is not None:
                self._pong.set()
                self._pong = None
