"""Noise XX against the published vectors and against another implementation (`noiseprotocol`)."""

import hashlib
import json
import random
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from noise.connection import Keypair, NoiseConnection

from wire.errors import Code, LocalProtocolError, RemoteProtocolError
from wire.noise import SUITES, XX, Cipher, HandshakeState, SymmetricState, diffie_hellman, hkdf, public_key, rekeyed

VECTORS = json.loads((Path(__file__).parent / "vectors" / "noise_xx.json").read_text())["vectors"]


def pair(cipher: Cipher, rng: random.Random, prologue: bytes = b"") -> tuple[HandshakeState, HandshakeState]:
    return tuple(
        HandshakeState(cipher, initiator=side, prologue=prologue, static=rng.randbytes(32), ephemeral=rng.randbytes(32))
        for side in (True, False)
    )


def run(one: HandshakeState, other: HandshakeState) -> list[bytes]:
    messages = []
    for number in range(len(XX)):
        writer, reader = (one, other) if number % 2 == 0 else (other, one)
        messages.append(writer.write(lambda h: b"payload"))
        assert reader.read(messages[-1]).payload == b"payload"
    return messages


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: f"{v['set']}-{v['protocol_name']}")
def test_published_vectors_bit_for_bit(vector: dict) -> None:
    cipher, suite = next((c, s) for c, s in SUITES.items() if s.name.decode() == vector["protocol_name"])
    messages = [{k: bytes.fromhex(v) for k, v in m.items()} for m in vector["messages"]]
    sides = [
        HandshakeState(
            cipher,
            initiator=name == "init",
            prologue=bytes.fromhex(vector[f"{name}_prologue"]),
            static=bytes.fromhex(vector[f"{name}_static"]),
            ephemeral=bytes.fromhex(vector[f"{name}_ephemeral"]),
        )
        for name in ("init", "resp")
    ]
    hashes = {}
    for number, message in enumerate(messages[:3]):
        writer, reader = sides[number % 2], sides[1 - number % 2]
        signed = []
        written = writer.write(lambda h, signed=signed, message=message: signed.append(h) or message["payload"])
        assert written == message["ciphertext"]
        received = reader.read(written)
        assert received.payload == message["payload"]
        assert [received.h] == signed
        hashes[number + 1] = hashlib.sha256(received.h + written[-len(message["payload"]) - 16 :]).hexdigest()
    assert sides[0].split() == sides[1].split()
    first, second, _, h = sides[0].split()
    assert h.hex() == hashes[3]
    assert hashes[vector["hash_after_message"]] == vector["handshake_hash"]
    # The fourth message of the set goes from the responder, then they alternate; counters run per direction.
    keys = {0: suite.aead(first), 1: suite.aead(second)}
    for number, message in enumerate(messages[3:], start=3):
        nonce = suite.nonce.pack((number - 3) // 2)
        assert keys[number % 2].encrypt(nonce, message["payload"], b"") == message["ciphertext"]


@pytest.mark.parametrize("cipher", Cipher)
@pytest.mark.parametrize("initiator", [True, False], ids=["we-initiate", "they-initiate"])
def test_against_noiseprotocol(cipher: Cipher, initiator: bool) -> None:
    rng = random.Random(f"{cipher}{initiator}")
    suite = SUITES[cipher]
    for number in range(200):
        prologue = rng.randbytes(rng.randrange(64))
        ours = HandshakeState(
            cipher, initiator=initiator, prologue=prologue, static=rng.randbytes(32), ephemeral=rng.randbytes(32)
        )
        theirs = NoiseConnection.from_name(suite.name)
        (theirs.set_as_responder if initiator else theirs.set_as_initiator)()
        theirs.set_keypair_from_private_bytes(Keypair.STATIC, rng.randbytes(32))
        theirs.set_prologue(prologue)
        theirs.start_handshake()
        for turn in range(3):
            payload = rng.randbytes(rng.choice([0, 1, 150]))
            if (turn % 2 == 0) is initiator:
                assert theirs.read_message(ours.write(lambda h, payload=payload: payload)) == payload
            else:
                assert ours.read(bytes(theirs.write_message(payload))).payload == payload
        assert theirs.handshake_finished and ours.done
        first, second, _, h = ours.split()
        assert h == theirs.get_handshake_hash()
        # All 1,000 transport messages and a rekey on one handshake of each kind, a handful on the others.
        keys = (first, second) if initiator else (second, first)
        transport_agrees(cipher, theirs, *keys, rng, 1000 if number == 0 else 4)


def transport_agrees(
    cipher: Cipher, theirs: NoiseConnection, send: bytes, receive: bytes, rng: random.Random, count: int
) -> None:
    suite = SUITES[cipher]
    for counter in range(count):
        if counter == count // 2:
            send, receive = rekeyed(cipher, send), rekeyed(cipher, receive)
            theirs.rekey_inbound_cipher()
            theirs.rekey_outbound_cipher()
        data = rng.randbytes(rng.randrange(200))
        nonce = suite.nonce.pack(counter)
        assert theirs.decrypt(suite.aead(send).encrypt(nonce, data, b"")) == data
        assert suite.aead(receive).decrypt(nonce, bytes(theirs.encrypt(data)), b"") == data


@pytest.mark.parametrize("cipher", Cipher)
def test_every_truncation_and_flip_of_every_message_is_refused(cipher: Cipher) -> None:
    """A flip in message 1 (a bare key) shows at the next tag; in messages 2 and 3 at once."""
    seed = 7
    messages = run(*pair(cipher, random.Random(seed)))
    for number, message in enumerate(messages):
        mutants = [message[:size] for size in range(len(message))]
        mutants += [message[:at] + bytes([message[at] ^ 1 << at % 8]) + message[at + 1 :] for at in range(len(message))]
        if number > 0:
            mutants.append(message + b"\x00")
        for mutant in mutants:
            one, other = pair(cipher, random.Random(seed))
            with pytest.raises(RemoteProtocolError) as refused:
                for turn in range(3):
                    writer, reader = (one, other) if turn % 2 == 0 else (other, one)
                    written = writer.write(lambda h: b"payload")
                    reader.read(mutant if turn == number else written)
            assert refused.value.code is Code.AUTH
            assert refused.value.detail


def test_a_truncation_is_named_as_such() -> None:
    one, other = pair(Cipher.AES256GCM, random.Random(8))
    first = one.write(lambda h: b"")
    with pytest.raises(RemoteProtocolError, match="message 1 ends inside the ephemeral key"):
        pair(Cipher.AES256GCM, random.Random(8))[1].read(first[:31])
    other.read(first)
    with pytest.raises(RemoteProtocolError, match="message 2 ends inside the static key"):
        one.read(other.write(lambda h: b"")[:79])


@pytest.mark.parametrize("cipher", Cipher)
def test_another_prologue_is_refused(cipher: Cipher) -> None:
    rng = random.Random(3)
    one = pair(cipher, rng, b"one hello")[0]
    other = pair(cipher, rng, b"another hello")[1]
    other.read(one.write(lambda h: b""))
    with pytest.raises(RemoteProtocolError, match="message 2"):
        one.read(other.write(lambda h: b""))


# RFC 7748 points of order 1, 2, 4 and 8 by their u, as published in the X25519 literature ("may the fourth be with you", 2017).
SMALL_ORDER = [
    bytes(32),
    bytes([1]) + bytes(31),
    bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
    bytes.fromhex("5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157"),
    (2**255 - 20).to_bytes(32, "little"),
    (2**255 - 19).to_bytes(32, "little"),
    (2**255 - 18).to_bytes(32, "little"),
]


@pytest.mark.parametrize("point", SMALL_ORDER, ids=lambda p: p.hex()[:8])
def test_all_zero_diffie_hellman_is_refused(point: bytes) -> None:
    private = X25519PrivateKey.from_private_bytes(random.Random(1).randbytes(32))
    with pytest.raises(RemoteProtocolError, match="all zeros"):
        diffie_hellman(private, point)


def test_a_key_of_small_order_ends_the_handshake() -> None:
    one, other = pair(Cipher.AES256GCM, random.Random(4))
    one.write(lambda h: b"")
    with pytest.raises(RemoteProtocolError, match="all zeros"):
        one.read(SMALL_ORDER[2] + bytes(64 + 16))
    # Control: the same bytes behind a good key fail for another reason.
    one, other = pair(Cipher.AES256GCM, random.Random(4))
    other.read(one.write(lambda h: b""))
    with pytest.raises(RemoteProtocolError, match="tag"):
        one.read(other.write(lambda h: b"")[:32] + bytes(64 + 16))


def test_out_of_turn_is_our_own_fault_and_changes_nothing() -> None:
    one, other = pair(Cipher.CHACHA20POLY1305, random.Random(5))
    with pytest.raises(LocalProtocolError):
        other.write(lambda h: b"")
    with pytest.raises(LocalProtocolError):
        one.read(bytes(32))
    with pytest.raises(LocalProtocolError):
        one.split()
    run(one, other)
    with pytest.raises(LocalProtocolError):
        one.write(lambda h: b"")
    assert one.split() == other.split()


def test_names_and_nonces() -> None:
    chacha, aes = SUITES[Cipher.CHACHA20POLY1305], SUITES[Cipher.AES256GCM]
    assert (len(chacha.name), len(aes.name)) == (32, 28)
    assert chacha.nonce.pack(1).hex() == "000000000100000000000000"
    assert aes.nonce.pack(1).hex() == "000000000000000000000001"
    empty = SymmetricState(Cipher.AES256GCM, b"").h
    assert empty != SymmetricState(Cipher.CHACHA20POLY1305, b"").h


def test_message_1_is_the_public_key() -> None:
    one, _ = pair(Cipher.AES256GCM, random.Random(6))
    rng = random.Random(6)
    rng.randbytes(32)  # the static key is drawn first
    assert one.write(lambda h: b"") == public_key(rng.randbytes(32))


def test_third_output_leaves_the_first_two_alone() -> None:
    assert hkdf(b"c" * 32, b"", 3)[:2] == hkdf(b"c" * 32, b"", 2)
    assert len(set(hkdf(b"c" * 32, b"", 3))) == 3
