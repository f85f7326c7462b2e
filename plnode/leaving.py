"""How long a node may take to leave, counted from the moment that it is told to.

Whoever stops a program waits and then kills: `docker stop` ten seconds, compose and systemd as long as they are told to.  A node that
is killed while it says goodbye might as well not have begun, and its exit code says that something was wrong.  So the whole way out
fits into that time, the setting `stop_grace`: what the device has under way, the notice for those whose circuits go through this node
(`wire/net/detour.py`), goodbyes, exit.  The notice is the one part that can be as long as there is time, so it gets what the others
leave; they come first, and nobody knows how long they take, hence the clock starts with the signal and not with the notice.
"""

from __future__ import annotations

import trio

__all__ = ["Leaving", "patience_of"]

EXIT_S = 1.0  # between our own end and the kill: closing files, the interpreter
GOODBYES_S = 2.0  # of the network behind the notice, 1 s, and what a busy machine adds


def patience_of(grace_s: float) -> float:
    """When the program ends itself, whatever it waits for: seconds after the signal."""
    return max(1.0, grace_s - EXIT_S)


class Leaving:
    """`watch` runs inside what a stop cancels; `notice_s` is asked afterwards."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._told_at: float | None = None

    async def watch(self) -> None:
        """For ever; its cancel is the moment from which time counts."""
        try:
            await trio.sleep_forever()
        finally:
            self._told_at = trio.current_time()

    def notice_s(self) -> float:
        """Seconds that are left for the notice, from now; not below 0."""
        now = trio.current_time()
        since = now if self._told_at is None else self._told_at
        return max(0.0, since + patience_of(self._grace_s) - GOODBYES_S - now)
