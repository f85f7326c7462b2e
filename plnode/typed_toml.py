"""TOML into frozen dataclasses, strictly: every key known, every value of its type and within its bounds, or one clear refusal.

The run manifest and a contributor's settings are both tables of keys that people write by hand.  What goes wrong: a misspelt
key is silently ignored and the run trains something else; `"16"` is taken for 16, `true` for 1; a bad value surfaces an hour
later as a shape error on another machine.  So a dataclass is the schema: its annotations carry bounds (`Annotated[int,
Bounds(1, 64)]`), choices and a sentence for people (`Doc`), and `read_table` walks it.  An error names the key's path, what
was expected and what was found, and a misspelt key gets the nearest known one.

The schema language is deliberately small: int, float, bool, str, `tuple[int, ...]`, a nested dataclass (a TOML table), and `|
None` for a key that may be left out.  A float key takes a TOML integer (people write `clip = 1`), never the other way round.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from plnode.exits import BadInput

__all__ = ["Bounds", "Doc", "Hex", "KeyProblem", "OneOf", "Refusal", "Text", "describe", "doc_of", "read_table", "schema"]

T = TypeVar("T")
_MISSING: Any = object()


@dataclasses.dataclass(frozen=True, slots=True)
class Bounds:
    """Least and greatest value of a number, both allowed; `above` excludes the least itself."""

    least: float
    greatest: float
    above: bool = False

    def problem(self, value: Any) -> str | None:
        fine = (self.least < value if self.above else self.least <= value) and value <= self.greatest and math.isfinite(value)
        return None if fine else self.text()

    def text(self) -> str:
        if self.above:
            return f"above {_figure(self.least)}, at most {_figure(self.greatest)}"
        return f"from {_figure(self.least)} to {_figure(self.greatest)}"


@dataclasses.dataclass(frozen=True, slots=True)
class OneOf:
    """The words that a key may hold."""

    words: tuple[str, ...]

    def problem(self, value: Any) -> str | None:
        return None if value in self.words else self.text()

    def text(self) -> str:
        return "one of " + ", ".join(f'"{w}"' for w in self.words)


@dataclasses.dataclass(frozen=True, slots=True)
class Hex:
    """A hash written as `digits` lower-case hexadecimal digits."""

    digits: int

    def problem(self, value: Any) -> str | None:
        fine = len(value) == self.digits and all(c in "0123456789abcdef" for c in value)
        return None if fine else self.text()

    def text(self) -> str:
        return f"{self.digits} lower-case hexadecimal digits"


@dataclasses.dataclass(frozen=True, slots=True)
class Text:
    """A short printable text: it is shown on other people's screens, so control characters are refused."""

    least: int
    greatest: int

    def problem(self, value: Any) -> str | None:
        return None if self.least <= len(value) <= self.greatest and value.isprintable() else self.text()

    def text(self) -> str:
        return f"{self.least} to {self.greatest} printable characters"


@dataclasses.dataclass(frozen=True, slots=True)
class Doc:
    """A sentence for people; the commented file that `plnode run init` writes is made of these."""

    text: str


class KeyProblem(BadInput):
    """A key of a file is wrong.  `path` is the key's full path (`optimizer.lr`), `expected` and `got` are in words."""

    source = "the file"

    def __init__(self, path: str, expected: str, got: str, remedy: str = "") -> None:
        super().__init__(f"{self.source}: {path}: expected {expected}, got {got}", remedy)
        self.path = path
        self.expected = expected
        self.got = got


# Makes the error for (path, expected, got, remedy): an error class, or a function that adds where the value came from.
Refusal = Callable[[str, str, str, str], KeyProblem]


def read_table(
    table: Mapping[str, Any], into: type[T], refuse: Refusal, path: str = "", defaults: Mapping[str, Any] | None = None
) -> T:
    """Builds `into` from `table`.  Raises `refuse(path, expected, got, remedy)` at the first key that is wrong.

    `defaults` replaces the dataclass's own default for a key of this table (already of the right type).
    """
    hints = schema(into)
    for key in table:
        if key not in hints:
            near = difflib.get_close_matches(key, hints, n=1)
            known = f'a known key, perhaps "{near[0]}"' if near else "one of " + ", ".join(hints)
            raise refuse(_join(path, key), known, "an unknown key", "Take the key out, or correct its spelling.")
    values: dict[str, Any] = {}
    for field in dataclasses.fields(typing.cast(Any, into)):
        kind, checks, optional = hints[field.name]
        here = _join(path, field.name)
        if field.name in table:
            values[field.name] = _value(table[field.name], kind, checks, refuse, here)
        elif defaults is not None and field.name in defaults:
            values[field.name] = defaults[field.name]
        elif field.default is dataclasses.MISSING and not optional:
            raise refuse(here, describe(kind, checks), "nothing: the key is missing", f"Add `{field.name}`.")
    return into(**values)


def schema(cls: type[Any]) -> dict[str, tuple[Any, tuple[Any, ...], bool]]:
    """Field name -> (bare type, its checks and docs, whether the key may be left out)."""
    out = {}
    for name, hint in typing.get_type_hints(cls, include_extras=True).items():
        checks: tuple[Any, ...] = ()
        if typing.get_origin(hint) is typing.Annotated:
            hint, *rest = typing.get_args(hint)
            checks = tuple(rest)
        optional = False
        if typing.get_origin(hint) in (types.UnionType, typing.Union):
            (hint,) = (a for a in typing.get_args(hint) if a is not type(None))
            optional = True
        out[name] = (hint, checks, optional)
    return out


def doc_of(checks: tuple[Any, ...]) -> str:
    return next((c.text for c in checks if isinstance(c, Doc)), "")


def describe(kind: Any, checks: tuple[Any, ...]) -> str:
    """What a key expects, in words."""
    if dataclasses.is_dataclass(kind):
        return "a table"
    name = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}.get(kind, "a list of whole numbers")
    limits = [c.text() for c in checks if not isinstance(c, Doc)]
    return ", ".join([name, *limits]) if limits else name


def _value(value: Any, kind: Any, checks: tuple[Any, ...], refuse: Refusal, path: str) -> Any:
    expected = describe(kind, checks)
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise refuse(path, expected, _shown(value), "")
        return read_table(value, typing.cast(type[Any], kind), refuse, path)
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise refuse(path, expected, _shown(value), "")
        (item, _) = typing.get_args(kind)
        return tuple(_value(v, item, checks, refuse, f"{path}[{i}]") for i, v in enumerate(value))
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:  # not isinstance: bool is an int in Python, and `true` is no number of stages
        raise refuse(path, expected, _shown(value), "")
    for check in checks:
        if not isinstance(check, Doc) and check.problem(value) is not None:
            raise refuse(path, expected, _shown(value), "")
    return value


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _figure(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) < 1e15 else f"{value:g}"


def _shown(value: Any) -> str:
    """A value as TOML would write it, short: it may be anything that stands in the file."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, str):
        return '"' + (value if len(value) <= 60 else value[:57] + "...").encode("unicode_escape").decode() + '"'
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
