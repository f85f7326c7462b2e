"""The hello: what two nodes say in clear before the first key exists.

    "PLW1" || u16 length || msgpack [versions, ciphers, run_tag, purpose, path, context]          at most 512 bytes
    "PLW1" || u16 length || msgpack [code, retry_ms, versions, run_tag]    a refusal instead of an answer; the last two are optional

What for.  Noise cannot negotiate: both sides must know the suite before the first mixed byte.  The hello settles version and
cipher, and lets two nodes of different runs part before any key agreement is paid for.  Both hellos, magic and length included,
become the Noise prologue, so whoever changes a byte on the path ends the handshake; only a refusal cannot be protected, since
nothing follows it.  It is therefore reported and otherwise forgotten.

What goes wrong:
- A foreign protocol knocks (HTTP, TLS, a scanner).  `split_hello` judges every byte as it comes, so the connection is closed at
  the first impossible byte and nothing about us is given away: no bytes are ever answered to what is not a hello.
- A length is believed.  Nothing above `hello_max_bytes` is waited for.
- The cipher of the faster side is forced on a machine without AES instructions, which then crawls.  Each side therefore orders
  both ciphers by what it measured; AES is taken only if both put it first.
- A later version adds items: surplus trailing items are ignored, unknown ciphers and versions are skipped.

`run_tag` is the first 8 bytes of the run id, zeros for "none or any" (a node that has no manifest yet, a seed for all runs).  A
tag is a hint that may lie; the run id itself is compared after authentication (handshake.py).

Source: the project's wire specification, section "Hello and handshake".
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from wire.errors import Code, RemoteProtocolError, WireError, error_for, printable
from wire.limits import DEFAULT_LIMITS, Limits
from wire.noise import SUITES, Cipher
from wire.unpacking import pack, unpack

MAGIC = b"PLW1"
_HEAD = struct.Struct(">4sH")
HEAD_BYTES = _HEAD.size

RUN_BYTES = 32  # SHA-256 of the manifest
RUN_TAG_BYTES = 8
NO_RUN_TAG = bytes(RUN_TAG_BYTES)

VERSIONS = (1,)  # what this code speaks; the highest common one is taken
RETRY_MAX_MS = 2**32 - 1

# The probe: 16 KiB is the smallest record of a slow line, and at 0.5 ms a cipher even software AES does several.
PROBE_BYTES = 16 * 1024
PROBE_SECONDS_EACH = 0.0005
AES_LEAD = 1.5  # below this the faster cipher is a coin toss between two runs of the probe, and ChaCha needs no hardware


class Purpose(StrEnum):
    CONTROL = "control"
    BULK = "bulk"


class PathKind(StrEnum):
    """How the bytes travel, as each side sees it."""

    DIRECT = "direct"
    CIRCUIT = "circuit"
    PUNCH = "punch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """What one side offers, or, with one version and one cipher, the responder's choice.

    `context`: <= 32 bytes, empty unless `path` is punch, then the nonce of the punch.
    """

    ciphers: tuple[Cipher, ...]
    versions: tuple[int, ...] = VERSIONS
    run_tag: bytes = NO_RUN_TAG
    purpose: Purpose = Purpose.CONTROL
    path: PathKind = PathKind.DIRECT
    context: bytes = b""

    def encode(self) -> bytes:
        """The whole hello, magic and length included."""
        return frame_hello(
            pack(
                [list(self.versions), [*map(str, self.ciphers)], self.run_tag, str(self.purpose), str(self.path), self.context]
            )
        )


@dataclass(frozen=True, slots=True)
class Refusal:
    """`[code, retry_ms]`: the responder will not go on.  In clear and unproven: believe it only for this attempt.

    For VERSION and RUN_MISMATCH two more items say what the responder is, so that the one complaint can name both sides
    (FIND-16): its versions and its run tag.  They decide nothing and are no part of what is compared.
    """

    code: Code
    retry_ms: int = 0
    versions: tuple[int, ...] = field(default=(), compare=False)
    run_tag: bytes = field(default=b"", compare=False)

    def encode(self) -> bytes:
        said: list[object] = [list(self.versions), self.run_tag] if self.versions or self.run_tag else []
        return frame_hello(pack([int(self.code), self.retry_ms, *said]))

    def against(self, own: Hello) -> str:
        """Both sides in words: what the refusal says of its sender, and what we said."""
        if self.code is Code.VERSION and self.versions:
            return f"it speaks versions {list(self.versions)}, we {list(own.versions)}"
        if self.code is Code.RUN_MISMATCH and self.run_tag:
            return f"its run is {self.run_tag.hex()}.., ours {own.run_tag.hex()}.."
        return "the peer refused our hello"


def run_tag(run: bytes | None) -> bytes:
    """The tag of a run id; zeros for None."""
    return NO_RUN_TAG if run is None else run[:RUN_TAG_BYTES]


def frame_hello(body: bytes) -> bytes:
    return _HEAD.pack(MAGIC, len(body)) + body


def split_hello(buffer: bytes | bytearray, limits: Limits = DEFAULT_LIMITS) -> int | None:
    """Length of the hello at the front of `buffer`, None while it is incomplete and still possible.

    Raises `RemoteProtocolError` at the first byte that no hello has at its place.
    """
    start = bytes(buffer[: len(MAGIC)])
    if start != MAGIC[: len(start)]:
        raise RemoteProtocolError(Code.PROTOCOL, b"not this protocol: begins with " + bytes(buffer[:16]))
    # The high byte of the length is judged alone: two bytes later would be one too late.
    if len(buffer) == HEAD_BYTES - 1 and buffer[4] << 8 > limits.hello_max_bytes - HEAD_BYTES:
        raise _too_long(buffer[4] << 8, limits)
    if len(buffer) < HEAD_BYTES:
        return None
    length = _HEAD.unpack_from(buffer)[1]
    if length > limits.hello_max_bytes - HEAD_BYTES:
        raise _too_long(length, limits)
    return HEAD_BYTES + length if len(buffer) >= HEAD_BYTES + length else None


def _too_long(length: int, limits: Limits) -> WireError:
    return RemoteProtocolError(Code.TOO_LARGE, f"hello of {length} bytes or more, at most {limits.hello_max_bytes} are allowed")


def decode_hello(framed: bytes, limits: Limits = DEFAULT_LIMITS) -> Hello | Refusal:
    """One whole hello as `split_hello` measured it.  Raises `RemoteProtocolError`."""
    items = unpack(framed[HEAD_BYTES:], limits.hello_max_bytes)
    if not isinstance(items, tuple) or len(items) < 2:
        raise _malformed("not an array of items")
    if _is_number(items[0], 0xFFFF):
        if not _is_number(items[1], RETRY_MAX_MS):
            raise _malformed("retry_ms of a refusal")
        code = error_for(items[0]).code
        if code in (Code.OK, Code.SELF):
            code = Code.INTERNAL  # nobody can refuse with these: SELF is what our own key has proven, and is never tried again
        return Refusal(code, items[1], *_refuser(items[2:4]))
    if len(items) < 6:
        raise _malformed(f"{len(items)} items, 6 are needed")
    versions, ciphers, tag, purpose, path, context = items[:6]
    if not isinstance(versions, tuple) or not versions or not all(_is_number(version, 0xFFFF) for version in versions):
        raise _malformed("versions")
    if not isinstance(ciphers, tuple) or not all(isinstance(name, str) for name in ciphers):
        raise _malformed("ciphers")
    if not isinstance(tag, bytes) or len(tag) != RUN_TAG_BYTES:
        raise _malformed("run_tag")
    known_path = _member(PathKind, path, "path")
    if not isinstance(context, bytes) or len(context) > limits.hello_context_max_bytes:
        raise _malformed("context")
    if context and known_path is not PathKind.PUNCH:
        raise _malformed("a context without a punch")
    known = tuple(dict.fromkeys(Cipher(name) for name in ciphers if name in _CIPHER_NAMES))  # in order, each once
    return Hello(
        versions=versions,
        ciphers=known,
        run_tag=tag,
        purpose=_member(Purpose, purpose, "purpose"),
        path=known_path,
        context=context,
    )


_CIPHER_NAMES = frozenset(map(str, Cipher))

_Word = TypeVar("_Word", Purpose, PathKind)


def _member(words: type[_Word], value: object, what: str) -> _Word:
    for word in words:
        if word == value:
            return word
    raise _malformed(f"{what} {printable(repr(value))}")


def _is_number(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def _malformed(what: str) -> RemoteProtocolError:
    return RemoteProtocolError(Code.PROTOCOL, f"malformed hello: {what}")


def _refuser(items: tuple[object, ...]) -> tuple[tuple[int, ...], bytes]:
    """(versions, run tag) behind a refusal; nothing for an older peer, or for what is not in order."""
    match items:
        case (tuple(versions), bytes(tag)) if len(versions) <= 16 and all(_is_number(item, 0xFFFF) for item in versions):
            return versions, tag if len(tag) == RUN_TAG_BYTES else b""
    return (), b""


def choose(offer: Hello, own: Hello) -> Hello | Refusal:
    """The responder's answer to an offer: a pure function of both hellos.  `own.path` is how the connection really came."""
    common = set(offer.versions) & set(own.versions)
    cipher = choose_cipher(offer.ciphers, own.ciphers)
    if not common or cipher is None:
        return Refusal(Code.VERSION, versions=own.versions, run_tag=own.run_tag)
    if not tags_agree(offer.run_tag, own.run_tag):
        return Refusal(Code.RUN_MISMATCH, versions=own.versions, run_tag=own.run_tag)
    if offer.path is not own.path:
        # A circuit that calls itself direct would spare itself the relay's rules for what may travel over it.
        return Refusal(Code.PROTOCOL)
    return Hello(
        versions=(max(common),),
        ciphers=(cipher,),
        run_tag=own.run_tag,
        purpose=offer.purpose,
        path=own.path,
        context=own.context,
    )


def check_answer(offer: Hello, answer: Hello) -> None:
    """The initiator's look at the answer: it must be one that `choose` could have given.  Raises `WireError`."""
    if len(answer.versions) != 1 or answer.versions[0] not in offer.versions:
        raise error_for(Code.VERSION, detail=f"the peer chose version {printable(str(answer.versions))} of {offer.versions}")
    forced = answer.ciphers == (Cipher.AES256GCM,) and offer.ciphers[0] is not Cipher.AES256GCM
    if len(answer.ciphers) != 1 or answer.ciphers[0] not in offer.ciphers or forced:
        raise RemoteProtocolError(Code.PROTOCOL, f"the peer chose ciphers {[*map(str, answer.ciphers)]} against our order")
    if not tags_agree(answer.run_tag, offer.run_tag):
        raise error_for(Code.RUN_MISMATCH, detail=f"the peer's run is {answer.run_tag.hex()}.., ours {offer.run_tag.hex()}..")
    if answer.purpose is not offer.purpose or answer.path is not offer.path:
        raise RemoteProtocolError(Code.PROTOCOL, f"answer {answer.purpose}/{answer.path} to {offer.purpose}/{offer.path}")


def tags_agree(one: bytes, other: bytes) -> bool:
    return one == other or NO_RUN_TAG in (one, other)


def choose_cipher(one: Sequence[Cipher], other: Sequence[Cipher]) -> Cipher | None:
    """AES only if both put it first, else ChaCha; None if one side does not know ChaCha."""
    if one[:1] == other[:1] and Cipher.AES256GCM in one[:1]:
        return Cipher.AES256GCM
    return Cipher.CHACHA20POLY1305 if Cipher.CHACHA20POLY1305 in one and Cipher.CHACHA20POLY1305 in other else None


def preferred_ciphers(clock: Callable[[], float]) -> tuple[Cipher, Cipher]:
    """Both ciphers in the order this machine likes them, after a probe of ~1 ms.  `clock`: monotonic seconds.

    The fastest single run of each counts: whatever disturbs a run only makes it slower.
    """
    plaintext = bytes(PROBE_BYTES)
    output = bytearray(PROBE_BYTES + 16)
    fastest: dict[Cipher, float] = {}
    for cipher, suite in SUITES.items():
        encrypt_into = suite.aead(bytes(32)).encrypt_into
        begin = now = clock()
        best = float("inf")
        number = 0
        while number < 2 or now - begin < PROBE_SECONDS_EACH:  # two at least: the first also loads the code
            before = now
            encrypt_into(suite.nonce.pack(number), plaintext, b"", output)
            now = clock()
            best = min(best, now - before)
            number += 1
        fastest[cipher] = best
    if fastest[Cipher.AES256GCM] * AES_LEAD <= fastest[Cipher.CHACHA20POLY1305]:
        return (Cipher.AES256GCM, Cipher.CHACHA20POLY1305)
    return (Cipher.CHACHA20POLY1305, Cipher.AES256GCM)
