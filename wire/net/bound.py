"""The listeners of a node over its life: bound at the start, unbound when their address goes, bound again when it is back.

A listener on a wildcard needs none of this.  One on a specific address stays silent for ever when that address leaves the machine,
and is advertised all the same; and an address that was not there at the start (the VPN comes up later than the node) would never
be listened on.  Nothing else is bound instead: who names an address means that one, perhaps to be seen from one network only.

Binding takes time, and the network may change again meanwhile.  So binding is serial: two tasks that bind one address would get
two listeners, or a failure that is reported of an address that is listened on.  What goes is noted at once, before anybody waits,
and looked up again when a listener is there: one whose address went meanwhile is closed, not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import trio

from wire.address import Address
from wire.net.interfaces import NetworkChanged
from wire.net.listen import why_not_bound
from wire.net.netevents import Listening, NotListening
from wire.net.transport import Listener, Transport

GONE = "this address has left the machine; listened on again when it is back"


class Listeners:
    """`serve(listener)` starts to take connections of one; `report` hears what is listened on and what is not."""

    def __init__(
        self, transport: Transport, serve: Callable[[Listener], None], report: Callable[[Listening | NotListening], None]
    ) -> None:
        self.bound: list[Listener] = []
        self._missing: list[Address] = []
        self._away: set[str] = set()  # hosts that went and are not back
        self._binding = trio.Lock()
        self._closed = False
        self._transport = transport
        self._serve = serve
        self._report = report

    @property
    def addresses(self) -> tuple[Address, ...]:
        """As bound, with real ports."""
        return tuple(listener.address for listener in self.bound)

    def start(self, bound: Sequence[Listener], failures: Sequence[tuple[Address, str]]) -> None:
        """Serve what could be bound, and keep in mind what could not."""
        for listener in bound:
            self._add(listener)
        for address, why in failures:
            self._report(NotListening(address, why))
            if address.is_literal:
                self._missing.append(address)

    def _add(self, listener: Listener) -> None:
        self.bound.append(listener)
        self._report(Listening(listener.address))
        self._serve(listener)

    async def follow(self, change: NetworkChanged) -> None:
        """Close listeners on addresses that went, bind those that came.  A port once given stays the same."""
        self._away.update(change.gone)
        self._away.difference_update(change.added)
        for listener in [item for item in self.bound if item.address.host in change.gone]:
            self.bound.remove(listener)
            listener.close()
            self._missing.append(listener.address)
            self._report(NotListening(listener.address, GONE))
        async with self._binding:
            for address in [item for item in self._missing if item.host in change.added]:
                if not self._wanted(address):
                    continue
                try:
                    listener = await self._transport.listen(address)
                except OSError as error:
                    if self._wanted(address):
                        self._report(NotListening(address, why_not_bound(address, error)))
                    continue
                if self._wanted(address):
                    self._missing.remove(address)
                    self._add(listener)
                else:
                    listener.close()

    def _wanted(self, address: Address) -> bool:
        return not self._closed and address.host not in self._away

    def close(self) -> None:
        self._closed = True
        for listener in self.bound:
            listener.close()
