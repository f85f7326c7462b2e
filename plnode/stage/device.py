"""The device under a stage: where its tensors live and how payloads get there and back.

The same runner drives a CPU and a GPU.  On a GPU three things overlap: compute, the copy of the next microbatch in, and the copy
of the last one out, so there are three streams, and host memory is pinned (an asynchronous copy needs it).  What goes wrong if
this is done carelessly:

* *A copy reads what compute has not written, or the reverse.*  Every hand-over between streams is an event.
* *Memory is given to someone else while a copy still uses it.*  Torch's allocator orders reuse on one stream only: a tensor
  filled by the copy-in stream is allocated on that stream and recorded on the compute stream; a tensor being copied out is held
  by the queue of copies until the last of its events has passed.
* *Someone waits.*  Nothing here blocks on the end of a copy.  ``poll`` asks the events and reports progress; the device thread
  calls it between jobs, and every ``POLL_S`` while copies are under way and no job is.

An activation leaves in pieces of ``PIECE_BYTES``: the network sends the first while the second is still being copied.  1 MiB is
four chunks of the wire; at 20 GB/s of PCIe it takes 50 us, ten times the cost of an event.  Likewise a payload can come in pieces
as they are received (``Inflow``).

On the CPU there is nothing to overlap: a copy is a memcpy, complete when the call returns, and an ``Inflow`` reads nothing until
the job does.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .boundary import host_bytes
from .errors import StageError
from .hostpool import plain_block

# Torch leaves these two untyped.
_new_stream: Any = torch.cuda.Stream
_new_event: Any = torch.cuda.Event

PIECE_BYTES = 1 << 20
# Half the time that a piece takes on a slow PCIe link (2 GB/s): progress is reported no later than one piece behind.
POLL_S = 0.00025

Progress = Callable[[int], None]


class Inflow:
    """A payload on its way in.  ``landed(start, end)`` may be called from any thread, once a piece, in any order of pieces.

    Bytes announced as landed must not change any more.  On the CPU announcing is optional: the job reads the whole buffer.
    """

    def __init__(self, host: memoryview, wake: Callable[[Inflow, int, int], None] | None) -> None:
        self.host = host.cast("B")
        self._wake = wake
        self.tensor: Tensor | None = None  # device thread only
        self.copied_bytes = 0  # device thread only

    def landed(self, start: int, end: int) -> None:
        """Bytes [start, end) are final; their copy to the device may start."""
        if not 0 <= start < end <= self.host.nbytes:
            raise StageError(f"[{start}, {end}) is not a piece of a payload of {self.host.nbytes} bytes")
        if self._wake is not None:
            self._wake(self, start, end)


class Device(ABC):
    """Owned by one device thread; only ``inflow`` and ``Inflow.landed`` may be called from elsewhere."""

    torch_device: torch.device

    @abstractmethod
    def active(self) -> AbstractContextManager[object]:
        """Context of the device thread: makes the compute stream current."""

    @abstractmethod
    def host_block(self, size_bytes: int) -> NDArray[np.uint8]:
        """Host memory that copies to and from this device are fast with."""

    @abstractmethod
    def inflow(self, host: memoryview) -> Inflow:
        """Begin a piecewise copy of ``host`` to the device."""

    @abstractmethod
    def to_device(self, host: memoryview | Inflow) -> Tensor:
        """The payload as a flat uint8 tensor of our own on the device, ready for the compute stream; ``host`` may be reused
        once the job's results are there."""

    @abstractmethod
    def to_host(self, parts: Sequence[Tensor], out: memoryview, progress: Progress) -> None:
        """Copy flat uint8 tensors one after the other into ``out`` (exactly their size).  ``progress(n)``: n bytes from the front
        are final; called on the device thread, ascending, the last time with the whole size.  Until then the caller must not
        give ``out`` back."""

    @abstractmethod
    def poll(self) -> bool:
        """Report progress of copies; True while any is under way.  Never blocks."""

    def drain(self) -> None:
        """Wait until nothing is under way any more; before the thread ends."""
        while self.poll():
            pass


class CpuDevice(Device):
    """Tensors in host memory; copies are complete at once."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")

    def active(self) -> AbstractContextManager[object]:
        return nullcontext()

    def host_block(self, size_bytes: int) -> NDArray[np.uint8]:
        return plain_block(size_bytes)

    def inflow(self, host: memoryview) -> Inflow:
        return Inflow(host, None)

    def to_device(self, host: memoryview | Inflow) -> Tensor:
        # A copy, although a view would do: the buffer goes back to its pool while the input is still kept for the backward.
        return host_bytes(host.host if isinstance(host, Inflow) else host).clone()

    def to_host(self, parts: Sequence[Tensor], out: memoryview, progress: Progress) -> None:
        target = host_bytes(out)
        at = 0
        for part in parts:
            target[at : at + part.numel()].copy_(part)
            at += part.numel()
        progress(at)

    def poll(self) -> bool:
        return False


class CudaDevice(Device):
    """One CUDA device with a compute, a copy-in and a copy-out stream."""

    def __init__(self, device: torch.device, wake: threading.Condition) -> None:
        if not torch.cuda.is_available():
            raise StageError(f"device {device} was asked for, but torch sees no CUDA device; use --device cpu")
        self.torch_device = torch.device("cuda", device.index if device.index is not None else torch.cuda.current_device())
        self._wake = wake
        self._compute, self._in, self._out = (_new_stream(self.torch_device) for _ in range(3))
        self._lock = threading.Lock()
        self._arrived: deque[tuple[Inflow, int, int]] = deque()
        # Copies out: (event, the parts kept alive, bytes final after it, progress).
        self._leaving: deque[tuple[Any, Sequence[Tensor], int, Progress]] = deque()

    def active(self) -> AbstractContextManager[object]:
        torch.cuda.set_device(self.torch_device)
        context: AbstractContextManager[object] = torch.cuda.stream(self._compute)
        return context

    def host_block(self, size_bytes: int) -> NDArray[np.uint8]:
        block: NDArray[np.uint8] = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True).numpy()
        return block

    def inflow(self, host: memoryview) -> Inflow:
        return Inflow(host, self._queue_piece)

    def _queue_piece(self, inflow: Inflow, start: int, end: int) -> None:
        with self._lock:
            self._arrived.append((inflow, start, end))
        with self._wake:
            self._wake.notify()

    def _start_copies_in(self) -> None:
        with self._lock:
            arrived, self._arrived = self._arrived, deque()
        with torch.cuda.stream(self._in):
            for inflow, start, end in arrived:
                if inflow.tensor is None:
                    inflow.tensor = torch.empty(inflow.host.nbytes, dtype=torch.uint8, device=self.torch_device)
                inflow.tensor[start:end].copy_(host_bytes(inflow.host[start:end]), non_blocking=True)
                inflow.copied_bytes += end - start

    def to_device(self, host: memoryview | Inflow) -> Tensor:
        inflow = host if isinstance(host, Inflow) else self.inflow(host)
        if inflow is host:
            self._start_copies_in()
            if inflow.copied_bytes != inflow.host.nbytes:
                raise StageError(f"{inflow.copied_bytes} of {inflow.host.nbytes} bytes had landed when the job ran")
        else:
            with torch.cuda.stream(self._in):
                inflow.tensor = torch.empty(inflow.host.nbytes, dtype=torch.uint8, device=self.torch_device)
                inflow.tensor.copy_(host_bytes(inflow.host), non_blocking=True)
        tensor = inflow.tensor
        assert tensor is not None
        self._compute.wait_stream(self._in)
        tensor.record_stream(self._compute)
        return tensor

    def to_host(self, parts: Sequence[Tensor], out: memoryview, progress: Progress) -> None:
        self._out.wait_stream(self._compute)
        target = host_bytes(out)
        at = 0
        with torch.cuda.stream(self._out):
            for part in parts:
                for start in range(0, part.numel(), PIECE_BYTES):
                    piece = part[start : start + PIECE_BYTES]
                    target[at : at + piece.numel()].copy_(piece, non_blocking=True)
                    at += piece.numel()
                    event = _new_event()
                    event.record(self._out)
                    self._leaving.append((event, parts, at, progress))

    def poll(self) -> bool:
        self._start_copies_in()
        while self._leaving and self._leaving[0][0].query():
            _, _, final_bytes, progress = self._leaving.popleft()
            progress(final_bytes)
        return bool(self._leaving)


def open_device(name: str, wake: threading.Condition) -> Device:
    """The device of a name as torch writes it: "cpu", "cuda", "cuda:1".  The device thread waits on ``wake`` and then polls."""
    device = torch.device(name)
    if device.type == "cpu":
        return CpuDevice()
    if device.type == "cuda":
        return CudaDevice(device, wake)
    raise StageError(f"a stage runs on cpu or cuda, not on {name!r}")
