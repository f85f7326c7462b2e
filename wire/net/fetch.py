"""Fetching a seed list over HTTP: the standard library in a thread, under a deadline and a cap.

What goes wrong: a server trickles one byte a second, so that a timeout of the socket never fires; it sends without end; it
redirects to `file:` or `ftp:`; it hangs while the node is stopped.  So the whole fetch has one deadline, the thread looks at it
between pieces, at most 64 KiB are read, only http and https are spoken, and a cancel abandons the thread, which then ends by itself
at its deadline and touches nothing.  While a header trickles in, though, the thread cannot look, and stays as long as the server
likes.  So a URL has one thread at a time, outside of trio's forty: there it would, minute after minute, take the places of those
that write snapshots.
"""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request

import trio

from wire.limits import Limits
from wire.net.seedentries import SeedListError

_PIECE_BYTES = 4096
_AGENT = "plnode"

# Of the standard handlers those that speak http and https; a redirect elsewhere finds nobody.
_HANDLERS = (
    urllib.request.ProxyHandler,
    urllib.request.HTTPHandler,
    urllib.request.HTTPSHandler,
    urllib.request.HTTPDefaultErrorHandler,
    urllib.request.HTTPRedirectHandler,
    urllib.request.HTTPErrorProcessor,
    urllib.request.UnknownHandler,
)


_PLACES: trio.lowlevel.RunVar[dict[str, trio.CapacityLimiter]] = trio.lowlevel.RunVar("seed list threads")  # by URL: the operator's


def _place(url: str) -> trio.CapacityLimiter:
    try:
        places = _PLACES.get()
    except LookupError:
        places = {}
        _PLACES.set(places)
    return places.setdefault(url, trio.CapacityLimiter(1))


async def fetch(url: str, limits: Limits) -> bytes:
    """The content of an http or https URL.  Raises `SeedListError` with the cause in words."""
    deadline_s = limits.seed_fetch_timeout_s
    with trio.move_on_after(deadline_s):
        return await trio.to_thread.run_sync(
            _fetch, url, time.monotonic() + deadline_s, limits.seed_fetch_max_bytes, abandon_on_cancel=True, limiter=_place(url)
        )
    raise SeedListError([f"{url}: not fetched within {deadline_s:g} s"])


def _fetch(url: str, until: float, most: int) -> bytes:
    opener = urllib.request.OpenerDirector()
    for handler in _HANDLERS:
        opener.add_handler(handler())
    request = urllib.request.Request(url, headers={"User-Agent": _AGENT})
    pieces, size = [], 0
    try:
        answer = opener.open(request, timeout=max(0.1, until - time.monotonic()))
        if answer is None:
            raise SeedListError([f"{url}: not an http or https URL"])
        with answer:
            while piece := answer.read1(_PIECE_BYTES):
                pieces.append(piece)
                size += len(piece)
                if size > most:
                    raise SeedListError([f"{url}: more than {most} bytes: not a seed list"])
                if time.monotonic() > until:
                    raise SeedListError([f"{url}: too slow"])
    except urllib.error.HTTPError as error:
        error.close()
        raise SeedListError([f"{url}: the server answers {error.code} {error.reason}"]) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise SeedListError([f"{url}: {getattr(error, 'reason', None) or error}"]) from None
    return b"".join(pieces)
