"""How a program of ours ends: exit codes that a supervisor can act on, and the one error that is the user's to mend.

Contributors write wrappers around a node.  If every end looks alike they guess from the text whether a restart helps, and the
text changes.  So each kind of end has its own code, the codes are listed here and nowhere else, and `restart_helps` says
which of them a supervisor should start again.  130 and 143 are the shell's own convention (128 + signal number); 2 is what
click and most Unix programs use for wrong usage.

`BadInput` is the only exception that the command line turns into a message without a traceback.  It says what happened, and
what to do about it; anything else that escapes is a fault of this program and keeps its traceback.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

__all__ = ["BadInput", "ExitCode", "Outcome", "restart_helps"]


class ExitCode(IntEnum):
    OK = 0
    """The work is done."""
    INTERNAL = 1
    """A fault of this program; the traceback is on stderr."""
    BAD_INPUT = 2
    """A file, setting or flag is wrong; the message says which and how to mend it."""
    NODE_DIED = 3
    """A node of the swarm ended before the run did (`plnode demo`)."""
    REFUSED = 4
    """The swarm refused this node: another run, excluded, or too old a version."""
    NO_PROGRESS = 5
    """Nothing moved for longer than the deadline; the message gives the reasons that the nodes gave."""
    NO_MEMORY = 6
    """The plan does not fit into this machine's memory."""
    DIVERGED = 7
    """A value of the training is not finite: the data or the manifest's settings are at fault, a restart would meet it again."""
    INTERRUPTED = 130
    """SIGINT (Ctrl-C)."""
    TERMINATED = 143
    """SIGTERM, or the end of stdin with --exit-with-stdin."""


_RESTART_HELPS = frozenset({ExitCode.INTERNAL, ExitCode.NODE_DIED, ExitCode.NO_PROGRESS})


def restart_helps(code: ExitCode) -> bool:
    """Whether a supervisor should start the program again: not after wrong input, a refusal or the user's own stop."""
    return code in _RESTART_HELPS


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
