"""The peer book, known peers on disk, the own record, events.  FIND-3, FIND-4, FIND-9, FIND-10, FIND-15, WIRE-9."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from tests.wire.net.worlds import OTHER_RUN, RUN, World, member
from wire.address import Address, Scope
from wire.envelope import Equivocation, OpenedRecord, open_peer_record, seal_peer_record
from wire.identity import Identity, PeerId
from wire.limits import DEFAULT_LIMITS
from wire.messages import PeerRecord
from wire.net.book import PeerBook
from wire.net.knownpeers import KnownPeers
from wire.net.netevents import EVENTS_MAX, Announcer, Complaint
from wire.net.ownrecord import OwnRecord, Standing

NOW_UNIX = 1_800_000_000.0
RNG = random.Random(0)


def record(
    identity: Identity, *addresses: str, seq: int = 1, run: bytes = RUN, at: float = NOW_UNIX
) -> OpenedRecord:
    raw = seal_peer_record(identity, PeerRecord(addresses or ("/ip4/8.0.0.1/tcp/4001",)), run=run, seq=seq, now_unix=at)
    return open_peer_record(raw, now_unix=at, run=None)


def book(scope: Scope = Scope.INTERNET) -> PeerBook:
    return PeerBook(Identity.generate().peer_id, scope, DEFAULT_LIMITS)


def test_only_newer_records_count_and_two_of_one_number_are_proof() -> None:
    """WIRE-9."""
    known, identity = book(), Identity.generate()
    assert known.learn(record(identity, seq=5), 0.0, NOW_UNIX)
    assert not known.learn(record(identity, seq=4), 0.0, NOW_UNIX)
    assert not known.learn(record(identity, seq=5), 0.0, NOW_UNIX)
    assert known.learn(record(identity, "/ip4/8.0.0.2/tcp/1", seq=6), 0.0, NOW_UNIX)
    assert known.addresses(identity.peer_id) == (Address("8.0.0.2", 1),)
    with pytest.raises(Equivocation):
        known.learn(record(identity, "/ip4/8.0.0.3/tcp/1", seq=6), 0.0, NOW_UNIX)


def test_the_own_record_is_never_taken_from_others() -> None:
    """FIND-10."""
    identity = Identity.generate()
    known = PeerBook(identity.peer_id, Scope.INTERNET, DEFAULT_LIMITS)
    assert not known.learn(record(identity, seq=2**60), 0.0, NOW_UNIX)
    assert len(known) == 0


@pytest.mark.parametrize(
    ("scope", "usable"),
    [
        (Scope.INTERNET, ["/ip4/8.0.0.1/tcp/4001"]),
        (Scope.LAN, ["/ip4/192.168.0.9/tcp/4001", "/ip4/10.0.0.7/tcp/4001", "/ip4/8.0.0.1/tcp/4001"]),
    ],
)
def test_private_addresses_of_strangers_are_not_dialled_from_the_internet(scope: Scope, usable: list[str]) -> None:
    """FIND-9."""
    known, identity = book(scope), Identity.generate()
    known.learn(
        record(identity, "/ip4/192.168.0.9/tcp/4001", "/ip4/10.0.0.7/tcp/4001", "/ip4/8.0.0.1/tcp/4001"), 0.0, NOW_UNIX
    )
    assert [str(address) for address in known.addresses(identity.peer_id)] == usable


def test_a_record_with_our_outside_address_leads_to_our_own_networks_only() -> None:
    """FIND-9: its word alone opens no door to the networks of a VPN or of strangers."""
    known, identity = book(Scope.INTERNET), Identity.generate()
    known.outside, known.inside = frozenset({"8.0.0.1"}), frozenset({"192.168.0.2"})
    addresses = "/ip4/192.168.0.9/tcp/4001", "/ip4/10.0.0.7/tcp/4001", "/ip4/8.0.0.1/tcp/4001"
    known.learn(record(identity, *addresses), 0.0, NOW_UNIX)
    assert [address.host for address in known.addresses(identity.peer_id)] == ["8.0.0.1", "192.168.0.9"]


def test_the_place_that_worked_last_comes_first() -> None:
    known, identity = book(), Identity.generate()
    known.learn(record(identity, "/ip4/8.0.0.1/tcp/1", "/ip4/8.0.0.2/tcp/1"), 0.0, NOW_UNIX)
    known.connected(identity.peer_id, 0.0, NOW_UNIX, run=RUN, address=Address("8.0.0.2", 1))
    known.connected(identity.peer_id, 1.0, NOW_UNIX + 1, run=RUN, address=Address("8.0.0.3", 1))
    assert [address.host for address in known.addresses(identity.peer_id)] == ["8.0.0.2", "8.0.0.1", "8.0.0.3"]


def test_after_a_thousand_short_lived_nodes_what_is_handed_out_is_alive() -> None:
    """FIND-4."""
    known = book(Scope.LAN)
    alive: set[PeerId] = set()
    now = 0.0
    for number in range(1000):
        identity = Identity.generate()
        now += 3.0
        known.learn(record(identity, at=NOW_UNIX + now), now, NOW_UNIX + now)
        known.connected(identity.peer_id, now, NOW_UNIX + now, run=RUN, address=None)
        if number % 50 == 0:
            alive.add(identity.peer_id)
        else:
            known.disconnected(identity.peer_id, now + 30)
    handed = known.sample(24, RUN, (), now, NOW_UNIX + now, RNG)
    found = {open_peer_record(raw, now_unix=NOW_UNIX + now, run=RUN).peer_id for raw in handed}
    assert len(found) == 20 and found == alive


def test_what_is_handed_out_is_of_that_run_valid_recent_and_not_the_asker() -> None:
    known = book(Scope.LAN)
    mine, foreign, stale, lost, asker = (Identity.generate() for _ in range(5))
    known.learn(record(stale), 0.0, NOW_UNIX)
    for identity, run in ((mine, RUN), (foreign, OTHER_RUN), (lost, RUN), (asker, RUN)):
        known.learn(record(identity, run=run), 1000.0, NOW_UNIX)
    known.failed(lost.peer_id)

    def ask(run: bytes, now: float = 1001.0, now_unix: float = NOW_UNIX) -> set[PeerId]:
        raws = known.sample(24, run, (asker.peer_id,), now, now_unix, RNG)
        return {open_peer_record(raw, now_unix=now_unix, run=None).peer_id for raw in raws}

    assert ask(RUN) == {mine.peer_id}
    assert ask(bytes(32)) == {mine.peer_id, foreign.peer_id}
    assert ask(RUN, now_unix=NOW_UNIX + 7200 + 301) == set()
    assert ask(RUN, now=1000.0 + 601) == set()
    known.connected(mine.peer_id, 1000.0, NOW_UNIX, run=RUN, address=None)
    assert ask(RUN, now=1000.0 + 6000) == {mine.peer_id}  # FIND-15: a peer whose connection lives is not forgotten


def test_the_book_is_bounded_and_the_connected_stay() -> None:
    """FIND-15, and WIRE-6's flat memory."""
    known = PeerBook(Identity.generate().peer_id, Scope.LAN, DEFAULT_LIMITS)
    keep = Identity.generate()
    known.connected(keep.peer_id, 0.0, NOW_UNIX, run=RUN, address=None)
    for number in range(DEFAULT_LIMITS.peer_book_max + 100):
        known.connected(PeerId(fake_key(number)), float(number), NOW_UNIX, run=RUN, address=None)
        known.disconnected(PeerId(fake_key(number)), float(number))
    assert len(known) == DEFAULT_LIMITS.peer_book_max
    assert known.get(keep.peer_id) is not None
    assert known.get(PeerId(fake_key(0))) is None  # the longest unheard went


def fake_key(number: int) -> bytes:
    return (number + 10).to_bytes(4, "little") + bytes(27) + b"\x11"


def test_one_network_fills_at_most_a_quarter_on_the_internet() -> None:
    from dataclasses import replace

    limits = replace(DEFAULT_LIMITS, peer_book_max=16)
    known = PeerBook(Identity.generate().peer_id, Scope.INTERNET, limits)
    taken = [known.learn(record(Identity.generate(), f"/ip4/8.1.0.{number}/tcp/1"), 0.0, NOW_UNIX) for number in range(8)]
    assert taken == [True] * 4 + [False] * 4
    assert known.learn(record(Identity.generate(), "/ip4/8.2.0.1/tcp/1"), 0.0, NOW_UNIX)


# -- disk


def test_known_peers_survive_the_disk_and_old_or_foreign_ones_do_not() -> None:
    known = book()
    ours, foreign, old = (Identity.generate().peer_id for _ in range(3))
    known.connected(ours, 0.0, NOW_UNIX, run=RUN, address=Address("8.0.0.1", 4001))
    known.connected(foreign, 0.0, NOW_UNIX, run=OTHER_RUN, address=Address("8.0.0.2", 4001))
    known.connected(old, 0.0, NOW_UNIX - 31 * 86400, run=RUN, address=Address("8.0.0.3", 4001))
    again = book()
    assert again.load(known.to_bytes(NOW_UNIX), RUN, NOW_UNIX) == 1
    assert again.addresses(ours) == (Address("8.0.0.1", 4001),)
    assert again.candidates(4, NOW_UNIX, RNG) == [ours]
    assert not again.sample(24, RUN, (), 0.0, NOW_UNIX, RNG)  # hints are never handed out


def test_a_thousand_known_peers_fit_and_no_more_are_written() -> None:
    known = PeerBook(Identity.generate().peer_id, Scope.LAN, DEFAULT_LIMITS)
    for number in range(1200):
        known.connected(PeerId(fake_key(number)), 0.0, NOW_UNIX + number, run=RUN, address=Address("10.0.0.1", 1 + number))
    again = book()
    assert again.load(known.to_bytes(NOW_UNIX), RUN, NOW_UNIX) == 1000
    assert again.get(PeerId(fake_key(1199))) is not None and again.get(PeerId(fake_key(0))) is None


@given(st.binary(max_size=200))
def test_any_file_is_a_list_or_a_value_error(data: bytes) -> None:
    try:
        book().load(data, RUN, NOW_UNIX)
    except ValueError as error:
        assert "known peers" in str(error)


def test_the_file_is_written_when_something_changed_and_trouble_is_said_once(tmp_path: Path) -> None:
    complaints: list[str] = []
    known = book()
    file = KnownPeers(known, tmp_path / "deep" / "known-peers", RUN, DEFAULT_LIMITS)
    file.load(complaints.append)
    file.write(complaints.append)
    assert not (tmp_path / "deep").exists() and not complaints
    known.connected(Identity.generate().peer_id, 0.0, time.time(), run=RUN, address=Address("8.0.0.1", 4001))
    file.write(complaints.append)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["known-peers"] and not known.changed
    (tmp_path / "deep" / "known-peers").write_bytes(b"rubbish")
    KnownPeers(book(), tmp_path / "deep" / "known-peers", RUN, DEFAULT_LIMITS).load(complaints.append)
    assert len(complaints) == 1 and "is not used" in complaints[0]
    (tmp_path / "file").write_text("")
    blocked = KnownPeers(known, tmp_path / "file" / "known-peers", RUN, DEFAULT_LIMITS)
    known.changed = True
    blocked.write(complaints.append)
    blocked.write(complaints.append)
    assert len(complaints) == 2


# -- the own record


def own_record(scope: Scope, *announce: Address) -> OwnRecord:
    return OwnRecord(
        Identity.generate(), run=RUN, scope=scope, announce=announce, capabilities=("x",), data_dir=None, limits=DEFAULT_LIMITS
    )


@pytest.mark.parametrize(
    ("scope", "hosts"),
    [(Scope.HOST, ["127.0.0.1", "10.0.0.1", "8.0.0.1"]), (Scope.LAN, ["10.0.0.1", "8.0.0.1"]), (Scope.INTERNET, [])],
)
def test_a_wildcard_stands_for_the_interfaces_that_the_scope_allows(scope: Scope, hosts: list[str]) -> None:
    interfaces = ["127.0.0.1", "10.0.0.1", "8.0.0.1", "::1"]
    texts = own_record(scope).advertised([Address("0.0.0.0", 4001)], interfaces)
    assert texts == [f"/ip4/{host}/tcp/4001" for host in hosts]


def test_in_internet_scope_only_what_others_have_reached_is_told() -> None:
    reached = Address("8.0.0.1", 4001)
    assert own_record(Scope.INTERNET).advertised([Address("0.0.0.0", 4001)], ["8.0.0.1"], [reached]) == [str(reached)]
    with pytest.raises(ValueError):
        own_record(Scope.INTERNET).advertised([], [], [Address("10.0.0.1", 4001)])


def test_announced_addresses_come_first_and_must_be_fit_for_the_scope() -> None:
    announced = Address("8.0.0.9", 4001)
    assert own_record(Scope.INTERNET, announced).advertised([Address("10.0.0.1", 1)], []) == [str(announced)]
    with pytest.raises(ValueError, match="not advertised"):
        own_record(Scope.INTERNET, Address("10.0.0.1", 1)).advertised([], [])


def test_each_seal_is_newer() -> None:
    own = own_record(Scope.HOST)
    own.seal([Address("127.0.0.1", 4001)], [], Standing())
    first = open_peer_record(own.raw, now_unix=time.time(), run=RUN)
    own.seal([Address("127.0.0.1", 4001)], [], Standing())
    second = open_peer_record(own.raw, now_unix=time.time(), run=RUN)
    assert second.statement.seq > first.statement.seq and own.revision == 2
    renewals = [own.renew_after_s(random.Random(number)) for number in range(100)]
    assert 3240 <= min(renewals) < max(renewals) <= 3960  # FIND-15: twice within its life


# -- events


async def test_each_listener_hears_everything_and_the_first_also_the_past() -> None:
    announcer = Announcer()
    announcer.emit(Complaint("before"))
    first, second = announcer.subscribe(), announcer.subscribe()
    announcer.emit(Complaint("after"))
    assert [first.receive_nowait(), first.receive_nowait()] == [Complaint("before"), Complaint("after")]
    assert second.receive_nowait() == Complaint("after")
    first.close()
    announcer.emit(Complaint("more"))
    assert second.receive_nowait() == Complaint("more")
    announcer.close()
    with pytest.raises(trio.EndOfChannel):
        second.receive_nowait()


async def test_a_listener_that_takes_nothing_is_cut_off_visibly(caplog: pytest.LogCaptureFixture) -> None:
    announcer = Announcer()
    stuck = announcer.subscribe()
    for _ in range(EVENTS_MAX + 1):
        announcer.emit(Complaint("again"))
    assert len([record for record in caplog.records if "cut off" in record.message]) == 1
    for _ in range(EVENTS_MAX):
        stuck.receive_nowait()
    with pytest.raises(trio.EndOfChannel):
        stuck.receive_nowait()


async def test_the_events_of_a_net(autojump_clock: trio.testing.MockClock) -> None:
    from wire.net import Listening, PeerConnected, PeerLost, RecordLearned

    world = World()
    async with member(world, "10.0.0.1") as a:
        events = a.events()
        async with member(world, "10.0.0.2") as b:
            await b.dial(a.addresses[0])
            await trio.sleep(1)
        await trio.sleep(5)
        kinds = []
        while True:
            try:
                kinds.append(type(events.receive_nowait()))
            except trio.WouldBlock:
                break
        assert kinds == [Listening, RecordLearned, PeerConnected, PeerLost]
        assert a.traffic().bytes_in > 500 and a.traffic().bytes_out > 500
