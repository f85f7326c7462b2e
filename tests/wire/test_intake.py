"""The read buffer: every byte once and in order however the pipe cuts them, one read and no move for each largest record."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wire.intake import AHEAD_BYTES, READ_BYTES, Intake
from wire.limits import DEFAULT_LIMITS
from wire.noise import TAG_BYTES
from wire.records import HEADER, HEADER_BYTES

LARGEST = DEFAULT_LIMITS.record_plaintext_max_bytes


class Reader:
    """Stands in for a session: takes whole records, keeps their bodies."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.missing_bytes = 0

    def receive(self, data: memoryview, now: float) -> int:
        at = 0
        self.missing_bytes = 0
        while len(data) - at >= HEADER_BYTES:
            stop = at + HEADER_BYTES + HEADER.unpack_from(data, at)[0]
            if stop > len(data):
                self.missing_bytes = stop - len(data)
                break
            self.bodies.append(bytes(data[at + HEADER_BYTES : stop]))
            at = stop
        return at


def record(number: int, size: int) -> bytes:
    return HEADER.pack(size + TAG_BYTES, 1, 0x12, 0, 0) + bytes([number % 256]) * (size + TAG_BYTES)


def run(stream: bytes, pieces: list[int], leftover: int = 0) -> tuple[Reader, list[int]]:
    """Feed `stream`; the pipe gives at most so much at a time as `pieces` says, in turn.  Returns what each read asked for."""
    reader = Reader()
    intake = Intake(reader, DEFAULT_LIMITS, stream[:leftover])  # type: ignore[arg-type]
    intake.feed(0, 0.0)
    at, asked = leftover, []
    while at < len(stream):
        room = intake.room()
        asked.append(len(room))
        count = min(len(room), pieces[len(asked) % len(pieces)], len(stream) - at)
        room[:count] = stream[at : at + count]
        intake.feed(count, 0.0)
        at += count
    return reader, asked


SIZES = st.one_of(st.integers(0, 100), st.sampled_from((4096, 65_536, LARGEST - 1, LARGEST)))


@settings(deadline=None)
@given(
    st.lists(SIZES, min_size=1, max_size=12),
    st.lists(st.sampled_from((2000, 1 << 20, 1213, 65_483)), min_size=1, max_size=4),
    st.integers(0, 16_000),
)
def test_every_record_arrives_once_and_in_order(sizes: list[int], pieces: list[int], leftover: int) -> None:
    stream = b"".join(record(number, size) for number, size in enumerate(sizes))
    reader, asked = run(stream, pieces, min(leftover, len(stream)))
    assert reader.bodies == [record(number, size)[HEADER_BYTES:] for number, size in enumerate(sizes)]
    assert all(asked)


@pytest.mark.parametrize("before", [(), (16,), (8, 8, 16, 600)])
def test_a_largest_record_is_one_read_and_hardly_moved(before: tuple[int, ...]) -> None:
    """Also with what goes before it: a CHUNK, credits, an answer."""
    count = 20
    stream = b"".join(record(number, size) for number in range(count) for size in (*before, LARGEST))
    reader, asked = run(stream, [1 << 30])
    assert len(reader.bodies) == count * (len(before) + 1)
    assert len(asked) <= count + 1
    moved = sum(max(0, READ_BYTES - size) for size in asked)  # a read asks for what the bytes at the front leave free
    assert moved <= AHEAD_BYTES * len(asked)


@pytest.mark.parametrize("size", [64, 4096, 32 * 1024])
def test_short_records_come_many_at_a_time(size: int) -> None:
    stream = record(0, size) * (4 * READ_BYTES // size)
    _, asked = run(stream, [1 << 30])
    assert len(asked) <= len(stream) // (READ_BYTES - size - HEADER_BYTES - TAG_BYTES) + 1


def test_memory_is_that_of_one_largest_record() -> None:
    intake = Intake(Reader(), DEFAULT_LIMITS)  # type: ignore[arg-type]
    assert len(intake._buffer) <= LARGEST + AHEAD_BYTES + 64
