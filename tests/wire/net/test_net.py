"""Nets that meet: calls, refusals, runs, identities, simultaneous dials, the end.  In memory and in virtual time."""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
import trio
import trio.testing

from tests.wire.net.worlds import OTHER_RUN, RUN, World, held, local, member
from wire.address import Address
from wire.errors import Code, ConnectionLost, LocalProtocolError, PeerIdMismatch, RemoteProtocolError, StreamReset, WireError
from wire.identity import Identity
from wire.limits import DEFAULT_LIMITS
from wire.messages import Records, Want
from wire.net import DialFailed, Net, Peer, PeerConnected, PeerLost
from wire.net.primary import choose_primary

QUESTION = Want(RUN, 3)
Clock = trio.testing.MockClock
Pair = tuple[Net, Net, Peer, World]


async def echo(peer: Peer, want: Want) -> Want:
    return want


@pytest.fixture
async def pair(autojump_clock: Clock) -> AsyncIterator[Pair]:
    world = World()
    async with member(world, "10.0.0.1") as a, member(world, "10.0.0.2") as b:
        peer = await a.dial(b.addresses[0])
        yield a, b, peer, world


async def settled(*nets: Net) -> None:
    """Wait until what was started by connecting (px/1) is over."""
    await trio.sleep(0.5)


async def test_a_call_and_its_reply(pair: Pair, autojump_clock: Clock) -> None:
    a, b, peer, _ = pair
    b.serve_calls("echo", Want, echo)
    assert await peer.call("echo", QUESTION, Want, deadline_s=1) == QUESTION
    back = b.peer(a.peer_id)
    assert back is not None and back.peer_id == a.peer_id and not back.guest
    await settled()
    assert held(a, b) == {}


async def test_refusals_have_their_own_codes(pair: Pair, autojump_clock: Clock) -> None:
    a, b, peer, _ = pair

    async def busy(peer: Peer, want: Want) -> Want:
        raise WireError("too much to do", code=Code.REFUSED)

    async def wrong(peer: Peer, want: Want) -> Records:
        return Records(())

    b.serve_calls("busy", Want, busy)
    b.serve_calls("wrong", Want, wrong)
    b.serve_calls("echo", Want, echo)
    with pytest.raises(StreamReset) as unknown:
        await peer.call("nowhere", QUESTION, Want, deadline_s=1)
    assert unknown.value.code is Code.PROTOCOL_UNKNOWN
    with pytest.raises(StreamReset) as refused:
        await peer.call("busy", QUESTION, Want, deadline_s=1)
    assert (refused.value.code, refused.value.retryable, refused.value.detail) == (Code.REFUSED, True, "too much to do")
    with pytest.raises(RemoteProtocolError):
        await peer.call("wrong", QUESTION, Want, deadline_s=1)
    with pytest.raises(StreamReset) as malformed:
        await peer.call("echo", Records(()), Want, deadline_s=1)
    assert malformed.value.code is Code.PROTOCOL
    await settled()
    assert held(a, b) == {} and not peer.closed


async def test_a_handler_that_fails_ends_its_stream_and_is_logged_once(
    pair: Pair, autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    _a, b, peer, _ = pair

    async def broken(peer: Peer, want: Want) -> Want:
        raise ZeroDivisionError("a bug")

    b.serve_calls("broken", Want, broken)
    b.serve_calls("echo", Want, echo)
    with pytest.raises(StreamReset) as failure:
        await peer.call("broken", QUESTION, Want, deadline_s=1)
    assert failure.value.code is Code.INTERNAL and "bug" not in failure.value.detail  # our insides are not their business
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert b.counts["internal-error"] == 1
    assert await peer.call("echo", QUESTION, Want, deadline_s=1) == QUESTION


async def test_a_call_has_a_deadline(pair: Pair, autojump_clock: Clock) -> None:
    a, b, peer, _ = pair

    async def never(peer: Peer, want: Want) -> Want:
        await trio.sleep_forever()
        raise AssertionError

    b.serve_calls("never", Want, never)
    started = trio.current_time()
    with pytest.raises(WireError) as late:
        await peer.call("never", QUESTION, Want, deadline_s=3)
    assert late.value.code is Code.TIMEOUT and trio.current_time() - started == pytest.approx(3)
    await settled()
    assert held(a, b) == {}


async def test_more_calls_than_the_peer_allows_at_once_wait_and_succeed(pair: Pair, autojump_clock: Clock) -> None:
    """WIRE-11: a well-behaved caller is never cut for being busy."""
    _a, b, peer, _ = pair
    b.serve_calls("echo", Want, echo)
    started = trio.current_time()
    for _ in range(1000):
        assert await peer.call("echo", QUESTION, Want, deadline_s=10) == QUESTION
    assert trio.current_time() - started == pytest.approx(4, abs=1.5)  # 200/s and a burst
    assert not peer.closed


async def test_registering_a_protocol_twice_is_our_mistake(pair: Pair, autojump_clock: Clock) -> None:
    a, *_ = pair
    a.serve_calls("echo", Want, echo)
    with pytest.raises(LocalProtocolError):
        a.serve_calls("echo", Want, echo)


# -- runs, identities


async def test_another_run_is_refused_with_one_clear_error(autojump_clock: Clock) -> None:
    """FIND-16: one refusal at connect that names both sides; nothing is retried by itself."""
    world = World()
    async with member(world, "10.0.0.1") as a, member(world, "10.0.0.2", run=OTHER_RUN) as b:
        events = b.events()
        with pytest.raises(DialFailed) as failure:
            await a.dial(b.addresses[0])
        (cause,) = failure.value.causes.values()
        assert cause.kind == "run-mismatch" and not failure.value.retryable
        assert not a.peers() and not b.peers()
        assert b.counts["handshake-run_mismatch"] == 1
        assert not any(isinstance(event, PeerConnected) for event in drain(events))
    assert world.open_pipes() == 0


def drain(channel: trio.MemoryReceiveChannel[object]) -> list[object]:
    found = []
    while True:
        try:
            found.append(channel.receive_nowait())
        except (trio.WouldBlock, trio.EndOfChannel):
            return found


async def test_guests_may_use_what_is_offered_to_guests(autojump_clock: Clock) -> None:
    world = World()
    async with member(world, "10.0.0.1", run=None) as newcomer, member(world, "10.0.0.2") as b:
        b.serve_calls("members", Want, echo)
        b.serve_calls("anybody", Want, echo, guest=True)
        peer = await newcomer.dial(b.addresses[0])
        assert peer.guest
        assert await peer.call("anybody", QUESTION, Want, deadline_s=1) == QUESTION
        with pytest.raises(StreamReset) as refused:
            await peer.call("members", QUESTION, Want, deadline_s=1)
        assert refused.value.code is Code.NOT_MEMBER


async def test_wire_3_whoever_answers_must_be_the_one_that_was_dialled(autojump_clock: Clock) -> None:
    """WIRE-3: PeerIdMismatch before any stream; the address is good for whoever it is."""
    world = World()
    absent = Identity.generate().peer_id
    async with member(world, "10.0.0.1") as a, member(world, "10.0.0.2") as b:
        with pytest.raises(DialFailed) as failure:
            await a.dial(b.addresses[0].with_peer(absent))
        (cause,) = failure.value.causes.values()
        assert cause.kind == "peer-mismatch" and str(absent) in cause.words and str(b.peer_id) in cause.words
        assert not b.peers()
        assert (await a.dial(b.addresses[0])).peer_id == b.peer_id
    assert PeerIdMismatch(absent, b.peer_id).code is Code.PEER_MISMATCH


async def test_dialling_oneself_ends_in_the_handshake(autojump_clock: Clock) -> None:
    """FIND-10."""
    world = World()
    async with member(world, "10.0.0.1") as a:
        with pytest.raises(DialFailed) as failure:
            await a.dial(a.addresses[0])
        assert [cause.kind for cause in failure.value.causes.values()] == ["self"]
        with pytest.raises(WireError) as own:
            await a.connect(a.peer_id)
        assert own.value.code is Code.SELF
        assert not a.peers()
    assert world.open_pipes() == 0


async def test_two_processes_with_one_identity(autojump_clock: Clock) -> None:
    """The older answers a ping: the newer is refused and told why; the older goes on."""
    world, twin = World(), Identity.generate()
    async with member(world, "10.0.0.9") as c, member(world, "10.0.0.1", identity=twin) as first:
        first_peer = await first.dial(c.addresses[0])
        c.serve_calls("echo", Want, echo)
        async with member(world, "10.0.0.2", identity=twin) as second:
            second_peer = await second.dial(c.addresses[0])
            reason = await second_peer.wait_closed()
            assert reason.code is Code.DUPLICATE_IDENTITY
            assert not first_peer.closed
            assert await first_peer.call("echo", QUESTION, Want, deadline_s=1) == QUESTION
            assert c.counts["adopt-duplicate_identity"] == 1


async def test_a_restarted_peer_replaces_its_dead_connection(autojump_clock: Clock) -> None:
    """The old process does not answer: after 3 s its connection is dropped and the new one taken."""
    world, identity = World(), Identity.generate()
    async with member(world, "10.0.0.9") as c:
        c.serve_calls("echo", Want, echo)
        async with member(world, "10.0.0.1", identity=identity) as first:
            await first.dial(c.addresses[0])
            world.silence_all()  # killed, without a FIN
        async with member(world, "10.0.0.2", identity=identity) as second:
            started = trio.current_time()
            peer = await second.dial(c.addresses[0])
            assert await peer.call("echo", QUESTION, Want, deadline_s=5) == QUESTION
            assert trio.current_time() - started <= 5
            assert [known.boot_id for known in c.peers()] == [second._boot_id]


# -- one connection a pair


@pytest.mark.parametrize("seed", range(20))
async def test_simultaneous_dials_leave_one_connection(seed: int, autojump_clock: Clock) -> None:
    """FIND-14: exactly one remains, the same at both ends; both report one peer; calls in flight all succeed."""
    rng = random.Random(seed)
    world = World(delay_s=0.0005, jitter_s=0.2, rng=rng)
    async with member(world, "10.0.0.1") as a, member(world, "10.0.0.2") as b:
        for net in (a, b):
            net.serve_calls("echo", Want, echo)
        seen = [a.events(), b.events()]
        answers = []

        async def dial_and_call(net: Net, other: Net) -> None:
            await trio.sleep(rng.random() * 0.2)
            peer = await net.dial(other.addresses[0])
            for _ in range(20):
                answers.append(await peer.call("echo", QUESTION, Want, deadline_s=5))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(dial_and_call, a, b)
            nursery.start_soon(dial_and_call, b, a)
        assert len(answers) == 40
        await trio.sleep(1)
        (one,), (other,) = a.peers(), b.peers()
        assert len(one.links) == len(other.links) == 1
        assert one.links[0].initiator != other.links[0].initiator
        if len(world.pipes) == 2:  # the second dial was not spared by the first connection
            assert one.links[0].initiator == (a.peer_id < b.peer_id)
        for channel in seen:
            assert sum(isinstance(event, PeerConnected) for event in drain(channel)) == 1
        assert held(a, b) == {}
    assert world.open_pipes() == 0


async def test_a_second_dial_to_the_same_address_gives_the_same_peer(pair: Pair, autojump_clock: Clock) -> None:
    a, b, peer, _ = pair
    again = await a.dial(b.addresses[0])
    assert again is peer
    await trio.sleep(1)
    assert len(peer.links) == 1


async def test_callers_of_connect_share_one_dial_and_one_cancel_spares_the_others(
    autojump_clock: Clock,
) -> None:
    world = World(delay_s=0.1)
    async with member(world, "10.0.0.1") as a, member(world, "10.0.0.2") as b, member(world, "10.0.0.3") as seed:
        await a.dial(seed.addresses[0])
        await b.dial(seed.addresses[0])
        await trio.sleep(10)
        assert a.peer(b.peer_id) is None and any(known.peer_id == b.peer_id for known in a.known())
        dials = len(world.dials)
        found: list[Peer] = []

        async def connect() -> None:
            found.append(await a.connect(b.peer_id))

        async with trio.open_nursery() as nursery:
            with trio.move_on_after(0.05):
                nursery.start_soon(connect)
                nursery.start_soon(connect)
                await a.connect(b.peer_id)
        assert len(found) == 2 and found[0] is found[1]
        assert len(world.dials) == dials + 1


async def test_a_connect_that_nobody_waits_for_is_given_up(autojump_clock: Clock) -> None:
    world = World()
    async with member(world, "10.0.0.1") as a, member(world, "10.0.0.2") as b:
        await a.dial(b.addresses[0])
        await trio.sleep(1)
        identity = b.peer_id
        for peer in a.peers():
            peer.goaway(Code.SHUTDOWN)
        await trio.sleep(1)
        world.black_holes.add(("10.0.0.2", 4001))
        with trio.move_on_after(0.5) as scope:
            await a.connect(identity)
        assert scope.cancelled_caught
        await trio.sleep(0.01)
        assert not a.manager._dialling
        world.black_holes.clear()
        assert (await a.connect(identity)).peer_id == identity


def test_the_primary_is_the_same_seen_from_both_ends() -> None:
    class FakeLink:
        def __init__(self, initiator: bool, peer_id: object, draining: bool = False, relay: object = None) -> None:
            self.initiator, self.peer_id, self.draining, self.generation, self.relay = initiator, peer_id, draining, 0, relay

    low, high = sorted(Identity.generate().peer_id for _ in range(2))
    for mine in ([True, False], [False, True], [True, True], [False, False], [True, False, True]):
        ours = [FakeLink(initiator, high) for initiator in mine]
        theirs = [FakeLink(not initiator, low) for initiator in mine]
        chosen_by_low = choose_primary(ours, low)  # type: ignore[arg-type]
        chosen_by_high = choose_primary(theirs, high)  # type: ignore[arg-type]
        assert ours.index(chosen_by_low) == theirs.index(chosen_by_high)  # type: ignore[arg-type]
    assert choose_primary([FakeLink(True, high, draining=True)], low) is None  # type: ignore[list-item]
    direct, circuit = FakeLink(False, high), FakeLink(True, high, relay=low)
    assert choose_primary([direct, circuit], low) is direct  # type: ignore[list-item, comparison-overlap]


# -- ends


async def test_a_clean_end_is_told_and_quiet(
    pair: Pair, autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """WIRE-12: a clean close says nothing above INFO."""
    a, b, peer, _ = pair
    events = b.events()
    peer.goaway(Code.SHUTDOWN, detail="bye")
    await trio.sleep(1)
    lost = [event for event in drain(events) if isinstance(event, PeerLost)]
    assert [event.reason.code for event in lost] == [Code.SHUTDOWN] and lost[0].reason.detail == "bye"
    assert not a.peers() and not b.peers()
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


async def test_silence_is_noticed_within_15_seconds(pair: Pair, autojump_clock: Clock) -> None:
    _a, b, peer, world = pair
    b.serve_calls("echo", Want, echo)
    await peer.call("echo", QUESTION, Want, deadline_s=1)
    world.silence_all()
    started = trio.current_time()
    with pytest.raises(ConnectionLost):
        await peer.call("echo", QUESTION, Want, deadline_s=60)
    assert trio.current_time() - started <= 20
    assert (await peer.wait_closed()).retryable


async def test_a_connection_without_streams_ends_as_idle(autojump_clock: Clock) -> None:
    world = World()
    limits = replace(DEFAULT_LIMITS, exchange_interval_s=10_000.0)
    async with member(world, "10.0.0.1", limits=limits) as a, member(world, "10.0.0.2", limits=limits) as b:
        peer = await a.dial(b.addresses[0])
        started = trio.current_time()
        assert (await peer.wait_closed()).code in (Code.IDLE, Code.SHUTDOWN)
        assert 300 <= trio.current_time() - started <= 330


async def test_a_full_house_says_so_before_the_handshake(autojump_clock: Clock) -> None:
    """FIND-8: full is told apart, with a time to wait."""
    world = World()
    full = replace(DEFAULT_LIMITS, inbound_connections_max=1)
    async with member(world, "10.0.0.9", limits=full) as host, member(world, "10.0.0.1") as a, member(world, "10.0.0.2") as b:
        await a.dial(host.addresses[0])
        with pytest.raises(DialFailed) as failure:
            await b.dial(host.addresses[0])
        assert [cause.kind for cause in failure.value.causes.values()] == ["full"]
        assert failure.value.retryable


async def test_leaving_the_block_ends_everything_also_by_a_cancel() -> None:
    async with local() as b:
        with trio.move_on_after(0.2):
            async with local() as a:
                await a.dial(b.addresses[0])
                await trio.sleep_forever()
        with trio.fail_after(2):
            while b.peers():
                await b.peers()[0].wait_closed()
                await trio.lowlevel.checkpoint()


async def test_run_2_a_cancel_says_goodbye_as_well(autojump_clock: Clock) -> None:
    """A node that is told to stop is cancelled: its peers must hear that it leaves, not see a broken connection."""
    world = World()
    async with member(world, "10.0.0.2") as b:
        events = b.events()
        with trio.CancelScope() as scope:
            async with member(world, "10.0.0.1") as a:
                await a.dial(b.addresses[0])
                await settled()
                scope.cancel()
                await trio.sleep_forever()
        await settled()
        lost = [event.reason.code for event in drain(events) if isinstance(event, PeerLost)]
        assert lost == [Code.SHUTDOWN]


async def test_a_net_without_listeners_can_dial() -> None:
    async with local() as b:
        from wire.address import Scope
        from wire.net import open_net

        async with open_net(Identity.generate(), run=RUN, scope=Scope.HOST) as a:
            assert a.addresses == ()
            peer = await a.dial(b.addresses[0])
            assert peer.peer_id == b.peer_id


async def test_a_closed_port_is_named_with_its_cause() -> None:
    async with local() as a:
        async with local() as b:
            address = b.addresses[0]
        with pytest.raises(DialFailed) as failure:
            await a.dial(address)
        assert [cause.kind for cause in failure.value.causes.values()] == ["refused"]
        assert f"{address}: connection refused" in str(failure.value)


async def test_ipv6_loopback() -> None:
    """FIND-13: a four-part socket name is an address all the same."""
    from wire.address import Scope
    from wire.net import BindFailed, open_net

    try:
        async with open_net(Identity.generate(), run=RUN, listen=[Address("::1", 0)], scope=Scope.HOST) as b, local() as a:
            peer = await a.dial(b.addresses[0])
            assert peer.links[0].pipe.info().remote == ("::1", b.addresses[0].port)
            assert Address.parse(str(b.addresses[0])) == b.addresses[0]
    except BindFailed:
        pytest.skip("this machine has no IPv6")


async def test_a_change_of_the_machines_addresses_is_noticed(pair: Pair, autojump_clock: Clock) -> None:
    """NAT-4: back-offs cleared, connections pinged, the record published anew, within 10 s."""
    from wire.net.causes import SILENT

    a, b, peer, _ = pair
    await trio.sleep(1)
    a.manager.backoff.failed(Address("10.0.0.7", 1), SILENT, trio.current_time())
    before = next(record.statement.seq for record in b.known())
    assert peer.rtt_s is not None
    had = a._transport.local_addresses()
    a._transport.local_addresses = lambda: (*had, "10.0.0.77")  # type: ignore[method-assign]
    await trio.sleep(10)
    assert len(a.manager.backoff) == 0
    assert next(record.statement.seq for record in b.known()) > before
    assert not peer.closed


async def test_guests_leave_room_for_members(autojump_clock: Clock) -> None:
    world = World()
    small = replace(DEFAULT_LIMITS, inbound_connections_max=10)
    async with AsyncExitStack() as stack:
        host = await stack.enter_async_context(member(world, "10.0.0.100", limits=small))
        for number in range(9):
            guest = await stack.enter_async_context(member(world, f"10.0.0.{number}", run=None))
            await guest.dial(host.addresses[0])
        late = await stack.enter_async_context(member(world, "10.0.0.50", run=None))
        with pytest.raises(DialFailed):
            await late.dial(host.addresses[0])
        friend = await stack.enter_async_context(member(world, "10.0.0.51"))
        assert (await friend.dial(host.addresses[0])).peer_id == host.peer_id
