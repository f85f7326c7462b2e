"""Noise XX: the key agreement of two strangers, and nothing else.

What for.  Two nodes that know nothing of each other but an address must end up with two keys (one a direction) that nobody
on the path has, and with a hash `h` that names this very conversation.  XX is the Noise pattern for that: both static keys
travel encrypted, so a listener learns neither identity, and an active attacker learns only the responder's.

    -> e                   e: fresh X25519 key, in clear
    <- e, ee, s, es        s: static key, encrypted; each pair of letters is one Diffie-Hellman mixed into the chaining key
    -> s, se

What goes wrong in such code, and where it is held here:
- The suite's name seeds the hash.  "Noise_XX_25519_ChaChaPoly_SHA256" is exactly 32 bytes and is used as it is; the AESGCM
  name is 28 bytes and is padded with zeros.  Hashing either is a silent incompatibility.
- An empty payload is still mixed into `h`; skipping it works between two copies of the same mistake.
- The nonce is 4 zero bytes and a u64, little-endian for ChaCha20-Poly1305, big-endian for AES-GCM.
- `split` gives the key initiator -> responder first, whoever asks.
- A peer may send a point of small order: the shared secret is then all zeros, known to everybody.  Refused.
- The caller signs `h` as it stands just before its payload is encrypted; `write` therefore asks for the payload with that
  hash in hand, and `read` returns the same hash beside the payload.  Signing any other `h` would not bind the static keys.

Randomness is given by the caller as raw private keys, which also makes the published vectors runnable.  The checks against
those vectors and against another implementation are in tests/wire/test_noise.py.

Sources: The Noise Protocol Framework, revision 34, sections 5, 7.5, 11.3 and 12; RFC 7748 section 6.1 (all-zero check); RFC 5869
for HKDF's shape.
"""

import hashlib
import hmac
import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, StrEnum

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

from wire.errors import Code, LocalProtocolError, RemoteProtocolError

KEY_BYTES = 32  # X25519 keys, chaining key, hash and cipher keys alike (Noise 12.1, 12.3)
TAG_BYTES = 16  # both AEADs
LAST_NONCE = 2**64 - 1  # reserved for Rekey (Noise 11.3)

Aead = AESGCM | ChaCha20Poly1305


class Cipher(StrEnum):
    """The two AEADs of the wire, by their names in the hello."""

    AES256GCM = "aes256gcm"
    CHACHA20POLY1305 = "chacha20poly1305"


@dataclass(frozen=True, slots=True)
class Suite:
    """What differs between the two ciphers: the Noise name, the AEAD and how a counter becomes a nonce."""

    name: bytes
    aead: type[AESGCM] | type[ChaCha20Poly1305]
    nonce: struct.Struct


SUITES: dict[Cipher, Suite] = {
    Cipher.AES256GCM: Suite(b"Noise_XX_25519_AESGCM_SHA256", AESGCM, struct.Struct(">4xQ")),
    Cipher.CHACHA20POLY1305: Suite(b"Noise_XX_25519_ChaChaPoly_SHA256", ChaCha20Poly1305, struct.Struct("<4xQ")),
}


def rekeyed(cipher: Cipher, key: bytes) -> bytes:
    """The key that follows `key`: first 32 bytes of ENCRYPT(key, 2^64 - 1, "", 32 zero bytes) (Noise 4.2, Rekey)."""
    suite = SUITES[cipher]
    return suite.aead(key).encrypt(suite.nonce.pack(LAST_NONCE), bytes(KEY_BYTES), b"")[:KEY_BYTES]


def hkdf(chaining_key: bytes, material: bytes, outputs: int) -> tuple[bytes, ...]:
    """Noise's HKDF (4.3): `outputs` (2 or 3) values of 32 bytes."""
    seed = hmac.digest(chaining_key, material, "sha256")
    values = [hmac.digest(seed, b"\x01", "sha256")]
    for number in range(2, outputs + 1):
        values.append(hmac.digest(seed, values[-1] + bytes([number]), "sha256"))
    return tuple(values)


def diffie_hellman(private: X25519PrivateKey, public: bytes) -> bytes:
    """X25519.  A point of small order, whose shared secret is all zeros, raises `RemoteProtocolError(AUTH)`."""
    try:
        shared = private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:  # OpenSSL refuses an all-zero result by itself ...
        shared = bytes(KEY_BYTES)
    if shared == bytes(KEY_BYTES):  # ... but that is a property of the backend, not of its documentation
        raise RemoteProtocolError(Code.AUTH, "Diffie-Hellman result is all zeros: the peer sent a key of small order")
    return shared


def public_key(private: bytes) -> bytes:
    """The 32-byte public half of a raw private key; also the whole of message 1, when its payload is empty."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


class SymmetricState:
    """Noise's SymmetricState and its CipherState (5.1, 5.2): chaining key, transcript hash, and the key of the moment."""

    __slots__ = ("_aead", "_chaining_key", "_nonce", "_suite", "h")

    def __init__(self, cipher: Cipher, prologue: bytes) -> None:
        self._suite = SUITES[cipher]
        name = self._suite.name
        self.h = name.ljust(KEY_BYTES, b"\x00") if len(name) <= KEY_BYTES else hashlib.sha256(name).digest()
        self._chaining_key = self.h
        self._aead: Aead | None = None
        self._nonce = 0
        self.mix_hash(prologue)

    def mix_hash(self, data: bytes) -> None:
        self.h = hashlib.sha256(self.h + data).digest()

    def mix_key(self, material: bytes) -> None:
        self._chaining_key, key = hkdf(self._chaining_key, material, 2)
        self._aead = self._suite.aead(key)
        self._nonce = 0

    def encrypt_and_hash(self, plaintext: bytes) -> bytes:
        sealed = plaintext
        if self._aead is not None:
            sealed = self._aead.encrypt(self._suite.nonce.pack(self._nonce), plaintext, self.h)
            self._nonce += 1
        self.mix_hash(sealed)
        return sealed

    def decrypt_and_hash(self, sealed: bytes) -> bytes:
        """Raises InvalidTag, with the state unchanged."""
        plaintext = sealed
        if self._aead is not None:
            plaintext = self._aead.decrypt(self._suite.nonce.pack(self._nonce), sealed, self.h)
            self._nonce += 1
        self.mix_hash(sealed)
        return plaintext

    @property
    def overhead(self) -> int:
        """Bytes that `encrypt_and_hash` adds at this moment."""
        return 0 if self._aead is None else TAG_BYTES

    def split(self) -> tuple[bytes, bytes, bytes]:
        """Key initiator -> responder, key responder -> initiator, exporter secret.

        The first two are Noise's Split, since the third output of HKDF does not change the first two.
        """
        first, second, third = hkdf(self._chaining_key, b"", 3)
        return first, second, third


class Token(Enum):
    E = "e"
    S = "s"
    EE = "ee"
    ES = "es"
    SE = "se"


# The pattern as data: message number -> tokens.  Even messages come from the initiator.
XX: tuple[tuple[Token, ...], ...] = (
    (Token.E,),
    (Token.E, Token.EE, Token.S, Token.ES),
    (Token.S, Token.SE),
)

# Bytes of each message before its payload, in clear and sealed parts together: e 32, e + s + tag 80, s + tag 48.
MESSAGE_PREFIX_BYTES = (KEY_BYTES, KEY_BYTES + KEY_BYTES + TAG_BYTES, KEY_BYTES + TAG_BYTES)


@dataclass(frozen=True, slots=True)
class Received:
    """A handshake message after its tags verified: `h` as its sender signed it, and the payload."""

    h: bytes
    payload: bytes


class HandshakeState:
    """One side of one XX conversation (Noise 5.3): three messages, strictly alternating, then `split`.

    `static` and `ephemeral` are raw X25519 private keys, fresh for this connection.  Writing or reading out of turn raises
    `LocalProtocolError` and changes nothing.  After `read` has raised `RemoteProtocolError` the state is void: drop it.
    """

    __slots__ = ("_ephemeral", "_initiator", "_message", "_remote_ephemeral", "_static", "_symmetric", "remote_static")

    def __init__(self, cipher: Cipher, *, initiator: bool, prologue: bytes, static: bytes, ephemeral: bytes) -> None:
        self._symmetric = SymmetricState(cipher, prologue)
        self._initiator = initiator
        self._static = X25519PrivateKey.from_private_bytes(static)
        self._ephemeral = X25519PrivateKey.from_private_bytes(ephemeral)
        self._remote_ephemeral = b""
        self.remote_static = b""
        self._message = 0

    @property
    def done(self) -> bool:
        return self._message == len(XX)

    def write(self, make_payload: Callable[[bytes], bytes]) -> bytes:
        """The next message.  `make_payload(h)` gets the hash just before the payload is encrypted."""
        self._take_turn(writing=True)
        symmetric = self._symmetric
        parts = []
        for token in XX[self._message]:
            if token is Token.E:
                public = self._ephemeral.public_key().public_bytes_raw()
                symmetric.mix_hash(public)
                parts.append(public)
            elif token is Token.S:
                parts.append(symmetric.encrypt_and_hash(self._static.public_key().public_bytes_raw()))
            else:
                symmetric.mix_key(self._agree(token))
        parts.append(symmetric.encrypt_and_hash(make_payload(symmetric.h)))
        self._message += 1
        return b"".join(parts)

    def read(self, message: bytes) -> Received:
        """Take the peer's next message.  Anything that does not verify raises `RemoteProtocolError(AUTH)` with the cause."""
        self._take_turn(writing=False)
        symmetric = self._symmetric
        offset = 0
        try:
            for token in XX[self._message]:
                if token is Token.E:
                    self._remote_ephemeral, offset = self._take(message, offset, KEY_BYTES, "ephemeral key")
                    symmetric.mix_hash(self._remote_ephemeral)
                elif token is Token.S:
                    sealed, offset = self._take(message, offset, KEY_BYTES + symmetric.overhead, "static key")
                    self.remote_static = symmetric.decrypt_and_hash(sealed)
                else:
                    symmetric.mix_key(self._agree(token))
            h = symmetric.h
            payload = symmetric.decrypt_and_hash(message[offset:])
        except InvalidTag:
            raise RemoteProtocolError(Code.AUTH, f"tag of handshake message {self._message + 1} does not verify") from None
        self._message += 1
        return Received(h, payload)

    def split(self) -> tuple[bytes, bytes, bytes, bytes]:
        """(key initiator -> responder, key responder -> initiator, exporter secret, h), once all three messages are through."""
        if not self.done:
            raise LocalProtocolError("split before the third handshake message")
        return (*self._symmetric.split(), self._symmetric.h)

    def _take_turn(self, *, writing: bool) -> None:
        ours = self._message % 2 == (0 if self._initiator else 1)
        if self.done or ours is not writing:
            raise LocalProtocolError("handshake message out of turn")

    def _take(self, message: bytes, offset: int, size: int, what: str) -> tuple[bytes, int]:
        part = message[offset : offset + size]
        if len(part) != size:
            raise RemoteProtocolError(Code.AUTH, f"handshake message {self._message + 1} ends inside the {what}")
        return part, offset + size

    def _agree(self, token: Token) -> bytes:
        # "es" is initiator's e with responder's s, "se" the reverse; seen from one side: mine first, theirs second.
        if token is Token.EE:
            return diffie_hellman(self._ephemeral, self._remote_ephemeral)
        if (token is Token.ES) is self._initiator:
            return diffie_hellman(self._ephemeral, self.remote_static)
        return diffie_hellman(self._static, self._remote_ephemeral)
