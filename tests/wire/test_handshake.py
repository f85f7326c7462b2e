"""Hello and handshake: what completes, and that everything else ends in one kind of close with the cause kept at home.

Case ids: WIRE-2 (foreign protocol), WIRE-3 (wrong peer), WIRE-6 (lengths before authentication).
"""

import dataclasses
import hmac
import random
import tracemalloc
from collections.abc import Callable

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wire.errors import Code, LocalProtocolError, PeerIdMismatch, RemoteProtocolError, WireError
from wire.handshake import Handshake, identity_payload
from wire.hello import (
    HEAD_BYTES,
    MAGIC,
    Hello,
    PathKind,
    Purpose,
    Refusal,
    check_answer,
    choose,
    choose_cipher,
    decode_hello,
    frame_hello,
    preferred_ciphers,
    run_tag,
    split_hello,
)
from wire.identity import Identity
from wire.limits import DEFAULT_LIMITS
from wire.noise import Cipher, HandshakeState

AES, CHACHA = Cipher.AES256GCM, Cipher.CHACHA20POLY1305
ALICE, BOB, CAROL = (Identity(bytes([number]) * 32) for number in (1, 2, 3))
RUN = bytes(range(32))
TWIN = RUN[:8] + bytes(24)  # another run with the same tag


def side(initiator: bool, ciphers: tuple[Cipher, ...] = (AES, CHACHA), run: bytes | None = RUN, **more) -> Handshake:
    identity = more.pop("identity", ALICE if initiator else BOB)
    hello = more.pop("hello", Hello(ciphers=ciphers, run_tag=run_tag(run)))
    rng = random.Random(f"{initiator}").randbytes
    return Handshake(initiator, identity, hello, more.pop("limits", DEFAULT_LIMITS), own_run=run, rng=rng, **more)


def unchanged(number: int, data: bytes) -> bytes:
    return data


def flights(one: Handshake, other: Handshake, change: Callable[[int, bytes], bytes] = unchanged) -> WireError | None:
    """Carry the three flights across, each through `change`; the first error of either side, or None."""
    try:
        for number in range(3):
            writer, reader = (one, other) if number % 2 == 0 else (other, one)
            reader.receive(change(number, writer.send()))
    except WireError as error:
        return error
    return None


@pytest.mark.parametrize("order", [(AES, CHACHA), (CHACHA, AES)])
def test_both_sides_end_with_the_same_secrets(order: tuple[Cipher, ...]) -> None:
    one, other = side(True, order, expected=BOB.peer_id), side(False, order)
    assert flights(one, other) is None
    mine, theirs = one.result, other.result
    assert (mine.send_key, mine.recv_key) == (theirs.recv_key, theirs.send_key)
    assert mine.send_key != mine.recv_key
    assert mine.cipher is theirs.cipher is order[0]
    assert (mine.h, mine.exporter, mine.version) == (theirs.h, theirs.exporter, theirs.version)
    assert (mine.peer_id, theirs.peer_id) == (BOB.peer_id, ALICE.peer_id)
    assert mine.peer_run == theirs.peer_run == RUN
    assert theirs.hello.ciphers == order
    assert mine.export(b"lane") == theirs.export(b"lane") == hmac.digest(mine.exporter, b"lane" + mine.h, "sha256")
    assert mine.export(b"lane") != mine.export(b"other")
    for secret in (mine.send_key, mine.recv_key, mine.exporter):
        assert repr(secret) not in repr(mine)


def test_three_flights_and_records_behind_the_third() -> None:
    one, other = side(True), side(False)
    other.receive(one.send())
    one.receive(other.send())
    assert one.done
    assert not other.done
    other.receive(one.send() + b"first records")
    assert other.rest == b"first records"
    assert one.rest == b""
    assert (one.send(), other.send()) == (b"", b"")


def test_any_splitting_gives_the_same_secrets() -> None:
    whole = side(True), side(False)
    assert flights(*whole) is None
    one, other = side(True), side(False)
    for number in range(3):
        writer, reader = (one, other) if number % 2 == 0 else (other, one)
        out = b""
        while piece := writer.send():
            out += piece
        for byte in out:
            reader.receive(bytes([byte]))
    assert one.result == whole[0].result
    assert other.result == whole[1].result


def test_fresh_keys_each_time() -> None:
    one, other = (Handshake(True, ALICE, Hello(ciphers=(CHACHA,))) for _ in range(2))
    assert one.send() != other.send()


@pytest.mark.parametrize("cipher", Cipher)
def test_every_byte_flip_of_every_flight_is_refused_in_one_way(cipher: Cipher) -> None:
    """Two mutants a byte: one bit, and all bits.  No flight with a changed byte ever makes its reader trust the other side."""
    order = (cipher, *(c for c in Cipher if c is not cipher))
    good: list[bytes] = []
    assert flights(side(True, order), side(False, order), lambda number, data: good.append(data) or data) is None
    farewells = set()
    for number, data in enumerate(good):
        for at in range(len(data)):
            for mask in (1 << at % 8, 0xFF):
                one, other = side(True, order), side(False, order)
                mutant = data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :]
                error = flights(one, other, lambda n, d, number=number, mutant=mutant: mutant if n == number else d)
                assert not other.done
                assert number == 2 or not one.done
                # No error: a larger length is waited for until the deadline, which is the link's business.
                assert error is None or error.detail
                farewells |= {one.send(), other.send()} if error is not None else set()
    plain = farewells - {f for f in farewells if f.startswith(MAGIC)}
    assert plain == {b""}
    refusals = {decode_hello(f) for f in farewells - plain}
    assert refusals <= {Refusal(Code.VERSION), Refusal(Code.RUN_MISMATCH), Refusal(Code.PROTOCOL)}


def test_every_truncation_is_refused_or_waited_for_in_silence() -> None:
    good: list[bytes] = []
    flights(side(True), side(False), lambda number, data: good.append(data) or data)
    for number, data in enumerate(good):
        # The last Noise message of the flight; what stands before it is the hello.
        begin = split_hello(data) if number < 2 else 0
        for size in range(len(data)):
            one, other = side(True), side(False)
            assert flights(one, other, lambda n, d, number=number, cut=data[:size]: cut if n == number else d) is None
            assert not other.done
            assert number == 2 or not one.done
        for size in range(len(data) - begin - 2):
            one, other = side(True), side(False)
            short = data[:begin] + size.to_bytes(2, "big") + data[begin + 2 : begin + 2 + size]
            error = flights(one, other, lambda n, d, number=number, short=short: short if n == number else d)
            assert isinstance(error, RemoteProtocolError)
            assert error.code is Code.AUTH
            assert (one, other)[number % 2 == 0].send() == b""


# Hello


def test_a_foreign_protocol_is_closed_at_the_first_impossible_byte() -> None:
    """WIRE-2"""
    for knock, at in [
        (b"GET / HTTP/1.1\r\n", 1),
        (b"PUT / HTTP/1.1\r\n", 2),
        (b"\x16\x03\x01\x02\x00\x01", 1),
        (b"SSH-2.0-OpenSSH_9.6\r\n", 1),
        (b"PLW2aaaa", 4),
        (b"PLW1\xff\xff\xff", 5),
        (b"PLW1\x01\xfb\xff", 6),
        (b"PLW1\x00\x02\xc1\xc1", 8),
    ]:
        guest = side(False)
        for count, byte in enumerate(knock, start=1):
            if count == at:
                with pytest.raises(RemoteProtocolError):
                    guest.receive(bytes([byte]))
                break
            guest.receive(bytes([byte]))
        assert guest.send() == b""
        with pytest.raises(LocalProtocolError):
            guest.receive(b"x")


@pytest.mark.parametrize(
    "body",
    [
        [],
        [1],
        [1, -1],
        [1, 2**32],
        [70000, 0],
        [True, 0],
        ["x"] * 6,
        [[], ["aes256gcm"], bytes(8), "control", "direct", b""],
        [[1], "aes256gcm", bytes(8), "control", "direct", b""],
        [[1], ["aes256gcm"], bytes(7), "control", "direct", b""],
        [[1], ["aes256gcm"], bytes(8), "steering", "direct", b""],
        [[1], ["aes256gcm"], bytes(8), "control", 0, b""],
        [[1], ["aes256gcm"], bytes(8), "control", "punch", bytes(33)],
        [[1], ["aes256gcm"], bytes(8), "control", "direct", b"nonce"],
        [[1], ["aes256gcm"], bytes(8), "control", "direct"],
        [[1], [b"aes256gcm"], bytes(8), "control", "direct", b""],
        [[True], ["aes256gcm"], bytes(8), "control", "direct", b""],
    ],
)
def test_a_malformed_hello_is_refused(body: object) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_hello(frame_hello(msgpack.packb(body)))


def test_hello_round_trip_and_later_versions() -> None:
    hello = Hello(ciphers=(CHACHA, AES), run_tag=RUN[:8], purpose=Purpose.BULK, path=PathKind.PUNCH, context=b"n" * 32)
    assert split_hello(hello.encode() + b"behind") == len(hello.encode())
    assert decode_hello(hello.encode()) == hello
    later = [[9, 1], ["kyber", "aes256gcm", "aes256gcm"], bytes(8), "control", "direct", b"", "new item", 7]
    assert decode_hello(frame_hello(msgpack.packb(later))) == Hello(versions=(9, 1), ciphers=(AES,))
    assert decode_hello(Refusal(Code.RESOURCE_LIMIT, 1500).encode()) == Refusal(Code.RESOURCE_LIMIT, 1500)
    assert decode_hello(frame_hello(msgpack.packb([4711, 0, "why"]))) == Refusal(Code.INTERNAL)
    assert decode_hello(frame_hello(msgpack.packb([0, 0]))) == Refusal(Code.INTERNAL)


@pytest.mark.parametrize(
    ("one", "other", "chosen"),
    [
        ((AES, CHACHA), (AES, CHACHA), AES),
        ((AES, CHACHA), (CHACHA, AES), CHACHA),
        ((CHACHA, AES), (CHACHA, AES), CHACHA),
        ((AES,), (CHACHA, AES), None),
        ((), (AES, CHACHA), None),
        ((AES,), (AES,), AES),
    ],
)
def test_choice_of_cipher(one: tuple[Cipher, ...], other: tuple[Cipher, ...], chosen: Cipher | None) -> None:
    assert choose_cipher(one, other) is choose_cipher(other, one) is chosen


def test_choice_of_version_run_and_path() -> None:
    both = (AES, CHACHA)
    offer = Hello(ciphers=both, versions=(1, 3, 4), run_tag=RUN[:8])
    assert choose(offer, Hello(ciphers=both, versions=(3, 1), run_tag=RUN[:8])) == Hello(
        ciphers=(AES,), versions=(3,), run_tag=RUN[:8]
    )
    assert choose(offer, Hello(ciphers=both, versions=(2,))) == Refusal(Code.VERSION)
    assert choose(offer, Hello(ciphers=both, run_tag=b"another!")) == Refusal(Code.RUN_MISMATCH)
    assert isinstance(choose(offer, Hello(ciphers=both)), Hello)  # a seed for all runs
    assert isinstance(choose(dataclasses.replace(offer, run_tag=bytes(8)), Hello(ciphers=both, run_tag=b"another!")), Hello)
    assert choose(offer, Hello(ciphers=both, path=PathKind.CIRCUIT)) == Refusal(Code.PROTOCOL)


@pytest.mark.parametrize(
    "wrong",
    [
        {"versions": (2,)},
        {"versions": (1, 1)},
        {"ciphers": (AES,)},  # we put ChaCha first
        {"ciphers": ()},
        {"ciphers": (CHACHA, AES)},
        {"run_tag": b"another!"},
        {"path": PathKind.CIRCUIT},
        {"purpose": Purpose.BULK},
    ],
)
def test_an_answer_that_nobody_may_give_is_refused(wrong: dict) -> None:
    offer = Hello(ciphers=(CHACHA, AES), run_tag=RUN[:8])
    answer = choose(offer, offer)
    check_answer(offer, answer)
    with pytest.raises(WireError):
        check_answer(offer, dataclasses.replace(answer, **wrong))


def test_a_refusal_reaches_the_initiator_with_code_and_wait() -> None:
    asked = []
    one = side(True)
    other = side(False, admit=lambda offer: asked.append(offer) or Refusal(Code.RESOURCE_LIMIT, 1500))
    with pytest.raises(WireError) as ours:
        other.receive(one.send())
    assert ours.value.code is Code.RESOURCE_LIMIT
    with pytest.raises(WireError) as theirs:
        one.receive(other.send())
    assert (theirs.value.code, theirs.value.retry_after, theirs.value.retryable) == (Code.RESOURCE_LIMIT, 1.5, True)
    assert one.send() == other.send() == b""
    assert [hello.run_tag for hello in asked] == [RUN[:8]]
    assert flights(side(True), side(False, admit=lambda offer: None)) is None


def test_runs_that_differ_part_before_any_key_agreement() -> None:
    one, other = side(True, run=b"y" * 32), side(False)
    error = flights(one, other)
    assert error is not None
    assert error.code is Code.RUN_MISMATCH
    assert decode_hello(other.send()) == Refusal(Code.RUN_MISMATCH)


def test_runs_with_one_tag_part_after_authentication() -> None:
    one, other = side(True, run=TWIN), side(False)
    error = flights(one, other)
    assert error is not None
    assert error.code is Code.RUN_MISMATCH
    assert one.send() == other.send() == b""


def test_a_guest_knows_no_run() -> None:
    one, other = side(True, run=None), side(False)
    assert flights(one, other) is None
    assert (one.result.peer_run, other.result.peer_run) == (RUN, None)


# Identities


class Rogue:
    """A peer that speaks correct Noise and puts `payload(h)` where its identity belongs."""

    def __init__(self, initiator: bool, payload: Callable[[bytes], bytes], tag: bytes = RUN[:8]) -> None:
        self.victim = side(not initiator)
        self.initiator = initiator
        self.payload = payload
        self.hello = Hello(ciphers=(AES, CHACHA) if initiator else (AES,), run_tag=tag).encode()

    def attack(self) -> WireError | None:
        rng = random.Random(9)
        keys = {"static": rng.randbytes(32), "ephemeral": rng.randbytes(32)}
        try:
            if self.initiator:
                self.victim.receive(self.hello)
                answer = self.victim.send()
                noise = HandshakeState(AES, initiator=True, prologue=self.hello + answer, **keys)
                self.victim.receive(self.framed(noise.write(lambda h: b"")))
                noise.read(self.victim.send()[2:])
            else:
                first = self.victim.send()
                offer = first[: split_hello(first)]
                noise = HandshakeState(AES, initiator=False, prologue=offer + self.hello, **keys)
                noise.read(first[len(offer) + 2 :])
                self.victim.receive(self.hello)
            self.victim.receive(self.framed(noise.write(self.payload)))
        except WireError as error:
            assert self.victim.send() == b""
            assert not self.victim.done
            return error
        assert self.victim.done
        return None

    @staticmethod
    def framed(message: bytes) -> bytes:
        return len(message).to_bytes(2, "big") + message


def honest(initiator: bool, h: bytes, run: bytes = RUN) -> list:
    return list(msgpack.unpackb(identity_payload(CAROL, b"I" if initiator else b"R", run, h)))


@pytest.mark.parametrize("initiator", [True, False], ids=["initiator", "responder"])
def test_identity_payloads(initiator: bool) -> None:
    role, other_role = (b"I", b"R") if initiator else (b"R", b"I")
    replayed = identity_payload(CAROL, role, RUN, bytes(32))

    def attack(change: Callable[[list], list]) -> WireError | None:
        return Rogue(initiator, lambda h: msgpack.packb(change(honest(initiator, h)))).attack()

    # Controls: the rogue is able to be honest, and trailing items are ignored.
    assert attack(lambda items: items) is None
    assert attack(lambda items: [*items, "later", 1]) is None

    refused = {
        "missing": Rogue(initiator, lambda h: b"").attack(),
        "swapped role": Rogue(initiator, lambda h: identity_payload(CAROL, other_role, RUN, h)).attack(),
        "replayed": Rogue(initiator, lambda h: replayed).attack(),
        "another's key": attack(lambda items: [items[0], BOB.peer_id.raw if initiator else ALICE.peer_id.raw, *items[2:]]),
        "another run": attack(lambda items: [*items[:3], TWIN, *items[4:]]),
        "run dropped": attack(lambda items: [*items[:3], b"", *items[4:]]),
        "short": attack(lambda items: items[:4]),
        "version": attack(lambda items: [2, *items[1:]]),
        "version true": attack(lambda items: [True, *items[1:]]),
        "small order key": attack(lambda items: [1, bytes(32), *items[2:]]),
        "key size": attack(lambda items: [1, items[1][:31], *items[2:]]),
        "signature size": attack(lambda items: [*items[:2], items[2][:63], *items[3:]]),
        "run size": attack(lambda items: [*items[:3], RUN[:31], *items[4:]]),
        "ticket size": attack(lambda items: [*items[:4], bytes(15)]),
        "text for bytes": attack(lambda items: [*items[:4], ""]),
        "bytes behind": Rogue(initiator, lambda h: msgpack.packb(honest(initiator, h)) + b"\x00").attack(),
        "not a list": Rogue(initiator, lambda h: msgpack.packb(1)).attack(),
    }
    assert not [name for name, error in refused.items() if not isinstance(error, RemoteProtocolError) or not error.detail]
    assert "signature" in refused["replayed"].detail


def test_a_run_that_is_not_the_one_of_the_tag() -> None:
    def lie(h: bytes) -> bytes:
        return msgpack.packb(honest(True, h, b"z" * 32))

    error = Rogue(True, lie).attack()
    assert error is not None
    assert "run_tag" in error.detail
    error = Rogue(True, lie, tag=bytes(8)).attack()
    assert error is not None
    assert error.code is Code.RUN_MISMATCH


@pytest.mark.parametrize("initiator", [True, False], ids=["initiator", "responder"])
def test_our_own_id_is_refused(initiator: bool) -> None:
    ours = BOB if initiator else ALICE
    role = b"I" if initiator else b"R"
    error = Rogue(initiator, lambda h: identity_payload(ours, role, RUN, h)).attack()
    assert error is not None
    assert error.code is Code.SELF


def test_the_wrong_peer_is_noticed_before_we_say_who_we_are() -> None:
    """WIRE-3"""
    one, other = side(True, expected=CAROL.peer_id), side(False)
    other.receive(one.send())
    with pytest.raises(PeerIdMismatch) as mismatch:
        one.receive(other.send())
    assert (mismatch.value.expected, mismatch.value.got) == (CAROL.peer_id, BOB.peer_id)
    assert one.send() == b""
    assert not other.done


# Bounds


def test_bytes_before_their_turn_are_refused() -> None:
    one, other = side(True), side(False)
    with pytest.raises(RemoteProtocolError, match="before our answer"):
        other.receive(one.send() + b"x")
    assert other.send() == b""
    one, other = side(True), side(False)
    other.receive(one.send())
    with pytest.raises(RemoteProtocolError, match="before our answer"):
        one.receive(other.send() + b"x")
    assert one.send() == b""


def test_lengths_are_not_believed() -> None:
    """WIRE-6: a Noise message above 4 KiB is refused with its length, before a byte of it is waited for."""
    for length in (0, 31, 33, 4097, 65535):
        other = side(False)
        hello = Hello(ciphers=(AES, CHACHA), run_tag=RUN[:8]).encode()
        with pytest.raises(RemoteProtocolError):
            other.receive(hello + length.to_bytes(2, "big"))


def test_memory_before_authentication() -> None:
    """WIRE-6: what waits here and what the link has just read stay below 16 KiB together, whatever is sent."""
    flights(side(True), side(False))  # tables and caches of the libraries are not the connection's
    first = side(True).send()
    rng = random.Random(0).randbytes
    tracemalloc.start()
    try:
        base = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        other = Handshake(False, BOB, Hello(ciphers=(AES, CHACHA), run_tag=RUN[:8]), own_run=RUN, rng=rng)
        other.receive(first)
        other.send()
        link = memoryview(bytearray(other.room))
        other.receive((4096).to_bytes(2, "big"))
        other.receive(link[:4095])  # the most that an unfinished message can hold
        assert other.room == 1
        with pytest.raises(RemoteProtocolError):
            other.receive(link[:1])
        peak = tracemalloc.get_traced_memory()[1] - base
    finally:
        tracemalloc.stop()
    assert 8192 < peak < DEFAULT_LIMITS.preauth_max_bytes, peak


def test_more_than_there_is_room_for_is_our_own_fault() -> None:
    one, other = side(True), side(False)
    with pytest.raises(LocalProtocolError):
        other.receive(bytes(other.room + 1))
    assert flights(one, other) is None  # nothing was taken


@settings(max_examples=200, deadline=None)
@given(initiator=st.booleans(), pieces=st.lists(st.binary(max_size=300), max_size=6), honest_start=st.booleans())
def test_random_bytes_only_ever_raise_wire_errors(initiator: bool, pieces: list[bytes], honest_start: bool) -> None:
    victim = side(initiator)
    victim.send()
    start = [Hello(ciphers=(AES,), run_tag=RUN[:8]).encode()] if honest_start else []
    try:
        for piece in [*start, *pieces]:
            victim.receive(piece)
    except WireError:
        assert victim.send() == b"" or not initiator
    assert not victim.done


def test_misuse_is_our_own_fault() -> None:
    both = (AES, CHACHA)
    for wrong in (
        lambda: Handshake(True, ALICE, Hello(ciphers=both), own_run=RUN),
        lambda: Handshake(True, ALICE, Hello(ciphers=both, run_tag=RUN[:8])),
        lambda: Handshake(True, ALICE, Hello(ciphers=both, run_tag=RUN[:8]), own_run=RUN[:31]),
        lambda: Handshake(True, ALICE, Hello(ciphers=())),
        lambda: Handshake(True, ALICE, Hello(ciphers=both, versions=tuple(range(400)))),
        lambda: side(True).result,
    ):
        with pytest.raises(LocalProtocolError):
            wrong()


@pytest.mark.parametrize(("lead", "first"), [(1.4, CHACHA), (1.6, AES), (0.2, CHACHA)])
def test_preferred_ciphers(lead: float, first: Cipher) -> None:
    aes = 0.0003  # two runs are enough of it
    chacha = aes * lead
    now = 0.0
    aes_calls = 3

    def clock() -> float:
        nonlocal now, aes_calls
        aes_calls -= 1
        now += aes if aes_calls >= 0 else chacha
        return now

    order = preferred_ciphers(clock)
    assert order[0] is first
    assert sorted(order) == sorted(Cipher)


def test_heads() -> None:
    assert HEAD_BYTES == 6
    assert len(Hello(ciphers=(AES, CHACHA), run_tag=RUN[:8]).encode()) < 100


def test_a_byte_behind_message_2_ends_it_and_leaves_no_secrets() -> None:
    """It is found when the keys are there already: they must not outlive the failure."""
    one, other = side(True), side(False)
    other.receive(one.send())
    with pytest.raises(RemoteProtocolError):
        one.receive(other.send() + b"x")
    assert not one.done and one.send() == b""
    with pytest.raises(LocalProtocolError):
        _ = one.result
