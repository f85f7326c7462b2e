"""How many bulk connections a peer pair should have.  Sans-IO: figures and the time in, a number out.

Why more than one at all.  One TCP connection under a congestion control that takes loss for congestion carries
~MSS/RTT x sqrt(1.5/p) (Mathis et al. 1997; cubic somewhat more): 20 Mbit/s at 80 ms and 0.1 % loss, whatever the line could do.  n
connections carry n times that.  Linux also caps what one socket keeps unacknowledged at `tcp_wmem` (4 MiB: 40 MB/s at 100 ms).  Why
not always four: each costs memory at both ends, and n connections take n shares of a household's line from everybody else in it.

So the number follows what is measured and not a constant:

* It starts at 1 under bbr, which does not take loss for congestion, and at 2 otherwise; at 0 within one machine, where
  nothing is lost and a second socket would only cost wake-ups.
* When chunks have waited for `lane_wait_s` running, the rate is taken for `lane_trial_s`, then one more is tried, and after as long
  again it has to have brought `lane_gain`.  Both are means over the whole time, since single seconds of a sawtooth differ by a
  third; and the wait comes first, since a slow start is faster than what it settles to: compared with that no lane would stay.
* If it has not, it goes, and the next try is `lane_retry_s` away.  The line was full, or the other end is slow: a lane more
  would be one more to share it with.

Source: the project's wire specification, section "Link, lanes, sockets, transports"; the figures are its and lab measurements.
"""

from __future__ import annotations

from enum import Enum

from wire.limits import Limits
from wire.path import DIRECT, Path, PathKind


class Phase(Enum):
    """STEADY: nothing is tried.  WAITING: chunks wait, but not for long.  MEASURED: the rate before a trial is taken.  TRIAL: the
    newest lane has to show.
    """

    STEADY = "steady"
    WAITING = "waiting"
    MEASURED = "measured"
    TRIAL = "trial"


class LaneCount:
    """`sample` a few times a second while a channel exists; `target` is how many lanes there should be."""

    def __init__(self, limits: Limits, *, congestion: str, same_machine: bool, path: Path = DIRECT) -> None:
        """A relayed pair has one bulk connection and never another: the relay's rate is shared by pair.  A punched one has
        few: each is a hole of its own."""
        self._limits = limits
        most = min(limits.lanes_max, {PathKind.RELAYED: 1, PathKind.PUNCHED: limits.lanes_punched_max}.get(path.kind, limits.lanes_max))
        start = limits.lanes_start_bbr if congestion.startswith("bbr") else limits.lanes_start
        self.target = 0 if same_machine else min(start, most)
        self._most = 0 if same_machine else most
        self.phase = Phase.STEADY
        self._since = 0.0  # of the phase
        self._bytes = 0  # at its start
        self._base = 0.0  # bytes per second before the trial
        self._quiet_until = 0.0

    def sample(self, now: float, bytes_out: int, *, waiting: bool, lanes: int) -> int:
        """`bytes_out`: sent in all, ascending; `waiting`: chunks wait for a lane; `lanes`: how many there are.  Gives the target."""
        limits = self._limits
        if not waiting:
            # An idle pause says nothing about a lane on trial: it stays.
            self.phase = Phase.STEADY
            return self.target
        if self.phase is Phase.STEADY:
            if self.target < self._most and lanes >= self.target and now >= self._quiet_until:
                self._begin(Phase.WAITING, now, bytes_out)
        elif self.phase is Phase.WAITING:
            if now - self._since >= limits.lane_wait_s:
                self._begin(Phase.MEASURED, now, bytes_out)
        elif self.phase is Phase.MEASURED:
            if now - self._since >= limits.lane_trial_s:
                self._base = (bytes_out - self._bytes) / (now - self._since)
                self.target += 1
                self._begin(Phase.TRIAL, now, bytes_out)
        elif lanes < self.target:
            self._begin(Phase.TRIAL, now, bytes_out)  # it is still being dialled
        elif now - self._since >= limits.lane_trial_s:
            rate = (bytes_out - self._bytes) / (now - self._since)
            self.phase = Phase.STEADY
            if rate < self._base * (1.0 + limits.lane_gain):
                self.target -= 1
                self._quiet_until = now + limits.lane_retry_s
        return self.target

    def failed(self, now: float) -> None:
        """No lane could be had: what there is carries everything until `lane_retry_s` from now."""
        self.phase = Phase.STEADY
        self._quiet_until = now + self._limits.lane_retry_s

    def _begin(self, phase: Phase, now: float, bytes_out: int) -> None:
        self.phase, self._since, self._bytes = phase, now, bytes_out
