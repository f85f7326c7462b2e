"""Port mapping without sockets: packets as the RFCs draw them, and the automaton against times and answers that are arguments."""

from __future__ import annotations

import random
import struct
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.wire.routers import NONCE, address_answer, map_answer, pcp_answer, unsupported
from wire.address import Address
from wire.limits import DEFAULT_LIMITS
from wire.portmappackets import (
    DATAGRAM_MAX,
    AddressAnswer,
    MapAnswer,
    PcpAnswer,
    natpmp_address,
    natpmp_map,
    parse_address,
    parse_map,
    parse_pcp,
    pcp_map,
    speaks_another_version,
)
from wire.portmapping import NO_ROUTER, Epoch, Language, Mapper, State, not_public

PORT = 4001
OUTSIDE = Address("8.8.4.4", 50001)


def mapper(now: float = 0.0, epoch: Epoch | None = None) -> Mapper:
    return Mapper("192.168.1.7", PORT, NONCE, epoch or Epoch(), DEFAULT_LIMITS, now)


def held(language: Language = Language.PCP) -> Mapper:
    """Asked at 0, answered at 1."""
    made = mapper()
    made.poll(0.0)
    if language is Language.PCP:
        made.received(pcp_answer(PORT), 1.0)
    else:
        made.received(unsupported(), 1.0)
        made.poll(1.0)
        made.received(address_answer(), 1.0)
        made.poll(1.0)
        made.received(map_answer(PORT), 1.0)
    assert made.state is State.HELD
    return made


# -- packets


def test_a_pcp_request_is_as_rfc_6887_draws_it() -> None:
    assert pcp_map("192.168.1.7", NONCE, 4001, 3600, 4001) == bytes.fromhex(
        "02 01 0000 00000e10 00000000000000000000ffffc0a80107"  # 7.1
        "0102030405060708090a0b0c 06 000000 0fa1 0fa1 00000000000000000000ffff00000000"  # 11.1
    )
    removal = pcp_map("192.168.1.7", NONCE, 4001, 0)
    assert removal[4:8] == bytes(4) and removal[42:44] == bytes(2) and len(removal) == 60


def test_natpmp_requests_are_as_rfc_6886_draws_them() -> None:
    assert natpmp_address() == bytes.fromhex("0000")  # 3.2
    assert natpmp_map(4001, 3600, 4001) == bytes.fromhex("00 02 0000 0fa1 0fa1 00000e10")  # 3.3
    assert natpmp_map(4001, 0) == bytes.fromhex("00 02 0000 0fa1 0000 00000000")  # 3.4: port and lifetime of zero remove


def test_answers_as_the_rfcs_draw_them() -> None:
    raw = bytes.fromhex(
        "02 81 00 00 00000708 0000002a 000000000000000000000000"
        "0102030405060708090a0b0c 06 000000 0fa1 c351 00000000000000000000ffff08080404"
    )
    assert parse_pcp(raw, NONCE, 4001) == PcpAnswer(0, 1800, 42, 50001, "8.8.4.4")
    assert parse_address(bytes.fromhex("00 80 0000 0000002a 08080404")) == AddressAnswer(0, 42, "8.8.4.4")
    assert parse_map(bytes.fromhex("00 82 0000 0000002a 0fa1 c351 00000708"), 4001) == MapAnswer(0, 42, 50001, 1800)
    assert parse_map(bytes.fromhex("00 82 0002 0000002a"), 4001) == MapAnswer(2, 42, 0, 0)
    assert speaks_another_version(bytes.fromhex("00 81 0001 0000002a"))
    assert not speaks_another_version(raw)


@pytest.mark.parametrize(
    ("at", "value"),
    [(0, 1), (0, 0), (1, 1), (1, 0x80), (24, 0), (35, 0), (36, 17), (40, 0), (41, 0), (54, 0)],
    ids=["version", "natpmp", "request", "announce", "nonce", "nonce-end", "udp", "port", "port-low", "not-ip4"],
)
def test_a_pcp_answer_that_differs_in_one_octet_is_none(at: int, value: int) -> None:
    raw = bytearray(pcp_answer(PORT))
    assert parse_pcp(bytes(raw), NONCE, PORT) is not None
    raw[at] = value
    assert parse_pcp(bytes(raw), NONCE, PORT) is None


def test_answers_of_another_length_are_none() -> None:
    for length in range(60):
        assert parse_pcp(pcp_answer(PORT)[:length], NONCE, PORT) is None
    assert parse_pcp(pcp_answer(PORT) + bytes(3), NONCE, PORT) is None
    assert parse_pcp(pcp_answer(PORT) + bytes(4), NONCE, PORT) is not None  # an option that we did not ask for
    assert parse_pcp(pcp_answer(PORT) + bytes(DATAGRAM_MAX), NONCE, PORT) is None
    for length in range(12):
        assert parse_address(address_answer()[:length]) is None
    for length in range(16):
        assert parse_map(map_answer(PORT)[:length], PORT) is None
    assert parse_map(map_answer(PORT), PORT + 1) is None


ANSWERS = [pcp_answer(PORT), pcp_answer(PORT, result=8), address_answer(), map_answer(PORT), unsupported()]


@st.composite
def datagrams(draw: st.DrawFn) -> bytes:
    """Noise, or an answer with some octets changed and its end cut off."""
    if draw(st.booleans()):
        return draw(st.binary(max_size=80))
    raw = bytearray(draw(st.sampled_from(ANSWERS)))
    for _ in range(draw(st.integers(0, 3))):
        raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
    return bytes(raw[: draw(st.integers(0, len(raw)))]) if draw(st.booleans()) else bytes(raw)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(datagrams(), st.floats(0, 4000)), max_size=12))
def test_whatever_a_router_sends_is_an_answer_or_ignored(sent: list[tuple[bytes, float]]) -> None:
    made, now = mapper(), 0.0
    for data, pause_s in sent:
        assert len(made.poll(now)) <= 2
        assert made.due > now  # else its task would spin
        now += pause_s
        made.received(data, now)
        mapping = made.mapping(now)
        assert mapping is None or not not_public(mapping.outside)
    made.release()
    assert made.mapping(now) is None


# -- the automaton


def test_a_mapping_is_asked_for_held_and_renewed_at_half_of_its_lease() -> None:
    made = mapper()
    assert made.poll(0.0) == (pcp_map("192.168.1.7", NONCE, PORT, 3600, PORT),)
    assert made.poll(0.0) == ()
    made.received(pcp_answer(PORT, lifetime=3600), 1.0)
    mapping = made.mapping(1.0)
    assert mapping is not None and (mapping.outside, mapping.language, mapping.until) == (OUTSIDE, Language.PCP, 3601.0)
    assert made.due == 1801.0 and made.poll(1800.9) == ()
    assert made.poll(1801.0) == (pcp_map("192.168.1.7", NONCE, PORT, 3600, OUTSIDE.port, OUTSIDE.host),)  # names what it renews
    assert made.mapping(1801.0) is not None
    made.received(pcp_answer(PORT, epoch=1800 + 100), 1801.0)
    assert made.mapping(3700.0) is not None


def test_silence_is_asked_again_after_250_ms_doubled_then_in_the_other_language() -> None:
    made, sent, now = mapper(), [], 0.0
    while made.state is not State.PAUSE:
        now = made.due
        sent += [(now, data[0], len(data)) for data in made.poll(now)]
    waits = [0.0, 0.25, 0.75, 1.75, 3.75]
    assert sent == [(at, 2, 60) for at in waits] + [(7.75 + at, 0, 2) for at in waits]
    assert made.why == NO_ROUTER and made.pauses == 1
    assert made.due == 15.5 + DEFAULT_LIMITS.portmap_again_s
    assert made.poll(made.due)[0][0] == 2  # begins anew with PCP


def test_a_router_that_knows_only_natpmp_is_asked_in_that() -> None:
    made = mapper()
    made.poll(0.0)
    made.received(unsupported(), 0.1)
    assert made.state is State.ADDRESS and made.poll(0.1) == (natpmp_address(),)
    made.received(address_answer(), 0.2)
    assert made.poll(0.2) == (natpmp_map(PORT, 3600, PORT),)
    made.received(map_answer(PORT), 0.3)
    mapping = made.mapping(0.3)
    assert mapping is not None and (mapping.outside, mapping.language) == (OUTSIDE, Language.NATPMP)
    assert made.poll(made.due) == (natpmp_address(),)  # its address may be another by now
    assert made.release() == natpmp_map(PORT, 0)


@pytest.mark.parametrize("host", ["10.0.0.1", "192.168.0.2", "100.64.3.4", "0.0.0.0", "127.0.0.1"])
@pytest.mark.parametrize("language", list(Language))
def test_an_outside_address_that_is_not_public_is_given_back_with_the_reason(host: str, language: Language) -> None:
    made = mapper()
    made.poll(0.0)
    if language is Language.PCP:
        made.received(pcp_answer(PORT, host=host), 1.0)
        assert made.due < 0 and made.poll(1.0) == (pcp_map("192.168.1.7", NONCE, PORT, 0),)
    else:
        made.received(unsupported(), 1.0)
        made.poll(1.0)
        made.received(address_answer(host=host), 1.0)
        assert made.poll(1.0) == ()
    assert made.state is State.PAUSE and made.mapping(1.0) is None and host in made.why
    words = {"10.0.0.1": "double NAT", "192.168.0.2": "double NAT", "100.64.3.4": "carrier NAT"}
    assert words.get(host, "") in made.why


@pytest.mark.parametrize(("result", "words"), [(2, "does not allow"), (8, "no room"), (12, "another router"), (99, "result 99")])
def test_a_refusal_is_told_in_words_and_rested_for_as_long_as_it_stands(result: int, words: str) -> None:
    made = mapper()
    made.poll(0.0)
    made.received(pcp_answer(PORT, result=result, lifetime=1800), 1.0)
    assert made.state is State.PAUSE and words in made.why and made.due == 1801.0
    again = mapper()
    again.poll(0.0)
    again.received(pcp_answer(PORT, result=result, lifetime=0xFFFFFFFF), 1.0)
    assert again.due == 1.0 + DEFAULT_LIMITS.portmap_lease_s


def test_natpmp_refuses_in_words() -> None:
    made = mapper()
    made.poll(0.0)
    made.received(unsupported(), 0.0)
    made.poll(0.0)
    made.received(struct.pack(">BBHI", 0, 128, 3, 7), 0.0)
    assert made.state is State.PAUSE and "no connection" in made.why


def test_what_another_nonce_or_port_answers_is_ignored() -> None:
    made = mapper()
    made.poll(0.0)
    for data in (pcp_answer(PORT, nonce=bytes(12)), pcp_answer(PORT + 1), address_answer(), map_answer(PORT), b""):
        made.received(data, 0.1)
        assert made.state is State.PCP and made.due == 0.25
    made.received(pcp_answer(PORT), 0.1)
    assert made.state is State.HELD


def test_a_lease_of_a_second_is_not_renewed_each_second_and_one_of_years_not_believed() -> None:
    for lifetime, renewed_s in ((1, DEFAULT_LIMITS.portmap_renew_least_s), (0xFFFFFFFF, DEFAULT_LIMITS.portmap_lease_s / 2)):
        made = mapper()
        made.poll(0.0)
        made.received(pcp_answer(PORT, lifetime=lifetime), 0.0)
        assert made.due == renewed_s


def test_a_mapping_survives_a_refused_renewal_until_its_lease_ends() -> None:
    made = held()
    now = made.due
    made.poll(now)
    made.received(pcp_answer(PORT, result=8, lifetime=0, epoch=100 + 1800), now)
    assert made.state is State.PAUSE and made.mapping(now) is not None
    assert made.due == now + DEFAULT_LIMITS.portmap_again_s
    while made.due < 3601.0:
        assert made.mapping(made.due) is not None
        made.poll(made.due)
    assert made.due == 3601.0  # looked at when the lease ends, to say so
    assert made.mapping(3601.0) is None


def test_an_automaton_that_is_looked_at_too_late_begins_anew() -> None:
    made = held()
    assert made.poll(1e6)[0][:2] == bytes((2, 1))


def test_no_service_at_the_router_ends_the_wait_at_once() -> None:
    made = mapper()
    made.poll(0.0)
    made.unreachable(0.1)
    assert (made.state, made.why) == (State.PAUSE, NO_ROUTER)
    fine = held()
    fine.unreachable(2.0)
    assert fine.state is State.HELD


@pytest.mark.parametrize("language", list(Language))
def test_a_release_removes_once(language: Language) -> None:
    made = held(language)
    removal = made.release()
    assert removal is not None and removal[0] == (2 if language is Language.PCP else 0)
    assert made.release() is None and mapper().release() is None


# -- restarts


@pytest.mark.parametrize(
    ("first", "second", "elapsed_s", "fits"),
    [
        (100, 1900, 1800, True),
        (100, 1899, 1800, True),
        (100, 100 + 1800 - 110, 1800, True),  # a clock that loses a sixteenth
        (100, 100 + 1800 - 120, 1800, False),
        (100, 100 + 1800 + 120, 1800, True),
        (100, 100 + 1800 + 130, 1800, False),
        (100, 5, 1800, False),
        (100, 99, 0, True),  # two answers that overtook each other
        (100, 98, 0, False),
    ],
)
def test_an_epoch_that_does_not_fit_tells_of_a_restart(first: int, second: int, elapsed_s: float, fits: bool) -> None:
    epoch = Epoch()
    assert epoch.fits(first, 50.0)
    assert epoch.fits(second, 50.0 + elapsed_s) is fits


def test_a_restart_seen_by_one_port_has_the_other_asked_again() -> None:
    epoch = Epoch()
    one, other = mapper(epoch=epoch), Mapper("192.168.1.7", PORT + 1, NONCE, epoch, DEFAULT_LIMITS, 0.0)
    one.poll(0.0), other.poll(0.0)
    one.received(pcp_answer(PORT, epoch=1000), 0.0)
    other.received(pcp_answer(PORT + 1, epoch=1001), 1.0)
    assert not one.restarted and not other.restarted
    one.poll(1800.0)
    one.received(pcp_answer(PORT, epoch=7), 1800.0)
    assert one.restarted and one.state is State.HELD
    other.again(1800.0)
    assert other.due == 1800.0 and other.poll(1800.0)[0][0] == 2


def test_epochs_that_never_fit_do_not_have_two_ports_ask_in_turn_without_end() -> None:
    """A router that says any epoch, or somebody who answers in its name: an hour costs each port some sixty requests."""
    epoch, rng = Epoch(), random.Random(1)
    ports = [Mapper("192.168.1.7", PORT + number, NONCE, epoch, DEFAULT_LIMITS, 0.0) for number in range(2)]
    asked, now = 0, 0.0
    while now < 3600.0 and asked < 1000:
        for one, other in (ports, ports[::-1]):
            if one.poll(now):
                asked += 1
                one.received(pcp_answer(one.port, epoch=rng.randrange(1 << 32)), now)
                if one.restarted:
                    one.restarted = False
                    other.again(now)
        now = max(now + 0.001, min(one.due for one in ports))
    assert asked <= 2 * 3600 / DEFAULT_LIMITS.portmap_renew_least_s


LIES = {
    "pcp: port 0": pcp_answer(PORT, external=0),
    "pcp: no lifetime": pcp_answer(PORT, lifetime=0),
    "pcp: multicast": pcp_answer(PORT, host="239.1.1.1"),
    "pcp: nobody's": pcp_answer(PORT, host="240.0.0.1"),
    "pcp: everybody": pcp_answer(PORT, host="255.255.255.255"),
    "pcp: this machine": pcp_answer(PORT, host="127.0.0.1"),
    "map: port 0": map_answer(PORT, external=0),
    "map: no lifetime": map_answer(PORT, lifetime=0),
    "map: another port": map_answer(PORT + 1),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_answer_that_cannot_be_true_is_no_mapping(lie: str) -> None:
    made = mapper()
    made.poll(0.0)
    if lie.startswith("map"):
        made.received(unsupported(), 0.0)
        made.poll(0.0)
        made.received(address_answer(), 0.0)
        made.poll(0.0)
        assert made.state is State.MAP
    for _ in range(3):
        made.received(LIES[lie], 0.1)
        assert made.mapping(0.1) is None and made.state is not State.HELD
    assert made.due > 0.1 or made.poll(0.1), "and it does not spin"


def test_limits_that_renew_later_than_the_lease_are_refused() -> None:
    with pytest.raises(ValueError, match="portmap_renew_least_s"):
        replace(DEFAULT_LIMITS, portmap_renew_least_s=7200.0)
