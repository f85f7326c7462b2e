"""Limits: sets that cannot hold are refused when they are made, naming both numbers."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from wire.limits import DEFAULT_LIMITS, Limits


def test_a_tensor_of_the_largest_size_has_a_bitmap_of_whole_bytes() -> None:
    assert DEFAULT_LIMITS.tensor_max_bytes % (8 * DEFAULT_LIMITS.chunk_bytes) == 0


def test_peer_exchange_fits_one_message() -> None:
    limits = DEFAULT_LIMITS
    assert limits.exchange_records_max * (limits.peer_record_max_bytes + 3) + 16 <= limits.message_max_bytes


@pytest.mark.parametrize("name", [field.name for field in fields(Limits) if field.name != "lanes_max"])  # 0: one mixed connection
def test_no_limit_is_zero(name: str) -> None:
    value = getattr(DEFAULT_LIMITS, name)
    zero = (0,) * len(value) if isinstance(value, tuple) else 0
    with pytest.raises(ValueError, match=name):
        replace(DEFAULT_LIMITS, **{name: zero})


def test_find_15_renewal_later_than_expiry_is_refused_with_both_numbers() -> None:
    life = DEFAULT_LIMITS.peer_record_life_s
    replace(DEFAULT_LIMITS, peer_record_renew_s=0.5 * life)
    with pytest.raises(ValueError, match=r"peer_record_renew_s = 7200.* peer_record_life_s = 7200"):
        replace(DEFAULT_LIMITS, peer_record_renew_s=life)
    with pytest.raises(ValueError, match=r"peer_record_renew_s = 21600.* peer_record_life_s = 7200"):
        replace(DEFAULT_LIMITS, peer_record_renew_s=3 * life)


def test_wire_11_a_default_sender_stays_below_the_default_limits() -> None:
    limits = DEFAULT_LIMITS
    held_up_s = 30.0
    assert held_up_s / limits.ping_interval_s < limits.pings_burst
    assert 1 / limits.ping_interval_s < limits.pings_per_s
    # A CREDIT is sent for a quarter of a window, of a stream and of the connection; the smallest windows give the most of them.
    windows = (limits.stream_window_min_bytes, limits.connection_window_guest_bytes)
    credits_per_byte = sum(1 / (limits.credit_return_fraction * window) for window in windows)
    assert credits_per_byte <= 1 / limits.credits_free_bytes
    assert credits_per_byte > 1 / (64 * 1024)  # what one free CREDIT per 64 KiB would have allowed


def test_a_message_always_fits_the_start_credit() -> None:
    with pytest.raises(ValueError, match="message_max_bytes"):
        replace(DEFAULT_LIMITS, stream_window_control_bytes=DEFAULT_LIMITS.message_max_bytes - 1)
