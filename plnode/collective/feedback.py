"""Error feedback: what a lossy wire took away is added to the next round, so that over time nothing is lost.

A vector that goes through bf16 or int8 blocks comes out with an error, in every round on the same side for small elements: they
would never be learned.  So a member remembers for every element what it still *owes* to the sum, adds it before the next
encoding and keeps the new error (Seide et al. 2014, "1-Bit Stochastic Gradient Descent"; Karimireddy et al. 2019).  Then the sum of all
applied results differs from the sum of all true ones by no more than one round's error.

**One vector is enough.**  A member's contributions to other shares are encoded by it, and so are the results of its own share; its
own contribution to its own share is never encoded.  So every element is encoded by a member at most once a round, and an error
of a contribution and one of a result are the same thing: an amount that is missing in the sum.  The vector therefore outlives
a change of the shares, and belongs to the node, not to a generation's `Reducer`.

**A round counts for all or for nobody**, but a member can see its own part succeed while another's fails.  So the new debt is
only *proposed* by a round that returned, and the next round decides by its step: the same step again means the earlier
attempt was thrown away, and its debt with it; a later step means that it counted.  A caller that knows earlier says `commit`.
Costs two vectors of the model's stage (fp32) while a round runs.  Elements whose error is not finite owe nothing: a diverged gradient
ends its step, not all later ones.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from wire.tensor import Array, Bf16, DType, Int8Blocks, NumericCodec, Plain

WIRES = ("fp32", "bf16", "int8")
"""Values of the manifest's `collective.wire`.  fp32: as they are, so fp64 for a model in fp64."""

Debt = npt.NDArray[np.float32]


def codec_for(wire: str, dtype: DType) -> NumericCodec:
    """How vectors of `dtype` (fp32 or fp64) are written.  ValueError: an unknown wire, or a lossy one for fp64."""
    if wire not in WIRES or (dtype is DType.fp64 and wire != "fp32"):
        raise ValueError(f"no wire {wire!r} for a vector of {dtype.name}: {', '.join(WIRES)}, and fp64 only as it is (fp32)")
    codecs: dict[str, NumericCodec] = {"fp32": Plain(dtype), "bf16": Bf16(), "int8": Int8Blocks()}
    return codecs[wire]


class Feedback:
    """What this node owes to the sum of its stage's gradient.  Zero at first and after `reset` (the state was loaded anew)."""

    def __init__(self, elements: int) -> None:
        self._elements = elements
        self._owed = np.zeros(elements, np.float32)
        self._proposed: Debt | None = None
        self._step = -1

    @property
    def elements(self) -> int:
        """Length of the vector."""
        return self._elements

    @property
    def owed(self) -> Debt:
        """What is missing so far, if the last round that succeeded counts."""
        return self._owed if self._proposed is None else self._proposed

    def begin(self, step: int) -> Debt:
        """A round of `step` begins: decide about the one before, and return what to add to the vector (not to be written to)."""
        if self._step < step:
            self.commit()
        else:
            self._proposed = None
        self._step = step
        return self._owed

    def propose(self, debt: Debt) -> None:
        """The round that began last succeeded here; `debt` is owed if it counts."""
        self._proposed = debt

    def commit(self) -> None:
        """The last round counts.  Idempotent; the next round of a later step does the same."""
        if self._proposed is not None:
            self._owed, self._proposed = self._proposed, None

    def reset(self) -> None:
        """Owe nothing."""
        self._owed[:] = 0
        self._proposed = None


def encode(codec: NumericCodec, part: Array) -> tuple[memoryview, Array]:
    """`part` as bytes for the wire, and as whoever decodes them sees it.  Of a plain codec both are views of `part`."""
    if isinstance(codec, Plain):
        return part.data.cast("B"), part
    raw = memoryview(bytearray(codec.wire_size(part.shape)))
    # Beyond the range of a codec a number becomes infinite, and the owner of the share will say whose it was.
    with np.errstate(over="ignore", invalid="ignore"):
        codec.encode(part, raw)
    return raw, codec.decode(raw, part.shape)


def shortfall(wanted: Array, got: Array) -> Array:
    """What of `wanted` is missing in `got`; zero where that is no number."""
    with np.errstate(over="ignore", invalid="ignore"):
        missing: Array = wanted - got
    missing[~np.isfinite(missing)] = 0
    return missing
