"""Can others dial this node, and at which address?  From what they say to one state (FIND-12, NAT-9).

Two kinds of evidence come in.  *Observations*: as which outside address a peer sees a connection that left from our listener's port.
*Verdicts*: whether a checker that dialled an address found us there.  Out comes:

    public          an address was reached by those who were asked
    nat             not reached; the router gives our port the same outside port towards everybody: a hole can be punched
    nat-symmetric   not reached; another outside port towards each destination: only relays help
    outbound-only   not reached, although nothing translates: a firewall; or there is no listener at all
    unknown         nobody was asked yet, or nobody's answer counts

What goes wrong, and what is done:

* A checker lies, or one hoster has many: an address counts as reached when 2 of the last 3 checkers in *distinct networks* say so.
  With fewer at hand all of them must, and the verdict is called weak.
* A router that filters by address lets the checker in because we talk to it from that very port.  Its yes is worth nothing then
  (`biased`), its no is worth as much as any other's.  If the address is this machine's own there is no such router, and it counts.
* The first to say "your port differs" makes us symmetric and we give up punching: of several observers the majority decides, and a
  difference needs two of them.

A verdict fades after an hour, and everything is forgotten when this machine's addresses change.

Pure: times are monotonic seconds and arguments.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from wire.address import Address
from wire.identity import PeerId
from wire.limits import Limits
from wire.observed import network_of

# Whose words are kept; those that have nothing new to say for an hour fade anyway.
WITNESSES_MAX = 64
ADDRESSES_MAX = 32  # of which somebody has spoken: each new outside address that a peer claims is one


class Reach(StrEnum):
    """See the module; the words stand in peer records."""

    PUBLIC = "public"
    NAT = "nat"
    SYMMETRIC = "nat-symmetric"
    OUTBOUND = "outbound-only"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Finding:
    """What is known now.  `reason` is for people, and names what to do."""

    state: Reach
    addresses: tuple[Address, ...]  # where others have reached us
    outside: tuple[Address, ...]  # as which others see our listener's port: where to punch
    weak: bool
    reason: str


@dataclass(frozen=True, slots=True)
class _Word:
    network: str
    ok: bool | None  # None: it did not check
    biased: bool
    cause: str
    at: float


@dataclass(frozen=True, slots=True)
class _Sight:
    network: str
    address: Address
    at: float


class Reachability:
    """`listening`: our listeners as bound; `interfaces`: addresses of this machine."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.listening: tuple[Address, ...] = ()
        self.interfaces: frozenset[str] = frozenset()
        self._words: dict[Address, dict[PeerId, _Word]] = {}
        self._sights: dict[PeerId, _Sight] = {}

    def forget(self) -> None:
        """This machine's addresses changed: what was said before is about another place."""
        self._words.clear()
        self._sights.clear()

    # -- evidence

    def observed(self, observer: PeerId, host: str, seen: Address, now: float) -> bool:
        """A peer at `host` sees a connection from our listener's port as `seen`; True if that is new."""
        old = self._sights.pop(observer, None)
        self._sights[observer] = _Sight(network_of(host) or host, seen, now)
        if len(self._sights) > WITNESSES_MAX:
            del self._sights[next(iter(self._sights))]
        return old is None or old.address != seen

    def verdict(self, checker: PeerId, host: str, address: Address, ok: bool, cause: str, *, biased: bool, now: float) -> None:
        """A checker at `host` has dialled `address`.  `biased`: our listener's port has a connection to it."""
        own = address.host in self.interfaces
        self._keep(checker, address, _Word(network_of(host) or host, ok, biased and not own, cause, now))

    def silent(self, checker: PeerId, host: str, address: Address, now: float) -> None:
        """A checker did not answer: it is not asked again so soon, and says nothing about the address."""
        self._keep(checker, address, _Word(network_of(host) or host, None, True, "", now))

    def _keep(self, checker: PeerId, address: Address, word: _Word) -> None:
        words = self._words.setdefault(address, {})
        words.pop(checker, None)
        words[checker] = word
        if len(words) > WITNESSES_MAX:
            del words[next(iter(words))]
        if len(self._words) > ADDRESSES_MAX:
            del self._words[next(iter(self._words))]

    # -- what follows

    def candidates(self, announced: tuple[Address, ...], may_tell: tuple[Address, ...], now: float) -> tuple[Address, ...]:
        """What to have checked: announced addresses, own ones that may be told, then as others see us, at that port and at ours."""
        outside = self._outside(now)
        forwarded = tuple(
            Address(seen.host, bound.port) for seen in outside for bound in self.listening if bound.kind == seen.kind
        )
        found = dict.fromkeys((*announced, *may_tell, *outside, *forwarded))
        return tuple(found)[: self._limits.reach_addresses_max]

    def wants(self, checker: PeerId, host: str, address: Address, now: float) -> bool:
        """Whether this one's word about that address would tell something: its network has said nothing lately."""
        network, again_s = network_of(host) or host, self._limits.reach_again_s
        said = self._words.get(address, {}).get(checker)
        if said is not None and now - said.at < again_s:
            return False
        return all(word.network != network or word.biased or now - word.at >= again_s for word in self._fresh(address, now))

    def asked(self, address: Address, now: float) -> int:
        """How many networks have said something about it within `reach_again_s`."""
        since = now - self._limits.reach_again_s
        return len({word.network for word in self._fresh(address, now) if word.at >= since and word.ok is not None})

    def finding(self, candidates: tuple[Address, ...], now: float) -> Finding:
        """The state that follows from all of this for these candidates."""
        outside = self._outside(now)
        reached = [(address, weak) for address in candidates if (weak := self._reached(address, now)) is not None]
        if reached:
            addresses = tuple(address for address, _ in reached)
            weak = all(weak for _, weak in reached)
            told = "reached by others" + (" (only one network could be asked)" if weak else "")
            return Finding(Reach.PUBLIC, addresses, outside, weak, f"{addresses[0]} is {told}")
        if not self.listening:
            return Finding(Reach.OUTBOUND, (), outside, False, "there is no listener: others reach this node through relays only")
        refused = [word for address in candidates for word in self._fresh(address, now) if word.ok is False]
        # A yes that does not count: from peers that the router would let in anyway.  It shows how the router maps, no more.
        biased = [word for address in candidates for word in self._fresh(address, now) if word.ok and word.biased]
        if not refused and not (biased and outside):
            return Finding(Reach.UNKNOWN, (), outside, False, "nobody has tried to dial this node yet")
        port = self.listening[0].port
        why = (refused[-1].cause or "no answer") if refused else "only peers that this node had dialled before got through"
        remedy = f"open or forward TCP port {port}, or go on through relays"
        weak = len({word.network for word in refused}) < self._limits.reach_agree
        if self._symmetric(now):
            text = f"not reachable on port {port} ({why}); the router gives each connection another port: {remedy}"
            return Finding(Reach.SYMMETRIC, (), outside, weak, text)
        if outside and all(seen.host not in self.interfaces for seen in outside):
            text = f"not reachable on port {port} ({why}); behind a router that keeps the port: {remedy}"
            return Finding(Reach.NAT, (), outside, weak, text)
        if outside:
            text = f"not reachable on port {port} ({why}); a firewall stands before it: {remedy}"
            return Finding(Reach.OUTBOUND, (), outside, weak, text)
        return Finding(Reach.UNKNOWN, (), (), weak, f"not reachable on port {port} ({why}); how others see it is not known yet")

    def _fresh(self, address: Address, now: float) -> list[_Word]:
        since = now - self._limits.reach_verdict_life_s
        return [word for word in self._words.get(address, {}).values() if word.at >= since]

    def _reached(self, address: Address, now: float) -> bool | None:
        """None: not reached; else whether that rests on too few."""
        latest: dict[str, _Word] = {}
        for word in self._fresh(address, now):  # in the order in which they came
            if word.ok is False or (word.ok and not word.biased):
                latest.pop(word.network, None)
                latest[word.network] = word
        words = list(latest.values())[-self._limits.reach_checkers :]
        good = sum(word.ok is True for word in words)
        if not words or not good:
            return None
        if len(words) >= self._limits.reach_checkers:
            return False if good >= self._limits.reach_agree else None
        return (len(words) < self._limits.reach_agree) if good == len(words) else None

    def _outside(self, now: float) -> tuple[Address, ...]:
        """As which our port is seen, by most first."""
        counts = Counter(sight.address for sight in self._sights.values() if now - sight.at < self._limits.reach_verdict_life_s)
        return tuple(address for address, _ in counts.most_common())

    def _symmetric(self, now: float) -> bool:
        """Observers in two networks or more, and no two of these see the same: one hoster has one word."""
        for kind in ("ip4", "ip6"):
            fresh = (sight for sight in self._sights.values() if now - sight.at < self._limits.reach_verdict_life_s)
            seen = list({sight.network: sight.address for sight in fresh if sight.address.kind == kind}.values())
            if len(seen) >= 2 and len(set(seen)) == len(seen):
                return True
        return False
