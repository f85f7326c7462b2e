"""A fixed pool of host buffers for payloads.

Payloads are large (megabytes) and all of few sizes, one or two a boundary.  Allocating one per microbatch costs page faults on
every byte of it, and on CUDA pinning costs milliseconds and may synchronise the device, so buffers are kept and reused by exact
size.  The pool has a limit in bytes, planned at start from the slots that are granted; beyond it ``acquire`` raises instead of
growing or waiting: waiting here could wait for a buffer that only the waiter's own progress would free.  Idle buffers of other
sizes are given back to the system first.

A buffer is lent as a ``memoryview`` and named by the array below it, so any slice of the view finds its way back.  Giving back
what was not lent, or twice, raises.  Old contents are not cleared.  Both the loop and the device thread use the pool; the lock is
held for a dictionary access, and for an allocation while the pool still grows to its working set.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from .errors import PoolExhausted, StageError

Block = NDArray[np.uint8]


def plain_block(size_bytes: int) -> Block:
    """An ordinary (pageable) host block."""
    return np.empty(size_bytes, np.uint8)


class HostPool:
    """Lends host buffers of exact sizes.  ``limit_bytes`` bounds what is allocated, lent or idle.  Thread-safe, never blocks."""

    def __init__(self, limit_bytes: int, allocate: Callable[[int], Block] = plain_block) -> None:
        self.limit_bytes = limit_bytes
        self._allocate = allocate
        self._lock = threading.Lock()
        self._idle: dict[int, list[Block]] = {}
        self._lent: dict[int, Block] = {}
        self._allocated_bytes = 0

    def acquire(self, size_bytes: int) -> memoryview:
        """A writable view of exactly ``size_bytes`` bytes (``B`` format).  Raises PoolExhausted above the limit."""
        if size_bytes <= 0:
            raise StageError(f"a host buffer has at least 1 byte, not {size_bytes}")
        with self._lock:
            idle = self._idle.get(size_bytes)
            if idle:
                block = idle.pop()
            else:
                self._make_room(size_bytes)
                block = self._allocate(size_bytes)
                self._allocated_bytes += size_bytes
            self._lent[id(block)] = block
            return memoryview(cast(Any, block))

    def release(self, buffer: memoryview) -> None:
        """Take a lent buffer (or any slice of it) back.  The caller must not touch any view of it again."""
        with self._lock:
            block = self._lent.pop(id(buffer.obj), None)
            if block is None:
                raise StageError("this buffer was not lent by the pool, or was given back before")
            self._idle.setdefault(block.nbytes, []).append(block)

    def owns(self, buffer: Any) -> bool:
        """Whether ``buffer`` is a view of a block that is lent now."""
        return isinstance(buffer, memoryview) and id(buffer.obj) in self._lent

    def _make_room(self, size_bytes: int) -> None:
        # Idle blocks of sizes no longer asked for go first; lent ones cannot.
        for size in list(self._idle):
            while self._idle[size] and self._allocated_bytes + size_bytes > self.limit_bytes:
                self._idle[size].pop()
                self._allocated_bytes -= size
            if not self._idle[size]:
                del self._idle[size]
        if self._allocated_bytes + size_bytes > self.limit_bytes:
            raise PoolExhausted(
                f"{size_bytes:,} more bytes do not fit the pool of {self.limit_bytes:,}: "
                f"{len(self._lent)} buffers of together {self._allocated_bytes:,} bytes are lent; "
                "release some or grant fewer slots"
            )

    @property
    def lent(self) -> int:
        """Number of buffers lent now; 0 when the runner is idle and every caller has released what it got."""
        return len(self._lent)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all blocks, lent or idle."""
        return self._allocated_bytes
