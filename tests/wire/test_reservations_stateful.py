"""The relay's table under any order of requests, losses and time, against a model that counts by looking.

What must hold, whatever happens: never more than a limit allows; a circuit is opened only to a place that lives; what is refused
changes nothing; and when all connections and circuits have ended every gauge is 0.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from wire.identity import Identity, PeerId
from wire.limits import DEFAULT_LIMITS
from wire.relaymessages import RelayClass
from wire.relayrefusals import Refusal, Why
from wire.reservations import Circuit, RelayTable

# Small limits, so that being full is the rule.
LIMITS = replace(
    DEFAULT_LIMITS,
    relay_reservations_max=4,
    relay_reservations_per_network=2,
    relay_requests_burst=20,
    relay_requesters_max=5,
    relay_signal_circuits=3,
    relay_bulk_circuits=4,
)
RATE = 3.5 * LIMITS.relay_bulk_share_min_bytes_per_s
MOST_PAIRS = 3
PEERS = [Identity(n.to_bytes(32, "big")).peer_id for n in range(1, 8)]
peers = st.sampled_from(PEERS)
classes = st.sampled_from(list(RelayClass))


class Relay(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 1e5
        self.table = RelayTable(RATE, LIMITS)
        self.connections = count()
        self.places: dict[PeerId, tuple[RelayClass, str, float, int]] = {}
        self.circuits: dict[int, Circuit] = {}
        self.sent: Counter[tuple[int, bool]] = Counter()

    def lives(self, peer: PeerId) -> bool:
        return peer in self.places and self.now < self.places[peer][2]

    # -- what peers do

    @rule(peer=peers, cls=classes, network=st.integers(0, 2), member=st.booleans(), anew=st.booleans())
    def reserve(self, peer: PeerId, cls: RelayClass, network: int, member: bool, anew: bool) -> None:
        held = self.places.get(peer)
        connection = next(self.connections) if anew or held is None else held[3]
        before = self.table.gauges()
        host = f"8.8.{network}.{PEERS.index(peer)}"
        got = self.table.reserve(peer, cls, host, member=member, over_circuit=False, connection=connection, now=self.now)
        self.places = {other: place for other, place in self.places.items() if self.now < place[2]}
        held = self.places.get(peer)
        if isinstance(got, Refusal):
            assert self.table.gauges()["relay_reservations"] == len(self.places) <= before["relay_reservations"]
            others = sum(place[1] == str(network) for other, place in self.places.items() if other != peer)
            match got.why:
                case Why.PLACES:
                    assert held is None and len(self.places) == LIMITS.relay_reservations_max
                case Why.NETWORK:
                    assert others == LIMITS.relay_reservations_per_network
                case Why.NOT_MEMBER:
                    assert cls is RelayClass.BULK and not member
                case why:
                    assert why is Why.RATE and got.retry_s > 0
            return
        assert got.renewed == (held is not None)
        assert member or cls is RelayClass.SIGNAL
        if held is not None and held[3] != connection:
            self.end_circuits(peer)  # as the end of the connection before does
        self.places[peer] = (cls, str(network), got.expires, connection)

    @rule(peer=peers)
    def lose(self, peer: PeerId) -> None:
        held = self.places.get(peer)
        if held is None:
            assert self.table.connection_ended(peer, -1, self.now) == ()
            return
        assert self.table.connection_ended(peer, -1, self.now) == ()  # another one
        self.table.tick(self.now)
        for circuit in self.table.connection_ended(peer, held[3], self.now):
            assert circuit.target == peer and not circuit.open
        self.end_circuits(peer)
        del self.places[peer]
        assert not self.table.holds(peer, self.now)

    def end_circuits(self, peer: PeerId) -> None:
        """Their streams end with the connection, so whoever splices them closes them."""
        for circuit in list(self.circuits.values()):
            if peer in (circuit.source, circuit.target):
                self.table.close(circuit.id)

    @rule(source=peers, to=peers, cls=classes, purpose=st.integers(0, 1), members=st.tuples(st.booleans(), st.booleans()))
    def connect(self, source: PeerId, to: PeerId, cls: RelayClass, purpose: int, members: tuple[bool, bool]) -> None:
        before = self.table.gauges()
        share = self.table.bulk_share()
        got = self.table.connect(source, to, cls, purpose, voucher_checked=True, over_circuit=False, members=members, now=self.now)
        if isinstance(got, Refusal):
            assert self.table.gauges() == before
            return
        assert source != to and self.lives(to) and self.places[to][0] >= cls
        assert cls is RelayClass.SIGNAL or all(members)
        assert got.id not in self.circuits
        if cls is RelayClass.BULK and not any(c.open and c.cls is cls and c.pair == got.pair for c in self.circuits.values()):
            assert share >= LIMITS.relay_bulk_share_min_bytes_per_s
        self.circuits[got.id] = got

    @rule(data=st.data(), up=st.booleans(), size=st.integers(1, 700_000))
    def forward(self, data: st.DataObject, up: bool, size: int) -> None:
        if not self.circuits:
            return
        circuit = self.circuits[data.draw(st.sampled_from(sorted(self.circuits)))]
        refusal = self.table.forwarded(circuit.id, up, size, self.now)
        if not circuit.open:
            assert refusal is not None and refusal.why is Why.CLOSED
        elif refusal is not None:
            assert circuit.cls is RelayClass.SIGNAL and self.sent[circuit.id, up] + size > LIMITS.relay_signal_bytes
            self.table.close(circuit.id)
        else:
            self.sent[circuit.id, up] += size
        pause = self.table.pause_s(circuit.id, up, self.now)
        assert 0.0 <= pause <= LIMITS.relay_signal_bytes / LIMITS.relay_signal_bytes_per_s

    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        if self.circuits:
            circuit = self.circuits[data.draw(st.sampled_from(sorted(self.circuits)))]
            was_open = circuit.open
            assert (self.table.close(circuit.id) is circuit) == was_open and not circuit.open

    @rule(seconds=st.sampled_from([0.5, 30.0, 61.0, 130.0, 1800.0, 3600.0]), ticked=st.booleans())
    def wait(self, seconds: float, ticked: bool) -> None:
        self.now += seconds
        if ticked:
            for ended in self.table.tick(self.now):
                assert ended.circuit.cls is RelayClass.SIGNAL and self.now >= ended.circuit.opened + LIMITS.relay_signal_s
            at = self.table.next_time()
            assert at is None or at > self.now

    # -- what must hold

    @invariant()
    def never_more_than_the_limits(self) -> None:
        living = [circuit for circuit in self.circuits.values() if circuit.open]
        gauges = self.table.gauges()
        assert gauges["relay_reservations"] <= LIMITS.relay_reservations_max
        assert gauges["relay_circuits_signal"] + gauges["relay_circuits_bulk"] == len(living)
        assert all(number <= LIMITS.relay_reservations_per_network for number in self.table._networks.values())
        for cls, most in ((RelayClass.SIGNAL, LIMITS.relay_signal_circuits), (RelayClass.BULK, LIMITS.relay_bulk_circuits)):
            of_class = [circuit for circuit in living if circuit.cls is cls]
            ends = Counter(peer for circuit in of_class for peer in (circuit.source, circuit.target))
            assert all(number <= most for number in ends.values())
            pairs = Counter(circuit.pair for circuit in of_class)
            if cls is RelayClass.SIGNAL:
                assert all(number <= LIMITS.relay_signal_pair_circuits for number in pairs.values())
            else:
                assert len(pairs) <= MOST_PAIRS
        for circuit in self.circuits.values():
            assert circuit.up_bytes == self.sent[circuit.id, True] and circuit.down_bytes == self.sent[circuit.id, False]
            if circuit.cls is RelayClass.SIGNAL:
                assert max(circuit.up_bytes, circuit.down_bytes) <= LIMITS.relay_signal_bytes
        assert len(self.table._ended) <= LIMITS.relay_requesters_max
        assert len(self.table._requests) <= LIMITS.relay_requesters_max
        assert all(self.table.holds(peer, self.now) == self.lives(peer) for peer in PEERS)

    def teardown(self) -> None:
        for peer, place in self.places.items():
            self.table.connection_ended(peer, place[3], self.now)
        for number in self.circuits:
            self.table.close(number)
        self.table.tick(self.now)
        assert not any(self.table.gauges().values()), self.table.gauges()


TestRelay = Relay.TestCase
TestRelay.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
