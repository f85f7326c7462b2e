"""A peer as the rest of the node sees it: whom to call, what to open, how it is doing.

A `Peer` lives from the first connection to a peer id until the peer is gone.  It has one control connection and the lanes that
belong to it; when two nodes dial each other at the same moment there are two control connections for a while, both usable
until the loser has drained.  Which of them is *primary*, that is where new streams go, both ends compute alike (primary.py).
Streams on the loser finish where they are; tensor channels move (channels.py).

A peer whose last connection is lost without a goodbye is *interrupted*, not gone, if tensor channels exist: the manager dials it
again (reconnect.py), and calls wait.

Everything that runs for a peer runs in its own nursery; the peer's death, lie or silence ends that and nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from wire.address import Address
from wire.calls import PassedOn
from wire.errors import Code, ConnectionLost, WireError, error_for
from wire.events import GoAwayReceived, HelloReceived, Kind, StreamOpened
from wire.identity import PeerId
from wire.limits import Limits
from wire.messages import Key, SessionHello, encode
from wire.net.asking import ask
from wire.net.byterates import ByteRates
from wire.net.bytestream import ByteStream
from wire.net.causes import may_come_back
from wire.net.channels import Channels
from wire.net.lanes import Lanes, ask_for_lanes
from wire.net.link import Link
from wire.net.primary import PeerStats, Tally, choose_primary, gauges, retire
from wire.net.receiver import TensorReceiver
from wire.net.sender import TensorSender
from wire.net.services import Services, TensorService, housekeeping
from wire.net.stream import MessageStream
from wire.net.supervise import announce, serve
from wire.path import Path
from wire.tensor import Expectation

Reply = TypeVar("Reply")

LOSSES_MOST = 2**32 - 1  # a u32 on the wire, and the peer says it, too


class Peer:
    """See the module.  Made by the manager; all coroutines may be cancelled at any checkpoint."""

    def __init__(
        self,
        link: Link,
        own: PeerId,
        services: Services,
        limits: Limits,
        counts: Counter[str],
        *,
        dial_lane: Callable[[Link, bytes], Awaitable[Link]],
        interrupted: Callable[[Peer, WireError, float], None],
    ) -> None:
        """`dial_lane(control, ticket)`; `interrupted(peer, cause, grace_s)`: dial it again, or call `end` after that time."""
        self.peer_id = link.peer_id
        self.boot_id = link.hello.boot_id
        self.links: list[Link] = []  # control connections
        self.reason: WireError | None = None  # why it is gone
        self.remembered = link.remembered  # windows that its protocols needed last
        self.losses = link.generation  # how often all connections were lost
        self.last = link  # the connection that came last; it may have ended
        self.path = link.pipe.info().path  # of the primary connection; while there is none, of the last one
        self.used = False  # streams of the application, ours or the peer's, or channels
        self.parted = False  # it has said that it stops
        self.dialled: Address | None = link.dialled  # where it was reached last
        self.heard: Callable[[Peer, SessionHello], None] = lambda peer, hello: None  # a newer HELLO came
        self.leaving: Callable[[Peer, GoAwayReceived], None] = lambda peer, event: None  # it said goodbye on its last connection
        self.moved: Callable[[Peer, Path], None] = lambda peer, before: None  # its path was another before
        self.rates = ByteRates()  # whoever watches the peer looks regularly
        self.since = trio.current_time()  # this primary connection stands, or there is none
        self._own = own
        self._services = services
        self._limits = limits
        self._counts = counts
        self._dial_lane = dial_lane
        self._interrupted = interrupted
        self._placed = link  # the primary connection that everybody knows of
        self._final: WireError | None = None  # it is over, whatever the connections say
        self._gone, self._back = trio.Event(), trio.Event()  # back: a connection stands, or the peer is gone
        self._nursery: trio.Nursery | None = None
        self._channels = Channels(limits, self._later)
        self._lanes: dict[Link, Lanes] = {}
        self.tally = Tally()  # of connections that have ended
        self.add(link)

    def __repr__(self) -> str:
        return f"<Peer {self.peer_id.short} {'closed' if self.closed else 'connected'}>"

    # -- how it is

    @property
    def closed(self) -> bool:
        return self._gone.is_set()

    @property
    def there(self) -> bool:
        """Whether to count on it: neither gone nor, by its own word, going."""
        return not self.closed and not (self.parted and self.primary is None)

    @property
    def guest(self) -> bool:
        """One side of the connection knows no run yet."""
        return (self.primary or self.last).guest

    @property
    def primary(self) -> Link | None:
        return choose_primary(self.links, self._own)

    @property
    def all_links(self) -> list[Link]:
        """Control connections and lanes."""
        return [*self.links, *(lane for lanes in self._lanes.values() for lane in lanes.links)]

    @property
    def relayed(self) -> bool:
        """Whether what we say now goes through a relay."""
        return self.path.relayed

    @property
    def lanes(self) -> Lanes | None:
        """Of the primary connection."""
        return self._lanes.get(self.last if self.primary is None else self.primary)

    def queued_tensor_bytes(self) -> Counter[int]:
        """What tensor channels still have to send, by class."""
        return self._channels.queued_bytes()

    @property
    def rtt_s(self) -> float | None:
        """Round trip, smoothed; None before the first answer."""
        link = self.primary
        return None if link is None else link.session.rtt_s

    @property
    def stats(self) -> PeerStats:
        return self.tally.stats(self.all_links, self.primary or self.last, self._channels.resent_chunks, self._channels.packed)

    def gauges(self) -> dict[str, int]:
        """What is held for this peer now, over all its connections."""
        return gauges(self.all_links)

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
        with trio.move_on_after(deadline_s):
            return await ask(lambda: self.open(protocol, cls=cls), encode(request), reply_class)
        raise error_for(Code.TIMEOUT, detail=f"{protocol}: no answer from {self.peer_id.short} within {deadline_s:g} s")

    async def open(
        self, protocol: str, kind: Kind = Kind.MESSAGE, cls: int = 1, *, meta: bytes = b"", passed_on: PassedOn | None = None
    ) -> MessageStream | ByteStream:
        """A new stream of our own; use it as `async with`.  Data may be sent at once; a refusal comes as a `StreamReset`.

        `cls`: 1 control, 2 boundary tensors, 3 bulk, 4 background.  Waits if we open faster than the peer allows.  Raises
        what ended the connection.  A cancel leaves nothing.  `passed_on`: what comes is for somebody else (`ByteStream.pass_on`).
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        while True:
            link = self._for(cls)
            if link is None and not self.links and not self.closed:
                await self._back.wait()
                continue
            if link is None:
                # The winner of two connections stands before the loser is told to go, so no other one is about to come.
                raise self.reason or (self.links and self.links[-1].goodbye) or ConnectionLost("the peer is going away")
            delay_s = link.session.open_delay_s(trio.current_time())
            if not delay_s:
                break
            # A millisecond more: a wait that rounding has made as good as zero would be repeated without end.
            await trio.sleep(delay_s + 0.001)
        self.used = self.used or not housekeeping(protocol)
        number = link.session.open_stream(kind, protocol, cls, meta=meta, now=trio.current_time(), passed_on=passed_on)
        return (MessageStream if kind is Kind.MESSAGE else ByteStream)(link, number, protocol)

    # -- tensors

    def sender(self, protocol: str, name: bytes, *, cls: int = 2) -> TensorSender:
        """Our sending end of a tensor channel; the same object each time.  Sending waits until the peer posts slots."""
        sender, new = self._channels.sender(protocol, name, cls)
        if new:
            self._want_lanes()
            if self.closed:
                sender.lost(self.reason or ConnectionLost())
            elif (link := self.primary) is not None:
                sender.move_to(link, self._lanes[link].usable())
        return sender

    def receiver(self, protocol: str, name: bytes, expect: Callable[[Key], Expectation | None]) -> TensorReceiver:
        """Our receiving end of a tensor channel.  May be made before or after the peer opens it; once a name.

        `expect(key)`: what may come under a key, None for nothing.
        """
        receiver = self._channels.receiver(protocol, name, expect, self._services.tensors(protocol).delivered)
        self._want_lanes()
        if self.closed:
            receiver.lost(self.reason or ConnectionLost())
        return receiver

    def _for(self, cls: int) -> Link | None:
        """The connection for a new stream of that class: bulk goes over the lane with the fewest streams, if there is one."""
        primary = self.primary
        if primary is None or cls < 2:
            return primary
        lanes = self._lanes[primary]
        lanes.want()
        return min(lanes.usable(), key=lambda link: len(link.ends), default=primary)

    def _want_lanes(self) -> None:
        self.used = True
        for lanes in self._lanes.values():
            lanes.want()

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
                    self._start(nursery, link)
                self._settle()  # a second connection may have come before
                await self._gone.wait()
                nursery.cancel_scope.cancel()
        finally:
            self.reason = self.reason or ConnectionLost("this node closed the connection")
            self._gone.set()  # a closing peer takes no new connection

    def add(self, link: Link) -> None:
        """Another control connection to the same process.  The primary is chosen anew; if we dialled the winner, the losers drain."""
        link.taken = True
        self.links.append(link)
        self.last = link
        self.dialled = link.dialled or self.dialled
        self._lanes[link] = lanes = Lanes(
            link,
            self._limits,
            dial=self._dial_lane,
            run=self._start_lane,
            changed=lambda: self._channels.use(link, lanes.usable()),
            in_doubt=self._channels.in_doubt,
            ask=lambda count: ask_for_lanes(self, count),
            needed=lambda: bool(self._channels) or any(lane.ends for lane in lanes.links),
        )
        if self._channels:
            lanes.want()
        if self._nursery is not None:
            self._start(self._nursery, link)
        self._settle()
        self._back.set()

    def adopt_lane(self, link: Link) -> bool:
        """A bulk connection came in; False if it belongs to none of our control connections."""
        return self._nursery is not None and any(lanes.adopt(link) for lanes in self._lanes.values())

    def asked_for_lanes(self, count: int) -> None:
        """The peer would like so many."""
        if (primary := self.primary) is not None:
            self._lanes[primary].asked(count)

    def _settle(self) -> None:
        if (primary := self.primary) is None:
            return
        if primary is not self._placed:
            self._placed, self.since = primary, trio.current_time()
        before, self.path = self.path, primary.pipe.info().path
        if before != self.path:
            self.moved(self, before)
        self._channels.move_to(primary, self._lanes[primary].usable())
        if not retire(self.links, primary) and self._nursery is not None:
            self._nursery.start_soon(self._retire, primary)

    async def _retire(self, primary: Link) -> None:
        if await primary.answers() and self.primary is primary:
            retire(self.links, primary)

    def _start(self, nursery: trio.Nursery, link: Link) -> None:
        nursery.start_soon(self._run_link, link)
        nursery.start_soon(self._lanes[link].run, nursery)

    def _start_lane(self, link: Link) -> None:
        assert self._nursery is not None
        self._nursery.start_soon(self._run_lane, link)
        if not link.session.widen(self._limits.connection_window_lane_bytes):
            link.goaway(Code.RESOURCE_LIMIT)

    async def _run_lane(self, link: Link) -> None:
        await link.run(self)
        self.tally.add(link)
        self._channels.lane_ended(link)
        if (lanes := self._lanes.get(link.home)) is not None:
            lanes.ended(link)

    async def _run_link(self, link: Link) -> None:
        await link.run(self)
        self.tally.add(link)
        error = link.error or ConnectionLost()
        self.links.remove(link)
        self._lanes.pop(link).close(error)
        if self.links:
            self._settle()
        elif self._final is None and may_come_back(error) and self._channels and not link.guest:
            self.losses = min(max(self.losses, link.generation) + 1, LOSSES_MOST)
            self._back = trio.Event()
            self.since = trio.current_time()
            self._interrupted(self, error, self._limits.resume_closed_s if link.told else self._limits.resume_silent_s)
        else:
            self.end(self._final or error)

    def end(self, reason: WireError) -> None:
        """Nothing of the peer is left; whoever waits is told why.  Idempotent, the first reason stays."""
        if self._gone.is_set():
            return
        self.reason = reason
        self._channels.lost(reason)
        self._gone.set()
        self._back.set()

    def fail(self, error: WireError) -> None:
        """It is over: end all connections now."""
        self._final = error
        for link in self.all_links:
            link.fail(error)
        if not self.links:
            self.end(error)

    def goaway(self, code: Code, *, detail: str = "", retry_ms: int = 0) -> None:
        """Say goodbye on all connections."""
        self._final = self._final or error_for(code, local=True, detail=detail)
        for link in self.all_links:
            link.goaway(code, detail=detail, retry_ms=retry_ms)
        if not self.links:
            self.end(self._final)

    # -- Owner: called by links

    def on_hello(self, link: Link, event: HelloReceived) -> None:
        if not link.lane:
            self.heard(self, event.hello)

    def on_goaway(self, link: Link, event: GoAwayReceived) -> None:
        lanes = self._lanes.get(link.home)
        if not link.lane:
            self._settle()
            if self.primary is None:
                self.leaving(self, event)
        elif lanes is not None:
            self._channels.use(link.home, lanes.usable())

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
            self.used = self.used or not housekeeping(event.protocol)
            stream = (MessageStream if event.kind is Kind.MESSAGE else ByteStream)(link, event.stream, event.protocol)
            stream.meta = event.meta
            self._nursery.start_soon(serve, self, service, stream, self._counts)

    def _channel_opened(self, link: Link, event: StreamOpened, service: TensorService) -> None:
        new = self._channels.opened(link, event)
        self._want_lanes()
        if new is not None and service.handler is not None and self._nursery is not None:
            self._nursery.start_soon(announce, self, service.handler, event, self._counts)
