"""How fast a donor gives its state away while its training wants the line.

Theory.  The classes of the wire order what shares a connection; uploads to other peers share only the household's line, and there each
connection gets its part whatever it carries.  Twenty joiners would leave training a twentieth.  How long a piece took to send says
nothing: it goes into one of many buffers at once and crowds the line later.  So uploads are paced by bytes: while training waits the
line is full, hence what the node sends in that time *is* its rate, and uploads together take `SHARE` of it.  3 % keep a round within the
5 % by which it may take longer (JOIN-1); never less than `LEAST`, so that nobody who joins waits for ever.

Sans-IO: the counter of sent bytes and the time are arguments.
"""

from __future__ import annotations

SHARE = 0.03
LEAST = 2 << 10  # bytes/s
WINDOW_S = 1.0  # of a measurement: many records, and short against a round
# A member of a round has nothing to send while it waits for the others' parts; its answer must then find the line's buffers empty.
HOLD_S = 10.0
SMOOTHING = 0.3  # of the newest


class Pace:
    """Call `look` often; `pause_s` after each piece while it says that training wants the line."""

    def __init__(self) -> None:
        self.line: float | None = None  # bytes/s
        self._since: tuple[float, int] | None = None
        self._waited_at = float("-inf")

    def look(self, sent_bytes: int, now: float, training_waits: bool) -> bool:
        """`sent_bytes`: all that this node has sent so far.  Whether training wants the line: it waits, or has just now."""
        if not training_waits:
            self._since = None  # the line may be idle: its rate shows nothing
            return now - self._waited_at < HOLD_S
        self._waited_at = now
        if self._since is None:
            self._since = (now, sent_bytes)
        elif now - self._since[0] >= WINDOW_S:
            rate = (sent_bytes - self._since[1]) / (now - self._since[0])
            self.line = rate if self.line is None else self.line + SMOOTHING * (rate - self.line)
            self._since = (now, sent_bytes)
        return True

    def pause_s(self, piece_bytes: int) -> float:
        """How long nothing more may be uploaded after a piece, as long as training waits; before the first measurement a window."""
        return WINDOW_S if self.line is None else piece_bytes / max(SHARE * self.line, LEAST)
