"""Addresses: one spelling each, judged by their class before anybody dials or advertises them.

What goes wrong.  A node that listens on 0.0.0.0 tells the world "0.0.0.0"; a record lists 192.168.0.9, which is a stranger in the
dialler's own house; ten thousand records name one victim, or the dialler's own router, and the swarm becomes the weapon; a host
name from a stranger is resolved inside our network; 127.1 and 0x7f000001 are read as loopback by one library and as a name by
another; ::ffff:10.0.0.1 and fe80::1%eth0 slip past checks written for plain addresses.

The way chosen.  An address is its canonical ASCII text and nothing else (no binary form: one parser less).  What a person types
may be loose and is normalised; what a peer sends must already be canonical, or it is refused (`Address.parse_received`).  Every
address is classified once, when it is made.  Advertising takes an `Advertised`, which cannot be made from an address that must
not be told; dialling asks `may_dial`.

    /ip4/A/tcp/P   /ip6/A/tcp/P   /dns/H/tcp/P   /dns4/H/tcp/P   /dns6/H/tcp/P      each with optional /p2p/ID
    <relay address>/p2p/R/p2p-circuit/p2p/B                                        through relay R to peer B
    [ID@]host:port                                                                 short form, for people

Sources: RFC 5952 (text of IPv6), RFC 6890 and the IANA special-purpose registries (classes), RFC 1918, 4193, 6598; RFC 1123
(host names); the forms are those of multiaddr, as far as they go.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address
from typing import Literal, cast

from wire.errors import printable
from wire.identity import PeerId
from wire.limits import DEFAULT_LIMITS

ADDRESS_MAX_BYTES = DEFAULT_LIMITS.address_max_bytes
NAME_MAX_CHARS = 253  # RFC 1035, without the final dot

AddressKind = Literal["ip4", "ip6", "dns", "dns4", "dns6"]
KINDS: frozenset[str] = frozenset({"ip4", "ip6", "dns", "dns4", "dns6"})
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Scope(StrEnum):
    """How far the swarm reaches; a setting of the node."""

    INTERNET = "internet"
    LAN = "lan"
    HOST = "host"  # a swarm on one machine


class AddressClass(StrEnum):
    """What kind of place an address is."""

    UNSPECIFIED = "unspecified"
    LOOPBACK = "loopback"
    LINK_LOCAL = "link-local"
    PRIVATE = "private"
    SHARED = "shared"  # carrier-grade NAT
    MULTICAST = "multicast"
    RESERVED = "reserved"
    GLOBAL = "global"
    NAME = "name"  # unknown until resolved


_ALWAYS = {AddressClass.GLOBAL}
_LAN = _ALWAYS | {AddressClass.PRIVATE, AddressClass.SHARED}
_HOST = _LAN | {AddressClass.LOOPBACK, AddressClass.LINK_LOCAL}
# scope -> classes that may be advertised, and dialled when a peer named them
REACHABLE: dict[Scope, frozenset[AddressClass]] = {
    Scope.INTERNET: frozenset(_ALWAYS),
    Scope.LAN: frozenset(_LAN),
    Scope.HOST: frozenset(_HOST),
}

# First match wins.  RESERVED holds, beside what is unassigned, everything that wraps an IPv4 address (6to4, Teredo, NAT64,
# v4-compatible): 2002:0a00:0001:: is 10.0.0.1 in disguise.
_CLASSES: tuple[tuple[AddressClass, tuple[Network, ...]], ...] = tuple(
    (kind, tuple(ipaddress.ip_network(text) for text in texts.split()))
    for kind, texts in (
        (AddressClass.UNSPECIFIED, "0.0.0.0/32 ::/128"),
        (AddressClass.LOOPBACK, "127.0.0.0/8 ::1/128"),
        (AddressClass.LINK_LOCAL, "169.254.0.0/16 fe80::/10"),
        (AddressClass.PRIVATE, "10.0.0.0/8 172.16.0.0/12 192.168.0.0/16 fc00::/7"),
        (AddressClass.SHARED, "100.64.0.0/10"),
        (AddressClass.MULTICAST, "224.0.0.0/4 ff00::/8"),
        (
            AddressClass.RESERVED,
            "0.0.0.0/8 192.0.0.0/24 192.0.2.0/24 192.88.99.0/24 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 240.0.0.0/4 "
            "2001::/23 2001:db8::/32 2002::/16 3fff::/20 5f00::/16",
        ),
        (AddressClass.GLOBAL, "0.0.0.0/0 2000::/3"),
    )
)

_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?\Z")
_NUMERIC_LABEL = re.compile(r"([0-9]+|0x[0-9a-f]*)\Z")
_ZONE = re.compile(r"[A-Za-z0-9_.-]{1,15}\Z")  # Linux: IFNAMSIZ - 1
_PORT = re.compile(r"(0|[1-9][0-9]{0,4})\Z")


def classify(address: IPv4Address | IPv6Address, treat_as_global: Sequence[Network] = ()) -> AddressClass:
    """The class of a literal address.  `treat_as_global`: networks that this swarm uses as if they were the internet."""
    if any(address in network for network in treat_as_global):
        return AddressClass.GLOBAL
    for kind, networks in _CLASSES:
        if any(address in network for network in networks):
            return kind
    return AddressClass.RESERVED


@dataclass(frozen=True, slots=True)
class Address:
    """Where, and perhaps who.  `str` is the canonical long form, and `Address.parse(str(a)) == a`.

    host: literal without brackets (with %zone only if typed or seen locally), or a lower-case name.  port: 0 only for listening.
    kind: derived from the host when empty.  peer_id: who must answer.  relay: set for a circuit, then host and port are the
    relay's and `peer_id` is behind it.  Raises ValueError.
    """

    host: str
    port: int
    kind: AddressKind | Literal[""] = ""
    peer_id: PeerId | None = None
    relay: PeerId | None = None
    treat_as_global: Sequence[Network] = field(default=(), repr=False, compare=False)
    scope_class: AddressClass = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 0xFFFF:
            raise ValueError(f"port {self.port} is not between 0 and 65535")
        if self.relay is not None and (self.peer_id is None or self.peer_id == self.relay):
            raise ValueError("a circuit names the relay and another peer behind it")
        host, kind, scope_class = _judge(self.host, self.kind, tuple(self.treat_as_global))
        object.__setattr__(self, "host", host)
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "scope_class", scope_class)
        if len(str(self)) > ADDRESS_MAX_BYTES:
            raise ValueError(f"an address has at most {ADDRESS_MAX_BYTES} bytes; the name is too long")

    @classmethod
    def parse(cls, text: str, *, treat_as_global: Sequence[Network] = ()) -> Address:
        """An address as a person may write it, long or short, normalised.  Raises ValueError that says what is wrong."""
        if len(text) > ADDRESS_MAX_BYTES or not text.isascii():
            raise ValueError(f"an address is ASCII of at most {ADDRESS_MAX_BYTES} bytes, not {printable(text)}")
        try:
            host, port, kind, peer_id, relay = _long(text) if text.startswith("/") else _short(text)
            return cls(host, port, kind, peer_id, relay, treat_as_global)
        except ValueError as error:
            raise ValueError(f"not an address: {printable(text)}: {error}") from None

    @classmethod
    def parse_received(cls, text: str, *, treat_as_global: Sequence[Network] = ()) -> Address:
        """An address as a peer must write it: canonical to the byte, no zone, no mapped IPv4, no port 0.  Raises ValueError."""
        address = cls.parse(text, treat_as_global=treat_as_global)
        if str(address) != text or address.port == 0 or "%" in address.host:
            raise ValueError(f"not a canonical address: {printable(text)}")
        return address

    @property
    def is_literal(self) -> bool:
        """Whether it can be dialled without resolving a name."""
        return self.kind in ("ip4", "ip6")

    def with_peer(self, peer_id: PeerId | None) -> Address:
        """The same place, with who must answer (None: whoever does).  Not for circuits, which cannot do without."""
        return replace(self, peer_id=peer_id)

    def __str__(self) -> str:
        place = f"/{self.kind}/{self.host}/tcp/{self.port}"
        if self.relay is not None:
            return f"{place}/p2p/{self.relay}/p2p-circuit/p2p/{self.peer_id}"
        return place if self.peer_id is None else f"{place}/p2p/{self.peer_id}"


def _long(text: str) -> tuple[str, int, AddressKind, PeerId | None, PeerId | None]:
    parts = text.split("/")
    if len(parts) < 5 or parts[1] not in KINDS or parts[3] != "tcp":
        raise ValueError("expected /ip4/A/tcp/P, /ip6/A/tcp/P or /dns/NAME/tcp/P")
    host, port, kind, rest = parts[2], _port(parts[4]), cast(AddressKind, parts[1]), parts[5:]
    match rest:
        case []:
            return host, port, kind, None, None
        case ["p2p", peer]:
            return host, port, kind, PeerId.parse(peer), None
        case ["p2p", relay, "p2p-circuit", "p2p", peer]:
            return host, port, kind, PeerId.parse(peer), PeerId.parse(relay)
    raise ValueError("expected nothing, /p2p/ID or /p2p/RELAY/p2p-circuit/p2p/ID behind the port")


def _short(text: str) -> tuple[str, int, Literal[""], PeerId | None, None]:
    identity, at, place = text.rpartition("@")
    host, colon, port = place.rpartition(":")
    if not colon or not host:
        raise ValueError("expected host:port")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        if ":" not in host:
            raise ValueError("only an IPv6 address stands in brackets")
    elif ":" in host:
        raise ValueError("an IPv6 address stands in brackets: [::1]:4001")
    return host, _port(port), "", PeerId.parse(identity) if at else None, None


def _port(text: str) -> int:
    if not _PORT.match(text):
        raise ValueError(f"{text!r} is not a port")
    return int(text)


@lru_cache(4096)  # as many as the peer book has peers: the same few are judged again in every record, message and dial
def _judge(host: str, kind: str, treat_as_global: tuple[Network, ...]) -> tuple[str, AddressKind, AddressClass]:
    """(canonical host, kind, class); raises ValueError."""
    if kind not in KINDS and kind:
        raise ValueError(f"{printable(kind)} is no kind of address")
    literal, percent, zone = host.partition("%")
    try:
        ip = ipaddress.ip_address(literal) if kind in ("", "ip4", "ip6") else None
    except ValueError:
        if kind:
            raise ValueError(f"{printable(host)} is not an IP address") from None
        ip = None
    if ip is None:
        return _name(host), "dns" if kind in ("", "ip4", "ip6") else cast(AddressKind, kind), AddressClass.NAME
    if kind and kind != f"ip{ip.version}":
        raise ValueError(f"{printable(host)} is not an IPv{kind[2]} address")
    if ip.version == 6 and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped  # the same place, told by a dual-stack socket or a person
    scope_class = classify(ip, treat_as_global)
    if percent and (ip.version != 6 or scope_class != AddressClass.LINK_LOCAL or not _ZONE.match(zone)):
        raise ValueError("a zone belongs to a link-local IPv6 address only")
    return f"{ip}{percent}{zone}", "ip4" if ip.version == 4 else "ip6", scope_class


def _name(host: str) -> str:
    name = host.lower()
    labels = name.split(".")
    if len(name) > NAME_MAX_CHARS or not all(_LABEL.match(label) for label in labels):
        raise ValueError(f"{printable(host)} is neither an IP address nor a host name")
    if _NUMERIC_LABEL.match(labels[-1]):
        # 127.1, 2130706433, 0x7f.1: an address to some resolvers, a name to others.
        raise ValueError(f"{printable(host)} is an IP address in a spelling that is not accepted")
    return name


@dataclass(frozen=True, slots=True)
class Advertised:
    """An address that may be told to others in this scope.  Raises ValueError for any other: a wildcard can never get out."""

    address: Address
    scope: Scope

    def __post_init__(self) -> None:
        address = self.address
        if address.scope_class == AddressClass.NAME:
            raise ValueError(f"{address}: names are never resolved by those who receive them; advertise an IP address")
        if address.port == 0 or "%" in address.host:
            raise ValueError(f"{address}: a port of 0 or a zone means nothing elsewhere")
        if address.scope_class not in REACHABLE[self.scope]:
            raise ValueError(f"{address}: {address.scope_class} addresses are not advertised in scope {self.scope}")

    def __str__(self) -> str:
        return str(self.address)


def may_dial(address: Address, scope: Scope, received: bool = True) -> bool:
    """Whether this address may be dialled.

    received: a peer named it; then its class must fit the scope and names are refused.  Otherwise the operator did, and only what
    nobody can be reached at is refused.  Private addresses of a peer behind our own router are another question: `neighbours.py`.
    """
    if address.port == 0 or address.scope_class in (AddressClass.UNSPECIFIED, AddressClass.MULTICAST):
        return False
    if not received:
        return True
    if "%" in address.host:
        return False
    return address.scope_class in REACHABLE[scope]
