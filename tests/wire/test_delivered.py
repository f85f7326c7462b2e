"""The table that makes "at most once" true (wire 11)."""

from __future__ import annotations

import pytest

from wire.delivered import DeliveredKeys
from wire.errors import Code, LocalProtocolError


def test_the_watermark_never_falls_and_forgets() -> None:
    table = DeliveredKeys()
    assert table.deliver((0, 5)) is Code.OK and table.deliver((0, 5)) is Code.DUPLICATE
    table.raise_watermark(6)
    table.raise_watermark(3)
    assert table.watermark == 6 and len(table) == 0
    assert table.deliver((0, 5)) is Code.STALE and table.verdict((0, 6)) is Code.OK


def test_overflow_forgets_the_oldest_steps_and_delivers_nothing_twice() -> None:
    table = DeliveredKeys(capacity=3)
    for key in ((0, 1), (1, 1), (0, 2)):
        assert table.deliver(key) is Code.OK
    assert table.deliver((0, 3)) is Code.OK
    assert (len(table), table.watermark) == (2, 2)
    assert [table.deliver(key) for key in ((0, 1), (2, 1), (0, 2))] == [Code.STALE, Code.STALE, Code.DUPLICATE]
    # A single step that is larger than the table ends as a whole.
    table = DeliveredKeys(capacity=2)
    assert [table.deliver((n, 4)) for n in range(4)] == [Code.OK, Code.OK, Code.STALE, Code.STALE]


def test_keys_without_a_step_are_no_keys() -> None:
    table = DeliveredKeys(step_field=1)
    for key in ((), (1,), (1, "2"), (1, b"2")):
        assert table.deliver(key) is Code.EXPECTATION
    with pytest.raises(LocalProtocolError):
        DeliveredKeys(capacity=0)
