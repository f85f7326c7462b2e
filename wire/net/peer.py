"""A peer as the rest of the node sees it: whom to call, what to open, how it is doing.

A `Peer` lives from the first connection to a peer id until the last one ends.  Usually there is one connection; when two nodes
dial each other at the same moment there are two for a while, and both are usable until the loser has drained.  Which of them is
*primary*, that is where new streams go, is a pure function (`choose_primary`) that both ends compute alike:

* connections dialled by the peer with the lower id win over those dialled by the other, so both ends keep the same one;
* among connections of one initiator the newest wins, because it made a new one for a reason.

The initiator of the winner tells the loser goodbye (SUPERSEDED): it is the last of the two to know that the winner stands, so
no end is ever without a connection.  Streams on the loser finish where they are; tensor channels move (channels.py).

Everything that runs for a peer runs in its own nursery; the peer's death, lie or silence ends that and nothing else.  A
handler that fails resets its stream; what nobody foresaw is logged once with its traceback here, the second of the two places in
this package with a broad `except`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import trio

from wire.errors import Code, ConnectionLost, LocalProtocolError, WireError, error_for
from wire.events import GoAwayReceived, HelloReceived, Kind, StreamOpened
from wire.identity import PeerId
from wire.limits import Limits
from wire.messages import Key, SessionHello, decode, encode
from wire.net.bytestream import ByteStream
from wire.net.link import Link
from wire.net.receiver import TensorReceiver
from wire.net.sender import TensorSender
from wire.net.services import Service, Services, TensorService
from wire.net.stream import MessageStream
from wire.tensor import Expectation

log = logging.getLogger("wire.net")

Reply = TypeVar("Reply")


@dataclass(frozen=True, slots=True)
class PeerStats:
    """Counts since the peer was connected."""

    socket_in_bytes: int  # everything, headers and tags included
    socket_out_bytes: int
    class_in_bytes: tuple[int, ...]  # by priority class 0..4: plaintext received
    class_out_bytes: tuple[int, ...]  # sealed records sent
    rtt_s: float | None
    congestion: str  # congestion control in force
    connections: int


def choose_primary(links: Sequence[Link], own: PeerId) -> Link | None:
    """The connection that new streams use; None if all are draining.  `links` in the order in which they came."""
    live = [link for link in links if not link.draining]
    if not live:
        return None
    lower_is_ours = own < live[0].peer_id
    by_lower = [link for link in live if link.initiator == lower_is_ours]
    return (by_lower or live)[-1]


class _Unclaimed:
    """A stream of a tensor channel that nobody has made a receiver for; not accepted yet."""

    def __init__(self, peer: Peer, link: Link, event: StreamOpened) -> None:
        self._peer = peer
        self.link = link
        self.event = event

    def on_readable(self) -> None:
        """Only its end can be news: a slot was never posted, so nothing can be sent."""
        self.link.reset(self.event.stream, Code.REFUSED)
        self._peer.unclaim(self)

    def on_writable(self) -> None: ...

    def on_accepted(self) -> None: ...

    def on_pipe_end(self) -> None: ...

    def on_reset(self, error: WireError) -> None:
        self._peer.unclaim(self)


class Peer:
    """See the module.  Made by the manager; all coroutines may be cancelled at any checkpoint."""

    def __init__(self, link: Link, own: PeerId, services: Services, limits: Limits, counts: Counter[str]) -> None:
        self.peer_id = link.peer_id
        self.boot_id = link.hello.boot_id
        self.links: list[Link] = []
        self.reason: WireError | None = None  # why it is gone
        self.heard: Callable[[Peer, SessionHello], None] = lambda peer, hello: None  # a newer HELLO came
        self._own = own
        self._services = services
        self._limits = limits
        self._counts = counts
        self._first = link
        self._gone = trio.Event()
        self._nursery: trio.Nursery | None = None
        self._senders: dict[tuple[str, bytes], TensorSender] = {}
        self._receivers: dict[tuple[str, bytes], TensorReceiver] = {}
        self._unclaimed: dict[tuple[str, bytes], list[_Unclaimed]] = {}  # bounded by the session's backlog
        self._ended_in: Counter[int] = Counter()
        self._ended_out: Counter[int] = Counter()
        self.ended_socket = [0, 0]
        self.add(link)

    def __repr__(self) -> str:
        return f"<Peer {self.peer_id.short} {'closed' if self.closed else 'connected'}>"

    # -- how it is

    @property
    def closed(self) -> bool:
        return self._gone.is_set()

    @property
    def guest(self) -> bool:
        """One side of the connection knows no run yet."""
        link = self.primary or (self.links[-1] if self.links else self._first)
        return link.guest

    @property
    def primary(self) -> Link | None:
        return choose_primary(self.links, self._own)

    @property
    def path(self) -> str:
        return "direct"

    @property
    def rtt_s(self) -> float | None:
        """Round trip, smoothed; None before the first answer."""
        link = self.primary
        return None if link is None else link.session.rtt_s

    @property
    def stats(self) -> PeerStats:
        class_in, class_out = Counter(self._ended_in), Counter(self._ended_out)
        socket_in, socket_out = self.ended_socket
        for link in self.links:
            class_in.update(dict(enumerate(link.session.bytes_in)))
            class_out.update(dict(enumerate(link.session.bytes_out)))
            socket_in += link.bytes_in
            socket_out += link.bytes_out
        return PeerStats(
            socket_in,
            socket_out,
            tuple(class_in[cls] for cls in range(5)),
            tuple(class_out[cls] for cls in range(5)),
            self.rtt_s,
            (self.primary or self._first).pipe.info().congestion,
            len(self.links),
        )

    def gauges(self) -> dict[str, int]:
        """What is held for this peer now, over all its connections."""
        total: Counter[str] = Counter()
        for link in self.links:
            total.update(link.session.gauges())
            total["waiting"] += len(link.ends)
        return dict(total)

    async def wait_closed(self) -> WireError:
        """Wait until the last connection has ended; returns why."""
        await self._gone.wait()
        assert self.reason is not None
        return self.reason

    # -- conversations

    async def call(self, protocol: str, request: object, reply_class: type[Reply], *, deadline_s: float, cls: int = 1) -> Reply:
        """One request, one reply, on a stream of its own.

        Raises TIMEOUT after `deadline_s`; `StreamReset` with the code of the peer's refusal (PROTOCOL_UNKNOWN, NOT_MEMBER,
        REFUSED, or what its handler raised); `RemoteProtocolError` for a reply that is not a `reply_class`; what ended the
        connection.  After a cancel, too, the peer may have acted on the request; the stream is reset.
        """
        message = encode(request)
        with trio.move_on_after(deadline_s):
            stream = await self._open(Kind.MESSAGE, protocol, cls)
            assert isinstance(stream, MessageStream)
            async with stream:
                await stream.send(message, fin=True)
                try:
                    return decode(await stream.receive(), reply_class)
                except trio.EndOfChannel:
                    raise error_for(Code.PROTOCOL, detail=f"{protocol}: the peer ended without a reply") from None
        raise error_for(Code.TIMEOUT, detail=f"{protocol}: no answer from {self.peer_id.short} within {deadline_s:g} s")

    async def open(
        self, protocol: str, kind: Kind = Kind.MESSAGE, cls: int = 1, *, meta: bytes = b""
    ) -> MessageStream | ByteStream:
        """A new stream of our own; use it as `async with`.  Data may be sent at once; a refusal comes as a `StreamReset`.

        `cls`: 1 control, 2 boundary tensors, 3 bulk, 4 background.  Waits if we open faster than the peer allows.  Raises
        what ended the connection.  A cancel leaves nothing.
        """
        return await self._open(kind, protocol, cls, meta)

    async def _open(self, kind: Kind, protocol: str, cls: int, meta: bytes = b"") -> MessageStream | ByteStream:
        await trio.lowlevel.checkpoint_if_cancelled()
        while True:
            link = self.primary
            if link is None:
                # The winner of two connections stands before the loser is told to go, so no other one is about to come.
                raise self.reason or (self.links and self.links[-1].goodbye) or ConnectionLost("the peer is going away")
            delay_s = link.session.open_delay_s(trio.current_time())
            if not delay_s:
                break
            # A millisecond more: a wait that rounding has made as good as zero would be repeated without end.
            await trio.sleep(delay_s + 0.001)
        number = link.session.open_stream(kind, protocol, cls, meta=meta, now=trio.current_time())
        return (MessageStream if kind is Kind.MESSAGE else ByteStream)(link, number, protocol)

    # -- tensors

    def sender(self, protocol: str, name: bytes, *, cls: int = 2) -> TensorSender:
        """Our sending end of a tensor channel; the same object each time.  Sending waits until the peer posts slots."""
        key = protocol, name
        sender = self._senders.get(key)
        if sender is None:
            sender = TensorSender(protocol, name, cls, self._limits, lambda: self._senders.pop(key, None), self._later)
            self._senders[key] = sender
            if (link := self.primary) is not None:
                sender.move_to(link)
            elif self.closed:
                sender.lost(self.reason or ConnectionLost())
        return sender

    def receiver(self, protocol: str, name: bytes, expect: Callable[[Key], Expectation | None]) -> TensorReceiver:
        """Our receiving end of a tensor channel.  May be made before or after the peer opens it; once a name.

        `expect(key)`: what may come under a key, None for nothing.
        """
        key = protocol, name
        service = self._services.tensors(protocol)
        if key in self._receivers:
            raise LocalProtocolError(f"there is a receiver for {protocol} {name!r} already")
        receiver = TensorReceiver(
            protocol, name, expect, service.delivered, self._limits, lambda: self._receivers.pop(key, None)
        )
        self._receivers[key] = receiver
        for waiting in self._unclaimed.pop(key, ()):
            del waiting.link.ends[waiting.event.stream]
            receiver.opened(waiting.link, waiting.event)
            waiting.link.kick()
        if self.closed:
            receiver.lost(self.reason or ConnectionLost())
        return receiver

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        async def act() -> None:
            await trio.sleep(delay_s)
            action()

        if self._nursery is not None and not self.closed:
            self._nursery.start_soon(act)

    # -- connections: called by the manager
    async def run(self) -> None:
        """Drive the peer until its last connection has ended.  A cancel ends all of them without a goodbye."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                for link in self.links:
                    nursery.start_soon(self._run_link, link)
                await self._gone.wait()
                nursery.cancel_scope.cancel()
        finally:
            self.reason = self.reason or ConnectionLost("this node closed the connection")
            self._gone.set()  # a closing peer takes no new connection

    def add(self, link: Link) -> None:
        """Another connection to the same process.  The primary is chosen anew; if we dialled the winner, the losers drain."""
        link.taken = True
        self.links.append(link)
        if self._nursery is not None:
            self._nursery.start_soon(self._run_link, link)
        self._settle()

    def _settle(self) -> None:
        primary = self.primary
        if primary is None:
            return
        for sender in self._senders.values():
            sender.move_to(primary)
        if primary.initiator:
            for link in self.links:
                if link is not primary:
                    link.goaway(Code.SUPERSEDED)

    async def _run_link(self, link: Link) -> None:
        await link.run(self)
        self.links.remove(link)
        self._ended_in.update(dict(enumerate(link.session.bytes_in)))
        self._ended_out.update(dict(enumerate(link.session.bytes_out)))
        self.ended_socket[0] += link.bytes_in
        self.ended_socket[1] += link.bytes_out
        if self.links:
            self._settle()
            return
        self.end(link.error or ConnectionLost())

    def end(self, reason: WireError) -> None:
        """Nothing of the peer is left; whoever waits is told why.  Idempotent, the first reason stays."""
        if self._gone.is_set():
            return
        self.reason = reason
        for sender in list(self._senders.values()):
            sender.lost(self.reason)
        for receiver in list(self._receivers.values()):
            receiver.lost(self.reason)
        self._gone.set()

    def fail(self, error: WireError) -> None:
        """End all connections now."""
        for link in list(self.links):
            link.fail(error)

    def goaway(self, code: Code, *, detail: str = "") -> None:
        """Say goodbye on all connections."""
        for link in list(self.links):
            link.goaway(code, detail=detail)

    # -- Owner: called by links

    def on_hello(self, link: Link, event: HelloReceived) -> None:
        self.heard(self, event.hello)

    def on_goaway(self, link: Link, event: GoAwayReceived) -> None:
        self._settle()

    def on_opened(self, link: Link, event: StreamOpened) -> None:
        if not link.session.is_live(event.stream):
            return  # opened and given up again within one read
        service = self._services.find(event.protocol)
        assert service is not None and self._nursery is not None  # `Services.refusal` let it through
        if isinstance(service, TensorService):
            self._channel_opened(link, event, service)
        elif event.kind is Kind.CHUNKS:
            link.session.refuse(event.stream, Code.PROTOCOL_UNKNOWN)
        else:
            link.session.accept(event.stream)
            stream = (MessageStream if event.kind is Kind.MESSAGE else ByteStream)(link, event.stream, event.protocol)
            self._nursery.start_soon(self._serve, service, stream)

    def _channel_opened(self, link: Link, event: StreamOpened, service: TensorService) -> None:
        key = event.protocol, event.meta
        receiver = self._receivers.get(key)
        if receiver is not None:
            receiver.opened(link, event)
            return
        known = key in self._unclaimed
        waiting = _Unclaimed(self, link, event)
        self._unclaimed.setdefault(key, []).append(waiting)
        link.attach(event.stream, waiting)
        if not known and service.handler is not None and self._nursery is not None:
            self._nursery.start_soon(self._announce, service.handler, event)

    def unclaim(self, waiting: _Unclaimed) -> None:
        """The peer gave the stream up before anybody made a receiver."""
        key = waiting.event.protocol, waiting.event.meta
        opened = self._unclaimed.get(key, [])
        if waiting in opened:
            opened.remove(waiting)
            if not opened:
                del self._unclaimed[key]

    async def _announce(self, handler: Callable[[Peer, bytes], object], event: StreamOpened) -> None:
        try:
            await handler(self, event.meta)  # type: ignore[misc]
        except WireError as error:
            log.debug("%s: channel handler: %s", event.protocol, error)
        except Exception:
            self._failed(event.protocol)

    async def _serve(self, service: Service, stream: MessageStream | ByteStream) -> None:
        """The supervisor of one accepted stream: whatever its handler raises ends this stream and nothing else."""
        try:
            async with stream:
                await service.handler(self, stream)
        except (trio.EndOfChannel, trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the peer left in mid-conversation: the stream is reset already
        except WireError as error:
            self._counts[f"stream-{error.code.name.lower()}"] += 1
        except Exception:
            self._failed(stream.protocol)

    def _failed(self, protocol: str) -> None:
        self._counts["internal-error"] += 1
        log.exception("the handler of %s failed for peer %s", protocol, self.peer_id)
