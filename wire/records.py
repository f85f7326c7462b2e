"""Records: one frame, one header in clear, one AEAD call, no copy.

    u32 ct_len (tag included) | u32 stream | u8 type | u8 flags | u16 zero || ciphertext || tag(16)        big-endian

The 12 header bytes travel in clear and are, whole, the associated data of the AEAD.  An observer sees stream numbers and types
(sizes and times he sees anyway); in exchange a hostile length is refused before any crypto and before a buffer exists for it,
and the body can be decrypted straight into the place where it will be used.

What goes wrong, and the rules that follow:
- Until the tag verifies, a header is a claim.  It may only choose a destination, never change a state.
- `decrypt_into` writes its output *before* it finds the tag bad.  A destination must therefore never overlap bytes that were
  verified before, and after a bad tag its content is undefined.  The connection is dead; this `Opener` refuses everything after.
- Nonces are counters, one per direction, never sent: a record lost, doubled, swapped or inserted makes the next tag fail.
- AES-GCM loses its margin with volume under one key.  The sender changes its key at `record_rekey_*` (2^20 records or 64 GiB)
  and says so by REKEY, the last record under the old key; the counter runs on, so no (key, nonce) pair can repeat whatever both
  sides think.  The receiver ends the connection at `record_refuse_*` (2^22, 256 GiB: forgery probability ~2^-60 with 256 KiB
  records, by the bound of draft-irtf-cfrg-aead-limits); the sender refuses its own caller there, too.
- At 64 KiB a record, one microsecond of Python here is 1 % of 600 MB/s.  Hence no objects per record: `parse_header` returns a
  plain tuple after one table look-up, and each direction binds its AEAD's method and nonce packer once per key.

The sizes of frames (`frame_rules`) are the wire's frame table as data.  A frame may be legal here and still be a violation in
the session, which knows streams and states.
"""

import struct
from collections.abc import Callable
from enum import IntEnum

from cryptography.exceptions import InvalidTag

from wire.errors import Code, LocalProtocolError, RemoteProtocolError
from wire.limits import DEFAULT_LIMITS, Limits
from wire.noise import SUITES, TAG_BYTES, Cipher, rekeyed

Buffer = bytes | bytearray | memoryview
_Crypt = Callable[[bytes, Buffer, Buffer, Buffer], int]  # (nonce, data, associated data, output) -> bytes written

HEADER = struct.Struct(">IIBBH")
HEADER_BYTES = HEADER.size
RECORD_OVERHEAD_BYTES = HEADER_BYTES + TAG_BYTES

FLAG_FIN = 0x01
IGNORED_TYPES = 0x80  # this and above: read, authenticated and dropped, so that later versions may add frames


class FrameType(IntEnum):
    HELLO = 0x01
    PING = 0x02
    PONG = 0x03
    CREDIT = 0x04
    GOAWAY = 0x05
    REKEY = 0x06
    OPEN = 0x10
    ACCEPT = 0x11
    DATA = 0x12
    RESET = 0x13
    CHUNK = 0x14


Header = tuple[int, int, int, int]  # (ct_len, stream, type, flags)

# (least body, most body, forbidden flag bits, least stream, most stream), by type; bodies are plaintext bytes.
Rule = tuple[int, int, int, int, int]

_CONNECTION = (0, 0)
_STREAM = (1, 2**32 - 1)
_ANY = (0, 2**32 - 1)
_NO_FLAGS = 0xFF
_NEVER: Rule = (1, 0, 0, 0, 0)  # least above most: no size is right


def frame_rules(limits: Limits) -> tuple[Rule, ...]:
    """Rules of all 256 frame types.  Body sizes are the wire's table; where it says msgpack, the most its fields can take."""
    detail = limits.detail_max_bytes
    # [kind, protocol, class, credit, meta]: 64 bytes cover the msgpack heads and the three numbers.
    open_most = limits.protocol_name_max_bytes + limits.open_meta_max_bytes + 64
    rules: list[Rule] = [_NEVER] * IGNORED_TYPES
    rules += [(0, limits.record_plaintext_max_bytes, 0, *_ANY)] * (256 - IGNORED_TYPES)
    rules[FrameType.HELLO] = (1, limits.hello_frame_max_bytes, _NO_FLAGS, *_CONNECTION)
    rules[FrameType.PING] = (16, 16, _NO_FLAGS, *_CONNECTION)  # u64 token, i64 wall_us
    rules[FrameType.PONG] = (20, 20, _NO_FLAGS, *_CONNECTION)  # u64 token, u32 hold_us, i64 wall_us
    rules[FrameType.CREDIT] = (8, 8, _NO_FLAGS, *_ANY)  # u64 absolute limit
    rules[FrameType.GOAWAY] = (10, 10 + detail, _NO_FLAGS, *_CONNECTION)  # u16 code, u32 last_stream, u32 retry_ms, detail
    rules[FrameType.REKEY] = (0, 0, _NO_FLAGS, *_CONNECTION)
    rules[FrameType.OPEN] = (1, open_most, _NO_FLAGS, *_STREAM)
    rules[FrameType.ACCEPT] = (1, 16, _NO_FLAGS, *_STREAM)  # [credit]
    rules[FrameType.DATA] = (0, limits.record_plaintext_max_bytes, _NO_FLAGS ^ FLAG_FIN, *_STREAM)
    rules[FrameType.RESET] = (2, 2 + detail, _NO_FLAGS, *_STREAM)  # u16 code, detail
    rules[FrameType.CHUNK] = (16, 16, _NO_FLAGS, *_STREAM)  # u32 slot, index, length, flags
    return tuple(rules)


DEFAULT_RULES = frame_rules(DEFAULT_LIMITS)


def parse_header(header: Buffer, rules: tuple[Rule, ...] = DEFAULT_RULES) -> Header:
    """(ct_len, stream, type, flags) of 12 bytes.  What no frame may say raises `RemoteProtocolError(PROTOCOL or TOO_LARGE)`."""
    size, stream, kind, flags, reserved = HEADER.unpack(header)
    least, most, forbidden, stream_least, stream_most = rules[kind]
    body = size - TAG_BYTES
    if (
        reserved
        or not least <= body <= most
        or flags & forbidden
        or not stream_least <= stream <= stream_most
        or (body == 0 and kind == FrameType.DATA and not flags)
    ):
        raise _violation(size, stream, kind, flags, reserved, rules)
    return size, stream, kind, flags


def _violation(size: int, stream: int, kind: int, flags: int, reserved: int, rules: tuple[Rule, ...]) -> RemoteProtocolError:
    least, most, forbidden, stream_least, stream_most = rules[kind]
    if least > most:
        return RemoteProtocolError(Code.PROTOCOL, f"unknown frame type {kind:#04x}")
    name = FrameType(kind).name if kind < IGNORED_TYPES else f"type {kind:#04x}"
    if reserved or flags & forbidden:
        return RemoteProtocolError(Code.PROTOCOL, f"reserved bits set in a {name} header")
    body = size - TAG_BYTES
    if body > most:
        return RemoteProtocolError(Code.TOO_LARGE, f"{name} body of {body} bytes, at most {most} are allowed")
    if body < least:
        return RemoteProtocolError(Code.PROTOCOL, f"{name} record of {size} bytes is too short")
    if not stream_least <= stream <= stream_most:
        return RemoteProtocolError(Code.PROTOCOL, f"{name} on stream {stream}")
    return RemoteProtocolError(Code.PROTOCOL, "empty DATA without FIN")


class Sealer:
    """The sending direction of one connection."""

    __slots__ = (
        "_body_most",
        "_bytes",
        "_cipher",
        "_counter",
        "_encrypt",
        "_key",
        "_key_since",
        "_limits",
        "_nonce",
        "_refuse_at",
        "_refuse_bytes",
    )

    _encrypt: _Crypt

    def __init__(self, cipher: Cipher, key: bytes, limits: Limits = DEFAULT_LIMITS) -> None:
        self._cipher = cipher
        self._limits = limits
        self._nonce: Callable[[int], bytes] = SUITES[cipher].nonce.pack
        self._body_most = limits.record_plaintext_max_bytes
        self._refuse_bytes = limits.record_refuse_bytes
        self._counter = self._key_since = self._refuse_at = self._bytes = 0
        self._take_key(key)

    @property
    def records(self) -> int:
        """Records sealed so far: the counter, which no rekey resets."""
        return self._counter

    @property
    def needs_rekey(self) -> bool:
        """True from `record_rekey_records` or `record_rekey_bytes` under one key: seal a REKEY frame next, then call `rekey`."""
        limits = self._limits
        return self._counter - self._key_since >= limits.record_rekey_records or self._bytes >= limits.record_rekey_bytes

    def seal_into(self, stream: int, kind: int, flags: int, plaintext: Buffer, out: memoryview) -> int:
        """Write one whole record to the front of `out`; returns its length, len(plaintext) + 28.

        `plaintext` and `out` are contiguous bytes (format "B") and must not overlap.  Too small an `out`, too large a body or a
        number that does not fit raises `LocalProtocolError`; the counter has not moved then, and `out` holds nothing of value.
        """
        body = len(plaintext)
        counter = self._counter
        if body > self._body_most or counter >= self._refuse_at or self._bytes >= self._refuse_bytes:
            raise self._misuse(body)
        end = HEADER_BYTES + TAG_BYTES + body
        try:
            HEADER.pack_into(out, 0, body + TAG_BYTES, stream, kind, flags, 0)
            self._encrypt(self._nonce(counter), plaintext, out[:HEADER_BYTES], out[HEADER_BYTES:end])
        except (ValueError, struct.error) as error:
            raise LocalProtocolError(f"record cannot be sealed: {error}") from error
        self._counter = counter + 1
        self._bytes += body
        return end

    def rekey(self) -> None:
        """Go on under the next key.  Call it directly after the REKEY record was sealed."""
        self._take_key(rekeyed(self._cipher, self._key))

    def _take_key(self, key: bytes) -> None:
        self._key = key
        self._encrypt = SUITES[self._cipher].aead(key).encrypt_into
        self._key_since = self._counter
        self._refuse_at = self._counter + self._limits.record_refuse_records
        self._bytes = 0

    def _misuse(self, body: int) -> LocalProtocolError:
        if body > self._body_most:
            return LocalProtocolError(f"record body of {body} bytes, at most {self._body_most} are allowed", code=Code.TOO_LARGE)
        return LocalProtocolError("this key has sealed all it may: rekey was due long ago")


class Opener:
    """The receiving direction of one connection."""

    __slots__ = ("_bytes", "_cipher", "_counter", "_decrypt", "_key", "_limits", "_nonce", "_refuse_at", "_refuse_bytes")

    _decrypt: _Crypt

    def __init__(self, cipher: Cipher, key: bytes, limits: Limits = DEFAULT_LIMITS) -> None:
        self._cipher = cipher
        self._limits = limits
        self._nonce: Callable[[int], bytes] = SUITES[cipher].nonce.pack
        self._refuse_bytes = limits.record_refuse_bytes
        self._counter = self._refuse_at = self._bytes = 0
        self._take_key(key)

    @property
    def records(self) -> int:
        """Records opened so far."""
        return self._counter

    def open_into(self, header: Buffer, body: Buffer, destination: memoryview) -> None:
        """Decrypt `body` (ciphertext and tag) into `destination`, which is exactly 16 bytes shorter.

        Returns only if the tag verified over header and body.  A bad tag, or more under one key than any honest sender sends,
        raises `RemoteProtocolError`: `destination` is undefined and every later call raises the same.  A destination of the
        wrong size raises `LocalProtocolError` and changes nothing.
        """
        counter = self._counter
        if counter >= self._refuse_at or self._bytes >= self._refuse_bytes:
            raise RemoteProtocolError(Code.PROTOCOL, "more records or bytes than one key may seal: the peer did not rekey")
        try:
            self._decrypt(self._nonce(counter), body, header, destination)
        except InvalidTag:
            self._decrypt = _always_bad
            raise RemoteProtocolError(Code.AUTH, f"tag of record {counter} does not verify") from None
        except ValueError as error:
            raise LocalProtocolError(f"record cannot be opened: {error}") from error
        self._counter = counter + 1
        self._bytes += len(destination)

    def rekey(self) -> None:
        """Go on under the next key.  Call it directly after a REKEY record was opened."""
        self._take_key(rekeyed(self._cipher, self._key))

    def _take_key(self, key: bytes) -> None:
        self._key = key
        self._decrypt = SUITES[self._cipher].aead(key).decrypt_into
        self._refuse_at = self._counter + self._limits.record_refuse_records
        self._bytes = 0


def _always_bad(nonce: bytes, data: Buffer, associated_data: Buffer, buf: Buffer) -> int:
    raise InvalidTag
