"""Binding and accepting: who may start a handshake, errors of the machine, one clear sentence for a busy port.  WIRE-1."""

from __future__ import annotations

import errno
import logging
import os
from collections import Counter

import pytest
import trio
import trio.testing

from tests.wire.net.worlds import MemoryPipe, MemoryTransport, World, local, memory_pipes
from wire.address import Address, Scope
from wire.errors import Code
from wire.identity import Identity
from wire.limits import DEFAULT_LIMITS
from wire.net import BindFailed, Listening, NotListening, open_net
from wire.net.listen import Admission, accept_loop, bind_all, why_not_bound

LIMITS = DEFAULT_LIMITS


def test_eight_handshakes_an_address_and_sixty_four_in_all() -> None:
    admission = Admission(LIMITS, Scope.INTERNET)
    assert [admission.begin("8.0.0.1", 0.0) for _ in range(9)] == [None] * 8 + [Code.RESOURCE_LIMIT]
    for number in range(2, 9):
        for _ in range(8):
            assert admission.begin(f"8.0.{number}.1", 0.0) is None
    assert admission.half_open == 64 and admission.begin("8.0.99.1", 0.0) is Code.RESOURCE_LIMIT
    admission.release("8.0.0.1")
    assert admission.begin("8.0.99.1", 0.0) is None


@pytest.mark.parametrize("host", ["8.0.0.{}", "2001:db9:7:{}::1"])
def test_one_line_with_many_addresses_leaves_half_of_the_handshakes_to_others(host: str) -> None:
    """A /24 whose 200 addresses say nothing does not shut the port for everybody else, however long it goes on."""
    admission = Admission(LIMITS, Scope.INTERNET)
    mine = [host.format(number) for number in range(1, 201)]
    for turn in range(3):
        inside = [one for one in mine if admission.begin(one, 10.0 * turn) is None]
        assert len(inside) == LIMITS.half_open_per_network
        assert admission.begin("9.0.0.1", 10.0 * turn) is None
        for one in (*inside, "9.0.0.1"):
            admission.release(one)
    assert not admission.half_open and not admission._lines


def test_a_lab_of_one_network_uses_all_handshakes() -> None:
    admission = Admission(LIMITS, Scope.LAN)
    assert [admission.begin(f"192.168.0.{number}", 0.0) for number in range(1, 65)] == [None] * 64


def test_five_connections_a_second_an_address_with_a_burst() -> None:
    admission = Admission(LIMITS, Scope.INTERNET)

    def knock(host: str, now: float) -> Code | None:
        code = admission.begin(host, now)
        if code is None:
            admission.release(host)
        return code

    assert [knock("8.0.0.1", 0.0) for _ in range(65)] == [None] * 64 + [Code.RATE_LIMITED]
    assert [knock("8.0.0.1", 1.0) for _ in range(6)] == [None] * 5 + [Code.RATE_LIMITED]
    assert knock("8.0.0.2", 1.0) is None
    # One household of IPv6 is a /56.
    assert [knock(f"2001:db9:0:{number:x}::1", 0.0) for number in range(65)][-1] is Code.RATE_LIMITED
    assert knock("2001:db9:0:100::1", 0.0) is None


@pytest.mark.parametrize(
    ("scope", "host", "exempt"),
    [
        (Scope.INTERNET, "127.0.0.1", True),
        (Scope.INTERNET, "192.168.0.4", False),
        (Scope.LAN, "192.168.0.4", True),
        (Scope.HOST, "10.0.0.1", True),
        (Scope.LAN, "8.0.0.1", False),
    ],
)
def test_a_lab_that_starts_in_one_tick_is_not_slowed_down(scope: Scope, host: str, exempt: bool) -> None:
    admission = Admission(LIMITS, scope)
    codes = set()
    for _ in range(1000):
        codes.add(admission.begin(host, 0.0))
        if admission.half_open:
            admission.release(host)
    assert (codes == {None}) == exempt


def test_an_attacker_with_many_networks_does_not_fill_memory() -> None:
    admission = Admission(LIMITS, Scope.INTERNET)
    for number in range(LIMITS.peer_book_max + 500):
        host = f"9.{number >> 16}.{number >> 8 & 255}.{number & 255}"
        if admission.begin(host, 0.0) is None:
            admission.release(host)
    assert len(admission._buckets) <= LIMITS.peer_book_max


class FakeListener:
    """Gives what is in `results`, one a call."""

    address = Address("127.0.0.1", 1)

    def __init__(self, results: list[OSError | MemoryPipe]) -> None:
        self.results = results
        self.closed = False

    async def accept(self) -> MemoryPipe:
        await trio.lowlevel.checkpoint()
        if not self.results:
            await trio.sleep_forever()
        result = self.results.pop(0)
        if isinstance(result, OSError):
            raise result
        return result

    def close(self) -> None:
        self.closed = True


def some_pipe(host: str = "10.0.0.5") -> MemoryPipe:
    return memory_pipes(("10.0.0.1", 1), (host, 2))[0]


async def test_errors_of_the_machine_pause_and_go_on(autojump_clock: trio.testing.MockClock) -> None:
    served: list[object] = []
    counts: Counter[str] = Counter()

    async def serve(pipe: object) -> None:
        served.append(pipe)

    errors = [OSError(code, os.strerror(code)) for code in (errno.EMFILE, errno.ECONNABORTED, errno.ENFILE)]
    listener = FakeListener([errors[0], some_pipe(), errors[1], errors[2], some_pipe()])
    with trio.move_on_after(10):
        await accept_loop(listener, Admission(LIMITS, Scope.HOST), serve, counts, 0.1)
    assert len(served) == 2 and counts == {"accept-error": 3, "accepted": 2}
    assert listener.closed


async def test_whatever_serving_raises_ends_that_connection_only(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """The supervisor logs once with the traceback and counts; the next connection is served; the place is given back."""
    counts: Counter[str] = Counter()
    pipes = [some_pipe(), some_pipe()]
    admission = Admission(LIMITS, Scope.HOST)
    served: list[object] = []

    async def serve(pipe: MemoryPipe) -> None:
        if pipe is pipes[0]:
            raise ZeroDivisionError("a bug")
        served.append(pipe)

    with trio.move_on_after(1):
        await accept_loop(FakeListener(list(pipes)), admission, serve, counts, 0.1)  # type: ignore[arg-type]
    assert served == [pipes[1]] and counts["internal-error"] == 1 and admission.half_open == 0
    assert [record.exc_info is not None for record in caplog.records if record.levelno == logging.ERROR] == [True]
    assert pipes[0]._closed


async def test_a_busy_port_is_one_clear_error_before_anything_else_happens() -> None:
    async with local() as net:
        with pytest.raises(BindFailed) as busy:
            async with open_net(Identity.generate(), run=None, listen=net.addresses, scope=Scope.HOST):
                raise AssertionError("not reached")
        port = net.addresses[0].port
        assert f"port {port} is in use by another program: choose another port" in str(busy.value)
        async with open_net(
            Identity.generate(), run=None, listen=[*net.addresses, Address("127.0.0.1", 0)], scope=Scope.HOST
        ) as other:
            events = other.events()
            first, second = events.receive_nowait(), events.receive_nowait()
            assert isinstance(first, Listening) and first.address == other.addresses[0]
            assert isinstance(second, NotListening) and second.address == net.addresses[0]


async def test_binding_is_undone_by_a_cancel(autojump_clock: trio.testing.MockClock) -> None:
    world = World()
    transport = MemoryTransport(world, "10.0.0.1")
    with trio.move_on_after(0):
        await bind_all(transport, [Address("10.0.0.1", 4001)])
    assert not world.listeners
    listeners, failures = await bind_all(transport, [Address("10.0.0.1", 4001), Address("10.0.0.1", 4001)])
    assert len(listeners) == 1 and len(failures) == 1


@pytest.mark.parametrize("code", [errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES, errno.EAFNOSUPPORT, errno.EIO])
def test_each_reason_has_a_sentence(code: int) -> None:
    assert len(why_not_bound(Address("127.0.0.1", 80), OSError(code, os.strerror(code)))) > 10
