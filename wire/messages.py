"""The messages of the wire itself, field by field.

One place for all of them: which number is taken, which field comes at which place and how large it may be is the protocol, and
a change here is a change of protocol.  `schema.py` turns classes into bytes, `unpacking.py` bounds bytes from strangers.

Three kinds.  Frame bodies (FRAME) carry no type number, the frame's type says what they are.  Channel messages travel on the
message stream of a tensor channel.  Discovery messages are `px/1`.  Numbers 1..63 are ours, in order of invention, never reused.

Not checked here, because one message alone cannot show it: whether a slot was posted, a shape is the expected one, a peer record
is signed by the channel's own key.  Those belong to the automata that know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from wire.limits import DEFAULT_LIMITS
from wire.schema import FRAME, Count, Key, KeyBytes, Range, Size, decode, encode, message
from wire.unpacking import pack, unpack

__all__ = [
    "FRAME",
    "AcceptBody",
    "Ask",
    "Begin",
    "Count",
    "Done",
    "Drop",
    "Have",
    "Key",
    "KeyBytes",
    "LaneAsk",
    "OpenBody",
    "PeerRecord",
    "PerfAnswer",
    "PerfAsk",
    "PerfPulse",
    "PerfState",
    "Posted",
    "Range",
    "Records",
    "SeedListAnswer",
    "SeedListAsk",
    "SessionHello",
    "Size",
    "Slot",
    "Unslot",
    "Want",
    "decode",
    "encode",
    "message",
    "pack",
    "unpack",
]

_L = DEFAULT_LIMITS

U8 = Annotated[int, Range(0, 2**8 - 1)]
U16 = Annotated[int, Range(0, 2**16 - 1)]
U32 = Annotated[int, Range(0, 2**32 - 1)]
U64 = Annotated[int, Range(0, 2**64 - 1)]
Offset = Annotated[int, Range(0, 2**62)]  # of bytes in a stream; far from where sums of two would overflow 64 bits
TensorKey = Annotated[Key, KeyBytes(_L.tensor_key_max_bytes)]
TensorBytes = Annotated[int, Range(0, _L.tensor_max_bytes)]
Token = Annotated[bytes, Size(8)]
Envelope = Annotated[bytes, Size(max=_L.peer_record_max_bytes)]
AddressText = Annotated[str, Size(max=_L.address_max_bytes)]

# One bit a chunk of the largest tensor.
BITMAP_MAX_BYTES = _L.tensor_max_bytes // _L.chunk_bytes // 8
RANK_MAX = 8  # dimensions of a tensor; the largest use is (microbatch, batch, length, heads, width)


@message(FRAME, extensible=True)
@dataclass(frozen=True, slots=True)
class SessionHello:
    """Body of HELLO: the first frame each way; sent again whole, with a higher revision, when something changed."""

    revision: U32
    boot_id: Annotated[bytes, Size(8)]
    """Random for each start of the process: two of them behind one id are two processes."""
    agent: Annotated[str, Size(max=_L.agent_max_bytes)]
    """Name and version of the program; for people, never parsed."""
    features: Annotated[tuple[Annotated[str, Size(max=64)], ...], Count(_L.features_max)]
    """What the sender understands beyond the version; unknown ones are ignored."""
    peer_record: Envelope
    """The sender's signed record, `plw/peer/1`; empty while it has none."""
    observed: AddressText
    """The receiver's address as the sender sees it; empty on circuits."""
    bulk_window: Annotated[int, Range(_L.stream_window_min_bytes, _L.stream_window_max_bytes)]
    """Start credit, in bytes, of byte streams of class 2-4 towards the sender."""
    max_streams: U16
    """Inbound streams that the sender keeps at once."""
    generation: U32 = 0
    """How often the sender has lost all connections to the receiver: a connection of a higher one supersedes those before."""


@message(FRAME)
@dataclass(frozen=True, slots=True)
class OpenBody:
    """Body of OPEN."""

    kind: Annotated[int, Range(0, 2)]
    """`events.Kind`: message, byte, chunks."""
    protocol: Annotated[str, Size(max=_L.protocol_name_max_bytes)]
    cls: Annotated[int, Range(1, 4)]
    """Class of priority: control, boundary, bulk, background."""
    credit: Offset
    """Bytes that the opener is ready to receive."""
    meta: Annotated[bytes, Size(max=_L.open_meta_max_bytes)]


@message(FRAME)
@dataclass(frozen=True, slots=True)
class AcceptBody:
    """Body of ACCEPT."""

    credit: Offset
    """Absolute limit of what the opener may send; at least the start credit that it has assumed."""


@message(1)
@dataclass(frozen=True, slots=True)
class Slot:
    """Receiver to sender: you may send this tensor (no key: your next one), at most `max_bytes`.  Ids only ascend."""

    slot: U32
    key: TensorKey | None
    max_bytes: TensorBytes
    token: Token | None = None
    """After a reconnect: the encoding that is partly here."""
    bitmap: Annotated[bytes, Size(max=BITMAP_MAX_BYTES)] | None = None
    """Its complete chunks; bit i of byte i // 8, lowest first."""


@message(2)
@dataclass(frozen=True, slots=True)
class Unslot:
    """Receiver to sender: the slot is withdrawn; what was sent into it is drained."""

    slot: U32


@message(3)
@dataclass(frozen=True, slots=True)
class Begin:
    """Sender to receiver: what goes into a slot.  Anything but what the receiver expects is answered with Done(EXPECTATION)."""

    slot: U32
    key: TensorKey
    order: U64
    """Age: the lowest goes first within its class."""
    dtype: U8
    """`tensor.DType`."""
    shape: Annotated[tuple[U32, ...], Count(RANK_MAX)]
    codec: U16
    raw_len: TensorBytes
    """Bytes of the whole encoding, before lossless compression."""
    token: Token
    """Random for each encoding: the same token means the same bytes."""
    tags: Annotated[tuple[U32, ...], Count(_L.tensor_tags_max)] = ()
    """Small integers that the codec defines."""


@message(4)
@dataclass(frozen=True, slots=True)
class Done:
    """Receiver to sender: how it ended.  OK = every byte authenticated and the tensor handed over, once."""

    slot: U32
    key: TensorKey
    code: U16
    """`errors.Code`."""


@message(5)
@dataclass(frozen=True, slots=True)
class Drop:
    """Sender to receiver: a tensor that was begun will not be completed."""

    slot: U32
    key: TensorKey
    code: U16


@message(6)
@dataclass(frozen=True, slots=True)
class Want:
    """`px/1`: give me at most `n` peer records of this run."""

    run: Annotated[bytes, Size(32)]
    n: Annotated[int, Range(1, _L.exchange_records_max)]


@message(7, extensible=True)
@dataclass(frozen=True, slots=True)
class Records:
    """`px/1`: signed peer records as they were received, byte for byte.  24 of 2 KiB fit one message."""

    records: Annotated[tuple[Envelope, ...], Count(_L.exchange_records_max)]


@message(8, extensible=True)
@dataclass(frozen=True, slots=True)
class PeerRecord:
    """Payload of `plw/peer/1`: where and how its signer can be reached."""

    addresses: Annotated[tuple[AddressText, ...], Count(_L.addresses_per_peer_max)]
    """Canonical texts, circuits included; each is judged by its class before anybody dials it."""
    vouchers: Annotated[tuple[Annotated[bytes, Size(max=_L.voucher_max_bytes)], ...], Count(2)] = ()
    """Envelopes of relays that hold a place for the signer."""
    capabilities: Annotated[tuple[Annotated[str, Size(max=32)], ...], Count(_L.capabilities_max)] = ()
    version_low: U16 = 1
    version_high: U16 = 1
    """Protocol versions that it speaks."""
    reach: Annotated[str, Size(max=16)] = "unknown"
    """public, nat, nat-symmetric, outbound-only or unknown; an unknown word is read as unknown."""
    relay_classes: Annotated[tuple[Annotated[str, Size(max=16)], ...], Count(4)] = ()
    relay_free_bps: U64 = 0
    """Bytes per second that it still relays."""


@message(9)
@dataclass(frozen=True, slots=True)
class Ask:
    """Sender to receiver: a lane is lost; what do you have of these slots?  Chunks that were written there are in doubt until then."""

    lane: U32
    slots: Annotated[tuple[U32, ...], Count(_L.slots_open_max)]


@message(10)
@dataclass(frozen=True, slots=True)
class Have:
    """Receiver to sender: the complete chunks of one asked slot.  None comes for a slot that has ended."""

    slot: U32
    token: Token
    """Of the encoding that is partly here."""
    bitmap: Annotated[bytes, Size(max=BITMAP_MAX_BYTES)]
    """As in `Slot`."""


@message(11)
@dataclass(frozen=True, slots=True)
class Posted:
    """Receiver to sender: every slot that is open has been said since the channel was opened (again).

    Slots below `next_slot` that were not said are over; later ones ascend from there.
    """

    next_slot: U32


@message(12)
@dataclass(frozen=True, slots=True)
class LaneAsk:
    """`lane/1`: the side that did not dial the control connection would like so many lanes."""

    count: U8


@message(32, extensible=True)
@dataclass(frozen=True, slots=True)
class PerfAsk:
    """`perf/1`, first message of the control stream: may we measure for `millis` a direction?

    `lanes`: over one stream, then over two at once, and so on up to so many.  Whoever does not know the field measures over one.
    """

    millis: Annotated[int, Range(100, int(_L.perf_seconds_max * 1000))]
    lanes: Annotated[int, Range(1, _L.lanes_max)] = 1


@message(33, extensible=True)
@dataclass(frozen=True, slots=True)
class PerfAnswer:
    """`perf/1`: OK, or why not and when to ask again; over how many lanes at once it measures."""

    code: U16
    retry_ms: U32 = 0
    lanes: U16 = 1


@message(34, extensible=True)
@dataclass(frozen=True, slots=True)
class PerfPulse:
    """`perf/1`: a round trip in the class of control messages; the answer also says what has come so far."""

    number: U32


@message(35, extensible=True)
@dataclass(frozen=True, slots=True)
class PerfState:
    """`perf/1`: answer to a pulse.  What the asked side has received since the first byte."""

    number: U32
    seconds: Annotated[tuple[U64, ...], Count(64)] = ()
    """Bytes by second since the first one."""
    micros: U64 = 0
    """From the first byte to the last so far."""
    over: bool = False
    """The sender has ended its direction."""


@message(48)
@dataclass(frozen=True, slots=True)
class SeedListAsk:
    """`seeds/1`: the newest signed seed list of this run, if it is newer than number `newer_than`."""

    run: Annotated[bytes, Size(32)]
    newer_than: U64 = 0


@message(49, extensible=True)
@dataclass(frozen=True, slots=True)
class SeedListAnswer:
    """`seeds/1`: an envelope of `plw/seeds/1` as its signer made it; empty if there is none that is newer."""

    signed: Annotated[bytes, Size(max=_L.seed_list_max_bytes)]
