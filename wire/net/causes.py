"""Why a connection did not come about, in words.

A contributor who sees one message for "refused", "full" and "down" believes to be banned (FIND-8), and one who sees
"timed out" for a machine that accepts and then says nothing looks for the fault in his own router (FIND-5).  So every failure
on the way to an authenticated peer becomes a `Cause`: a kind that programs compare, words, what would help, and whether
trying again makes sense.  Two tables hold them: by errno for what the network said, by code for what the peer said.

A refusal that came in clear, before authentication, may be forged by anyone on the path; it is reported like the others and
never remembered for longer than a dial back-off.
"""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass
from typing import ClassVar

import trio

from wire.errors import Code, ConnectionLost, WireError


@dataclass(frozen=True, slots=True)
class Cause:
    """One reason.  `str()` is the sentence for people."""

    kind: str  # short and stable: "refused", "silent", "no-handshake", "run-mismatch", ...
    words: str  # what happened
    help: str = ""  # what would help, "" if only waiting does
    retryable: bool = True
    code: Code = Code.TIMEOUT

    def __str__(self) -> str:
        return f"{self.words} ({self.help})" if self.help else self.words


OTHER_PROGRAM = "another program may have that port"
NO_SUCH_NETWORK = "this machine has no such network, e.g. no IPv6"
FIREWALL = "the machine is off, or a firewall drops packets to that port"
LATER = "tried again later"

SILENT = Cause("silent", "no answer", FIREWALL)
NO_HANDSHAKE = Cause("no-handshake", "accepted the connection, but no handshake came", f"it is overloaded, or {OTHER_PROGRAM}")
OUTRUN = Cause("outrun", "slower than another address of the same peer")
ITSELF = Cause("self", "that address is this node itself", retryable=False, code=Code.SELF)
_NO_FILES = Cause("local", "no file descriptors are left here", "raise the limit of open files", code=Code.RESOURCE_LIMIT)
_FORBIDDEN = Cause("local", "this machine's firewall forbids the connection", "allow it", retryable=False, code=Code.REFUSED)

_BY_ERRNO: dict[int, Cause] = {
    errno.ECONNREFUSED: Cause("refused", "connection refused", "nothing listens on that port", code=Code.REFUSED),
    errno.EHOSTUNREACH: Cause("unreachable", "no route to that host", "check the address and this machine's network"),
    errno.ENETUNREACH: Cause("unreachable", "no network towards that address", NO_SUCH_NETWORK),
    errno.EADDRNOTAVAIL: Cause("unreachable", "no local address for that destination", NO_SUCH_NETWORK),
    errno.EAFNOSUPPORT: Cause("unreachable", "no such kind of address here", NO_SUCH_NETWORK),
    errno.ETIMEDOUT: SILENT,
    errno.ECONNRESET: Cause("reset", "the other side reset the connection", f"it is overloaded, or {OTHER_PROGRAM}"),
    errno.EPIPE: Cause("reset", "the other side closed the connection", f"it is overloaded, or {OTHER_PROGRAM}"),
    errno.EMFILE: _NO_FILES,
    errno.ENFILE: _NO_FILES,
    errno.EACCES: _FORBIDDEN,
    errno.EPERM: _FORBIDDEN,
}

# code -> kind, words, what would help
_BY_CODE: dict[Code, tuple[str, str, str]] = {
    Code.VERSION: ("version", "no common protocol version", "update the older of the two programs"),
    Code.AUTH: ("auth", "the handshake failed", f"{OTHER_PROGRAM}, or somebody on the path interferes"),
    Code.PEER_MISMATCH: ("peer-mismatch", "another peer answers there", "its address or its key changed: correct the entry"),
    Code.RUN_MISMATCH: ("run-mismatch", "that peer works on another run", "use the seeds and the manifest of the same run"),
    Code.REFUSED: ("busy", "that peer refuses for the moment", LATER),
    Code.RESOURCE_LIMIT: ("full", "that peer is full", LATER),
    Code.RATE_LIMITED: ("rate", "that peer had too many connections from here", LATER),
    Code.BANNED: ("banned", "that peer excludes this identity", "ask the run's owner"),
    Code.DUPLICATE_IDENTITY: ("duplicate", "another process runs with this identity", "stop one of the two"),
    Code.SELF: (ITSELF.kind, ITSELF.words, ITSELF.help),
    Code.SHUTDOWN: ("shutdown", "that peer is stopping", LATER),
    Code.PROTOCOL: ("protocol", "what came is not our protocol", f"{OTHER_PROGRAM}, or one side is broken"),
    Code.TIMEOUT: ("silent", "no answer", FIREWALL),
}


class HandshakeTimeout(WireError):
    """The connection was accepted, but the peer did not finish the handshake in time."""

    default_code: ClassVar[Code] = Code.TIMEOUT
    cause: ClassVar[Cause] = NO_HANDSHAKE


_UNHEARD = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN})


def heard_nothing(cause: BaseException | str) -> bool:
    """Whether what ended a connection is silence; the other errors of a socket are a FIN or RST that came."""
    return isinstance(cause, OSError) and cause.errno in _UNHEARD


def spent(error: WireError) -> bool:
    """The relay ended a circuit because it had carried all that a circuit for signals may."""
    return isinstance(error, ConnectionLost) and error.code is Code.RELAY_LIMIT


def may_come_back(error: WireError) -> bool:
    """Lost without a goodbye; or the loser of two connections, whose winner was lost while it drained.  Not if its circuit is spent:
    the channels would spend the next one as well, with the chunk that did not fit into this one."""
    return (isinstance(error, ConnectionLost) and not spent(error)) or error.code is Code.SUPERSEDED


def cause_of(error: BaseException) -> Cause:
    """The cause behind an exception of dialling or of the handshake."""
    known = getattr(error, "cause", None)
    if isinstance(known, Cause):
        return known
    if isinstance(error, ConnectionLost):
        inner = error.cause
        return cause_of(inner) if isinstance(inner, (OSError, WireError)) else Cause("lost", str(inner), OTHER_PROGRAM)
    if isinstance(error, WireError):
        kind, words, help_text = _BY_CODE.get(error.code, (error.code.name.lower().replace("_", "-"), str(error), ""))
        if error.detail and error.detail not in words:
            words = f"{words}: {error.detail}"
        return Cause(kind, words, help_text, error.retryable, error.code)
    if isinstance(error, socket.gaierror):
        return Cause("name", f"the name cannot be resolved: {error.strerror}", "check the name and this machine's DNS")
    if isinstance(error, (trio.BrokenResourceError, trio.ClosedResourceError)) and isinstance(error.__cause__, OSError):
        return cause_of(error.__cause__)
    if isinstance(error, OSError):
        return _BY_ERRNO.get(error.errno or 0, Cause("network", error.strerror or str(error)))
    if isinstance(error, trio.TooSlowError):
        return SILENT
    return Cause("network", str(error) or type(error).__name__)
