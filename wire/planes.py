"""Planes: lossless compression of one chunk of bf16 numbers.

    u32 plane_len || plane (zstd level 1 of the high bytes) || the low bytes as they are          big-endian length

Why it works.  The high byte of a bf16 is its sign and seven of eight exponent bits.  Numbers of one tensor lie within a few powers of
two, so those bytes repeat: 2.6 bits of 8 carry something for Gaussian values.  The low byte is one exponent bit and seven bits of
mantissa, which is noise.  Interleaved, the noise hides the rest from zstd; apart, the high plane shrinks to about 38 % and the whole
chunk by a factor of 1.45.  fp32, fp16 and int8 gain nothing worth the time (at most 1.13) and are never packed.

Cost (256 KiB chunks of Gaussian bf16, one 2.6 GHz core, zstandard 0.25): `pack` 680 MB/s, `unpack` 2,200 MB/s of raw data.  Nearly all
of it is zstd; higher levels cost a multiple and gain 1 %.  Splitting and joining work on 16-bit numbers: numpy narrows and widens
whole vectors (10 to 70 GB/s), where copying every second byte moves 4 to 8.

What goes wrong, and where it ends:
- A bomb.  zstd's one-call decoder believes the content size in the frame and allocates it, whatever else it was told.  The raw size is
  therefore computed from two lengths that are here already, 2 x (len - 4 - plane_len), bounded by the chunk; the frame must state
  exactly half of it, and its window is bounded as well, so no more than that exists at any moment.
- A frame with another behind it, or a dictionary nobody has: refused.
- A chunk that grows.  What does not shrink by 5 % goes plain; one that arrives packed nevertheless is refused, for then a scratch
  buffer of one chunk is always enough for what is packed.

Whether packing pays at all is another question: compression.py.
"""

from __future__ import annotations

import struct

import numpy as np
import zstandard

from wire.errors import LocalProtocolError, RemoteProtocolError
from wire.limits import DEFAULT_LIMITS

HEAD = struct.Struct(">I")
HEAD_BYTES = HEAD.size
FEATURE = "planes/1"  # the word in HELLO.features of who can unpack

# Less than this saves no time that the other side's unpacking would not cost again.  As a fraction of whole numbers: both sides must
# agree to the byte.
SHRINK_NUMERATOR, SHRINK_DENOMINATOR = 19, 20

_U2 = np.dtype("<u2")


def shrinks(packed: int, raw: int) -> bool:
    """Whether `packed` bytes are at least 5 % less than the `raw` ones: else they go plain."""
    return packed * SHRINK_DENOMINATOR <= raw * SHRINK_NUMERATOR


def raw_size(packed: memoryview, most: int = DEFAULT_LIMITS.chunk_bytes) -> int:
    """Bytes that a packed chunk unpacks to, <= `most`.  Looks at nothing but lengths; raises RemoteProtocolError (PROTOCOL)."""
    size = len(packed)
    if size < HEAD_BYTES:
        raise RemoteProtocolError(detail=f"a packed chunk of {size} bytes")
    (plane,) = HEAD.unpack_from(packed)
    raw: int = 2 * (size - HEAD_BYTES - plane)
    if not 0 < raw <= most:
        raise RemoteProtocolError(detail=f"a packed chunk of {size} bytes with a plane of {plane} would have {raw}, at most {most}")
    if not shrinks(size, raw):
        raise RemoteProtocolError(detail=f"{raw} bytes packed into {size}: should have gone plain")
    return raw


class Planes:
    """Packs and unpacks chunks of at most `chunk_bytes`.  Holds its compressor and its scratch: one per thread that uses it.

    The scratch is made by the first `pack`: whoever only unpacks has none.
    """

    __slots__ = ("_compress", "_decompress", "_high", "_most", "_out")

    def __init__(self, chunk_bytes: int = DEFAULT_LIMITS.chunk_bytes) -> None:
        self._most = chunk_bytes
        self._compress = zstandard.ZstdCompressor(level=1, write_checksum=False, write_content_size=True).compress
        # The window of a frame in one piece is its content, and 1 KiB is zstd's least.
        self._decompress = zstandard.ZstdDecompressor(max_window_size=max(1024, chunk_bytes // 2)).decompress
        self._high = np.empty(0, np.uint8)
        self._out = memoryview(b"")

    def pack(self, chunk: memoryview, into: memoryview | None = None) -> memoryview | None:
        """`chunk` (bytes of bf16, little-endian) packed, or None: it does not shrink by 5 %, or has an odd length.

        The result lies at the front of `into` (writable, of at least `len(chunk)` bytes), else in scratch, where the next `pack`
        overwrites it.  More than `chunk_bytes` raise LocalProtocolError.
        """
        size = len(chunk)
        if size > self._most:
            raise LocalProtocolError(f"a chunk of {size} bytes, at most {self._most}")
        if size % 2 or not size:
            return None
        half = size // 2
        numbers = np.frombuffer(chunk, _U2)
        if not len(self._high):
            self._high = np.empty(self._most // 2, np.uint8)
        high = self._high[:half]
        np.right_shift(numbers, 8, out=high, casting="unsafe")
        plane = self._compress(high.data)
        plane_end = HEAD_BYTES + len(plane)
        if not shrinks(plane_end + half, size):
            return None
        if into is None and not self._out:
            self._out = memoryview(bytearray(self._most))
        out = self._out if into is None else into
        HEAD.pack_into(out, 0, len(plane))
        out[HEAD_BYTES:plane_end] = plane
        np.copyto(np.frombuffer(out[plane_end : plane_end + half], np.uint8), numbers, casting="unsafe")
        return out[: plane_end + half]

    def unpack(self, packed: memoryview, into: memoryview) -> None:
        """Write the raw chunk to `into`, which has exactly `raw_size(packed)` bytes and does not overlap `packed`.

        Raises RemoteProtocolError (PROTOCOL): not a packed chunk, or of another size.  `into` is undefined then.
        """
        raw = raw_size(packed, self._most)
        if raw != len(into):
            raise RemoteProtocolError(detail=f"a packed chunk of {raw} bytes where {len(into)} are due")
        half = raw // 2
        plane = packed[HEAD_BYTES : len(packed) - half]
        try:
            if zstandard.frame_content_size(plane) != half:
                raise RemoteProtocolError(detail=f"the plane does not state its {half} bytes")
            high = self._decompress(plane, max_output_size=half, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise RemoteProtocolError(detail=f"the plane is damaged: {error}") from None
        if len(high) != half:
            raise RemoteProtocolError(detail=f"a plane of {len(high)} bytes, not {half}")
        numbers = np.frombuffer(into, _U2)
        np.copyto(numbers, np.frombuffer(high, np.uint8))
        np.left_shift(numbers, 8, out=numbers)
        np.bitwise_or(numbers, np.frombuffer(packed[len(packed) - half :], np.uint8), out=numbers)
