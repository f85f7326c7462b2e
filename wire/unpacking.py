"""Msgpack from strangers: one value, bounded before the parser sees it.

What goes wrong.  A length of 2^31 makes a parser reserve memory; the three bytes of an array header reserve 8 KiB, and nested a
thousand times 8 MB before the parser notices that nothing follows; a map holds a key twice and two readers see two values; an
extension becomes an object.  So: no maps, no extensions, arrays of at most 1,024, at most 8 of them nested, every byte used.

msgpack's C parser bounds lengths, but not nesting (it stops at its own stack of 1,024).  The nesting is therefore known before it
runs: nearly always because at most eight bytes of the message could begin an array, which costs one `bytes.translate`, else by a
walk over the headers, which skips bodies and makes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import msgpack

from wire.errors import Code, RemoteProtocolError
from wire.limits import DEFAULT_LIMITS

MESSAGE_MAX_BYTES = DEFAULT_LIMITS.message_max_bytes
ARRAY_MAX = DEFAULT_LIMITS.message_array_max
DEPTH_MAX = DEFAULT_LIMITS.message_depth_max
# The walk costs ~0.2 us an item; this bounds it at ~3 ms for a hostile 64 KiB.  Our longest message, a roster, has 2,700 items.
ITEMS_MAX = 16_384


def _refuse(*_args: object) -> NoReturn:
    raise ValueError("maps and extensions are not used")


pack: Callable[[object], bytes] = msgpack.Packer(use_bin_type=True).pack
_UNPACK: dict[str, Any] = {
    "use_list": False,
    "raw": False,
    "object_hook": _refuse,
    "ext_hook": _refuse,
    "max_array_len": ARRAY_MAX,
    "max_map_len": 0,
    "max_ext_len": 0,
}

# Every byte that cannot be the header of an array.
_NOT_ARRAY = bytes(value for value in range(256) if not (0x90 <= value <= 0x9F or value in (0xDC, 0xDD)))
# header byte -> bytes of the length that follows (bin, str, array), or bytes of the value itself
_SIZED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4, 0xDC: 2, 0xDD: 4}
_FIXED = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}


def _check_nesting(data: bytes) -> None:
    """Walk the headers of one msgpack value without making anything; raises ValueError for more than DEPTH_MAX nested arrays."""
    at = items = 0
    open_arrays: list[int] = []  # items still to come of each
    end = len(data)
    while at < end:
        header = data[at]
        at += 1
        items += 1
        length = -1
        if header < 0x80 or header >= 0xE0:
            pass
        elif 0x90 <= header <= 0x9F:
            length = header & 0x0F
        elif 0xA0 <= header <= 0xBF:
            at += header & 0x1F
        elif header in _FIXED:
            at += _FIXED[header]
        elif header in _SIZED:
            width = _SIZED[header]
            size = int.from_bytes(data[at : at + width], "big")
            at += width
            if header >= 0xDC:
                length = size
            else:
                at += size
        else:
            _refuse()
        if items > ITEMS_MAX:
            raise ValueError(f"more than {ITEMS_MAX} items")
        if open_arrays:
            open_arrays[-1] -= 1
        if length > 0:
            if len(open_arrays) == DEPTH_MAX:
                raise ValueError(f"more than {DEPTH_MAX} nested arrays")
            open_arrays.append(length)
        while open_arrays and not open_arrays[-1]:
            open_arrays.pop()
        if not open_arrays:
            return  # whatever follows is surplus, which the parser refuses


def unpack(data: bytes | memoryview, max_bytes: int = MESSAGE_MAX_BYTES) -> Any:
    """One msgpack value: arrays as tuples; no maps, no extensions, arrays <= 1,024, depth <= 8, every byte used.

    Raises RemoteProtocolError (PROTOCOL, or TOO_LARGE when `data` is over `max_bytes`).
    """
    size = len(data)
    if size > max_bytes:
        raise RemoteProtocolError(Code.TOO_LARGE, f"message of {size} bytes, at most {max_bytes}")
    if type(data) is not bytes:
        data = bytes(data)
    try:
        if len(data.translate(None, _NOT_ARRAY)) > DEPTH_MAX:
            _check_nesting(data)
        return msgpack.unpackb(data, max_str_len=size, max_bin_len=size, **_UNPACK)
    except (ValueError, msgpack.UnpackException) as error:
        raise RemoteProtocolError(Code.PROTOCOL, f"not a message: {error}") from None
