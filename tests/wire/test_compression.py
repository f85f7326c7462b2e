"""When chunks are packed: the rule, its edges, and that it does not flap on them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.wire.test_planes import CHUNK, gaussian
from wire.compression import MARGIN, Compression
from wire.limits import DEFAULT_LIMITS, Limits
from wire.planes import FEATURE

MB = 1e6
GOOD = gaussian(CHUNK)
NOISE = memoryview(np.random.default_rng(1).bytes(CHUNK))


class Clock:
    """Each pack takes `chunk / rate` seconds: `Compression` asks the time twice a pack."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.now = 0.0
        self.calls = 0

    def __call__(self) -> float:
        self.calls += 1
        if self.calls % 2 == 0:
            self.now += CHUNK / self.rate
        return self.now


def made(rate: float = 10 * MB, *, pack: float = 400 * MB, limits: Limits = DEFAULT_LIMITS) -> tuple[Compression, Clock]:
    """A channel whose first chunk was a probe of Gaussian bf16."""
    clock = Clock(pack)
    compression = Compression(limits, clock, ("other/1", FEATURE))
    compression.rate(rate)
    compression.tensor_begins()
    compression.pack(GOOD)
    return compression, clock


def test_a_slow_link_gets_packed_chunks() -> None:
    compression, _ = made()
    assert compression.on and compression.pack(GOOD) is not None
    assert compression.ratio == pytest.approx(1.45, abs=0.03)
    assert compression.compress_rate == pytest.approx(400 * MB)


def test_only_for_a_receiver_that_can_unpack() -> None:
    compression, clock = made()
    assert compression.pack(GOOD) is not None
    calls = clock.calls
    compression.meets(("other/1",))
    compression.tensor_begins()
    assert compression.pack(GOOD) is None and not compression.on and clock.calls == calls
    compression.meets((FEATURE,))
    assert compression.pack(GOOD) is not None, "it is another program again"
    calls = clock.calls
    other = Compression(DEFAULT_LIMITS, clock, ("other/1",))
    other.rate(MB)
    other.tensor_begins()
    assert other.pack(GOOD) is None and not other.on and clock.calls == calls


def test_nothing_is_packed_or_probed_on_a_fast_link() -> None:
    compression, clock = made(63 * MB, pack=1e12)
    assert not compression.on and clock.calls == 0
    compression, _ = made(0.7 * 62.5 * MB, pack=1e12)
    assert compression.on, "the control: a little slower and it is"


def test_a_probe_that_was_due_on_a_fast_link_is_made_when_it_has_become_slow() -> None:
    """The first measurement may be of a queue that took everything at once: else the next probe would be 64 tensors away."""
    compression, clock = made(200 * MB)
    assert clock.calls == 0 and not compression.wanted
    for _ in range(40):
        compression.rate(5 * MB)
    assert compression.wanted and not compression.on
    assert compression.pack(GOOD) is not None and compression.on


def test_a_link_that_becomes_fast_ends_it() -> None:
    compression, _ = made()
    for _ in range(100):
        compression.rate(100 * MB)
    assert not compression.on and compression.pack(GOOD) is None


def test_the_rule_is_a_comparison_of_two_times() -> None:
    """Link 20 MB/s, ratio 1.45: worth it above 20 / 0.31 = 64.5 MB/s of packing."""
    assert made(20 * MB, pack=60 * MB)[0].on is False
    assert made(20 * MB, pack=70 * MB)[0].on is False, "inside the margin it stays as it was"
    assert made(20 * MB, pack=90 * MB)[0].on is True


def test_a_packer_that_becomes_slow_ends_it() -> None:
    compression, clock = made(20 * MB)
    clock.rate = 30 * MB
    for _ in range(100):
        compression.pack(GOOD)
    assert not compression.on


def test_data_that_stop_shrinking_end_it_after_some_chunks() -> None:
    compression, _ = made()
    packs = 0
    while compression.on:
        assert compression.pack(NOISE) is None
        packs += 1
    assert 2 < packs < 20


def test_the_ratio_is_probed_on_the_first_chunk_of_every_64th_tensor() -> None:
    compression, clock = made()
    while compression.on:
        compression.pack(NOISE)
    probes = []
    for tensor in range(1, 200):
        compression.tensor_begins()
        for chunk in range(3):
            before = clock.calls
            assert compression.pack(NOISE) is None
            if clock.calls != before:
                probes.append((tensor, chunk))
    assert probes == [(64, 0), (128, 0), (192, 0)]


def test_it_comes_back_when_the_data_shrink_again() -> None:
    compression, _ = made(limits=replace(DEFAULT_LIMITS, compress_probe_tensors=2))
    while compression.on:
        compression.pack(NOISE)
    for _ in range(100):
        compression.tensor_begins()
        compression.pack(GOOD)
    assert compression.on


def switches(swing: float, share: float) -> int:
    """Changes of the decision on a link that sways by `swing` around `share` of the highest rate that pays."""
    compression, _ = made(share * 30 * MB, pack=30 * MB / (1 - 1 / 1.4497))
    count, on = 0, compression.on
    for step in range(400):
        for _ in range(20):  # the average follows
            compression.rate(share * 30 * MB * (1 + swing * (-1) ** step))
        count += on != compression.on
        on = compression.on
    return count


@pytest.mark.parametrize("share", [0.6, 0.75, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1])
def test_it_does_not_flap_on_the_edge(share: float) -> None:
    assert switches((1 - MARGIN) / 2 * 0.8, share) <= 1


def test_the_harness_would_see_it_flap() -> None:
    assert switches(0.3, 0.9) > 100


def test_before_the_first_measurement_nothing_is_packed_but_the_probe() -> None:
    compression = Compression(DEFAULT_LIMITS, Clock(400 * MB), (FEATURE,))
    compression.rate(0.0)
    compression.tensor_begins()
    assert compression.pack(GOOD) is not None
    assert compression.pack(GOOD) is None and not compression.on
    compression.rate(MB)
    assert compression.on
