"""One direction of a connection: what TCP does with bytes between the sender's buffer and the receiver's.

Each segment crosses the sender's line, the distance and the receiver's line, and is acknowledged after the way back (packets
without payload are not queued: they are a few per cent of the bytes).  Three fates differ from that:

* **Lost** at random or in a full queue: by what arrives behind it that is found out a round trip later, and its lost packet goes
  again.  If nothing is behind it, or the repeated packet is lost, too, only the retransmission timeout tells, which doubles each time
  (RFC 6298): rare bad luck that lasts seconds.  What arrived behind it waits in the receiver's kernel, which is what one loss costs a
  connection, but counts as arrived for the window (RFC 2018).
* **Silence** (a cut line, a partition, a dead host): nothing comes back at all.  One segment goes again after the
  retransmission timeout, which doubles (RFC 6298); when it is answered all others follow.  A closed connection gives up.
* **Nobody there**: the host runs, but knows no such connection (restarted, or closed).  It answers with RST.

Bytes are copied twice: into the sender's buffer and out of the receiver's.  In between a segment is a slice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from wire.sim.congestion import congestion_of
from wire.sim.link import HEADER_BYTES, PACKET_BYTES, SEGMENT_BYTES

if TYPE_CHECKING:
    from wire.sim.pipe import SimPipe

RTO_LEAST_S = 0.2  # Linux, TCP_RTO_MIN
RTO_MOST_S = 120.0  # Linux, TCP_RTO_MAX
ORPHAN_RTO_S = 8.0  # a closed connection whose timeout grew to this is forgotten
UNSENT_BYTES = 16 * 1024  # kept beyond the window, as with TCP_NOTSENT_LOWAT; doubled for fast lines
UNSENT_MOST_BYTES = 256 * 1024
UNSENT_S = 0.001


class Segment:
    __slots__ = ("data", "fin", "here", "losses", "rst", "sent_at", "size", "timeouts")

    def __init__(self, data: memoryview, *, fin: bool = False, rst: bool = False) -> None:
        self.data = data
        self.size = len(data)
        self.fin = fin
        self.rst = rst
        self.sent_at = 0.0
        self.here = False
        self.losses = self.timeouts = 0


EMPTY = memoryview(b"")


class Flow:
    """From `near` to `far`.  Sizes in bytes, counted from the start of the connection where they are totals."""

    def __init__(self, near: SimPipe, far: SimPipe, rtt_s: float) -> None:
        self.near = near
        self.far = far
        self.net = near.host.internet
        self.congestion = congestion_of(near.host.congestion)
        self.congestion.rtt_s = rtt_s
        self.buffer_bytes = near.host.send_buffer
        self.window_bytes = far.host.receive_buffer
        self.unsent_most = UNSENT_BYTES
        self.unsent = 0
        self.under_way = 0  # sent and not known to have arrived
        self.taken = 0  # from the program
        self.sent = 0
        self.acked = 0  # arrived in order, as far as the sender knows
        self.arrived = 0  # the same, as the receiver knows
        self.limit = self.window_bytes  # the sender may send up to here
        self.fin = ""  # "", "wanted", "sent", "acked"
        self.over = False
        self._pending: deque[memoryview] = deque()
        self._order: deque[Segment] = deque()  # sent and not delivered, in order
        self._held: deque[Segment] = deque()  # swallowed by silence
        self._timer = False
        self._rto_s = 0.0
        self._full = False  # the sender waits for the receiver's program
        self._there_at = 0.0
        lines = (near.host.link.loss, far.host.link.loss) if near.host is not far.host else (0.0, 0.0)
        self._passes = (1 - lines[0]) * (1 - lines[1])

    # -- the program's side

    def room(self) -> int:
        return min(self.unsent_most - self.unsent, self.buffer_bytes - (self.taken - self.acked))

    def writable(self) -> bool:
        # Half of it, so that a program is woken for more than one packet.
        return 2 * self.unsent <= self.unsent_most and self.taken - self.acked < self.buffer_bytes

    def take(self, views: Sequence[memoryview]) -> int:
        """Copies from the front of `views` what there is room for."""
        left = room = max(self.room(), 0)
        pieces: list[memoryview] = []
        for view in views:
            if left <= 0:
                break
            piece = view[:left]
            pieces.append(piece)
            left -= len(piece)
        count = room - left
        if count:
            self._pending.append(memoryview(pieces[0].tobytes() if len(pieces) == 1 else b"".join(pieces)))
            self.unsent += count
            self.taken += count
            self.push()
        return count

    def finish(self) -> None:
        if not self.fin:
            self.fin = "wanted"
            self.push()

    def stop(self, *, rst: bool) -> None:
        """Nothing goes any more; with rst the other side is told, behind what is on its way."""
        if not self.over:
            self.over = True
            self._pending.clear()
            self._held.clear()
            self.unsent = 0
            if rst:
                self._launch(Segment(EMPTY, rst=True))

    def push(self) -> None:
        """Send what the windows allow."""
        while not self.over and not self._held:
            if not self._pending:
                if self.fin == "wanted":
                    self.fin = "sent"
                    self._send(Segment(EMPTY, fin=True))
                return
            size = min(SEGMENT_BYTES, self.unsent)
            room = int(self.congestion.window) - self.under_way
            if room < size:
                if room < PACKET_BYTES and self.under_way:
                    return
                size = min(size, max(room, PACKET_BYTES))
            if self.limit - self.sent < size:
                size = self.limit - self.sent
                if size <= 0:
                    if not self._full:
                        self._full = True
                        self.look()
                    return
            self._send(Segment(self._cut(size)))

    def _cut(self, size: int) -> memoryview:
        head = self._pending[0]
        if len(head) < size and len(self._pending) > 1:  # small writes: they share a packet
            parts, total = [], 0
            while self._pending and total < size:
                parts.append(self._pending.popleft())
                total += len(parts[-1])
            head = memoryview(b"".join(parts))
            self._pending.appendleft(head)
        piece = head[:size]
        if len(piece) == len(head):
            self._pending.popleft()
        else:
            self._pending[0] = head[size:]
        return piece

    def _send(self, segment: Segment) -> None:
        self.unsent -= segment.size
        self.sent += segment.size
        self.under_way += segment.size
        self._order.append(segment)
        self._launch(segment)

    # -- the way there

    def _launch(self, segment: Segment) -> None:
        segment.sent_at = self.net.now
        if self.near.host is self.far.host:
            self.net.after(self.net.delay(self.near.host, self.far.host), self._arrive, segment)
        elif not self.near.host.up.put(self, segment.size + HEADER_BYTES, self._crossed, segment):
            self._lost(segment)

    def _crossed(self, segment: Segment) -> None:
        if not self.net.passes(self.near, self.far):
            self._silent(segment)
            return
        # A repeated segment must not be overtaken by its own loss: the order of a connection is kept on the way.
        self._there_at = max(self._there_at, self.net.now + self.net.delay(self.near.host, self.far.host))
        packets = 1 if segment.losses else max(1, segment.size / PACKET_BYTES)  # of a repeated segment the lost one counts
        if segment.size and self._passes < 1 and self.net.rng.random() > self._passes**packets:
            self._lost(segment)
        else:
            self.net.at(self._there_at, self._came_down, segment)

    def _came_down(self, segment: Segment) -> None:
        if not self.far.host.down.put(self, segment.size + HEADER_BYTES, self._arrive, segment):
            self._lost(segment)

    def _lost(self, segment: Segment) -> None:
        self.net.losses += 1
        self.net.note("lost", self.near.number, segment.size)
        if segment.rst:
            return
        segment.losses += 1
        found_s = max(self.congestion.rtt_s, 0.0002)
        if segment.losses > 1 or self.under_way == segment.size:
            found_s = min((found_s + RTO_LEAST_S) * 2**segment.timeouts, RTO_MOST_S)
            segment.timeouts += 1
        self.net.after(found_s, self._repeat, segment)

    def _repeat(self, segment: Segment) -> None:
        if not self.over and not segment.here:
            self.congestion.lost(self.net.now)
            self._launch(segment)

    def _silent(self, segment: Segment) -> None:
        if self.over or segment.rst:
            return
        self._held.append(segment)
        if not self._timer:
            self._timer = True
            self._rto_s = self._rto_s or max(RTO_LEAST_S, 2 * self.congestion.rtt_s)
            self.net.after(self._rto_s, self._retry)

    def _retry(self) -> None:
        self._timer = False
        if self.over or not self._held:
            return
        self._rto_s = min(2 * self._rto_s, RTO_MOST_S)
        if self.near.closed and self._rto_s > ORPHAN_RTO_S:
            self.near.forget()
            return
        self._launch(self._held.popleft())

    def _arrive(self, segment: Segment) -> None:
        far = self.far
        if not self.net.passes(self.near, far):
            self._silent(segment)
            return
        if segment.rst:
            far.was_reset()
            return
        if far.gone or (far.closed and segment.size):
            far.answer_reset()
            return
        if not segment.here:
            segment.here = True
            order = self._order
            while order and order[0].here:
                first = order.popleft()
                self.arrived += first.size
                far.deliver(first.data, first.fin)
        self.net.after(self.net.delay(far.host, self.near.host), self._acknowledged, segment, self.arrived, far.read_bytes)

    # -- the way back

    def _acknowledged(self, segment: Segment, arrived: int, read: int) -> None:
        if self.over:
            return
        if not self.net.passes(self.far, self.near):
            self._silent(segment)
            return
        now = self.net.now
        limited = 2 * self.under_way >= self.congestion.window
        self.under_way -= segment.size
        self.acked = max(self.acked, arrived)
        self.limit = max(self.limit, read + self.window_bytes)
        if segment.size:
            self.congestion.acked(segment.size, max(now - segment.sent_at, 1e-6), now, limited)
        self._rto_s = 0.0
        if self._held:
            held, self._held = self._held, deque()
            for item in held:
                self._launch(item)
        if segment.fin:
            self.fin = "acked"
            self.near.perhaps_forget()
        self.push()
        if self.writable():
            self.near.wake_writer()

    def look(self) -> None:
        """The receiver's program has read: tell a sender that waits for room."""
        read = self.far.read_bytes
        if self._full and read + self.window_bytes - self.limit >= min(self.window_bytes // 2, 4 * SEGMENT_BYTES):
            self._full = False
            self.net.after(self.net.delay(self.far.host, self.near.host), self._opened, read)

    def _opened(self, read: int) -> None:
        if self.over:
            return
        if not self.net.passes(self.far, self.near):  # the update is lost: the sender asks again
            self.net.after(max(RTO_LEAST_S, self.congestion.rtt_s), self._opened, self.far.read_bytes)
            return
        self.limit = max(self.limit, read + self.window_bytes)
        self.push()
        if self.writable():
            self.near.wake_writer()
