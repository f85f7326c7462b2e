"""The way out fits into the time that whoever stops the node waits, however long its parts take."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from plnode.leaving import GOODBYES_S, Leaving, patience_of


@pytest.mark.parametrize(("grace_s", "device_s", "notice_s"), [(10, 0, 7), (10, 4, 3), (10, 8, 0), (10, 60, 0), (2, 0, 0), (40, 0, 37)])
async def test_the_notice_gets_what_is_left(
    grace_s: float, device_s: float, notice_s: float, autojump_clock: trio.testing.MockClock
) -> None:
    leaving = Leaving(grace_s)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(leaving.watch)
        await trio.sleep(1000)
        assert leaving.notice_s() == max(0, patience_of(grace_s) - GOODBYES_S), "nobody has stopped it"
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await trio.sleep(device_s)
    assert leaving.notice_s() == pytest.approx(notice_s)
    assert patience_of(grace_s) < grace_s
