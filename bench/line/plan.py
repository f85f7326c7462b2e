"""What `python -m bench link --lab` measures: points (a line and a congestion control), and who runs on each.

The share of the line.  A line of R Mbit/s is shaped by whole Ethernet frames: of 1514 bytes, 14 are Ethernet's, 20 IPv4's, 20 TCP's
and 12 its timestamps', so at most 1448 are payload, and 100 % is R x 1448 / 1514 (191.3 of 200).  What encryption and framing add is
not taken off: it is a cost of whoever adds it.

By time and not by bytes: a run of a fixed size on a lossy line ends before the line shows what it does.  15 s, of which the first 5
are dropped: slow start at 80 ms lasts one or two, and a lossy cubic connection sinks for some seconds from where it began.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from bench.lab import Network

__all__ = ["SIZES", "TENSOR_BYTES", "LinePlan", "Point", "Runner", "payload_mbit"]

KIB, MIB = 1 << 10, 1 << 20
FRAME_BYTES, PAYLOAD_BYTES = 1514, 1448
TENSOR_BYTES = 8 * MIB
# Messages over one byte stream, and tensors over a channel: only those use lanes, and those of bf16 may be packed.
SIZES = {"16k": 16 * KIB, "256k": 256 * KIB, "1m": MIB, "tensor": TENSOR_BYTES, "bf16": TENSOR_BYTES}


def payload_mbit(rate_mbit: float) -> float:
    """What TCP can carry of a line at most, Mbit/s."""
    return rate_mbit * PAYLOAD_BYTES / FRAME_BYTES


@dataclass(frozen=True, slots=True)
class Point:
    """A line and the congestion control of everybody on it."""

    rate_mbit: float = 200.0
    rtt_ms: float = 80.0
    loss_percent: float = 0.0
    congestion: str = "cubic"

    @property
    def network(self) -> Network:
        """The lab it needs."""
        return Network(self.rate_mbit, self.rtt_ms, self.loss_percent)


@dataclass(frozen=True, slots=True)
class Runner:
    """Who runs: `plnode` with a size of `SIZES` and a number of lanes (None: its own choice), or `iperf3` with connections."""

    name: str
    size: str = "1m"
    lanes: int | None = None
    connections: int = 1
    both: bool = False


RIVALS = (Runner("iperf3"), Runner("iperf3", connections=4), Runner("grpc-tls"), Runner("py-libp2p"), Runner("hivemind"))


@dataclass(frozen=True, slots=True)
class LinePlan:
    """Points with their runners, in order; `seconds` each, the first `drop_s` dropped."""

    turns: tuple[tuple[Point, tuple[Runner, ...]], ...]
    seconds: float = 15.0
    drop_s: float = 5.0

    @classmethod
    def full(cls) -> LinePlan:
        """Some ten minutes: the points of the requirements, and what explains them."""
        one, four = Runner("plnode", "tensor", 1), Runner("plnode", "tensor", 4)
        mixed = Runner("plnode", "1m", 0)
        clean, lossy = Point(), Point(loss_percent=0.1)
        small = (replace(mixed, size="16k"), replace(mixed, size="256k"))
        return cls(
            _merged(
                (clean, (mixed, *small, one, four, replace(four, both=True), *RIVALS)),
                (lossy, (mixed, one, four, *RIVALS)),
                (replace(lossy, congestion="bbr"), (one, four, RIVALS[0])),
                (replace(clean, congestion="bbr"), (mixed, one)),
                (Point(loss_percent=1.0, congestion="bbr"), (one, four, RIVALS[0])),
                (Point(rate_mbit=1000.0, rtt_ms=20.0), (one, four, RIVALS[0])),
                (Point(rate_mbit=50.0, rtt_ms=40.0), (one, replace(one, size="bf16"))),
            )
        )

    @classmethod
    def quick(cls) -> LinePlan:
        """About a minute: ours and iperf3, without loss and with 0.1 %."""
        both = (Runner("plnode", "tensor"), Runner("iperf3"))
        return cls(_merged((Point(), both), (Point(loss_percent=0.1), both)), seconds=10.0, drop_s=4.0)

    @classmethod
    def chosen(
        cls,
        *,
        rates: Sequence[float],
        rtts: Sequence[float],
        losses: Sequence[float],
        congestions: Sequence[str],
        lanes: Sequence[int],
        sizes: Sequence[str],
        both: bool,
        only: Sequence[str],
    ) -> LinePlan:
        """Every combination of what was named; the usual line where nothing was."""
        ours = [
            Runner("plnode", size, count, both=both) for size in sizes or ("tensor",) for count in lanes or (None,)
        ]
        others = [replace(rival, both=both and rival.name == "iperf3") for rival in RIVALS]
        runners = tuple(runner for runner in [*ours, *others] if not only or runner.name in only)
        lines = product(rates or (200.0,), rtts or (80.0,), losses or (0.0,), congestions or ("cubic",))
        return cls(_merged(*((Point(*line), runners) for line in lines)))

    def points(self) -> Iterator[tuple[Network, list[tuple[Point, tuple[Runner, ...]]]]]:
        """Turns that share a lab, together: building one costs seconds."""
        together: dict[Network, list[tuple[Point, tuple[Runner, ...]]]] = {}
        for point, runners in self.turns:
            together.setdefault(point.network, []).append((point, runners))
        yield from together.items()


def _merged(*turns: tuple[Point, Iterable[Runner]]) -> tuple[tuple[Point, tuple[Runner, ...]], ...]:
    """Without what would be measured twice."""
    return tuple((point, tuple(dict.fromkeys(runners))) for point, runners in turns)
