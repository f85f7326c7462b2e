"""Changes that a fuzzer makes to an input.  Pure: (random, bytes, another input) -> bytes, never longer than `MOST`.

Beside flips and splices there are two that know the enemy.  Lengths: two or four bytes become a number at the edge of something, for
every parser reads a length somewhere.  msgpack: a value is put in front, wrapped in arrays, or replaced by one of another type, at a
place that looks like a header, since random bytes hardly ever nest.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

MOST = 4096  # every limit that matters (hello 512, message 4 KiB, depth, counts) is reached below this; bulk comes by op codes

EDGES = (0, 1, 15, 16, 31, 32, 63, 64, 65, 127, 128, 255, 256, 511, 512, 513, 4095, 4096, 4097, 65535, 65536, 65537,
         262144, 262145, 2**31 - 1, 2**31, 2**32 - 1)  # fmt: skip
# Values of each msgpack type, and heads that promise more than there is.
VALUES = (
    b"\x00", b"\x7f", b"\xff", b"\xc0", b"\xc1", b"\xc2", b"\xc3",
    b"\x90", b"\x91\x00", b"\x80", b"\x81\xa1a\x00", b"\xa0", b"\xa1a", b"\xc4\x00", b"\xc4\x01\x00", b"\xc7\x00\x01", b"\xd4\x01\x00",
    b"\xca\x7f\xc0\x00\x00", b"\xcb\x7f\xf0" + bytes(6), b"\xcf" + b"\xff" * 8, b"\xd3\x80" + bytes(7),
    b"\xcd\xff\xff", b"\xce\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\x7f\xff\xff\xff", b"\xdd\x7f\xff\xff\xff",
    b"\xdc\x04\x01", b"\xa2\xc3\x28", b"\xa3\xed\xa0\x80", b"\xdf\x00\x00\x00\x01",
)  # fmt: skip


def _at(random: Random, data: bytes) -> int:
    return random.randrange(len(data) + 1)


def flip(random: Random, data: bytes, _other: bytes) -> bytes:
    if not data:
        return bytes([random.randrange(256)])
    at = random.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]


def byte(random: Random, data: bytes, _other: bytes) -> bytes:
    at = _at(random, data)
    return data[:at] + bytes([random.randrange(256)]) + data[at + 1 :]


def near(random: Random, data: bytes, _other: bytes) -> bytes:
    if not data:
        return data
    at = random.randrange(len(data))
    return data[:at] + bytes([(data[at] + random.choice((-1, 1, 2, -2, 16))) % 256]) + data[at + 1 :]


def length(random: Random, data: bytes, _other: bytes) -> bytes:
    at, width = _at(random, data), random.choice((1, 2, 4, 8))
    edge = random.choice(EDGES) % (1 << 8 * width)
    return data[:at] + edge.to_bytes(width, "big") + data[at + width :]


def truncate(random: Random, data: bytes, _other: bytes) -> bytes:
    return data[: _at(random, data)]


def remove(random: Random, data: bytes, _other: bytes) -> bytes:
    at = _at(random, data)
    return data[:at] + data[at + random.randint(1, 16) :]


def duplicate(random: Random, data: bytes, _other: bytes) -> bytes:
    at = _at(random, data)
    part = data[at : at + random.choice((1, 2, 4, 12, 32, 128))]
    return data[:at] + part * random.choice((2, 2, 3, 16)) + data[at + len(part) :]


def swap(random: Random, data: bytes, _other: bytes) -> bytes:
    a, b, c = sorted((_at(random, data), _at(random, data), _at(random, data)))
    return data[:a] + data[b:c] + data[a:b] + data[c:]


def splice(random: Random, data: bytes, other: bytes) -> bytes:
    return data[: _at(random, data)] + other[_at(random, other) :]


def insert(random: Random, data: bytes, other: bytes) -> bytes:
    at, start = _at(random, data), _at(random, other)
    return data[:at] + other[start : start + random.randint(1, 64)] + data[at:]


def value(random: Random, data: bytes, _other: bytes) -> bytes:
    at = _at(random, data)
    return data[:at] + random.choice(VALUES) + data[at + random.choice((0, 1, 1, 2)) :]


def nest(random: Random, data: bytes, _other: bytes) -> bytes:
    at = _at(random, data)
    return data[:at] + b"\x91" * random.choice((1, 7, 8, 9, 64, 1000)) + data[at:]


def count(random: Random, data: bytes, _other: bytes) -> bytes:
    """One more or one less item in something that looks like the head of an array, string or binary."""
    heads = [at for at, head in enumerate(data) if 0x80 <= head <= 0xBF or head in (0xC4, 0xC5, 0xC6, 0xD9, 0xDA, 0xDB, 0xDC, 0xDD)]
    if not heads:
        return value(random, data, b"")
    at = random.choice(heads) + (0 if 0x80 <= data[random.choice(heads)] <= 0xBF else 1)
    if at >= len(data):
        return data
    return data[:at] + bytes([(data[at] + random.choice((-1, 1))) % 256]) + data[at + 1 :]


MUTATORS: tuple[Callable[[Random, bytes, bytes], bytes], ...] = (
    flip, byte, near, length, truncate, remove, duplicate, swap, splice, insert, value, nest, count,
)  # fmt: skip


def mutate(random: Random, data: bytes, other: bytes) -> bytes:
    """One to five changes in a row: most bugs need two."""
    for _ in range(random.choice((1, 1, 2, 2, 3, 5))):
        data = random.choice(MUTATORS)(random, data, other)[:MOST]
    return data
