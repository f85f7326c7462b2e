"""How a connection comes about: SYN, its repetitions, who answers, and two that dial each other at once.

The states of RFC 9293 as far as programs notice them.  A SYN that nothing answers is repeated after 1, 3, 7 s and so on, and given
up after 127 s (Linux, tcp_syn_retries = 6).  It meets, in this order, what the receiving kernel knows:

    a connection of the same two places    ignored; if that one still waits for our ACK, answered again
    a dial to the sender from that port    both become one connection (simultaneous open, RFC 9293 section 3.5)
    a listener with room                   half a connection, which the program gets when the ACK arrives
    a listener without room                dropped: repeating helps
    nothing                                RST

A dial from a port from which such a connection stands already is refused by the local kernel with EADDRNOTAVAIL, which after a
hole punch means that the other's SYN came first and the accepted connection is the one to use.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import trio

from wire.sim.flow import Flow
from wire.sim.nat import Place
from wire.sim.pipe import SimPipe, os_error

if TYPE_CHECKING:
    from wire.sim.host import Host, SimListener
    from wire.sim.internet import Route

GIVE_UP_AFTER = 7  # SYNs, at 0, 1, 3, 7, 15, 31, 63 s
HALF_S = 63.0  # that a listener keeps half a connection (Linux, tcp_synack_retries = 5)


class Dialling:
    """One attempt of a host, until it is connected, failed or abandoned."""

    def __init__(self, host: Host, local: Place, remote: Place) -> None:
        self.host = host
        self.local = local
        self.remote = remote
        self.done = trio.Event()
        self.pipe: SimPipe | None = None
        self.error: OSError | None = None
        self.over = False
        self._net = host.internet
        self._tries = 0
        self._half = False  # a listener's kernel waits for our ACK

    def syn(self) -> None:
        """Send one, and plan the next."""
        if self.over:
            return
        if self._tries == GIVE_UP_AFTER:
            self.fail(errno.ETIMEDOUT)
            return
        net, host = self._net, self.host
        net.after(2.0**self._tries, self.syn)
        self._tries += 1
        target = net.somebody_at(host, self.remote[0])
        net.route(host, self.local, self.remote)  # our own router learns of it now, theirs decides when the packet is there
        if target is None:
            net.note("stray", host.name, self.remote)
        elif net.reaches(host, target) and not self._unlucky(target):
            net.after(net.delay(host, target), self._arrives)

    def _unlucky(self, target: Host) -> bool:
        loss = 0.0 if target is self.host else 1 - (1 - self.host.link.loss) * (1 - target.link.loss)
        return bool(loss) and self._net.rng.random() < loss

    def _arrives(self) -> None:
        net = self._net
        if self.over:
            return
        route = net.route(self.host, self.local, self.remote)
        if isinstance(route, str):
            net.note("stranger", self.host.name, self.remote, route)
            if route == "reset" and (target := net.somebody_at(self.host, self.remote[0])) is not None:
                net.after(net.delay(target, self.host), self._turned_away)
            return
        target = route.host
        if not net.reaches(self.host, target):
            return
        back_s = net.delay(target, self.host)
        known = target.connections.get((route.local, route.seen))
        if known is not None:
            if self.pipe is not None and known is self.pipe.other:
                net.after(back_s, self._answered, target.listener(route.local) if self._half else None)
            return
        other = target.dialling.get((route.local, route.seen))
        if other is not None and other is not self:
            near, far = self._pair(route)
            net.note("simultaneous", near.number, self.host.name, target.name)
            target.connections[far.local, far.remote] = far
            other.pipe = far
            other.connected()
            net.after(back_s, self._answered)
            return
        listener = target.listener(route.local)
        if listener is None:
            net.note("refused", self.host.name, self.remote)
            net.after(back_s, self._refused, target)
        elif listener.has_room():
            _, far = self._pair(route)
            listener.half += 1
            self._half = True
            target.connections[far.local, far.remote] = far
            net.after(HALF_S, self._drop_half, listener)
            net.after(back_s, self._answered, listener)

    def _pair(self, route: Route) -> tuple[SimPipe, SimPipe]:
        net, number = self._net, self._net.number()
        near = SimPipe(self.host, self.local, self.remote, route.outward, number)
        far = SimPipe(route.host, route.local, route.seen, route.inward, -number)
        near.other, far.other = far, near
        rtt_s = net.delay(self.host, route.host) + net.delay(route.host, self.host)
        near.flow, far.flow = Flow(near, far, rtt_s), Flow(far, near, rtt_s)
        self.pipe = near
        return near, far

    def _refused(self, target: Host) -> None:
        if self._net.reaches(self.host, target):
            self.fail(errno.ECONNREFUSED)

    def _answered(self, listener: SimListener | None = None) -> None:
        """SYN-ACK is here."""
        pipe = self.pipe
        if pipe is None or self.done.is_set():
            return
        if not self._net.passes(pipe.other, pipe):
            return  # the next SYN asks for another
        if self.over or pipe.gone:  # nobody waits for it any more
            self._drop_half(listener)
            return
        self.host.connections[pipe.local, pipe.remote] = pipe
        self.connected()
        if listener is not None:
            self._net.after(self._net.delay(self.host, pipe.other.host), self._accepted, listener)

    def _turned_away(self) -> None:
        """A router answered with RST; ours, which sees the connection end, closes the hole again."""
        if self.host.nat is not None:
            self.host.nat.revoke(self.local, self.remote)
        self.fail(errno.ECONNREFUSED)

    def _drop_half(self, listener: SimListener | None) -> None:
        if self._half and listener is not None and self.pipe is not None:
            self._half = False
            listener.half -= 1
            self.pipe.other.was_reset()

    def _accepted(self, listener: SimListener) -> None:
        """The last ACK of the handshake is there, or what follows it."""
        assert self.pipe is not None
        far = self.pipe.other
        if not self._half:
            return
        if not self._net.passes(self.pipe, far) and not far.gone:
            self._net.after(1.0, self._accepted, listener)
            return
        self._half = False
        listener.half -= 1
        if listener.closed:
            far.abort()
        elif not far.gone:
            listener.put(far)

    def connected(self) -> None:
        assert self.pipe is not None
        self._net.note("connected", self.pipe.number, self.host.name, self.local, self.remote)
        self.leave()
        self.done.set()

    def fail(self, number: int) -> None:
        if not self.over:
            self.error = os_error(number)
            self.leave()
            self.done.set()

    def leave(self) -> None:
        """The program no longer waits, or there is nothing to wait for."""
        self.over = True
        if self.host.dialling.get((self.local, self.remote)) is self:
            del self.host.dialling[self.local, self.remote]
