"""Tickets: how a bulk connection proves which control connection it belongs to.

Proving the identity again is not enough.  Another process with a stolen or copied key, or an older process of the same node, could
add itself as a lane of a conversation that it never had, and receive or send tensors in it.  A ticket is a MAC over the
lane's number under a secret that only the two ends of one control connection know (the exporter of its handshake), so it is worth
nothing anywhere else, and nothing a second time:

    ticket = HMAC-SHA256(export("lane"), u8 lane || u32 attempt)[:16]

`attempt` only rises within a control connection and is the number by which both ends name the lane afterwards.  The responder
is told neither of the two: it tries the few that may come next, which costs 64 MACs of 1 us at most and says nothing in clear.

Source: the project's wire specification, section "Link, lanes, sockets, transports".
"""

from __future__ import annotations

import hmac
import struct

from wire.handshake import TICKET_BYTES
from wire.limits import Limits

_BODY = struct.Struct(">BI")
# Attempts that may be lost between two that arrive; a dialler makes three and then pauses a minute, and each costs a MAC a lane.
ATTEMPTS_AHEAD = 16


class Tickets:
    """Of one control connection.  `key`: `Secrets.export(b"lane")`."""

    __slots__ = ("_key", "_lanes_max", "_next")

    def __init__(self, key: bytes, limits: Limits) -> None:
        self._key = key
        self._lanes_max = limits.lanes_max
        self._next = 1

    def issue(self, lane: int) -> tuple[int, bytes]:
        """The number of the next attempt and its ticket, for the dialling side; `lane` 1..4."""
        attempt = self._next
        self._next += 1
        return attempt, self._ticket(lane, attempt)

    def redeem(self, ticket: bytes) -> tuple[int, int] | None:
        """(lane, attempt) of a ticket that came, once; None if it is none of ours, for the accepting side."""
        for attempt in range(self._next, self._next + ATTEMPTS_AHEAD):
            for lane in range(1, self._lanes_max + 1):
                if hmac.compare_digest(ticket, self._ticket(lane, attempt)):
                    self._next = attempt + 1
                    return lane, attempt
        return None

    def _ticket(self, lane: int, attempt: int) -> bytes:
        return hmac.digest(self._key, _BODY.pack(lane, attempt), "sha256")[:TICKET_BYTES]
