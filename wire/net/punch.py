"""Making a direct connection out of a relayed one (`wire/punching.py` says when and why).

The side that the circuit came in to begins, because it knows that it could not be dialled; the caller's addresses it tries first, for
he may be one who can be.  Then both say where they are seen, and dial each other's addresses from their listeners' ports at the same
moment, so that their routers let each other in.  A dial may meet a dial (simultaneous open) or a listener (the other's SYN came
later): both are right.  Each end of a new socket first says and reads `PLP1 ‖ nonce`, so that a stranger who happens to sit at an old
address ends there; then the lower peer id is the initiator of the handshake, whatever TCP says about who dialled.  Every connection
that proves itself is given to the manager, whose rule picks one; the circuit drains, and tensor channels go over.

What goes wrong: the kernel says EADDRNOTAVAIL for our dial when the other's came in first: then the accepted connection is the one.

The caller's side does one thing of its own: when a newer record says that the other can be dialled after all (its owner has mapped the
port), it dials.  Else a pair that met through a relay would stay there for as long as it lives.

A router that answers strangers with RST ends the attempt of whoever is early: dialling again within three seconds helps where the
other side is late, and nothing helps otherwise.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import trio

from wire.address import Address, Scope
from wire.errors import Code, ConnectionLost, WireError, error_for
from wire.identity import PeerId
from wire.limits import Limits
from wire.messages import PeerRecord, decode, encode
from wire.net.bytestream import ByteStream
from wire.net.causes import cause_of
from wire.net.dial import DialFailed, DialRate
from wire.net.link import Link
from wire.net.netevents import NetEvent, Punched
from wire.net.peer import Peer
from wire.net.reach import exactly
from wire.net.services import Service, Services
from wire.net.stream import MessageStream
from wire.net.transport import Pipe, Transport, send_all
from wire.path import PUNCHED
from wire.punching import Attempts, hopeless, offered, usable
from wire.punchmessages import NONCE_BYTES, Go, Punch
from wire.reachability import Finding

log = logging.getLogger("wire.net")

PROTOCOL = "punch/1"
GREETING = b"PLP1"
LOOK_S = 0.25


@dataclass(slots=True)
class _Meeting:
    """One attempt under way: who may come in with this nonce."""

    peer_id: PeerId
    causes: list[str] = field(default_factory=list)
    met: trio.Event = field(default_factory=trio.Event)
    dials: list[trio.CancelScope] = field(default_factory=list)


class PunchService:
    """Serves `punch/1` and tries it with every peer whose circuit came in to us."""

    def __init__(
        self,
        own: PeerId,
        limits: Limits,
        scope: Scope,
        transport: Transport,
        *,
        rate: DialRate,
        finding: Callable[[], Finding],
        listening: Callable[[], Sequence[Address]],
        record: Callable[[PeerId], PeerRecord | None],
        addresses: Callable[[PeerId], Sequence[Address]],
        seen: Callable[[PeerId], Collection[str]],
        peers: Callable[[], Sequence[Peer]],
        dial: Callable[[Sequence[Address], PeerId], Awaitable[Peer]],
        authenticate: Callable[[Pipe, bool, PeerId], Awaitable[Link]],
        adopt: Callable[[Link], Awaitable[Peer]],
        emit: Callable[[NetEvent], None],
    ) -> None:
        """`addresses(peer)`: where its record says that it may be dialled.  `seen(peer)`: the hosts as which relays see it.
        `authenticate(pipe, initiator, who)`: the handshake."""
        self._own = own
        self._limits = limits
        self._scope = scope
        self._transport = transport
        self._finding = finding
        self._listening = listening
        self._record = record
        self._addresses = addresses
        self._seen = seen
        self._peers = peers
        self._dial = dial
        self._authenticate = authenticate
        self._adopt = adopt
        self._emit = emit
        self._rate = rate
        self._meetings: dict[bytes, _Meeting] = {}
        self._attempts: dict[PeerId, Attempts] = {}
        self._busy: set[PeerId] = set()

    def serve(self, services: Services) -> None:
        """Answer `punch/1` of members."""
        services.add(PROTOCOL, Service(self._answer))

    def gauges(self) -> dict[str, int]:
        return {"punching": len(self._meetings)}

    def why(self, peer_id: PeerId) -> str:
        """Why there is no direct connection to a relayed peer, as far as this side knows."""
        found = self._attempts.get(peer_id)
        return "" if found is None else found.why

    def changed(self) -> None:
        """An address of ours is another."""
        for attempts in self._attempts.values():
            attempts.changed(trio.current_time())

    def news(self, peer_id: PeerId) -> None:
        """A newer record of a peer came."""
        if (found := self._attempts.get(peer_id)) is not None:
            found.changed(trio.current_time())

    async def run(self) -> None:
        """For ever."""
        async with trio.open_nursery() as nursery:
            while True:
                now = trio.current_time()
                relayed = {peer.peer_id: peer for peer in self._peers() if peer.relayed and not peer.guest}
                for gone in self._attempts.keys() - relayed.keys() - self._busy:
                    del self._attempts[gone]
                for peer_id, peer in relayed.items():
                    primary = peer.primary
                    if primary is None or peer_id in self._busy or (primary.initiator and not self._direct(peer_id)):
                        continue
                    attempts = self._attempts.setdefault(peer_id, Attempts(self._limits, now))
                    if attempts.due(now):
                        self._busy.add(peer_id)
                        nursery.start_soon(self._try, peer, attempts, not primary.initiator)
                await trio.sleep(LOOK_S)

    # -- the side that begins

    async def _try(self, peer: Peer, attempts: Attempts, called: bool) -> None:
        """`called`: the circuit came in to us, so it is for us to punch."""
        began = trio.current_time()
        before = attempts.why
        try:
            skip = await self._reverse(peer)
            if skip and peer.relayed:
                attempts.skipped(skip, trio.current_time())
            elif peer.relayed:
                why = await self._attempt(peer) if called else "its record names an address, but nobody answers there"
                if why:
                    attempts.failed(why, trio.current_time())
        except (WireError, trio.EndOfChannel, trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError) as error:
            attempts.failed(f"the other side did not take part ({cause_of(error).words})", trio.current_time())
        finally:
            self._busy.discard(peer.peer_id)
        if not peer.relayed:
            self._emit(Punched(peer.peer_id, "", trio.current_time() - began))
        elif attempts.why != before:
            self._emit(Punched(peer.peer_id, attempts.why, trio.current_time() - began))

    async def _reverse(self, peer: Peer) -> str:
        """Dial the other, who may be reachable.  Gives why punching is not tried, "" if it is."""
        if direct := self._direct(peer.peer_id):
            with trio.move_on_after(self._limits.punch_reverse_s):
                with suppress(DialFailed):
                    await self._dial(direct, peer.peer_id)
                    return ""
        record = self._record(peer.peer_id)
        return hopeless(str(self._finding().state), "unknown" if record is None else record.reach)

    def _direct(self, peer_id: PeerId) -> list[Address]:
        return [address for address in self._addresses(peer_id) if address.relay is None]

    async def _attempt(self, peer: Peer) -> str:
        """Why it failed, "" if it did not."""
        nonce = os.urandom(NONCE_BYTES)
        with trio.fail_after(self._limits.punch_talk_s):
            stream = await peer.open(PROTOCOL)
        async with stream:
            assert isinstance(stream, MessageStream)
            with trio.fail_after(self._limits.punch_talk_s):
                asked_at = trio.current_time()
                await stream.send(encode(Punch(self._named(), nonce)))
                answer = decode(await stream.receive(), Punch)
                rtt_s = trio.current_time() - asked_at
                if answer.nonce != nonce:
                    raise error_for(Code.PROTOCOL, detail="the answer is to another attempt")
                await stream.send(encode(Go()), fin=True)
            await trio.sleep(rtt_s / 2)
            return await self._meet(peer.peer_id, nonce, answer.candidates)

    # -- the other side

    async def _answer(self, peer: Peer, stream: MessageStream | ByteStream) -> None:
        if not isinstance(stream, MessageStream):
            raise error_for(Code.PROTOCOL, detail="this protocol is made of messages")
        if not peer.relayed or len(self._meetings) >= self._limits.punches_at_once:
            raise error_for(Code.REFUSED, detail="there is a direct connection, or too many attempts are under way")
        try:
            with trio.fail_after(self._limits.punch_talk_s):
                ask = decode(await stream.receive(), Punch)
                await stream.send(encode(Punch(self._named(), ask.nonce)))
                decode(await stream.receive(), Go)
        except trio.TooSlowError:
            raise error_for(Code.TIMEOUT, detail="the other side does not go on") from None
        why = await self._meet(peer.peer_id, ask.nonce, ask.candidates)
        if why and peer.peer_id not in self._attempts:
            log.debug("no hole to %s: %s", peer.peer_id.short, why)

    def _named(self) -> tuple[str, ...]:
        ports = self._listening()
        hosts = [host for host in self._transport.local_addresses() if not host.startswith("127.") and host != "::1"]
        own = [Address(host, bound.port) for bound in ports for host in hosts if (":" in host) == (bound.kind == "ip6")]
        own = [address for address in own if "%" not in address.host]
        return offered(self._finding().outside, own, self._limits)

    # -- both

    async def _meet(self, peer_id: PeerId, nonce: bytes, named: Sequence[str]) -> str:
        """Dial what the other side named, and wait for it; why that failed, "" if it did not."""
        houses = {address.host for address in self._finding().outside}
        own = self._transport.local_addresses() if houses & set(self._seen(peer_id)) else ()
        candidates = usable(named, self._scope, own, self._limits)
        if nonce in self._meetings or any(other.peer_id == peer_id for other in self._meetings.values()):
            return "an attempt with this peer is under way"
        meeting = self._meetings[nonce] = _Meeting(peer_id)
        try:
            with trio.move_on_after(self._limits.punch_dial_s + 1.0):
                async with trio.open_nursery() as nursery:
                    for address in candidates:
                        nursery.start_soon(self._knock, meeting, nonce, address)
                    await meeting.met.wait()
                    # What is open already goes on: the other side may have another first one, and without both none is left.
                    for scope in meeting.dials:
                        scope.cancel()
        finally:
            del self._meetings[nonce]
        if meeting.met.is_set():
            return ""
        return "; ".join(dict.fromkeys(meeting.causes)) or ("no answer" if candidates else "the other side knows no address of its own")

    async def _knock(self, meeting: _Meeting, nonce: bytes, address: Address) -> None:
        """Dial one candidate until it is open, or time is up."""
        port = next((bound.port for bound in self._listening() if bound.kind == address.kind), 0)
        if not port:
            return
        until = trio.current_time() + self._limits.punch_retry_s
        pipe: Pipe | None = None
        with trio.CancelScope() as dialling:
            meeting.dials.append(dialling)
            while pipe is None and not meeting.met.is_set():
                # Candidates are somebody else's words: all attempts together must not aim at one host, nor hold up our own dials to it.
                now = trio.current_time()
                if self._rate.queued_s(address, now) > self._limits.punch_dial_s:
                    meeting.causes.append(f"{address.host}: dialled too often")
                    return
                await trio.sleep(self._rate.delay_s(address, now))
                try:
                    pipe = await self._transport.dial(address, local_port=port)
                except OSError as error:
                    if error.errno in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
                        return  # the other's dial came in first: it is with the listener
                    meeting.causes.append(f"{address.host}: {cause_of(error).words}")
                    if error.errno != errno.ECONNREFUSED or trio.current_time() >= until:
                        return
        if pipe is not None:
            await self._shake(pipe, nonce, meeting, GREETING + nonce)

    async def greeted(self, pipe: Pipe) -> None:
        """An inbound pipe that began with `PLP1`."""
        try:
            with trio.fail_after(self._limits.punch_talk_s):
                nonce = await exactly(pipe, NONCE_BYTES)
        except (trio.TooSlowError, trio.BrokenResourceError, trio.ClosedResourceError):
            pipe.close()
            return
        except BaseException:
            pipe.close()
            raise
        meeting = self._meetings.get(nonce)
        if meeting is None:
            pipe.close()  # nobody is expected, or no longer
            return
        await self._shake(pipe, nonce, meeting, b"")

    async def _shake(self, pipe: Pipe, nonce: bytes, meeting: _Meeting, expected: bytes) -> None:
        """Prove the attempt, then each other.  `expected`: what the other side still has to say."""
        try:
            await send_all(pipe, GREETING + nonce)
            if await exactly(pipe, len(expected)) != expected:
                raise ConnectionLost("somebody else is there")
            pipe.runs(PUNCHED)
            link = await self._authenticate(pipe, self._own < meeting.peer_id, meeting.peer_id)
            await self._adopt(link)
        except (WireError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            meeting.causes.append(cause_of(error).words)
            pipe.close()
        except BaseException:
            pipe.close()
            raise
        else:
            meeting.met.set()
