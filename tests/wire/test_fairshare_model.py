"""Fair shares under any order of comings, askings, leavings and rates, against a model that only counts bytes."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from wire.fairshare import FairShare

actions = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 11)),
        st.tuples(st.just("ask"), st.integers(0, 11), st.integers(0, 300_000)),
        st.tuples(st.just("remove"), st.integers(0, 11)),
        st.tuples(st.just("wait"), st.floats(0.0, 0.3)),
        st.tuples(st.just("rate"), st.sampled_from([0.0, 1e5, 1e6])),
    ),
    max_size=60,
)


@given(actions)
def test_whatever_comes_no_byte_is_granted_that_was_not_asked_for_and_all_is_granted_in_the_end(steps: list[Any]) -> None:
    """Model: bytes that wait, by item.  The bucket bounds every interval from the start, and nothing is left over."""
    now, granted, rate = 1e6, 0, 1e6
    share: FairShare[int] = FairShare(rate, 6e5, now=now)
    waiting: dict[int, int] = {}
    allowed = share._bucket.burst

    def grant() -> None:
        nonlocal granted
        for item, size in share.grant(now):
            assert 0 < size <= waiting[item]
            waiting[item] -= size
            granted += size
        assert granted <= allowed + 1
        assert share.gauges()["share_waiting_bytes"] == sum(waiting.values())

    for step in steps:
        match step:
            case ("add", item) if item not in waiting:
                share.add(item, (item % 3, 10 + item % 4), control=item % 5 == 0, now=now)
                waiting[item] = 0
            case ("ask", item, size) if item in waiting:
                share.ask(item, size)
                waiting[item] = size
            case ("remove", item):
                share.remove(item, now)
                waiting.pop(item, None)
            case ("wait", seconds):
                now += seconds
                allowed += seconds * rate
            case ("rate", value):
                rate = value
                share.set_rate(rate, now)
                # A new rate gives nothing at once: it only cuts what was saved up.
        grant()
    share.set_rate(1e6, now)
    for _ in range(2000):
        at = share.next_time(now)
        if at is None:
            break
        allowed += 1e6 * (at - now)
        now = at
        grant()
    assert not any(waiting.values()), "something waits for ever"
    for item in list(waiting):
        share.remove(item, now)
    assert not any(share.gauges().values())
