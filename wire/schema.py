"""Schema: dataclasses whose annotations say what a message may hold, and the checks built from them.

What goes wrong.  An integer from a stranger is a float, a bool or a string, or it is 2^63; a missing field becomes a default that
nobody meant; a list has a million items.  Hand-written checks forget one of them somewhere.

The way chosen.  A message is a frozen slotted dataclass whose annotations say what each field may hold; the checks are built from
them once a class, and `decode` is the only way in.  On the wire it is the array `[type, field, ...]`: arrays have no names to
repeat or reorder.  Every field is bounded; a class with an unbounded one cannot be defined.  The same checks run when we encode,
so that a mistake of ours is found here and not at the peer.

    @message(64)
    @dataclass(frozen=True, slots=True)
    class Ask:
        step: Annotated[int, Range(0, 2**32 - 1)]
        digest: Annotated[bytes, Size(32)]
        names: Annotated[tuple[Annotated[str, Size(max=64)], ...], Count(16)] = ()

Growth: a new field is appended and has a default, so that what an older node sends is still read.  Surplus items at the end, what
a newer node sends, are accepted by classes marked `extensible` only; elsewhere they are a violation.

A small message costs 1-3 us each way (figure: `python -m timeit` on `decode(encode(Done(...)), Done)`, one 2.6 GHz core).  Hence
closures in tuples that `map` calls, and no generic walk over types at run time.

Type numbers: 1..63 belong to `wire`, 64 and above to its users; FRAME is for bodies whose frame type already says what they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from operator import call
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints, overload

from wire.errors import Code, LocalProtocolError, RemoteProtocolError, printable
from wire.unpacking import ARRAY_MAX, MESSAGE_MAX_BYTES, pack, unpack

FRAME = 0  # type number of a body that carries none
TYPE_MAX = 0xFFFF

Key = tuple[int | bytes | str, ...]
"""Names a tensor; hashable and equal only to itself (bools, floats and None are not allowed inside)."""


@dataclass(frozen=True, slots=True)
class Range:
    """Bounds of an integer, both included."""

    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes of a `bytes` or, as UTF-8, of a `str`: exactly `exact`, or at most `max`."""

    exact: int | None = None
    max: int | None = None


@dataclass(frozen=True, slots=True)
class Count:
    """At most `max` items of a tuple."""

    max: int


@dataclass(frozen=True, slots=True)
class KeyBytes:
    """Bytes of a `Key` as a msgpack array, at most."""

    max: int


class _Unfit(ValueError):
    """A value that its field does not hold."""


Check = Callable[[Any], Any]
M = TypeVar("M")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
E = TypeVar("E")


def _check_int(bounds: Range) -> Check:
    low, high = bounds.low, bounds.high

    def check(value: Any) -> int:
        if (type(value) is int or (isinstance(value, int) and type(value) is not bool)) and low <= value <= high:
            return value
        raise _Unfit(f"an int from {low} to {high}")

    return check


def _check_bytes(size: Size) -> Check:
    low, high = (0, size.max) if size.exact is None else (size.exact, size.exact)
    assert high is not None

    def check(value: Any) -> bytes:
        if type(value) is bytes and low <= len(value) <= high:
            return value
        raise _Unfit(f"{high} bytes" if low == high else f"at most {high} bytes")

    return check


def _check_str(size: Size) -> Check:
    low, high = (0, size.max) if size.exact is None else (size.exact, size.exact)
    assert high is not None

    def check(value: Any) -> str:
        if isinstance(value, str):
            length = len(value) if value.isascii() else len(value.encode())
            if low <= length <= high:
                return value
        raise _Unfit(f"a str of at most {high} bytes")

    return check


def _check_bool(value: Any) -> bool:
    if type(value) is bool:
        return value
    raise _Unfit("a bool")


def _check_float(value: Any) -> float:
    if (type(value) is float or type(value) is int) and math.isfinite(value):
        return float(value)
    raise _Unfit("a finite float")


def _check_key(bound: KeyBytes) -> Check:
    def check(value: Any) -> Key:
        if type(value) is tuple and value and len(value) <= bound.max:
            for item in value:
                if not (type(item) is int or type(item) is bytes or type(item) is str):
                    break
            else:
                if len(pack(value)) <= bound.max:
                    return value
        raise _Unfit(f"a key of at most {bound.max} bytes")

    return check


def _check_tuple(item: Check, count: Count) -> Check:
    def check(value: Any) -> tuple[Any, ...]:
        if type(value) is tuple and len(value) <= count.max:
            return tuple([item(entry) for entry in value])
        raise _Unfit(f"an array of at most {count.max}")

    return check


def _optional(inner: Check) -> Check:
    return lambda value: None if value is None else inner(value)


@dataclass(frozen=True, slots=True)
class _Codec:
    """The checks of one class, both ways."""

    cls: type[Any]
    number: int
    extensible: bool
    names: tuple[str, ...]
    required: int
    reads: tuple[Check, ...]
    writes: tuple[Check, ...]

    def read(self, items: Any) -> Any:
        """A message from a parsed array; raises _Unfit."""
        if type(items) is not tuple:
            raise _Unfit("an array")
        if self.number:
            if not items or type(items[0]) is not int or items[0] != self.number:
                raise _Unfit(f"type {self.number}")
            items = items[1:]
        count = len(items)
        if count != len(self.reads):
            if count < self.required:
                raise _Unfit(f"{self.required} fields or more, not {count}")
            if count > len(self.reads) and not self.extensible:
                raise _Unfit(f"at most {len(self.reads)} fields, not {count}")
        try:
            return self.cls(*map(call, self.reads, items))
        except _Unfit:
            raise self._named(self.reads, items) from None

    def write(self, value: Any) -> tuple[Any, ...]:
        """The array of a message; raises _Unfit."""
        if type(value) is not self.cls:
            raise _Unfit(f"a {self.cls.__name__}")
        items = [getattr(value, name) for name in self.names]
        try:
            checked = map(call, self.writes, items)
            return (self.number, *checked) if self.number else tuple(checked)
        except _Unfit:
            raise self._named(self.writes, items) from None

    def _named(self, checks: tuple[Check, ...], items: Any) -> _Unfit:
        """Which field it was; only a failure pays for knowing."""
        for name, check, item in zip(self.names, checks, items, strict=False):
            try:
                check(item)
            except _Unfit as unfit:
                return _Unfit(f"{self.cls.__name__}.{name} to be {unfit}")
        return _Unfit(self.cls.__name__)


_CODECS: dict[type[Any], _Codec] = {}
_NUMBERS: dict[int, type[Any]] = {}


def _checks_for(hint: Any, bound: Any = None) -> tuple[Check, Check]:
    """(read, write) for one annotation; raises TypeError for one that is not bounded or not known."""
    origin = get_origin(hint)
    if origin is Annotated:
        inner, *marks = get_args(hint)
        bounds = [mark for mark in marks if isinstance(mark, Range | Size | Count | KeyBytes)]
        if len(bounds) > 1 or bound is not None:
            raise TypeError("one bound a type")
        return _checks_for(inner, bounds[0] if bounds else None)
    if hint in _CODECS:
        return _CODECS[hint].read, _CODECS[hint].write
    if origin in (Union, UnionType):
        inners = [arg for arg in get_args(hint) if arg is not NoneType]
        if len(inners) != 1 or len(inners) == len(get_args(hint)):
            raise TypeError("of unions only `T | None` is known")
        read, write = _checks_for(inners[0], bound)
        return _optional(read), _optional(write)
    if origin is tuple and isinstance(bound, KeyBytes):
        return _check_key(bound), _check_key(bound)
    if origin is tuple and isinstance(bound, Count) and bound.max <= ARRAY_MAX and get_args(hint)[1:] == (Ellipsis,):
        read, write = _checks_for(get_args(hint)[0])
        return _check_tuple(read, bound), _check_tuple(write, bound)
    check: Check
    if hint is int and isinstance(bound, Range) and -(2**63) <= bound.low <= bound.high < 2**64:
        check = _check_int(bound)
    elif hint is bytes and isinstance(bound, Size) and (bound.exact is None) != (bound.max is None):
        check = _check_bytes(bound)
    elif hint is str and isinstance(bound, Size) and (bound.exact is None) != (bound.max is None):
        check = _check_str(bound)
    elif hint is bool and bound is None:
        check = _check_bool
    elif hint is float and bound is None:
        check = _check_float
    else:
        raise TypeError(f"{hint} needs its bound (Range, Size, Count <= {ARRAY_MAX}), or is no type of a field")
    return check, check


def message(number: int, *, extensible: bool = False) -> Callable[[type[M]], type[M]]:
    """Make a message of a frozen, slotted dataclass.  Stands above `@dataclass`.

    `number`: its type, once in the whole process, or FRAME for none.  `extensible`: surplus items at the end are ignored.
    Raises TypeError for a field without bounds, ValueError for a number that another class has.
    """

    def make(cls: type[M]) -> type[M]:
        if not is_dataclass(cls) or not cls.__dataclass_params__.frozen or "__slots__" not in cls.__dict__:  # type: ignore[attr-defined]
            raise TypeError(f"{cls.__name__} must be @dataclass(frozen=True, slots=True) below @message")
        owner = _NUMBERS.get(number)
        if not 0 <= number <= TYPE_MAX or (owner and number and owner.__qualname__ != cls.__qualname__):
            raise ValueError(f"{cls.__name__}: type number {number} is out of range or belongs to {owner}")
        hints = get_type_hints(cls, include_extras=True)
        reads, writes, required = [], [], 0
        for position, field in enumerate(fields(cls)):
            try:
                read, write = _checks_for(hints[field.name])
            except TypeError as error:
                raise TypeError(f"{cls.__name__}.{field.name}: {error}") from None
            reads.append(read)
            writes.append(write)
            if field.default is MISSING and field.default_factory is MISSING:
                required = position + 1
        names = tuple(field.name for field in fields(cls))
        _CODECS[cls] = _Codec(cls, number, extensible, names, required, tuple(reads), tuple(writes))
        _NUMBERS[number] = cls
        return cls

    return make


def encode(value: object, max_bytes: int = MESSAGE_MAX_BYTES) -> bytes:
    """The bytes of a message.  Raises LocalProtocolError: not a message, a field out of its bounds, over `max_bytes`."""
    codec = _CODECS.get(type(value))
    if codec is None:
        raise LocalProtocolError(f"{type(value).__name__} is not a message")
    try:
        data = pack(codec.write(value))
    except (ValueError, TypeError) as error:  # ValueError: also a lone surrogate in a str
        raise LocalProtocolError(f"expected {error}") from None
    if len(data) > max_bytes:
        raise LocalProtocolError(f"{type(value).__name__} has {len(data)} bytes, at most {max_bytes}", code=Code.TOO_LARGE)
    return data


@overload
def decode(data: bytes | memoryview, first: type[A], /, *, max_bytes: int = ...) -> A: ...
@overload
def decode(data: bytes | memoryview, first: type[A], second: type[B], /, *, max_bytes: int = ...) -> A | B: ...
@overload
def decode(
    data: bytes | memoryview, first: type[A], second: type[B], third: type[C], /, *, max_bytes: int = ...
) -> A | B | C: ...
@overload
def decode(
    data: bytes | memoryview, first: type[A], second: type[B], third: type[C], fourth: type[D], /, *, max_bytes: int = ...
) -> A | B | C | D: ...
@overload
def decode(
    data: bytes | memoryview, first: type[A], second: type[B], third: type[C], fourth: type[D], fifth: type[E], /,
    *, max_bytes: int = ...,
) -> A | B | C | D | E: ...  # fmt: skip
@overload
def decode(data: bytes | memoryview, /, *classes: type[M], max_bytes: int = ...) -> M: ...
def decode(data: bytes | memoryview, /, *classes: type[Any], max_bytes: int = MESSAGE_MAX_BYTES) -> Any:
    """The message in `data`, which must be of one of `classes`.  Raises RemoteProtocolError (PROTOCOL or TOO_LARGE)."""
    items = unpack(data, max_bytes)
    if len(classes) == 1:
        codec = _CODECS[classes[0]]
    else:
        number = items[0] if type(items) is tuple and items and type(items[0]) is int else -1
        for cls in classes:
            codec = _CODECS[cls]
            if codec.number == number:
                break
        else:
            names = ", ".join(cls.__name__ for cls in classes)
            raise RemoteProtocolError(Code.PROTOCOL, f"message type {printable(str(number))}, expected {names}")
    try:
        return codec.read(items)
    except _Unfit as unfit:
        raise RemoteProtocolError(Code.PROTOCOL, f"{codec.cls.__name__}: expected {unfit}") from None
