"""What is fuzzed: every place where bytes of a stranger enter `wire/`, below the sockets.

Text and messages are taken as they come.  What lies behind cryptography is not reached by random bytes: there the harness holds the
keys, lets the fuzzer change the *plaintext*, and seals or signs it as a hostile but authenticated peer would.

Each target also checks what must hold when nothing is raised: what was parsed prints the same again, an ended thing stays ended.  Such a
check is an `assert`, so that AssertionError is a finding like any other.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from tests.fuzz.chunks import CHUNKS
from tests.fuzz.engine import Outcome, Target
from tests.fuzz.mapping import PORT_MAPPING
from tests.fuzz.measuring import PERF_ASKING, PERF_SERVING, TICKETS
from tests.fuzz.packed import PLANES
from tests.fuzz.receiving import RECEIVER
from tests.fuzz.sending import SENDER
from tests.fuzz.sessions import SESSION, SESSION_RAW
from tests.wire.joined import HELLO
from wire.address import Address, Scope, may_dial
from wire.envelope import DOMAINS, Latest, VerifiedCache, open_envelope, open_peer_record, seal
from wire.errors import LocalProtocolError, RemoteProtocolError, WireError
from wire.handshake import Handshake, identity_payload
from wire.hello import HEAD_BYTES, Hello, PathKind, Refusal, check_answer, choose, decode_hello, run_tag, split_hello
from wire.identity import HANDSHAKE, Identity, PeerId
from wire.messages import (
    AcceptBody,
    Ask,
    Begin,
    Done,
    Drop,
    Have,
    LaneAsk,
    OpenBody,
    PeerRecord,
    PerfAnswer,
    PerfAsk,
    PerfPulse,
    PerfState,
    Posted,
    Records,
    SessionHello,
    Slot,
    Unslot,
    Want,
    decode,
    encode,
    pack,
)
from wire.noise import Cipher, HandshakeState, public_key
from wire.unpacking import unpack

CIPHERS = (Cipher.CHACHA20POLY1305, Cipher.AES256GCM)
US, PEER = Identity(bytes([1]) * 32), Identity(bytes([2]) * 32)
RUN = bytes(range(32))
NOW = 1.7e9
TEXT_ID = str(PEER.peer_id)


# -- hello


def _hello(data: bytes) -> Outcome:
    end = None
    for size in (*range(min(len(data), 8)), len(data)):
        end = split_hello(data[:size])
        if end is not None:
            break
    if end is None:
        return Outcome("incomplete")
    assert HEAD_BYTES <= end <= 512
    said = decode_hello(data[:end])
    if isinstance(said, Refusal):
        assert decode_hello(said.encode()) == said
        return Outcome(said.code)
    own = Hello(ciphers=CIPHERS, run_tag=run_tag(RUN))
    answer = choose(said, own)
    if said.ciphers and len(said.encode()) <= 512:
        assert decode_hello(said.encode()) == said
    if isinstance(answer, Hello):
        check_answer(said, decode_hello(answer.encode()))
    check_answer(own, said)
    return Outcome(type(answer).__name__)


HELLOS = [
    Hello(ciphers=CIPHERS),
    Hello(ciphers=CIPHERS[:1], run_tag=RUN[:8]),
    Hello(ciphers=CIPHERS[::-1], versions=(1, 2), path=PathKind.PUNCH, context=bytes(16)),
]


def _hello_seeds() -> list[bytes]:
    return [*(hello.encode() for hello in HELLOS), *(Refusal(code, 5).encode() for code in (8, 6))]  # type: ignore[arg-type]


# -- handshake: u8 mode, u16 hello length, hello, u16 payload length, payload, what comes behind


def _parts(data: bytes) -> tuple[int, bytes, bytes, bytes]:
    mode, rest = (data[0], data[1:]) if data else (0, b"")
    parts = []
    for _ in range(2):
        size = int.from_bytes(rest[:2], "big")
        parts.append(rest[2 : 2 + size])
        rest = rest[2 + size :]
    return mode, parts[0], parts[1], rest


def _feed(side: Handshake, data: bytes, mode: int) -> None:
    """In pieces of the size that the mode names, never more than there is room for, as the link does it."""
    piece = (1 << 12, 1, 7, 100)[mode >> 6]
    while data and not side.done:
        size = min(piece, side.room)
        assert size > 0
        try:
            side.receive(data[:size])
        except WireError:
            _dead(side)
            raise
        data = data[size:]


def _payload(mode: int, section: bytes, role: bytes, h: bytes) -> bytes:
    """By mode: the fuzzer's bytes; a true payload with them behind it; a true signature over whatever run they name; a changed one."""
    key = b"\x95\x01\xc4\x20" + PEER.peer_id.raw
    match mode & 3:
        case 0:
            return section
        case 1:
            return identity_payload(PEER, role, None, h) + section
        case 2:
            run = section[2:34] if section[:2] == b"\xc4\x20" and len(section) >= 34 else bytes(32)
            return key + b"\xc4\x40" + PEER.sign(HANDSHAKE, role + run + h) + section
    true = bytearray(identity_payload(PEER, role, RUN, h))
    for at, change in enumerate(section[: len(true)]):
        true[at] ^= change
    return bytes(true)


class _Peer:
    """The other side, played by hand: the same Noise state, but payloads as the fuzzer wants them."""

    def __init__(self, initiator: bool, hello: bytes, ours: bytes, cipher: Cipher) -> None:
        prologue = hello + ours if initiator else ours + hello
        self.noise = HandshakeState(cipher, initiator=initiator, prologue=prologue, static=bytes([5]) * 32, ephemeral=bytes([6]) * 32)


def _framed(message: bytes) -> bytes:
    return (len(message) & 0xFFFF).to_bytes(2, "big") + message


def _random(count: int) -> bytes:
    return bytes([9]) * count


def _ended(side: Handshake) -> Outcome:
    assert not side.done or len(side.result.send_key) == 32
    return Outcome((side.done, side._awaited))


def _responder() -> Handshake:
    return Handshake(False, US, Hello(ciphers=CIPHERS, run_tag=run_tag(RUN)), own_run=RUN, rng=_random)


def _to_responder(data: bytes) -> Outcome:
    side = _responder()
    mode, hello, section, rest = _parts(data)
    _feed(side, hello, mode)
    answer = side.send()
    end = split_hello(answer) if answer else None
    if end is None:
        return _ended(side)
    said = decode_hello(answer[:end])
    assert isinstance(said, Hello)
    peer = _Peer(True, hello[: split_hello(hello)], answer[:end], said.ciphers[0])
    first = peer.noise.write(lambda h: b"")
    _feed(side, _framed(first) if not mode & 4 else rest[:64], mode)
    second = side.send()
    if not second:
        return _ended(side)
    peer.noise.read(second[2:])
    _feed(side, _framed(peer.noise.write(lambda h: _payload(mode, section, b"I", h))) + rest, mode)
    return _ended(side)


def _to_initiator(data: bytes) -> Outcome:
    mode, hello, section, rest = _parts(data)
    side = Handshake(
        True,
        US,
        Hello(ciphers=CIPHERS, run_tag=run_tag(RUN)),
        expected=PEER.peer_id if mode & 8 else None,
        own_run=RUN,
        rng=_random,
    )
    offer = side.send()
    _feed(side, hello, mode)
    if mode & 4 or side._talk is None:
        _feed(side, rest, mode)
        return _ended(side)
    mine = offer[: split_hello(offer)]
    peer = _Peer(False, hello[: split_hello(hello)], mine, side._talk.agreed.ciphers[0])
    peer.noise.read(offer[len(mine) + 2 :])
    _feed(side, _framed(peer.noise.write(lambda h: _payload(mode, section, b"R", h))) + rest, mode)
    return _ended(side)


def _dead(side: Handshake) -> None:
    """After a refusal nothing more is said than a refusal in a hello, and nothing more is taken."""
    out = side.send()
    assert not side.done and (not out or isinstance(decode_hello(out), Refusal))
    try:
        side.receive(b"x")
    except LocalProtocolError:
        return
    raise AssertionError("a failed handshake took more bytes")


def _handshake_seeds() -> list[bytes]:
    def made(mode: int, hello: Hello, section: bytes, rest: bytes = b"") -> bytes:
        raw = hello.encode()
        return bytes([mode]) + len(raw).to_bytes(2, "big") + raw + len(section).to_bytes(2, "big") + section + rest

    choice = Hello(ciphers=CIPHERS[:1], run_tag=RUN[:8])
    runs = (b"\xc4\x00\xc4\x00", b"\xc4\x20" + RUN + b"\xc4\x00", b"\xc4\x00\xc4\x10" + bytes(16), b"\xc4\x20" + RUN[::-1] + b"\xc4\x00")
    return [
        *(made(mode, choice, b"") for mode in (1, 3, 8 + 1, 64 + 1, 128 + 3)),
        *(made(2, choice, run) for run in runs),
        *(made(1, hello, b"", b"record") for hello in HELLOS),
        made(4, choice, b"", _framed(public_key(bytes([6]) * 32))),
        made(4, choice, b"", _framed(bytes(32))),
    ]


# -- messages

CLASSES = (
    SessionHello, OpenBody, AcceptBody, Slot, Unslot, Begin, Done, Drop, Want, Records, PeerRecord, Ask, Have, Posted, LaneAsk,
    PerfAsk, PerfAnswer, PerfPulse, PerfState,
)  # fmt: skip


def _message(data: bytes) -> Outcome:
    """u8 class (above their number: any of the channel's), message."""
    which, body = (data[0], data[1:]) if data else (0, b"")
    if which < len(CLASSES):
        found: object = decode(body, CLASSES[which])
    elif which == 255:
        return Outcome(type(unpack(body)).__name__)
    else:
        found = decode(body, Slot, Unslot, Begin, Done)
    again = encode(found)
    assert decode(again, type(found)) == found
    return Outcome(type(found).__name__)


def _message_seeds() -> list[bytes]:
    key = ("b", 3, 17, PEER.peer_id.raw[:8], 1)
    samples = (
        replace(HELLO, features=("planes/1",), observed="/ip4/1.2.3.4/tcp/5"),
        OpenBody(2, "tensor/1", 2, 65536, b"name"),
        AcceptBody(1 << 40),
        Slot(1, key, 4096, b"tokentok", b"\x03"),
        Unslot(7),
        Begin(1, key, 5, 1, (8, 2048), 2, 4096, b"tokentok", (1, 2)),
        Done(1, key, 0),
        Drop(1, key, 12),
        Want(RUN, 24),
        Records((b"one", b"two")),
        RECORD,
        Ask(1, (0, 5)),
        Have(1, b"tokentok", b"\x03"),
        Posted(3),
        LaneAsk(4),
        PerfAsk(10_000),
        PerfAnswer(18, 500),
        PerfPulse(7),
        PerfState(7, (1 << 20, 5), 1_500_000, True),
    )
    made = [bytes([at]) + encode(sample) for at, sample in enumerate(samples)]
    return [*made, *(b"\xfe" + data[1:] for data in made[3:8]), b"\xff\x93\x01\xc0\xcb" + bytes(8)]


# -- addresses and ids

ADDRESSES = (
    "/ip4/192.0.2.1/tcp/4001",
    f"/ip6/2001:db8::1/tcp/4001/p2p/{TEXT_ID}",
    "/dns4/seed.example.org/tcp/1",
    f"/ip4/10.0.0.1/tcp/9/p2p/{US.peer_id}/p2p-circuit/p2p/{TEXT_ID}",
    "/ip6/fe80::1%eth0/tcp/80",
    "192.0.2.1:4001",
    f"{TEXT_ID}@[2001:db8::1]:4001",
    "host.example:80",
    "/ip6/::ffff:1.2.3.4/tcp/1",
)


def _address(data: bytes) -> Outcome:
    text = data.decode("utf-8", "surrogateescape")
    ended: list[object] = []
    for received, parse in ((False, Address.parse), (True, Address.parse_received), (True, PeerId.parse)):
        try:
            found = parse(text)
        except ValueError:
            continue
        if isinstance(found, Address):
            assert len(str(found)) <= 256 and Address.parse(str(found)) == found
            assert not received or str(found) == text
            ended += [found.kind, found.scope_class, *(may_dial(found, scope) for scope in Scope)]
        else:
            assert str(found) == text
            ended.append("id")
    with suppress(ValueError):
        PeerId(data[:32])
    return Outcome(tuple(ended))


# -- signed statements: u8 mode, then the envelope, or what a true signer puts into one

RECORD = PeerRecord(addresses=(ADDRESSES[0], f"/ip6/2001:db8::1/tcp/4001/p2p/{TEXT_ID}"), capabilities=("planes/1",), reach="public")
DOMAIN_NAMES = tuple(DOMAINS)


def _envelope(data: bytes) -> Outcome:
    mode, rest = (data[0], data[1:]) if data else (0, b"")
    domain = DOMAIN_NAMES[(mode >> 2) % len(DOMAIN_NAMES)]
    cache, latest = VerifiedCache(), Latest(4)
    if mode & 3 == 0:
        statement = open_envelope(rest, domain, now_unix=NOW, run=None, verified=cache)
        return Outcome(statement.seq)
    ended: list[object] = []
    for at in range(2 if mode & 3 == 3 else 1):  # two statements of one signer: newer, older, the same, a contradiction
        seq, not_after = rest[16 * at : 16 * at + 8], rest[16 * at + 8 : 16 * at + 16]
        payload = rest[16 * at + 16 :]
        run = bytes(32) if DOMAINS[domain].runless else RUN
        try:
            sealed = seal(
                PEER, domain, payload, run=run, seq=int.from_bytes(seq, "big"), not_after=int.from_bytes(not_after, "big")
            )
        except LocalProtocolError:
            return Outcome("not sealed")
        statement = open_envelope(sealed, domain, now_unix=NOW, run=run, verified=cache)
        assert statement.raw == sealed and 1 <= len(cache) <= at + 1
        if DOMAINS[domain].latest:
            ended.append(latest.accept(statement, domain))
        if domain == "plw/peer/1" and mode & 3 == 2:
            opened = open_peer_record(sealed, now_unix=NOW, run=run, signer=PEER.peer_id, verified=cache)
            ended.append(len(opened.addresses))
    return Outcome(tuple(ended))


def _envelope_seeds() -> list[bytes]:
    def head(seq: int, ahead: int) -> bytes:
        return seq.to_bytes(8, "big") + (int(NOW) + ahead if ahead else 0).to_bytes(8, "big")

    raw = seal(PEER, "plw/peer/1", encode(RECORD), run=RUN, seq=5, not_after=int(NOW) + 60)
    return [
        b"\x00" + raw,
        b"\x02" + head(5, 60) + encode(RECORD),
        b"\x02" + head(5, -600) + encode(RECORD),
        b"\x02" + head(5, 100_000) + encode(RECORD),
        b"\x02" + head(5, 60) + encode(PeerRecord(addresses=(f"/ip4/192.0.2.1/tcp/1/p2p/{US.peer_id}",))),
        b"\x03" + head(5, 60) + head(6, 60) + b"payload",
        b"\x03" + head(5, 60) + head(5, 60) + b"payload",
        b"\x03" + head(6, 60) + head(5, 60) + b"payload",
        *(bytes([at << 2 | 1]) + head(1, ahead) + pack([1, b"x"]) for at in range(1, len(DOMAIN_NAMES)) for ahead in (0, 60)),
    ]


WIRE = (WireError,)
TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("hello", lambda: _hello, WIRE, _hello_seeds),
        Target("handshake_responder", lambda: _to_responder, WIRE, _handshake_seeds),
        Target("handshake_initiator", lambda: _to_initiator, WIRE, _handshake_seeds),
        SESSION,
        SESSION_RAW,
        RECEIVER,
        SENDER,
        TICKETS,
        PERF_SERVING,
        PERF_ASKING,
        Target("messages", lambda: _message, (RemoteProtocolError,), _message_seeds),
        Target("addresses", lambda: _address, (), lambda: [text.encode() for text in (*ADDRESSES, TEXT_ID)]),
        Target("envelopes", lambda: _envelope, WIRE, _envelope_seeds),
        PLANES,
        CHUNKS,
        PORT_MAPPING,
    )
}
