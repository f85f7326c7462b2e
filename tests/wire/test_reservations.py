"""The relay's table: every rule refuses with its own code, changes nothing by it, and nothing stays when all have left."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from wire.errors import RETRYABLE, Code
from wire.identity import Identity, PeerId
from wire.limits import DEFAULT_LIMITS
from wire.relaymessages import Purpose, RelayClass
from wire.relayrefusals import CODES, Refusal, Why
from wire.reservations import Circuit, Granted, RelayTable, network_of
from wire.vouchers import OtherBoot

PEERS = [Identity(n.to_bytes(32, "big")).peer_id for n in range(1, 160)]
A, B, C, D = PEERS[:4]
SIGNAL, BULK = RelayClass.SIGNAL, RelayClass.BULK
RATE = 8 << 20
KIB, MIB = 1 << 10, 1 << 20
T0 = 500.0


class World:
    """A table and a clock; each peer is at a host of its own network unless said otherwise."""

    def __init__(self, bulk_rate: float = RATE, **limits: Any) -> None:
        self.table = RelayTable(bulk_rate, replace(DEFAULT_LIMITS, **limits))
        self.now = T0

    def reserve(self, peer: PeerId, cls: int = BULK, **changes: Any) -> Granted | Refusal:
        number = PEERS.index(peer)
        arguments: dict[str, Any] = {
            "host": f"8.1.{number}.1", "member": True, "over_circuit": False, "connection": "first", "now": self.now, **changes,
        }  # fmt: skip
        return self.table.reserve(peer, cls, **arguments)

    def connect(self, source: PeerId = A, target: PeerId = B, cls: int = SIGNAL, purpose: int = 0, **changes: Any) -> Circuit | Refusal:
        arguments: dict[str, Any] = {
            "voucher_checked": True, "over_circuit": False, "members": (True, True), "now": self.now, **changes,
        }  # fmt: skip
        return self.table.connect(source, target, cls, purpose, **arguments)

    def granted(self, peer: PeerId, cls: int = BULK, **changes: Any) -> Granted:
        got = self.reserve(peer, cls, **changes)
        assert isinstance(got, Granted), got
        return got

    def connected(self, *arguments: Any, **changes: Any) -> Circuit:
        got = self.connect(*arguments, **changes)
        assert isinstance(got, Circuit), got
        return got

    def refused(self, got: object, why: Why) -> Refusal:
        assert isinstance(got, Refusal) and got.why is why, got
        return got

    @property
    def empty(self) -> bool:
        return not any(self.table.gauges().values())


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
    assert world.table.connection_of(B) == "first" and world.table.connection_of(A) is None
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
    assert world.table.holds(B, world.now) and world.table.connection_of(B) == "second"
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
    assert network_of("1.2.3.4") == network_of("::ffff:1.2.3.200") == "1.2.3.0/24"
    assert network_of("2001:db8:1:2::3") == "2001:db8:1::/48"
    assert network_of("fe80::1%eth0") == network_of("fe80::2%eth1") == "fe80::/48"
    assert network_of("relay.example") == "relay.example"


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
        world.table.connection_ended(B, "first", world.now)
        world.now += 1
        world.granted(B)
    world.refused(world.reserve(B), Why.RATE)  # a second one after the same loss is not free
    world.table.connection_ended(B, "first", world.now)
    world.now += 60
    world.refused(world.reserve(B), Why.RATE)  # too late; 80 s have not earned a token


def test_an_expiry_is_no_loss_of_a_line() -> None:
    world = World(relay_reservation_life_s=30.0, relay_reservation_renew_s=15.0)
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


# --- circuits


def test_what_connect_refuses() -> None:
    world = World()
    world.granted(B, SIGNAL)
    world.refused(world.connect(B, B), Why.SELF)
    world.refused(world.connect(cls=3), Why.CLASS)
    world.refused(world.connect(purpose=2), Why.CLASS)
    world.refused(world.connect(voucher_checked=False), Why.NO_VOUCHER)
    world.refused(world.connect(cls=BULK), Why.LOWER)
    world.granted(B, BULK)
    for members in ((False, True), (True, False)):
        assert world.refused(world.connect(cls=BULK, members=members), Why.NOT_MEMBER).code is Code.NOT_MEMBER
    assert world.table.gauges()["relay_pairs"] == 0
    world.connected(cls=BULK)
    world.connected(cls=SIGNAL, members=(False, False))  # for anyone


def test_four_signal_circuits_at_either_end_and_two_a_pair() -> None:
    world = World()
    for peer in PEERS[:10]:
        world.granted(peer)
    first = world.connected(A, B)
    world.connected(B, A)  # whoever asked: it is one pair
    assert world.refused(world.connect(A, B), Why.PAIR_FULL).code is Code.RESOURCE_LIMIT
    world.connected(A, C)
    world.connected(A, D)
    assert world.refused(world.connect(A, PEERS[5]), Why.SOURCE_FULL).code is Code.RESOURCE_LIMIT
    world.refused(world.connect(PEERS[5], A), Why.TARGET_FULL)
    world.connected(A, B, BULK)  # counted apart
    world.table.close(first.id)
    world.connected(A, PEERS[5])


def test_32_bulk_circuits_a_peer() -> None:
    world = World(bulk_rate=1e9)
    world.granted(B)
    circuits = [world.connected(PEERS[4 + number // 2], B, BULK, number % 2) for number in range(32)]
    assert circuits[1].purpose is Purpose.LANE
    world.refused(world.connect(A, B, BULK), Why.TARGET_FULL)
    world.now += 365 * 86400
    assert world.table.tick(world.now) == [] and all(circuit.open for circuit in circuits)  # no end


def test_one_more_pair_is_refused_when_all_would_have_too_little() -> None:
    world = World(bulk_rate=4 * 256 * KIB)
    for peer in PEERS[:8]:
        world.granted(peer)
    assert world.table.bulk_share() == 4 * 256 * KIB
    for number in range(4):
        assert world.table.bulk_share() == 4 * 256 * KIB // (number + 1)
        world.connected(PEERS[8 + number], B, BULK)
    assert world.table.bulk_share() == 0
    refusal = world.refused(world.connect(PEERS[13], B, BULK), Why.SHARE)
    assert refusal.code is Code.RELAY_LIMIT and refusal.retry_s > 0
    lane = world.connected(PEERS[8], B, BULK, Purpose.LANE)  # of a pair that is there
    world.table.close(lane.id)
    world.connected(PEERS[13], B, SIGNAL)
    world.table.bulk_rate = 5 * 256 * KIB
    world.connected(PEERS[14], B, BULK)
    world.table.bulk_rate = 0
    world.refused(world.connect(PEERS[8], B, BULK, Purpose.LANE), Why.NO_BULK)


def test_a_share_is_never_told_above_the_cap_of_a_peer() -> None:
    assert World(bulk_rate=1e9).table.bulk_share() == 20_000_000


def test_signal_carries_one_mebibyte_each_way_and_the_byte_after_resets() -> None:
    world = World()
    world.granted(B)
    circuit = world.connected()
    for _ in range(16):
        assert world.table.forwarded(circuit.id, True, 64 * KIB, world.now) is None
    refusal = world.refused(world.table.forwarded(circuit.id, True, 1, world.now), Why.BYTES)
    assert refusal.code is Code.RELAY_LIMIT and "1048576 of 1048576" in str(refusal)
    assert world.table.forwarded(circuit.id, False, MIB, world.now) is None
    assert (circuit.up_bytes, circuit.down_bytes) == (MIB, MIB)
    world.table.close(circuit.id)
    world.refused(world.table.forwarded(circuit.id, True, 1, world.now), Why.CLOSED)
    assert circuit.up_bytes == MIB


def test_bulk_is_counted_each_way_and_not_capped() -> None:
    world = World()
    world.granted(B)
    one, two = world.connected(A, B, BULK), world.connected(A, B, BULK, Purpose.LANE)
    assert world.table.forwarded(one.id, True, 1 << 40, world.now) is None
    assert world.table.forwarded(one.id, False, 7, world.now) is None
    assert world.table.pause_s(one.id, True, world.now) == 0.0
    assert (one.up_bytes, one.down_bytes, two.up_bytes, two.down_bytes) == (1 << 40, 7, 0, 0)


def test_signal_has_64_kib_a_second_each_way() -> None:
    world = World()
    world.granted(B)
    circuit = world.connected()
    sent, until = 0, world.now + 10
    while world.now < until:
        assert world.table.forwarded(circuit.id, True, 8 * KIB, world.now) is None
        sent += 8 * KIB
        assert world.table.pause_s(circuit.id, False, world.now) == 0.0
        world.now += world.table.pause_s(circuit.id, True, world.now)
    assert sent == pytest.approx((10 + 1) * 64 * KIB, rel=0.05)


def test_signal_ends_after_two_minutes() -> None:
    world = World()
    world.granted(B)
    circuit = world.connected()
    assert world.table.next_time() == T0 + 120
    assert world.table.tick(T0 + 119.9) == []
    (ended,) = world.table.tick(T0 + 120)
    assert ended.circuit is circuit and ended.refusal.code is Code.TIMEOUT and not circuit.open
    assert world.table.close(circuit.id) is None
    world.table.connection_ended(B, "first", world.now)
    assert world.empty


def test_closing_twice_is_as_good_as_once() -> None:
    world = World()
    world.granted(B)
    one, two = world.connected(), world.connected()
    assert world.table.close(one.id) is one and world.table.close(one.id) is None
    assert world.table.gauges()["relay_circuits_signal"] == 1
    world.connected()
    world.refused(world.connect(), Why.PAIR_FULL)
    assert two.id != one.id
