"""Two sessions joined without a network, and the null sealer: records in clear, with a tag that only counts.

The null sealer exists here and nowhere else.  It keeps what matters for a session: sizes, the counter that notices a lost,
doubled or swapped record, and a destination that is written before the tag is looked at.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace

from wire.budget import Reservation
from wire.errors import Code, RemoteProtocolError
from wire.events import Event, Kind
from wire.limits import DEFAULT_LIMITS, Limits
from wire.messages import OpenBody, SessionHello, encode
from wire.records import FrameType
from wire.remembered import RememberedWindows
from wire.session import Session

HEADER = struct.Struct(">IIBBH")
TAG = struct.Struct(">QQ")
HELLO = SessionHello(
    revision=1,
    boot_id=b"bootboot",
    agent="test/1",
    features=(),
    peer_record=b"",
    observed="",
    bulk_window=4 << 20,
    max_streams=256,
)


class NullSealer:
    def __init__(self, limits: Limits = DEFAULT_LIMITS) -> None:
        self.records = 0
        self.epoch = 0
        self.since = 0
        self.limits = limits
        self.sealed: list[tuple[int, int, int, int]] = []  # (stream, type, flags, size)

    @property
    def needs_rekey(self) -> bool:
        return self.since >= self.limits.record_rekey_records

    def seal_into(self, stream: int, kind: int, flags: int, plaintext: bytes | memoryview, out: memoryview) -> int:
        size = len(plaintext)
        assert size <= self.limits.record_plaintext_max_bytes
        HEADER.pack_into(out, 0, size + 16, stream, kind, flags, 0)
        out[12 : 12 + size] = plaintext
        TAG.pack_into(out, 12 + size, self.epoch, self.records)
        self.records += 1
        self.since += 1
        self.sealed.append((stream, kind, flags, size))
        return size + 28

    def rekey(self) -> None:
        self.epoch += 1
        self.since = 0


class NullOpener:
    def __init__(self) -> None:
        self.records = 0
        self.epoch = 0

    def open_into(self, header: memoryview, body: memoryview, destination: memoryview) -> None:
        assert len(header) == 12 and len(destination) == len(body) - 16
        destination[:] = body[:-16]
        if TAG.unpack(body[-16:]) != (self.epoch, self.records):
            raise RemoteProtocolError(Code.AUTH, "bad tag")
        self.records += 1

    def rekey(self) -> None:
        self.epoch += 1


@dataclass
class End:
    """One side: its session, the bytes on their way to it, and everything that it was told."""

    session: Session
    sealer: NullSealer
    inbox: bytearray = field(default_factory=bytearray)
    seen: list[Event] = field(default_factory=list)

    def take(self, kind: type) -> list:
        """The events of one class so far, removed."""
        found = [event for event in self.seen if isinstance(event, kind)]
        self.seen = [event for event in self.seen if not isinstance(event, kind)]
        return found


def serve_all(protocol: str, guest: bool) -> Code | None:
    return None


def make_end(
    *,
    initiator: bool,
    limits: Limits = DEFAULT_LIMITS,
    serves=serve_all,
    now: float = 0.0,
    guest: bool = False,
    window_bytes: int | None = None,
    reservation: Reservation | None = None,
    remembered: RememberedWindows | None = None,
    **hello,
) -> End:
    """`window_bytes`: by default a lane's, so that one stream's window is smaller than the connection's."""
    if window_bytes is None:
        window_bytes = limits.connection_window_guest_bytes if guest else limits.connection_window_lane_bytes
    sealer = NullSealer(limits)
    session = Session(
        initiator=initiator,
        sealer=sealer,
        opener=NullOpener(),
        hello=replace(HELLO, **hello),
        limits=limits,
        now=now,
        guest=guest,
        serves=serves,
        window_bytes=window_bytes,
        reservation=reservation,
        remembered=remembered,
    )
    return End(session, sealer)


class Joined:
    """A pair of sessions.  Nothing moves but by `move`, `deliver` or `settle`."""

    def __init__(self, limits: Limits = DEFAULT_LIMITS, *, serves=serve_all, guest: bool = False, **hello) -> None:
        self.now = 100.0
        self.a = make_end(initiator=True, limits=limits, serves=serves, now=self.now, guest=guest, **hello)
        self.b = make_end(initiator=False, limits=limits, serves=serves, now=self.now, guest=guest, **hello)

    def other(self, end: End) -> End:
        return self.b if end is self.a else self.a

    def move(self, source: End, budget: int = 1 << 16) -> int:
        """Pull once and put the bytes on their way; returns how many."""
        size = 0
        for view in source.session.pull(budget, self.now):
            self.other(source).inbox += view
            size += len(view)
        source.seen += source.session.events()
        return size

    def deliver(self, end: End, size: int | None = None) -> None:
        """Let the first `size` bytes that are on their way arrive."""
        size = len(end.inbox) if size is None else min(size, len(end.inbox))
        data = memoryview(bytes(end.inbox[:size]))
        try:
            used = end.session.receive(data, self.now)
        finally:
            end.seen += end.session.events()
        del end.inbox[:used]

    def settle(self, budget: int = 1 << 16, steps: int = 10_000) -> None:
        """Move everything that can move without the application."""
        for _ in range(steps):
            moved = self.move(self.a, budget) + self.move(self.b, budget)
            for end in (self.a, self.b):
                if end.inbox:
                    self.deliver(end)
            if not moved and not self.a.session.wants_write and not self.b.session.wants_write:
                return
        raise AssertionError("it never settles")


class Puppet:
    """A peer without a session: says whatever the test wants to one real session, in well-formed records or not."""

    def __init__(self, limits: Limits = DEFAULT_LIMITS, *, initiator: bool = True, hello: bool = True, **kwargs) -> None:
        self.now = 100.0
        self.end = make_end(initiator=not initiator, limits=limits, now=self.now, **kwargs)
        self.session = self.end.session
        self.sealer = NullSealer()
        self._out = memoryview(bytearray(1 << 19))
        if hello:
            self.say(FrameType.HELLO, 0, encode(HELLO))

    def record(self, kind: int, stream: int, body: bytes = b"", flags: int = 0) -> bytes:
        """One sealed record."""
        return bytes(self._out[: self.sealer.seal_into(stream, kind, flags, body, self._out)])

    def say(self, kind: int, stream: int, body: bytes = b"", flags: int = 0) -> None:
        """Send one record; raises what the session raises."""
        self.feed(self.record(kind, stream, body, flags))

    def feed(self, data: bytes) -> int:
        """Send raw bytes."""
        try:
            return self.session.receive(memoryview(data), self.now)
        finally:
            self.end.seen += self.session.events()

    def open(self, stream: int, kind: Kind = Kind.MESSAGE, cls: int = 1, credit: int = 1 << 17, protocol: str = "x/1") -> None:
        """OPEN."""
        self.say(FrameType.OPEN, stream, encode(OpenBody(kind, protocol, cls, credit, b"")))

    def frames(self) -> list[tuple[int, int, bytes]]:
        """Everything that the session has to say now: (type, stream, body)."""
        said = []
        while views := self.session.pull(1 << 16, self.now):
            for view in views:
                at = 0
                while at < len(view):
                    size, stream, kind, _, _ = HEADER.unpack_from(view, at)
                    said.append((kind, stream, bytes(view[at + 12 : at + size - 4])))
                    at += size + 12
        self.end.seen += self.session.events()
        return said
