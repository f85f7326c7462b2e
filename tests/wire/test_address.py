"""Addresses: one spelling, the right class, and nothing is told or dialled that must not be."""

from __future__ import annotations

import ipaddress
import random
import socket
from ipaddress import IPv4Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.address import REACHABLE, Address, AddressClass, Advertised, Scope, classify, may_dial
from wire.errors import printable
from wire.identity import Identity, PeerId

ID, RELAY = (Identity(bytes(31) + bytes([n])).peer_id for n in (1, 2))

peer_ids = st.integers(1, 2**64).map(lambda seed: Identity(seed.to_bytes(32, "big")).peer_id)
literals = st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)).map(str)
labels = st.from_regex(r"[a-z0-9_]([a-z0-9_-]{0,20}[a-z0-9_])?", fullmatch=True)
names = st.lists(labels, max_size=3).map(lambda parts: ".".join([*parts, "x"]))


@st.composite
def addresses(draw: st.DrawFn) -> Address:
    kind = draw(st.sampled_from(["", "dns4", "dns6"]))
    host = draw(names if kind else st.one_of(literals, names))
    peer_id = draw(st.none() | peer_ids)
    relay = draw(st.none() | peer_ids) if peer_id is not None else None
    return Address(host, draw(st.integers(1, 65535)), kind, peer_id, None if relay == peer_id else relay)


def check_text_and_back(address: Address) -> None:
    text = str(address)
    assert Address.parse(text) == address == Address.parse_received(text)
    assert str(Address.parse(text)) == text and len(text) <= 256 and text.isascii()
    assert hash(Address.parse(text)) == hash(address)
    if address.relay is None:
        host = f"[{address.host}]" if address.kind == "ip6" else address.host
        short = f"{address.peer_id}@{host}:{address.port}" if address.peer_id else f"{host}:{address.port}"
        assert str(Address.parse(short)) == text.replace("/dns4/", "/dns/").replace("/dns6/", "/dns/")


@given(addresses())
def test_text_and_back(address: Address) -> None:
    check_text_and_back(address)


def test_text_and_back_of_ten_thousand() -> None:
    """Dense where hypothesis is thin: IPv6 with every pattern of zero groups, in which RFC 5952 has its rules."""
    rng = random.Random(5952)
    people = [None, ID, RELAY]
    for number in range(10_000):
        groups = [rng.choice((0, 0, rng.randrange(1 << 16))) for _ in range(8)]
        host = ":".join(f"{group:x}" for group in groups) if number % 4 else str(IPv4Address(rng.randrange(1 << 32)))
        who = rng.choice(people)
        check_text_and_back(Address(host, rng.randrange(1, 1 << 16), "", who, RELAY if who == ID and number % 3 else None))


@given(st.ip_addresses(v=6))
def test_rfc_5952_agrees_with_the_system(ip: ipaddress.IPv6Address) -> None:
    """Referee: the C library, which knows nothing of ours; the mapped and compatible forms are ours to refuse or to wrap."""
    if ip.ipv4_mapped is None and int(ip) >> 32:
        assert Address(ip.exploded, 1).host == socket.inet_ntop(socket.AF_INET6, ip.packed)


@pytest.mark.parametrize(
    ("typed", "canonical"),
    [
        ("127.0.0.1:4001", "/ip4/127.0.0.1/tcp/4001"),
        ("[::1]:4001", "/ip6/::1/tcp/4001"),
        ("[2001:DB8:0:0:1:0:0:1]:1", "/ip6/2001:db8::1:0:0:1/tcp/1"),
        ("Seed.Example.ORG:4001", "/dns/seed.example.org/tcp/4001"),
        ("localhost:0", "/dns/localhost/tcp/0"),
        ("node_1:65535", "/dns/node_1/tcp/65535"),
        (f"{ID}@seed:1", f"/dns/seed/tcp/1/p2p/{ID}"),
        (f"{ID}@[::1]:1", f"/ip6/::1/tcp/1/p2p/{ID}"),
        ("/ip4/1.2.3.4/tcp/5", "/ip4/1.2.3.4/tcp/5"),
        ("/ip6/0:0:0:0:0:0:0:1/tcp/5", "/ip6/::1/tcp/5"),
        ("/dns6/a.b/tcp/5", "/dns6/a.b/tcp/5"),
        (f"/ip4/1.2.3.4/tcp/5/p2p/{RELAY}/p2p-circuit/p2p/{ID}", f"/ip4/1.2.3.4/tcp/5/p2p/{RELAY}/p2p-circuit/p2p/{ID}"),
    ],
)
def test_what_a_person_types(typed: str, canonical: str) -> None:
    address = Address.parse(typed)
    assert str(address) == canonical
    if typed != canonical:
        with pytest.raises(ValueError):
            Address.parse_received(typed)


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":4001",
        "1.2.3.4",
        "1.2.3.4:",
        "1.2.3.4:x",
        "1.2.3.4:-1",
        "1.2.3.4:+1",
        "1.2.3.4:01",
        "1.2.3.4:65536",
        "1.2.3.4:99999999999",
        "1.2.3.4:1\n",
        "::1:4001",
        "[::1:4001",
        "[1.2.3.4]:1",
        "[::1]",
        "01.2.3.4:1",
        "1.2.3:1",
        "127.1:1",
        "2130706433:1",
        "0x7f000001:1",
        "0x7f.1:1",
        "host.1:1",
        "a..b:1",
        ".a:1",
        "a.:1",
        "-a:1",
        "a-:1",
        "a b:1",
        "bücher.example:1",
        "a/b:1",
        "x" * 64 + ":1",
        ".".join(["x" * 63] * 4) + ".x:1",
        "not-an-id@host:1",
        f"{ID}@{ID}@host:1",
        "/",
        "/ip4/1.2.3.4",
        "/ip4/1.2.3.4/tcp",
        "/ip4/1.2.3.4/tcp/",
        "/ip4/1.2.3.4/tcp/1/",
        "/ip4/1.2.3.4/udp/1",
        "/ip4/::1/tcp/1",
        "/ip6/1.2.3.4/tcp/1",
        "/ip4/name/tcp/1",
        "/ip5/1.2.3.4/tcp/1",
        "/ip4/1.2.3.4/tcp/1/p2p",
        "/ip4/1.2.3.4/tcp/1/p2p/x",
        "/ip4/1.2.3.4/tcp/1/ws",
        f"/ip4/1.2.3.4/tcp/1/p2p/{ID}/p2p-circuit",
        f"/ip4/1.2.3.4/tcp/1/p2p-circuit/p2p/{ID}",
        f"/ip4/1.2.3.4/tcp/1/p2p/{ID}/p2p-circuit/p2p/{ID}",
        f"/ip4/1.2.3.4/tcp/1/p2p/{RELAY}/p2p-circuit/p2p/{ID}/p2p-circuit/p2p/{ID}",
        "/dns/" + ".".join(["x" * 49] * 5) + f"/tcp/1/p2p/{ID}",
    ],
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match="address") as failure:
        Address.parse(text)
    assert printable(str(failure.value), 1000) == str(failure.value)


@given(st.text(max_size=300))
def test_any_text_parses_or_raises_value_error(text: str) -> None:
    try:
        address = Address.parse(text)
    except ValueError:
        return
    assert Address.parse(str(address)) == address


def test_find_13_mapped_and_scoped_addresses() -> None:
    """Typed by the user they mean what they say; from a peer they are refused; they are never advertised."""
    mapped = Address.parse("[::ffff:127.0.0.1]:4001")
    assert (mapped.kind, mapped.host, str(mapped)) == ("ip4", "127.0.0.1", "/ip4/127.0.0.1/tcp/4001")
    scoped = Address.parse("[fe80::1%lo]:4001")
    assert (scoped.kind, scoped.host, scoped.scope_class) == ("ip6", "fe80::1%lo", AddressClass.LINK_LOCAL)
    assert Address.parse(str(scoped)) == scoped
    # What a dual-stack socket and a link-local one report as the remote address.
    assert Address("::ffff:10.0.0.1", 5) == Address("10.0.0.1", 5)
    assert Address("fe80::1%lo", 5).host == "fe80::1%lo"

    for text in ("/ip6/::ffff:127.0.0.1/tcp/1", "/ip6/::ffff:7f00:1/tcp/1", "/ip6/fe80::1%lo/tcp/1", "/ip4/1.2.3.4/tcp/0"):
        with pytest.raises(ValueError, match="canonical"):
            Address.parse_received(text)
    with pytest.raises(ValueError):
        Advertised(scoped, Scope.HOST)
    assert not may_dial(scoped, Scope.HOST) and may_dial(scoped, Scope.INTERNET, received=False)
    for text in ("[fe80::1%]:1", "[fe80::1%a%b]:1", "[::1%lo]:1", "[2000::1%lo]:1", f"[fe80::1%{'e' * 16}]:1", "1.2.3.4%lo:1"):
        with pytest.raises(ValueError):
            Address.parse(text)


CLASSES = {
    AddressClass.UNSPECIFIED: ["0.0.0.0", "::"],
    AddressClass.LOOPBACK: ["127.0.0.1", "127.255.255.254", "::1"],
    AddressClass.LINK_LOCAL: ["169.254.169.254", "fe80::1", "febf::1"],
    AddressClass.PRIVATE: ["10.0.0.7", "172.16.0.1", "172.31.255.1", "192.168.0.9", "fc00::1", "fd12::1"],
    AddressClass.SHARED: ["100.64.0.1", "100.127.255.255"],
    AddressClass.MULTICAST: ["224.0.0.1", "239.255.255.255", "ff02::1"],
    AddressClass.RESERVED: [
        "0.1.2.3",
        "240.0.0.1",
        "255.255.255.255",
        "192.0.2.1",
        "198.18.0.1",
        "203.0.113.9",
        "2001:db8::1",
        "2001::1",  # Teredo
        "2002:a00:1::",  # 10.0.0.1 as 6to4
        "64:ff9b::a00:1",  # 10.0.0.1 as NAT64
        "::a00:1",  # 10.0.0.1 as v4-compatible
        "fec0::1",  # site-local of old
        "4000::1",
    ],
    AddressClass.GLOBAL: ["1.1.1.1", "172.15.0.1", "172.32.0.1", "100.63.0.1", "100.128.0.1", "2606:4700::1111", "2a00::1"],
    AddressClass.NAME: ["localhost", "example.org"],
}
CASES = [(kind, host) for kind, hosts in CLASSES.items() for host in hosts]


@pytest.mark.parametrize(("kind", "host"), CASES)
def test_classes(kind: AddressClass, host: str) -> None:
    assert Address(host, 1).scope_class is kind


@given(st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)))
def test_nothing_is_global_that_the_standard_library_calls_private(ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    if classify(ip) is AddressClass.GLOBAL:
        assert ip.is_global and not ip.is_multicast


# The specification as a table, written apart from the code's.
ADVERTISED = {
    Scope.INTERNET: {"global"},
    Scope.LAN: {"global", "private", "shared"},
    Scope.HOST: {"global", "private", "shared", "loopback", "link-local"},
}


@pytest.mark.parametrize("scope", Scope)
@pytest.mark.parametrize(("kind", "host"), CASES)
def test_what_is_told_and_dialled(scope: Scope, kind: AddressClass, host: str) -> None:
    address = Address(host, 4001)
    allowed = kind in ADVERTISED[scope]
    if allowed:
        assert str(Advertised(address, scope)) == str(address)
    else:
        with pytest.raises(ValueError):
            Advertised(address, scope)
    assert may_dial(address, scope) is allowed
    assert may_dial(address, scope, received=False) is (kind not in ("unspecified", "multicast"))


@given(st.sampled_from(Scope), st.sampled_from(["0.0.0.0", "::", "0:0::0", "::ffff:0.0.0.0"]), st.integers(0, 65535))
def test_a_wildcard_is_never_advertised(scope: Scope, host: str, port: int) -> None:
    assert AddressClass.UNSPECIFIED not in REACHABLE[scope]
    with pytest.raises(ValueError):
        Advertised(Address(host, port), scope)


def test_a_port_of_zero_is_for_listening_only() -> None:
    address = Address("1.1.1.1", 0)
    with pytest.raises(ValueError):
        Advertised(address, Scope.INTERNET)
    assert not may_dial(address, Scope.INTERNET) and not may_dial(address, Scope.INTERNET, received=False)


def test_a_swarm_may_use_reserved_networks_as_its_internet() -> None:
    lab = [ipaddress.ip_network("203.0.113.0/24")]
    address = Address.parse("203.0.113.9:1", treat_as_global=lab)
    assert address.scope_class is AddressClass.GLOBAL and Advertised(address, Scope.INTERNET)
    assert address == Address("203.0.113.9", 1)  # the same place, judged otherwise
    assert Address.parse("203.0.114.9:1", treat_as_global=lab).scope_class is AddressClass.GLOBAL
    assert address.with_peer(ID).scope_class is AddressClass.GLOBAL


def test_with_peer() -> None:
    address = Address("1.1.1.1", 1)
    assert address.with_peer(ID).peer_id == ID and address.with_peer(ID).with_peer(None) == address
    circuit = Address("1.1.1.1", 1, "", ID, RELAY)
    with pytest.raises(ValueError):
        circuit.with_peer(None)
    assert isinstance(circuit.relay, PeerId) and circuit.is_literal and not Address("a", 1).is_literal
