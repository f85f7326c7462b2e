"""Numbers for signed statements: each greater than all before, whatever the wall clock says.

Receivers accept only a greater number as newer.  What goes wrong: the clock of a node is set back, or its battery is empty, and
all its statements are stale for everybody until the old time is reached again.  So the last number is kept on disk.

What is on disk is a reservation up to a minute ahead, written before it is used: a node that seals once a second writes once a
minute, and a crash skips numbers instead of repeating them.  A disk that cannot be written does not stop the node: the numbers go
on from memory, and `failure` says why.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from wire.errors import LocalProtocolError

U64_MAX = 2**64 - 1
RESERVED_NUMBERS = 60_000  # one minute of the millisecond clock


class SequenceClock:
    """Numbers for this node's statements: each greater than any before, over restarts and clocks set back.

    path: the file that keeps the reservation, one decimal number; None = this process only.  One clock serves all domains.
    """

    def __init__(self, path: Path | str | None) -> None:
        self._path = None if path is None else Path(path)
        self._last = 0
        self.failure: OSError | ValueError | None = None
        """Why the file could not be read or written the last time; None when all is well."""
        if self._path is not None:
            try:
                self._last = int(self._path.read_text("ascii"))
            except FileNotFoundError:
                pass
            except (OSError, ValueError) as error:
                self.failure = error
        self._reserved = self._last

    @property
    def last(self) -> int:
        """The newest number given out (after a start: the newest that may have been)."""
        return self._last

    def next(self, now_unix: float) -> int:
        """`max(last + 1, unix milliseconds)`.  Raises LocalProtocolError when 64 bits are used up."""
        number = max(self._last + 1, int(now_unix * 1000))
        if number > U64_MAX:
            raise LocalProtocolError(f"no number after {self._last}")
        if number > self._reserved:
            self._reserve(min(number + RESERVED_NUMBERS, U64_MAX))
        self._last = number
        return number

    def at_least(self, seq: int) -> None:
        """The next number must be greater than `seq`: a statement of ours with that number was seen."""
        self._last = max(self._last, seq)

    def _reserve(self, number: int) -> None:
        self._reserved = number
        if self._path is None:
            return
        scratch = self._path.with_name(f".{self._path.name}.new")
        try:
            with open(scratch, "w", encoding="ascii") as file:
                file.write(str(number))
                file.flush()
                os.fsync(file.fileno())
            os.replace(scratch, self._path)
            self.failure = None
        except OSError as error:
            self.failure = error
            with suppress(OSError):
                scratch.unlink()
