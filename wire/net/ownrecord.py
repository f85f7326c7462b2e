"""The node's own signed record: where it may be dialled, renewed before it runs out.

What is advertised depends on the scope (`Advertised` refuses the rest): in `host` scope loopback addresses, in `lan` private
ones, in `internet` only public ones and those that the operator listed.  A wildcard listener stands for the addresses of the
interfaces that are up.  The record is renewed at half its life +- 10 %, so that a peer may miss one renewal (FIND-15).
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path

from wire.address import Address, AddressClass, Advertised, Scope
from wire.envelope import NO_RUN, SequenceClock, seal_peer_record
from wire.identity import Identity
from wire.limits import RENEW_JITTER, Limits
from wire.messages import PeerRecord
from wire.net.transport import literal


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

    def seal(self, bound: Sequence[Address], interfaces: Sequence[str]) -> None:
        """Sign a new record for these listeners on a machine with these interface addresses.

        Raises ValueError for an announced address that must not be told in this scope.
        """
        now_unix = time.time()
        record = PeerRecord(tuple(self.advertised(bound, interfaces)), capabilities=self._capabilities)
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

    def advertised(self, bound: Sequence[Address], interfaces: Sequence[str]) -> list[str]:
        """Addresses that may be told to others, in canonical text: announced ones first."""
        found = dict.fromkeys(str(Advertised(address.with_peer(None), self._scope)) for address in self._announce)
        for listener in bound:
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
