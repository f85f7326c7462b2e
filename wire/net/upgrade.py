"""From a bare pipe to an authenticated connection: clear hello, Noise, HELLO, under one deadline.

What goes wrong: a stranger connects and says nothing, or one byte a second; every phase with a deadline of its own then adds up
to minutes.  So one deadline (10 s) covers everything from the accepted or connected pipe to the peer's HELLO.  Until the peer is
authenticated the connection holds at most `preauth_max_bytes` (16 KiB): one read buffer of half of that, what the handshake
keeps, and nothing else; the link's 1 MiB buffer comes afterwards.

A dialler that met silence is told which silence it was: TCP connected, so a machine is there, but no handshake came
(`HandshakeTimeout`, FIND-5), which is another thing than no answer at all.

Both sides send their HELLO before they read the other's, so a pipe must hold 8 KiB that nobody has read; a socket holds more.

Whatever goes wrong, the pipe is closed when `upgrade` raises.  A refusal that the handshake has made ready is sent first, if the
pipe takes it at once; a stranger gets nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import trio

from wire.budget import UnreadBudget
from wire.errors import Code, ConnectionLost, LimitExceeded, RemoteProtocolError, WireError
from wire.events import Event, HelloReceived, SessionClosed
from wire.handshake import Handshake, Secrets
from wire.hello import VERSIONS, Hello, Purpose, Refusal, run_tag
from wire.identity import Identity, PeerId
from wire.limits import Limits
from wire.messages import SessionHello
from wire.net.causes import HandshakeTimeout
from wire.net.link import Link
from wire.net.transport import Pipe, send_all
from wire.noise import Cipher
from wire.pipeinfo import PipeInfo
from wire.records import Opener, Sealer
from wire.remembered import RememberedWindows
from wire.session import Session
from wire.tickets import Tickets

# All that a session sends before the peer's HELLO is its own HELLO of at most 8 KiB.
FLUSH_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """What this node is towards everybody it shakes hands with."""

    identity: Identity
    run: bytes | None  # run id; None: no manifest yet, or a seed for all runs
    ciphers: tuple[Cipher, ...]
    limits: Limits
    versions: tuple[int, ...] = VERSIONS  # of the protocol
    # (peer, guest, what is known of the pipe) -> the HELLO frame to send
    hello: Callable[[PeerId, bool, PipeInfo], SessionHello]
    # (protocol, guest) -> None to accept, else the code to refuse with
    serves: Callable[[str, bool], Code | None]
    # a full house says so in its hello
    admit: Callable[[Hello], Refusal | None] | None = None
    # what all connections together may promise to hold; None: not counted
    budget: UnreadBudget | None = None
    # Unix time, for the stamps of pings
    wall_time: Callable[[], float] = time.time
    # what protocols of a peer needed last; one table a peer, over all its connections
    remembered: Callable[[PeerId], RememberedWindows] = lambda peer_id: RememberedWindows()


async def upgrade(
    pipe: Pipe, local: Local, *, initiator: bool, expected: PeerId | None = None, ticket: bytes = b"", first: bytes = b""
) -> Link:
    """Make an authenticated `Link` of a fresh pipe, which belongs to the link afterwards.

    `ticket`: dial as a bulk connection that belongs to a control connection (wire/tickets.py).  `first`: what was read of it already.

    Raises `WireError` with the cause, among them `PeerIdMismatch` and `HandshakeTimeout`.  When it raises or is
    cancelled, the pipe is closed and nothing is left behind.
    """
    try:
        with trio.move_on_after(local.limits.handshake_timeout_s):
            secrets, rest = await _handshake(pipe, local, initiator, expected, ticket, first)
            return await _hello(pipe, local, initiator, secrets, rest, ticket)
        raise HandshakeTimeout(f"no handshake within {local.limits.handshake_timeout_s:g} s")
    except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
        pipe.abort()
        raise ConnectionLost(error.__cause__ or error) from error
    except BaseException:
        pipe.close()
        raise


async def _handshake(
    pipe: Pipe, local: Local, initiator: bool, expected: PeerId | None, ticket: bytes, first: bytes
) -> tuple[Secrets, bytes]:
    """The keys, and bytes of the peer that came behind its last message."""
    handshake = Handshake(
        initiator,
        local.identity,
        Hello(
            ciphers=local.ciphers,
            versions=local.versions,
            run_tag=run_tag(local.run),
            purpose=Purpose.BULK if ticket else Purpose.CONTROL,
        ),
        local.limits,
        expected=expected,
        own_run=local.run,
        admit=local.admit,
        ticket=ticket,
    )
    buffer = memoryview(bytearray(local.limits.preauth_max_bytes // 2))
    buffer[: len(first)] = first
    while True:
        if data := handshake.send():
            await send_all(pipe, data)
        if handshake.done:
            return handshake.result, handshake.rest
        count, first = len(first) or await pipe.receive_into(buffer[: handshake.room]), b""
        if not count:
            raise ConnectionLost("the other side closed the connection during the handshake")
        try:
            handshake.receive(buffer[:count])
        except WireError:
            if refusal := handshake.send():
                with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                    pipe.send_now((memoryview(refusal),))
            raise


async def _hello(pipe: Pipe, local: Local, initiator: bool, secrets: Secrets, rest: bytes, ticket: bytes) -> Link:
    """Exchange HELLO frames, which must come first; what else came with the peer's is kept for the link."""
    limits = local.limits
    guest = local.run is None or secrets.peer_run is None
    bulk = bool(ticket) if initiator else secrets.hello.purpose is Purpose.BULK
    window = limits.connection_window_guest_bytes if guest else limits.connection_window_control_bytes
    reservation = None if local.budget is None else local.budget.reserve(window)
    try:
        own_hello = local.hello(secrets.peer_id, guest, pipe.info())
        session = Session(
            initiator=initiator,
            sealer=Sealer(secrets.cipher, secrets.send_key, limits),
            opener=Opener(secrets.cipher, secrets.recv_key, limits),
            hello=own_hello,
            limits=limits,
            now=trio.current_time(),
            guest=guest,
            serves=local.serves,
            wall_offset_s=local.wall_time() - trio.current_time(),
            window_bytes=window,
            reservation=reservation,
            remembered=(remembered := local.remembered(secrets.peer_id)),
        )
    except BaseException:
        if reservation is not None:
            reservation.release()
        raise
    if local.budget is not None and reservation is None:
        full = LimitExceeded("unread_budget_bytes", local.budget.used + window, local.budget.total)
        session.abort(full)
        await _flush(pipe, session)  # our HELLO and the GOAWAY that says why: to an authenticated peer, who may come back later
        raise full
    buffer = memoryview(bytearray(limits.preauth_max_bytes))
    buffer[: len(rest)] = rest
    filled = len(rest)
    pending: list[Event] = []
    heard: HelloReceived | None = None
    try:
        while True:
            await _flush(pipe, session)
            if filled:
                consumed = session.receive(buffer[:filled], trio.current_time())
                buffer[: filled - consumed] = buffer[consumed:filled]
                filled -= consumed
            for event in session.events():
                if isinstance(event, SessionClosed):
                    raise event.error or ConnectionLost("the other side closed the connection during the handshake")
                if isinstance(event, HelloReceived) and heard is None:
                    heard = event
                else:
                    pending.append(event)
            if heard is not None:
                break
            count = await pipe.receive_into(buffer[filled:])
            if not count:
                raise ConnectionLost("the other side closed the connection during the handshake")
            filled += count
    except RemoteProtocolError:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            pipe.send_now(session.pull(FLUSH_BYTES, trio.current_time()))  # the GOAWAY that says why
        raise
    except BaseException as error:
        session.receive_end(error)  # gives its part of the budget back; a session that failed by itself has done so
        raise
    return Link(
        pipe,
        session,
        limits,
        peer_id=secrets.peer_id,
        initiator=initiator,
        guest=guest,
        peer_run=secrets.peer_run,
        hello=heard.hello,
        generation=max(own_hello.generation, heard.hello.generation),
        bulk=bulk,
        ticket=secrets.ticket,
        remembered=remembered,
        tickets=Tickets(secrets.export(b"lane"), limits),
        leftover=bytes(buffer[:filled]),
        pending=pending,
    )


async def _flush(pipe: Pipe, session: Session) -> None:
    while session.wants_write:
        for view in session.pull(FLUSH_BYTES, trio.current_time()):
            await send_all(pipe, bytes(view))
