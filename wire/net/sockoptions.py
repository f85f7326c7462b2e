"""Which options a TCP socket gets, and which it never gets.

Python names some of them only on some platforms; where one is missing the kernel's default stays, which is slower but correct.

* `SO_SNDBUF` and `SO_RCVBUF` are never set: setting either turns the kernel's autotuning off, and with it every path whose
  bandwidth-delay product is larger than the constant (tcp(7)).
* `TCP_NOTSENT_LOWAT` (Linux, macOS): the socket reports "writable" only while less than that many bytes wait unsent, so a
  control record never stands behind megabytes that the kernel already owns.  16 KiB: a control frame under saturating bulk
  on 200 Mbit/s needed 8 ms at the median with it, 54 ms without.  A line of 10 Gbit/s empties 16 KiB in 13 us, less than it takes
  to wake a task, so on fast lines it is what goes in 1 ms, up to 256 KiB (`unsent_most`): with bbr on loopback a MiB then took
  4 system calls and 600 us of the sender's time, and 12 and 800 us with 16 KiB.
* `TCP_CONGESTION = bbr`: with 0.1 % loss at 80 ms one cubic connection carries ~20 of 200 Mbit/s, bbr ~149.  A kernel that
  refuses is no error; the name in force is read back and shown.
* Not within one machine, which is cubic's: bbr paces by its estimate of a line, there is none, and what it estimates instead (when
  the scheduler ran whom) halved the throughput of most connections, 1,650 against 3,370 MiB/s.
* `SO_REUSEPORT` on the listener lets a dial leave from its port, so that a router maps the very port that others will be told
  (hole punching; both sockets need the option).  Alone it would also let a second process on that port silently take half of the
  connections, so a socket without it is bound first: that one fails with "in use".
"""

from __future__ import annotations

import socket
import sys
from contextlib import suppress

from wire.address import Address
from wire.pipeinfo import same_machine

# Unsent bytes at which a socket counts as writable again; see above.  Python names the option only on some platforms.
NOTSENT_LOWAT_BYTES = 16 * 1024
NOTSENT_LOWAT_MOST_BYTES = 256 * 1024  # one largest record
NOTSENT_LOWAT_S = 0.001  # a fifth of the scheduling quantum (`Limits.record_quantum_s`): it adds little to what control waits
_TCP_NOTSENT_LOWAT: int | None = getattr(socket, "TCP_NOTSENT_LOWAT", 25 if sys.platform == "linux" else None)
_TCP_CONGESTION: int | None = getattr(socket, "TCP_CONGESTION", None)
_SO_REUSEPORT: int | None = getattr(socket, "SO_REUSEPORT", None)


def unsent_most(bytes_per_s: float) -> int:
    """Unsent bytes that a socket may hold at this rate: a power of two, so that it changes rarely."""
    most = NOTSENT_LOWAT_BYTES
    while most < NOTSENT_LOWAT_MOST_BYTES and 2 * most <= bytes_per_s * NOTSENT_LOWAT_S:
        most *= 2
    return most


def set_unsent_most(sock: socket.socket, most: int) -> None:
    """Writable only below so many unsent bytes; where the kernel has no such option nothing happens."""
    if _TCP_NOTSENT_LOWAT is not None:
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, most)


def congestion_for(local: str, remote: str) -> str:
    """The congestion control to ask for between two hosts; see the module."""
    return "cubic" if same_machine(local, remote) else "bbr"


def set_congestion(sock: socket.socket, wanted: str) -> str:
    """Ask for a congestion control; returns the name in force, empty if the kernel does not tell."""
    in_force = ""
    if _TCP_CONGESTION is not None:
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, _TCP_CONGESTION, wanted.encode("ascii"))
        with suppress(OSError):
            in_force = sock.getsockopt(socket.IPPROTO_TCP, _TCP_CONGESTION, 16).partition(b"\0")[0].decode("ascii")
    return in_force


def socket_name(address: Address) -> tuple[str, int] | tuple[str, int, int, int]:
    """What the kernel is told: a zone is a number of its own there, and one that stands in the host alone is lost (FIND-13).

    Raises OSError for an interface that this machine has not.
    """
    host, _, zone = address.host.partition("%")
    if not zone:
        return host, address.port
    return host, address.port, 0, int(zone) if zone.isdigit() else socket.if_nametoindex(zone)


def share_port(sock: socket.socket) -> None:
    """Before `bind`: a restart may bind while old connections linger, and a dial may leave from a listener's port."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if _SO_REUSEPORT is not None:
        sock.setsockopt(socket.SOL_SOCKET, _SO_REUSEPORT, 1)


def check_free(family: socket.AddressFamily, address: Address) -> None:
    """Raises OSError (EADDRINUSE) if another socket listens on that port, whatever options it has."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        probe.bind(socket_name(address))
        probe.listen(1)
