"""The five rules of wire/flow.py, and the token bucket."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.errors import LocalProtocolError, RemoteProtocolError
from wire.flow import MESSAGE_OVERHEAD_BYTES, ReceiveWindow, SendWindow
from wire.limits import DEFAULT_LIMITS
from wire.rates import Bucket


def test_a_limit_never_falls_and_may_be_repeated() -> None:
    window = SendWindow(100)
    assert window.raise_to(150)
    assert not window.raise_to(150)
    with pytest.raises(RemoteProtocolError):
        window.raise_to(149)
    assert window.limit == 150


def test_taking_more_than_the_credit_changes_nothing() -> None:
    window = SendWindow(100)
    window.take(60)
    with pytest.raises(LocalProtocolError):
        window.take(41)
    assert (window.sent, window.available) == (60, 40)
    window.take(40)
    window.give_back(100)
    assert window.available == 100
    with pytest.raises(LocalProtocolError):
        window.give_back(1)


def test_one_byte_beyond_the_credit_is_a_violation_and_the_last_one_within_is_not() -> None:
    window = ReceiveWindow(100)
    window.arrive(100)
    with pytest.raises(RemoteProtocolError):
        window.arrive(1)


def test_credit_comes_back_when_read_and_is_announced_by_quarters() -> None:
    window = ReceiveWindow(100)
    window.arrive(80)
    assert window.limit == 100, "arrival alone gives nothing back"
    assert not window.read(24)
    assert window.limit == 100
    assert window.read(1)
    assert window.limit == 125
    assert window.unread == 55


def test_a_reader_that_gives_bytes_back_gets_no_credit_twice() -> None:
    window = ReceiveWindow(100)
    window.arrive(50)
    assert window.read(50) and window.limit == 150
    window.unread_again(50)
    assert window.unread == 50
    assert not window.read(50), "the same bytes were announced before"
    assert window.limit == 150


@given(st.lists(st.integers(1, DEFAULT_LIMITS.message_max_bytes), max_size=60))
def test_a_message_of_any_size_fits_when_all_was_read(sizes: list[int]) -> None:
    """Rule 5; fails if the window of a message stream has no room beyond its start size."""
    base = DEFAULT_LIMITS.stream_window_control_bytes
    receiver = ReceiveWindow(base + DEFAULT_LIMITS.message_max_bytes + MESSAGE_OVERHEAD_BYTES, quarter=base // 4)
    sender = SendWindow(receiver.limit)
    for size in sizes:
        cost = size + MESSAGE_OVERHEAD_BYTES
        sender.take(cost)
        receiver.arrive(cost)
        if receiver.read(cost):
            sender.raise_to(receiver.limit)
        assert sender.available >= DEFAULT_LIMITS.message_max_bytes + MESSAGE_OVERHEAD_BYTES


@given(st.data())
def test_credit_is_never_exceeded_and_all_of_it_comes_back(data: st.DataObject) -> None:
    size = data.draw(st.integers(4, 1000))
    receiver, sender = ReceiveWindow(size), SendWindow(size)
    for _ in range(data.draw(st.integers(0, 50))):
        if sender.available and data.draw(st.booleans()):
            take = data.draw(st.integers(1, sender.available))
            sender.take(take)
            receiver.arrive(take)
        elif receiver.unread and receiver.read(data.draw(st.integers(1, receiver.unread))):
            sender.raise_to(receiver.limit)
        assert receiver.unread <= size
        assert receiver.limit - receiver.consumed <= size
    receiver.read(receiver.unread)
    assert receiver.limit - receiver.consumed > size - max(1, size // 4), "less than a quarter is held back"


def test_a_bucket_gains_by_time_up_to_its_burst() -> None:
    bucket = Bucket(2.0, 3.0, 10.0)
    assert [bucket.take(10.0) for _ in range(4)] == [True, True, True, False]
    assert not bucket.take(10.4)
    assert bucket.take(10.5)
    assert [bucket.take(100.0) for _ in range(4)] == [True, True, True, False]
    assert not bucket.take(99.0), "a clock that goes back gains nothing"
    bucket.earn(1.0)
    assert bucket.take(99.0)


def test_a_larger_window_raises_the_limit_at_once() -> None:
    window = ReceiveWindow(100)
    window.arrive(40)
    assert window.read(40) and window.limit == 140
    window.resize(200)
    assert (window.limit, window.quarter) == (240, 50)


def test_a_window_falls_back_by_not_being_renewed() -> None:
    window = ReceiveWindow(100)
    window.resize(800)
    window.arrive(800)
    assert window.read(300) and window.limit == 1100
    assert not window.fall_back()
    assert window.limit == 800, "the last announced limit: never less"
    assert not window.read(424)
    assert window.read(1) and window.limit == 825, "a quarter of the start window beyond what was announced"


def test_a_window_that_falls_back_with_all_of_it_read_is_renewed_all_the_same() -> None:
    """Fails, with a sender that waits for ever, if the rise is undone whatever was read."""
    window = ReceiveWindow(100)
    window.resize(400)
    window.arrive(400)
    assert window.read(400)
    assert window.fall_back()
    assert window.limit == 500


@given(st.data())
def test_credit_never_falls_whatever_happens_to_the_window(data: st.DataObject) -> None:
    start = data.draw(st.integers(4, 100))
    receiver, sender = ReceiveWindow(start), SendWindow(start)
    for _ in range(data.draw(st.integers(0, 60))):
        step = data.draw(st.sampled_from(["send", "read", "fall back", "grow"]))
        if step == "send" and sender.available:
            take = data.draw(st.integers(1, sender.available))
            sender.take(take)
            receiver.arrive(take)
        elif step == "grow":
            receiver.resize(2 * receiver.size)
            sender.raise_to(receiver.limit)  # raises if it fell
        elif receiver.unread:
            rose = receiver.read(data.draw(st.integers(1, receiver.unread)))
            if rose and (step == "read" or receiver.fall_back()):
                sender.raise_to(receiver.limit)
        assert sender.limit == receiver.limit, "nothing rises unannounced"
    if receiver.unread and receiver.read(receiver.unread):
        sender.raise_to(receiver.limit)
    assert sender.available > receiver.size - max(1, receiver.quarter), "a sender never waits for ever"
