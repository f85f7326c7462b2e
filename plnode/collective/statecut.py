"""A cut: one replica's state at one step boundary, laid out as the bytes that travel.

Theory.  A joiner asks several replicas for the same chunks, so they must mean the same bytes by "chunk 17 of step t" without having
talked to each other.  Hence the layout is a pure function of (run, stage, step, tensors): a safetensors file with a canonical
header, tensors by falling size of their elements (so that each is aligned) and then by name.  Replicas with equal state have equal
roots, whoever signed them, and the file that a joiner has fetched *is* a snapshot, read by a parser that knows no code.

* *Memory.*  A cut holds the host copies that ``StageRunner.snapshot`` made and the header; chunks are views of them, nothing is
  joined together.  The hashes are 32 bytes a chunk.
* *Numbers.*  Offsets are Python integers; a tensor above 2^31 bytes and a state above 2^32 are ordinary (NUM-9).
* *Chunks* are 1 MiB to 4 MiB: a flipped bit or a dead donor costs one, and one takes 0.3 to 1.3 s at 25 Mbit/s, short against a step.

``seal_cut`` hashes everything and blocks: call it in a thread.  Root = SHA-256 over the SHA-256 of each chunk, as for snapshots on disk.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plnode.stage.snapshot_file import SnapshotRoot
from wire.messages import encode

CHUNK_LEAST, CHUNK_MOST = 1 << 20, 4 << 20
HASH_BYTES = 32
Offload = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs what blocks somewhere else: `trio.to_thread.run_sync`."""
# Up to here a chunk of 1 MiB keeps the table of hashes below 64 KiB; above, fewer and larger chunks are cheaper to ask for.
SMALL_BYTES = 2 << 30

_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def chunk_size(size_bytes: int) -> int:
    """The chunk that all replicas choose for a state of ``size_bytes``."""
    return CHUNK_LEAST if size_bytes <= SMALL_BYTES else CHUNK_MOST


def root_of(hashes: bytes) -> bytes:
    """The root of a table of chunk hashes, 32 bytes each."""
    return hashlib.sha256(hashes).digest()


def chunk_count(size_bytes: int, chunk_bytes: int) -> int:
    return -(-size_bytes // chunk_bytes)


def chunk_length(index: int, size_bytes: int, chunk_bytes: int) -> int:
    """Bytes of chunk ``index``: ``chunk_bytes`` but for the last one."""
    return min(chunk_bytes, size_bytes - index * chunk_bytes)


class Chunked:
    """Bytes that lie in several buffers, cut into chunks.  Holds the buffers; copies nothing."""

    def __init__(self, buffers: Sequence[memoryview], chunk_bytes: int) -> None:
        self._buffers = [b.cast("B") for b in buffers if b.nbytes]
        self._starts: list[int] = []
        size = 0
        for buffer in self._buffers:
            self._starts.append(size)
            size += buffer.nbytes
        if size == 0:
            raise ValueError("there is nothing to cut into chunks")
        self.size_bytes, self.chunk_bytes = size, chunk_bytes
        self.count = chunk_count(size, chunk_bytes)
        self.hashes = b""
        self.root = b""

    def chunk(self, index: int) -> list[memoryview]:
        """Views that make up chunk ``index``.  IndexError if there is none."""
        if not 0 <= index < self.count:
            raise IndexError(f"chunk {index} of {self.count}")
        start, found = index * self.chunk_bytes, []
        left = chunk_length(index, self.size_bytes, self.chunk_bytes)
        place = bisect_right(self._starts, start) - 1
        while left:
            offset = start - self._starts[place]
            view = self._buffers[place][offset : offset + left]
            found.append(view)
            start, left, place = start + view.nbytes, left - view.nbytes, place + 1
        return found

    def hash(self) -> None:
        """Fill in ``hashes`` and ``root``.  Blocks for about a second a gigabyte."""
        found = []
        for index in range(self.count):
            digest = hashlib.sha256()
            for view in self.chunk(index):
                digest.update(view)
            found.append(digest.digest())
        self.hashes = b"".join(found)
        self.root = root_of(self.hashes)


@dataclass(frozen=True, slots=True)
class Cut:
    """What a donor serves of one step boundary."""

    statement: SnapshotRoot
    envelope: bytes  # the statement, signed, domain plw/snapshot/1
    data: Chunked


def header_of(tensors: Mapping[str, Tensor], *, run: bytes, stage: int, step: int) -> tuple[bytes, list[str]]:
    """The canonical safetensors header and the order of the tensors behind it."""
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    table: dict[str, object] = {"__metadata__": {"run": run.hex(), "stage": str(stage), "step": str(step)}}
    offset = 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in _NAMES:
            raise ValueError(f"{name}: {tensor.dtype} cannot be sent")
        size = tensor.numel() * tensor.element_size()
        table[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, names


def state_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of the tensors without a header: what a cut takes from the budget."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def views_of(tensors: Mapping[str, Tensor], names: Sequence[str]) -> list[memoryview]:
    """The bytes of contiguous host tensors, without a copy."""
    return [tensors[name].view(-1).view(torch.uint8).numpy().data for name in names if tensors[name].numel()]


def laid_out(tensors: Mapping[str, Tensor], *, run: bytes, stage: int, step: int, chunk_bytes: int | None = None) -> Chunked:
    """A state as the bytes that travel, hashed.  ``tensors``: contiguous, on the host, not changed as long as the result lives."""
    header, names = header_of(tensors, run=run, stage=stage, step=step)
    views = views_of(tensors, names)
    size = len(header) + sum(view.nbytes for view in views)
    data = Chunked([memoryview(header), *views], chunk_bytes or chunk_size(size))
    data.hash()
    return data


def seal_cut(
    tensors: Mapping[str, Tensor],
    seal: Callable[[bytes, int], bytes],
    *,
    run: bytes,
    stage: int,
    step: int,
    generation: int,
    chunk_bytes: int | None = None,
) -> Cut:
    """Hash and sign.  ``tensors`` as for ``laid_out``.  ``seal(payload, step)``."""
    data = laid_out(tensors, run=run, stage=stage, step=step, chunk_bytes=chunk_bytes)
    statement = SnapshotRoot(run, stage, step, generation, data.size_bytes, data.chunk_bytes, data.root)
    return Cut(statement, seal(encode(statement), step), data)
