"""The verdicts as a person and as a program read them, and the exit code.

One line a check: a mark, the name, what was found; what to do stands on a line of its own below, because it is what is copied out.
The last line is the answer to the question that was asked.  Marks are words and not only colours: reports are pasted into chats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from plnode.doctor.checks import Check, Verdict
from plnode.exits import ExitCode

__all__ = ["Conclusion", "conclude", "document", "lines"]

_HOW = {
    "direct": "direct",
    "relayed": "through relays",
    "unreachable": "only with members that it can dial itself",
    "unknown": "whether others can dial it is not known yet",
}


@dataclass(frozen=True, slots=True)
class Conclusion:
    """`how`: direct, relayed, unreachable or unknown."""

    can: bool
    stages: tuple[int, ...]
    how: str
    text: str
    exit_code: ExitCode


def conclude(checks: Sequence[Check], stages: Sequence[int], how: str) -> Conclusion:
    """`stages`: which fit, or the one that is held."""
    bad = [check for check in checks if check.verdict is Verdict.BAD]
    if bad:
        # The first lines of one kind say it all: three dead seeds are one reason.
        reasons = list(dict.fromkeys(check.name.split()[0] for check in bad))
        first = next(check for check in bad if check.name.split()[0] == reasons[0])
        more = f"; also: {', '.join(reasons[1:])}" if reasons[1:] else ""
        text = f"cannot take part: {first.name}: {first.found}{more}"
        return Conclusion(False, tuple(stages), how, text, ExitCode.CANNOT_TAKE_PART)
    text = f"can take part as: {_numbers(stages)}, {_HOW.get(how, how)}"
    return Conclusion(True, tuple(stages), how, text, ExitCode.OK)


def _numbers(stages: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> "stage 0-2 or 5"."""
    spans: list[list[int]] = []
    for stage in stages:
        if spans and stage == spans[-1][1] + 1:
            spans[-1][1] = stage
        else:
            spans.append([stage, stage])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    return "stage " + " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def lines(check: Check) -> list[str]:
    """For a person."""
    found = [f"{check.verdict:<8} {check.name}: {check.found}"]
    return [*found, f"{'':<8} -> {check.fix}"] if check.fix else found


def document(checks: Sequence[Check], conclusion: Conclusion) -> dict[str, Any]:
    """For a program."""
    return {
        "checks": [_entry(check) for check in checks],
        "can_take_part": conclusion.can,
        "stages": list(conclusion.stages),
        "how": conclusion.how,
        "conclusion": conclusion.text,
        "exit_code": int(conclusion.exit_code),
    }


def _entry(check: Check) -> dict[str, Any]:
    """`measured` only where something was."""
    entry = {**asdict(check), "verdict": str(check.verdict)}
    if check.measured is None:
        del entry["measured"]
    return entry
