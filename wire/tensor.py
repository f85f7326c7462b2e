"""What a tensor on the wire is: element types, the expectation a receiver holds against a header, and the numeric codecs.

A header (``Begin``) is a claim by a peer.  It never allocates anything and never chooses a shape: the receiver knows from the run
what must come under a key and compares field by field (``Expectation``).  Only equality passes, so no arithmetic is ever done on
numbers of the peer and nothing can overflow.  ``raw_len`` is part of the expectation and not computed from the shape, because a
codec may append something (a boundary appends the token ids to its activation).

Bytes are little-endian whatever the machine; bf16, which numpy does not know, travels as uint16.  Views, not copies: ``to_bytes``
and ``from_bytes`` reinterpret memory, a tensor is copied by nobody between the device's buffer and the record it is sealed into.

Numeric codecs change values, so they are a decision of the training run (its manifest), never of a link.  They are pure functions
of arrays, and their size on the wire follows exactly from the shape:

* plain: the elements.
* bf16: fp32 rounded to nearest, ties to even; 2 bytes an element, relative error <= 2**-8.
* int8 blocks: one fp32 scale a block and one int8 an element, ``x ~ scale * q``, ``scale = max|x| / 127``: error <= scale / 2.
  Blocks lie within a row (the last axis), so that the rows of a microbatch, which may come from different texts, do not share
  a scale.  A smaller block costs 4 / block bytes an element and saves error where rows have outliers; 64 costs 6 %.

A block with an infinity or NaN gets the scale NaN and decodes to NaN throughout: quantising must not turn a diverged gradient
into a finite one.  A receiver reads scales of a peer as any other numbers: finite or not is for the training loop to judge.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .errors import LocalProtocolError

Array = NDArray[Any]
Buffer = bytes | bytearray | memoryview

# A shape of more axes has no use here (batch, sequence, heads, width are four), and the message layer needs some bound.
DIMENSIONS_MAX = 8
AXIS_MAX = 2**32 - 1


class DType(IntEnum):
    """Element type; the value is its number on the wire and is never given to another type."""

    bf16 = 1
    fp16 = 2
    fp32 = 3
    fp64 = 4
    int8 = 5
    uint8 = 6
    int16 = 7
    uint16 = 8
    int32 = 9
    uint32 = 10
    int64 = 11

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.numpy.itemsize

    @property
    def numpy(self) -> np.dtype[Any]:
        """The numpy type that the bytes are viewed as, little-endian; uint16 for bf16."""
        return _NUMPY[self]


_NUMPY: dict[DType, np.dtype[Any]] = {
    DType.bf16: np.dtype("<u2"),
    DType.fp16: np.dtype("<f2"),
    DType.fp32: np.dtype("<f4"),
    DType.fp64: np.dtype("<f8"),
    DType.int8: np.dtype("i1"),
    DType.uint8: np.dtype("u1"),
    DType.int16: np.dtype("<i2"),
    DType.uint16: np.dtype("<u2"),
    DType.int32: np.dtype("<i4"),
    DType.uint32: np.dtype("<u4"),
    DType.int64: np.dtype("<i8"),
}


def check_shape(shape: tuple[int, ...]) -> None:
    """Raise LocalProtocolError for a shape that cannot stand in a header."""
    if len(shape) > DIMENSIONS_MAX or not all(type(axis) is int and 0 <= axis <= AXIS_MAX for axis in shape):
        raise LocalProtocolError(f"a shape has at most {DIMENSIONS_MAX} axes of 0..2**32-1, not {shape!r}")


class Header(Protocol):
    """The fields of a ``Begin`` that an expectation looks at."""

    @property
    def dtype(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def codec(self) -> int: ...
    @property
    def raw_len(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Expectation:
    """What the receiver knows must come under a key.  Checked when made: an impossible one is our own mistake."""

    dtype: DType  # of the tensor before the codec
    shape: tuple[int, ...]
    codec: int  # number of the numeric codec, 0 = plain; others are fixed by the run
    raw_len: int  # bytes on the wire in all, whatever the codec appends included

    def __post_init__(self) -> None:
        check_shape(self.shape)
        if self.raw_len < 0 or self.codec < 0:
            raise LocalProtocolError(f"an expectation cannot have raw_len {self.raw_len} and codec {self.codec}")
        if self.codec == PLAIN and self.raw_len < self.dtype.itemsize * math.prod(self.shape):
            raise LocalProtocolError(f"{self.raw_len} bytes do not hold a plain {self.dtype.name} tensor of shape {self.shape}")

    def difference(self, header: Header) -> str | None:
        """None if the header is the expected one, else what differs, for a log line (our words and numbers only)."""
        for name in ("dtype", "shape", "codec", "raw_len"):
            expected, got = getattr(self, name), getattr(header, name)
            if expected != got:
                return f"{name} is {got!r}, expected {expected!r}"
        return None


def to_bytes(array: Array) -> memoryview:
    """View a C-contiguous array as bytes, without a copy; LocalProtocolError otherwise (a silent copy here would cost a pass)."""
    if not array.flags.c_contiguous or array.dtype.byteorder == ">":
        raise LocalProtocolError("only a contiguous little-endian array can be sent without a copy")
    return array.reshape(-1).view(np.uint8).data


def from_bytes(data: Buffer, dtype: DType, shape: tuple[int, ...]) -> Array:
    """View the front of ``data`` as an array of this type and shape, without a copy; LocalProtocolError if it is too short."""
    check_shape(shape)
    size = dtype.itemsize * math.prod(shape)
    view = memoryview(data).cast("B")
    if len(view) < size:
        raise LocalProtocolError(f"{len(view)} bytes do not hold a {dtype.name} tensor of shape {shape}")
    return np.frombuffer(view, dtype.numpy, math.prod(shape)).reshape(shape)


def bf16_from_fp32(x: Array) -> Array:
    """Round fp32 to bf16 (nearest, ties to even) as uint16 of the same shape; NaN stays NaN, too large becomes infinity."""
    bits = _fp32(x).view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    # Adding the rounding half to a NaN could carry into the sign and make it a number: set its quiet bit instead.
    return np.where(np.isnan(x), ((bits >> 16) | 0x40).astype(np.uint16), rounded)


def fp32_from_bf16(x: Array) -> Array:
    """Widen bf16 (as uint16) to fp32 of the same shape; exact."""
    return (x.astype(np.uint32) << 16).view(np.float32)


PLAIN = 0
BF16 = 1
INT8_BLOCKS = 2

# The largest scale that times 127 is still finite: max / 127 itself rounds up.
_SCALE_MAX = np.nextafter(np.finfo(np.float32).max / np.float32(127), np.float32(0))


class NumericCodec(Protocol):
    """A numeric codec.  ``encode`` and ``decode`` are pure; both raise LocalProtocolError when a size is not the exact one."""

    @property
    def number(self) -> int:
        """Its number in ``Begin.codec``."""

    def wire_size(self, shape: tuple[int, ...]) -> int:
        """Bytes that a tensor of this shape takes, exactly."""

    def encode(self, x: Array, out: memoryview) -> None:
        """Write ``x`` into ``out``, which has ``wire_size(x.shape)`` bytes."""

    def decode(self, data: Buffer, shape: tuple[int, ...]) -> Array:
        """Read a tensor of this shape back.  Plain gives a view of ``data``, the others a new fp32 array."""


@dataclass(frozen=True, slots=True)
class Plain:
    """The elements as they are."""

    dtype: DType
    number: int = PLAIN

    def wire_size(self, shape: tuple[int, ...]) -> int:
        check_shape(shape)
        return self.dtype.itemsize * math.prod(shape)

    def encode(self, x: Array, out: memoryview) -> None:
        if x.dtype != self.dtype.numpy:
            raise LocalProtocolError(f"a plain {self.dtype.name} tensor cannot be written from {x.dtype}")
        _exactly(out, self.wire_size(x.shape))
        from_bytes(out, self.dtype, x.shape)[...] = x

    def decode(self, data: Buffer, shape: tuple[int, ...]) -> Array:
        _exactly(data, self.wire_size(shape))
        return from_bytes(data, self.dtype, shape)


@dataclass(frozen=True, slots=True)
class Bf16:
    """fp32 sent as bf16."""

    number: int = BF16

    def wire_size(self, shape: tuple[int, ...]) -> int:
        check_shape(shape)
        return 2 * math.prod(shape)

    def encode(self, x: Array, out: memoryview) -> None:
        _exactly(out, self.wire_size(x.shape))
        from_bytes(out, DType.bf16, x.shape)[...] = bf16_from_fp32(x)

    def decode(self, data: Buffer, shape: tuple[int, ...]) -> Array:
        _exactly(data, self.wire_size(shape))
        return fp32_from_bf16(from_bytes(data, DType.bf16, shape))


@dataclass(frozen=True, slots=True)
class Int8Blocks:
    """fp32 sent as int8 with one fp32 scale a block of ``block`` elements of a row: all scales, then all elements."""

    block: int = 64
    number: int = INT8_BLOCKS

    def __post_init__(self) -> None:
        if self.block < 1:
            raise LocalProtocolError(f"a block has at least one element, not {self.block}")

    def wire_size(self, shape: tuple[int, ...]) -> int:
        check_shape(shape)
        rows, width = _rows(shape)
        return rows * (4 * math.ceil(width / self.block) + width)

    def encode(self, x: Array, out: memoryview) -> None:
        _exactly(out, self.wire_size(x.shape))
        rows, width = _rows(x.shape)
        scale_out, q_out = self._parts(out, rows, width)
        if rows == 0 or width == 0:
            return
        matrix = _fp32(x).reshape(rows, width)
        scale = np.maximum.reduceat(np.abs(matrix), self._starts(width), axis=1) / np.float32(127)
        # Below the smallest normal number a scale has few bits left and the division would be wrong by more than the error bound.
        scale[scale < np.finfo(np.float32).tiny] = 0
        scale = np.where(np.isfinite(scale), np.minimum(scale, _SCALE_MAX), np.float32(np.nan))
        divisor = self._spread(np.where(scale > 0, scale, np.float32(1)), width)
        quantised = np.where(self._spread(scale > 0, width), np.nan_to_num(matrix, posinf=0, neginf=0) / divisor, np.float32(0))
        scale_out[...] = scale
        q_out[...] = np.clip(np.rint(quantised), -127, 127).astype(np.int8)

    def decode(self, data: Buffer, shape: tuple[int, ...]) -> Array:
        _exactly(data, self.wire_size(shape))
        rows, width = _rows(shape)
        scale, q = self._parts(data, rows, width)
        # A hostile scale of infinity times 0 is NaN and says so in the result; numpy's warning about it would add nothing.
        with np.errstate(invalid="ignore", over="ignore"):
            return (self._spread(scale, width) * q.astype(np.float32)).reshape(shape)

    def _parts(self, data: Buffer, rows: int, width: int) -> tuple[Array, Array]:
        view = memoryview(data).cast("B")
        blocks = math.ceil(width / self.block)
        return from_bytes(view, DType.fp32, (rows, blocks)), from_bytes(view[4 * rows * blocks :], DType.int8, (rows, width))

    def _starts(self, width: int) -> Array:
        return np.arange(0, width, self.block)

    def _spread(self, per_block: Array, width: int) -> Array:
        return np.repeat(per_block, self.block, axis=1)[:, :width]


def _rows(shape: tuple[int, ...]) -> tuple[int, int]:
    """(rows, width) with the last axis as the row; a scalar is one row of one."""
    return (math.prod(shape[:-1]), shape[-1]) if shape else (1, 1)


def _fp32(x: Array) -> Array:
    if x.dtype != np.float32:
        raise LocalProtocolError(f"this codec takes float32, not {x.dtype}")
    return np.asarray(x, order="C")


def _exactly(data: Buffer, size: int) -> None:
    if memoryview(data).nbytes != size:
        raise LocalProtocolError(f"the codec needs exactly {size} bytes, got {memoryview(data).nbytes}")
