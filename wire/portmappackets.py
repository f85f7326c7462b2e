"""The packets with which a router is asked to forward a TCP port: PCP (RFC 6887) and NAT-PMP (RFC 6886).

Both are spoken over UDP with port 5351 of the router, and the older one was made the younger's version 0: the first octet says which
it is, and a router that knows only the other one answers "unsupported version".

    PCP MAP, 60 octets            ver 2 | R, opcode 1 | 16 bits | lifetime | client address(16)
    and its answer                ver 2 | R, opcode 1 | 8 bits, result | lifetime | epoch | 96 bits            RFC 6887, 7.1, 7.2
      both go on with             nonce(12) | protocol | 24 bits | internal port | external port | external address(16)     11.1
    NAT-PMP address               0 | 0                       answer: 0 | 128 | result | epoch | address(4)    RFC 6886, 3.2
    NAT-PMP map TCP               0 | 2 | 16 bits | internal port | external port | lifetime                              3.3
                                                              answer: 0 | 130 | result | epoch | internal | external | lifetime

All numbers are big-endian; an IPv4 address in PCP stands as ::ffff:a.b.c.d.  Lifetimes and epochs are seconds.

What goes wrong.  Anybody in the house can send us a datagram, and a router may answer anything: whatever is not exactly the answer to
what was asked parses to None and is ignored, never an exception.  PCP's nonce is what tells the router's answers from a guess.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address

SERVER_PORT = 5351
NONCE_BYTES = 12
DATAGRAM_MAX = 1100  # RFC 6887, 7
TCP = 6  # IANA protocol number

_PCP, _NATPMP = 2, 0  # versions
_ANSWER = 0x80
_MAP = 1
_ADDRESS, _MAP_TCP = 0, 2
_PCP_ASK = struct.Struct(">BBHI16s")
_PCP_HEAD = struct.Struct(">BBBBII12s")
_PCP_MAP = struct.Struct(">12sB3sHH16s")
_NATPMP_HEAD = struct.Struct(">BBHI")

UNSUPPORTED_VERSION = 1  # in both protocols

# RFC 6887, 7.4 and RFC 6886, 3.5: in words for the owner of the node.
PCP_RESULTS = {
    1: "the router speaks another version",
    2: "the router does not allow port mapping: it can be switched on in its settings",
    3: "the router could not read the request",
    4: "the router does not do this kind of mapping",
    5: "the router does not know an option",
    6: "the router could not read an option",
    7: "the router itself has no connection",
    8: "the router has no room for another mapping",
    9: "the router does not map TCP",
    10: "this machine has as many mappings as the router allows",
    11: "the router cannot give this port",
    12: "another router stands between this machine and the one that was asked",
    13: "the router filters too many peers",
}
NATPMP_RESULTS = {1: PCP_RESULTS[1], 2: PCP_RESULTS[2], 3: PCP_RESULTS[7], 4: PCP_RESULTS[8], 5: PCP_RESULTS[4]}


@dataclass(frozen=True, slots=True)
class PcpAnswer:
    """`result` 0: mapped; the fields behind `epoch` mean something only then.  `lifetime` of a refusal: how long it stands."""

    result: int
    lifetime: int
    epoch: int
    external_port: int
    external_host: str


@dataclass(frozen=True, slots=True)
class AddressAnswer:
    result: int
    epoch: int
    host: str


@dataclass(frozen=True, slots=True)
class MapAnswer:
    result: int
    epoch: int
    external_port: int
    lifetime: int


def pcp_map(client: str, nonce: bytes, port: int, lifetime: int, external_port: int = 0, external_host: str = "0.0.0.0") -> bytes:
    """Ask for an IPv4 mapping of TCP `port`, or with a lifetime of 0 for its removal.  `external_*`: wished for, 0 for any."""
    head = _PCP_ASK.pack(_PCP, _MAP, 0, lifetime, _mapped(client))
    return head + _PCP_MAP.pack(nonce, TCP, bytes(3), port, external_port, _mapped(external_host))


def natpmp_address() -> bytes:
    """Ask for the router's outside address."""
    return bytes((_NATPMP, _ADDRESS))


def natpmp_map(port: int, lifetime: int, external_port: int = 0) -> bytes:
    """As `pcp_map`."""
    return struct.pack(">BBHHHI", _NATPMP, _MAP_TCP, 0, port, external_port, lifetime)


def speaks_another_version(data: bytes) -> bool:
    """Whether this answers a PCP request with "I do not know your version": by any version, at the least with NAT-PMP's head."""
    if not _NATPMP_HEAD.size <= len(data) <= DATAGRAM_MAX or not data[1] & _ANSWER:
        return False
    return data[3] == UNSUPPORTED_VERSION and (data[2] == 0 or data[0] != _NATPMP)


def parse_pcp(data: bytes, nonce: bytes, port: int) -> PcpAnswer | None:
    """The answer to our MAP request for `port`; None for anything else."""
    size = _PCP_HEAD.size + _PCP_MAP.size
    if not size <= len(data) <= DATAGRAM_MAX or len(data) % 4:
        return None
    version, opcode, _, result, lifetime, epoch, _ = _PCP_HEAD.unpack_from(data)
    theirs, protocol, _, internal, external_port, raw = _PCP_MAP.unpack_from(data, _PCP_HEAD.size)
    if (version, opcode, theirs, protocol, internal) != (_PCP, _MAP | _ANSWER, nonce, TCP, port):
        return None
    address = IPv6Address(raw)
    if result == 0 and (address.ipv4_mapped is None or not external_port):
        return None  # not what an IPv4 mapping looks like
    return PcpAnswer(result, lifetime, epoch, external_port, str(address.ipv4_mapped or address))


def parse_address(data: bytes) -> AddressAnswer | None:
    """The answer to `natpmp_address`; None for anything else."""
    head = _natpmp_head(data, _ADDRESS)
    if head is None or (head[0] == 0 and len(data) != 12):
        return None
    return AddressAnswer(*head, str(IPv4Address(data[8:12])) if head[0] == 0 else "")


def parse_map(data: bytes, port: int) -> MapAnswer | None:
    """The answer to `natpmp_map` of `port`; None for anything else."""
    head = _natpmp_head(data, _MAP_TCP)
    if head is None or (head[0] == 0 and len(data) != 16):
        return None
    if head[0]:
        return MapAnswer(*head, 0, 0)
    internal, external, lifetime = struct.unpack_from(">HHI", data, 8)
    return MapAnswer(*head, external, lifetime) if internal == port and external else None


def _natpmp_head(data: bytes, opcode: int) -> tuple[int, int] | None:
    """(result, epoch).  A refusal may be as short as its head (RFC 6886, 3.5)."""
    if not _NATPMP_HEAD.size <= len(data) <= DATAGRAM_MAX:
        return None
    version, answered, result, epoch = _NATPMP_HEAD.unpack_from(data)
    return (result, epoch) if (version, answered) == (_NATPMP, opcode | _ANSWER) else None


def _mapped(host: str) -> bytes:
    return bytes(10) + b"\xff\xff" + IPv4Address(host).packed
