"""The relay service: places for peers that cannot be dialled, and circuits to them.

A peer that wants a place keeps one message stream of `relay/1` open: it says Reserve, we answer Reserved with a voucher, and again
before the place runs out.  The stream is the reservation: when it ends, the place is free.  Whoever wants to talk to that peer opens
`circuit/1` to us with the voucher; we open `circuit-in/1` to the peer and copy bytes between the two until both directions have
ended.  What passes is sealed end to end.

What goes wrong.  Copying as fast as bytes come gives the line to whoever sends most: every piece waits for its turn at one
`FairShare`, and what waits is not credited, so that the sender feels backpressure and nothing is dropped.  A reader that stands
still holds one piece of 64 KiB and a stream window, and nobody else, and not the place of a caller that has gone: a reset at one end
ends the circuit whatever the other does, and so does a piece that nobody takes for a minute.  The rate of a relay that nobody has set
is a guess about somebody's line: it starts low and follows what the line has carried.

The end.  A relay that just goes breaks every circuit, and what was under way waits until somebody has found another way.  One that is
told to stop says GOAWAY first, takes nobody new and goes on copying; its clients find their other relay meanwhile (detour.py) and end
their circuits themselves.  It goes when none is left, or when its time is over.

The tables and the shares are sans-IO (`wire/reservations.py`, `wire/fairshare.py`); this file owns tasks and streams.
Source: the project's wire specification, section "Relay"; the shape is that of libp2p's circuit relay v2.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import trio

from wire.calls import PassedOn
from wire.envelope import NO_RUN, VerifiedCache
from wire.errors import Code, StreamReset, WireError, error_for
from wire.events import Kind
from wire.fairshare import FairShare
from wire.identity import Identity, PeerId
from wire.limits import Limits
from wire.messages import decode, encode
from wire.net import metering
from wire.net.bytestream import ByteStream
from wire.net.circuits import CONTROL_CLASS, LANE_CLASS, OPEN, OPENED
from wire.net.peer import Peer
from wire.net.services import Service, Services
from wire.net.stream import MessageStream
from wire.net.uplink import Uplink
from wire.rates import Buckets
from wire.relaymessages import CircuitAsk, CircuitIn, Note, Purpose, RelayClass, RelayNote, Reserve, Reserved, Voucher
from wire.reservations import Circuit, Ended, Refusal, RelayTable
from wire.vouchers import open_voucher, seal_voucher

PROTOCOL = "relay/1"
PIECE_BYTES = 64 * 1024  # the quantum of the fair share
NOTE_DEADLINE_S = 5.0
TICK_S = 1.0
CLASS_NAMES = {RelayClass.SIGNAL: "signal", RelayClass.BULK: "bulk"}


@dataclass(frozen=True, slots=True)
class RelayOffer:
    """What this node does for others that cannot be dialled.  `bulk_rate`: bytes per second, 0 for none, None for a quarter of the
    highest rate that its line has been seen to send, and not less than `limits.relay_bulk_start_bytes_per_s`."""

    signal: bool = True
    bulk_rate: int | None = None


Flow = tuple[int, bool]  # (circuit, upwards)


class _Turns:
    """Who waits for its share: one entry a direction of a circuit."""

    def __init__(self, share: FairShare[Flow]) -> None:
        self.share = share
        self._missing: dict[Flow, int] = {}
        self._turn: dict[Flow, trio.Event] = {}
        self._asked = trio.Event()

    async def take(self, flow: Flow, size: int) -> bool:
        """Wait until that direction may pass `size` bytes; True if it is the first time that the rate held it up."""
        self._missing[flow] = size
        turn = self._turn[flow] = trio.Event()
        self.share.ask(flow, size)
        self._grant()
        held_up = False
        try:
            if not turn.is_set():
                self._asked.set()
                held_up = self.share.throttled(flow)
                await turn.wait()
        finally:
            if self._missing.pop(flow, 0):
                self.share.ask(flow, 0)
            del self._turn[flow]
        return held_up

    def _grant(self) -> None:
        for flow, size in self.share.grant(trio.current_time()):
            self._missing[flow] -= size
            if self._missing[flow] <= 0:
                self._turn[flow].set()

    async def run(self) -> None:
        """Grant what becomes due, for ever."""
        while True:
            self._grant()
            due = self.share.next_time(trio.current_time())
            self._asked = trio.Event()
            with trio.move_on_at(float("inf") if due is None else due):
                await self._asked.wait()


class RelayService:
    """Serves `relay/1` and `circuit/1`.  `run` is its heart and must run while it serves."""

    def __init__(
        self,
        identity: Identity,
        run: bytes | None,
        boot_id: bytes,
        limits: Limits,
        offer: RelayOffer,
        *,
        peer: Callable[[PeerId], Peer | None],
        uplink: Uplink,
        counts: Counter[str],
    ) -> None:
        """`peer(id)`: one that is connected.  `uplink`: what the line has carried."""
        self._identity = identity
        self._run = NO_RUN if run is None else run
        self._boot_id = boot_id
        self._limits = limits
        self._offer = offer
        self._peer = peer
        self._uplink = uplink
        self._counts = counts
        self._verified = VerifiedCache(limits.relay_reservations_max)
        self._opens = Buckets(limits.relay_opens_per_s, limits.relay_opens_burst, limits.relay_requesters_max)
        rate = self._bulk_rate()
        self._table = RelayTable(rate, limits)
        self._turns = _Turns(FairShare(rate, now=trio.current_time(), limits=limits))
        self._scopes: dict[int, trio.CancelScope] = {}
        self._ended = trio.Event()  # set and replaced when a circuit ends
        self._nursery: trio.Nursery | None = None

    def serve(self, services: Services) -> None:
        """Offer the protocols, to guests too: a newcomer may have to be introduced through us."""
        services.add(PROTOCOL, Service(self._reserve, guest=True))
        services.add(OPEN, Service(self._circuit, guest=True))

    def classes(self) -> tuple[str, ...]:
        """What the peer record offers."""
        if not self._offer.signal:
            return ()
        bulk = self._run != NO_RUN and self._table.bulk_rate > 0
        return ("signal", "bulk") if bulk else ("signal",)

    def free_bps(self) -> int:
        """What one more pair could expect."""
        return self._table.bulk_share()

    def gauges(self) -> dict[str, int]:
        return {**self._table.gauges(), **self._turns.share.gauges()}

    async def run(self) -> None:
        """For ever.  A cancel ends every circuit."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                nursery.start_soon(self._turns.run)
                while True:
                    await trio.sleep(TICK_S)
                    now = trio.current_time()
                    self._uplink.look(now)
                    rate = self._bulk_rate()
                    if rate != self._table.bulk_rate:
                        self._table.bulk_rate = rate
                        self._turns.share.set_rate(rate, now)
                    for ended in self._table.tick(now):
                        self._end(ended)
            finally:
                self._nursery = None  # circuits may end later than this: their notes are not sent then

    def stop(self) -> None:
        """No new places and circuits from now on.  Those that stand go on."""
        self._table.stopping = True

    async def emptied(self, notice_s: float) -> None:
        """Until no circuit stands here, at most so long."""
        with trio.move_on_after(notice_s):
            while self._scopes:
                await self._ended.wait()

    def _bulk_rate(self) -> float:
        if self._offer.bulk_rate is not None:
            return float(self._offer.bulk_rate)
        limits = self._limits
        return max(limits.relay_bulk_start_bytes_per_s, self._uplink.best * limits.relay_bulk_upload_share)

    def _end(self, ended: Ended) -> None:
        self._counts[f"relay-{ended.refusal.why.name.lower()}"] += 1
        if (scope := self._scopes.get(ended.circuit.id)) is not None:
            scope.cancel()

    # -- places

    async def _reserve(self, peer: Peer, stream: MessageStream | ByteStream) -> None:
        if not isinstance(stream, MessageStream):
            raise error_for(Code.PROTOCOL, detail="this protocol is made of messages")
        if not self._offer.signal:
            raise error_for(Code.REFUSED, detail="this node does not relay")
        try:
            async for data in stream:
                ask = decode(data, Reserve)
                await stream.send(encode(self._place(peer, stream, ask.cls)))
            await stream.send_eof()
        finally:
            for circuit in self._table.connection_ended(peer.peer_id, stream, trio.current_time()):
                if (scope := self._scopes.get(circuit.id)) is not None:
                    scope.cancel()

    def _place(self, peer: Peer, stream: MessageStream, cls: int) -> Reserved:
        now = trio.current_time()
        host = _host(peer)
        found = self._table.reserve(
            peer.peer_id, cls, host, member=not peer.guest, over_circuit=stream.chained or peer.relayed, connection=stream, now=now
        )
        if isinstance(found, Refusal):
            self._counts[f"relay-{found.why.name.lower()}"] += 1
            return Reserved(found.code, 0, 0, 0, b"", int(found.retry_s * 1000))
        now_unix = time.time()
        voucher = Voucher(peer.peer_id.raw, found.cls, found.rate, self._boot_id)
        sealed = seal_voucher(
            self._identity, voucher, run=self._run, seq=int(now_unix * 1000), now_unix=now_unix, limits=self._limits
        )
        return Reserved(Code.OK, found.cls, int((found.expires - now) * 1000), found.rate, sealed)

    # -- circuits

    async def _circuit(self, peer: Peer, stream: MessageStream | ByteStream) -> None:
        if not isinstance(stream, ByteStream):
            raise error_for(Code.PROTOCOL, detail="a circuit is a byte stream")
        ask = decode(stream.meta, CircuitAsk)
        if not self._opens.take(peer.peer_id, trio.current_time()):
            raise error_for(Code.RATE_LIMITED, detail="circuits are opened too often")
        try:
            target_id = PeerId(ask.target)
        except ValueError:
            raise error_for(Code.PROTOCOL, detail="the target is no peer id") from None
        target = self._peer(target_id)
        circuit = self._admit(peer, target_id, target, ask, stream.chained)
        assert target is not None  # the table knows whom it holds a place for
        scope = self._scopes[circuit.id] = trio.CancelScope()
        share, ends, control = self._turns.share, (circuit.source, circuit.target), circuit.purpose is Purpose.CONTROL
        for up in (True, False):
            share.add((circuit.id, up), ends, control=control, now=trio.current_time())
        try:
            with scope:
                meta = encode(CircuitIn(peer.peer_id.raw, circuit.cls, circuit.purpose, _host(peer)))
                cls = LANE_CLASS if circuit.purpose is Purpose.LANE else CONTROL_CLASS
                window = self._window(circuit)
                stream.pass_on(*window)
                async with await target.open(OPENED, Kind.BYTE, cls, meta=meta, passed_on=window) as far:
                    assert isinstance(far, ByteStream)
                    await self._splice(circuit, stream, far)
            if scope.cancelled_caught:
                raise error_for(Code.TIMEOUT, detail="the circuit has stood as long as it may, or its target is gone")
        finally:
            del self._scopes[circuit.id]
            self._ended.set()
            self._ended = trio.Event()
            for up in (True, False):
                share.remove((circuit.id, up), trio.current_time())
            self._table.close(circuit.id)
            self._tell(circuit, Note.ENDED)

    def _window(self, circuit: Circuit) -> PassedOn:
        """What each end may send before the other has taken it: at first, and at most."""
        limits = self._limits
        if circuit.cls is RelayClass.SIGNAL:
            return limits.relay_signal_window_bytes, limits.relay_signal_window_bytes
        return limits.relay_bulk_window_bytes, limits.relay_bulk_window_max_bytes

    def _admit(self, peer: Peer, target_id: PeerId, target: Peer | None, ask: CircuitAsk, chained: bool) -> Circuit:
        """Raises the refusal.  Not a byte was forwarded then, and nothing is kept."""
        open_voucher(
            ask.voucher,
            now_unix=time.time(),
            run=None,
            relay=self._identity.peer_id,
            peer=target_id,
            cls=ask.cls,
            boot_id=self._boot_id,
            own_clock=True,
            verified=self._verified,
            limits=self._limits,
        )
        found = self._table.connect(
            peer.peer_id,
            target_id,
            ask.cls,
            ask.purpose,
            voucher_checked=True,
            over_circuit=chained or peer.relayed or (target is not None and target.relayed),
            members=(not peer.guest, target is not None and not target.guest),
            now=trio.current_time(),
        )
        if isinstance(found, Refusal):
            self._counts[f"relay-{found.why.name.lower()}"] += 1
            raise error_for(found.code, detail=str(found), retry_after=found.retry_s or None)
        if target is None:
            self._table.close(found.id)
            raise error_for(Code.REFUSED, detail="the target is gone")
        return found

    async def _splice(self, circuit: Circuit, near: ByteStream, far: ByteStream) -> None:
        """Copy until both directions have ended, or one broke: then the other end hears the code."""

        def end(error: WireError) -> None:
            for stream in (near, far):
                stream.reset(error.code, error.detail)
            nursery.cancel_scope.cancel()

        async def copy(source: ByteStream, sink: ByteStream, up: bool) -> None:
            try:
                await self._copy(circuit, source, sink, up)
            except WireError as error:
                end(error)

        async def watch(stream: ByteStream) -> None:
            # What came before a connection was lost is still passed on; a reset wants nothing any more.
            if isinstance(error := await stream.wait_reset(), StreamReset):
                end(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch, near)
            nursery.start_soon(watch, far)
            async with trio.open_nursery() as copies:
                copies.start_soon(copy, near, far, True)
                copies.start_soon(copy, far, near, False)
            nursery.cancel_scope.cancel()

    async def _copy(self, circuit: Circuit, source: ByteStream, sink: ByteStream, up: bool) -> None:
        buffer = memoryview(bytearray(PIECE_BYTES))
        while count := await source.receive_into(buffer):
            refusal = self._table.forwarded(circuit.id, up, count, trio.current_time())
            if refusal is not None:
                self._counts[f"relay-{refusal.why.name.lower()}"] += 1
                raise error_for(refusal.code, detail=str(refusal))
            if circuit.cls is RelayClass.BULK:
                if await self._turns.take((circuit.id, up), count):
                    self._tell(circuit, Note.THROTTLED)
            else:
                await trio.sleep(self._table.pause_s(circuit.id, up, trio.current_time()))
            try:
                with trio.fail_after(self._limits.relay_stall_s):
                    await sink.send_all(buffer[:count])
            except trio.TooSlowError:
                raise error_for(Code.TIMEOUT, detail="the other end of the circuit takes nothing") from None
        await sink.send_eof()

    # -- what both ends are told

    def _tell(self, circuit: Circuit, kind: Note) -> None:
        if self._nursery is None:
            return
        up, down, share = circuit.up_bytes, circuit.down_bytes, self._table.bulk_share()
        for end, other, sent, received in (
            (circuit.source, circuit.target, up, down),
            (circuit.target, circuit.source, down, up),
        ):
            peer = self._peer(end)
            if peer is not None and peer.primary is not None:
                note = RelayNote(kind, other.raw, sent, received, share)
                self._nursery.start_soon(self._send_note, peer, note)

    async def _send_note(self, peer: Peer, note: RelayNote) -> None:
        with trio.move_on_after(NOTE_DEADLINE_S):
            try:
                async with await peer.open(metering.PROTOCOL) as stream:
                    assert isinstance(stream, MessageStream)
                    await stream.send(encode(note), fin=True)
            except (WireError, trio.BrokenResourceError, trio.ClosedResourceError):
                return  # it does not want to know


def _host(peer: Peer) -> str:
    """From where a peer's connection comes."""
    primary = peer.primary
    return "" if primary is None else primary.pipe.info().remote[0]
