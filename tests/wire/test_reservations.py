"""Places at a relay: every rule refuses with its own code, changes nothing by it, and nothing stays when all have left."""

from __future__ import annotations

from typing import Any

import pytest

from tests.wire.relay_world import BULK, KIB, PEERS, RATE, SIGNAL, T0, A, B, C, World
from wire.errors import RETRYABLE, Code
from wire.limits import DEFAULT_LIMITS
from wire.relayrefusals import CODES, Refusal, Why
from wire.reservations import RelayTable, line_of
from wire.vouchers import OtherBoot


def test_every_refusal_has_a_code_and_a_sentence() -> None:
    assert set(CODES) == set(Why)
    assert len({why.value for why in Why}) == len(Why)
    assert str(Refusal(Why.NEVER)) == "the target holds no place here"


# --- NAT-5: a relay connects to a target that holds no reservation


def never(world: World) -> object:
    return world.connect()


def expired(world: World) -> object:
    world.granted(B)
    world.now += DEFAULT_LIMITS.relay_reservation_life_s
    return world.connect()


def gone(world: World) -> object:
    world.granted(B)
    world.table.connection_ended(B, "first", world.now)
    return world.connect()


def chained(world: World) -> object:
    world.granted(B)
    return world.connect(over_circuit=True)


NAT_5 = [(never, Code.NO_RESERVATION), (expired, Code.STALE), (gone, Code.REFUSED), (chained, Code.PROTOCOL)]


@pytest.mark.parametrize(("case", "code"), NAT_5, ids=[case.__name__ for case, _ in NAT_5])
def test_nat_5_refused_with_its_code_and_nothing_kept(case: Any, code: Code) -> None:
    world = World()
    got = case(world)
    assert isinstance(got, Refusal) and got.code is code
    assert world.table.gauges()["relay_circuits_signal"] == world.table.gauges()["relay_pairs"] == 0
    world.table.tick(world.now)
    world.table.connection_ended(B, "first", world.now)
    assert world.empty
    # Negative control: with a place it goes through, so that it was the cause that refused.
    world.granted(B)
    circuit = world.connected()
    assert world.table.close(circuit.id) is circuit


def test_nat_5_the_five_have_five_codes_and_say_whether_to_come_back() -> None:
    codes = [*(code for _, code in NAT_5), OtherBoot.default_code]
    assert len(set(codes)) == 5
    assert [code in RETRYABLE for code in codes] == [False, False, True, False, True]


def test_nat_5_gone_is_forgotten_after_a_minute() -> None:
    world = World()
    refusal = world.refused(gone(world), Why.GONE)
    assert 0 < refusal.retry_s <= 60
    world.now += 60
    world.refused(world.connect(), Why.NEVER)
    assert not world.table._ended


def test_nat_5_after_the_relays_restart_the_table_knows_nobody() -> None:
    world = World()
    world.granted(B)
    world.table = RelayTable(RATE)
    world.refused(world.connect(), Why.NEVER)


def test_nat_5_expired_before_and_after_the_tick() -> None:
    world = World()
    world.granted(B)
    assert world.table.next_time() == T0 + 3600
    world.now += 3599
    world.table.close(world.connected().id)
    world.now += 1
    assert not world.table.holds(B, world.now)
    world.refused(world.connect(), Why.EXPIRED)
    assert world.table.tick(world.now) == [] and world.table.next_time() is None
    world.refused(world.connect(), Why.EXPIRED)
    assert world.empty


def test_a_place_that_expires_leaves_its_circuits() -> None:
    world = World()
    world.granted(B)
    circuit = world.connected(A, B, BULK)
    world.now += 3600
    assert world.table.tick(world.now) == [] and circuit.open
    assert world.table.close(circuit.id) is circuit
    assert world.empty


# --- places


def test_a_place_for_an_hour_and_its_renewal() -> None:
    world = World()
    first = world.granted(B)
    assert (first.cls, first.expires, first.renewed) == (BULK, T0 + 3600, False)
    assert world.table.holds(B, world.now) and not world.table.holds(A, world.now)
    circuit = world.connected()
    world.now += 1800
    second = world.granted(B)
    assert second.renewed and second.expires == T0 + 5400 and circuit.open
    assert world.table.gauges()["relay_reservations"] == world.table.gauges()["relay_networks"] == 1
    assert world.table.connection_ended(B, "first", world.now) == (circuit,)
    assert not circuit.open and world.empty


def test_the_end_of_an_old_connection_does_not_take_the_new_place_along() -> None:
    world = World()
    world.granted(B)
    world.granted(B, connection="second")
    assert world.table.connection_ended(B, "first", world.now) == ()
    assert world.table.holds(B, world.now)
    circuit = world.connected()
    assert world.table.connection_ended(B, "second", world.now) == (circuit,)
    assert world.table.connection_ended(B, "second", world.now) == ()


def test_the_end_of_a_place_ends_the_circuits_to_it_and_no_others() -> None:
    world = World()
    for peer in (A, B):
        world.granted(peer)
    to_b, from_b, other = world.connected(C, B), world.connected(B, A), world.connected(C, A)
    assert world.table.connection_ended(B, "first", world.now) == (to_b,)
    assert from_b.open and other.open


def test_who_may_have_a_place() -> None:
    world = World()
    assert CODES[world.refused(world.reserve(B, over_circuit=True), Why.CHAIN).why] is Code.PROTOCOL
    assert world.refused(world.reserve(B, BULK, member=False), Why.NOT_MEMBER).code is Code.NOT_MEMBER
    assert world.refused(world.reserve(B, 3), Why.CLASS).code is Code.PROTOCOL_UNKNOWN
    assert world.empty
    assert world.granted(B, SIGNAL, member=False).rate == 64 * KIB
    none = World(bulk_rate=0)
    assert none.refused(none.reserve(B), Why.NO_BULK).code is Code.RELAY_LIMIT
    none.granted(B, SIGNAL)


def test_128_places_and_then_no_more_but_renewals() -> None:
    world = World()
    for peer in PEERS[:128]:
        world.granted(peer)
    refusal = world.refused(world.reserve(PEERS[128]), Why.PLACES)
    assert refusal.code is Code.RELAY_LIMIT and refusal.retry_s > 0
    assert world.granted(PEERS[5]).renewed
    world.table.connection_ended(PEERS[7], "first", world.now)
    world.granted(PEERS[128])
    # Places that have expired do not count, whether somebody has ticked or not.
    world.now += 3600
    world.granted(PEERS[140])
    assert world.table.gauges()["relay_reservations"] == 1


@pytest.mark.parametrize(
    ("hosts", "other"),
    [
        ([f"203.0.113.{n}" for n in range(1, 10)], "203.0.114.1"),
        ([f"2001:db8:7:{n}::1" for n in range(1, 10)], "2001:db8:8::1"),
        ([f"::ffff:203.0.113.{n}" if n % 2 else f"203.0.113.{n}" for n in range(1, 10)], "203.0.112.9"),
    ],
    ids=["v4", "v6", "mapped"],
)
def test_eight_places_a_network(hosts: list[str], other: str) -> None:
    world = World()
    for peer, host in zip(PEERS, hosts[:8], strict=False):
        world.granted(peer, host=host)
    assert world.refused(world.reserve(PEERS[8], host=hosts[8]), Why.NETWORK).code is Code.RESOURCE_LIMIT
    world.granted(PEERS[3], host=hosts[3])  # a renewal takes none
    world.granted(PEERS[8], host=other)
    world.granted(PEERS[3], host=other)  # moved to another line
    world.granted(PEERS[9], host=hosts[8])
    assert world.table.gauges()["relay_networks"] == 2
    for peer in PEERS[:10]:
        world.table.connection_ended(peer, "first", world.now)
    assert world.empty


def test_networks() -> None:
    assert line_of("1.2.3.4") == line_of("::ffff:1.2.3.200") == "1.2.3.0/24"
    assert line_of("2001:db8:1:2::3") == "2001:db8:1::/48"
    assert line_of("fe80::1%eth0") == line_of("fe80::2%eth1") == "fe80::/48"
    assert line_of("relay.example") == "relay.example"


def test_ten_requests_and_then_one_in_two_minutes() -> None:
    world = World()
    for _ in range(10):
        world.granted(B)
    refusal = world.refused(world.reserve(B), Why.RATE)
    assert refusal.code is Code.RATE_LIMITED and refusal.retry_s == pytest.approx(120)
    world.granted(C)  # another peer's count is its own
    world.now += 119.9
    world.refused(world.reserve(B), Why.RATE)
    world.now += 0.2
    world.granted(B)
    world.refused(world.reserve(B), Why.RATE)


def test_coming_back_within_a_minute_is_free_once_a_loss() -> None:
    world = World()
    for _ in range(10):
        world.granted(B)
    for _ in range(20):  # a line that keeps failing
        world.now += 1  # held for that long
        world.table.connection_ended(B, "first", world.now)
        world.granted(B)
    world.refused(world.reserve(B), Why.RATE)  # a second one after the same loss is not free
    world.now += 1
    world.table.connection_ended(B, "first", world.now)
    world.now += 60
    world.refused(world.reserve(B), Why.RATE)  # too late; 80 s have not earned a token


def test_an_expiry_is_no_loss_of_a_line() -> None:
    world = World(relay_reservation_life_s=30.0)
    for _ in range(10):
        world.granted(B)
    world.now += 30
    world.table.tick(world.now)
    world.refused(world.reserve(B), Why.RATE)


def test_the_memory_of_requests_and_losses_is_bounded() -> None:
    world = World(relay_requesters_max=20)
    for peer in PEERS:
        world.granted(peer)
        world.table.connection_ended(peer, "first", world.now)
    assert len(world.table._requests) == len(world.table._ended) == 20
    assert world.empty


def test_a_place_given_back_at_once_was_no_loss_of_a_line() -> None:
    """Whoever reserves and closes in a loop costs a signature each time: it is counted like any request."""
    world = World()
    for _ in range(10):
        world.granted(B)
        world.table.connection_ended(B, "first", world.now)
    world.refused(world.reserve(B), Why.RATE)
