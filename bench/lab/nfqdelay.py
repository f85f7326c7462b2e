#!/usr/bin/env python3
"""nfqdelay.py - delay, jitter and loss for packets sent to NFQUEUE: a stand-in for tc netem where the
kernel has no sch_netem.  Standard library only, one process per network namespace.

  nfqdelay.py QUEUE:DELAY_MS[:JITTER_MS[:LOSS_PERCENT]] ...

  ip netns exec R iptables -t mangle -A PREROUTING  -i r-a -j NFQUEUE --queue-num 1
  ip netns exec R iptables -t mangle -A POSTROUTING -o r-a -j NFQUEUE --queue-num 2
  ip netns exec R python3 nfqdelay.py 1:20:0:0.1 2:20

The packet itself stays in the kernel: only its number is copied up, and (without jitter) one
batch verdict releases everything that is due, so the cost per packet is small.  Without the
GSO flag the kernel splits large packets first, so loss hits single MTU-sized packets, as on a line.
Prints "ready" once all queues are bound; SIGUSR1 prints counters to stderr; SIGTERM ends it, and
packets still waiting are dropped.  Run it with `chrt -f 10` for accurate delays on a busy machine.
"""
import collections
import heapq
import random
import select
import signal
import socket
import struct
import sys
import time

NETLINK_NETFILTER = 12
T_PACKET, T_VERDICT, T_CONFIG, T_BATCH = (0x300, 0x301, 0x302, 0x303)
DROP, ACCEPT = 0, 1
SO_RCVBUFFORCE, SOL_NETLINK, NETLINK_NO_ENOBUFS = 33, 270, 5


def attr(kind, data):
    return struct.pack("=HH", 4 + len(data), kind) + data + b"\0" * (-len(data) % 4)


def msg(kind, queue, attrs, flags=1):
    body = struct.pack("!BBH", 0, 0, queue) + attrs
    return struct.pack("=IHHII", 16 + len(body), kind, flags, 0, 0) + body


class Queue:
    def __init__(self, number, delay, jitter=0.0, loss=0.0, maxlen=100000):
        self.number, self.delay, self.jitter, self.loss = number, delay, jitter, loss
        self.wait = [] if jitter else collections.deque()      # (due, packet id)
        self.seen = self.dropped = self.peak = 0
        s = self.sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER)
        s.bind((0, 0))
        s.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 64 << 20)
        s.setsockopt(SOL_NETLINK, NETLINK_NO_ENOBUFS, 1)
        s.send(msg(T_CONFIG, number,
                   attr(1, struct.pack("!BBH", 1, 0, 0))           # CMD bind
                   + attr(2, struct.pack("!IB", 0, 1))             # PARAMS copy META only
                   + attr(3, struct.pack("!I", maxlen)), 5))       # QUEUE_MAXLEN, with ACK
        code = struct.unpack_from("=i", s.recv(4096), 16)[0]
        if code:
            raise OSError(-code, f"NFQUEUE {number} bind")
        s.setblocking(False)

    def verdict(self, kind, ident, what):
        self.sock.send(msg(kind, self.number, attr(2, struct.pack("!II", what, ident))))

    def read(self, now):
        recv, wait = self.sock.recv, self.wait
        for _ in range(256):
            try:
                data = recv(65536)
            except (BlockingIOError, InterruptedError):
                break
            pos = 0
            while pos + 16 <= len(data):
                size, kind = struct.unpack_from("=IH", data, pos)
                if kind == T_PACKET:
                    # NFQA_PACKET_HDR is the first attribute: 16 nlmsg + 4 nfgen + 4 attr
                    ident = struct.unpack_from("!I", data, pos + 24)[0]
                    self.seen += 1
                    if self.loss and random.random() < self.loss:
                        self.dropped += 1
                        self.verdict(T_VERDICT, ident, DROP)
                    elif self.jitter:
                        due = now + self.delay + random.uniform(0, self.jitter)
                        heapq.heappush(wait, (due, ident))
                    else:
                        wait.append((now + self.delay, ident))
                pos += (size + 3) & ~3
        if len(wait) > self.peak:
            self.peak = len(wait)

    def release(self, now):
        wait = self.wait
        if self.jitter:
            while wait and wait[0][0] <= now:
                self.verdict(T_VERDICT, heapq.heappop(wait)[1], ACCEPT)
        else:
            last = None
            while wait and wait[0][0] <= now:
                last = wait.popleft()[1]
            if last is not None:
                self.verdict(T_BATCH, last, ACCEPT)


def parse(spec):
    """QUEUE:DELAY_MS[:JITTER_MS[:LOSS_PERCENT]] -> number, seconds, seconds, share."""
    number, delay, jitter, loss = [*spec.split(":"), "0", "0"][:4]
    return int(number), float(delay) / 1e3, float(jitter) / 1e3, float(loss) / 100


def main():
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        sys.exit(2 if len(sys.argv) < 2 else 0)
    try:
        specs = [parse(spec) for spec in sys.argv[1:]]
    except ValueError:
        sys.exit("nfqdelay.py: each argument is QUEUE:DELAY_MS[:JITTER_MS[:LOSS_PERCENT]]")
    queues = [Queue(*spec) for spec in specs]
    by_fd = {q.sock.fileno(): q for q in queues}

    def report(*_):
        for q in queues:
            print(f"queue {q.number}: seen {q.seen} dropped {q.dropped} peak {q.peak}"
                  f" waiting {len(q.wait)}", file=sys.stderr, flush=True)
    signal.signal(signal.SIGUSR1, report)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print("ready", flush=True)
    fds = list(by_fd)
    while True:
        due = min((q.wait[0][0] for q in queues if q.wait), default=None)
        timeout = None if due is None else max(0.0, due - time.monotonic())
        ready = select.select(fds, [], [], timeout)[0]
        now = time.monotonic()
        for fd in ready:
            by_fd[fd].read(now)
        now = time.monotonic()
        for q in queues:
            q.release(now)


if __name__ == "__main__":
    main()
