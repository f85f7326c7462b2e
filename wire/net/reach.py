"""Can others dial this node?  Asking them to try, and trying for others (`reach/1`).

A node cannot see its own router.  So it asks peers to dial it back: it names an address and a nonce, the checker dials the first that
it may from a fresh port, says `PLR1 00 nonce`, gets one byte back and signs what it found.  Our listener knows the nonces that are
under way; nothing else about the caller is believed.

What goes wrong.  A checker dials wherever a stranger points it: unless the address is the one that the stranger visibly comes from,
he must send 4 KiB first, many times what the dial costs, and the dial is delayed by up to a second, so that no crowd of checkers
hits at one moment; a peer has 12 checks a minute and all together 60.  Only addresses that may be dialled at all are (never
private ones in `internet` scope), and never a name.  A checker to which our listener's port has a connection lies unwillingly: the
router lets it in; its yes does not count (`wire/reachability.py`).

`PLR1 01 nonce` is the other question of this greeting, "as whom do you see me?", answered with the address in text: a hint, asked by
a port that has no session yet.

Asked: as soon as somebody is there to ask, peer after peer until three networks have spoken; again every half hour, and when this
machine's addresses or its outside address change.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable, Sequence

import trio

from wire.address import Address, AddressClass, Scope, may_dial
from wire.envelope import NO_RUN, open_envelope, seal
from wire.errors import Code, WireError, error_for, printable
from wire.identity import Identity, PeerId
from wire.limits import Limits
from wire.messages import decode, encode
from wire.net.bytestream import ByteStream
from wire.net.causes import SILENT, cause_of
from wire.net.dial import DialRate
from wire.net.peer import Peer
from wire.net.services import Service, Services
from wire.net.stream import MessageStream
from wire.net.transport import Pipe, Transport, literal, literal_text, send_all
from wire.rates import Bucket, Buckets
from wire.reachability import Finding, Reachability
from wire.reachmessages import ReachAnswer, ReachAsk, ReachMore, ReachVerdict
from wire.statements import REACH

log = logging.getLogger("wire.net")

PROTOCOL = "reach/1"
GREETING = b"PLR1"
DIAL_BACK, OBSERVE = b"\x00", b"\x01"
NONCE_BYTES = 16
LOOK_S = 0.5
BUCKETS_MAX = 1024
PIPE_S = 5.0  # the whole conversation of a greeting


class ReachService:
    """Asks and answers.  `finding` is what is known; `changed()` is told when it is another."""

    def __init__(
        self,
        identity: Identity,
        limits: Limits,
        scope: Scope,
        transport: Transport,
        *,
        rate: DialRate,
        announce: Sequence[Address],
        peers: Callable[[], Sequence[Peer]],
        changed: Callable[[Finding], None],
        rng: random.Random,
    ) -> None:
        self._identity = identity
        self._limits = limits
        self._scope = scope
        self._transport = transport
        self._announce = tuple(address.with_peer(None) for address in announce)
        self._peers = peers
        self._changed = changed
        self._rng = rng
        self.known = Reachability(limits)
        self.mapped: tuple[Address, ...] = ()  # outside addresses that a router was asked for
        self.finding = self.known.finding((), 0.0)
        self._under_way: set[bytes] = set()  # nonces that our listener answers to
        self._asking: set[PeerId] = set()
        self._buckets = Buckets(limits.reach_peer_per_min / 60, limits.reach_peer_per_min, BUCKETS_MAX)
        self._total = Bucket(limits.reach_total_per_min / 60, limits.reach_total_burst, trio.current_time())
        self._rate = rate

    def serve(self, services: Services) -> None:
        """Answer `reach/1`, to guests too: a newcomer must be able to find out."""
        services.add(PROTOCOL, Service(self._answer, guest=True))

    def gauges(self) -> dict[str, int]:
        return {"reach_asking": len(self._asking)}

    # -- asking

    def listening(self, bound: tuple[Address, ...]) -> None:
        """At the start, and when this machine's addresses have changed: nothing that was said counts any more."""
        self.known.listening = bound
        self.known.interfaces = frozenset(self._transport.local_addresses())
        self.known.forget()

    def saw(self, peer: Peer, observed: str) -> None:
        """A HELLO of this peer says as whom it sees us."""
        link = peer.primary
        if link is None or link.relay is not None or not link.initiator:
            return
        info = link.pipe.info()
        if info.local[1] not in {bound.port for bound in self.known.listening}:
            return
        try:
            seen = Address.parse_received(observed)
        except ValueError:
            return
        if seen.is_literal and seen.relay is None and may_dial(seen, self._scope):
            self.known.observed(peer.peer_id, info.remote[0], seen.with_peer(None), trio.current_time())
            self._conclude()

    async def run(self) -> None:
        """For ever."""
        async with trio.open_nursery() as nursery:
            while True:
                now = trio.current_time()
                targets = self._candidates(now)
                for address in targets:
                    if self.known.asked(address, now) < self._limits.reach_checkers:
                        peer = self._checker(address, now)
                        if peer is not None:
                            self._asking.add(peer.peer_id)
                            nursery.start_soon(self._ask, peer, address)
                self._conclude()
                await trio.sleep(LOOK_S)

    def _candidates(self, now: float) -> tuple[Address, ...]:
        own = [
            literal(host, bound.port)
            for bound in self.known.listening
            for host in (self.known.interfaces if bound.scope_class is AddressClass.UNSPECIFIED else (bound.host,))
            if (":" in host) == (bound.kind == "ip6")
        ]
        may_tell = tuple(address for address in sorted(own, key=str) if may_dial(address, self._scope))
        return self.known.candidates((*self._announce, *self.mapped), may_tell, now)

    def _checker(self, address: Address, now: float) -> Peer | None:
        """Somebody to ask: best one whom our listener's port does not talk to."""
        free = [peer for peer in self._peers() if peer.peer_id not in self._asking]
        free = [peer for peer in free if self.known.wants(peer.peer_id, _host(peer), address, now)]
        return min(free, key=lambda peer: (self._biased(peer), peer.relayed), default=None)

    def _biased(self, peer: Peer) -> bool:
        ports = {bound.port for bound in self.known.listening}
        return any(link.initiator and link.relay is None and link.pipe.info().local[1] in ports for link in peer.links)

    async def _ask(self, peer: Peer, address: Address) -> None:
        biased, host = self._biased(peer), _host(peer)
        try:
            with trio.fail_after(self._limits.reach_ask_s):
                verdict = await self._verdict(peer, address)
        except (WireError, trio.TooSlowError, trio.EndOfChannel, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            log.debug("%s did not check %s: %s", peer.peer_id.short, address, error)
            self.known.silent(peer.peer_id, host, address, trio.current_time())
            return
        finally:
            self._asking.discard(peer.peer_id)
        cause = printable(verdict.cause)
        self.known.verdict(peer.peer_id, host, address, verdict.ok, cause, biased=biased, now=trio.current_time())
        self._conclude()

    async def _verdict(self, peer: Peer, address: Address) -> ReachVerdict:
        nonce = os.urandom(NONCE_BYTES)
        self._under_way.add(nonce)
        try:
            async with await peer.open(PROTOCOL) as stream:
                assert isinstance(stream, MessageStream)
                await stream.send(encode(ReachAsk((str(address),), nonce)))
                data = await stream.receive()
                if (more := _maybe_more(data)) is not None:
                    await stream.send(bytes(min(more.bytes, self._limits.reach_padding_bytes)))
                    data = await stream.receive()
                answer = decode(data, ReachAnswer)
        finally:
            self._under_way.discard(nonce)
        if answer.code != Code.OK:
            raise error_for(answer.code, retry_after=answer.retry_ms / 1000 or None)
        statement = open_envelope(answer.verdict, REACH, now_unix=time.time(), run=None, limits=self._limits)
        verdict = decode(statement.payload, ReachVerdict)
        if statement.signer != peer.peer_id or verdict.subject != self._identity.peer_id.raw or verdict.address != str(address):
            raise error_for(Code.PROTOCOL, detail="a verdict by another, about another or about another address")
        return verdict

    def _conclude(self) -> None:
        now = trio.current_time()
        found = self.known.finding(self._candidates(now), now)
        if found != self.finding:
            self.finding = found
            self._changed(found)

    # -- answering

    async def _answer(self, peer: Peer, stream: MessageStream | ByteStream) -> None:
        if not isinstance(stream, MessageStream):
            raise error_for(Code.PROTOCOL, detail="this protocol is made of messages")
        limits = self._limits
        ask = decode(await self._heard(stream), ReachAsk)
        wait_s = self._too_often(peer.peer_id, trio.current_time())
        if wait_s:
            await stream.send(encode(ReachAnswer(Code.RATE_LIMITED, b"", int(wait_s * 1000) + 1)), fin=True)
            return
        address = self._may_check(ask.addresses)
        if address is None:
            await stream.send(encode(ReachAnswer(Code.REFUSED)), fin=True)
            return
        if address.host != _host(peer):
            await stream.send(encode(ReachMore(limits.reach_padding_bytes)))
            if len(await self._heard(stream)) < limits.reach_padding_bytes:
                raise error_for(Code.PROTOCOL, detail="less padding than was asked for")
            await trio.sleep(self._rng.uniform(0, limits.reach_delay_most_s))
        cause = await self._dial_back(address, ask.nonce)
        verdict = ReachVerdict(peer.peer_id.raw, str(address), not cause, cause)
        now_unix = time.time()
        sealed = seal(
            self._identity,
            REACH,
            encode(verdict),
            run=NO_RUN,
            seq=int(now_unix * 1000),
            not_after=int(now_unix + limits.reach_verdict_life_s),
        )
        await stream.send(encode(ReachAnswer(Code.OK, sealed)), fin=True)

    async def _heard(self, stream: MessageStream) -> bytes:
        try:
            with trio.fail_after(self._limits.reach_ask_s):  # the asker does not wait longer either
                return await stream.receive()
        except trio.TooSlowError:
            raise error_for(Code.TIMEOUT, detail="the other side does not go on") from None

    def _too_often(self, peer_id: PeerId, now: float) -> float:
        """Seconds until this peer may ask again; 0: now, and it is counted."""
        per_min = self._limits.reach_peer_per_min
        return 0.0 if self._buckets.take(peer_id, now) and self._total.take(now) else 60 / per_min

    def _may_check(self, texts: Sequence[str]) -> Address | None:
        for text in texts:
            try:
                address = Address.parse_received(text)
            except ValueError:
                continue
            if address.is_literal and address.relay is None and may_dial(address, self._scope):
                return address
        return None

    async def _dial_back(self, address: Address, nonce: bytes) -> str:
        """Why nobody was found there, "" if the one who knows the nonce was."""
        try:
            await trio.sleep(self._rate.delay_s(address, trio.current_time()))
            with trio.fail_after(self._limits.reach_dial_s):
                pipe = await self._transport.dial(address)
                try:
                    await send_all(pipe, GREETING + DIAL_BACK + nonce)
                    answer = memoryview(bytearray(1))
                    return "" if await pipe.receive_into(answer) and bytes(answer) == DIAL_BACK else "another program answered"
                finally:
                    pipe.close()
        except trio.TooSlowError:
            return SILENT.words
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            return cause_of(error).words

    # -- the listener's side

    async def greeted(self, pipe: Pipe) -> None:
        """An inbound pipe that began with `PLR1`."""
        try:
            with trio.move_on_after(PIPE_S):
                request = await exactly(pipe, 1 + NONCE_BYTES)
                what, nonce = request[:1], request[1:]
                if what == DIAL_BACK and nonce in self._under_way:
                    await send_all(pipe, DIAL_BACK)
                elif what == OBSERVE:
                    await send_all(pipe, literal_text(*pipe.info().remote).encode())
                await pipe.send_eof()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return
        finally:
            pipe.close()


async def exactly(pipe: Pipe, count: int) -> bytes:
    """So many bytes, fewer at the end of the peer's data."""
    buffer = memoryview(bytearray(count))
    filled = 0
    while filled < count:
        got = await pipe.receive_into(buffer[filled:])
        if not got:
            break
        filled += got
    return bytes(buffer[:filled])


def _host(peer: Peer) -> str:
    """Where a peer's connection comes from; "" if that is a relay."""
    link = peer.primary
    return "" if link is None or link.relay is not None else link.pipe.info().remote[0]


def _maybe_more(data: bytes) -> ReachMore | None:
    try:
        return decode(data, ReachMore)
    except WireError:
        return None
