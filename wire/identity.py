"""Identity: one Ed25519 key names a node, and one file keeps it.

What goes wrong.  Two texts for one key make two peers out of one, so parsing accepts exactly one spelling.  Small-order keys
verify signatures that nobody made, so they are no identities.  A key that others on the machine can read is copied; a key used by
two processes makes peers see a node that contradicts itself.  And a signature made for one purpose is shown for another, hence
`Identity.sign` takes a domain from a closed set and nothing else signs.

The id is the 32-byte public key.  Its text is base58btc of `00 24 08 01 12 20 || key`, the form of libp2p's peer ids (peer-ids
specification: identity multihash of the protobuf of an Ed25519 key), so that existing tools can read it; 52 characters that begin
with 12D3KooW.  The key file is libp2p's private-key protobuf, `08 01 12 40 || seed(32) || public(32)`.

Sources: RFC 8032 (Ed25519, encoding of points); the libp2p peer-ids specification; the small-order points are the eight torsion
points of edwards25519, seven y values when the sign bit is left aside and non-canonical encodings are counted.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from functools import total_ordering
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from wire.errors import Code, WireError, printable

# Domains: the first bytes of everything that is ever signed.  None is a prefix of another.
SIGNED = b"plw-signed/1"
HANDSHAKE = b"plw/handshake/1\x00"
ROUND = b"plw/round/1\x00"
DOMAINS = frozenset({SIGNED, HANDSHAKE, ROUND})

ID_BYTES = 32
ID_TEXT_CHARS = 52
SIGNATURE_BYTES = 64

_ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_DIGITS = {char: value for value, char in enumerate(_ALPHABET)}
_ID_PREFIX = bytes.fromhex("002408011220")
_KEY_PREFIX = bytes.fromhex("08011240")
_KEY_FILE_BYTES = 68

_FIELD_PRIME = 2**255 - 19
_ORDER_EIGHT_Y = 0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826
# y of the points of order 4, 1, 2, 8, 8 and the two non-canonical spellings p and p + 1 of the first two.
SMALL_ORDER_Y = frozenset(
    {
        0,
        1,
        _FIELD_PRIME - 1,
        _ORDER_EIGHT_Y,
        _FIELD_PRIME - _ORDER_EIGHT_Y,
        _FIELD_PRIME,
        _FIELD_PRIME + 1,
    }
)


class KeyFileError(WireError):
    """The key file or the data folder cannot be used; the detail names the path and what to do."""

    default_code = Code.INTERNAL

    def __init__(self, message: str, *, code: Code | None = None) -> None:
        self.message = message
        super().__init__(message, code=code, local=True)

    def __str__(self) -> str:
        # Our own words and the operator's own path, which may be longer than what a peer is allowed to say.
        return self.message


def base58_encode(data: bytes) -> str:
    """Base58 with Bitcoin's alphabet; each leading zero byte is a leading "1"."""
    number = int.from_bytes(data, "big")
    digits: list[str] = []
    while number:
        number, digit = divmod(number, 58)
        digits.append(_ALPHABET[digit])
    zeros = len(data) - len(data.lstrip(b"\x00"))
    return "1" * zeros + "".join(reversed(digits))


def base58_decode(text: str) -> bytes:
    """The inverse; raises ValueError for a character outside the alphabet.  Quadratic: the caller bounds the length."""
    number = 0
    for char in text:
        digit = _DIGITS.get(char)
        if digit is None:
            raise ValueError(f"{printable(char)!r} is not a base58 character")
        number = number * 58 + digit
    zeros = len(text) - len(text.lstrip("1"))
    return b"\x00" * zeros + number.to_bytes((number.bit_length() + 7) // 8, "big")


@total_ordering
class PeerId:
    """Who: a public key.  Immutable, hashable, ordered by its bytes ("the lower id").

    Raises ValueError for anything that is not a canonical point encoding of full order (`y >= p`, small order).
    """

    __slots__ = ("_hash", "_key", "_raw", "_text")

    def __init__(self, raw: bytes) -> None:
        if len(raw) != ID_BYTES:
            raise ValueError(f"a peer id has {ID_BYTES} bytes, not {len(raw)}")
        y = int.from_bytes(raw, "little") & ((1 << 255) - 1)
        if y in SMALL_ORDER_Y:
            raise ValueError("a key of small order is no identity")
        if y >= _FIELD_PRIME:
            raise ValueError("the key is not in canonical form")
        self._raw = bytes(raw)
        self._hash = hash(self._raw)
        self._text: str | None = None
        self._key: Ed25519PublicKey | None = None

    @classmethod
    def parse(cls, text: str) -> PeerId:
        """The id from its text; only the one canonical spelling is accepted.  Raises ValueError."""
        if len(text) != ID_TEXT_CHARS:
            raise ValueError(f"a peer id has {ID_TEXT_CHARS} characters, not {len(text)}: {printable(text)}")
        data = base58_decode(text)
        if len(data) != len(_ID_PREFIX) + ID_BYTES or not data.startswith(_ID_PREFIX):
            raise ValueError(f"not the id of an Ed25519 key: {printable(text)}")
        peer_id = cls(data[len(_ID_PREFIX) :])
        if str(peer_id) != text:
            raise ValueError(f"not the canonical text of a peer id: {printable(text)}")
        return peer_id

    @property
    def raw(self) -> bytes:
        """The 32 bytes of the public key."""
        return self._raw

    @property
    def short(self) -> str:
        """The last 6 characters, for screens; not unique, never parsed."""
        return str(self)[-6:]

    def verify(self, domain: bytes, data: bytes, signature: bytes) -> bool:
        """Whether `signature` is this peer's over `domain || data`.  Raises ValueError for a domain outside the closed set."""
        _check_domain(domain)
        if len(signature) != SIGNATURE_BYTES:
            return False
        try:
            if self._key is None:
                self._key = Ed25519PublicKey.from_public_bytes(self._raw)
            self._key.verify(signature, domain + data)
        except (InvalidSignature, ValueError):
            # ValueError: some 32 bytes are no point at all; nobody can sign for them.
            return False
        return True

    def __str__(self) -> str:
        if self._text is None:
            self._text = base58_encode(_ID_PREFIX + self._raw)
        return self._text

    def __repr__(self) -> str:
        return f"<PeerId {self}>"

    def __eq__(self, other: object) -> bool:
        return self._raw == other._raw if isinstance(other, PeerId) else NotImplemented

    def __lt__(self, other: PeerId) -> bool:
        return self._raw < other._raw if isinstance(other, PeerId) else NotImplemented

    def __hash__(self) -> int:
        return self._hash


class Identity:
    """A private key and what may be done with it.  `repr` shows the id; the key leaves only through `save`."""

    __slots__ = ("_key", "_peer_id")

    def __init__(self, seed: bytes) -> None:
        """`seed`: 32 secret bytes (RFC 8032, section 5.1.5)."""
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        public = self._key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
        self._peer_id = PeerId(public)

    @classmethod
    def generate(cls) -> Identity:
        """A new identity from the system's randomness."""
        return cls(os.urandom(32))

    @classmethod
    def load(cls, path: Path | str) -> Identity:
        """The identity in a key file.  Raises KeyFileError: absent, unreadable, readable by others, damaged, not its own half."""
        path = Path(path)
        data = _read_private(path)
        if len(data) != _KEY_FILE_BYTES or not data.startswith(_KEY_PREFIX):
            raise KeyFileError(f"{path} is not a key file of this program (expected {_KEY_FILE_BYTES} bytes of an Ed25519 key)")
        identity = cls(data[4:36])
        if identity.peer_id.raw != data[36:]:
            raise KeyFileError(f"{path} is damaged: its public half does not belong to its private half")
        return identity

    @classmethod
    def load_or_create(cls, path: Path | str) -> Identity:
        """The identity in the file, or a new one written there first.  Of two processes at once both return the same one."""
        path = Path(path)
        if not os.path.lexists(path):
            identity = cls.generate()
            try:
                identity.save(path)
            except FileExistsError:
                pass
            else:
                return identity
        return cls.load(path)

    def save(self, path: Path | str) -> None:
        """Write a new key file: whole or not at all, mode 0600, on disk before the name appears.  Never overwrites.

        Raises FileExistsError when the file is there, KeyFileError when the folder cannot be written.
        """
        path = Path(path)
        scratch = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
        seed = self._key.private_bytes(
            serialization.Encoding.Raw, serialization.PrivateFormat.Raw, serialization.NoEncryption()
        )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.fchmod(descriptor, 0o600)  # whatever the umask
                os.write(descriptor, _KEY_PREFIX + seed + self.peer_id.raw)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            # link, not rename: rename would replace a key that another process wrote in the meantime.
            os.link(scratch, path)
            sync_folder(path.parent)
        except FileExistsError:
            raise
        except OSError as error:
            raise KeyFileError(f"cannot write the key file {path}: {error.strerror or error}; is the folder writable?") from error
        finally:
            scratch.unlink(missing_ok=True)

    @property
    def peer_id(self) -> PeerId:
        return self._peer_id

    def sign(self, domain: bytes, data: bytes) -> bytes:
        """The 64-byte signature over `domain || data`.  Raises ValueError for a domain outside the closed set."""
        _check_domain(domain)
        return self._key.sign(domain + data)

    def __repr__(self) -> str:
        return f"<Identity {self._peer_id}>"

    def __reduce__(self) -> str:
        raise TypeError("an identity is not to be copied or serialised")


def _check_domain(domain: bytes) -> None:
    if domain not in DOMAINS:
        raise ValueError(f"not a signature domain: {printable(domain)!r}")


def _read_private(path: Path) -> bytes:
    """The bytes of a file that only its owner may read; the mode is taken from the open file, so that it cannot be swapped."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # O_NONBLOCK: a FIFO must not hang the start
    except OSError as error:
        if isinstance(error, PermissionError):
            hint = f"run `chmod 600 {path}` as its owner, or start the node as the user that owns it"
        elif isinstance(error, FileNotFoundError):
            hint = "check the path, or let the node create one"
        else:
            hint = "check the path"
        raise KeyFileError(f"cannot read the key file {path}: {error.strerror or error}; {hint}") from error
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise KeyFileError(f"{path} is not a file")
        if stat.S_IMODE(mode) & 0o077:
            raise KeyFileError(
                f"the key file {path} can be used by others (mode {stat.S_IMODE(mode):04o}): run `chmod 600 {path}`; "
                "if others may have read it, make a new identity"
            )
        return os.read(descriptor, _KEY_FILE_BYTES + 1)
    except OSError as error:
        raise KeyFileError(f"cannot read the key file {path}: {error.strerror or error}") from error
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Make a new name in a folder survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def lock_data_folder(path: Path | str) -> Iterator[None]:
    """Hold a data folder for this process alone; creates it (mode 0700) when absent.

    A second holder gets KeyFileError (DUPLICATE_IDENTITY) at once.  The kernel drops the lock when the process ends, however it
    ends, so nothing has to be cleaned after a kill; the lock file itself stays and means nothing.
    """
    path = Path(path)
    lock = path / "lock"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise KeyFileError(f"cannot use the data folder {path}: {error.strerror or error}; is it writable?") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = printable(os.pread(descriptor, 20, 0).strip()) or "unknown"
            raise KeyFileError(
                f"the data folder {path} is in use by another process (pid {holder}): stop it, or give this node another",
                code=Code.DUPLICATE_IDENTITY,
            ) from error
        except OSError as error:
            raise KeyFileError(f"cannot lock the data folder {path}: {error.strerror or error}") from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)
