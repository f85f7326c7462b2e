"""`Session.divert`: the rest of a chunk under way goes elsewhere, because another lane carries the chunk again (wire 11)."""

from __future__ import annotations

import pytest

from tests.wire.joined import Joined
from wire.chunks import OutChunk
from wire.errors import LocalProtocolError
from wire.events import Kind

SIZE = 200_000
DATA = bytes(i % 251 + 1 for i in range(SIZE))


class End:
    """Source of two chunks and sink of them."""

    order = 0

    def __init__(self) -> None:
        self.waiting = [OutChunk(1, index, memoryview(DATA), 0) for index in range(2)]
        self.places = [bytearray(SIZE), bytearray(SIZE)]
        self.done: list[int] = []

    def next_chunk(self) -> OutChunk | None:
        return self.waiting.pop(0) if self.waiting else None

    def place(self, slot: int, index: int, length: int, flags: int) -> memoryview:
        return memoryview(self.places[index])[:length]

    def placed(self, slot: int, index: int) -> None:
        self.done.append(index)


def half_a_chunk() -> tuple[Joined, int, End]:
    joined, end = Joined(), End()
    joined.settle()
    stream = joined.a.session.open_stream(Kind.CHUNKS, "t/1", 2, now=joined.now)
    joined.a.session.attach_source(stream, end, 2)
    joined.settle()
    joined.b.session.attach_sink(stream, end)
    joined.b.session.accept(stream)
    joined.move(joined.b)
    joined.deliver(joined.a)
    while not any(end.places[0]):
        joined.move(joined.a, 1000)
        joined.deliver(joined.b)
    assert end.done == [] and not end.places[0][-1]
    return joined, stream, end


def test_the_rest_goes_into_the_view_and_the_next_chunk_to_its_place() -> None:
    joined, stream, end = half_a_chunk()
    before, scratch = bytes(end.places[0]), bytearray(SIZE)
    came = SIZE - before.count(0)
    joined.b.session.divert(stream, memoryview(scratch))
    joined.settle()
    assert bytes(end.places[0]) == before  # not a byte more
    assert scratch[: SIZE - came] == DATA[came:] and not any(scratch[SIZE - came :])
    assert end.done == [0, 1] and end.places[1] == DATA


def test_without_divert_the_place_is_filled() -> None:  # control
    joined, _stream, end = half_a_chunk()
    joined.settle()
    assert end.places[0] == DATA


def test_a_view_that_is_too_short_changes_nothing_and_an_idle_stream_has_nothing_to_divert() -> None:
    joined, stream, end = half_a_chunk()
    with pytest.raises(LocalProtocolError):
        joined.b.session.divert(stream, memoryview(bytearray(9)))
    joined.settle()
    assert end.done == [0, 1] and end.places == [DATA, DATA]
    for number in (stream, stream + 400):
        joined.b.session.divert(number, memoryview(bytearray(9)))
