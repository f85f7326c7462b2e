"""The process's promises: what is reserved comes back, nothing exceeds the total, shortage comes in three steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.budget import GROW_BELOW, SHRINK_ABOVE, UnreadBudget, unread_total
from wire.limits import DEFAULT_LIMITS, GIB, MIB
from wire.net.memory import lower_limit
from wire.remembered import REMEMBERED_MAX, RememberedWindows


@pytest.mark.parametrize(("ram", "total"), [(GIB, GIB // 4), (8 * GIB, 2 * GIB), (512 * GIB, 2 * GIB)])
def test_the_total_is_a_quarter_of_the_memory_or_the_limit(ram: int, total: int) -> None:
    assert unread_total(ram, DEFAULT_LIMITS) == total


def test_a_containers_limit_counts_if_it_is_lower(tmp_path: Path) -> None:
    version2, version1, missing = tmp_path / "memory.max", tmp_path / "limit_in_bytes", tmp_path / "none"
    version2.write_text("max\n")
    version1.write_text("9223372036854771712\n")
    assert lower_limit(8 * GIB, (version2, version1, missing)) == 8 * GIB
    version2.write_text(f"{GIB}\n")
    assert lower_limit(8 * GIB, (missing, version1, version2)) == GIB
    version2.write_bytes(b"\xff\xfe")
    assert lower_limit(8 * GIB, (version2,)) == 8 * GIB


def test_a_full_budget_refuses_and_a_release_makes_room() -> None:
    budget = UnreadBudget(100)
    first = budget.reserve(60)
    assert first is not None
    assert budget.reserve(41) is None
    assert (budget.used, budget.reservations, budget.refused) == (60, 1, 1)
    with first:
        pass
    first.release()
    assert (budget.used, budget.reservations) == (0, 0), "twice is as good as once"
    assert budget.reserve(100) is not None


def test_a_reservation_that_is_released_neither_grows_nor_shrinks() -> None:
    budget = UnreadBudget(100)
    reservation = budget.reserve(10)
    assert reservation is not None
    reservation.release()
    assert not reservation.grow(20) and not reservation.extend(20) and not reservation.growing
    reservation.shrink(5)
    assert budget.used == 0


def test_growth_leaves_room_for_those_who_come_later() -> None:
    budget = UnreadBudget(1000)
    reservation = budget.reserve(100)
    assert reservation is not None
    assert not reservation.grow(int(1000 * GROW_BELOW) + 1)
    assert reservation.size == 100
    assert reservation.grow(int(1000 * GROW_BELOW))
    assert not budget.growing and not budget.short, "growth alone makes nobody shrink"
    later = budget.reserve(int(1000 * (SHRINK_ABOVE - GROW_BELOW)) + 1)
    assert later is not None and budget.short
    reservation.shrink(100)
    assert budget.growing and not budget.short
    assert budget.gauges() == {
        "unread_total_bytes": 1000,
        "unread_reserved_bytes": 100 + later.size,
        "unread_reservations": 2,
        "unread_refused": 0,
    }


@given(st.lists(st.tuples(st.sampled_from(["reserve", "grow", "extend", "shrink", "release"]), st.integers(0, 60), st.integers(0, 9))))
def test_the_sum_of_all_reservations_is_what_is_used(steps: list[tuple[str, int, int]]) -> None:
    budget = UnreadBudget(100)
    held = []
    for what, size, which in steps:
        if what == "reserve":
            if (one := budget.reserve(size)) is not None:
                held.append(one)
        elif held:
            getattr(held[which % len(held)], what)(*([] if what == "release" else [size]))
        assert budget.used == sum(one.size for one in held) <= budget.total
    for one in held:
        one.release()
    assert (budget.used, budget.reservations) == (0, 0)


@pytest.mark.parametrize("size", [0, -1])
def test_a_budget_of_nothing_is_a_mistake(size: int) -> None:
    with pytest.raises(ValueError, match="budget"):
        UnreadBudget(size)
    with pytest.raises(ValueError, match="reservation"):
        UnreadBudget(1).reserve(-1)


def test_remembered_windows_are_bounded_and_the_least_used_goes() -> None:
    table = RememberedWindows()
    assert table.get("a/1") == 0
    table.put("a/1", 5 * MIB)
    for number in range(REMEMBERED_MAX - 1):
        table.put(f"p{number}/1", MIB)
    assert table.get("a/1") == 5 * MIB
    table.put("b/1", MIB)
    assert len(table) == REMEMBERED_MAX
    assert table.get("p0/1") == 0 and table.get("a/1") == 5 * MIB, "what was asked for stays"
