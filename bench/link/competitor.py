"""What a contestant of the link bench has to be able to do, and nothing about how.

A contestant is two processes.  The server says where it is; the client gets that, connects, and then does on request:

* `stream`: hand over `count` messages of `message_bytes` on one stream, at the end of which the server says that it has them. It
  must hold each message in one piece of memory, as whoever receives a tensor must.
* `round_trips`: 64 bytes there and 64 bytes back, one after another, on a conversation that stands.
* `handshake`: the seconds of one new connection, from nothing to the point where its user may send, both sides authenticated
  where the contestant authenticates at all; the closing is done but not counted.  None if it has no handshake.

* `flow`: messages without end, until it is cancelled; `heard` is told of bytes as the server has them.  `pull`: the same from the
  server to the client at the same time.  `control`: one small question and answer beside them, on the same connection to a user.

Each contestant is written as its users would write it well, with the fastest of its documented ways; where two were tried, its
file says which lost.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

__all__ = ["ROUND_TRIP_BYTES", "Client", "Competitor", "Heard", "Job", "Loop"]

Job = Callable[[], Awaitable[None]]  # runs until it is cancelled
Heard = Callable[[int], None]

# A control message of a pipeline (a slot, a begin, a done) has 20 to 100 bytes.
ROUND_TRIP_BYTES = 64


class Client(Protocol):
    """The client's half, connected.  All times in seconds."""

    congestion: str
    """Congestion control in force on its connection, "" if it does not say."""

    async def stream(self, message_bytes: int, count: int) -> float:
        """From the first message handed over to the server's word that it has the last."""
        ...

    async def round_trips(self, count: int) -> list[float]:
        """Each one's time."""
        ...

    async def handshake(self) -> float | None: ...

    def flow(self, message_bytes: int, heard: Heard) -> Sequence[Job]:
        """What has to run, side by side, to send without end."""
        ...

    def pull(self, message_bytes: int, heard: Heard) -> Sequence[Job]:
        """The same the other way; none at all from a contestant that has no such way."""
        ...

    async def control(self) -> float | None:
        """One round trip of 64 bytes beside a flow; several may be under way.  None from a contestant that has no such way."""
        ...

    def counts(self) -> dict[str, float]:
        """What else it counts, as figures of the report."""
        ...


class Loop(Protocol):
    """The event loop a contestant lives on: whoever measures an asyncio library must not do so through another loop."""

    def run(self, main: Any, *arguments: Any) -> None: ...

    async def line(self) -> str:
        """The next line of stdin, "" at its end."""
        ...

    async def beside(self, jobs: Sequence[Job], seconds: float) -> None:
        """Run all jobs for so long, then cancel them.  A job that fails ends all and raises."""
        ...

    async def sleep(self, seconds: float) -> None: ...


class Competitor(Protocol):
    name: str
    loop: Loop

    def serve(self) -> AbstractAsyncContextManager[dict[str, Any]]:
        """A running server; the value is what `connect` needs, as JSON."""
        ...

    def connect(self, where: dict[str, Any]) -> AbstractAsyncContextManager[Client]: ...
