"""What the two halves of a tensor channel tell their owners.

Every transfer and every slot has exactly one final event, and only that gives its buffer back: whoever reuses memory before it
lets a session read or write what is somebody else's.
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import Code
from .messages import Begin, Key


@dataclass(frozen=True, slots=True)
class SlotsChanged:
    """Slots were posted or withdrawn: whoever waits for one may look again."""


@dataclass(frozen=True, slots=True)
class SendEnded:
    """A transfer has ended and its buffer is the caller's again.

    OK = the receiver has every byte and handed the tensor over.  REFUSED = it withdrew the slot meanwhile: send into another.
    CANCELLED = by us.  Any other code is the receiver's word (DUPLICATE, STALE, EXPECTATION, TOO_LARGE), or that of ``close``.
    """

    transfer: int
    key: Key
    code: Code


SenderEvent = SlotsChanged | SendEnded


@dataclass(frozen=True, slots=True)
class ChunkReady:
    """Bytes start..end of the slot's buffer are final, so a copy to the device may begin.  Only after Begin was accepted."""

    slot: int
    key: Key
    index: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class TensorReceived:
    """Every byte is there and the key was not delivered before.  The buffer is the application's again."""

    slot: int
    key: Key
    begin: Begin
    buffer: memoryview  # the first raw_len bytes of the posted buffer


@dataclass(frozen=True, slots=True)
class TensorDropped:
    """The slot ended without a tensor; what was announced of it is void.  The buffer is the application's again.

    CANCELLED = withdrawn by us, or dropped by the sender (or its code); DUPLICATE, STALE, EXPECTATION, TOO_LARGE = refused by us;
    else the code of ``close``.  ``key`` is None when neither the slot nor a Begin had named one.
    """

    slot: int
    key: Key | None
    code: Code
    buffer: memoryview  # as posted


ReceiverEvent = ChunkReady | TensorReceived | TensorDropped
