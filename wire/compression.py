"""Whether to pack the chunks of one channel: a comparison of two times.

A chunk of n bytes takes n / rate to send plain, and n / compress rate + n / (ratio x rate) packed.  Packed is sooner iff

    rate < compress rate x (1 - 1 / ratio)

with what this channel showed lately, each as an exponential average: the rate of its link, the rate of the packer, the ratio.
On Gaussian bf16 that is about 680 MB/s x 0.31 = 210 MB/s, far above what a home line has; but a stage whose cores are busy with
training packs at a tenth of that, and then a fast line is better off without.  The packer's own time is measured, so this shows.

What goes wrong.  A decision on the edge flaps, and with it the rate by which it is made: hence two thresholds, MARGIN apart.  A
ratio that was true for a fresh model is believed for ever: the first chunk of every 64th tensor is packed whatever the decision
(a probe; 0.03 % of the bytes with tensors of 6 MiB).  Data that do not shrink (None from the packer) count as ratio 1.  Above 500
Mbit/s nothing is packed and nothing probed: there, cores are worth more to the training than bytes to the line.

Never decided here: what else may be packed.  Only bf16 is, only towards a receiver that named the feature, and never text of strangers
together with secrets, since the size of the packed would tell of the secret.

Sans-IO: the clock (seconds, e.g. `time.perf_counter`) is handed in.
"""

from __future__ import annotations

from collections.abc import Callable

from wire.limits import Limits
from wire.planes import FEATURE, Planes

# Weight of the newest sample.  An eighth: sixteen chunks (4 MiB) after a change of the data 88 % of the old value are gone, and a
# single sample that a context switch spoilt moves the average by no more than its eighth.
WEIGHT = 0.125

# Switching on needs the comparison to hold with this to spare.  The average of a home line sways by a tenth (cubic, one flow).
MARGIN = 0.8


class Compression:
    """Decision and packer of one channel; for one thread at a time."""

    __slots__ = ("_clock", "_feature", "_limits", "_on", "_planes", "_probe", "_tensors", "compress_rate", "link_rate", "ratio")

    def __init__(self, limits: Limits, clock: Callable[[], float], features: tuple[str, ...] = ()) -> None:
        """`clock`: seconds, to time the packer.  `features`: see `meets`."""
        self._limits = limits
        self._clock = clock
        self._feature = FEATURE in features
        self._planes: Planes | None = None
        self._on = False
        self._probe = False
        self._tensors = 0
        self.link_rate: float | None = None  # bytes per second, None before the first measurement
        self.compress_rate: float | None = None  # raw bytes per second
        self.ratio: float | None = None  # raw bytes per packed byte

    @property
    def on(self) -> bool:
        """Whether chunks of bf16 are packed now."""
        return self._on and self._feature

    @property
    def wanted(self) -> bool:
        """Whether `pack` would try.  A probe that is due waits until the link is not fast."""
        if not self._feature or not self._probe:
            return self._feature and self._on
        return self._on or self.link_rate is None or self.link_rate < self._limits.compress_link_max_bytes_per_s

    def meets(self, features: tuple[str, ...]) -> None:
        """`features`: of the HELLO of the receiver, who may have become another program; without `planes/1` all goes plain."""
        self._feature = FEATURE in features

    def tensor_begins(self) -> None:
        """Another tensor of bf16: of every 64th the next chunk is a probe, whichever tensor under way it belongs to."""
        if self._feature:
            self._probe = self._probe or self._tensors % self._limits.compress_probe_tensors == 0
            self._tensors += 1

    def rate(self, bytes_per_s: float) -> None:
        """A measurement of how fast the channel's link carries bytes: all its lanes together, for one packer serves all of them."""
        if bytes_per_s > 0:
            self.link_rate = _average(self.link_rate, bytes_per_s)
            self._decide()

    def pack(self, chunk: memoryview, into: memoryview | None = None) -> memoryview | None:
        """The chunk, which must be bf16, packed (where: see `Planes.pack`), or None: send it as it is."""
        if not self.wanted or not chunk:
            return None
        self._probe = False
        if self._planes is None:
            self._planes = Planes(self._limits.chunk_bytes)
        began = self._clock()
        packed = self._planes.pack(chunk, into)
        took = self._clock() - began
        self.ratio = _average(self.ratio, len(chunk) / len(packed) if packed is not None else 1.0)
        if took > 0:
            self.compress_rate = _average(self.compress_rate, len(chunk) / took)
        self._decide()
        return packed

    def _decide(self) -> None:
        rate, compress, ratio, limits = self.link_rate, self.compress_rate, self.ratio, self._limits
        if rate is None or compress is None or ratio is None:
            return
        margin = 1.0 if self._on else MARGIN
        self._on = (
            rate < margin * limits.compress_link_max_bytes_per_s
            and ratio - 1.0 >= (limits.compress_ratio_min - 1.0) / margin
            and rate < margin * compress * (1.0 - 1.0 / ratio)
        )


def _average(old: float | None, new: float) -> float:
    return new if old is None else old + WEIGHT * (new - old)
