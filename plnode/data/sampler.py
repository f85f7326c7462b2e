"""Which tokens microbatch (step, index) holds: a pure function of the corpus, the seed and the batch shape.

Theory.  Origins come and go, leases expire and are given again, a run restarts from disk: whoever draws (step, index) must get
the same sequences, and over an epoch each sequence must be drawn exactly once.  So nothing is stateful.  The corpus is cut into
windows of `seq_len` tokens (each with one token more, the last target); sample number `(step x microbatches + index) x
sequences + row` counts through the run without a gap; its quotient by the number of windows is the epoch, its remainder a
position in that epoch's permutation.  An epoch may end within a microbatch; the next row then is the first of the next epoch.

The permutation sorts raw 64-bit Philox words (keyed by seed and epoch): numpy promises the raw stream, but not that
`Generator.permutation` stays the same between versions, and a swarm may hold several.  The held-out order is fixed apart from
the run's seed, so that losses of different runs are comparable; it is shuffled, so that a few microbatches already cover the
whole held-out text.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from plnode.data.corpus import Corpus

Int64Array = npt.NDArray[np.int64]


def permutation(seed: int, purpose: str, epoch: int, size: int) -> Int64Array:
    """A permutation of range(size), the same on every platform and numpy version."""
    numbers = seed.to_bytes(8, "little") + epoch.to_bytes(8, "little")
    digest = hashlib.sha256(b"plnode-data-1" + numbers + purpose.encode()).digest()
    words = np.random.Philox(key=int.from_bytes(digest[:16], "little")).random_raw(size)
    return np.argsort(words, kind="stable").astype(np.int64)


class Sampler:
    """Draws microbatches.  `sequences` rows of `seq_len` + 1 tokens each, `microbatches` of them a step.

    Raises ValueError if either part of the corpus is too short for one window (training) or one microbatch (held-out).
    """

    def __init__(self, corpus: Corpus, seed: int, seq_len: int, sequences: int, microbatches: int) -> None:
        if min(seq_len, sequences, microbatches) < 1 or not 0 <= seed < 2**64:
            raise ValueError("seq_len, sequences and microbatches must be at least 1, seed an unsigned 64-bit number")
        self._corpus, self._seed = corpus, seed
        self.seq_len, self.sequences, self.microbatches = seq_len, sequences, microbatches
        self.windows = (len(corpus.tokens) - 1) // seq_len
        heldout_windows = (len(corpus.heldout) - 1) // seq_len
        self.heldout_microbatches = heldout_windows // sequences
        if self.windows < 1 or self.heldout_microbatches < 1:
            raise ValueError(
                f"corpus {corpus.name} has {len(corpus.tokens)} training and {len(corpus.heldout)} held-out tokens, "
                f"too few for windows of {seq_len} and {sequences} held-out sequences"
            )
        self._heldout_order = permutation(0, "heldout", 0, heldout_windows)
        # The two epochs that one microbatch may touch; a cache only, the values are a function of the epoch.
        self._orders: dict[int, Int64Array] = {}

    def _order(self, epoch: int) -> Int64Array:
        if epoch not in self._orders:
            if len(self._orders) >= 2:
                del self._orders[min(self._orders)]
            self._orders[epoch] = permutation(self._seed, "train", epoch, self.windows)
        return self._orders[epoch]

    def rows(self, step: int, index: int) -> list[tuple[int, int]]:
        """The (epoch, window) of each row of a training microbatch.  Raises ValueError for an index outside the step."""
        if step < 0 or not 0 <= index < self.microbatches:
            raise ValueError(f"no microbatch ({step}, {index}): a step has {self.microbatches}")
        first = (step * self.microbatches + index) * self.sequences
        places = (divmod(first + row, self.windows) for row in range(self.sequences))
        return [(epoch, int(self._order(epoch)[position])) for epoch, position in places]

    def train(self, step: int, index: int) -> Int64Array:
        """Token ids of training microbatch (step, index): int64, shape (sequences, seq_len + 1)."""
        return self._gather(self._corpus.tokens, [window for _, window in self.rows(step, index)])

    def heldout(self, index: int) -> Int64Array:
        """Token ids of held-out microbatch `index` < `heldout_microbatches`: int64, shape (sequences, seq_len + 1)."""
        if not 0 <= index < self.heldout_microbatches:
            raise ValueError(f"no held-out microbatch {index}: there are {self.heldout_microbatches}")
        windows = self._heldout_order[index * self.sequences : (index + 1) * self.sequences]
        return self._gather(self._corpus.heldout, windows.tolist())

    def _gather(self, tokens: npt.NDArray[np.uint16], windows: list[int]) -> Int64Array:
        starts = np.asarray(windows, dtype=np.int64) * self.seq_len
        ids: Int64Array = tokens[starts[:, None] + np.arange(self.seq_len + 1)].astype(np.int64)
        return ids
