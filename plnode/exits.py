"""How a program of ours ends: exit codes that a supervisor can act on, and the one error that is the user's to mend.

Contributors write wrappers around a node.  If every end looks alike they guess from the text whether a restart helps, and the
text changes.  So each kind of end has its own code, the codes are listed here and nowhere else, and `restart_helps` says
which of them a supervisor should start again.  130 and 143 are the shell's own convention (128 + signal number); 2 is what
click and most Unix programs use for wrong usage.  `FOREIGN` are codes that a program of ours never returns and its starter shows.

`BadInput` is the only exception that the command line turns into a message without a traceback.  It says what happened, and
what to do about it; anything else that escapes is a fault of this program and keeps its traceback.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

__all__ = ["FOREIGN", "MEANINGS", "BadInput", "ExitCode", "Outcome", "explain", "restart_helps"]


class ExitCode(IntEnum):
    OK = 0
    INTERNAL = 1
    BAD_INPUT = 2
    NODE_DIED = 3
    REFUSED = 4
    NO_PROGRESS = 5
    NO_MEMORY = 6
    DIVERGED = 7
    CANNOT_TAKE_PART = 8
    UNSOUND = 9
    INTERRUPTED = 130
    TERMINATED = 143


MEANINGS: dict[int, str] = {
    ExitCode.OK: "The work is done, or the node was told to stop (SIGTERM) and has left the swarm.",
    ExitCode.INTERNAL: "A fault of this program; the traceback is on stderr.",
    ExitCode.BAD_INPUT: "A file, setting or flag is wrong; the message says which and how to mend it.",
    ExitCode.NODE_DIED: "A node of the swarm ended before the run did (`plnode demo`).",
    ExitCode.REFUSED: "The swarm refused this node: another run, excluded, or too old a version.",
    ExitCode.NO_PROGRESS: "Nothing moved for longer than the deadline; the message gives the reasons that the nodes gave.",
    ExitCode.NO_MEMORY: "The plan does not fit into this machine's memory, or into the container's limit; the message says what would.",
    ExitCode.DIVERGED: "A value of the training is not finite: the data or the manifest's settings are at fault, it would come again.",
    ExitCode.CANNOT_TAKE_PART: "This machine cannot take part with these settings (`plnode doctor`); the last line of its report says why.",
    ExitCode.UNSOUND: "Receipts are forged, damaged or contradict each other (`plnode receipts verify`); its output says which and where.",
    ExitCode.INTERRUPTED: "SIGINT (Ctrl-C).",
    ExitCode.TERMINATED: "SIGTERM before there was anything to leave, twice, or `plnode demo` was ended; or the goodbyes took too long.",
}
FOREIGN: dict[int, str] = {
    125: "Docker itself failed: the container was not started; Docker's message says why.",
    126: "The command in the container cannot be executed.",
    127: "There is no such command in the container.",
    137: "SIGKILL: `docker kill`, a stop that took longer than its grace period, or the memory limit (`docker inspect` then says "
    "OOMKilled); the next start tells what is known.",
}  # fmt: skip

_RESTART_HELPS = frozenset({ExitCode.INTERNAL, ExitCode.NODE_DIED, ExitCode.NO_PROGRESS})


def restart_helps(code: ExitCode) -> bool:
    """Whether a supervisor should start the program again: not after wrong input, a refusal or the user's own stop."""
    return code in _RESTART_HELPS


def explain(code: int) -> str:
    """One line on an exit code, also on those that only a program's starter shows.  Any other number is said to be unknown."""
    if code in MEANINGS:
        known = ExitCode(code)
        helps = "A restart helps." if restart_helps(known) else "A restart does not help."
        advice = "No restart is needed." if code == ExitCode.OK else helps
        return f"{code} {known.name}: {MEANINGS[code]} {advice}"
    if code in FOREIGN:
        return f"{code}: {FOREIGN[code]}"
    return f"{code}: not a code of this program" + (f"; it was ended by signal {code - 128}" if 128 < code < 193 else "")


class BadInput(Exception):
    """Something that the user gave us is wrong.

    `what` is one sentence on what happened, `remedy` one on what to do; both are shown, nothing else is.
    """

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(what, remedy)
        self.what = what
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.what}\n  {self.remedy}" if self.remedy else self.what


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a program of ours ended, for the command line; `message` is one line for a person."""

    exit_code: ExitCode
    message: str
