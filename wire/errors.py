"""Errors: whose fault, which code, whether a retry makes sense, and what to do next.

One number space serves four places on the wire (hello refusals, RESET, GOAWAY, Done), so that a cause keeps its number however it
travels, and one exception class belongs to each number, so that a caller catches `RateLimited` instead of comparing numbers.

What goes wrong without this.  "Refused", "full" and "down" read alike and a contributor believes to be banned; a peer's mistake
is blamed on our own code; and text made by a stranger is printed raw into a terminal or a log line.  Hence three rules.

* `local` says whose fault it is: True means that this process misused something, or that the peer says so of us.
* `retryable` is a property of the code (table below), never a guess at the place of the `except`.
* Foreign text passes `printable` before it becomes part of an exception: at most 128 bytes, ASCII, escaped, and never parsed.

A number from the peer that this version does not know is read as INTERNAL and named in the detail: a newer peer must be able to
refuse us with a code that was invented later.

Source of the codes: the project's wire specification, section "Errors"; they never change their number, new ones are appended.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from wire.identity import PeerId

TEXT_MAX_BYTES = 128  # one terminal line; enough for a sentence, too little to flood a log with


class Code(IntEnum):
    """Causes, as u16 on the wire."""

    OK = 0
    INTERNAL = 1
    PROTOCOL = 2
    VERSION = 3
    AUTH = 4
    PEER_MISMATCH = 5
    RUN_MISMATCH = 6
    REFUSED = 7
    RESOURCE_LIMIT = 8
    RATE_LIMITED = 9
    PROTOCOL_UNKNOWN = 10
    TOO_LARGE = 11
    CANCELLED = 12
    TIMEOUT = 13
    SUPERSEDED = 14
    SHUTDOWN = 15
    IDLE = 16
    NO_RESERVATION = 17
    RELAY_LIMIT = 18
    BANNED = 19
    EXCESSIVE = 20
    BAD_SIGNATURE = 21
    STALE = 22
    EXPECTATION = 23
    DUPLICATE = 24
    NOT_MEMBER = 25
    DUPLICATE_IDENTITY = 26
    SELF = 27


RETRYABLE: frozenset[Code] = frozenset(
    {
        Code.REFUSED,
        Code.RESOURCE_LIMIT,
        Code.RATE_LIMITED,
        Code.TIMEOUT,
        Code.SUPERSEDED,
        Code.SHUTDOWN,
        Code.IDLE,
        Code.RELAY_LIMIT,
    }
)

# What a person, or the caller, does next.  Shown behind the cause; a table, so that no place words it differently.
ADVICE: dict[Code, str] = {
    Code.OK: "nothing is wrong",
    Code.INTERNAL: "a fault inside the program; the log of the side at fault has the trace",
    Code.PROTOCOL: "the protocol was broken; if both sides run a released version, report it",
    Code.VERSION: "no common protocol version; update the older side",
    Code.AUTH: "the other side could not prove who it is, or the bytes were changed on the way",
    Code.PEER_MISMATCH: "another node answers at this address; ask for its new address or id",
    Code.RUN_MISMATCH: "the two nodes belong to different runs; compare the run manifests",
    Code.REFUSED: "the peer is busy; try again later",
    Code.RESOURCE_LIMIT: "the peer is full; try again later or use another peer",
    Code.RATE_LIMITED: "asked too often; slow down and try again",
    Code.PROTOCOL_UNKNOWN: "the peer does not offer this service; use another peer",
    Code.TOO_LARGE: "the message or tensor is over a limit; send less",
    Code.CANCELLED: "the other end no longer wants it",
    Code.TIMEOUT: "no answer in time; try again or use another peer",
    Code.SUPERSEDED: "another connection to the same peer took over",
    Code.SHUTDOWN: "the peer is stopping; use another peer or try again later",
    Code.IDLE: "the connection was not used; connect again when needed",
    Code.NO_RESERVATION: "the target holds no place at this relay; look up its record again",
    Code.RELAY_LIMIT: "the relay is at its limit; use another relay or try again later",
    Code.BANNED: "this node is excluded from the run; ask the owner of the run",
    Code.EXCESSIVE: "more small frames than any well-behaved peer sends; the connection was ended",
    Code.BAD_SIGNATURE: "the signature does not belong to this statement",
    Code.STALE: "a newer one is already known",
    Code.EXPECTATION: "the tensor is not what the receiver's run manifest implies; compare the manifests",
    Code.DUPLICATE: "it was delivered before",
    Code.NOT_MEMBER: "only members of the run may ask this; join with the run manifest",
    Code.DUPLICATE_IDENTITY: "two processes use one identity; stop one or give it its own data folder",
    Code.SELF: "the address leads to this node itself",
}


def printable(text: str | bytes, max_bytes: int = TEXT_MAX_BYTES) -> str:
    """Foreign text made harmless: printable ASCII as it is, all else escaped, at most `max_bytes` bytes, the cut shown as "...".

    Applying it twice changes nothing, so that text may pass through several errors; the price is that a backslash stays one.
    """
    # The cut before the loop bounds the work; no character becomes shorter by escaping.
    source = text[: max_bytes + 1].decode("latin-1") if isinstance(text, bytes) else text[: max_bytes + 1]
    parts: list[str] = []
    size = 0
    for char in source:
        piece = char if " " <= char <= "~" else _escape(ord(char))
        if size + len(piece) > max_bytes:
            # Make room for the mark that shows the cut.
            while parts and size + len(_CUT) > max_bytes:
                size -= len(parts.pop())
            return "".join(parts) + _CUT[: max_bytes - size]
        parts.append(piece)
        size += len(piece)
    return "".join(parts)


_CUT = "..."


def _escape(number: int) -> str:
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


class WireError(Exception):
    """Base of everything that this package raises on purpose.

    `code`: the cause.  `retryable`: the same request may succeed later without a change.  `local`: our own side is at fault, or
    the peer says it is.  `detail`: escaped text, <= 128 bytes.  `retry_after`: seconds to wait that the peer asked for, or None.
    """

    default_code: ClassVar[Code] = Code.INTERNAL

    code: Code
    retryable: bool
    local: bool
    detail: str
    retry_after: float | None

    def __init__(
        self,
        detail: str | bytes = "",
        *,
        code: Code | None = None,
        local: bool = False,
        retry_after: float | None = None,
    ) -> None:
        self.code = self.default_code if code is None else code
        self.retryable = self.code in RETRYABLE
        self.local = local
        self.detail = printable(detail)
        self.retry_after = retry_after
        super().__init__(self.detail)

    def __str__(self) -> str:
        cause = f"{self.code.name}: {self.detail}" if self.detail else self.code.name
        wait = "" if self.retry_after is None else f"; again in {self.retry_after:.3g} s"
        return f"{cause} ({ADVICE[self.code]}{wait})"

    def __repr__(self) -> str:
        side = "local" if self.local else "remote"
        return f"<{type(self).__name__} {self.code.name} {side} {self.detail!r}>"


class LocalProtocolError(WireError):
    """This process misused the package.  The session, stream or channel is as it was before the call."""

    default_code = Code.PROTOCOL

    def __init__(self, detail: str | bytes = "", *, code: Code | None = None) -> None:
        super().__init__(detail, code=code, local=True)


class RemoteProtocolError(WireError):
    """The peer broke the protocol.  On a session the connection ends, on a stream that stream is reset, with `code`."""

    default_code = Code.PROTOCOL

    def __init__(self, code: Code = Code.PROTOCOL, detail: str | bytes = "") -> None:
        super().__init__(detail, code=code)


class PeerIdMismatch(WireError):
    """Whoever answered proved another id than the one that was dialled.  The address is wrong for `expected`, right for `got`."""

    default_code = Code.PEER_MISMATCH

    def __init__(self, expected: PeerId, got: PeerId) -> None:
        self.expected = expected
        self.got = got
        super().__init__(f"expected {expected}, got {got}")


class LimitExceeded(WireError):
    """Something is over one of our limits: `name` is a field of `Limits`, `value` what was asked for, `cap` what is allowed."""

    default_code = Code.RESOURCE_LIMIT

    def __init__(self, name: str, value: float, cap: float, *, code: Code | None = None, local: bool = False) -> None:
        self.name = name
        self.value = value
        self.cap = cap
        super().__init__(f"{name}: {value} is over {cap}", code=code, local=local)


class ConnectionLost(WireError):
    """The connection ended without a GOAWAY.  `cause`: an exception or a sentence.  Connecting again may help."""

    default_code = Code.INTERNAL

    def __init__(self, cause: BaseException | str = "the connection ended") -> None:
        self.cause = cause
        code = cause.code if isinstance(cause, WireError) else Code.INTERNAL
        if isinstance(cause, WireError):
            detail = f"{cause.code.name} {cause.detail}".rstrip()
        else:
            detail = cause if isinstance(cause, str) else f"{type(cause).__name__}: {cause}"
        super().__init__(detail, code=code)
        self.retryable = True

    def __str__(self) -> str:
        return f"connection lost: {self.detail}"


class StreamReset(WireError):
    """The peer, or we, reset the stream.  Unread data are gone; what the other end did of the request is unknown, unless it
    says that the stream was `unseen`: then nothing."""

    default_code = Code.CANCELLED

    def __init__(self, code: Code | int, detail: str | bytes = "", *, local: bool = False, unseen: bool = False) -> None:
        known, text = known_code(code, detail)
        self.unseen = unseen
        super().__init__(text, code=known, local=local)


def _class_for(code: Code) -> type[WireError]:
    name = "".join(part.capitalize() for part in code.name.split("_"))
    name = {"Ok": "Ended", "Protocol": "ProtocolBroken", "Timeout": "TimedOut"}.get(name, name)
    return type(name, (WireError,), {"default_code": code, "__doc__": f"{code.name}: {ADVICE[code]}.", "__module__": __name__})


# One class a code.  `except errors.ERRORS[Code.RATE_LIMITED]` and `except WireError as e: e.code` both work.
ERRORS: dict[Code, type[WireError]] = {code: _class_for(code) for code in Code}


def known_code(code: int, detail: str | bytes = "") -> tuple[Code, str]:
    """The code as this version knows it, and the escaped detail; an unknown number becomes INTERNAL, named in the detail."""
    text = printable(detail)
    try:
        return Code(code), text
    except ValueError:
        return Code.INTERNAL, f"unknown code {code} {text}".rstrip()


def error_for(code: Code | int, *, local: bool = False, detail: str | bytes = "", retry_after: float | None = None) -> WireError:
    """The exception for a code that arrived or is to be raised; never fails, whatever number a peer sent."""
    known, text = known_code(code, detail)
    return ERRORS[known](text, local=local, retry_after=retry_after)
