"""What crosses a boundary, as bytes: the dense codec.

Forward: the activation (batch, sequence, width) in the boundary's dtype, then the token ids (batch, sequence + 1) that later
stages need as inputs of their codec and as targets of the loss.  They travel once, with the activation, so no machine in the
middle has to hand them out.  Backward: the gradient of the activation, same shape, same dtype.  Little-endian, no padding.

Both directions have exactly one size, known from the run; a payload of another size is refused before it is read.  Ids of a peer
are checked against the vocabulary when that is known: one id too large makes an embedding or a loss fail, on CUDA with an error
that poisons the whole context.

Ids are written as uint16 (vocabularies up to 65,536) or uint32.  Torch computes little with unsigned types, so the signed type of
the same width is used as a view and the sign is masked off.

Functions here run on the device thread.  ``pack_*`` give flat uint8 tensors on the tensor's own device, in wire order, so that
the device layer can copy them to the host chunk by chunk; ``write_*`` put them into a host view at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from wire.tensor import PLAIN, DType, Expectation

from .errors import BadPayload, StageError

# The dtypes an activation may have on the wire, as torch names them.
TORCH_DTYPE: dict[DType, torch.dtype] = {
    DType.bf16: torch.bfloat16,
    DType.fp16: torch.float16,
    DType.fp32: torch.float32,
    DType.fp64: torch.float64,
}
_ID_VIEW: dict[DType, tuple[torch.dtype, int]] = {DType.uint16: (torch.int16, 0xFFFF), DType.uint32: (torch.int32, 0xFFFFFFFF)}


class Direction(IntEnum):
    """Which way a payload goes: an activation downstream or a gradient upstream."""

    FORWARD = 0
    BACKWARD = 1


def id_dtype_for(vocab: int) -> DType:
    """The narrower id type that holds every id of a vocabulary of ``vocab`` tokens."""
    return DType.uint16 if vocab <= 1 << 16 else DType.uint32


def host_bytes(view: memoryview | bytes | bytearray) -> Tensor:
    """A flat uint8 tensor over host memory, without a copy (a read-only buffer is copied: torch has no read-only tensors)."""
    flat = memoryview(view).cast("B")
    return torch.frombuffer(bytearray(flat) if flat.readonly else flat, dtype=torch.uint8)


def flat_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor in row order as a flat uint8 tensor; a view if the tensor is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class DenseBoundary:
    """Sizes of one boundary.  ``vocab`` = 0 leaves ids unchecked.

    Shapes: activation and gradient (batch, seq_len, dim) in ``dtype``; ids (batch, seq_len + 1) in ``id_dtype``, int64 in torch.
    """

    batch: int
    seq_len: int
    dim: int
    dtype: DType
    id_dtype: DType
    vocab: int = 0

    def __post_init__(self) -> None:
        if min(self.batch, self.seq_len, self.dim) < 1:
            raise StageError(f"a boundary has at least one of everything, not {(self.batch, self.seq_len, self.dim)}")
        if self.dtype not in TORCH_DTYPE or self.id_dtype not in _ID_VIEW:
            raise StageError(f"a dense boundary carries floats and uint16 or uint32 ids, not {self.dtype!r}, {self.id_dtype!r}")
        if self.vocab > _ID_VIEW[self.id_dtype][1] + 1:
            raise StageError(f"{self.id_dtype.name} cannot hold the ids of a vocabulary of {self.vocab}")

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.batch, self.seq_len, self.dim)

    @property
    def id_shape(self) -> tuple[int, int]:
        return (self.batch, self.seq_len + 1)

    @property
    def id_bytes(self) -> int:
        return self.batch * (self.seq_len + 1) * self.id_dtype.itemsize

    @property
    def backward_bytes(self) -> int:
        """Bytes of a gradient payload."""
        return self.batch * self.seq_len * self.dim * self.dtype.itemsize

    @property
    def forward_bytes(self) -> int:
        """Bytes of an activation payload, ids included."""
        return self.backward_bytes + self.id_bytes

    def expectation(self, direction: Direction | int) -> Expectation:
        """What a receiver holds against the header of a payload in this direction."""
        raw_len = self.forward_bytes if direction == Direction.FORWARD else self.backward_bytes
        return Expectation(self.dtype, self.shape, PLAIN, raw_len)

    def pack_forward(self, x_BLD: Tensor, ids_BL1: Tensor) -> tuple[Tensor, Tensor]:
        """Activation and ids as flat uint8 tensors in wire order, on their own devices."""
        self._check("activation", tuple(x_BLD.shape), self.shape)
        self._check("ids", tuple(ids_BL1.shape), self.id_shape)
        narrow = _ID_VIEW[self.id_dtype][0]
        # int64 -> the low bytes: a view, since casting a value out of range is not defined.
        low = ids_BL1.contiguous().view(narrow).view(*self.id_shape, -1)[..., 0]
        return flat_bytes(x_BLD.detach().to(TORCH_DTYPE[self.dtype])), flat_bytes(low)

    def pack_backward(self, grad_BLD: Tensor) -> tuple[Tensor]:
        """The gradient as a flat uint8 tensor, on its own device."""
        self._check("gradient", tuple(grad_BLD.shape), self.shape)
        return (flat_bytes(grad_BLD.detach().to(TORCH_DTYPE[self.dtype])),)

    def unpack_forward(self, raw: Tensor) -> tuple[Tensor, Tensor]:
        """(activation in the boundary's dtype, a view of ``raw``; ids int64, a copy) of a flat uint8 tensor on any device."""
        return self.unpack_activation(raw), self.unpack_ids(raw)

    def unpack_activation(self, raw: Tensor) -> Tensor:
        """Only the activation of a flat uint8 payload: a view of it in the boundary's dtype.  Raises BadPayload."""
        self._check_size(raw.numel(), self.forward_bytes, "an activation")
        return raw[: self.backward_bytes].view(TORCH_DTYPE[self.dtype]).view(self.shape)

    def unpack_ids(self, raw: Tensor) -> Tensor:
        """Only the ids (int64, checked if they lie on the host) of a flat uint8 activation payload.  Raises BadPayload."""
        self._check_size(raw.numel(), self.forward_bytes, "an activation")
        narrow, mask = _ID_VIEW[self.id_dtype]
        # Cloned: behind an odd number of bf16 elements the ids are not aligned to their own width.
        ids_BL1 = (raw[self.backward_bytes :].clone().view(narrow).to(torch.int64) & mask).view(self.id_shape)
        if self.vocab and ids_BL1.device.type == "cpu":
            largest = int(ids_BL1.max())
            if largest >= self.vocab:
                raise BadPayload(f"a payload holds token id {largest}; the vocabulary has {self.vocab}")
        return ids_BL1

    def unpack_backward(self, raw: Tensor) -> Tensor:
        """The gradient in the boundary's dtype, a view of a flat uint8 tensor on any device."""
        self._check_size(raw.numel(), self.backward_bytes, "a gradient")
        return raw.view(TORCH_DTYPE[self.dtype]).view(self.shape)

    def read_forward(self, view: memoryview) -> tuple[Tensor, Tensor]:
        """(activation, a view of the buffer; ids int64, a copy) from host memory.  Raises BadPayload."""
        return self.unpack_forward(host_bytes(view))

    def write_forward(self, x_BLD: Tensor, ids_BL1: Tensor, view: memoryview) -> None:
        """Write an activation payload into host memory of exactly ``forward_bytes``."""
        self._write(self.pack_forward(x_BLD, ids_BL1), view, self.forward_bytes)

    def read_backward(self, view: memoryview) -> Tensor:
        """The gradient, a view of the buffer.  Raises BadPayload."""
        return self.unpack_backward(host_bytes(view))

    def write_backward(self, grad_BLD: Tensor, view: memoryview) -> None:
        """Write a gradient payload into host memory of exactly ``backward_bytes``."""
        self._write(self.pack_backward(grad_BLD), view, self.backward_bytes)

    @staticmethod
    def _write(parts: tuple[Tensor, ...], view: memoryview, size: int) -> None:
        if view.nbytes != size:
            raise StageError(f"the payload has {size} bytes, the buffer {view.nbytes}")
        out = host_bytes(view)
        at = 0
        for part in parts:
            out[at : at + part.numel()].copy_(part)
            at += part.numel()

    @staticmethod
    def _check(what: str, got: tuple[int, ...], expected: tuple[int, ...]) -> None:
        if got != expected:
            raise StageError(f"the {what} has shape {got}, the boundary {expected}")

    @staticmethod
    def _check_size(got: int, expected: int, what: str) -> None:
        if got != expected:
            raise BadPayload(f"{what} of this boundary has {expected} bytes, not {got}")
