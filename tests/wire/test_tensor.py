"""Types, expectations and numeric codecs.  Referees: torch's own bf16 cast, exact rational bounds, and golden bytes."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wire.errors import LocalProtocolError
from wire.tensor import (
    BF16,
    PLAIN,
    Bf16,
    DType,
    Expectation,
    Int8Blocks,
    Plain,
    bf16_from_fp32,
    fp32_from_bf16,
    from_bytes,
    to_bytes,
)

SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9)
ANY_FP32 = hnp.arrays(np.float32, SHAPES, elements=st.floats(width=32))
FINITE_FP32 = hnp.arrays(np.float32, SHAPES, elements=st.floats(width=32, allow_nan=False, allow_infinity=False))


def test_type_numbers_never_change() -> None:
    numbers = "bf16=1 fp16=2 fp32=3 fp64=4 int8=5 uint8=6 int16=7 uint16=8 int32=9 uint32=10 int64=11"
    assert " ".join(f"{t.name}={t.value}" for t in DType) == numbers
    assert [t.itemsize for t in DType] == [2, 2, 4, 8, 1, 1, 2, 2, 4, 4, 8]


@pytest.mark.parametrize("dtype", DType)
def test_bytes_are_a_view_and_little_endian(dtype: DType) -> None:
    array = np.arange(6).astype(dtype.numpy).reshape(2, 3)
    view = to_bytes(array)
    again = from_bytes(view, dtype, (2, 3))
    assert view.nbytes == 6 * dtype.itemsize and np.array_equal(again, array)
    again[1, 2] = 9
    assert array[1, 2] == 9  # the same memory
    if not dtype.name.startswith(("fp", "bf")):
        assert bytes(view) == b"".join(int(v).to_bytes(dtype.itemsize, "little") for v in array.flat)


def test_what_would_need_a_copy_is_refused() -> None:
    with pytest.raises(LocalProtocolError):
        to_bytes(np.zeros((4, 4), np.float32)[:, ::2])
    with pytest.raises(LocalProtocolError):
        to_bytes(np.zeros(4, ">f4"))
    with pytest.raises(LocalProtocolError):
        from_bytes(bytes(15), DType.fp32, (4,))
    with pytest.raises(LocalProtocolError):
        from_bytes(bytes(16), DType.fp32, (-4, -1))


HEADER = {"dtype": 3, "shape": (2, 3), "codec": 0, "raw_len": 24}


def test_only_the_expected_header_passes() -> None:
    expected = Expectation(DType.fp32, (2, 3), PLAIN, 24)
    assert expected.difference(SimpleNamespace(**HEADER)) is None
    wrong = {"dtype": 1, "shape": (3, 2), "codec": BF16, "raw_len": 25}
    for name, value in wrong.items():
        difference = expected.difference(SimpleNamespace(**{**HEADER, name: value}))
        assert difference is not None and difference.startswith(name)
    # A shape whose product overflows 64 bits is just another wrong shape.
    assert expected.difference(SimpleNamespace(**{**HEADER, "shape": (2**32 - 1,) * 8})) is not None


@pytest.mark.parametrize(
    "shape, codec, raw_len",
    [((2, 3), PLAIN, 23), ((2,), PLAIN, -1), ((-2,), PLAIN, 8), ((2,), -1, 8), ((1,) * 9, PLAIN, 8), ((2**32,), BF16, 8)],
)
def test_an_impossible_expectation_is_our_own_mistake(shape: tuple[int, ...], codec: int, raw_len: int) -> None:
    with pytest.raises(LocalProtocolError):
        Expectation(DType.fp32, shape, codec, raw_len)


def test_an_expectation_may_hold_more_than_the_tensor() -> None:
    assert Expectation(DType.fp32, (2, 3), PLAIN, 24 + 10).raw_len == 34  # token ids behind the activation


@given(ANY_FP32)
def test_bf16_rounds_as_torch_does(x: np.ndarray) -> None:
    ours = bf16_from_fp32(x)
    referee = torch.from_numpy(x.copy()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    numbers = ~np.isnan(x)
    assert np.array_equal(ours[numbers], referee[numbers])
    assert np.array_equal(np.isnan(fp32_from_bf16(ours)), np.isnan(x))


def test_bf16_of_every_tie_and_every_nan_pattern() -> None:
    high = np.arange(2**16, dtype=np.uint32) << 16
    for low in (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        x = (high | low).view(np.float32)
        referee = torch.from_numpy(x.copy()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        ours, numbers = bf16_from_fp32(x), ~np.isnan(x)
        assert np.array_equal(ours[numbers], referee[numbers])
        assert np.isnan(fp32_from_bf16(ours[~numbers])).all()


@pytest.mark.parametrize("codec", [Plain(DType.fp32), Bf16(), Int8Blocks(1), Int8Blocks(4), Int8Blocks(64)])
@given(x=FINITE_FP32)
@settings(max_examples=50)
def test_wire_size_is_exact_and_the_round_trip_keeps_the_shape(codec: Plain | Bf16 | Int8Blocks, x: np.ndarray) -> None:
    size = codec.wire_size(x.shape)
    out = bytearray(size)
    codec.encode(x, memoryview(out))
    again = codec.decode(out, x.shape)
    assert again.shape == x.shape and again.dtype == np.float32
    if isinstance(codec, Plain):
        assert np.array_equal(again, x)
    for wrong in (size - 1, size + 1):
        if wrong >= 0:
            with pytest.raises(LocalProtocolError):
                codec.encode(x, memoryview(bytearray(wrong)))
            with pytest.raises(LocalProtocolError):
                codec.decode(bytes(wrong), x.shape)


def _int8(codec: Int8Blocks, x: np.ndarray) -> np.ndarray:
    out = bytearray(codec.wire_size(x.shape))
    codec.encode(x, memoryview(out))
    return codec.decode(out, x.shape)


@given(FINITE_FP32, st.integers(1, 10))
def test_int8_error_is_at_most_half_a_scale(x: np.ndarray, block: int) -> None:
    again = _int8(Int8Blocks(block), x)
    width = x.shape[-1] if x.shape else 1
    matrix = (math.prod(x.shape[:-1]), width)
    rows, out = x.reshape(matrix).astype(np.float64), again.reshape(matrix).astype(np.float64)
    for start in range(0, width, block):
        part = rows[:, start : start + block]
        scale = np.abs(part).max(axis=1, keepdims=True) / 127
        # 1e-5: the fp32 roundings of scale, quotient and product; tiny: blocks below the smallest normal scale become zero.
        bound = scale * (0.5 + 1e-5 * 127) + 127 * np.finfo(np.float32).tiny
        assert (np.abs(out[:, start : start + block] - part) <= bound).all()


def test_int8_blocks_do_not_cross_rows() -> None:
    x = np.array([[1e6, 1, 1], [1, 0.5, 0.25]], np.float32)
    codec = Int8Blocks(64)
    assert codec.wire_size((2, 3)) == 2 * 4 + 6
    again = _int8(codec, x)
    assert np.allclose(again[1], x[1], atol=1 / 254)
    # Control: one block over both rows would have lost the second one.
    assert not np.allclose(_int8(codec, x.reshape(1, 6))[0, 3:], x[1], atol=1 / 254)


def test_int8_golden_bytes() -> None:
    out = bytearray(Int8Blocks(2).wire_size((3,)))
    Int8Blocks(2).encode(np.array([127, -63.5, 254], np.float32), memoryview(out))
    assert out.hex() == "0000803f" "00000040" "7fc07f"  # scales 1 and 2; 127, -64 (tie to even), 127


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_not_finite_and_stays_in_its_block(bad: float) -> None:
    x = np.ones((2, 8), np.float32)
    x[0, 1] = bad
    again = _int8(Int8Blocks(4), x)
    assert np.isnan(again[0, :4]).all() and np.array_equal(again[0, 4:], x[0, 4:]) and np.array_equal(again[1], x[1])


def test_hostile_scales_decode_without_a_warning() -> None:
    codec = Int8Blocks(4)
    for scale in (np.inf, -np.inf, np.nan, 3e38, -1.0):
        data = np.float32(scale).tobytes() + bytes([0, 1, 127, 128])
        assert codec.decode(data, (4,)).shape == (4,)


def test_codecs_refuse_other_types_and_blocks() -> None:
    for codec in (Bf16(), Int8Blocks(4)):
        with pytest.raises(LocalProtocolError):
            codec.encode(np.zeros(4), memoryview(bytearray(codec.wire_size((4,)))))
    with pytest.raises(LocalProtocolError):
        Plain(DType.fp32).encode(np.zeros(4, np.int32), memoryview(bytearray(16)))
    with pytest.raises(LocalProtocolError):
        Int8Blocks(0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Bf16().number = 3  # type: ignore[misc]
