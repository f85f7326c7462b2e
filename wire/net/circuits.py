"""Circuits as the two ends see them: opened through a relay towards a peer, or coming in through a relay that holds a place for us.

What goes wrong.  A relay that dials through another relay makes chains that nobody can account for: a circuit is opened only over a
direct connection.  A stranger opens `circuit-in/1` to us without being our relay and so gets around what limits inbound
connections: only relays with a reservation of ours may.  The voucher that the relay gave the target stands in the target's record;
without it nothing is opened, because the relay would refuse anyhow.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Container, Sequence

import trio

from wire.address import Address
from wire.envelope import BadEnvelope, VerifiedCache
from wire.errors import Code, error_for
from wire.events import Kind
from wire.identity import PeerId
from wire.limits import Limits
from wire.messages import decode, encode
from wire.net.bytestream import ByteStream
from wire.net.circuit import CircuitPipe
from wire.net.metering import Metering
from wire.net.peer import Peer
from wire.net.stream import MessageStream
from wire.net.transport import Pipe
from wire.relaymessages import CircuitAsk, CircuitIn, Purpose
from wire.vouchers import OpenedVoucher, open_voucher

OPEN = "circuit/1"  # to a relay
OPENED = "circuit-in/1"  # by a relay
# Priority of the streams that carry them: what they carry has priorities of its own, and its bulk has a circuit of its own.
CONTROL_CLASS = 2
LANE_CLASS = 3


class Circuits:
    """Opens them and takes those that come in."""

    def __init__(
        self,
        limits: Limits,
        *,
        connect: Callable[[PeerId, Address | None], Awaitable[Peer]],
        vouchers: Callable[[PeerId], Sequence[bytes]],
        own_relays: Callable[[], Container[PeerId]],
        accept: Callable[[Pipe], Awaitable[None]],
        metering: Metering,
    ) -> None:
        """`connect(relay, at)`: a connection to a relay.  `vouchers(target)`: those of its record.  `own_relays`: where we have a place."""
        self._limits = limits
        self._connect = connect
        self._vouchers = vouchers
        self._own_relays = own_relays
        self._accept = accept
        self._metering = metering
        self._verified = VerifiedCache(limits.relay_reservations_max)
        self._seen: dict[Pipe, tuple[PeerId, str]] = {}  # circuits that came in -> from whom, and as whom the relay sees him

    async def open(self, relay: PeerId, target: PeerId, bulk: bool, at: Address | None = None) -> CircuitPipe:
        """A pipe to `target` through `relay`.  A refusal of the relay shows when the pipe is used.

        `bulk`: a lane beside a control circuit.  Raises `NO_RESERVATION` if the target shows no voucher of that relay, and what
        connecting to the relay raises.
        """
        voucher = self._voucher(relay, target)
        with trio.fail_after(self._limits.dial_timeout_s):
            peer = await self._connect(relay, at)
            if peer.relayed:
                raise error_for(Code.REFUSED, detail=f"{relay.short} is itself reached through a relay", local=True)
            purpose = Purpose.LANE if bulk else Purpose.CONTROL
            ask = CircuitAsk(target.raw, voucher.voucher.cls, purpose, voucher.statement.raw)
            stream = await peer.open(OPEN, Kind.BYTE, LANE_CLASS if bulk else CONTROL_CLASS, meta=encode(ask))
        assert isinstance(stream, ByteStream)
        return self._pipe(stream, peer, target)

    def _pipe(self, stream: ByteStream, relay: Peer, other: PeerId) -> CircuitPipe:
        self._metering.opened(relay.peer_id, other)
        return CircuitPipe(
            stream,
            relay.peer_id,
            relay.stats.congestion,
            lambda pipe: self._metering.closed(relay.peer_id, other, pipe.sent, pipe.received),
        )

    def _voucher(self, relay: PeerId, target: PeerId) -> OpenedVoucher:
        causes = []
        for raw in self._vouchers(target):
            try:
                return open_voucher(
                    raw, now_unix=time.time(), run=None, relay=relay, peer=target, verified=self._verified, limits=self._limits
                )
            except BadEnvelope as error:
                causes.append(error.detail)
        why = "; ".join(causes) or "it shows none"
        raise error_for(Code.NO_RESERVATION, detail=f"no voucher of the relay {relay.short} for {target.short}: {why}", local=True)

    async def take(self, peer: Peer, stream: MessageStream | ByteStream) -> None:
        """The handler of `circuit-in/1`: an inbound connection like any other, until its pipe is closed."""
        if not isinstance(stream, ByteStream):
            raise error_for(Code.PROTOCOL, detail="a circuit is a byte stream")
        circuit = decode(stream.meta, CircuitIn)
        try:
            source = PeerId(circuit.source)
        except ValueError:
            raise error_for(Code.PROTOCOL, detail="no peer id") from None
        if peer.peer_id not in self._own_relays() or peer.relayed:
            raise error_for(Code.REFUSED, detail="this relay holds no place for us")
        pipe = self._pipe(stream, peer, source)
        self._seen[pipe] = source, circuit.seen
        try:
            await self._accept(pipe)
            await pipe.wait_closed()
        finally:
            del self._seen[pipe]
            pipe.close()

    def seen(self, peer_id: PeerId) -> frozenset[str]:
        """The hosts as which relays see a peer whose circuits came in to us.  A relay's word, not the peer's own."""
        return frozenset(host for source, host in self._seen.values() if source == peer_id and host)

