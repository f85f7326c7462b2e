"""More connections beside a punched one: each through a hole of its own, between two ports that nobody has used yet.

A punched hole leads from one port to one port, and a second connection between the same two cannot exist.  So each side takes a fresh
port, asks somebody outside as whom it is seen from there (`PLR1 01 nonce`, reach.py), and tells the other over the connection that
stands; then both dial each other at the same moment, as at the first punch (punch.py), and each end says `PLP1 ‖ nonce`.  The side
that dials lanes (lanes.py) begins, and is the initiator of the handshake on the new connection, whatever TCP says.

What goes wrong.  A router that gave every connection the same outside port until now is out of numbers, or has several outside
addresses: then the hole leads nowhere, which costs a try; after three the connection that stands carries everything (lanes.py).
Whoever answers the question may lie; and the other side could name a port of a third one, to have us dial there.  So only the *host* to
which the connection leads is dialled, whatever is named: it is the peer's by its own proof, and a wrong port there is its own affair.
The other side has us ask outside and dial: a few times, then once in ten seconds.

Within a house nothing stands between the two: there the listener is dialled, as for any lane.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Awaitable, Callable, Sequence

import trio

from wire.address import Address, AddressClass
from wire.errors import Code, WireError, error_for
from wire.identity import PeerId
from wire.limits import Limits
from wire.messages import decode, encode
from wire.net.bytestream import ByteStream
from wire.net.dial import DialRate
from wire.net.link import Link
from wire.net.peer import Peer
from wire.net.punch import GREETING as HOLE
from wire.net.reach import GREETING as OUTSIDE
from wire.net.reach import OBSERVE, exactly
from wire.net.services import Service, Services
from wire.net.stream import MessageStream
from wire.net.transport import Pipe, Transport, literal, send_all
from wire.path import PUNCHED, PathKind
from wire.punchmessages import NONCE_BYTES, Go, Punch
from wire.rates import Buckets

PROTOCOL = "punch-lane/1"
PORTS = range(49152, 65536)  # RFC 6335: dynamic ports, which nobody registers
PORT_TRIES = 3
ASKED_MOST = 2  # whom we ask as whom we are seen, until one answers
REFUSED_PAUSE_S = 0.1
TEXT_MAX_BYTES = 128


class MoreLanes:
    """Makes pipes for lanes of punched pairs, and answers those who make them."""

    def __init__(
        self,
        limits: Limits,
        transport: Transport,
        *,
        rate: DialRate,
        peers: Callable[[], Sequence[Peer]],
        join: Callable[[Pipe, PeerId], Awaitable[None]],
        rng: random.Random,
    ) -> None:
        """`peers`: those connected.  `join(pipe, peer)`: the responder's handshake, and the place among the peer's connections."""
        self._limits = limits
        self._transport = transport
        self._rate = rate
        self._peers = peers
        self._join = join
        self._rng = rng
        self._asked = Buckets(1 / limits.punch_lane_interval_s, limits.punch_lane_burst, limits.peer_book_max)
        self._busy: set[PeerId] = set()

    def serve(self, services: Services) -> None:
        """Answer `punch-lane/1` of members."""
        services.add(PROTOCOL, Service(self._answer))

    def gauges(self) -> dict[str, int]:
        return {"lane_punching": len(self._busy)}

    async def open(self, control: Link) -> Pipe:
        """A pipe beside the punched connection `control`, which we dial the lanes of.  Raises WireError, OSError or TooSlowError."""
        peer = next((peer for peer in self._peers() if peer.primary is control), None)
        if peer is None:
            raise error_for(Code.SUPERSEDED, local=True, detail="this connection is not the one in use")
        nonce = os.urandom(NONCE_BYTES)
        with trio.fail_after(self._limits.punch_talk_s + self._limits.punch_dial_s):
            port, seen, witness = await self._fresh_port(control)
            try:
                async with await peer.open(PROTOCOL) as stream:
                    assert isinstance(stream, MessageStream)
                    await stream.send(encode(Punch((seen,), nonce)))
                    answer = decode(await stream.receive(), Punch)
                    target = _named(answer, control)
                    await stream.send(encode(Go()), fin=True)
                await trio.sleep((control.session.rtt_s or 0.0) / 2)
                return await self._meet(target, port, nonce)
            except trio.EndOfChannel:
                raise error_for(Code.REFUSED, detail="the other side did not take part") from None
            finally:
                witness.close()

    async def _answer(self, peer: Peer, stream: MessageStream | ByteStream) -> None:
        control, now = peer.primary, trio.current_time()
        if not isinstance(stream, MessageStream):
            raise error_for(Code.PROTOCOL, detail="this protocol is made of messages")
        if control is None or control.initiator or control.pipe.info().path.kind is not PathKind.PUNCHED:
            raise error_for(Code.REFUSED, detail="no punched connection of which you dial the lanes")
        if peer.peer_id in self._busy or len(self._busy) >= self._limits.punches_at_once or not self._asked.take(peer.peer_id, now):
            raise error_for(Code.RATE_LIMITED, detail="too many attempts", retry_after=self._limits.punch_lane_interval_s)
        self._busy.add(peer.peer_id)
        try:
            with trio.fail_after(self._limits.punch_talk_s + self._limits.punch_dial_s):
                ask = decode(await stream.receive(), Punch)
                target = _named(ask, control)
                port, seen, witness = await self._fresh_port(control)
                try:
                    await stream.send(encode(Punch((seen,), ask.nonce)))
                    decode(await stream.receive(), Go)
                    pipe = await self._meet(target, port, ask.nonce)
                finally:
                    witness.close()
                await self._join(pipe, peer.peer_id)
        except (OSError, trio.TooSlowError) as error:
            raise error_for(Code.TIMEOUT, detail=f"no hole for a lane: {error or 'no answer'}") from None
        finally:
            self._busy.discard(peer.peer_id)

    # -- a port of our own

    async def _fresh_port(self, control: Link) -> tuple[int, str, Pipe]:
        """A port that has no connection but one, and as whom we are seen from it.  The one keeps the router's mapping: close it later."""
        six = ":" in control.pipe.info().remote[0]
        failure: Exception = error_for(Code.REFUSED, local=True, detail="nobody outside is known who could be asked")
        for asked in self._outside(six):
            for _ in range(PORT_TRIES):
                port = self._rng.choice(PORTS)
                try:
                    await trio.sleep(self._rate.delay_s(asked, trio.current_time()))
                    with trio.fail_after(self._limits.dial_timeout_s / ASKED_MOST):
                        pipe = await self._transport.dial(asked, local_port=port)
                except (OSError, trio.TooSlowError) as error:
                    failure = error
                    if isinstance(error, OSError) and error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
                        continue
                    break
                try:
                    return port, await self._seen(pipe), pipe
                except (WireError, trio.TooSlowError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
                    failure = error if isinstance(error, (WireError, trio.TooSlowError)) else error_for(Code.REFUSED, detail=str(error))
                    pipe.close()
                    break
                except BaseException:
                    pipe.close()
                    raise
        raise failure

    def _outside(self, six: bool) -> list[Address]:
        """Whom to ask: the nearest of those whom we have dialled at a public address."""
        found: list[tuple[float, Address]] = []
        for peer in self._peers():
            link = peer.primary
            if link is not None and link.initiator and link.pipe.info().path.kind is PathKind.DIRECT:
                address = literal(*link.pipe.info().remote)
                if address.scope_class is AddressClass.GLOBAL and (address.kind == "ip6") == six:
                    found.append((1.0 if peer.rtt_s is None else peer.rtt_s, address))
        return [address for _, address in sorted(found, key=lambda item: item[0])[:ASKED_MOST]]

    async def _seen(self, pipe: Pipe) -> str:
        with trio.fail_after(self._limits.dial_timeout_s / ASKED_MOST):
            await send_all(pipe, OUTSIDE + OBSERVE + os.urandom(NONCE_BYTES))
            said = await exactly(pipe, TEXT_MAX_BYTES)
        try:
            return str(Address.parse_received(said.decode("ascii")).with_peer(None))
        except ValueError:
            raise error_for(Code.PROTOCOL, detail="what came is no address") from None

    # -- both

    async def _meet(self, target: Address, port: int, nonce: bytes) -> Pipe:
        """Dial until it is open; both ends say the nonce."""
        until = trio.current_time() + self._limits.punch_retry_s
        with trio.fail_after(self._limits.punch_dial_s):
            while True:
                await trio.sleep(self._rate.delay_s(target, trio.current_time()))
                try:
                    pipe = await self._transport.dial(target, local_port=port)
                    break
                except OSError as error:
                    if error.errno != errno.ECONNREFUSED or trio.current_time() >= until:
                        raise
                    await trio.sleep(REFUSED_PAUSE_S)
            try:
                await send_all(pipe, HOLE + nonce)
                if await exactly(pipe, len(HOLE + nonce)) != HOLE + nonce:
                    raise error_for(Code.AUTH, detail="somebody else is there")
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                pipe.close()
                raise error_for(Code.REFUSED, detail=f"the hole closed again: {error}") from error
            except BaseException:
                pipe.close()
                raise
        pipe.runs(PUNCHED)
        return pipe


def _named(said: Punch, control: Link) -> Address:
    """The port that the other side names, at the host to which the connection leads and nowhere else."""
    host, _ = control.pipe.info().remote
    for text in said.candidates:
        try:
            address = Address.parse_received(text)
        except ValueError:
            continue
        if address.is_literal and address.relay is None and address.host == host:
            return address.with_peer(None)
    raise error_for(Code.REFUSED, detail="no port is named at the address of this connection: its router has several, or hands out none")
