"""Lossless packing: any bytes come back, and nothing that a stranger packs makes more than a chunk."""

from __future__ import annotations

import contextlib
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from wire.errors import Code, LocalProtocolError, RemoteProtocolError
from wire.limits import DEFAULT_LIMITS
from wire.planes import HEAD, HEAD_BYTES, Planes, raw_size

CHUNK = DEFAULT_LIMITS.chunk_bytes
PLANES = Planes()


def gaussian(size: int, seed: int = 0) -> memoryview:
    bits = np.random.default_rng(seed).standard_normal(size // 2).astype(np.float32).view(np.uint32)
    return memoryview((bits >> 16).astype("<u2").view(np.uint8))


def packed(chunk: bytes | memoryview) -> bytes:
    result = PLANES.pack(memoryview(chunk))
    assert result is not None
    return bytes(result)


def unpacked(data: bytes) -> bytes:
    into = memoryview(bytearray(raw_size(memoryview(data))))
    PLANES.unpack(memoryview(data), into)
    return bytes(into)


def frame(content: bytes, size: bool = True) -> bytes:
    return zstandard.ZstdCompressor(level=1, write_content_size=size).compress(content)


def chunk_of(plane: bytes, low: int) -> bytes:
    return HEAD.pack(len(plane)) + plane + bytes(low)


# -- what honest sides do


def test_gaussian_numbers_shrink_by_a_third_and_come_back() -> None:
    chunk = gaussian(CHUNK)
    data = packed(chunk)
    assert 1.42 < CHUNK / len(data) < 1.50
    assert unpacked(data) == chunk


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(
        st.binary(max_size=600),
        st.builds(lambda pattern, count: pattern * count, st.binary(min_size=1, max_size=9), st.integers(0, 4000)),
        st.builds(lambda count, seed: bytes(gaussian(2 * count, seed)), st.integers(1, 2000), st.integers(0, 9)),
    )
)
def test_any_bytes_come_back_or_go_plain(chunk: bytes) -> None:
    result = PLANES.pack(memoryview(chunk))
    if len(chunk) % 2 or not chunk:
        assert result is None
    if result is not None:
        assert len(result) * 20 <= len(chunk) * 19
        assert raw_size(result) == len(chunk)
        assert unpacked(bytes(result)) == chunk


def test_what_does_not_shrink_or_is_odd_goes_plain() -> None:
    assert PLANES.pack(memoryview(np.random.default_rng(1).bytes(CHUNK))) is None
    assert PLANES.pack(memoryview(bytes(CHUNK - 1))) is None
    assert PLANES.pack(memoryview(b"")) is None
    assert PLANES.pack(memoryview(bytes(CHUNK))) is not None  # a chunk of zeros, the control


def test_the_format_is_two_planes() -> None:
    chunk = bytes(range(256)) * 2
    numbers = b"".join(bytes([low, 7]) for low in chunk)
    data = packed(numbers)
    (plane,) = HEAD.unpack_from(data)
    assert zstandard.ZstdDecompressor().decompress(data[HEAD_BYTES : HEAD_BYTES + plane]) == bytes([7]) * 512
    assert data[HEAD_BYTES + plane :] == chunk


def test_our_own_mistake_is_told_as_ours() -> None:
    with pytest.raises(LocalProtocolError):
        PLANES.pack(memoryview(bytes(CHUNK + 2)))


def test_an_unaligned_destination_is_written_as_well() -> None:
    chunk = gaussian(4096)
    data = packed(chunk)
    into = memoryview(bytearray(4097))
    PLANES.unpack(memoryview(b"x" + data)[1:], into[1:])
    assert into[1:] == chunk


# -- what strangers do

GOOD = bytes(packed(gaussian(8192)))
HALF = 4096


@pytest.mark.parametrize("plane", [0, 1, len(GOOD) - HEAD_BYTES, len(GOOD) - HEAD_BYTES + 1, 2**31 - 1, 2**31, 2**32 - 1])
def test_a_length_that_is_not_true_is_refused(plane: int) -> None:
    data = HEAD.pack(plane) + GOOD[HEAD_BYTES:]
    with pytest.raises(RemoteProtocolError) as error:
        unpacked(data)
    assert error.value.code is Code.PROTOCOL


def test_every_truncation_and_extension_is_refused() -> None:
    small = packed(b"\x00\x3f" * 64)
    for size in range(len(small)):
        with pytest.raises(RemoteProtocolError):
            PLANES.unpack(memoryview(small[:size]), memoryview(bytearray(128)))
    with pytest.raises(RemoteProtocolError):
        PLANES.unpack(memoryview(small + b"\x00"), memoryview(bytearray(128)))


def test_a_frame_that_is_cut_inside_is_refused() -> None:
    (plane,) = HEAD.unpack_from(GOOD)
    for cut in (1, 2, 10, plane // 2, plane - 5):
        content = GOOD[HEAD_BYTES : HEAD_BYTES + plane - cut]
        with pytest.raises(RemoteProtocolError):
            unpacked(chunk_of(content, HALF))


@pytest.mark.parametrize(
    "plane",
    [
        frame(bytes(HALF - 1)),
        frame(bytes(HALF + 1)),
        frame(bytes(HALF), size=False),
        frame(b""),
        frame(bytes(HALF)) + frame(bytes(HALF)),
        frame(bytes(HALF)) + b"\x00",
        b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd" + frame(bytes(HALF)),  # a skippable frame first
        b"",
        bytes(64),
    ],
    ids=["short", "long", "no size", "empty", "two", "tail", "skippable", "nothing", "zeros"],
)
def test_a_plane_that_is_not_one_frame_of_its_size_is_refused(plane: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        unpacked(chunk_of(plane, HALF))
    assert unpacked(chunk_of(frame(bytes(HALF)), HALF)) == bytes(2 * HALF), "the control"


def test_what_should_have_gone_plain_is_refused() -> None:
    noise = np.random.default_rng(2).bytes(HALF)
    with pytest.raises(RemoteProtocolError, match="plain"):
        unpacked(chunk_of(frame(noise), HALF))


def test_more_than_a_chunk_or_another_size_than_is_due_is_refused() -> None:
    big = chunk_of(frame(bytes(CHUNK // 2 + 1)), CHUNK // 2 + 1)
    with pytest.raises(RemoteProtocolError):
        raw_size(memoryview(big))
    with pytest.raises(RemoteProtocolError):
        PLANES.unpack(memoryview(GOOD), memoryview(bytearray(8190)))


def bomb(claimed: int) -> bytes:
    """A frame whose header states `claimed` bytes: one segment, content size in 8 bytes, then blocks of repeated zeros."""
    head = b"\x28\xb5\x2f\xfd" + bytes([0b1110_0000]) + claimed.to_bytes(8, "little")
    block = ((128 << 10) << 3 | 0b010).to_bytes(3, "little") + b"\x00"  # RLE, 128 KiB, not the last
    return head + block * 64


@pytest.mark.parametrize("claimed", [HALF, 1 << 20, 1 << 31, (1 << 62)])
def test_a_bomb_takes_no_more_than_a_chunk(claimed: int) -> None:
    data = chunk_of(bomb(claimed), HALF)
    into = memoryview(bytearray(2 * HALF))
    with pytest.raises(RemoteProtocolError):
        PLANES.unpack(memoryview(data), into)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(50):
            with pytest.raises(RemoteProtocolError):
                PLANES.unpack(memoryview(data), into)
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert peak < 256 << 10


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), max_size=4), st.integers(0, len(GOOD)))
def test_damaged_bytes_raise_or_give_exactly_the_size(changes: list[tuple[int, int]], cut: int) -> None:
    data = bytearray(GOOD)
    for at, value in changes:
        data[at] = value
    del data[cut:]
    into = bytearray(8192 + 64)
    with contextlib.suppress(RemoteProtocolError):
        PLANES.unpack(memoryview(data), memoryview(into)[32:-32])
    assert into[:32] == bytes(32) and into[-32:] == bytes(32)
