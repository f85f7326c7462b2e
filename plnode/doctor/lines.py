"""The verdict about a line to a member: its round trip, what it carries, and over how many lanes.

Why the number of lanes is worth a word.  Where more lanes carry much more, it is not the line that is slow: each TCP connection is
held back, by loss (under cubic and its like) or by what its buffers hold in a long round trip.  A node opens further lanes by itself
as they prove useful, so that alone is nothing to mend; but where loss is the reason, under bbr one lane would do, at once and with less
memory.  Where more bring nothing, the line is full or the other end is slow, and no setting helps.

What a peer did wrong stands in the same line: a figure that was found before is a fact, but not the whole one.
"""

from __future__ import annotations

from plnode.doctor.checks import Check, Verdict
from plnode.doctor.facts import Line, OverLanes
from plnode.observe.lines import quantity, short_id

__all__ = ["bandwidth"]

SLOW_BYTES_PER_S = 1e6 / 8  # below a megabit even small tensors take seconds
MUCH = 1.5  # times what one lane carries: a congestion control that loss holds back, and not the spread of a measurement
BUFFERS_BYTES = 2 << 20  # half of Linux's largest tcp_wmem: with so much under way it is the buffers that hold it back, under bbr as well
AGAIN = "look again in a minute: not every number of lanes was measured"


def bandwidth(line: Line, bytes_per_token: float) -> Check:
    """`bytes_per_token`: the most that a stage of the run sends on for one token, 0 if it sends nothing."""
    verdict, found, fix = _judged(line, bytes_per_token)
    measured = {
        "rtt_s": line.rtt_s,
        "best_lanes": line.lanes,
        "lanes": [
            {"lanes": over.lanes, "up_bytes_per_s": over.up_bytes_per_s, "down_bytes_per_s": over.down_bytes_per_s} for over in line.over
        ],
        "ended": line.ended,
        "full": line.full,
    }
    return Check(f"line to {short_id(line.peer_id)}", verdict, found, fix, None if line.refused else measured)


def _judged(line: Line, bytes_per_token: float) -> tuple[Verdict, str, str]:
    if line.refused:
        return Verdict.SKIPPED, line.refused, ""
    rtt = "not known" if line.rtt_s is None else f"{line.rtt_s * 1000:.3g} ms"
    over = f"over {line.lanes} lane(s)" if line.lanes else "over one connection"
    both = _both(line.up_bytes_per_s, line.down_bytes_per_s)
    found = f"{line.path} {over}{f' of {line.congestion}' if line.congestion else ''}, round trip {rtt}, {both}"
    rates = [rate for rate in (line.up_bytes_per_s, line.down_bytes_per_s) if rate is not None]
    if len(rates) < 2:
        fix = AGAIN if line.ended else "too little came through: is something else using the line?"
        return Verdict.WARNING, found + _ended(line), fix
    if bytes_per_token:
        found += f"; enough for {quantity(float(f'{min(rates) / bytes_per_token:.3g}'))} tokens/s"
    found += _comparison(line) + _ended(line)
    if min(rates) < SLOW_BYTES_PER_S:
        return Verdict.WARNING, found, "slower than a megabit a second: the pipeline waits for this node"
    if line.ended:
        return Verdict.WARNING, found, AGAIN
    if line.missing:
        return Verdict.WARNING, found, "let firewalls here and at the peer allow 5 connections from one machine to another"
    if _times_one(line) >= MUCH and not line.congestion.startswith("bbr") and not _buffers(line):
        return Verdict.WARNING, found, "with bbr here and at the peer one lane would fill the line (see congestion)"
    return Verdict.OK, found, ""


def _both(up: float | None, down: float | None) -> str:
    return f"{_mbit(up)} up and {_mbit(down)} down"


def _mbit(rate: float | None) -> str:
    return "not known" if rate is None else f"{rate * 8 / 1e6:.3g} Mbit/s"


def _comparison(line: Line) -> str:
    """What the other numbers of lanes carry, and why that is so."""
    if line.one_only:
        return "; the peer measures over one lane only"
    lacking = f"; {line.missing} lane(s) of those wanted could not be had" if line.missing else ""
    if line.full:
        lacking += f"; more than {len(line.over)} lane(s) were not tried, so long is the queue in this line"
    if len(line.over) < 2:
        return lacking
    others = ", ".join(f"{over.lanes}: {_short(over)}" for over in line.over)
    if line.lanes == 1:
        why = "one is best: more bring nothing, so it fills the line"
    else:
        why = f"{line.lanes} are best, {_times_one(line):.2g} times one: loss or a long way holds back each connection, not the line"
    return f"{lacking}; Mbit/s up/down by lanes {others}; {why}"


def _short(over: OverLanes) -> str:
    return "/".join("?" if rate is None else f"{rate * 8 / 1e6:.3g}" for rate in (over.up_bytes_per_s, over.down_bytes_per_s))


def _times_one(line: Line) -> float:
    """How much more the best number of lanes carries than one, in the direction that gains most; 1 if that is not known."""
    if not line.over:
        return 1.0
    first = line.over[0]
    pairs = ((line.up_bytes_per_s, first.up_bytes_per_s), (line.down_bytes_per_s, first.down_bytes_per_s))
    return max((best / one for best, one in pairs if best is not None and one), default=1.0)


def _buffers(line: Line) -> bool:
    """Whether one lane has so much under way that its buffers hold it back."""
    first = line.over[0]
    return (line.rtt_s or 0.0) * max(first.up_bytes_per_s or 0.0, first.down_bytes_per_s or 0.0) >= BUFFERS_BYTES


def _ended(line: Line) -> str:
    return f"; ended early: {line.ended}" if line.ended else ""
