"""Priorities: strict classes under their ten per cent, shares by weight, the oldest microbatch first, turns among equals."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.limits import DEFAULT_LIMITS
from wire.scheduler import BACKGROUND, BULK, CONTROL, MESSAGES, TENSORS, Scheduler

RATE = 25_000_000  # bytes a second: 200 Mbit/s


def drive(
    scheduler: Scheduler[str], seconds: float, sizes: dict[int, int], *, control: bool, always: tuple[str, ...] = ()
) -> list[tuple[float, int, int]]:
    """A line of RATE that is always writable: (time, class, size) of each record.

    Items in `always` are ready again at once; an item's class is its first character.
    """
    now, log = 100.0, []
    for item in always:
        scheduler.push(item, int(item[0]))
    end = now + seconds
    while now < end:
        cls = scheduler.next_class(now, control)
        assert cls >= 0
        if cls != CONTROL:
            item = scheduler.pop(cls)
            scheduler.push(item, cls)
        size = sizes[cls]
        scheduler.charge(cls, size, now)
        log.append((now, cls, size))
        now += size / RATE
    return log


@pytest.mark.parametrize(("control_size", "bulk_size"), [(36, 262_172), (64, 16_412), (1000, 125_000), (20_000, 65_564)])
def test_a_flood_of_control_gets_at_most_a_tenth_of_any_100_ms(control_size: int, bulk_size: int) -> None:
    scheduler: Scheduler[str] = Scheduler(DEFAULT_LIMITS)
    sizes = {CONTROL: control_size, MESSAGES: control_size, BULK: bulk_size}
    log = drive(scheduler, 0.8, sizes, control=True, always=("1 flood", "3 bulk"))
    times = [now for now, _, _ in log]
    for start in times[:: len(times) // 50]:
        if times[-1] < start + 0.1:
            break
        window = [(cls, size) for _, cls, size in log[bisect_left(times, start) : bisect_left(times, start + 0.1)]]
        control = sum(size for cls, size in window if cls <= MESSAGES)
        total = sum(size for _, size in window)
        # A record is not divisible: one of each kind may hang over the edges of the window.
        assert control - control_size <= 0.1 * (total + 2 * bulk_size), (control, total)
    share = sum(size for _, cls, size in log if cls <= MESSAGES) / sum(size for _, _, size in log)
    assert 0.08 < share <= 0.1 + control_size / 100_000, "nor is control starved"


def test_control_alone_is_not_limited_and_owes_nothing_later() -> None:
    scheduler: Scheduler[str] = Scheduler(DEFAULT_LIMITS)
    drive(scheduler, 1.0, {CONTROL: 64}, control=True)
    scheduler.push("bulk", BULK)
    now = 101.0
    assert scheduler.next_class(now, True) == CONTROL
    scheduler.charge(CONTROL, 64, now)
    assert scheduler.next_class(now, True) == BULK, "the second in a row has to wait for one record of the others"


def test_a_control_message_overtakes_everything_that_waits() -> None:
    scheduler: Scheduler[str] = Scheduler(DEFAULT_LIMITS)
    for number in range(50):
        scheduler.push(f"tensor {number}", TENSORS, number)
        scheduler.push(f"bulk {number}", BULK)
    scheduler.push("message", MESSAGES)
    assert scheduler.next_class(5.0, False) == MESSAGES
    assert scheduler.pop(MESSAGES) == "message"


def test_class_0_goes_before_class_1() -> None:
    scheduler: Scheduler[str] = Scheduler(DEFAULT_LIMITS)
    scheduler.push("message", MESSAGES)
    assert scheduler.next_class(5.0, True) == CONTROL
    assert scheduler.next_class(5.0, False) == MESSAGES


@pytest.mark.parametrize(
    "sizes", [(262_172, 262_172, 262_172), (262_172, 65_564, 16_412), (16_412, 16_412, 262_172), (5000, 4999, 137)]
)
def test_weights_hold_within_five_per_cent(sizes: tuple[int, int, int]) -> None:
    scheduler: Scheduler[str] = Scheduler(DEFAULT_LIMITS)
    bytes_of = dict(zip((TENSORS, BULK, BACKGROUND), sizes, strict=True))
    log = drive(scheduler, 20.0, bytes_of, control=False, always=("2 a", "3 a", "4 a"))
    sent = Counter()
    for _, cls, size in log:
        sent[cls] += size
    total = sum(sent.values())
    for cls, weight in zip((TENSORS, BULK, BACKGROUND), DEFAULT_LIMITS.class_weights, strict=True):
        assert sent[cls] / total == pytest.approx(weight / 21, rel=0.05)


def test_a_class_that_was_idle_has_saved_nothing_up() -> None:
    scheduler: Scheduler[str] = Scheduler(DEFAULT_LIMITS)
    drive(scheduler, 2.0, {BACKGROUND: 65_564}, control=False, always=("4 a",))
    log = drive(scheduler, 2.0, {TENSORS: 65_564, BACKGROUND: 65_564}, control=False, always=("2 a",))
    share = sum(size for _, cls, size in log if cls == BACKGROUND) / sum(size for _, _, size in log)
    assert share == pytest.approx(1 / 17, rel=0.1)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=40))
def test_in_class_2_the_oldest_microbatch_goes_first_and_equals_in_turn(orders: list[int]) -> None:
    scheduler: Scheduler[tuple[int, int]] = Scheduler(DEFAULT_LIMITS)
    for turn, order in enumerate(orders):
        scheduler.push((order, turn), TENSORS, order)
    taken = [scheduler.pop(TENSORS) for _ in orders]
    assert taken == sorted((order, turn) for turn, order in enumerate(orders))
    assert not scheduler


def test_an_item_that_became_older_moves_up_and_is_there_once() -> None:
    scheduler: Scheduler[str] = Scheduler(DEFAULT_LIMITS)
    scheduler.push("a", TENSORS, 5)
    scheduler.push("b", TENSORS, 7)
    scheduler.push("b", TENSORS, 1)
    assert len(scheduler) == 2
    assert [scheduler.pop(TENSORS), scheduler.pop(TENSORS)] == ["b", "a"]
    with pytest.raises(IndexError):
        scheduler.pop(TENSORS)


@pytest.mark.parametrize("cls", [MESSAGES, BULK, BACKGROUND])
def test_streams_of_a_class_take_turns(cls: int) -> None:
    scheduler: Scheduler[str] = Scheduler(DEFAULT_LIMITS)
    for item in "abc":
        scheduler.push(item, cls)
    taken = []
    for _ in range(7):
        item = scheduler.pop(cls)
        taken.append(item)
        scheduler.push(item, cls)
    assert "".join(taken) == "abcabca"


@given(st.lists(st.tuples(st.sampled_from("pdo"), st.integers(0, 9), st.integers(0, 5)), max_size=80))
def test_counts_follow_any_order_of_push_discard_and_pop(steps: list[tuple[str, int, int]]) -> None:
    """Items are of fixed class; a discarded one never comes back, as streams do."""
    scheduler: Scheduler[int] = Scheduler(DEFAULT_LIMITS)
    ready: set[int] = set()
    dead: set[int] = set()
    for what, item, order in steps:
        cls = 1 + item % 4
        if what == "p" and item not in dead:
            scheduler.push(item, cls, order)
            ready.add(item)
        elif what == "d":
            scheduler.discard(item, cls)
            ready.discard(item)
            dead.add(item)
        elif what == "o" and any(1 + other % 4 == cls for other in ready):
            taken = scheduler.pop(cls)
            assert taken in ready
            ready.remove(taken)
        assert len(scheduler) == len(ready)
        assert scheduler.bulk_waiting == sum(other % 4 > 0 for other in ready)
    scheduler.clear()
    assert scheduler.next_class(1.0, False) == -1 and not scheduler
