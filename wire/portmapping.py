"""One TCP port that a router shall forward to us: when to ask, in which language, and what the answers mean.

    state      asks                    answered                                silence, refusal
    PCP        a mapping               -> HELD                                 -> ADDRESS (silence, another version) or PAUSE
    ADDRESS    NAT-PMP: the address    -> MAP, or PAUSE if it is not public    -> PAUSE
    MAP        NAT-PMP: a mapping      -> HELD                                 -> PAUSE
    HELD       nothing                 at half of the lease -> PCP or ADDRESS, whichever was answered
    PAUSE      nothing                 after a while -> PCP; a mapping whose lease still runs stays meanwhile

Silence is decided by asking again after 250 ms, 500 ms and so on, doubled each time (RFC 6886, 3.1).  PCP proposes 3 s for the first
pause because its server may be the provider's; ours is the router in the house, and who waits here is somebody who starts a node.
Five tries a language are 8 s; RFC 6886 would go on for two minutes, we come back after five.

What goes wrong, and what is done:

* A router restarts and has forgotten every mapping.  Each answer carries the seconds since it began (its epoch); one that does not fit
  to the last one and to our own clock says so (`Epoch`; RFC 6887, 8.5; RFC 6886, 3.6), and all mappings are asked for anew.
  One whose epochs never fit would have two ports ask in turn without end: what was granted within the last minute stays.
* The router stands behind another one, or behind the provider's: its "outside" address is private or shared (RFC 6598).  Such a
  mapping leads nowhere; it is given back, with the reason.
* A router grants a lease of a second, or of a day: at most what was asked for counts, and it is renewed no more often than each minute.
* An answer by somebody else: the nonce of PCP, the port of both, and (in the caller) the address that the socket is connected to.

Nothing here makes an address known to others: it is only worth asking for a verdict about (`wire/reachability.py`).

Pure: times are monotonic seconds and arguments; datagrams come out of `poll` and go into `received`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from wire.address import Address, AddressClass
from wire.limits import Limits
from wire.portmappackets import (
    NATPMP_RESULTS,
    PCP_RESULTS,
    natpmp_address,
    natpmp_map,
    parse_address,
    parse_map,
    parse_pcp,
    pcp_map,
    speaks_another_version,
)

# RFC 6887, 8.5: clocks may differ by a sixteenth, and a second is lost at each rounding.
EPOCH_SLACK_S = 2
EPOCH_DRIFT = 1 / 16

NO_ROUTER = "no router answers to PCP or NAT-PMP"

_NOT_PUBLIC = {
    AddressClass.PRIVATE: "it stands behind a second router (double NAT): forward the port there, or let that one only bridge",
    AddressClass.SHARED: "the provider shares one address among customers (carrier NAT): ask it for an address of your own",
    AddressClass.UNSPECIFIED: "it has none at the moment",
}


class Language(StrEnum):
    PCP = "PCP"
    NATPMP = "NAT-PMP"


class State(StrEnum):
    """See the module."""

    PCP = "pcp"
    ADDRESS = "address"
    MAP = "map"
    HELD = "held"
    PAUSE = "pause"


_LANGUAGE = {State.PCP: Language.PCP, State.ADDRESS: Language.NATPMP, State.MAP: Language.NATPMP}


@dataclass(frozen=True, slots=True)
class Mapping:
    """What a router has promised until `until` (monotonic)."""

    outside: Address
    language: Language
    until: float


def not_public(outside: Address) -> str:
    """Why a mapping with this outside address leads nowhere, in words; "" if it may lead somewhere."""
    if outside.scope_class is AddressClass.GLOBAL:
        return ""
    why = _NOT_PUBLIC.get(outside.scope_class, "nobody can be reached there")
    return f"the router's outside address {outside.host} is {outside.scope_class}: {why}"


class Epoch:
    """One router's clock.  `fits` is False once for each restart."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None

    def fits(self, epoch: int, now: float) -> bool:
        last, self._last = self._last, (epoch, now)
        if last is None:
            return True
        theirs, ours = epoch - last[0], now - last[1]
        if theirs < -1:
            return False
        slow = theirs + EPOCH_SLACK_S < ours * (1 - EPOCH_DRIFT)
        fast = ours + EPOCH_SLACK_S < theirs * (1 - EPOCH_DRIFT)
        return not (slow or fast)


class Mapper:
    """The mapping of one port.  `client`: this machine's IPv4 address towards the router; `nonce`: 12 random octets.

    `epoch` may be shared by the ports of one router; `restarted` is True after an answer that told of a restart, until it is cleared.
    """

    def __init__(self, client: str, port: int, nonce: bytes, epoch: Epoch, limits: Limits, now: float) -> None:
        self.port = port
        self.state = State.PCP
        self.why = ""  # of the last PAUSE, in words
        self.pauses = 0  # how often it gave up for a while
        self.restarted = False
        self._client = client
        self._nonce = nonce
        self._epoch = epoch
        self._limits = limits
        self._mapping: Mapping | None = None
        self._granted_at = now
        self._address = ""  # of NAT-PMP, between ADDRESS and MAP
        self._tries = 0
        self._due = now
        self._extra: list[bytes] = []  # to be sent with the next poll

    def mapping(self, now: float) -> Mapping | None:
        """What holds now."""
        return self._mapping if self._mapping is not None and now < self._mapping.until else None

    @property
    def due(self) -> float:
        """When `poll` has something to do."""
        until = self._due if self._mapping is None else min(self._due, self._mapping.until)
        return float("-inf") if self._extra else until

    def poll(self, now: float) -> tuple[bytes, ...]:
        """What to send now."""
        if self.mapping(now) is None:
            self._mapping = None
        out, self._extra = self._extra, []
        if now < self._due:
            return tuple(out)
        if self.state is State.HELD:
            natpmp = self._mapping is not None and self._mapping.language is Language.NATPMP
            self._begin(State.ADDRESS if natpmp else State.PCP, now)
        elif self.state is State.PAUSE:
            self._begin(State.PCP, now)
        if self._tries == self._limits.portmap_tries:
            if self.state is not State.PCP:
                self._pause(NO_ROUTER if self.state is State.ADDRESS else "the router stopped to answer", now)
                return tuple(out)
            self._begin(State.ADDRESS, now)
        out.append(self._request())
        self._due = now + self._limits.portmap_first_wait_s * (1 << self._tries)
        self._tries += 1
        return tuple(out)

    def received(self, data: bytes, now: float) -> None:
        """A datagram from the router; whatever is no answer to what was asked is ignored."""
        if self.state is State.PCP:
            if speaks_another_version(data):
                self._begin(State.ADDRESS, now)
            elif (pcp := parse_pcp(data, self._nonce, self.port)) is not None:
                self._told(pcp.epoch, now)
                if pcp.result or not pcp.lifetime:
                    self._pause(PCP_RESULTS.get(pcp.result, f"the router refuses (PCP result {pcp.result})"), now, pcp.lifetime)
                else:
                    self._granted(pcp.external_host, pcp.external_port, pcp.lifetime, now)
        elif self.state is State.ADDRESS:
            if (address := parse_address(data)) is not None:
                self._told(address.epoch, now)
                if address.result:
                    self._pause(_natpmp_words(address.result), now)
                elif why := not_public(Address(address.host, self.port)):
                    self._pause(why, now)
                else:
                    self._address = address.host
                    self._begin(State.MAP, now)
        elif self.state is State.MAP and (mapped := parse_map(data, self.port)) is not None:
            self._told(mapped.epoch, now)
            if mapped.result or not mapped.lifetime:
                self._pause(_natpmp_words(mapped.result), now)
            else:
                self._granted(self._address, mapped.external_port, mapped.lifetime, now)

    def unreachable(self, now: float) -> None:
        """The router says that nothing listens there (ICMP): neither language will be answered."""
        if self.state in _LANGUAGE:
            self._pause(NO_ROUTER, now)

    def again(self, now: float) -> None:
        """The router has restarted, as the answer to another port says: what it held for this one is gone."""
        if self.state is State.HELD:
            self._due = min(self._due, max(now, self._granted_at + self._limits.portmap_renew_least_s))

    def release(self) -> bytes | None:
        """The datagram that removes the mapping; None if there is none.  Sent once: an hour later it ends by itself."""
        mapping, self._mapping = self._mapping, None
        return None if mapping is None else self._removal(mapping.language)

    def _request(self) -> bytes:
        lifetime = int(self._limits.portmap_lease_s)
        held = self._mapping.outside if self._mapping is not None else None
        port = self.port if held is None else held.port  # a renewal names what it renews
        if self.state is State.PCP:
            return pcp_map(self._client, self._nonce, self.port, lifetime, port, "0.0.0.0" if held is None else held.host)
        return natpmp_address() if self.state is State.ADDRESS else natpmp_map(self.port, lifetime, port)

    def _removal(self, language: Language) -> bytes:
        return pcp_map(self._client, self._nonce, self.port, 0) if language is Language.PCP else natpmp_map(self.port, 0)

    def _begin(self, state: State, now: float) -> None:
        self.state, self._tries, self._due = state, 0, now

    def _pause(self, why: str, now: float, stands_s: float = 0.0) -> None:
        """`stands_s`: how long the router says that its refusal stands; not believed beyond a lease."""
        limits = self._limits
        self.state, self.why = State.PAUSE, why
        self.pauses += 1
        self._due = now + max(limits.portmap_again_s, min(stands_s, limits.portmap_lease_s))

    def _granted(self, host: str, port: int, lifetime: int, now: float) -> None:
        language, outside = _LANGUAGE[self.state], Address(host, port)
        if why := not_public(outside):
            self._mapping = None
            self._extra.append(self._removal(language))
            self._pause(why, now)
            return
        lease_s = min(lifetime, self._limits.portmap_lease_s)
        renew_s = max(lease_s / 2, self._limits.portmap_renew_least_s)
        self.state, self.why, self._granted_at = State.HELD, "", now
        self._mapping = Mapping(outside, language, now + max(lease_s, renew_s + 1))
        self._due = now + renew_s

    def _told(self, epoch: int, now: float) -> None:
        if not self._epoch.fits(epoch, now):
            self.restarted = True


def _natpmp_words(result: int) -> str:
    return NATPMP_RESULTS.get(result, f"the router refuses (NAT-PMP result {result})")
