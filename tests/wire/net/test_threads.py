"""Work in threads that may be left behind takes nobody else's place (snapshots are written in trio's own forty threads)."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import trio
import trio.testing

from wire.limits import DEFAULT_LIMITS
from wire.net import fetch as fetching
from wire.net.seedentries import SeedListError
from wire.net.upnp import Upnp, UpnpFailed

LIMITS = replace(DEFAULT_LIMITS, seed_fetch_timeout_s=1.0)
TRIES = 3


def test_find_6_a_seed_list_that_drips_costs_one_thread_and_none_of_the_others(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    """A server that sends a byte of its header now and then holds a thread for as long as it likes: the deadline only leaves it."""
    go, began, calls = threading.Event(), threading.Event(), []

    def drips(url: str, until: float, most: int) -> bytes:
        calls.append(url)
        began.set()
        go.wait(60)
        return b"good"

    monkeypatch.setattr(fetching, "_fetch", drips)

    async def main() -> None:
        for _ in range(TRIES):
            with pytest.raises(SeedListError, match="not fetched within"):
                await fetching.fetch("http://bad", LIMITS)
        assert trio.to_thread.current_default_thread_limiter().borrowed_tokens == 0
        assert began.wait(60)
        assert calls == ["http://bad"]

    try:
        trio.run(main, clock=autojump_clock)
    finally:
        go.set()


def test_find_6_a_seed_list_that_came_can_be_fetched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "_fetch", lambda url, until, most: b"good")

    async def main() -> None:
        for _ in range(TRIES):
            assert await fetching.fetch("http://good", LIMITS) == b"good"

    trio.run(main)


def test_nat_a_router_that_drips_costs_one_thread_and_none_of_the_others(autojump_clock: trio.testing.MockClock) -> None:
    go, began, made = threading.Event(), threading.Event(), []

    class Drips:
        def discover(self) -> None:
            made.append(self)
            began.set()
            go.wait(60)
            raise Exception("gone")

    async def main() -> None:
        upnp = Upnp(Drips)
        for _ in range(TRIES):
            with pytest.raises(UpnpFailed):
                await upnp.add(4001, 60, 1.0)
        assert trio.to_thread.current_default_thread_limiter().borrowed_tokens == 0
        assert began.wait(60)
        assert len(made) == 1

    try:
        trio.run(main, clock=autojump_clock)
    finally:
        go.set()
