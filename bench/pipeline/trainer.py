"""How the rows that are not nodes take part: a process that trains so many steps on request and says how long each took.

First line in: `{"manifest", "threads", ...}`.  First line out: it is ready, model built.  Then `{"steps": n}`, answered by
`{"seconds": [...], "losses": [...]}`, until stdin ends.  The losses (null where a process does not know them) are there so that a
test can hold the rows to the same work: a competitor that computes something else is no competitor.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

__all__ = ["answer_requests", "first_line", "say"]


def first_line() -> dict[str, Any]:
    """The instructions.  Ends the process if there are none."""
    line = sys.stdin.readline()
    if not line:
        sys.exit("no instructions on stdin")
    instructions: dict[str, Any] = json.loads(line)
    return instructions


def say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def answer_requests(step: Callable[[], float | None]) -> None:
    """Until stdin ends; `step` trains one and returns its loss in nats a token."""
    for line in sys.stdin:
        seconds, losses = [], []
        for _ in range(json.loads(line)["steps"]):
            began = time.perf_counter()
            losses.append(step())
            seconds.append(time.perf_counter() - began)
        say({"seconds": seconds, "losses": losses})
