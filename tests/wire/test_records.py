"""Records: what a flipped header bit, a moved record and a used-up key do.  Case id: WIRE-6 (lengths)."""

import dataclasses
import random

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from wire.errors import Code, LocalProtocolError, RemoteProtocolError
from wire.limits import DEFAULT_LIMITS
from wire.noise import Cipher, rekeyed
from wire.records import (
    FLAG_FIN,
    HEADER,
    HEADER_BYTES,
    RECORD_OVERHEAD_BYTES,
    TAG_BYTES,
    FrameType,
    Opener,
    Sealer,
    frame_rules,
    parse_header,
)

KEY = bytes(range(32))
BODY = 40
# Few records and few bytes a key, so that both ways to a rekey are walked often.
SHRUNK = dataclasses.replace(
    DEFAULT_LIMITS, record_rekey_records=100, record_rekey_bytes=4000, record_refuse_records=400, record_refuse_bytes=16000
)


def seal(sealer: Sealer, plaintext: bytes = b"p" * BODY, kind: int = FrameType.DATA, stream: int = 3, flags: int = 0) -> bytes:
    out = memoryview(bytearray(len(plaintext) + RECORD_OVERHEAD_BYTES))
    assert sealer.seal_into(stream, kind, flags, plaintext, out) == len(out)
    return bytes(out)


def open_record(opener: Opener, record: bytes) -> bytes:
    view = memoryview(record)
    size, _, _, _ = parse_header(view[:HEADER_BYTES])
    body = view[HEADER_BYTES : HEADER_BYTES + size]
    destination = bytearray(size - TAG_BYTES)
    opener.open_into(view[:HEADER_BYTES], body, memoryview(destination))
    return bytes(destination)


@pytest.mark.parametrize("cipher", Cipher)
def test_round_trip_of_all_sizes(cipher: Cipher) -> None:
    sealer, opener = Sealer(cipher, KEY), Opener(cipher, KEY)
    rng = random.Random(1)
    for size in (1, 15, 16, 17, 255, 65536, DEFAULT_LIMITS.record_plaintext_max_bytes):
        plaintext = rng.randbytes(size)
        assert open_record(opener, seal(sealer, plaintext)) == plaintext
    assert open_record(opener, seal(sealer, b"", flags=FLAG_FIN)) == b""
    assert sealer.records == opener.records == 8


def test_bytes_on_the_wire() -> None:
    """Against the bare AEAD, so that both halves cannot share one mistake."""
    sealer = Sealer(Cipher.AES256GCM, KEY)
    for counter in range(3):
        record = seal(sealer, b"hello", FrameType.OPEN, stream=0x01020304)
        header = bytes.fromhex("00000015 01020304 10 00 0000")
        nonce = bytes(4) + counter.to_bytes(8, "big")
        assert record == header + AESGCM(KEY).encrypt(nonce, b"hello", header)


def test_each_header_bit_is_authenticated() -> None:
    """All 96 bits: refused by the header's rules or by the tag; verified memory stays, and the connection is dead."""
    seen = set()
    for bit in range(HEADER_BYTES * 8):
        sealer, opener = Sealer(Cipher.AES256GCM, KEY), Opener(Cipher.AES256GCM, KEY)
        memory = bytearray(2 * BODY + 64)
        first = memoryview(seal(sealer))
        opener.open_into(first[:HEADER_BYTES], first[HEADER_BYTES:], memoryview(memory)[:BODY])
        record = bytearray(seal(sealer, b"q" * BODY))
        record[bit // 8] ^= 1 << bit % 8
        view = memoryview(record)
        with pytest.raises(RemoteProtocolError) as refused:
            size, _, _, _ = parse_header(view[:HEADER_BYTES])
            # The reader would wait for a longer body; the bytes behind it are the next record's.
            body = bytes(view[HEADER_BYTES : HEADER_BYTES + size]).ljust(size, b"\x00")
            memory.extend(bytes(max(0, BODY + size - len(memory))))
            opener.open_into(view[:HEADER_BYTES], body, memoryview(memory)[BODY : BODY + size - TAG_BYTES])
        seen.add(refused.value.code)
        assert memory[:BODY] == b"p" * BODY
        assert opener.records == 1
    assert seen == {Code.PROTOCOL, Code.TOO_LARGE, Code.AUTH}


@pytest.mark.parametrize("cipher", Cipher)
def test_after_one_bad_tag_nothing_opens(cipher: Cipher) -> None:
    sealer, opener = Sealer(cipher, KEY), Opener(cipher, KEY)
    good = seal(sealer)
    bad = good[:-1] + bytes([good[-1] ^ 1])
    with pytest.raises(RemoteProtocolError):
        open_record(opener, bad)
    with pytest.raises(RemoteProtocolError) as refused:
        open_record(opener, good)
    assert refused.value.code is Code.AUTH
    assert open_record(Opener(cipher, KEY), good) == b"p" * BODY  # control: the record itself is good


@pytest.mark.parametrize("case", ["swapped", "doubled", "dropped", "reflected"])
def test_records_cannot_be_moved(case: str) -> None:
    sealer, opener = Sealer(Cipher.CHACHA20POLY1305, KEY), Opener(Cipher.CHACHA20POLY1305, KEY)
    records = [seal(sealer, bytes([number]) * BODY) for number in range(3)]
    order = {
        "swapped": [records[1], records[0]],
        "doubled": [records[0], records[0]],
        "dropped": [records[0], records[2]],
        "reflected": [seal(Sealer(Cipher.CHACHA20POLY1305, KEY[::-1]))],
    }[case]
    with pytest.raises(RemoteProtocolError):
        for record in order:
            open_record(opener, record)
    control = Opener(Cipher.CHACHA20POLY1305, KEY)
    assert [open_record(control, record)[0] for record in records] == [0, 1, 2]


# Keys


@pytest.mark.parametrize("cipher", Cipher)
def test_100_000_records_with_rekeys_in_buffers_of_constant_size(cipher: Cipher) -> None:
    sealer, opener = Sealer(cipher, KEY, SHRUNK), Opener(cipher, KEY, SHRUNK)
    ring, landing = bytearray(4096), bytearray(4096)
    out, into = memoryview(ring), memoryview(landing)
    empty, plaintext = memoryview(b""), memoryview(bytes(100))
    rekeys = 0

    def carry(kind: int, stream: int, body: memoryview) -> None:
        end = sealer.seal_into(stream, kind, 0, body, out)
        size, _, got, _ = parse_header(out[:HEADER_BYTES])
        opener.open_into(out[:HEADER_BYTES], out[HEADER_BYTES:end], into[: size - TAG_BYTES])
        assert got == kind

    for number in range(100_000):
        if sealer.needs_rekey:
            carry(FrameType.REKEY, 0, empty)
            sealer.rekey()
            opener.rekey()
            rekeys += 1
        # Long bodies half of the time: the byte limit of 4,000 fires after 40 of them, the record limit after 100 short ones.
        carry(FrameType.DATA, 1, plaintext if number // 500 % 2 else plaintext[:1])
    assert sealer.records == opener.records == 100_000 + rekeys
    assert rekeys > 1500
    assert (len(ring), len(landing)) == (4096, 4096)


def test_the_counter_runs_on_over_a_rekey() -> None:
    sealer = Sealer(Cipher.AES256GCM, KEY)
    seal(sealer)
    sealer.rekey()
    record = seal(sealer)
    nonce = bytes(4) + (1).to_bytes(8, "big")
    assert AESGCM(rekeyed(Cipher.AES256GCM, KEY)).decrypt(nonce, record[HEADER_BYTES:], record[:HEADER_BYTES]) == b"p" * BODY


def test_needs_rekey_at_the_record_and_at_the_byte_limit() -> None:
    by_records = Sealer(Cipher.AES256GCM, KEY, SHRUNK)
    for _ in range(99):
        seal(by_records, b"x")
    assert not by_records.needs_rekey
    seal(by_records, b"x")
    assert by_records.needs_rekey
    by_records.rekey()
    assert not by_records.needs_rekey
    by_bytes = Sealer(Cipher.AES256GCM, KEY, SHRUNK)
    seal(by_bytes, bytes(3999))
    assert not by_bytes.needs_rekey
    seal(by_bytes, b"x")
    assert by_bytes.needs_rekey


@pytest.mark.parametrize(("count", "size"), [(400, 1), (16, 1000)])
def test_a_key_used_up_is_refused_on_both_sides(count: int, size: int) -> None:
    careless = Sealer(Cipher.AES256GCM, KEY)  # a peer whose limits are not ours
    sealer, opener = Sealer(Cipher.AES256GCM, KEY, SHRUNK), Opener(Cipher.AES256GCM, KEY, SHRUNK)
    for _ in range(count):
        record = seal(careless, bytes(size))
        assert seal(sealer, bytes(size)) == record
        open_record(opener, record)
    with pytest.raises(LocalProtocolError):
        seal(sealer)
    with pytest.raises(RemoteProtocolError, match="rekey"):
        open_record(opener, seal(careless))


def test_a_rekey_on_one_side_only_is_noticed() -> None:
    sealer, opener = Sealer(Cipher.AES256GCM, KEY), Opener(Cipher.AES256GCM, KEY)
    open_record(opener, seal(sealer))
    sealer.rekey()
    with pytest.raises(RemoteProtocolError):
        open_record(opener, seal(sealer))


# Misuse: our own fault, and nothing has moved


def test_misuse_leaves_both_directions_as_they_were() -> None:
    sealer, opener = Sealer(Cipher.AES256GCM, KEY), Opener(Cipher.AES256GCM, KEY)
    out = memoryview(bytearray(BODY + RECORD_OVERHEAD_BYTES))
    for stream, kind, flags, plaintext in [
        (3, FrameType.DATA, 0, bytes(BODY + 1)),
        (2**32, FrameType.DATA, 0, bytes(BODY)),
        (3, 256, 0, bytes(BODY)),
        (3, FrameType.DATA, -1, bytes(BODY)),
    ]:
        with pytest.raises(LocalProtocolError):
            sealer.seal_into(stream, kind, flags, plaintext, out)
    with pytest.raises(LocalProtocolError):
        sealer.seal_into(3, FrameType.DATA, 0, b"", memoryview(bytearray(4)))
    with pytest.raises(LocalProtocolError) as too_large:
        seal(sealer, bytes(DEFAULT_LIMITS.record_plaintext_max_bytes + 1))
    assert too_large.value.code is Code.TOO_LARGE
    record = memoryview(seal(sealer))
    for size in (BODY - 1, BODY + 1, 0):
        with pytest.raises(LocalProtocolError):
            opener.open_into(record[:HEADER_BYTES], record[HEADER_BYTES:], memoryview(bytearray(size)))
    assert open_record(opener, bytes(record)) == b"p" * BODY
    assert open_record(opener, seal(sealer)) == b"p" * BODY


# Headers

# (type, least body, most body, stream 0 allowed, other streams allowed), written out from the wire's frame table.
TABLE = [
    (0x01, 1, 8192, True, False),
    (0x02, 16, 16, True, False),
    (0x03, 20, 20, True, False),
    (0x04, 8, 8, True, True),
    (0x05, 10, 138, True, False),
    (0x06, 0, 0, True, False),
    (0x10, 1, None, False, True),
    (0x11, 1, None, False, True),
    (0x12, 1, 262144, False, True),
    (0x13, 2, 130, False, True),
    (0x14, 16, 16, False, True),
    (0x80, 0, 262144, True, True),
    (0xFF, 0, 262144, True, True),
]


def accepted(size: int, stream: int, kind: int, flags: int = 0, zero: int = 0) -> bool:
    try:
        assert parse_header(HEADER.pack(size, stream, kind, flags, zero)) == (size, stream, kind, flags)
    except RemoteProtocolError as error:
        assert error.code in (Code.PROTOCOL, Code.TOO_LARGE)
        assert error.detail
        return False
    return True


@pytest.mark.parametrize(("kind", "least", "most", "zero", "others"), TABLE)
def test_frame_table(kind: int, least: int, most: int | None, zero: bool, others: bool) -> None:
    stream = 0 if zero else 1
    most = frame_rules(DEFAULT_LIMITS)[kind][1] if most is None else most
    for body, good in [(least, True), (most, True), (least - 1, False), (most + 1, False), (2**32 - 1 - 16, False)]:
        assert accepted(body + 16, stream, kind) is good
    assert not accepted(0, stream, kind)
    assert not accepted(15, stream, kind)
    assert accepted(least + 16, 0, kind) is zero
    assert accepted(least + 16, 1, kind) is accepted(least + 16, 2**32 - 1, kind) is others
    for bit in range(8):
        flag_known = kind >= 0x80 or (kind == FrameType.DATA and bit == 0)
        assert accepted(least + 16, stream, kind, 1 << bit) is flag_known
    for bit in range(16):
        assert not accepted(least + 16, stream, kind, 0, 1 << bit)


def test_empty_data_needs_fin() -> None:
    assert not accepted(16, 1, FrameType.DATA)
    assert accepted(16, 1, FrameType.DATA, FLAG_FIN)


def test_unknown_types_below_80_are_violations_above_they_are_ignored() -> None:
    known = {int(kind) for kind in FrameType}
    for kind in range(256):
        assert any(accepted(body + 16, stream, kind) for body in (0, 1, 8, 10, 16, 20) for stream in (0, 1)) is (
            kind in known or kind >= 0x80
        )


def test_too_large_says_so() -> None:
    with pytest.raises(RemoteProtocolError) as refused:
        parse_header(HEADER.pack(2**31 - 1, 1, FrameType.DATA, 0, 0))
    assert refused.value.code is Code.TOO_LARGE


def test_rules_follow_the_limits() -> None:
    small = frame_rules(dataclasses.replace(DEFAULT_LIMITS, hello_frame_max_bytes=4096))
    header = HEADER.pack(4097 + 16, 0, FrameType.HELLO, 0, 0)
    parse_header(header)
    with pytest.raises(RemoteProtocolError):
        parse_header(header, small)


@given(st.binary(min_size=12, max_size=12))
def test_any_twelve_bytes_are_a_header_or_a_violation(header: bytes) -> None:
    try:
        size, stream, kind, flags = parse_header(header)
    except RemoteProtocolError:
        return
    assert 16 <= size <= DEFAULT_LIMITS.record_plaintext_max_bytes + 16
    assert HEADER.pack(size, stream, kind, flags, 0) == header
