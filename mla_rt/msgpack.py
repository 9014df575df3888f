"""A reader for msgpack as code objects use it: integers, floats, strings, booleans, nil, arrays and maps. Format: the msgpack specification."""

from __future__ import annotations

import struct
from typing import Any


def unpack(data: bytes) -> Any:
    """The one value that `data` encodes. ValueError if it is cut short, has bytes left over, or uses a type that notes do not use."""
    try:
        value, end = _unpack(data, 0)
    except (IndexError, struct.error, UnicodeDecodeError, RecursionError, TypeError):
        raise ValueError("not whole msgpack") from None
    if end != len(data):
        raise ValueError(f"{len(data) - end} bytes follow the msgpack value")
    return value


# Formats of msgpack by their first byte: the fixed-size scalars, and the widths of the length that precedes strings, arrays and maps.
_SCALARS = {0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}
_LENGTHS = {0xC4: ">B", 0xC5: ">H", 0xC6: ">I", 0xD9: ">B", 0xDA: ">H", 0xDB: ">I", 0xDC: ">H", 0xDD: ">I", 0xDE: ">H", 0xDF: ">I"}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}


def _unpack(data: bytes, at: int) -> tuple[Any, int]:
    """The msgpack value at `at` and the position after it."""
    first = data[at]
    at += 1
    if first < 0x80:
        return first, at
    if first >= 0xE0:
        return first - 0x100, at
    if first in _CONSTANTS:
        return _CONSTANTS[first], at
    if first in _SCALARS:
        return struct.unpack_from(_SCALARS[first], data, at)[0], at + struct.calcsize(_SCALARS[first])
    if first < 0xC0:
        length = first & (0x1F if first >= 0xA0 else 0x0F)
    elif first in _LENGTHS:
        length = struct.unpack_from(_LENGTHS[first], data, at)[0]
        at += struct.calcsize(_LENGTHS[first])
    else:
        raise ValueError(f"msgpack type {first:#x} is not one that code objects use")
    if first < 0x90 or first in (0xDE, 0xDF):
        mapping = {}
        for _ in range(length):
            key, at = _unpack(data, at)
            mapping[key], at = _unpack(data, at)
        return mapping, at
    if first < 0xA0 or first in (0xDC, 0xDD):
        items = []
        for _ in range(length):
            item, at = _unpack(data, at)
            items.append(item)
        return items, at
    if at + length > len(data):
        raise IndexError("string past the end")
    raw = data[at : at + length]
    return (raw if first in (0xC4, 0xC5, 0xC6) else raw.decode()), at + length
