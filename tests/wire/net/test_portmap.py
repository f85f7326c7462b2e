"""Port mapping over real sockets: a router on loopback that answers as it is told, and a UPnP library that is none."""

from __future__ import annotations

import struct
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import trio
import trio.testing

from tests.wire.net.worlds import RUN
from tests.wire.routers import address_answer, map_answer, pcp_answer, unsupported
from wire.address import Address, Scope
from wire.identity import Identity
from wire.limits import DEFAULT_LIMITS, Limits
from wire.net import open_net
from wire.net.gateway import NoGateway, gateway_of
from wire.net.netevents import NetEvent, PortMapped
from wire.net.portmap import PortMapping
from wire.net.upnp import Upnp, UpnpFailed
from wire.portmappackets import natpmp_address
from wire.portmapping import NO_ROUTER

LISTENING = (Address("127.0.0.1", 4001),)
OUTSIDE = Address("8.8.4.4", 50001)
LIMITS = replace(DEFAULT_LIMITS, portmap_first_wait_s=0.01, portmap_tries=2)

Answer = Callable[[bytes], Sequence[bytes]]


def _port(request: bytes) -> int:
    return int(struct.unpack_from(">H", request, 40 if request[0] == 2 else 4)[0])


def pcp(request: bytes) -> Sequence[bytes]:
    return (pcp_answer(_port(request), nonce=request[24:36]),) if request[0] == 2 else ()


def natpmp(request: bytes) -> Sequence[bytes]:
    if request[0] == 2:
        return (unsupported(),)
    return (address_answer(),) if request[1] == 0 else (map_answer(_port(request)),)


def silent(request: bytes) -> Sequence[bytes]:
    return ()


def wrong_nonce(request: bytes) -> Sequence[bytes]:
    return (pcp_answer(_port(request), nonce=bytes(12)), b"", b"\xff" * 1200) if request[0] == 2 else ()


def private(request: bytes) -> Sequence[bytes]:
    return (pcp_answer(_port(request), nonce=request[24:36], host="192.168.1.2"),) if request[0] == 2 else ()


class Router:
    """Answers on 127.0.0.1; `seen` are the requests, in order."""

    def __init__(self, sock: trio.socket.SocketType, answer: Answer) -> None:
        self.sock = sock
        self.answer = answer
        self.port = int(sock.getsockname()[1])
        self._in, self.seen = trio.open_memory_channel[bytes](1000)

    async def run(self) -> None:
        while True:
            request, who = await self.sock.recvfrom(2000)
            for answer in self.answer(request):
                await self.sock.sendto(answer, who)
            self._in.send_nowait(request)


@asynccontextmanager
async def router(answer: Answer) -> AsyncIterator[Router]:
    with trio.fail_after(20):
        sock = trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM)
        with sock:
            await sock.bind(("127.0.0.1", 0))
            async with trio.open_nursery() as nursery:
                it = Router(sock, answer)
                nursery.start_soon(it.run)
                yield it
                nursery.cancel_scope.cancel()


def absent() -> Any:
    raise ImportError("no module named miniupnpc")


class Node:
    """A running `PortMapping`; events come by `told`, the sets of outside addresses stand in `outside`."""

    def __init__(self, gateway: Callable[[], str], port: int, make: Callable[[], Any], limits: Limits = LIMITS) -> None:
        self._in, self._out = trio.open_memory_channel[NetEvent](1000)
        self.outside: list[tuple[Address, ...]] = []
        self.mapping = PortMapping(
            limits,
            changed=self.outside.append,
            emit=self._in.send_nowait,
            gateway=gateway,
            upnp=Upnp(make),
            server_port=port,
        )
        self.scope = trio.CancelScope()
        self.ended = trio.Event()

    async def run(self) -> None:
        with self.scope:
            await self.mapping.run()
        self.ended.set()

    async def told(self) -> PortMapped:
        event = await self._out.receive()
        assert isinstance(event, PortMapped)
        return event

    async def stop(self) -> None:
        self.scope.cancel()
        await self.ended.wait()


@asynccontextmanager
async def node(
    port: int,
    *,
    make: Callable[[], Any] = absent,
    gateway: Callable[[], str] = lambda: "127.0.0.1",
    listening: tuple[Address, ...] = LISTENING,
    limits: Limits = LIMITS,
) -> AsyncIterator[Node]:
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            it = Node(gateway, port, make, limits)
            it.mapping.listening(listening)
            nursery.start_soon(it.run)
            yield it
            await it.stop()


@pytest.mark.parametrize(("answer", "language"), [(pcp, "PCP"), (natpmp, "NAT-PMP")])
async def test_a_router_that_maps_is_found_and_left_as_it_was(answer: Answer, language: str) -> None:
    async with router(answer) as gate, node(gate.port) as it:
        assert await it.told() == PortMapped(4001, OUTSIDE, language)
        assert it.outside == [(OUTSIDE,)]
        await it.stop()
        requests = [await gate.seen.receive()]
        while not _removes(requests[-1]):
            requests.append(await gate.seen.receive())
        assert _port(requests[-1]) == 4001
        assert sum(map(_removes, requests)) == 1
        assert it.outside[-1] == ()


def _removes(request: bytes) -> bool:
    lifetime = request[4:8] if request[0] == 2 else request[8:12]
    return lifetime == bytes(4)


async def test_two_ports_are_two_mappings_and_other_listeners_none() -> None:
    def each(request: bytes) -> Sequence[bytes]:
        return (pcp_answer(_port(request), nonce=request[24:36], external=_port(request)),)

    listening = (Address("0.0.0.0", 4001), Address("127.0.0.1", 4002), Address("127.0.0.9", 4003), Address("::", 4004))
    async with router(each) as gate, node(gate.port, listening=listening) as it:
        events = {await it.told(), await it.told()}
        assert events == {PortMapped(port, Address("8.8.4.4", port), "PCP") for port in (4001, 4002)}
        assert set(it.outside[-1]) == {Address("8.8.4.4", 4001), Address("8.8.4.4", 4002)}


@pytest.mark.parametrize(
    ("answer", "why"), [(silent, NO_ROUTER), (wrong_nonce, NO_ROUTER), (private, "double NAT")], ids=["silent", "nonce", "private"]
)
async def test_a_router_that_does_not_map_is_told_with_the_reason(answer: Answer, why: str) -> None:
    async with router(answer) as gate, node(gate.port) as it:
        event = await it.told()
        assert event.outside is None and why in event.reason and "plnode[upnp]" in event.reason
        assert it.outside == []
    assert it.outside == [()]


async def test_right_answers_from_another_place_are_none() -> None:
    """Somebody in the house who knows even the nonce: the kernel takes datagrams of the router's address and port only."""
    gate, liar = (trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM) for _ in range(2))
    told: list[bytes] = []

    async def answer_elsewhere() -> None:
        while True:
            request, who = await gate.recvfrom(2000)
            told.append(request)
            for answer in (*pcp(request), unsupported(), address_answer(), map_answer(4001)):
                await liar.sendto(answer, who)

    with gate, liar:
        await gate.bind(("127.0.0.1", 0))
        await liar.bind(("127.0.0.1", 0))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer_elsewhere)
            async with node(gate.getsockname()[1]) as it:
                event = await it.told()
                assert event.outside is None and NO_ROUTER in event.reason and it.outside == []
            nursery.cancel_scope.cancel()
    assert told[0][0] == 2 and told[-1] == natpmp_address()


async def test_nothing_at_the_routers_port_is_known_at_once() -> None:
    with trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM) as sock:
        await sock.bind(("127.0.0.1", 0))
        free = sock.getsockname()[1]
    patient = replace(LIMITS, portmap_first_wait_s=60.0)
    async with node(free, limits=patient) as it:
        assert NO_ROUTER in (await it.told()).reason


async def test_without_a_router_the_reason_is_told_and_a_new_network_is_looked_at() -> None:
    found = [NoGateway("no default route"), NoGateway("no default route"), None]

    def gateway() -> str:
        problem = found.pop(0)
        if problem is not None:
            raise problem
        return "127.0.0.1"

    async with router(pcp) as gate, node(gate.port, gateway=gateway) as it:
        assert await it.told() == PortMapped(4001, None, "no default route")
        it.mapping.listening(LISTENING)  # said once a cause
        await trio.testing.wait_all_tasks_blocked()
        it.mapping.listening(LISTENING)
        assert await it.told() == PortMapped(4001, OUTSIDE, "PCP")


async def test_another_network_ends_the_old_mapping() -> None:
    async with router(pcp) as gate, node(gate.port) as it:
        await it.told()
        it.mapping.listening((Address("127.0.0.1", 4005),))
        assert await it.told() == PortMapped(4005, OUTSIDE, "PCP")
        assert it.outside == [(OUTSIDE,), (), (OUTSIDE,)]
        requests = [await gate.seen.receive() for _ in range(3)]
        assert [(_port(request), _removes(request)) for request in requests] == [(4001, False), (4001, True), (4005, False)]


async def test_a_router_that_restarted_is_asked_again_for_every_port() -> None:
    asked = dict.fromkeys((4001, 4002), 0)

    def answer(request: bytes) -> Sequence[bytes]:
        port = _port(request)
        asked[port] += 1
        restarted = port == 4001 and asked[port] > 1  # its lease of a second is renewed after half of it
        return (pcp_answer(port, nonce=request[24:36], lifetime=1 if port == 4001 else 3600, epoch=5 if restarted else 1000),)

    listening = (Address("127.0.0.1", 4001), Address("127.0.0.1", 4002))
    limits = replace(LIMITS, portmap_renew_least_s=0.1)
    async with router(answer) as gate, node(gate.port, listening=listening, limits=limits):
        while asked[4002] < 2:
            await gate.seen.receive()
    assert asked[4001] >= 2


@pytest.mark.parametrize("answer", [pcp, natpmp, silent, wrong_nonce])
@pytest.mark.parametrize("after", range(4))
async def test_a_cancel_at_any_request_leaves_no_socket_and_no_mapping(answer: Answer, after: int) -> None:
    async with router(answer) as gate, trio.open_nursery() as nursery:
        it = Node(lambda: "127.0.0.1", gate.port, absent)
        it.mapping.listening(LISTENING)
        nursery.start_soon(it.run)
        with trio.move_on_after(0.2):
            for _ in range(after):
                await gate.seen.receive()
        opened = list(it.mapping._mappers)
        await it.stop()
        assert it.outside in ([], [()], [(OUTSIDE,), ()])
        assert all(mapper.release() is None for mapper in opened)  # what was held was given back


# -- UPnP


class Library:
    """What `miniupnpc.UPnP()` does, as far as it is used; `hold` makes adding wait until it is set."""

    discoverdelay = 0
    lanaddr = "192.168.1.7"

    def __init__(self, address: str = "8.8.4.4", refuses: bool = False, found: bool = True) -> None:
        self.address, self.refuses, self.found = address, refuses, found
        self.ports: dict[int, tuple[Any, ...]] = {}
        self.adding, self.hold = threading.Event(), threading.Event()
        self.hold.set()
        self.deleted = threading.Event()

    def discover(self) -> int:
        return int(self.found)

    def selectigd(self) -> str:
        if not self.found:
            raise Exception("No UPnP device discovered")
        return "http://192.168.1.1/"

    def externalipaddress(self) -> str:
        return self.address

    def addportmapping(self, port: int, *rest: Any) -> bool:
        self.adding.set()
        self.hold.wait(10)
        if self.refuses:
            raise Exception("ConflictInMappingEntry")
        self.ports[port] = rest
        return True

    def deleteportmapping(self, port: int, protocol: str) -> bool:
        del self.ports[port]
        self.deleted.set()
        return True


async def test_upnp_comes_when_the_others_give_up_and_is_taken_back() -> None:
    library = Library()
    async with router(silent) as gate, node(gate.port, make=lambda: library) as it:
        assert await it.told() == PortMapped(4001, Address("8.8.4.4", 4001), "UPnP")
        assert library.ports == {4001: ("TCP", "192.168.1.7", 4001, "plnode", "", 3600)}
        assert it.outside == [(Address("8.8.4.4", 4001),)]
    assert library.ports == {}


async def test_a_router_that_answers_later_replaces_upnp() -> None:
    library = Library()
    limits = replace(LIMITS, portmap_again_s=0.05)
    async with router(silent) as gate, node(gate.port, make=lambda: library, limits=limits) as it:
        assert (await it.told()).reason == "UPnP"
        gate.answer = pcp
        assert await it.told() == PortMapped(4001, OUTSIDE, "PCP")
        assert library.ports == {} and it.outside[-1] == (OUTSIDE,)


@pytest.mark.parametrize(
    ("library", "why"),
    [
        (Library(address="10.1.2.3"), "double NAT"),
        (Library(address="nonsense!"), "outside address"),
        (Library(refuses=True), "Conflict"),
        (Library(found=False), "no router answers to UPnP"),
    ],
)
async def test_upnp_that_fails_says_why(library: Library, why: str) -> None:
    with pytest.raises(UpnpFailed, match=why):
        await Upnp(lambda: library).add(4001, 3600, 5.0)
    assert library.ports == {}


async def test_a_thread_that_was_left_takes_back_what_it_did() -> None:
    library = Library()
    library.hold.clear()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Upnp(lambda: library).add, 4001, 3600, 5.0)
        await trio.to_thread.run_sync(library.adding.wait, 10)
        nursery.cancel_scope.cancel()
    library.hold.set()
    assert await trio.to_thread.run_sync(library.deleted.wait, 10)
    assert library.ports == {}


async def test_upnp_has_a_deadline() -> None:
    library = Library()
    library.hold.clear()
    with pytest.raises(UpnpFailed, match="within"):
        await Upnp(lambda: library).add(4001, 3600, 0.05)
    library.hold.set()
    if library.adding.is_set():  # else the thread sees before it that it was left
        assert await trio.to_thread.run_sync(library.deleted.wait, 10)
    assert library.ports == {}


# -- which router


HEAD = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n"


def _hex(host: str) -> str:
    return f"{int.from_bytes(bytes(map(int, host.split('.'))), sys.byteorder):08X}"


def _line(interface: str, destination: str, gateway: str, flags: int, metric: int, mask: str) -> str:
    return f"{interface} {_hex(destination)} {_hex(gateway)} {flags:04X} 0 0 {metric} {_hex(mask)} 0 0 0\n"


def _lan(interface: str, net: str, metric: int = 0) -> str:
    return _line(interface, net, "0.0.0.0", 1, metric, "255.255.255.0")


def _default(interface: str, gateway: str, metric: int, flags: int = 3) -> str:
    return _line(interface, "0.0.0.0", gateway, flags, metric, "0.0.0.0")


def test_of_several_gateways_the_one_in_use_and_in_a_subnet_of_its_interface() -> None:
    radio = _default("wlan0", "192.168.2.1", 600) + _lan("wlan0", "192.168.2.0", 600)
    cable = _default("eth0", "192.168.1.1", 100) + _lan("eth0", "192.168.1.0", 100)
    assert gateway_of(HEAD + radio + cable) == "192.168.1.1"
    assert gateway_of(HEAD + radio) == "192.168.2.1"
    far = _default("tun0", "192.168.2.9", 1) + _lan("tun0", "10.8.0.0")
    assert gateway_of(HEAD + far + radio) == "192.168.2.1"
    down = _default("eth1", "192.168.3.1", 0, flags=2) + _lan("eth1", "192.168.3.0")
    assert gateway_of(HEAD + down + radio) == "192.168.2.1"


@pytest.mark.parametrize(
    "table", ["", HEAD, HEAD + _lan("eth0", "192.168.1.0"), HEAD + _default("tun0", "10.8.0.1", 0), HEAD + "eth0 zz\n\n", "x\n-1 " * 9]
)
def test_no_gateway_is_said(table: str) -> None:
    with pytest.raises(NoGateway, match="default route"):
        gateway_of(table)


# -- the node


async def test_a_mapped_address_is_a_candidate_and_not_told_before_a_verdict() -> None:
    here = Address("127.0.0.1", 0)
    async with open_net(Identity.generate(), run=RUN, listen=[here], scope=Scope.INTERNET, portmap=True) as net:
        access = net.access
        assert access.portmap is not None
        access._mapped((OUTSIDE,))
        assert OUTSIDE in access.reach._candidates(trio.current_time())
        assert access.reach.finding.addresses == () and access.standing.reachable == ()
        helper = Identity.generate().peer_id
        access.reach.known.verdict(helper, "9.9.9.9", OUTSIDE, True, "", biased=False, now=trio.current_time())
        access.reach._conclude()
        assert access.standing.reachable == (OUTSIDE,)


@pytest.mark.parametrize(("scope", "portmap"), [(Scope.INTERNET, False), (Scope.LAN, True), (Scope.HOST, True)])
async def test_off_unless_set_and_only_towards_the_internet(scope: Scope, portmap: bool) -> None:
    async with open_net(Identity.generate(), run=RUN, listen=[Address("127.0.0.1", 0)], scope=scope, portmap=portmap) as net:
        assert net.access.portmap is None
