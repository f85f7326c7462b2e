"""Packed chunks as a target: what unpacks packs again, into no more memory than the chunk has."""

from __future__ import annotations

from collections.abc import Callable

from tests.fuzz.engine import Outcome, Target
from tests.wire.test_planes import bomb, chunk_of
from wire.errors import RemoteProtocolError
from wire.planes import Planes, raw_size


def _planes_prepared() -> Callable[[bytes], Outcome]:
    planes = Planes()
    into = memoryview(bytearray(1 << 18))
    planes.pack(into)  # the first makes its scratch

    def run(data: bytes) -> Outcome:
        packed = memoryview(data)
        size = raw_size(packed)
        planes.unpack(packed, into[:size])
        again = planes.pack(into[:size])
        return Outcome((size.bit_length(), again is None))

    return run


def _planes_seeds() -> list[bytes]:
    zeros = Planes().pack(memoryview(bytes(2000)))
    assert zeros is not None
    return [bytes(zeros), *(chunk_of(bomb(claimed), 1000) for claimed in (1000, 1 << 20, 1 << 31))]


PLANES = Target("planes", _planes_prepared, (RemoteProtocolError,), _planes_seeds)
