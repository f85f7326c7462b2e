"""The node's own signed record: where it may be dialled, renewed before it runs out.

What is advertised depends on the scope (`Advertised` refuses the rest): in `host` scope loopback addresses, in `lan` private
ones, in `internet` those that the operator listed and those that others have reached (`Standing.reachable`): a node behind a router
or a firewall would else send its callers to a closed door.  Circuits through relays stand behind them, with the relays' vouchers.
A wildcard listener stands for the addresses of the interfaces that are up.  The record is renewed at half its life +- 10 %, so that a
peer may miss one renewal (FIND-15).
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from wire.address import Address, AddressClass, Advertised, Scope
from wire.envelope import NO_RUN, SequenceClock, seal_peer_record
from wire.identity import Identity
from wire.limits import RENEW_JITTER, Limits
from wire.messages import PeerRecord
from wire.net.transport import literal


@dataclass(frozen=True, slots=True)
class Standing:
    """What a node has found out about itself, and offers."""

    reach: str = "unknown"  # see `PeerRecord.reach`
    reachable: tuple[Address, ...] = ()  # outside addresses that others have dialled
    circuits: tuple[Address, ...] = ()
    vouchers: tuple[bytes, ...] = ()
    relay_classes: tuple[str, ...] = ()
    relay_free_bps: int = 0


class OwnRecord:
    """`raw` is the record in force, b"" before the first `seal`; `revision` counts how often it changed."""

    def __init__(
        self,
        identity: Identity,
        *,
        run: bytes | None,
        scope: Scope,
        announce: Sequence[Address],
        capabilities: Sequence[str],
        data_dir: Path | None,
        limits: Limits,
    ) -> None:
        self.raw = b""
        self.revision = 0
        self._identity = identity
        self._run = NO_RUN if run is None else run
        self._scope = scope
        self._announce = tuple(announce)
        self._capabilities = tuple(capabilities)
        self._sequence = SequenceClock(None if data_dir is None else data_dir / "sequence")
        self._limits = limits

    def seal(self, bound: Sequence[Address], interfaces: Sequence[str], standing: Standing) -> None:
        """Sign a new record for these listeners on a machine with these interface addresses.

        Raises ValueError for an announced address that must not be told in this scope.
        """
        now_unix = time.time()
        direct = self.advertised(bound, interfaces, standing.reachable)
        circuits = [str(address) for address in standing.circuits]
        record = PeerRecord(
            tuple(direct[: self._limits.addresses_per_peer_max - len(circuits)] + circuits),
            vouchers=standing.vouchers,
            capabilities=self._capabilities,
            reach=standing.reach,
            relay_classes=standing.relay_classes,
            relay_free_bps=standing.relay_free_bps,
        )
        seq = self._sequence.next(now_unix)
        self.raw = seal_peer_record(self._identity, record, run=self._run, seq=seq, now_unix=now_unix, limits=self._limits)
        self.revision += 1

    def seen(self, seq: int) -> bool:
        """A record of ours with this number is about; True if ours must be signed anew to be the newest.

        Without the sequence file, or with a clock set back, the numbers of an earlier process are higher than ours.
        """
        if seq <= self._sequence.last:
            return False
        self._sequence.at_least(seq)
        return True

    def advertised(self, bound: Sequence[Address], interfaces: Sequence[str], reachable: Sequence[Address] = ()) -> list[str]:
        """Direct addresses that may be told to others, in canonical text: announced ones first."""
        found = dict.fromkeys(str(Advertised(address.with_peer(None), self._scope)) for address in self._announce)
        for address in reachable:
            found.setdefault(str(Advertised(address.with_peer(None), self._scope)))
        for listener in bound if self._scope is not Scope.INTERNET else ():
            if listener.scope_class is AddressClass.UNSPECIFIED:
                hosts = [host for host in interfaces if (":" in host) == (":" in listener.host)]
            else:
                hosts = [listener.host]
            for host in hosts:
                try:
                    found.setdefault(str(Advertised(literal(host, listener.port), self._scope)))
                except ValueError:
                    continue  # not told to others in this scope
        return list(found)[: self._limits.addresses_per_peer_max]

    def renew_after_s(self, rng: random.Random) -> float:
        return self._limits.peer_record_renew_s * rng.uniform(1 - RENEW_JITTER, 1 + RENEW_JITTER)
