"""Binding the configured addresses and taking connections from strangers.

What goes wrong in accept loops, from the libraries of others and from trio's `_highlevel_serve_listeners.py`:

* One bad connection ends the listener (WIRE-1).  So a connection's task can end only itself: what it raises is counted by
  kind, and what nobody foresaw is logged once with its traceback by the one supervisor of this file.
* `accept` fails for reasons of the machine (no descriptors: EMFILE, ENFILE, ENOBUFS, ENOMEM) or of one connection that is
  already gone (ECONNABORTED and its kin, accept(2)).  Both pause 100 ms (trio's constant) and go on: the pause keeps a
  machine without descriptors from spinning.
* A stranger opens a thousand connections and sends nothing.  Handshakes under way are capped (64, 8 an IP address, and half of
  all an IPv4 /24 or IPv6 /48, since one line may have many addresses): the next one is closed before a byte of it is read.
  Connections a second are capped by a token bucket an IPv4 address or IPv6 /56 (what one household gets), 5 a second with burst
  64, because a handshake costs about 1 ms of CPU.  Loopback, and private networks in `lan` and `host` scope, are exempt: a lab
  starts its nodes in one tick.
* "Address already in use" does not say which address and what to do: `BindFailed` does.

Every configured address is tried; some that fail are reported, none that works is fatal.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import trio

from wire.address import Address, Scope
from wire.errors import Code, LocalProtocolError
from wire.hello import Hello, Refusal
from wire.limits import Limits
from wire.net.transport import Listener, Pipe, Transport
from wire.rates import Bucket
from wire.reservations import line_of

log = logging.getLogger("wire.net")


FULL_RETRY_MS = 5000  # a refused guest tries again after this, or elsewhere at once


def full_house(offer: Hello, run: bytes | None, limits: Limits, *, held: int, most: int) -> Refusal | None:
    """What a stranger is told who comes while `held` of at most `most` connections stand; None if there is room for it."""
    if run is not None and not any(offer.run_tag):
        most -= int(most * limits.inbound_members_share)  # guests leave room for members
    return Refusal(Code.RESOURCE_LIMIT, FULL_RETRY_MS) if held >= most else None


class BindFailed(LocalProtocolError):
    """None of the addresses could be bound; the text names each with its reason and what to do."""

    def __init__(self, failures: Sequence[tuple[Address, str]]) -> None:
        self.failures = tuple(failures)
        self.text = "cannot listen: " + "; ".join(f"{address}: {why}" for address, why in failures)
        super().__init__(self.text, code=Code.REFUSED)

    def __str__(self) -> str:
        return self.text


def why_not_bound(address: Address, error: OSError) -> str:
    """One sentence for people: what is wrong with that address and what to do."""
    if error.errno == errno.EADDRINUSE:
        return f"port {address.port} is in use by another program: choose another port, or stop that program"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{address.host} is not an address of this machine: listen on one that is, or on 0.0.0.0 for all"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"port {address.port} needs privileges: choose one above 1023"
    if error.errno == errno.EAFNOSUPPORT:
        return "this machine has no IPv6" if address.kind == "ip6" else "this machine has no IPv4"
    return error.strerror or str(error)


async def bind_all(
    transport: Transport, addresses: Sequence[Address]
) -> tuple[list[Listener], list[tuple[Address, str]]]:
    """Bind each address; names are resolved.  Returns the listeners and what failed.

    Raises `BindFailed` if addresses were given and none could be bound.  A cancel closes what was bound.
    """
    listeners: list[Listener] = []
    failures: list[tuple[Address, str]] = []
    try:
        for address in addresses:
            try:
                for literal_address in await transport.resolve(address):
                    listeners.append(await transport.listen(literal_address))
            except OSError as error:
                failures.append((address, why_not_bound(address, error)))
    except BaseException:
        for listener in listeners:
            listener.close()
        raise
    if failures and not listeners:
        raise BindFailed(failures)
    return listeners, failures


class Admission:
    """Who may start a handshake.  Pure: the time is an argument."""

    def __init__(self, limits: Limits, scope: Scope) -> None:
        self._limits = limits
        self._lenient = scope in (Scope.LAN, Scope.HOST)
        self._half_open: Counter[str] = Counter()
        self._lines: Counter[str] = Counter()
        self._buckets: dict[str, Bucket] = {}

    @property
    def half_open(self) -> int:
        """Handshakes under way."""
        return self._half_open.total()

    def begin(self, host: str, now: float) -> Code | None:
        """A connection from `host` wants to start its handshake.

        None: it may, and holds a place until `release`.  A code: it may not, and holds nothing.
        """
        limits = self._limits
        if self._half_open.total() >= limits.half_open_max or self._half_open.get(host, 0) >= limits.half_open_per_ip:
            return Code.RESOURCE_LIMIT
        key, exempt = _network(host, self._lenient)
        line = line_of(host)
        if not exempt and self._lines.get(line, 0) >= limits.half_open_per_network:
            return Code.RESOURCE_LIMIT
        if not exempt and not self._take_token(key, now):
            return Code.RATE_LIMITED
        self._half_open[host] += 1
        self._lines[line] += 1
        return None

    def release(self, host: str) -> None:
        """That handshake is over, whatever came of it."""
        for counts, key in ((self._half_open, host), (self._lines, line_of(host))):
            counts[key] -= 1
            if not counts[key]:
                del counts[key]

    def _take_token(self, key: str, now: float) -> bool:
        limits = self._limits
        bucket = self._buckets.get(key)
        if bucket is None:
            if len(self._buckets) >= limits.peer_book_max:  # an attacker with many networks: the fullest loses least
                self._buckets.pop(max(self._buckets, key=lambda item: self._buckets[item].tokens))
            bucket = self._buckets[key] = Bucket(limits.connects_per_ip_per_s, limits.connects_per_ip_burst, now)
        return bucket.take(now)


def _network(host: str, lenient: bool) -> tuple[str, bool]:
    """(key of the rate bucket, exempt)"""
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return host, False
    exempt = ip.is_loopback or (lenient and (ip.is_private or ip.is_link_local))
    if ip.version == 6:
        return str(ipaddress.ip_network((ip, 56), strict=False)), exempt
    return str(ip), exempt


async def accept_loop(
    listener: Listener,
    admission: Admission,
    serve: Callable[[Pipe], Awaitable[None]],
    counts: Counter[str],
    pause_s: float,
) -> None:
    """Take connections for ever; each is served in a task of its own that can end only itself.

    `counts` collects `accepted`, `refused-<code>` and `accept-error`.  A cancel closes the listener and every pipe whose
    `serve` has not handed it on (that is `serve`'s promise).
    """

    async def supervise(pipe: Pipe, host: str) -> None:
        try:
            await serve(pipe)
        except Exception:  # one of the two supervisors: whatever it was, it ends this connection and nothing else
            counts["internal-error"] += 1
            log.exception("serving a connection failed")
            pipe.abort()
        finally:
            admission.release(host)

    try:
        async with trio.open_nursery() as nursery:
            while True:
                try:
                    pipe = await listener.accept()
                except OSError as error:
                    counts["accept-error"] += 1
                    log.debug("accept: %s", error)
                    await trio.sleep(pause_s)
                    continue
                except trio.ClosedResourceError:
                    return
                host = pipe.info().remote[0]
                refusal = admission.begin(host, trio.current_time())
                if refusal is not None:
                    counts[f"refused-{refusal.name.lower()}"] += 1
                    pipe.abort()
                    continue
                counts["accepted"] += 1
                nursery.start_soon(supervise, pipe, host)
    finally:
        listener.close()
