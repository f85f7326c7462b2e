"""The pool lends exact sizes, reuses, never exceeds its limit, and finds misuse."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plnode.stage.errors import PoolExhausted, StageError
from plnode.stage.hostpool import HostPool, plain_block


def test_buffers_are_exact_writable_and_reused():
    made = []
    pool = HostPool(1000, lambda n: made.append(n) or plain_block(n))
    first = pool.acquire(300)
    assert first.nbytes == 300 and first.format == "B" and not first.readonly
    pool.release(first[10:20])  # any slice finds its way back
    again = pool.acquire(300)
    assert made == [300] and pool.lent == 1 and pool.owns(again) and not pool.owns(memoryview(bytearray(300)))
    pool.release(again)
    assert pool.lent == 0 and pool.allocated_bytes == 300


def test_the_limit_holds_and_idle_buffers_make_room():
    pool = HostPool(1000)
    lent = pool.acquire(600)
    pool.release(pool.acquire(400))
    with pytest.raises(PoolExhausted, match="1 buffers of together 600 bytes are lent"):
        pool.acquire(401)
    assert pool.acquire(350).nbytes == 350  # the idle 400 went
    assert pool.allocated_bytes == 950
    pool.release(lent)


def test_misuse_raises():
    pool = HostPool(1000)
    buffer = pool.acquire(10)
    pool.release(buffer)
    for foreign in (buffer, memoryview(bytearray(10))):
        with pytest.raises(StageError, match="not lent"):
            pool.release(foreign)
    with pytest.raises(StageError, match="at least 1 byte"):
        pool.acquire(0)


@given(st.lists(st.one_of(st.sampled_from([10, 64, 100, 300, 700]), st.none()), max_size=60))
def test_bounds_and_counts_hold_for_every_use(actions):
    """None gives the oldest back; a number asks for so many bytes.  No two lent buffers share memory."""
    pool, lent = HostPool(1000), []
    for action in actions:
        if action is None:
            if lent:
                pool.release(lent.pop(0))
        else:
            try:
                buffer = pool.acquire(action)
            except PoolExhausted:
                assert sum(b.nbytes for b in lent) + action > 1000
            else:
                buffer[:] = bytes([len(lent) % 251]) * action
                lent.append(buffer)
        assert pool.allocated_bytes <= 1000 and pool.lent == len(lent)
        assert len({id(b.obj) for b in lent}) == len(lent)
