"""What one member sends us in a round: a keyed slot for each piece, and memory of our own behind it.

A rank knows exactly which piece it will get from whom, so memory is bounded by the slots it posts ahead, and a peer can put nothing
anywhere else.  The memory is never the vector's: a slot that is withdrawn in the middle of a chunk is written to until that
chunk ends, and the caller may have filled the vector anew by then.

A round ends early as soon as one slot can never be filled: the member withdrew what it had begun (its own round failed, a
`WireError`), or what it sent is not what the round is about (its fault, `Spoilt`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from wire.errors import Code, error_for
from wire.identity import PeerId
from wire.messages import Key
from wire.net import Dropped, Peer
from wire.tensor import Expectation

_UNFIT = frozenset({Code.EXPECTATION, Code.TOO_LARGE, Code.DUPLICATE, Code.STALE})


class Spoilt(Exception):
    """What a member gave to the round cannot be used."""

    def __init__(self, member: PeerId, what: str = "") -> None:
        super().__init__(what or f"the gradient of {member.short} is not finite")
        self.member = member


@dataclass(slots=True)
class _Slot:
    number: int
    buffer: memoryview
    arrived: trio.Event = field(default_factory=trio.Event)


class Mailbox:
    """Pieces from `member` over the tensor channel `name` of `protocol`.  `alive()` is called for each that arrives."""

    def __init__(self, peer: Peer, member: PeerId, protocol: str, name: bytes, alive: Callable[[], None]) -> None:
        self.member = member
        self._expected: dict[Key, Expectation] = {}
        self._slots: dict[Key, _Slot] = {}
        self._receiver = peer.receiver(protocol, name, self._expected.get)
        self._receiver.on_dropped = self._on_dropped
        self._alive = alive
        self._failed: Exception | None = None
        self._failure = trio.Event()

    @property
    def open(self) -> int:
        """Slots that we wait for, and buffers that the channel has: 0 between rounds, once no chunk is under way."""
        return len(self._slots) + len(self._expected) + self._receiver.posted

    def post(self, key: Key, expectation: Expectation) -> None:
        """Be ready for the tensor of `key`, in new memory of exactly its size."""
        self._expected[key] = expectation
        buffer = memoryview(bytearray(expectation.raw_len))
        self._slots[key] = _Slot(self._receiver.post(buffer, key=key), buffer)

    async def wait(self, key: Key) -> memoryview:
        """The bytes of a posted tensor, once they are here.  To be called once a key; a cancel leaves the slot open."""
        slot = self._slots[key]
        await slot.arrived.wait()
        del self._slots[key], self._expected[key]
        return slot.buffer

    async def run(self) -> None:
        """Take what arrives, until cancelled.  Raises what ended the channel."""
        while True:
            received = await self._receiver.receive()
            slot = self._slots.get(received.key)
            if slot is not None:  # else of a round that is over
                self._alive()
                slot.arrived.set()

    async def watch(self) -> None:
        """Raise, as soon as it is known that a slot will not be filled."""
        await self._failure.wait()
        if self._failed is not None:
            raise self._failed

    def withdraw(self) -> None:
        """The round is over: no slot stays open, no key is expected.  Idempotent."""
        slots = list(self._slots.values())
        self._slots.clear()
        self._expected.clear()
        for slot in slots:
            self._receiver.unpost(slot.number)
        self._failed, self._failure = None, trio.Event()

    def close(self) -> None:
        """End the channel."""
        self.withdraw()
        self._receiver.close()

    def _on_dropped(self, dropped: Dropped) -> None:
        if dropped.key not in self._slots or self._failed is not None:
            return  # our own withdrawal
        if dropped.code in _UNFIT:
            self._failed = Spoilt(self.member, f"{self.member.short} sent what does not belong to this round ({dropped.code.name})")
        else:
            self._failed = error_for(dropped.code, detail=f"{self.member.short} gave the all-reduce up")
        self._failure.set()
