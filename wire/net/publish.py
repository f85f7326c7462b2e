"""When our own record is signed anew and told to those who are connected.

Regularly at half its life, and when something in it changed: an interface came or went, a listener was bound.  Interfaces flap (a
Wi-Fi that reassociates, a VPN, a lease that is renewed), and a peer ends a connection over which news of ourselves come faster
than one in 5 s after five at once.  So changes are gathered: three at once, then one in 10 s, half of what anybody allows.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from wire.limits import Limits
from wire.rates import Bucket

BURST = 3


class Publisher:
    """`publish()` signs and tells; `renew_after_s()` is asked for the time of the next regular renewal."""

    def __init__(self, publish: Callable[[], None], renew_after_s: Callable[[], float], limits: Limits) -> None:
        self._publish = publish
        self._renew_after_s = renew_after_s
        self._limits = limits
        self._changed = trio.Event()

    def soon(self) -> None:
        """Something in the record changed: publish as soon as the rate allows."""
        self._changed.set()

    async def run(self) -> None:
        """For ever."""
        bucket = Bucket(1.0 / self._limits.peer_record_interval_s, BURST, trio.current_time())
        while True:
            with trio.move_on_after(self._renew_after_s()):
                await self._changed.wait()
            if not bucket.take(trio.current_time()):
                await trio.sleep((1.0 - bucket.tokens) / bucket.per_s + 0.001)
                bucket.take(trio.current_time())
            self._changed = trio.Event()
            self._publish()
