"""A node on a host of the lab: `python -m tests.net.node [listen ADDRESS PORT] [seed ENTRY]... [relay off|RATE]
[signal BYTES] [again SECONDS]`.

As a relay it gives RATE bytes a second in class bulk (0: circuits for signals only), and BYTES to each signal circuit.  It has its
address checked again after SECONDS.

It says what happens as JSON lines: `{"ready": address}`, `{"connected": peer id}`, `{"lost": code, "why"}`, `{"seed": entry, "state",
"reason"}`, `{"reach": state, "reason"}`, `{"access": verdict, "reason", "at"}`,
`{"path": "direct|punched|relayed via ..", "peer": id, "at"}`,
`{"punch_failed": why, "peer": id}`, `{"knows": peer id}` of a record; `at` is seconds since its own start.

Told `{"dial": address}` it dials; told `{"connect": peer id}` it connects by what it knows and answers with `path`.  Told
`{"send": bytes}` it sends so many to its first peer (or to `"to"`) and answers `{"echoed": bool, "seconds"}` or, as does who echoes,
`{"broken": code, "why"}`.  Told `{"push": count, "size": bytes, "to": peer id}` it sends so many tensors, of bytes that both sides can
make, and says `{"pushed": count}`; whoever receives says `{"got": number, "whole": bool, "from": peer id, "via": path, "lanes":
count, "now": CLOCK_MONOTONIC}` of each.  It ends with its stdin.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

import trio

from wire.address import Address
from wire.errors import WireError
from wire.identity import Identity, PeerId
from wire.limits import DEFAULT_LIMITS
from wire.net import ByteStream, Kind, MessageStream, Net, Peer, PeerConnected, PeerLost, SeedList, SeedStateChanged, open_net
from wire.net.netevents import AccessChanged, PathChanged, Punched, ReachChanged, RecordLearned
from wire.net.relay import RelayOffer
from wire.tensor import DType, Expectation

RUN = bytes(range(32))
ECHO = "tests/echo/1"
PIECE = 64 * 1024
TENSORS = "tests/tensors/1"
UNDER_WAY = 3


BEGAN = time.monotonic()


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


async def echo(peer: Peer, stream: ByteStream | MessageStream) -> None:
    assert isinstance(stream, ByteStream)
    try:
        while data := await stream.receive_some():
            await stream.send_all(data)
    except WireError as error:
        say(broken=error.code.name, why=str(error))
        raise


async def tell(net: Net) -> None:
    async for event in net.events():
        if isinstance(event, PeerConnected):
            say(connected=str(event.peer.peer_id), over=str(event.peer.path))
        elif isinstance(event, PeerLost):
            say(lost=event.reason.code.name, why=str(event.reason))
        elif isinstance(event, SeedStateChanged):
            say(seed=event.entry, state=event.state, reason=str(event.reason))
        elif isinstance(event, ReachChanged):
            say(reach=str(event.finding.state), reason=event.finding.reason)
        elif isinstance(event, AccessChanged):
            say(access=event.verdict, reason=event.reason, at=time.monotonic() - BEGAN)
        elif isinstance(event, PathChanged):
            say(path=str(event.path), peer=str(event.peer_id), at=time.monotonic() - BEGAN)
        elif isinstance(event, Punched) and event.why:
            say(punch_failed=event.why, peer=str(event.peer_id))
        elif isinstance(event, RecordLearned):
            say(knows=str(event.record.peer_id))


async def connect(net: Net, peer_id: PeerId) -> None:
    """Its record may not have come yet, or still be one without circuits."""
    while True:
        try:
            peer = await net.connect(peer_id, deadline_s=10.0)
        except WireError as error:
            say(not_yet=str(error))
            await trio.sleep(0.5)
        else:
            say(path=str(peer.path), peer=str(peer_id), at=time.monotonic() - BEGAN)
            return


async def send(net: Net, count: int, to: str | None) -> None:
    peer = net.peers()[0] if to is None else net.peer(PeerId.parse(to))
    assert peer is not None
    data, back, began = os.urandom(count), hashlib.sha256(), time.monotonic()

    async def give(stream: ByteStream) -> None:
        with suppress(WireError):  # whoever receives says so
            await stream.send_all(data)

    try:
        async with await peer.open(ECHO, Kind.BYTE, 2) as stream, trio.open_nursery() as nursery:
            assert isinstance(stream, ByteStream)
            nursery.start_soon(give, stream)
            got = 0
            while got < count:
                piece = await stream.receive_some()
                assert piece, "the echo ended"
                back.update(piece)
                got += len(piece)
    except* WireError as group:
        error = group.exceptions[0]
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        assert isinstance(error, WireError)
        say(broken=error.code.name, why=str(error))
    else:
        say(echoed=back.digest() == hashlib.sha256(data).digest(), seconds=time.monotonic() - began)


def tensor(number: int, size: int) -> bytes:
    return random.Random(number).randbytes(size)


async def take(peer: Peer, name: bytes) -> None:
    """Receive one channel until it ends.  A key that came twice would be said twice."""
    size = int(name)
    receiver = peer.receiver(TENSORS, name, lambda key: Expectation(DType.uint8, (size,), 0, size))
    for _ in range(UNDER_WAY):
        receiver.post(memoryview(bytearray(size)))
    while True:
        received = await receiver.receive()
        number = received.key[1]
        assert isinstance(number, int)
        whole = received.buffer == await trio.to_thread.run_sync(tensor, number, size)
        receiver.post(received.buffer)
        lanes = 0 if peer.lanes is None else len(peer.lanes.links)
        say(got=number, whole=whole, via=str(peer.path), lanes=lanes, now=time.monotonic(), **{"from": str(peer.peer_id)})


async def push(net: Net, count: int, size: int, to: str) -> None:
    peer, numbers = net.peer(PeerId.parse(to)), iter(range(count))
    assert peer is not None
    sender = peer.sender(TENSORS, b"%d" % size)

    async def some() -> None:
        for number in numbers:
            data = memoryview(await trio.to_thread.run_sync(tensor, number, size))
            await sender.send((0, number), data, dtype=DType.uint8, shape=(size,), order=number)

    async with trio.open_nursery() as nursery:
        for _ in range(UNDER_WAY):
            nursery.start_soon(some)
    say(pushed=count)


async def obey(net: Net) -> None:
    while line := await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
        request = json.loads(line)
        if "dial" in request:
            await net.dial(Address.parse(request["dial"]), deadline_s=20.0)
        if "send" in request:
            await send(net, request["send"], request.get("to"))
        if "push" in request:
            await push(net, request["push"], request["size"], request["to"])
        if "connect" in request:
            await connect(net, PeerId.parse(request["connect"]))


async def main(arguments: list[str]) -> None:
    listen, seeds, relay, limits = [], [], RelayOffer(), DEFAULT_LIMITS
    while arguments:
        what, value = arguments.pop(0), arguments.pop(0)
        if what == "listen":
            listen.append(Address(value, int(arguments.pop(0))))
        elif what == "relay":
            relay = RelayOffer(signal=False) if value == "off" else RelayOffer(bulk_rate=int(value))
        elif what == "signal":
            limits = replace(limits, relay_signal_bytes=int(value))
        elif what == "again":
            limits = replace(limits, reach_again_s=float(value))
        else:
            seeds.append(value)
    found = SeedList.of(*seeds) if seeds else None
    async with (
        open_net(Identity.generate(), run=RUN, listen=listen, seeds=found, relay=relay, limits=limits) as net,
        trio.open_nursery() as nursery,
    ):
        net.serve(ECHO, echo)
        net.serve_channel(TENSORS, take)
        nursery.start_soon(tell, net)
        say(ready=str(net.addresses[0].with_peer(net.peer_id)) if listen else "", peer=str(net.peer_id))
        await obey(net)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main, sys.argv[1:])
