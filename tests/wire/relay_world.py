"""The relay's table with a clock, for its tests: a call that is as it should be, unless a test says otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from wire.identity import Identity, PeerId
from wire.limits import DEFAULT_LIMITS
from wire.relaymessages import RelayClass
from wire.relayrefusals import Refusal, Why
from wire.reservations import Circuit, Granted, RelayTable

PEERS = [Identity(n.to_bytes(32, "big")).peer_id for n in range(1, 160)]
A, B, C, D = PEERS[:4]
SIGNAL, BULK = RelayClass.SIGNAL, RelayClass.BULK
RATE = 8 << 20
KIB, MIB = 1 << 10, 1 << 20
T0 = 500.0


class World:
    """A table and a clock; each peer is at a host of its own network unless said otherwise."""

    def __init__(self, bulk_rate: float = RATE, **limits: Any) -> None:
        self.table = RelayTable(bulk_rate, replace(DEFAULT_LIMITS, **limits))
        self.now = T0

    def reserve(self, peer: PeerId, cls: int = BULK, **changes: Any) -> Granted | Refusal:
        number = PEERS.index(peer)
        arguments: dict[str, Any] = {
            "host": f"8.1.{number}.1", "member": True, "over_circuit": False, "connection": "first", "now": self.now, **changes,
        }  # fmt: skip
        return self.table.reserve(peer, cls, **arguments)

    def connect(self, source: PeerId = A, target: PeerId = B, cls: int = SIGNAL, purpose: int = 0, **changes: Any) -> Circuit | Refusal:
        arguments: dict[str, Any] = {
            "voucher_checked": True, "over_circuit": False, "members": (True, True), "now": self.now, **changes,
        }  # fmt: skip
        return self.table.connect(source, target, cls, purpose, **arguments)

    def granted(self, peer: PeerId, cls: int = BULK, **changes: Any) -> Granted:
        got = self.reserve(peer, cls, **changes)
        assert isinstance(got, Granted), got
        return got

    def connected(self, *arguments: Any, **changes: Any) -> Circuit:
        got = self.connect(*arguments, **changes)
        assert isinstance(got, Circuit), got
        return got

    def refused(self, got: object, why: Why) -> Refusal:
        assert isinstance(got, Refusal) and got.why is why, got
        return got

    @property
    def empty(self) -> bool:
        return not any(self.table.gauges().values())
