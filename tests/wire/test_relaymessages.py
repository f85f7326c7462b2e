"""The relay's messages: their bytes are the protocol, and any other bytes are refused."""

from __future__ import annotations

import contextlib
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.errors import LocalProtocolError, RemoteProtocolError
from wire.messages import PeerRecord, decode, encode
from wire.relaymessages import CircuitAsk, CircuitIn, RelayNote, Reserve, Reserved, Voucher

A = bytes(range(32))
GOLDEN: list[tuple[Any, str]] = [
    (Reserve(2), "922802"),
    (Reserved(0, 2, 3_600_000, 5 << 20, b"paper"), "97290002ce0036ee80ce00500000c405706170657200"),
    (Reserved(9, 1, 0, 0, b"", 120_000), "972909010000c400ce0001d4c0"),
    (CircuitAsk(A, 1, 0, b"paper"), "952ac420" + A.hex() + "0100c4057061706572"),
    (CircuitIn(A, 2, 1), "952bc420" + A.hex() + "0201a0"),
    (CircuitIn(A, 2, 0, "8.8.4.4"), "952bc420" + A.hex() + "0200a7382e382e342e34"),
    (RelayNote(2, A, 300, 4, 1 << 40), "962c02c420" + A.hex() + "cd012c04cf0000010000000000"),
    (Voucher(A, 2, 5 << 20, b"bootboot"), "952dc420" + A.hex() + "02ce00500000c408626f6f74626f6f74"),
]


@pytest.mark.parametrize(("value", "data"), GOLDEN, ids=[f"{type(value).__name__}{at}" for at, (value, _) in enumerate(GOLDEN)])
def test_golden_bytes(value: Any, data: str) -> None:
    assert encode(value).hex() == data
    assert decode(bytes.fromhex(data), type(value)) == value


@pytest.mark.parametrize("value", [value for value, _ in GOLDEN])
def test_surplus_is_read_over_and_every_truncation_refused(value: Any) -> None:
    """They are extensible; but what is cut off is no message."""
    items = msgpack.unpackb(encode(value))
    assert decode(msgpack.packb([*items, "newer", 1]), type(value)) == value
    raw = encode(value)
    for length in range(len(raw)):
        with pytest.raises(RemoteProtocolError):
            decode(raw[:length], type(value))


@pytest.mark.parametrize(
    "value",
    [
        Reserve(256),
        Reserve(-1),
        Reserved(0, 2, 1, 1, b"x" * 513),
        CircuitAsk(A[:-1], 1, 0, b""),
        CircuitAsk(A, 1, 0, b"x" * 513),
        CircuitIn(A + b"x", 1, 0),
        CircuitIn(A, 1, 0, "8" * 46),
        RelayNote(1, A, 2**64, 0, 0),
        Voucher(A, 2, 0, b"bootbootb"),
    ],
)
def test_what_is_out_of_bounds_is_neither_sent_nor_read(value: Any) -> None:
    with pytest.raises(LocalProtocolError):
        encode(value)
    number = {"Reserve": 40, "Reserved": 41, "CircuitAsk": 42, "CircuitIn": 43, "RelayNote": 44, "Voucher": 45}[type(value).__name__]
    fields = [getattr(value, name) for name in type(value).__slots__]
    try:
        raw = msgpack.packb([number, *fields])
    except OverflowError:
        return  # more than 64 bits cannot even be written
    with pytest.raises(RemoteProtocolError):
        decode(raw, type(value))


def test_a_class_of_a_later_version_is_read_and_left_to_the_table() -> None:
    assert decode(msgpack.packb([40, 200]), Reserve) == Reserve(200)


@given(st.data())
def test_changed_bytes_give_a_message_or_a_protocol_error(data: st.DataObject) -> None:
    value, text = data.draw(st.sampled_from(GOLDEN))
    raw = bytearray.fromhex(text)
    at = data.draw(st.integers(0, len(raw)))
    raw[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    with contextlib.suppress(RemoteProtocolError):
        assert encode(decode(bytes(raw), type(value)))


def test_the_ask_and_two_vouchers_fit_where_they_go() -> None:
    assert len(encode(CircuitAsk(A, 255, 255, b"x" * 512))) <= 4096  # the meta of an OPEN
    assert len(encode(PeerRecord(("/ip4/1.2.3.4/tcp/5",), (b"x" * 512, b"x" * 512)))) + 200 <= 2048
