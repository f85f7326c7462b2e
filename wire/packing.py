"""Chunks of a sending channel on their way into its lanes: packed, or as they are, and how many bytes that saved.

Packing happens when a lane pulls, not before: only then is it known which chunk goes, on a line of which speed, and what was packed
for nothing would have cost the training its cores.  It takes 0.4 ms a chunk, in the task that seals: a tenth of what such a chunk
takes on the fastest line on which anything is packed at all, so other tasks wait no longer for it than for the sealing of a pull.

A packed chunk lies in memory of its lane, since the lanes of a channel send chunks at the same time, each at its own pace, while one
packer serves all.  The caller's buffer stays the channel's until SendEnded all the same: a chunk that is sent again is packed again.

Only what is bf16 throughout is packed (compression.py says why), which the header tells: bf16 elements as they are, or the numeric
codec that makes bf16 of fp32.  What a boundary appends to its activation, ids of tokens, is packed along with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from .chunks import PACKED_CHUNK, OutChunk
from .compression import Compression
from .limits import DEFAULT_LIMITS, Limits
from .messages import Begin
from .tensor import BF16, PLAIN, DType
from .transfers import LaneSource


@dataclass(frozen=True, slots=True)
class PackingStats:
    """Of the chunks that were handed to lanes, those sent again included."""

    raw_bytes: int  # of tensors
    wire_bytes: int  # what they were on the wire, without headers and tags
    packed_chunks: int
    on: bool  # chunks of bf16 are packed now


class Packing:
    """Of one sending channel; for one thread.  `clock`: seconds, to time the packer."""

    __slots__ = ("_compression", "_limits", "_packed_chunks", "_rate", "_raw_bytes", "_wire_bytes")

    def __init__(self, clock: Callable[[], float], limits: Limits = DEFAULT_LIMITS) -> None:
        self._compression = Compression(limits, clock)
        self._limits = limits
        self._rate = 0.0
        self._raw_bytes = self._wire_bytes = self._packed_chunks = 0

    def stats(self) -> PackingStats:
        """What came of it so far."""
        return PackingStats(self._raw_bytes, self._wire_bytes, self._packed_chunks, self._compression.on)

    def meets(self, features: tuple[str, ...]) -> None:
        """`features`: of the HELLO of the receiver on the connection that carries the channel from now on."""
        self._compression.meets(features)

    def rate(self, bytes_per_s: float) -> None:
        """What the lanes together carried at their last measurements; the same number again is no new measurement."""
        if bytes_per_s != self._rate:
            self._rate = bytes_per_s
            self._compression.rate(bytes_per_s)

    def begins(self, begin: Begin) -> None:
        """Another tensor."""
        if _is_bf16(begin):
            self._compression.tensor_begins()

    def pack(self, begin: Begin, chunk: OutChunk, lane: LaneSource) -> OutChunk:
        """The plain chunk as it is, or packed: in memory of its lane, until that has its next one."""
        packed = None
        if _is_bf16(begin):
            if lane.scratch is None and self._compression.wanted:
                lane.scratch = memoryview(bytearray(self._limits.chunk_bytes))
            packed = self._compression.pack(chunk.data, lane.scratch)
        self._raw_bytes += len(chunk.data)
        if packed is not None:
            self._packed_chunks += 1
            chunk = replace(chunk, data=packed, flags=PACKED_CHUNK)
        self._wire_bytes += len(chunk.data)
        return chunk


def _is_bf16(begin: Begin) -> bool:
    return begin.codec == BF16 or (begin.codec == PLAIN and begin.dtype == DType.bf16)
