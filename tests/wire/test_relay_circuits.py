"""Circuits in the relay's table: who gets one, how many, how much each carries, and how it ends."""

from __future__ import annotations

import pytest

from tests.wire.relay_world import BULK, KIB, MIB, PEERS, SIGNAL, T0, A, B, C, D, World
from wire.errors import Code
from wire.relaymessages import Purpose
from wire.relayrefusals import Why


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


def test_a_relay_that_stops_takes_nobody_new_and_carries_on() -> None:
    world = World()
    world.granted(B)
    circuit = world.connected(cls=BULK)
    before = world.table.gauges()
    world.table.stopping = True
    for got in (world.reserve(B), world.reserve(C), world.connect(C, B, BULK), world.connect(cls=BULK, purpose=1)):
        refusal = world.refused(got, Why.STOPPING)
        assert refusal.code is Code.SHUTDOWN and refusal.retry_s > 0
    assert world.table.gauges() == before
    assert world.table.forwarded(circuit.id, True, MIB, world.now) is None
    assert world.table.connection_ended(B, "first", world.now) == (circuit,)


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


def test_one_member_does_not_take_all_bulk_circuits_of_a_target() -> None:
    world = World(bulk_rate=1e9)
    world.granted(B)
    mine = [world.connected(A, B, BULK, number % 2) for number in range(8)]
    world.refused(world.connect(A, B, BULK), Why.PAIR_FULL)
    world.connected(C, B, BULK)
    world.table.close(mine[0].id)
    world.connected(A, B, BULK)


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
