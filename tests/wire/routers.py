"""What a router answers to requests for port mapping, built with struct from the RFCs' figures and not with the code under test."""

from __future__ import annotations

import struct
from ipaddress import IPv4Address

NONCE = bytes(range(1, 13))


def pcp_answer(
    port: int,
    *,
    nonce: bytes = NONCE,
    result: int = 0,
    lifetime: int = 3600,
    epoch: int = 100,
    external: int = 50001,
    host: str = "8.8.4.4",
) -> bytes:
    head = struct.pack(">BBBBII12x", 2, 0x81, 0, result, lifetime, epoch)
    return head + struct.pack(">12sB3xHH10x2s4s", nonce, 6, port, external, b"\xff\xff", IPv4Address(host).packed)


def address_answer(*, host: str = "8.8.4.4", epoch: int = 100) -> bytes:
    return struct.pack(">BBHI4s", 0, 128, 0, epoch, IPv4Address(host).packed)


def map_answer(port: int, *, external: int = 50001, lifetime: int = 3600, epoch: int = 100) -> bytes:
    return struct.pack(">BBHIHHI", 0, 130, 0, epoch, port, external, lifetime)


def unsupported(opcode: int = 1) -> bytes:
    """Of a router that knows NAT-PMP only, to a PCP request (RFC 6886, 3.5; RFC 6887, appendix A)."""
    return struct.pack(">BBHI", 0, 128 + opcode, 1, 100)
