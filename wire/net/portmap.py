"""Asks the router to forward our ports, keeps it doing so, and takes it back at the end.  Off unless the owner says so.

Only this file knows the way around: where the router is (`gateway.py`), one connected UDP socket for each port, so that the kernel
drops what others send, the automaton that decides what is sent (`wire/portmapping.py`), and UPnP when that one gives up (`upnp.py`).
It sits out failures: a router that refuses today may be told otherwise by its owner in five minutes.

What comes out, `changed(outside addresses)`, is what a router promised and nothing more.  The reachability service has others dial it
and only what they reach is advertised.

Listeners on IPv4 only: what an IPv6 node needs is a hole in a firewall.  A restart of the router is seen at the next renewal, half an
hour later at most, and not by its multicast announcement, for which port 5350 would have to be shared with whoever else listens there.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from contextlib import suppress

import trio

from wire.address import Address, AddressClass
from wire.limits import Limits
from wire.net.gateway import NoGateway, find_gateway
from wire.net.netevents import NetEvent, PortMapped
from wire.net.upnp import Upnp, UpnpFailed
from wire.portmappackets import DATAGRAM_MAX, NONCE_BYTES, SERVER_PORT
from wire.portmapping import Epoch, Mapper, State

log = logging.getLogger("wire.net")

REMOVE_S = 2.0  # of the end, for UPnP; the others take one datagram


class PortMapping:
    """`changed`: all outside addresses whenever they are others.  `server_port`: another only in tests."""

    def __init__(
        self,
        limits: Limits,
        *,
        changed: Callable[[tuple[Address, ...]], None],
        emit: Callable[[NetEvent], None],
        gateway: Callable[[], str] = find_gateway,
        upnp: Upnp | None = None,
        server_port: int = SERVER_PORT,
    ) -> None:
        self._limits = limits
        self._changed = changed
        self._emit = emit
        self._gateway = gateway
        self._upnp = upnp or Upnp()
        self._server_port = server_port
        self._bound: tuple[Address, ...] = ()
        self._round = trio.CancelScope()
        self._outside: dict[int, Address] = {}  # by our port
        self._told: dict[int, PortMapped] = {}
        self._mappers: list[Mapper] = []
        self._wake: dict[int, trio.CancelScope] = {}  # by our port: the wait of its task

    def listening(self, bound: tuple[Address, ...]) -> None:
        """At the start, and when this machine's addresses have changed: the router may be another one."""
        self._bound = bound
        self._round.cancel()

    async def run(self) -> None:
        """For ever; a cancel removes the mappings."""
        while True:
            with trio.CancelScope() as self._round:
                await self._hold()

    async def _hold(self) -> None:
        try:
            gateway = self._gateway()
            socks = self._sockets(gateway)
        except (NoGateway, OSError) as error:
            for port in sorted({bound.port for bound in self._bound if _forwardable(bound, bound.host)}):
                self._tell(PortMapped(port, None, str(error)))
            await trio.sleep(self._limits.portmap_again_s)
            return
        epoch, now = Epoch(), trio.current_time()
        try:
            async with trio.open_nursery() as nursery:
                for port, sock in socks.items():
                    mapper = Mapper(sock.getsockname()[0], port, os.urandom(NONCE_BYTES), epoch, self._limits, now)
                    self._mappers.append(mapper)
                    nursery.start_soon(self._keep, mapper, sock)
                await trio.sleep_forever()
        finally:
            self._mappers.clear()
            for sock in socks.values():
                sock.close()
            self._outside.clear()
            self._changed(())

    def _sockets(self, gateway: str) -> dict[int, trio.socket.SocketType]:
        """A socket towards the router for each port.  Raises OSError, with none left open."""
        socks: dict[int, trio.socket.SocketType] = {}
        try:
            for bound in self._bound:
                plain = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
                try:
                    plain.setblocking(False)
                    plain.connect((gateway, self._server_port))
                    wanted = _forwardable(bound, plain.getsockname()[0]) and bound.port not in socks
                except BaseException:
                    plain.close()
                    raise
                if wanted:
                    socks[bound.port] = trio.socket.from_stdlib_socket(plain)
                else:
                    plain.close()
        except BaseException:
            for sock in socks.values():
                sock.close()
            raise
        return socks

    async def _keep(self, mapper: Mapper, sock: trio.socket.SocketType) -> None:
        by_upnp: Address | None = None
        pauses = 0
        try:
            while True:
                now = trio.current_time()
                for data in mapper.poll(now):
                    await _send(sock, data)
                if mapper.restarted:
                    mapper.restarted = False
                    self._restarted(mapper, now)
                if mapper.state is State.HELD and by_upnp is not None:
                    await self._upnp.remove(mapper.port, REMOVE_S)
                    by_upnp = None
                if mapper.pauses > pauses:
                    pauses = mapper.pauses
                    if mapper.mapping(now) is None:
                        by_upnp = await self._by_upnp(mapper)
                elif mapper.state is State.HELD or by_upnp is None:
                    self._found(mapper, now)
                with trio.CancelScope(deadline=mapper.due) as self._wake[mapper.port]:
                    await self._hear(mapper, sock)
        finally:
            self._wake.pop(mapper.port, None)
            with trio.CancelScope(shield=True):
                if (removal := mapper.release()) is not None:
                    await _send(sock, removal)
                if by_upnp is not None:
                    await self._upnp.remove(mapper.port, REMOVE_S)

    async def _hear(self, mapper: Mapper, sock: trio.socket.SocketType) -> None:
        try:
            data = await sock.recv(DATAGRAM_MAX + 1)
        except ConnectionRefusedError:
            mapper.unreachable(trio.current_time())
        except OSError as error:  # the network went away under us: the change of addresses will tell
            log.debug("port mapping: %s", error)
            await trio.sleep(self._limits.portmap_first_wait_s)
        else:
            mapper.received(data, trio.current_time())

    async def _by_upnp(self, mapper: Mapper) -> Address | None:
        """The last resort: a mapping by UPnP, or the reasons of both told."""
        limits = self._limits
        try:
            outside = await self._upnp.add(mapper.port, int(limits.portmap_lease_s), limits.portmap_upnp_s)
        except UpnpFailed as failed:
            self._set(mapper.port, None, f"{mapper.why}; {failed}")
            return None
        self._set(mapper.port, outside, "UPnP")
        return outside

    def _found(self, mapper: Mapper, now: float) -> None:
        mapping = mapper.mapping(now)
        if mapping is not None:
            self._set(mapper.port, mapping.outside, str(mapping.language))
        elif mapper.port in self._outside:
            self._set(mapper.port, None, f"{mapper.why}; the mapping has ended")

    def _restarted(self, by: Mapper, now: float) -> None:
        for mapper in self._mappers:
            if mapper is not by:
                mapper.again(now)
                if (wait := self._wake.get(mapper.port)) is not None:
                    wait.deadline = now

    def _set(self, port: int, outside: Address | None, reason: str) -> None:
        before = self._outside.get(port)
        if outside is None:
            self._outside.pop(port, None)
        else:
            self._outside[port] = outside
        if outside != before:
            self._changed(tuple(self._outside.values()))
        self._tell(PortMapped(port, outside, reason))

    def _tell(self, event: PortMapped) -> None:
        if self._told.get(event.port) != event:
            self._told[event.port] = event
            self._emit(event)


def _forwardable(bound: Address, towards_router: str) -> bool:
    """Whether a listener is where the router would send connections to."""
    return bound.kind == "ip4" and (bound.scope_class is AddressClass.UNSPECIFIED or bound.host == towards_router)


async def _send(sock: trio.socket.SocketType, data: bytes) -> None:
    with suppress(OSError):  # lost, as any datagram may be
        await sock.send(data)
