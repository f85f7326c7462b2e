"""Programs that drive one half of a tensor channel: operands, limits, keys.  The halves: receiving.py, sending.py.

The input is a program, an op code and a few operands at a time.  What a peer may say is said as it likes: any message with any
slot, and raw bytes in their place.  What our own code says (post, begin, lanes, attach) keeps the contract of the automaton, so a
LocalProtocolError is a finding; RemoteProtocolError is the only refusal, ends everything, and must leave nothing behind.
"""

from __future__ import annotations

from dataclasses import replace

from wire.limits import DEFAULT_LIMITS
from wire.messages import Key

CHUNK = 8
LIMITS = replace(DEFAULT_LIMITS, chunk_bytes=CHUNK, tensor_max_bytes=8 * CHUNK, slots_open_max=4)
SIZES = (5, CHUNK, 13, 2 * CHUNK, 40, 8 * CHUNK, 0, 1)
OPS_MOST = 512
LANES = 4
KEYS: tuple[Key, ...] = tuple((0, step, number) for step in range(1, 5) for number in range(3))
# What one call may leave to be said: every repeated Done, then two words a slot (what it holds, and a refusal), then Posted.
SAID_MOST = 64 + 2 * LIMITS.slots_open_max + 1


class Program:
    """Operands of a program, one after another; zeros behind its end."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def take(self, count: int) -> bytes:
        taken = self._data[self._at : self._at + count]
        self._at += count
        return taken

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def number(self) -> int:
        """Small ones mostly; from 250 up those at the edge of a u32."""
        value = self.byte()
        return value if value < 250 else 2**32 - (256 - value)
