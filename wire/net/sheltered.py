"""A nursery whose tasks a cancel from outside does not reach: whoever opened it ends them, after what has to be said.

A cancel of a scope reaches everything in it at once.  For a network that is the wrong order: the tasks that drive the connections
are gone before anybody can say goodbye through them, the peers see broken connections, and wait for the node to come back (five
seconds) although it has left.  So these tasks live in a shielded scope.  The block itself does feel the cancel, ends its work with the
connections still up, and the tasks are cancelled when it is left.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

__all__ = ["open_sheltered_nursery"]


@asynccontextmanager
async def open_sheltered_nursery() -> AsyncIterator[trio.Nursery]:
    """A nursery for tasks that are cancelled when the block is left, however it is left, and by nothing else.

    A task that fails cancels the block, as in any nursery.  Whatever the block awaits at its end needs a shield of its own.
    """

    opened = trio.Event()
    nurseries: list[trio.Nursery] = []

    async def hold() -> None:
        async with trio.open_nursery() as sheltered:
            sheltered.cancel_scope.shield = True
            nurseries.append(sheltered)
            opened.set()
            await trio.sleep_forever()

    async with trio.open_nursery() as outer:
        # Not `outer.start`: cancelled in between it would wait for a task that its own shield keeps from ending.
        outer.start_soon(hold)
        with trio.CancelScope(shield=True):
            await opened.wait()
        try:
            yield nurseries[0]
        finally:
            nurseries[0].cancel_scope.cancel()
