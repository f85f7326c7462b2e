"""What the applications of the channel machine (test_slots_stateful.py) see, and what must be true of it at every moment.

They scribble over every buffer the moment it is theirs again, so that a channel that still reads or writes there is found out.
"""

from __future__ import annotations

from hypothesis.stateful import RuleBasedStateMachine, invariant

from tests.wire.channel_links import GIVEN_BACK, SENT, Link, data_of
from wire.errors import Code
from wire.sending import SendEnded
from wire.slots import ChunkReady, TensorDropped, TensorReceived


class Applications(RuleBasedStateMachine):
    """Base of the machine, which makes the links."""

    links: list[Link]

    def __init__(self) -> None:
        super().__init__()
        self.delivered_once: set[tuple[int, ...]] = set()
        self.given_back: list[bytearray] = []

    def collect(self, it: Link) -> None:
        for event in it.receiver.events():
            if isinstance(event, ChunkReady):
                it.announced.setdefault(event.slot, []).append((event.start, event.end, event.key))
                continue
            buffer = it.slots.pop(event.slot)  # KeyError: a second final event
            it.announced.pop(event.slot, None)
            assert event.buffer.obj is buffer
            if isinstance(event, TensorReceived):
                assert event.key not in self.delivered_once and event.key[1] != 4
                assert bytes(event.buffer) == data_of(event.key)
                self.delivered_once.add(event.key)
            else:
                assert isinstance(event, TensorDropped) and event.code is not Code.OK
            buffer[:] = bytes([GIVEN_BACK]) * len(buffer)
            self.given_back.append(buffer)
        for ended in it.sender.events():
            if isinstance(ended, SendEnded):
                key, data, _ready = it.transfers.pop(ended.transfer)
                assert key == ended.key
                if ended.code is Code.OK:
                    assert key in self.delivered_once
                if ended.code is Code.DUPLICATE:
                    assert key in self.delivered_once
                data[:] = bytes([SENT]) * len(data)

    @invariant()
    def nothing_is_written_into_what_was_given_back(self) -> None:
        assert all(buffer.count(GIVEN_BACK) == len(buffer) for buffer in self.given_back)
        del self.given_back[:-32]

    @invariant()
    def what_was_announced_stays_as_it_is(self) -> None:
        for it in self.links:
            for slot, ranges in it.announced.items():
                for start, end, key in ranges:
                    assert it.slots[slot][start:end] == data_of(key)[start:end]
