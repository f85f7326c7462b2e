"""Messages: what goes in comes out, everything else is refused, and no length that a stranger names reserves memory."""

from __future__ import annotations

import dataclasses
import math
import random
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.errors import Code, LocalProtocolError, RemoteProtocolError
from wire.messages import (
    FRAME,
    AcceptBody,
    Ask,
    Begin,
    Count,
    Done,
    Drop,
    Have,
    Key,
    KeyBytes,
    OpenBody,
    PeerRecord,
    Posted,
    Range,
    Records,
    SeedListAnswer,
    SeedListAsk,
    SessionHello,
    Size,
    Slot,
    Unslot,
    Want,
    decode,
    encode,
    message,
    unpack,
)
from wire.unpacking import _check_nesting

# Type numbers of tests begin at 60,000.


@message(60_000)
@dataclass(frozen=True, slots=True)
class Inner:
    number: Annotated[int, Range(-5, 5)]


@message(60_001)
@dataclass(frozen=True, slots=True)
class Everything:
    small: Annotated[int, Range(0, 255)]
    wide: Annotated[int, Range(-(2**63), 2**64 - 1)]
    fixed: Annotated[bytes, Size(4)]
    loose: Annotated[bytes, Size(max=8)]
    text: Annotated[str, Size(max=8)]
    flag: bool
    real: float
    many: Annotated[tuple[Annotated[int, Range(0, 9)], ...], Count(3)]
    inner: Inner
    key: Annotated[Key, KeyBytes(16)]
    maybe: Inner | None
    inners: Annotated[tuple[Inner, ...], Count(2)]
    added: Annotated[int, Range(0, 9)] = 7


@message(60_002, extensible=True)
@dataclass(frozen=True, slots=True)
class Growing:
    first: Annotated[int, Range(0, 9)]
    second: Annotated[str, Size(max=4)] = "old"


key_items = st.one_of(st.integers(-(2**63), 2**64 - 1), st.binary(max_size=3), st.text("ab", max_size=3))
keys = st.lists(key_items, min_size=1, max_size=2).map(tuple).filter(lambda key: len(msgpack.packb(key)) <= 16)
inners = st.integers(-5, 5).map(Inner)
everythings = st.builds(
    Everything,
    small=st.integers(0, 255),
    wide=st.integers(-(2**63), 2**64 - 1),
    fixed=st.binary(min_size=4, max_size=4),
    loose=st.binary(max_size=8),
    text=st.text(st.characters(codec="utf-8"), max_size=2),
    flag=st.booleans(),
    real=st.floats(allow_nan=False, allow_infinity=False),
    many=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    inner=inners,
    key=keys,
    maybe=st.none() | inners,
    inners=st.lists(inners, max_size=2).map(tuple),
    added=st.integers(0, 9),
)
GOOD = Everything(1, -1, b"four", b"", "text", True, 1.5, (1, 2), Inner(3), (1, b"k"), None, (Inner(0),))


@given(everythings)
def test_what_goes_in_comes_out(value: Everything) -> None:
    data = encode(value)
    assert decode(data, Everything) == value
    assert decode(memoryview(data), Inner, Everything, Growing) == value
    # Referee: the plain msgpack of the documented form.
    fields = [getattr(value, field.name) for field in dataclasses.fields(value)]

    def plain(item: Any) -> Any:
        if isinstance(item, Inner):
            return [60_000, item.number]
        return [plain(part) for part in item] if isinstance(item, tuple) else item

    assert data == msgpack.packb([60_001, *map(plain, fields)], use_bin_type=True)


BAD: list[tuple[str, Any]] = [
    ("small", 256),
    ("small", -1),
    ("small", True),
    ("small", 1.0),
    ("small", "1"),
    ("small", None),
    ("fixed", b"fiv"),
    ("fixed", b"fives"),
    ("fixed", "four"),
    ("loose", b"x" * 9),
    ("text", "x" * 9),
    ("text", "\u20ac\u20ac\u20ac"),  # nine bytes in three characters
    ("text", b"text"),
    ("flag", 1),
    ("flag", None),
    ("real", math.nan),
    ("real", math.inf),
    ("real", True),
    ("real", "1"),
    ("many", (1, 2, 3, 4)),
    ("many", (10,)),
    ("many", 1),
    ("many", None),
    ("inner", None),
    ("inner", (60_001, 3)),
    ("inner", (60_000,)),
    ("inner", (60_000, 3, 4)),
    ("inner", (60_000, 6)),
    ("inner", 3),
    ("key", ()),
    ("key", (True,)),
    ("key", (None,)),
    ("key", (1.5,)),
    ("key", ((1,),)),
    ("key", (b"x" * 15,)),
    ("key", b"key"),
    ("maybe", 0),
    ("inners", (None,)),
    ("inners", ((60_000, 0),) * 3),
    ("added", 10),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_field_out_of_its_bounds(name: str, value: Any) -> None:
    names = [field.name for field in dataclasses.fields(Everything)]
    items = [60_001, 1, -1, b"four", b"", "text", True, 1.5, (1, 2), (60_000, 3), (1, b"k"), None, ((60_000, 0),), 7]
    assert decode(msgpack.packb(items), Everything) == GOOD
    items[1 + names.index(name)] = value
    with pytest.raises(RemoteProtocolError, match=f"Everything.{name}") as failure:
        decode(msgpack.packb(items), Everything)
    assert failure.value.code is Code.PROTOCOL and not failure.value.local
    if not isinstance(value, tuple) or name in ("many", "key"):
        with pytest.raises(LocalProtocolError, match=f"Everything.{name}"):
            encode(dataclasses.replace(GOOD, **{name: value}))


@pytest.mark.parametrize("value", [Inner(6), Inner("x"), Growing(1), (60_000, 3)])  # type: ignore[arg-type]
def test_a_nested_message_is_checked_when_we_send(value: Any) -> None:
    with pytest.raises(LocalProtocolError):
        encode(dataclasses.replace(GOOD, inner=value))
    with pytest.raises(LocalProtocolError):
        encode(dataclasses.replace(GOOD, inners=(value,)))


def test_a_lone_surrogate_is_our_mistake() -> None:
    with pytest.raises(LocalProtocolError):
        encode(dataclasses.replace(GOOD, text="\ud800"))


def test_growth() -> None:
    """Older senders leave a field out, newer ones add some; only the classes that say so take surplus."""
    assert decode(msgpack.packb([60_002, 1]), Growing) == Growing(1, "old")
    assert decode(msgpack.packb([60_002, 1, "new", [1, [2]], None]), Growing) == Growing(1, "new")
    with pytest.raises(RemoteProtocolError):
        decode(msgpack.packb([60_002]), Growing)
    full = [60_001, 1, -1, b"four", b"", "text", True, 1.5, [1, 2], [60_000, 3], [1, b"k"], None, [[60_000, 0]], 7]
    assert decode(msgpack.packb(full[:-1]), Everything) == GOOD
    for other in (full[:-2], [*full, 0], [60_001]):
        with pytest.raises(RemoteProtocolError):
            decode(msgpack.packb(other), Everything)


def test_the_type_decides_among_classes() -> None:
    assert decode(encode(Unslot(3)), Slot, Unslot) == Unslot(3)
    others: list[Any] = [[2, 3], [], None, 1, ["x", 1], [True, 1], [1.0, 1]]
    for data in map(msgpack.packb, others):
        with pytest.raises(RemoteProtocolError):
            decode(data, Slot, Done)
        with pytest.raises(RemoteProtocolError):
            decode(data, Slot)


def test_size_both_ways() -> None:
    data = encode(GOOD)
    encode(GOOD, max_bytes=len(data))
    decode(data, Everything, max_bytes=len(data))
    with pytest.raises(LocalProtocolError) as ours:
        encode(GOOD, max_bytes=len(data) - 1)
    with pytest.raises(RemoteProtocolError) as theirs:
        decode(data, Everything, max_bytes=len(data) - 1)
    assert ours.value.code is theirs.value.code is Code.TOO_LARGE


def test_only_messages_are_encoded() -> None:
    for value in (None, 3, {}, object(), Inner):
        with pytest.raises(LocalProtocolError, match="not a message"):
            encode(value)


# --- classes that cannot be messages


@dataclass(frozen=True, slots=True)
class Unbounded:
    value: int


def _with(hint: Any) -> Callable[[], Any]:
    def define() -> Any:
        return message(60_010)(dataclasses.make_dataclass("Made", [("value", hint)], frozen=True, slots=True))

    return define


@pytest.mark.parametrize(
    "hint",
    [
        int,
        bytes,
        str,
        tuple[int, ...],
        Annotated[int, Size(4)],
        Annotated[bytes, Range(0, 4)],
        Annotated[bytes, Size()],
        Annotated[bytes, Size(4, 4)],
        Annotated[tuple[int, ...], Count(4)],
        Annotated[tuple[bool, ...], Count(1025)],
        Annotated[tuple[bool, bool], Count(2)],
        Annotated[int, Range(0, 2**64)],
        Annotated[int, Range(0, 1), Range(0, 2)],
        dict[str, str],
        list[bool],
        Any,
        bool | float,
        bool | float | None,
        object,
        Unbounded,
    ],
)
def test_a_field_without_bounds_cannot_be_defined(hint: Any) -> None:
    with pytest.raises(TypeError):
        _with(hint)()


def test_a_class_that_could_change_is_no_message() -> None:
    for keywords in ({"frozen": True}, {"slots": True}):
        with pytest.raises(TypeError, match="frozen"):
            message(60_011)(dataclasses.make_dataclass("Loose", [("value", bool)], **keywords))
    with pytest.raises(TypeError):
        message(60_011)(type("Plain", (), {}))


def test_a_number_belongs_to_one_class() -> None:
    for number in (60_000, 1, -1, 65_536):
        with pytest.raises(ValueError, match=str(number)):
            message(number)(dataclasses.make_dataclass("Second", [("value", bool)], frozen=True, slots=True))


# --- the wire's own messages

KEY = (1, 2, b"origin", 4, 0)
GOLDEN: list[tuple[Any, str]] = [
    (
        SessionHello(1, b"bootboot", "plnode/0.1", ("chunks",), b"", "", 1 << 20, 256),
        "9901c408626f6f74626f6f74aa706c6e6f64652f302e3191a66368756e6b73c400a0ce00100000cd010000",
    ),
    (OpenBody(0, "px/1", 1, 65536, b""), "9500a470782f3101ce00010000c400"),
    (AcceptBody(65536), "91ce00010000"),
    (Slot(7, KEY, 1 << 20), "960107950102c4066f726967696e0400ce00100000c0c0"),
    (Slot(7, None, 4, b"12345678", b"\x01"), "960107c004c4083132333435363738c40101"),
    (Unslot(7), "920207"),
    (
        Begin(7, KEY, 3, 1, (2, 128), 0, 512, b"12345678", (9,)),
        "9a0307950102c4066f726967696e040003019202cc8000cd0200c40831323334353637389109",
    ),
    (Done(7, KEY, 24), "940407950102c4066f726967696e040018"),
    (Drop(7, KEY, 12), "940507950102c4066f726967696e04000c"),
    (Want(bytes(32), 24), "9306c420" + "00" * 32 + "18"),
    (Records((b"one", b"two")), "920792c4036f6e65c40374776f"),
    (Ask(3, (7, 300)), "9309039207cd012c"),
    (Have(7, b"12345678", b"\x05"), "940a07c4083132333435363738c40105"),
    (Posted(8), "920b08"),
    (SeedListAsk(bytes(32), 7), "9330c420" + "00" * 32 + "07"),
    (SeedListAnswer(b"list"), "9231c4046c697374"),
    (PeerRecord(("/ip4/1.2.3.4/tcp/5",)), "990891b22f6970342f312e322e332e342f7463702f3590900101a7756e6b6e6f776e9000"),
]


@pytest.mark.parametrize(("value", "data"), GOLDEN, ids=[type(value).__name__ for value, _ in GOLDEN])
def test_golden_bytes(value: Any, data: str) -> None:
    """The bytes of the protocol; if one of these has to change, the protocol has changed."""
    assert encode(value).hex() == data
    assert decode(bytes.fromhex(data), type(value)) == value


def test_bodies_of_frames_carry_no_type() -> None:
    assert FRAME == 0
    assert unpack(encode(AcceptBody(5))) == (5,)


def test_the_largest_peer_exchange_fits_a_message() -> None:
    assert len(encode(Records((b"x" * 2048,) * 24))) <= 65_536


# --- hostile bytes

TEMPLATES = [encode(value) for value, _ in GOLDEN] + [encode(GOOD)]
CLASSES = [type(value) for value, _ in GOLDEN] + [Everything]


@given(st.data())
def test_changed_bytes_give_a_message_or_a_protocol_error(data: st.DataObject) -> None:
    which = data.draw(st.integers(0, len(TEMPLATES) - 1))
    raw = bytearray(TEMPLATES[which])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw)))
        raw[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    try:
        value = decode(bytes(raw), CLASSES[which])
    except RemoteProtocolError:
        return
    assert encode(value)  # whatever was let in can be sent on


@pytest.mark.parametrize("raw", TEMPLATES)
def test_every_truncation_and_every_surplus_byte(raw: bytes) -> None:
    for size in range(len(raw)):
        with pytest.raises(RemoteProtocolError):
            unpack(raw[:size])
    for surplus in (b"\x00", b"\xc0", b"\xc1", raw):
        with pytest.raises(RemoteProtocolError):
            unpack(raw + surplus)


HUGE = (2**31 - 1).to_bytes(4, "big")
HOSTILE = {
    "array of 2^31 - 1": b"\xdd" + HUGE,
    "array of 1,025": b"\xdc\x04\x01" + b"\xc0" * 1025,
    "map of 2^31 - 1": b"\xdf" + HUGE,
    "empty map": b"\x80",
    "map": b"\x81\x01\x02",
    "map inside": b"\x91\x81\x01\x02",
    "bin of 2^31 - 1": b"\xc6" + HUGE,
    "str of 2^31 - 1": b"\xdb" + HUGE,
    "ext of 2^31 - 1": b"\xc9" + HUGE + b"\x01",
    "empty ext": b"\xc7\x00\x01",
    "fixext": b"\xd4\x01\x00",
    "timestamp": b"\xd6\xff\x00\x00\x00\x00",
    "timestamp of 12 bytes": b"\xc7\x0c\xff" + bytes(12),
    "reserved byte": b"\xc1",
    "nine deep": b"\x91" * 9 + b"\xc0",
    "a thousand deep": b"\x91" * 1000 + b"\xc0",
    "sixty thousand deep": b"\x91" * 60_000 + b"\xc0",
    "wide and deep": b"\xdc\x04\x00" * 20_000,
    "wide, deep and without end": b"\xdd\x00\x00\x04\x00" * 12_000,
    "deep behind a bin": b"\x92\xc4\x02\x91\x91" + b"\x91" * 20 + b"\xc0",
    "not utf-8": b"\xa2\xff\xfe",
    "surrogate": b"\xa3\xed\xa0\x80",
    "nothing": b"",
    "more items than any message": b"\xdc\x04\x00" + (b"\x9f" + b"\xc0" * 15) * 1024,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_wire_6_hostile_bytes_are_refused_in_little_memory(name: str) -> None:
    raw = HOSTILE[name]
    if name == "more items than any message":
        raw = b"\x94" + raw * 3 + b"\xc0"
    with pytest.raises(RemoteProtocolError):
        unpack(raw)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        with pytest.raises(RemoteProtocolError):
            unpack(raw)
        assert tracemalloc.get_traced_memory()[1] - before < 256 * 1024
    finally:
        tracemalloc.stop()


def test_what_is_allowed_to_the_last() -> None:
    """Negative controls of the limits above: one less is accepted."""
    assert unpack(b"\x91" * 7 + b"\x91\xc0") is not None
    assert unpack(b"\x91" * 8 + b"\x90") is not None  # an empty array nests nothing
    assert len(unpack(b"\xdc\x04\x00" + b"\xc0" * 1024)) == 1024
    assert unpack(b"\x92\xc4\x40" + b"\x91" * 64 + b"\xc0") == (b"\x91" * 64, None)
    assert unpack(b"\xc6\x00\x00\xff\xfb" + bytes(65_531)) == bytes(65_531)


leaves = (st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.binary(max_size=300), st.text(max_size=300))
nested: st.SearchStrategy[Any] = st.recursive(st.one_of(leaves), lambda inner: st.lists(inner, max_size=18))


def _depth(value: Any) -> int:
    return 1 + max(map(_depth, value)) if isinstance(value, list) and value else 0


@given(nested)
def test_the_walk_finds_the_nesting_of_any_value(value: Any) -> None:
    """Referee: the depth of the Python value that was packed."""
    raw = msgpack.packb(value)
    if _depth(value) <= 8:
        _check_nesting(raw)
        unpack(raw)
    else:
        with pytest.raises(ValueError, match="nested"):
            _check_nesting(raw)
        with pytest.raises(RemoteProtocolError):
            unpack(raw)


def test_the_walk_finds_any_depth() -> None:
    rng = random.Random(8)
    for depth in range(40):
        value: Any = None
        for _ in range(depth):
            value = [rng.randbytes(rng.randrange(40)) for _ in range(rng.randrange(3))] + [value] + ["x"] * rng.randrange(20)
        raw = msgpack.packb(value)
        if depth <= 8:
            unpack(raw)
        else:
            with pytest.raises(RemoteProtocolError, match="nested"):
                unpack(raw)
