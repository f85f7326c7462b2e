"""What this node offers: protocol names and who answers them.

A table for the whole node, asked in two places: the session asks `refusal` when a peer opens a stream, before anything is
kept for it, and the peer's task asks for the handler afterwards.  Guests, who know no run yet, may use only what was offered to
guests; the refusal tells them so (NOT_MEMBER) instead of pretending that the protocol is unknown.

A tensor protocol carries channels instead of conversations.  Its table of delivered keys is node-wide, because a
microbatch that was routed anew may come from another peer (`wire/delivered.py`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from wire.delivered import DeliveredKeys
from wire.errors import Code, LocalProtocolError
from wire.messages import LaneAsk, decode, encode
from wire.net.bytestream import ByteStream
from wire.net.stream import MessageStream

if TYPE_CHECKING:
    from wire.net.peer import Peer

Request = TypeVar("Request")

Handler = Callable[["Peer", MessageStream | ByteStream], Awaitable[None]]
ChannelHandler = Callable[["Peer", bytes], Awaitable[None]]


LANES = "lane/1"  # one LaneAsk and no answer; every node offers it
EXCHANGE = "px/1"  # see exchange.py


def housekeeping(protocol: str) -> bool:
    """Whether every two nodes that meet speak it, so that it says nothing about their need of each other."""
    return protocol in (LANES, EXCHANGE)



@dataclass(frozen=True, slots=True)
class Service:
    """A protocol of conversations.  The stream is closed when `handler` returns, reset with the code of a WireError it raises."""

    handler: Handler
    guest: bool = False


@dataclass(frozen=True, slots=True)
class TensorService:
    """A protocol of tensor channels.  `handler` hears of channels that nobody has made a receiver for."""

    delivered: DeliveredKeys
    handler: ChannelHandler | None = None
    guest: bool = False


class Services:
    """The table.  Registering a name twice is a mistake of ours."""

    def __init__(self) -> None:
        self._table: dict[str, Service | TensorService] = {LANES: Service(_hear_lanes)}

    def add(self, protocol: str, service: Service | TensorService) -> None:
        if protocol in self._table:
            raise LocalProtocolError(f"protocol {protocol} is served already")
        self._table[protocol] = service

    def tensors(self, protocol: str) -> TensorService:
        """The tensor protocol of that name; declared now if it is not known, with the step as second field of its keys."""
        service = self._table.get(protocol)
        if service is None:
            service = self._table[protocol] = TensorService(DeliveredKeys())
        if not isinstance(service, TensorService):
            raise LocalProtocolError(f"{protocol} is served, but not as a tensor protocol")
        return service

    def find(self, protocol: str) -> Service | TensorService | None:
        return self._table.get(protocol)

    def refusal(self, protocol: str, guest: bool) -> Code | None:
        """None: accept; else why not."""
        service = self._table.get(protocol)
        if service is None:
            return Code.PROTOCOL_UNKNOWN
        if guest and not service.guest:
            return Code.NOT_MEMBER
        return None


async def _hear_lanes(peer: Peer, stream: MessageStream | ByteStream) -> None:
    if isinstance(stream, MessageStream):
        peer.asked_for_lanes(decode(await stream.receive(), LaneAsk).count)


def calls(request_class: type[Request], answer: Callable[[Peer, Request], Awaitable[object]]) -> Handler:
    """A handler of one request and one reply a stream, out of a function from request to reply message."""

    async def handle(peer: Peer, stream: MessageStream | ByteStream) -> None:
        if not isinstance(stream, MessageStream):
            stream.reset(Code.PROTOCOL, "this protocol is made of messages")
            return
        request = decode(await stream.receive(), request_class)
        await stream.send(encode(await answer(peer, request)), fin=True)

    return handle
