"""The handshake of a connection: hello, Noise XX, identities; bytes in, bytes out, at the end the secrets.

    initiator -> hello, message 1          one segment
    responder -> hello, message 2          message 2 and 3 carry an identity payload
    initiator -> message 3, records ...    the first records ride behind it: 1 RTT

Each Noise message is `u16 length || bytes`, at most 4 KiB.  The identity payload is msgpack
`[1, identity_key(32), signature(64), run(32 or empty), ticket(16 or empty)]`; surplus trailing items are ignored.

Why the signature covers `"plw/handshake/1" || 00 || role || run(32, zeros if empty) || h`.  libp2p signs only the static key, so
a leaked static key with its signature is an identity for ever.  `h`, the transcript hash just before the payload is encrypted,
holds both hellos, both ephemeral keys and the signer's static key; the role keeps a reflected payload from being one's own.  The
static X25519 keys live for one connection and are never stored.

What goes wrong, and where it ends:
- A stranger probes.  Whatever is wrong with his bytes, he sees the same thing: the connection closes, without a byte of reason.
  The reason is in the exception, which stays here.  The one answer with content is the refusal in a hello (hello.py), given to a
  well-formed hello only.
- A stranger fills memory.  Nothing is kept beyond one message; `room` says how many bytes may be read next, so that what the
  link read, what waits here and the copies that parsing makes stay together below `preauth_max_bytes`.
- The wrong node answers at an address.  The initiator knows before it has said who it is: message 3 is never made.
- Bytes come before their turn (behind message 1 or 2 the other side has nothing to say).  Refused: they would be taken for the
  first bytes of something that is authenticated later.
- Our own address was dialled.  The peer's id is ours: SELF.

The order of the steps is the table `STEPS`.  Source of the scheme: the project's wire specification, section "Hello and
handshake"; checked in tests/wire/test_handshake.py.
"""

import hmac
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from wire.errors import Code, LocalProtocolError, PeerIdMismatch, RemoteProtocolError, WireError, error_for
from wire.hello import NO_RUN_TAG, RUN_BYTES, Hello, Refusal, check_answer, choose, decode_hello, run_tag, split_hello
from wire.identity import HANDSHAKE, SIGNATURE_BYTES, Identity, PeerId
from wire.limits import DEFAULT_LIMITS, Limits
from wire.noise import KEY_BYTES, MESSAGE_PREFIX_BYTES, TAG_BYTES, Cipher, HandshakeState, public_key
from wire.unpacking import pack, unpack

PAYLOAD_VERSION = 1
TICKET_BYTES = 16
_LENGTH = struct.Struct(">H")


@dataclass(frozen=True, slots=True)
class Secrets:
    """What a finished handshake leaves.  Keys and exporter are 32 bytes and never shown.

    `h` is the public channel binding, equal on both sides.  `peer_run` is the peer's run id, None if it knows none.  `hello` is
    what the peer said: the offer for the responder, the choice for the initiator.  `version` is the one agreed on.
    """

    send_key: bytes = field(repr=False)
    recv_key: bytes = field(repr=False)
    cipher: Cipher
    h: bytes
    exporter: bytes = field(repr=False)
    peer_id: PeerId
    peer_run: bytes | None
    hello: Hello
    version: int
    ticket: bytes = field(repr=False, default=b"")  # what the peer showed, 16 bytes or none

    def export(self, label: bytes) -> bytes:
        """32 bytes that only the two ends know, one value a label: HMAC-SHA256(exporter, label || h)."""
        return hmac.digest(self.exporter, label + self.h, "sha256")


class Awaited(Enum):
    """What is read next."""

    HELLO = "hello"
    MESSAGE_1 = "handshake message 1"
    MESSAGE_2 = "handshake message 2"
    MESSAGE_3 = "handshake message 3"
    NOTHING = "nothing"


# Least length of each message (prefix and, from message 2 on, the payload's tag).  Message 1 has no payload: its length is exact.
_LEAST = {
    Awaited.MESSAGE_1: MESSAGE_PREFIX_BYTES[0],
    Awaited.MESSAGE_2: MESSAGE_PREFIX_BYTES[1] + TAG_BYTES,
    Awaited.MESSAGE_3: MESSAGE_PREFIX_BYTES[2] + TAG_BYTES,
}


@dataclass(frozen=True, slots=True)
class _Talk:
    """What stands once both hellos are known."""

    noise: HandshakeState
    peer_hello: Hello
    agreed: Hello  # the responder's choice: one version, one cipher


class Handshake:
    """One side of one handshake, sans-IO.

    Loop: write `send()` out when it is not empty, read at most `room` bytes, give them to `receive`, until `done`; then take
    `result` and `rest`.  When `receive` raises `WireError`, write `send()` once more (a refusal, or nothing) and close.

    `hello`: the initiator's offer, or what the responder would agree to (its `path` is how the connection came; its `purpose` is
    not looked at).  `expected`: the dialled id, None for "whoever it is".  `own_run`: 32 bytes or None.  `admit`: the responder's
    look at an acceptable offer, e.g. for a full house; a `Refusal` ends the handshake.  `ticket`: 16 bytes or none, shown to the
    peer (tickets.py).  `rng(n)`: n random bytes.
    """

    def __init__(
        self,
        initiator: bool,
        identity: Identity,
        hello: Hello,
        limits: Limits = DEFAULT_LIMITS,
        *,
        expected: PeerId | None = None,
        own_run: bytes | None = None,
        admit: Callable[[Hello], Refusal | None] | None = None,
        ticket: bytes = b"",
        rng: Callable[[int], bytes] = os.urandom,
    ) -> None:
        if own_run is not None and len(own_run) != RUN_BYTES:
            raise LocalProtocolError(f"a run id has {RUN_BYTES} bytes, not {len(own_run)}")
        if hello.run_tag != run_tag(own_run):
            raise LocalProtocolError("the hello's run_tag is not that of own_run")
        encoded = hello.encode()
        if len(encoded) > limits.hello_max_bytes or not hello.ciphers or not hello.versions:
            raise LocalProtocolError("a hello needs versions and ciphers, and has at most hello_max_bytes")
        self._initiator = initiator
        self._identity = identity
        self._own = hello
        self._limits = limits
        self._expected = expected
        self._run = own_run
        self._admit = admit
        self._ticket = ticket
        self._ephemeral = rng(KEY_BYTES)
        self._static = rng(KEY_BYTES)
        self._awaited = Awaited.HELLO
        self._failed = False
        self._buffer = bytearray()
        self._out = b""
        self._refusal = b""
        self._encoded = encoded
        self._talk: _Talk | None = None
        self._secrets: Secrets | None = None
        # One whole unit and no more: with what the link has just read (as much again) and the copies of parsing, 16 KiB suffice.
        self._capacity = max(limits.hello_max_bytes, limits.handshake_message_max_bytes + _LENGTH.size)
        if initiator:
            # Message 1 holds no ciphertext, so it goes out before the cipher and the prologue are known; `_read_answer` makes it
            # again, inside the real state.
            self._out = encoded + _LENGTH.pack(KEY_BYTES) + public_key(self._ephemeral)

    @property
    def done(self) -> bool:
        """Both sides are proven.  The initiator is done with message 3 still in `send()`."""
        return self._secrets is not None

    @property
    def result(self) -> Secrets:
        if self._secrets is None:
            raise LocalProtocolError("the handshake is not done")
        return self._secrets

    @property
    def room(self) -> int:
        """The most bytes that `receive` takes now; above zero until `done`."""
        return self._capacity - len(self._buffer)

    @property
    def rest(self) -> bytes:
        """Bytes behind message 3, for the responder's session: the first records of the initiator."""
        return bytes(self._buffer) if self.done else b""

    def send(self) -> bytes:
        """What is to be written now; b"" when there is nothing.  Each byte is returned once."""
        out, self._out = self._out, b""
        return out

    def receive(self, data: bytes | bytearray | memoryview) -> None:
        """Take bytes of the peer, in any pieces.  Raises `WireError` with the cause; the handshake is over then."""
        if self._failed or self.done:
            raise LocalProtocolError("the handshake is over")
        if len(data) > self.room:
            raise LocalProtocolError(f"{len(data)} bytes given, there is room for {self.room}")
        self._buffer += data
        try:
            while not self.done and (unit := self._next_unit()) is not None:
                step, following = STEPS[self._initiator, self._awaited]
                step(self, unit)
                self._awaited = following
                self._check_turn()
        except WireError:
            self._fail()
            raise

    # Cutting

    def _next_unit(self) -> bytes | None:
        """The next whole hello (framed) or Noise message (bare), None while it is incomplete."""
        if self._awaited is Awaited.HELLO:
            end = split_hello(self._buffer, self._limits)
            return None if end is None else self._cut(0, end)
        if len(self._buffer) < _LENGTH.size:
            return None
        length = _LENGTH.unpack_from(self._buffer)[0]
        least = _LEAST[self._awaited]
        most = least if self._awaited is Awaited.MESSAGE_1 else self._limits.handshake_message_max_bytes
        if not least <= length <= most:
            raise RemoteProtocolError(Code.AUTH, f"{self._awaited.value} of {length} bytes, {least} to {most} are possible")
        end = _LENGTH.size + length
        return None if len(self._buffer) < end else self._cut(_LENGTH.size, end)

    def _cut(self, begin: int, end: int) -> bytes:
        with memoryview(self._buffer) as view:  # a slice of the bytearray would be a second copy
            unit = bytes(view[begin:end])
        del self._buffer[:end]
        return unit

    def _check_turn(self) -> None:
        ours = self._awaited is Awaited.MESSAGE_3 or (self._initiator and self._awaited is Awaited.NOTHING)
        if ours and self._buffer:
            raise RemoteProtocolError(Code.AUTH, f"{len(self._buffer)} bytes before our answer to the last message")

    def _fail(self) -> None:
        """One kind of close: nothing that was not yet sent goes out, except a refusal."""
        self._failed = True
        self._secrets = None  # bytes out of turn behind message 2 are found when the keys are there already
        self._drop_keys()
        self._buffer.clear()
        self._out = self._refusal

    def _drop_keys(self) -> None:
        self._talk = None
        self._static = self._ephemeral = b""

    # Steps

    def _read_offer(self, framed: bytes) -> None:
        offer = decode_hello(framed, self._limits)
        if isinstance(offer, Refusal):
            raise RemoteProtocolError(Code.PROTOCOL, "a refusal where an offer belongs")
        answer = choose(offer, self._own)
        if isinstance(answer, Hello) and self._admit is not None:
            answer = self._admit(offer) or answer
        if isinstance(answer, Refusal):
            self._refusal = answer.encode()
            raise error_for(answer.code, detail=f"refused the peer's hello: {_offered(offer)}, ours: {_offered(self._own)}")
        self._out = answer.encode()
        self._talk = _Talk(self._state(answer, framed + self._out), offer, answer)

    def _read_answer(self, framed: bytes) -> None:
        answer = decode_hello(framed, self._limits)
        if isinstance(answer, Refusal):
            wait = answer.retry_ms / 1000 if answer.retry_ms else None
            raise error_for(answer.code, detail=answer.against(self._own), retry_after=wait)
        check_answer(self._own, answer)
        self._talk = _Talk(self._state(answer, self._encoded + framed), answer, answer)
        self._talk.noise.write(_empty)  # message 1, as it was sent with the hello

    def _read_message_1(self, message: bytes) -> None:
        talk = self._talking()
        talk.noise.read(message)
        self._write(talk, b"R")

    def _read_message_2(self, message: bytes) -> None:
        talk = self._talking()
        proven = self._prove(talk, message, b"R")
        self._write(talk, b"I")
        self._finish(talk, *proven)

    def _read_message_3(self, message: bytes) -> None:
        talk = self._talking()
        self._finish(talk, *self._prove(talk, message, b"I"))

    # Identities

    def _write(self, talk: _Talk, role: bytes) -> None:
        message = talk.noise.write(lambda h: identity_payload(self._identity, role, self._run, h, self._ticket))
        self._out += _LENGTH.pack(len(message)) + message

    def _prove(self, talk: _Talk, message: bytes, role: bytes) -> tuple[PeerId, bytes | None, bytes]:
        received = talk.noise.read(message)
        peer_id, peer_run, ticket = read_identity_payload(received.payload, role, received.h, self._limits)
        if peer_id == self._identity.peer_id:
            raise error_for(Code.SELF, detail="the peer proved our own id")
        if self._expected is not None and peer_id != self._expected:
            raise PeerIdMismatch(self._expected, peer_id)
        tag = talk.peer_hello.run_tag
        if peer_run is not None and tag != NO_RUN_TAG and run_tag(peer_run) != tag:
            raise RemoteProtocolError(Code.AUTH, "the peer's run id does not begin with the run_tag of its hello")
        if peer_run is not None and self._run is not None and peer_run != self._run:
            raise error_for(Code.RUN_MISMATCH, detail=f"the peer's run is {peer_run.hex()[:16]}.., ours {self._run.hex()[:16]}..")
        return peer_id, peer_run, ticket

    def _finish(self, talk: _Talk, peer_id: PeerId, peer_run: bytes | None, ticket: bytes) -> None:
        to_responder, to_initiator, exporter, h = talk.noise.split()
        send, receive = (to_responder, to_initiator) if self._initiator else (to_initiator, to_responder)
        cipher, version = talk.agreed.ciphers[0], talk.agreed.versions[0]
        self._secrets = Secrets(send, receive, cipher, h, exporter, peer_id, peer_run, talk.peer_hello, version, ticket)
        self._drop_keys()

    def _state(self, agreed: Hello, prologue: bytes) -> HandshakeState:
        return HandshakeState(
            agreed.ciphers[0], initiator=self._initiator, prologue=prologue, static=self._static, ephemeral=self._ephemeral
        )

    def _talking(self) -> _Talk:
        assert self._talk is not None  # set by the first step, see STEPS
        return self._talk


# (are we the initiator, what is awaited) -> (step, what is awaited next).  A step raises, or has queued our answer.
STEPS: dict[tuple[bool, Awaited], tuple[Callable[[Handshake, bytes], None], Awaited]] = {
    (True, Awaited.HELLO): (Handshake._read_answer, Awaited.MESSAGE_2),
    (True, Awaited.MESSAGE_2): (Handshake._read_message_2, Awaited.NOTHING),
    (False, Awaited.HELLO): (Handshake._read_offer, Awaited.MESSAGE_1),
    (False, Awaited.MESSAGE_1): (Handshake._read_message_1, Awaited.MESSAGE_3),
    (False, Awaited.MESSAGE_3): (Handshake._read_message_3, Awaited.NOTHING),
}


def identity_payload(identity: Identity, role: bytes, run: bytes | None, h: bytes, ticket: bytes = b"") -> bytes:
    """Who we are, signed for this one conversation.  `role`: b"I" or b"R"."""
    signature = identity.sign(HANDSHAKE, role + (run or bytes(RUN_BYTES)) + h)
    return pack([PAYLOAD_VERSION, identity.peer_id.raw, signature, run or b"", ticket])


def read_identity_payload(payload: bytes, role: bytes, h: bytes, limits: Limits) -> tuple[PeerId, bytes | None, bytes]:
    """The id that the payload proves, the run it names and the ticket it shows.  Raises `RemoteProtocolError`."""
    items = unpack(payload, limits.handshake_message_max_bytes)
    if not isinstance(items, tuple) or len(items) < 5:
        raise RemoteProtocolError(Code.AUTH, "malformed identity payload")
    version, key, signature, run, ticket = items[:5]
    if type(version) is not int or version != PAYLOAD_VERSION:
        raise RemoteProtocolError(Code.AUTH, "identity payload of an unknown version")
    sizes = ((key, (KEY_BYTES,)), (signature, (SIGNATURE_BYTES,)), (run, (0, RUN_BYTES)), (ticket, (0, TICKET_BYTES)))
    if not all(isinstance(item, bytes) and len(item) in allowed for item, allowed in sizes):
        raise RemoteProtocolError(Code.AUTH, "malformed identity payload")
    try:
        peer_id = PeerId(key)
    except ValueError as error:
        raise RemoteProtocolError(Code.AUTH, f"identity key: {error}") from error
    if not peer_id.verify(HANDSHAKE, role + (run or bytes(RUN_BYTES)) + h, signature):
        raise RemoteProtocolError(Code.AUTH, "signature of the identity payload does not belong to this handshake")
    return peer_id, run or None, ticket


def _empty(h: bytes) -> bytes:
    return b""


def _offered(hello: Hello) -> str:
    return f"v{list(hello.versions)} {'/'.join(hello.ciphers)} run {hello.run_tag.hex()} {hello.path}"
