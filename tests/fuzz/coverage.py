"""Which lines of some files have run: the signal that leads the fuzzer.

Only news counts.  A line that has run once is of no more interest, so both collectors get out of the way: `sys.monitoring` (from
Python 3.12) turns the event of that line off, and the tracer of older versions no longer enters functions whose lines it has all seen.
A run over known ground then costs next to nothing.

`fresh` forgets what was seen, for measuring one input by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import CodeType, FrameType
from typing import Any

Line = tuple[str, int]  # file, number


class Lines:
    """Lines of the files below `roots` (path prefixes), while `with lines:` runs.  `take` returns those that are new."""

    def __init__(self, roots: Iterable[str]) -> None:
        self._roots = tuple(roots)
        self._new: set[Line] = set()
        self._seen: set[Line] = set()

    def wanted(self, code: CodeType) -> bool:
        return code.co_filename.startswith(self._roots)

    def take(self) -> frozenset[Line]:
        """Lines that ran for the first time since `fresh` (or ever), since the last call."""
        new, self._new = frozenset(self._new), set()
        return new

    def fresh(self) -> None:
        self._new.clear()
        self._seen.clear()

    @property
    def count(self) -> int:
        return len(self._seen)

    def _hit(self, code: CodeType, line: int) -> None:
        where = code.co_filename, line
        if where not in self._seen:
            self._seen.add(where)
            self._new.add(where)

    def __enter__(self) -> Lines:
        raise NotImplementedError

    def __exit__(self, *_: object) -> None:
        raise NotImplementedError


class Traced(Lines):
    """By `sys.settrace`, for Python 3.11."""

    def __init__(self, roots: Iterable[str]) -> None:
        super().__init__(roots)
        self._left: dict[CodeType, set[int]] = {}
        self._before: Any = None

    def fresh(self) -> None:
        super().fresh()
        self._left.clear()

    def _on_call(self, frame: FrameType, _event: str, _arg: object) -> Any:
        code = frame.f_code
        left = self._left.get(code)
        if left is None:
            # The line of the `def` itself makes no event inside the function.
            left = {line for _, _, line in code.co_lines() if line and line != code.co_firstlineno} if self.wanted(code) else set()
            self._left[code] = left
        if not left:
            return None

        def on_line(frame: FrameType, event: str, _arg: object) -> Any:
            if event == "line" and frame.f_lineno in left:
                left.discard(frame.f_lineno)
                self._hit(code, frame.f_lineno)
            return on_line if left else None

        return on_line

    def __enter__(self) -> Lines:
        self._before = sys.gettrace()
        sys.settrace(self._on_call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)


class Monitored(Lines):
    """By `sys.monitoring`, from Python 3.12 on."""

    TOOL = 4  # the first number that belongs to nobody

    def __init__(self, roots: Iterable[str]) -> None:
        super().__init__(roots)
        self._api: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]

    def fresh(self) -> None:
        super().fresh()
        self._api.restart_events()

    def _on_line(self, code: CodeType, line: int) -> Any:
        if self.wanted(code):
            self._hit(code, line)
        return self._api.DISABLE

    def __enter__(self) -> Lines:
        api = self._api
        api.use_tool_id(self.TOOL, "tests.fuzz")
        api.register_callback(self.TOOL, api.events.LINE, self._on_line)
        api.set_events(self.TOOL, api.events.LINE)
        return self

    def __exit__(self, *_: object) -> None:
        self._api.set_events(self.TOOL, 0)
        self._api.free_tool_id(self.TOOL)


def lines_of(roots: Iterable[str]) -> Lines:
    """The collector that this Python has."""
    return Monitored(roots) if sys.version_info >= (3, 12) else Traced(roots)
