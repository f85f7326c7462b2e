"""How fast a donor gives its state away while its training wants the line.

Theory.  The classes of the wire order what shares a connection; uploads to other peers share only the household's line, and there each
connection gets its part whatever it carries.  Twenty joiners would leave training a twentieth.  How long a piece took to send says
nothing: it goes into one of many buffers at once and crowds the line later.  So uploads are paced by bytes: while training waits the
line is full, hence what the node sends in that time *is* its rate, and uploads together take `SHARE` of it.  4 % keep a round within the
5 % by which it may take longer (JOIN-1); never less than `LEAST`, so that nobody who joins waits for ever.

Sans-IO: the counter of sent bytes and the time are arguments.
"""

from __future__ import annotations

SHARE = 0.04
LEAST = 8 << 10  # bytes/s
WINDOW_S = 1.0  # of a measurement: many records, and short against a round
SMOOTHING = 0.3  # of the newest


class Pace:
    """Call `look` often; `pause_s` after each piece."""

    def __init__(self) -> None:
        self.line: float | None = None  # bytes/s
        self._since: tuple[float, int] | None = None

    def look(self, sent_bytes: int, now: float, training_waits: bool) -> None:
        """`sent_bytes`: all that this node has sent so far."""
        if not training_waits:
            self._since = None  # the line may be idle: its rate shows nothing
        elif self._since is None:
            self._since = (now, sent_bytes)
        elif now - self._since[0] >= WINDOW_S:
            rate = (sent_bytes - self._since[1]) / (now - self._since[0])
            self.line = rate if self.line is None else self.line + SMOOTHING * (rate - self.line)
            self._since = (now, sent_bytes)

    def pause_s(self, piece_bytes: int) -> float:
        """How long nothing more may be uploaded after a piece, as long as training waits; before the first measurement a window."""
        return WINDOW_S if self.line is None else piece_bytes / max(SHARE * self.line, LEAST)
