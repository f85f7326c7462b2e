"""What a relay says of its circuits, true or not, against what was counted here."""

from __future__ import annotations

import random

import pytest
import trio

from wire.errors import WireError
from wire.identity import Identity, PeerId
from wire.limits import DEFAULT_LIMITS
from wire.messages import encode
from wire.net import metering
from wire.net.metering import PAIRS_MOST, Metering
from wire.net.netevents import NetEvent, RelayDisagrees, RelayThrottled
from wire.net.stream import MessageStream
from wire.relaymessages import Note, RelayNote

RELAY, OTHER, LIAR = (Identity(bytes([number] * 32)).peer_id for number in (1, 2, 3))
MIB = 1 << 20


class Says(MessageStream):
    """A stream with one note on it."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    async def receive(self) -> bytes:
        await trio.lowlevel.checkpoint()
        return self.data


class From:
    """A peer, as far as metering looks at it."""

    def __init__(self, peer_id: PeerId) -> None:
        self.peer_id = peer_id


class Book:
    def __init__(self) -> None:
        self.events: list[NetEvent] = []
        self.metering = Metering(DEFAULT_LIMITS, self.events.append)

    async def note(self, kind: Note, up: int = 0, down: int = 0, relay: PeerId = RELAY, other: PeerId = OTHER) -> None:
        stream = Says(encode(RelayNote(kind, other.raw, up, down, 1)))
        await self.metering.noted(From(relay), stream)  # type: ignore[arg-type]

    def circuit(self, sent: int, received: int, relay: PeerId = RELAY, other: PeerId = OTHER) -> None:
        self.metering.opened(relay, other)
        self.metering.closed(relay, other, sent, received)


@pytest.mark.parametrize(
    ("up", "down", "agrees"),
    [
        (100 * MIB, 100 * MIB, True),
        (100 * MIB, 96 * MIB, True),  # what was under way
        (100 * MIB, 95 * MIB, False),
        (100 * MIB, 105 * MIB, False),
        (0, 100 * MIB, False),
        ((1 << 62) - 1, 100 * MIB, False),
        (100 * MIB, (1 << 62) - 1, False),
    ],
)
async def test_a_wrong_count_is_one_event(up: int, down: int, agrees: bool) -> None:
    book = Book()
    book.circuit(100 * MIB, 100 * MIB)
    await book.note(Note.ENDED, up, down)
    assert len(book.events) == (not agrees) and all(isinstance(event, RelayDisagrees) for event in book.events)
    for _ in range(10):  # said again and again, it is of no circuit that we know
        await book.note(Note.ENDED, up, down)
    assert len(book.events) == (not agrees) and not book.metering._sums


async def test_a_note_before_the_end_is_compared_at_the_end() -> None:
    book = Book()
    book.metering.opened(RELAY, OTHER)
    for _ in range(3):
        await book.note(Note.ENDED, 50 * MIB, 0)
    assert not book.events
    book.metering.closed(RELAY, OTHER, 50 * MIB, 0)
    assert [type(event) for event in book.events] == [RelayDisagrees] and not book.metering._sums


async def test_nobody_speaks_for_another_relay_or_of_circuits_that_are_none() -> None:
    book = Book()
    book.circuit(MIB, 0)
    for kind in (Note.ENDED, Note.THROTTLED):
        await book.note(kind, 90 * MIB, 90 * MIB, relay=LIAR)
        await book.note(kind, 90 * MIB, 90 * MIB, other=LIAR)
    assert not book.events and len(book.metering._sums) == 1
    await book.note(Note.ENDED, MIB, 0)
    assert not book.events and not book.metering._sums


async def test_throttled_is_heard_once_for_each_direction_of_a_circuit() -> None:
    book = Book()
    book.metering.opened(RELAY, OTHER)
    for _ in range(1000):
        await book.note(Note.THROTTLED)
    assert [type(event) for event in book.events] == [RelayThrottled] * 2
    book.metering.opened(RELAY, OTHER)
    for _ in range(1000):
        await book.note(Note.THROTTLED)
    assert len(book.events) == 4


async def test_a_relay_that_makes_up_callers_and_never_tells_fills_no_memory() -> None:
    """Its honest colleague's sums, and those of circuits that stand, are none of the dropped ones."""
    book = Book()
    book.circuit(MIB, 0)
    book.metering.opened(LIAR, OTHER)
    rng = random.Random(1)
    made_up = [PeerId(rng.randbytes(32)) for _ in range(3 * PAIRS_MOST)]
    for other in made_up:
        book.circuit(1, 1, LIAR, other)
    assert len(book.metering._sums) <= PAIRS_MOST + 2
    assert (LIAR, made_up[-1]) in book.metering._sums
    book.metering.closed(LIAR, OTHER, 30 * MIB, 0)
    await book.note(Note.ENDED, 0, 0, relay=LIAR)
    assert [type(event) for event in book.events] == [RelayDisagrees]
    await book.note(Note.ENDED, MIB, 0)
    assert (RELAY, OTHER) not in book.metering._sums and len(book.events) == 1
    book.metering.relay_lost(LIAR)
    assert not book.metering._sums


async def test_what_is_no_note_is_refused() -> None:
    book = Book()
    note = encode(RelayNote(Note.ENDED, OTHER.raw, 1, 1, 1))
    for data in (b"", note[:-1], b"\xff" * 80, encode(RelayNote(Note.ENDED, bytes(32), 1, 1, 1))):
        with pytest.raises(WireError):
            await book.metering.noted(From(RELAY), Says(data))  # type: ignore[arg-type]
    assert metering.PROTOCOL == "relay-note/1" and not book.metering._sums
