"""Which router this machine's way to the internet leads through.  Linux says so in /proc/net/route, a table of text (proc(5)).

A machine with a cable, a radio and a VPN has several default routes.  The one with the lowest metric is in use; its gateway is asked
only if it lies in a subnet of the very same interface, so that a router which is reached through another one, or a tunnel without
any, is not asked to open ports.  Addresses in the table are hexadecimal, in the byte order of the machine.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path

_UP, _GATEWAY = 0x1, 0x2  # route(8), RTF_*
_TABLE = Path("/proc/net/route")


class NoGateway(Exception):
    """There is no router to ask; the text says why, for people."""


@dataclass(frozen=True, slots=True)
class _Route:
    interface: str
    destination: int
    gateway: int
    flags: int
    metric: int
    mask: int


def find_gateway() -> str:
    """The IPv4 address of the router to ask.  Raises NoGateway."""
    if sys.platform != "linux":
        raise NoGateway(f"how to find the router on {sys.platform} is not known to this program")
    try:
        text = _TABLE.read_text("ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise NoGateway(f"{_TABLE} cannot be read: {error}") from None
    return gateway_of(text)


def gateway_of(table: str) -> str:
    """The same, of the text of the table.  Raises NoGateway."""
    routes = [route for line in table.splitlines()[1:] if (route := _route(line)) is not None and route.flags & _UP]
    defaults = [route for route in routes if route.destination == route.mask == 0 and route.flags & _GATEWAY]
    if not defaults:
        raise NoGateway("this machine has no default route over IPv4")
    for default in sorted(defaults, key=lambda route: route.metric):
        near = [route for route in routes if route.interface == default.interface and not route.flags & _GATEWAY and route.mask]
        if any(default.gateway & route.mask == route.destination for route in near):
            return str(IPv4Address(default.gateway.to_bytes(4, sys.byteorder)))
    raise NoGateway("no default route has its router in a subnet of this machine")


def _route(line: str) -> _Route | None:
    parts = line.split()
    try:
        interface, destination, gateway, flags, _, _, metric, mask = parts[:8]
        numbers = [int(part, 16) for part in (destination, gateway, mask)]
        if any(not 0 <= number < 1 << 32 for number in numbers):
            return None
        return _Route(interface, numbers[0], numbers[1], int(flags, 16), int(metric), numbers[2])
    except ValueError:
        return None
