"""Signed statements: each way in which one is not to be believed has its own reason, and none gets through."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

import wire.envelope
from wire.envelope import (
    DOMAINS,
    NO_RUN,
    BadEnvelope,
    Distrusted,
    Equivocation,
    Expired,
    ForeignRun,
    Forged,
    Latest,
    Malformed,
    SequenceClock,
    Statement,
    TooLongLived,
    Verdict,
    VerifiedCache,
    WrongSigner,
    open_envelope,
    open_peer_record,
    seal,
    seal_peer_record,
)
from wire.errors import Code, LocalProtocolError
from wire.identity import SIGNED, SMALL_ORDER_Y, Identity, PeerId
from wire.messages import PeerRecord, encode

NOW = 1_750_000_000.0
X, Y = (Identity(bytes(31) + bytes([n])) for n in (1, 2))
RUN, OTHER_RUN = b"r" * 32, b"s" * 32
STAGE, PEER = "plw/stage/1", "plw/peer/1"
GRACE_S = 300


def stage(payload: bytes = b"payload", **changes: Any) -> bytes:
    arguments: dict[str, Any] = {"run": RUN, "seq": 7, "not_after": int(NOW) + 1800, **changes}
    return seal(X, STAGE, payload, **arguments)


def opened(raw: bytes, domain: str = STAGE, now_unix: float = NOW, run: bytes | None = RUN) -> Statement:
    return open_envelope(raw, domain, now_unix=now_unix, run=run)


def test_the_table_is_the_published_one() -> None:
    hour, day = 3600, 86_400
    assert {name: (rules.life_s, rules.latest) for name, rules in DOMAINS.items()} == {
        "plw/peer/1": (2 * hour, True),
        "plw/seeds/1": (90 * day, True),
        "plw/manifest/1": (None, False),
        "plw/member/1": (30 * day, True),
        "plw/stage/1": (hour, True),
        "plw/receipt/1": (None, False),
        "plw/snapshot/1": (None, False),
        "plw/voucher/1": (hour, False),
        "plw/reach/1": (hour, True),
    }
    assert [name for name, rules in DOMAINS.items() if rules.runless] == ["plw/manifest/1"]
    assert {rules.max_bytes for name, rules in DOMAINS.items() if name not in (PEER, "plw/voucher/1", "plw/reach/1")} == {65_536}
    assert DOMAINS[PEER].max_bytes == 2048
    assert DOMAINS["plw/voucher/1"].max_bytes == 512 and DOMAINS["plw/reach/1"].max_bytes == 1024


def test_the_form_is_the_published_one() -> None:
    """Referee: the bytes put together here by hand from the specification."""
    raw = stage(b"hello", seq=5, not_after=int(NOW) + 10)
    version, signer, run, seq, not_after, payload, signature = msgpack.unpackb(raw)
    assert (version, signer, run, seq, not_after, payload) == (1, X.peer_id.raw, RUN, 5, int(NOW) + 10, b"hello")
    u64 = 8
    signed = b"".join(
        [
            bytes([len(STAGE)]),
            STAGE.encode(),
            X.peer_id.raw,
            RUN,
            (5).to_bytes(u64, "big"),
            (int(NOW) + 10).to_bytes(u64, "big"),
            (5).to_bytes(4, "big"),
            b"hello",
        ]
    )
    assert X.peer_id.verify(SIGNED, signed, signature)
    assert raw == msgpack.packb([version, signer, run, seq, not_after, payload, signature])


@given(st.binary(max_size=200), st.integers(0, 2**64 - 1), st.integers(1, 3600))
def test_what_is_sealed_opens(payload: bytes, seq: int, life_s: int) -> None:
    raw = stage(payload, seq=seq, not_after=int(NOW) + life_s)
    assert opened(raw) == Statement(X.peer_id, RUN, seq, int(NOW) + life_s, payload, raw)
    assert opened(raw, run=None).run == RUN


def test_every_one_bit_flip_is_refused() -> None:
    raw = stage()
    for bit in range(8 * len(raw)):
        changed = bytearray(raw)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises((Forged, Malformed)):
            opened(bytes(changed))
    opened(raw)


def test_every_truncation_and_surplus_is_refused() -> None:
    raw = stage()
    for size in range(len(raw)):
        with pytest.raises(Malformed):
            opened(raw[:size])
    with pytest.raises(Malformed):
        opened(raw + b"\x00")


@pytest.mark.parametrize("domain", [name for name in DOMAINS if name != STAGE])
def test_a_statement_counts_for_its_purpose_only(domain: str) -> None:
    with pytest.raises(Forged, match=domain):
        opened(stage(), domain)


def test_an_unknown_domain_is_our_mistake() -> None:
    with pytest.raises(LocalProtocolError):
        opened(stage(), "plw/nothing/1")
    with pytest.raises(LocalProtocolError):
        seal(X, "plw/nothing/1", b"", run=RUN, seq=1, not_after=int(NOW))


def respelled() -> Iterator[tuple[str, bytes]]:
    fields = msgpack.unpackb(stage())
    pack = msgpack.packb
    head = pack(1) + pack(fields[1]) + pack(fields[2])
    tail = pack(fields[4]) + pack(fields[5]) + pack(fields[6])
    yield "seq in nine bytes", b"\x97" + head + b"\xcf" + (7).to_bytes(8, "big") + tail
    yield "array16", b"\xdc\x00\x07" + head + pack(7) + tail
    yield "version 1.0", b"\x97" + pack(1.0) + head[1:] + pack(7) + tail
    yield "version True", b"\x97" + pack(True) + head[1:] + pack(7) + tail
    yield "version 2", b"\x97" + pack(2) + head[1:] + pack(7) + tail
    yield "an eighth item", b"\x98" + head + pack(7) + tail + pack(0)
    yield "six items", b"\x96" + head + pack(7) + pack(fields[4]) + pack(fields[6])
    yield "bin16", b"\x97" + head + pack(7) + pack(fields[4]) + b"\xc5\x00\x07payload" + pack(fields[6])
    yield "payload as str", b"\x97" + head + pack(7) + pack(fields[4]) + pack("payload") + pack(fields[6])
    yield "a map", b"\x81\x01\x02"
    yield "nothing", b""


@pytest.mark.parametrize(("what", "raw"), list(respelled()), ids=[what for what, _ in respelled()])
def test_there_is_one_spelling(what: str, raw: bytes) -> None:
    with pytest.raises(Malformed):
        opened(raw)


def test_a_seq_of_true_is_not_one() -> None:
    fields = msgpack.unpackb(stage(seq=1))
    with pytest.raises(Malformed):
        opened(msgpack.packb([*fields[:3], True, *fields[4:]]))


@pytest.mark.parametrize("y", sorted(SMALL_ORDER_Y))
def test_a_signer_of_small_order_is_refused(y: int) -> None:
    fields = msgpack.unpackb(stage())
    with pytest.raises(Malformed, match="small order"):
        opened(msgpack.packb([1, y.to_bytes(32, "little"), *fields[2:]]))


@pytest.mark.parametrize(
    ("not_after", "reason"),
    [
        (int(NOW) - GRACE_S - 1, Expired),
        (int(NOW) - GRACE_S, None),
        (int(NOW) + 3600 + GRACE_S, None),
        (int(NOW) + 3600 + GRACE_S + 1, TooLongLived),
        (int(NOW) + 30 * 3600, TooLongLived),
        (2**64 - 1, TooLongLived),
    ],
)
def test_wire_9_expiry_with_five_minutes_of_grace(not_after: int, reason: type[BadEnvelope] | None) -> None:
    raw = stage(not_after=not_after)
    if reason is None:
        opened(raw)
        return
    with pytest.raises(reason) as failure:
        opened(raw)
    assert type(failure.value) is reason


def test_only_some_kinds_live_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    assert opened(seal(X, "plw/receipt/1", b"", run=RUN, seq=1, not_after=0), "plw/receipt/1").not_after == 0
    with pytest.raises(LocalProtocolError, match="expire"):
        stage(not_after=0)
    # A peer whose own seal did not refuse.
    unchecked = replace(DOMAINS[STAGE], life_s=None)
    with monkeypatch.context() as patch:
        patch.setitem(DOMAINS, STAGE, unchecked)
        raw = stage(not_after=0)
    with pytest.raises(TooLongLived):
        opened(raw)


def test_wire_9_another_run() -> None:
    with pytest.raises(ForeignRun) as failure:
        opened(stage(), run=OTHER_RUN)
    assert failure.value.code is Code.RUN_MISMATCH
    with pytest.raises(ForeignRun):
        opened(stage(), run=NO_RUN)


def test_a_manifest_belongs_to_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its payload's hash is the run, so it cannot hold it."""
    raw = seal(X, "plw/manifest/1", b"toml", seq=1, not_after=0)
    for run in (None, RUN, NO_RUN):
        assert opened(raw, "plw/manifest/1", run=run).payload == b"toml"
    with pytest.raises(LocalProtocolError):
        seal(X, "plw/manifest/1", b"toml", run=RUN, seq=1, not_after=0)
    with monkeypatch.context() as patch:
        patch.setitem(DOMAINS, "plw/manifest/1", replace(DOMAINS["plw/manifest/1"], runless=False))
        raw = seal(X, "plw/manifest/1", b"toml", run=RUN, seq=1, not_after=0)
    with pytest.raises(ForeignRun):
        opened(raw, "plw/manifest/1", run=RUN)


def test_the_order_of_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Size before anything, then the signature, then run and expiry: nobody learns from bytes that nobody signed."""
    forged = bytearray(stage(not_after=1))
    forged[-1] ^= 1
    with pytest.raises(Forged):
        opened(bytes(forged), run=OTHER_RUN)
    with pytest.raises(ForeignRun):
        opened(stage(not_after=1), run=OTHER_RUN)

    def parse_nothing(*_args: object) -> object:
        raise AssertionError("parsed before its size was judged")

    monkeypatch.setattr(wire.envelope, "unpack", parse_nothing)
    with pytest.raises(Malformed) as failure:
        opened(b"\xc6\x00\x01\x00\x00" + bytes(65_536))
    assert failure.value.code is Code.TOO_LARGE


def test_our_own_mistakes_are_found_before_signing() -> None:
    for changes in ({"run": b"short"}, {"seq": -1}, {"seq": 2**64}, {"not_after": -1}, {"not_after": 2**64}):
        with pytest.raises(LocalProtocolError):
            stage(**changes)
    stage(bytes(65_000))
    with pytest.raises(LocalProtocolError) as failure:
        stage(bytes(65_500))
    assert failure.value.code is Code.TOO_LARGE


def test_verified_bytes_are_verified_once(monkeypatch: pytest.MonkeyPatch) -> None:
    raw, cache, count = stage(), VerifiedCache(2), 0
    real = PeerId.verify

    def counting(self: PeerId, domain: bytes, data: bytes, signature: bytes) -> bool:
        nonlocal count
        count += 1
        return real(self, domain, data, signature)

    monkeypatch.setattr(PeerId, "verify", counting)

    def look(data: bytes, domain: str = STAGE, now_unix: float = NOW) -> Statement:
        return open_envelope(data, domain, now_unix=now_unix, run=RUN, verified=cache)

    assert look(raw) == look(raw) and count == 1
    with pytest.raises(Expired):
        look(raw, now_unix=NOW + 3600)  # a known signature is not a known statement
    with pytest.raises(Forged):
        look(raw, "plw/voucher/1")  # nor one for another purpose
    assert (count, len(cache)) == (2, 1)
    forged = raw[:-1] + bytes([raw[-1] ^ 1])
    for _ in range(2):
        with pytest.raises(Forged):
            look(forged)
    assert (count, len(cache)) == (4, 1)
    for seq in (8, 9):
        look(stage(seq=seq))
    assert len(cache) == 2
    look(raw)
    assert count == 7  # it had been forgotten


# --- the newest of each signer


def test_wire_9_only_a_greater_number_is_newer() -> None:
    latest = Latest()
    first = opened(stage(b"7"))
    assert latest.accept(first, STAGE)
    assert latest.judge(opened(stage(b"6", seq=6)), STAGE) is Verdict.OLDER
    assert not latest.accept(opened(stage(b"6", seq=6)), STAGE)
    assert latest.judge(opened(stage(b"7")), STAGE) is Verdict.SAME
    assert not latest.accept(opened(stage(b"7")), STAGE)
    assert latest.accept(opened(stage(b"8", seq=8)), STAGE)
    kept = latest.get(X.peer_id, STAGE, RUN)
    assert kept is not None and kept.payload == b"8" and kept.raw == stage(b"8", seq=8)  # forwarded byte for byte
    # Another run, subject or signer stands for itself.
    assert latest.accept(opened(stage(seq=1, run=OTHER_RUN), run=None), STAGE)
    assert latest.accept(opened(stage(seq=1)), STAGE, subject=b"who")
    assert latest.accept(opened(seal(Y, STAGE, b"", run=RUN, seq=1, not_after=int(NOW) + 9)), STAGE)
    latest.forget(X.peer_id, STAGE, RUN)
    assert latest.get(X.peer_id, STAGE, RUN) is None and len(latest) == 3


def test_wire_9_two_bodies_with_one_number_are_kept_as_proof() -> None:
    latest = Latest()
    one, two = stage(b"one"), stage(b"two")
    latest.accept(opened(one), STAGE)
    latest.accept(opened(stage(run=OTHER_RUN), run=None), STAGE)
    with pytest.raises(Equivocation) as failure:
        latest.accept(opened(two), STAGE)
    assert [statement.raw for statement in failure.value.proof] == [one, two]
    assert latest.proof(X.peer_id) == failure.value.proof
    # Anybody can check it, and nothing of this signer counts any more.
    assert {opened(statement.raw).payload for statement in failure.value.proof} == {b"one", b"two"}
    assert len(latest) == 0
    with pytest.raises(Distrusted):
        latest.accept(opened(stage(b"three", seq=9)), STAGE)
    assert latest.accept(opened(seal(Y, STAGE, b"", run=RUN, seq=1, not_after=int(NOW) + 9)), STAGE)
    assert latest.proof(Y.peer_id) is None


def test_the_store_is_bounded() -> None:
    latest = Latest(capacity=3)
    signers = [Identity(bytes(30) + bytes([1, n])) for n in range(5)]

    def say(identity: Identity, seq: int, payload: bytes = b"") -> Statement:
        return opened(seal(identity, STAGE, payload, run=RUN, seq=seq, not_after=int(NOW) + 9))

    for identity in signers[:3]:
        latest.accept(say(identity, 1), STAGE)
    latest.accept(say(signers[0], 2), STAGE)
    latest.accept(say(signers[3], 1), STAGE)
    known = [identity for identity in signers if latest.get(identity.peer_id, STAGE, RUN)]
    assert known == [signers[0], signers[2], signers[3]]  # the one not renewed for longest went
    for identity in signers:
        latest.accept(say(identity, 3), STAGE)
        with pytest.raises(Equivocation):
            latest.accept(say(identity, 3, b"x"), STAGE)
    assert [latest.proof(identity.peer_id) is not None for identity in signers] == [False, False, True, True, True]


def test_kinds_of_which_all_count_have_no_newest() -> None:
    receipt = opened(seal(X, "plw/receipt/1", b"", run=RUN, seq=1, not_after=0), "plw/receipt/1")
    for domain in ("plw/receipt/1", "plw/nothing/1"):
        with pytest.raises(LocalProtocolError):
            Latest().accept(receipt, domain)


# --- numbers


def test_numbers_grow_whatever_the_clock_says(tmp_path: Path) -> None:
    path = tmp_path / "seq"
    clock = SequenceClock(path)
    first = clock.next(NOW)
    assert first == int(NOW * 1000)
    assert clock.next(NOW) == first + 1
    assert clock.next(NOW - 86_400) == first + 2
    assert clock.next(NOW + 1) == first + 1000
    assert clock.failure is None and clock.last == first + 1000
    # Killed, and the battery of the clock was empty.
    again = SequenceClock(path)
    number = again.next(0.0)
    assert number > clock.last
    assert SequenceClock(path).next(0.0) > number
    assert [entry.name for entry in tmp_path.iterdir()] == ["seq"]


@given(st.lists(st.one_of(st.floats(0, 1e10), st.integers(0, 2**63), st.none()), max_size=30))
def test_numbers_never_repeat(tmp_path_factory: pytest.TempPathFactory, inputs: list[float | int | None]) -> None:
    """A float is a seal at that time, an int a statement of ours that was seen, None a crash and a new start."""
    path = tmp_path_factory.mktemp("clock") / "seq"
    clock, last = SequenceClock(path), 0
    for step in inputs:
        if step is None:
            clock = SequenceClock(path)
        elif isinstance(step, int):
            clock.at_least(step)
            last = max(last, clock.next(0.0))
            assert clock.last > step
        else:
            number = clock.next(step)
            assert number > last
            last = number


def test_the_disk_is_written_once_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes = 0
    real = SequenceClock._reserve

    def counting(self: SequenceClock, number: int) -> None:
        nonlocal writes
        writes += 1
        real(self, number)

    monkeypatch.setattr(SequenceClock, "_reserve", counting)
    clock = SequenceClock(tmp_path / "seq")
    for second in range(600):
        clock.next(NOW + second)
    assert writes == 10


@pytest.mark.parametrize("trouble", ["folder is gone", "path is a folder", "rubbish in it"])
def test_a_disk_in_trouble_does_not_stop_the_numbers(tmp_path: Path, trouble: str) -> None:
    path = tmp_path / "folder" / "seq"
    if trouble == "path is a folder":
        path.mkdir(parents=True)
    elif trouble == "rubbish in it":
        path.parent.mkdir()
        path.write_text("1e9")
    clock = SequenceClock(path)
    read_failure = clock.failure
    number = clock.next(NOW)
    assert clock.next(NOW) == number + 1
    assert (clock.failure is None) == (trouble == "rubbish in it")
    assert (read_failure is None) == (trouble == "folder is gone")


def test_a_clock_without_a_file_and_the_end_of_the_numbers() -> None:
    clock = SequenceClock(None)
    clock.at_least(2**64 - 2)
    assert clock.next(0.0) == 2**64 - 1
    with pytest.raises(LocalProtocolError):
        clock.next(0.0)


# --- peer records

RECORD = PeerRecord(("/ip4/1.2.3.4/tcp/4001", f"/ip4/1.2.3.4/tcp/4001/p2p/{X.peer_id}"), capabilities=("stage",))


def record(value: PeerRecord = RECORD, identity: Identity = X, seq: int = 1) -> bytes:
    return seal_peer_record(identity, value, run=RUN, seq=seq, now_unix=NOW)


def test_a_peer_record() -> None:
    found = open_peer_record(record(), now_unix=NOW, run=RUN, signer=X.peer_id)
    assert (found.peer_id, found.record) == (X.peer_id, RECORD)
    assert tuple(map(str, found.addresses)) == RECORD.addresses
    assert found.statement.raw == record()
    open_peer_record(record(), now_unix=NOW + 7200 + GRACE_S, run=RUN)
    with pytest.raises(Expired):
        open_peer_record(record(), now_unix=NOW + 7201 + GRACE_S, run=RUN)


def test_wire_9_a_record_of_x_sent_by_y() -> None:
    with pytest.raises(WrongSigner) as failure:
        open_peer_record(record(), now_unix=NOW, run=RUN, signer=Y.peer_id)
    assert failure.value.code is Code.PEER_MISMATCH
    fields = msgpack.unpackb(record())
    with pytest.raises(Forged):  # the id is not of the key that signed
        open_peer_record(msgpack.packb([1, Y.peer_id.raw, *fields[2:]]), now_unix=NOW, run=RUN, signer=Y.peer_id)


@pytest.mark.parametrize(
    "address",
    [
        "/ip4/1.2.3.4/tcp/0",
        "1.2.3.4:4001",
        "/ip4/01.2.3.4/tcp/4001",
        "/ip6/::ffff:1.2.3.4/tcp/4001",
        "/ip6/fe80::1%lo/tcp/4001",
        "/dns/Example.org/tcp/4001",
        f"/ip4/1.2.3.4/tcp/4001/p2p/{Y.peer_id}",
        "",
    ],
)
def test_a_record_with_an_address_that_is_not_in_order(address: str) -> None:
    with pytest.raises(Malformed):
        open_peer_record(record(PeerRecord((address,))), now_unix=NOW, run=RUN)


@pytest.mark.parametrize("payload", [b"", b"\x90", encode(RECORD)[:-1], b"\x91" * 50, b"\xff" * 40])
def test_a_record_that_is_signed_rubbish(payload: bytes) -> None:
    raw = seal(X, PEER, payload, run=RUN, seq=1, not_after=int(NOW) + 60)
    with pytest.raises(Malformed):
        open_peer_record(raw, now_unix=NOW, run=RUN)


def test_a_record_has_two_kib() -> None:
    large = PeerRecord(tuple(f"/dns/{'x' * 60}.{'y' * 60}.{n}x/tcp/4001" for n in range(16)))
    with pytest.raises(LocalProtocolError) as failure:
        record(large)
    assert failure.value.code is Code.TOO_LARGE


@given(st.binary(max_size=200))
def test_rubbish_gives_bad_envelope_only(data: bytes) -> None:
    for domain in DOMAINS:
        with pytest.raises(BadEnvelope):
            opened(data, domain)
