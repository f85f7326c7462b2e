"""Port mapping for routers that only do UPnP (Internet Gateway Device), by `miniupnpc` if it is installed (`plnode[upnp]`).

UPnP is discovery by multicast, then XML over HTTP at whatever place the first answer names: a parser and a client for strangers'
XML that we do not want to write, so it is a library's, and optional.  Its calls block and cannot be stopped, so they run in a thread
that is given a few seconds and left behind then.  What goes wrong with that: a thread that was left behind may still open a port of
which nobody knows any more.  So one of the two sides always takes back: the thread if it was left before it was done, the caller if
the thread was done before it was left (`_Attempt`).  A router that trickles its answers holds a thread for as long as it likes; so a
port has one at a time, and none of trio's forty, in which snapshots are written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import trio

from wire.address import Address
from wire.portmapping import not_public

DISCOVERY_MS = 1000  # without any router the library (2.3.3) then gives up after 4 s, measured; with 2000 after more than 5
REMOVALS_AT_ONCE = 4  # more ports than a node listens on
DESCRIPTION = "plnode"  # what the router's pages show
MISSING = "UPnP was not tried: it needs the extra plnode[upnp]"


class UpnpFailed(Exception):
    """The text says why, for people."""


class Upnp:
    """`make` gives what `miniupnpc.UPnP()` gives, and raises ImportError without it."""

    def __init__(self, make: Callable[[], Any] | None = None) -> None:
        self._make = make or _miniupnpc
        self._open: dict[int, Any] = {}  # by port: the router that was found, since finding it anew is too long for an end
        self._adding: dict[int, trio.CapacityLimiter] = {}  # by port
        self._removing = trio.CapacityLimiter(REMOVALS_AT_ONCE)

    async def add(self, port: int, lease_s: int, timeout_s: float) -> Address:
        """Have TCP `port` forwarded; the outside address.  Raises UpnpFailed.  A cancel or the timeout leaves nothing behind."""
        attempt, outside = _Attempt(), None
        place = self._adding.setdefault(port, trio.CapacityLimiter(1))
        try:
            with trio.fail_after(timeout_s):
                ask = partial(self._add, port, lease_s, attempt)
                outside = await trio.to_thread.run_sync(ask, abandon_on_cancel=True, limiter=place)
                return outside
        except trio.TooSlowError:
            raise UpnpFailed(f"no answer by UPnP within {timeout_s:g} s") from None
        finally:
            if outside is None and attempt.leave():
                with trio.CancelScope(shield=True):
                    await self.remove(port, timeout_s)

    async def remove(self, port: int, timeout_s: float) -> None:
        """Take it back; not longer than that, and without complaint: a lease ends by itself."""
        router = self._open.pop(port, None)
        if router is not None:
            with trio.move_on_after(timeout_s):
                await trio.to_thread.run_sync(_delete, router, port, abandon_on_cancel=True, limiter=self._removing)

    def _router(self) -> Any:
        try:
            upnp = self._make()
        except ImportError:
            raise UpnpFailed(MISSING) from None
        upnp.discoverdelay = DISCOVERY_MS
        try:
            upnp.discover()
            upnp.selectigd()
        except Exception as error:  # the library raises bare Exception
            raise UpnpFailed(f"no router answers to UPnP ({error})") from None
        return upnp

    def _add(self, port: int, lease_s: int, attempt: _Attempt) -> Address:
        upnp = self._router()
        try:
            outside = Address(str(upnp.externalipaddress()), port)
        except Exception as error:  # no address, or none that is one
            raise UpnpFailed(f"the router does not tell its outside address ({error})") from None
        if why := not_public(outside):
            raise UpnpFailed(why)
        if attempt.left:
            raise UpnpFailed("left behind")
        try:
            upnp.addportmapping(port, "TCP", upnp.lanaddr, port, DESCRIPTION, "", lease_s)
        except Exception as error:
            raise UpnpFailed(f"the router refuses by UPnP ({error})") from None
        self._open[port] = upnp
        if not attempt.done():
            self._open.pop(port, None)
            _delete(upnp, port)
        return outside


class _Attempt:
    """Whether the thread was done first or left first; both sides ask at any time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done = self.left = False

    def done(self) -> bool:
        """The port is open; False: nobody waits for it any more."""
        with self._lock:
            self._done = not self.left
            return self._done

    def leave(self) -> bool:
        """Nobody waits any more; True: the port is open already."""
        with self._lock:
            self.left = True
            return self._done


def _delete(upnp: Any, port: int) -> None:
    try:
        upnp.deleteportmapping(port, "TCP")
    except Exception:  # gone already
        return


def _miniupnpc() -> Any:
    import miniupnpc

    return miniupnpc.UPnP()
