"""Reaching one peer of which several addresses are known: in which order, how many at once, and what a failure says.

The problem is that of RFC 8305 ("happy eyeballs", after RFC 6555): of a peer's addresses some swallow packets, and the naive
loop waits for the kernel's SYN retries (two minutes) before it comes to the address that works.  The remedy is to start
the next attempt when the previous one has failed *or* is 250 ms old (RFC 8305 section 5: "Connection Attempt Delay", 250 ms
recommended), alternating address families (section 4), and to take the first that succeeds.

Differences from the RFC, and why:

* An attempt counts as successful when the peer is *authenticated*, not when TCP connects.  A stranger that now has a
  peer's old address must not end the race, and a machine that accepts and then says nothing must not either.
* A private address gets only 30 ms before the next one starts: it answers within the house or not at all.
* Circuits through relays come last, half a second after the direct addresses: a direct connection costs nobody else's line.
* What failed lately goes to the end (RFC 8305 section 4: "historical data"), and what failed very lately is not tried at
  all: back-off of 5 s + 1 s x n^2 after the n-th failure in a row, at most 5 min, *per address* (go-libp2p's constants).
  It is forgotten on one success, on a newer record of the peer, and when that peer dials us (FIND-11).
* At most 8 attempts at once for a peer, so that a record with 16 addresses is no amplifier.

All failures end in one `DialFailed`, which names each address with its cause; addresses that were held back are named too.
The order is `plan_dial`, a pure function of its arguments; `race` carries it out.
"""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import trio

from wire.address import Address, AddressClass, Scope
from wire.errors import Code, WireError
from wire.limits import Limits
from wire.net.causes import OUTRUN, Cause, cause_of
from wire.net.transport import Pipe, Transport

T = TypeVar("T")

# go-libp2p's dial back-off: base + 1 s x n^2 after the n-th failure in a row.
BACKOFF_SQUARE_S = 1.0

# Answers within the house or not at all.
NEAR = frozenset({AddressClass.PRIVATE, AddressClass.LOOPBACK, AddressClass.LINK_LOCAL})

# A table of addresses that never succeeded must not grow with every record that passes: the oldest give way.
MAX_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class Attempt:
    """One line of a dial plan."""

    address: Address
    delay_s: float  # start at the latest so long after the attempt before


@dataclass(frozen=True, slots=True)
class HeldBack:
    """An address that is not tried now."""

    address: Address
    wait_s: float
    cause: Cause  # of its last failure


@dataclass(slots=True)
class _Failures:
    count: int
    at: float
    cause: Cause


class BackOff:
    """Failures in a row per address, in monotonic time.  Pure bookkeeping: it never waits itself."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._failures: dict[str, _Failures] = {}

    def __len__(self) -> int:
        return len(self._failures)

    def failed(self, address: Address, cause: Cause, now: float) -> None:
        key = _key(address)
        old = self._failures.pop(key, None)
        self._failures[key] = _Failures(old.count + 1 if old else 1, now, cause)
        if len(self._failures) > MAX_REMEMBERED:
            del self._failures[next(iter(self._failures))]

    def forget(self, addresses: Iterable[Address]) -> None:
        """A success, a newer record, or an inbound connection from the peer: start afresh."""
        for address in addresses:
            self._failures.pop(_key(address), None)

    def forget_all(self) -> None:
        """The local network changed: what failed before says nothing."""
        self._failures.clear()

    def count(self, address: Address) -> int:
        found = self._failures.get(_key(address))
        return found.count if found else 0

    def held_back(self, address: Address, now: float) -> HeldBack | None:
        found = self._failures.get(_key(address))
        if found is None:
            return None
        limits = self._limits
        pause = min(limits.dial_backoff_base_s + BACKOFF_SQUARE_S * found.count**2, limits.dial_backoff_max_s)
        wait_s = found.at + pause - now
        return HeldBack(address, wait_s, found.cause) if wait_s > 0 else None


class DialRate:
    """At most 3 dials a second to one IP address, whoever named it: records must not aim a swarm at a victim.

    Loopback, and private networks in `lan` and `host` scope, are exempt: there the victim would be our own house, and a lab starts
    in one tick.  Dials over the rate wait their turn.  A node has one, for all that dial: several would add up.
    """

    def __init__(self, limits: Limits, scope: Scope) -> None:
        self._every_s = 1.0 / limits.dials_per_target_per_s
        self._exempt = {AddressClass.LOOPBACK} if scope is Scope.INTERNET else NEAR
        self._free_at: dict[str, float] = {}

    def delay_s(self, address: Address, now: float) -> float:
        """Takes the next place for a dial to this host; how long to wait for it."""
        if address.scope_class in self._exempt:
            return 0.0
        if len(self._free_at) >= MAX_REMEMBERED:
            self._free_at = {host: at for host, at in self._free_at.items() if at > now}
        at = max(now, self._free_at.get(address.host, now))
        self._free_at[address.host] = at + self._every_s
        return at - now

    def queued_s(self, address: Address, now: float) -> float:
        """How long the next dial to this host would wait.  Takes no place: a place is not given back."""
        return max(0.0, self._free_at.get(address.host, now) - now)


def _key(address: Address) -> str:
    place = f"{address.host} {address.port}"
    return place if address.relay is None else f"{place} {address.peer_id}"


def plan_dial(
    candidates: Sequence[Address], backoff: BackOff, now: float, limits: Limits
) -> tuple[tuple[Attempt, ...], tuple[HeldBack, ...]]:
    """What to try in which order with which delays, and what not to try now.

    Addresses of the same host and port are tried once, circuits after all others.  Of the rest those without a failure come
    first; within each half the families alternate, beginning with the family of the first candidate.
    """
    unique = list({_key(address): address for address in candidates}.values())
    held = [found for address in unique if (found := backoff.held_back(address, now)) is not None]
    waiting = {_key(found.address) for found in held}
    ready = [address for address in unique if _key(address) not in waiting]
    direct = [address for address in ready if address.relay is None]
    circuits = [address for address in ready if address.relay is not None]
    fresh = interleave([address for address in direct if not backoff.count(address)])
    stale = interleave(sorted((address for address in direct if backoff.count(address)), key=backoff.count))
    attempts: list[Attempt] = []
    for address in fresh + stale + sorted(circuits, key=backoff.count):
        if not attempts:
            delay_s = 0.0
        elif address.relay is not None and attempts[-1].address.relay is None:
            delay_s = limits.dial_stagger_circuit_s
        elif attempts[-1].address.scope_class in NEAR:
            delay_s = limits.dial_stagger_private_s
        else:
            delay_s = limits.dial_stagger_s
        attempts.append(Attempt(address, delay_s))
    return tuple(attempts), tuple(held)


def interleave(addresses: Sequence[Address]) -> list[Address]:
    """Alternate between IPv6 and the rest, keeping the order within each; begins with the family of the first."""
    if not addresses:
        return []
    first_family = addresses[0].kind == "ip6"
    queues = [
        [address for address in addresses if (address.kind == "ip6") == first_family],
        [address for address in addresses if (address.kind == "ip6") != first_family],
    ]
    result: list[Address] = []
    for index in range(max(map(len, queues))):
        result += [queue[index] for queue in queues if index < len(queue)]
    return result


async def dial_from(transport: Transport, address: Address, local_port: int) -> Pipe:
    """Dial from that port if it can be, else from any: a connection between the two ports may linger."""
    if local_port:
        try:
            return await transport.dial(address, local_port=local_port)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
                raise
    return await transport.dial(address)


class DialFailed(WireError):
    """Every address failed.  `causes` holds each address that was tried or held back with its cause."""

    def __init__(self, target: str, causes: Mapping[Address, Cause], held: Sequence[HeldBack] = ()) -> None:
        self.target = target
        self.causes: dict[Address, Cause] = dict(causes)
        lines = [f"{address}: {cause}" for address, cause in causes.items()]
        for item in held:
            self.causes[item.address] = item.cause
            lines.append(f"{item.address}: not tried again for {item.wait_s:.0f} s ({item.cause})")
        self.held = tuple(held)
        detail = f"{target} cannot be reached: " + ("; ".join(lines) if lines else "no address of it is known")
        codes = [cause.code for cause in causes.values()]
        code = codes[0] if codes and all(item == codes[0] for item in codes) else Code.TIMEOUT
        retry_after = min((item.wait_s for item in held), default=None)
        super().__init__(detail, code=code, retry_after=retry_after)
        self.text = detail  # whole: nothing in it is a stranger's unescaped text
        self.retryable = not self.causes or any(cause.retryable for cause in self.causes.values())

    def __str__(self) -> str:
        return self.text


async def race(
    attempts: Sequence[Attempt],
    connect: Callable[[Address], Awaitable[T]],
    discard: Callable[[T], None],
    *,
    at_once: int,
    failed: Callable[[Address, Cause], None] = lambda address, cause: None,
) -> T | dict[Address, Cause]:
    """Run the attempts of a plan; the first that returns wins and the others are cancelled.

    Gives the winner's result, or the cause of each failure if all failed.  `discard` gets results that came second, also
    when this call is cancelled: nothing is left open then.  `failed` is told each failure as it happens, and who was outrun.
    """
    won: list[T] = []
    causes: dict[Address, Cause] = {}
    slots = trio.CapacityLimiter(at_once)

    pending: dict[Address, None] = {}  # in the order of their start

    async def attempt(address: Address, over: trio.Event) -> None:
        async with slots:
            pending[address] = None
            try:
                result = await connect(address)
            except (WireError, OSError, trio.TooSlowError) as error:
                causes[address] = cause = cause_of(error)
                del pending[address]
                failed(address, cause)
                over.set()
                return
            if won:
                discard(result)
                return
            won.append(result)
            for other in pending:
                if other == address:
                    break
                failed(other, OUTRUN)  # it had a head start and lost: not first again (FIND-2)
            nursery.cancel_scope.cancel()

    try:
        async with trio.open_nursery() as nursery:
            previous: trio.Event | None = None
            for item in attempts:
                if previous is not None:
                    with trio.move_on_after(item.delay_s):
                        await previous.wait()
                previous = trio.Event()
                nursery.start_soon(attempt, item.address, previous)
    except BaseException:
        for result in won:
            discard(result)
        raise
    return won[0] if won else causes
