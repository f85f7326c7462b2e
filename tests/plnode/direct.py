"""Nodes that call each other's handlers directly: what `Net` and `Peer` offer for calls, without a wire."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import trio

from wire.errors import Code, error_for
from wire.identity import Identity, PeerId


class DirectPeer:
    def __init__(self, caller: DirectNet, target: DirectNet) -> None:
        self._caller, self._target = caller, target
        self.peer_id = target.peer_id
        self.guest = False

    async def call(self, protocol: str, request: object, reply_class: type, *, deadline_s: float) -> Any:
        await trio.lowlevel.checkpoint()
        if self._target.silent:
            await trio.sleep(deadline_s)
            raise error_for(Code.TIMEOUT, detail=f"{protocol}: no answer")
        reply = await self._target.handlers[protocol](DirectPeer(self._target, self._caller), request)
        assert isinstance(reply, reply_class)
        return reply


class DirectNet:
    """One node of a `world` (peer id -> net).  `silent`: it takes calls and never answers."""

    def __init__(self, identity: Identity, world: dict[PeerId, DirectNet]) -> None:
        self.identity = identity
        self.peer_id = identity.peer_id
        self.handlers: dict[str, Callable[[Any, Any], Awaitable[object]]] = {}
        self.silent = False
        self._world = world
        world[self.peer_id] = self

    def serve_calls(self, protocol: str, request_class: type, answer: Callable[[Any, Any], Awaitable[object]]) -> None:
        self.handlers[protocol] = answer

    def peer(self, peer_id: PeerId) -> DirectPeer | None:
        return DirectPeer(self, self._world[peer_id]) if peer_id in self._world and peer_id != self.peer_id else None

    def peers(self) -> tuple[DirectPeer, ...]:
        return tuple(DirectPeer(self, net) for peer_id, net in self._world.items() if peer_id != self.peer_id)

    def known(self) -> tuple[object, ...]:
        return ()

    async def connect(self, peer_id: PeerId, *, deadline_s: float) -> DirectPeer:
        raise error_for(Code.REFUSED, detail="not in this world")
