"""SMEM: scalar loads, one address a wave.

The scalar cache is not modelled: loads read memory as it is, and cache maintenance does nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from .instruction import Encoded, Row, Run
from .state import Group


def _offset_reader(encoded: Encoded) -> Callable[[Group], np.ndarray | np.uint64]:
    """Byte offset, as uint64 so that adding it wraps: signed 21-bit immediate, an SGPR, or their sum."""
    immediate = np.uint64((((encoded.offset & 0x1FFFFF) ^ 0x100000) - 0x100000) & 0xFFFFFFFFFFFFFFFF)
    if encoded.imm and not encoded.soffset_en:
        return lambda group: immediate
    register = encoded.soffset if encoded.soffset_en else encoded.offset & 0x7F
    if not encoded.imm:
        immediate = np.uint64(0)
    return lambda group: group.read_sgpr(register).astype(np.uint64) + immediate


def _load(count: int) -> Callable[[Encoded], Run]:
    def bind(encoded: Encoded) -> Run:
        base, destination, read_offset = encoded.sbase << 1, encoded.sdata, _offset_reader(encoded)

        def run(group: Group) -> None:
            address = (group.read_sgpr64(base) + read_offset(group)) & ~np.uint64(3)
            memory = group.state.memory
            # The compiler widens a 16-byte aligned load of 3 dwords to 4: the last one may lie past the end of what the program owns.
            required = 12 if count == 4 and not (address & np.uint64(15)).any() else 4 * count
            offset = memory.check(group, address[:, None], np.ones((group.n, 1), np.bool_), required, "scalar read")[:, 0]
            for i, value in enumerate(memory.cells.load_dwords(offset, count)):
                group.write_sgpr(destination + i, value)

        return run

    return bind


def _buffer_load(count: int) -> Callable[[Encoded], Run]:
    def bind(encoded: Encoded) -> Run:
        resource, destination, read_offset = encoded.sbase << 1, encoded.sdata, _offset_reader(encoded)

        def run(group: Group) -> None:
            base = group.read_sgpr64(resource) & np.uint64(0xFFFFFFFFFFFF)
            stride = group.read_sgpr(resource + 1) >> np.uint32(16) & np.uint32(0x3FFF)
            size = group.read_sgpr(resource + 2).astype(np.uint64) * np.maximum(stride, 1)
            start = np.broadcast_to(read_offset(group) & np.uint64(0xFFFFFFFC), base.shape)
            memory = group.state.memory
            for i in range(count):
                inside = start + np.uint64(4 * i + 4) <= size
                offset = memory.check(group, (base + start + np.uint64(4 * i))[:, None], inside[:, None], 4, "scalar read")[:, 0]
                group.write_sgpr(destination + i, np.where(inside, memory.cells.load_dwords(offset, 1)[0], np.uint32(0)))

        return run

    return bind


def _clock(nanoseconds_per_tick: int) -> Callable[[Encoded], Run]:
    """A 64-bit counter of host time: it only has to move forward."""

    def bind(encoded: Encoded) -> Run:
        destination = encoded.sdata

        def run(group: Group) -> None:
            group.write_sgpr64(destination, np.full(group.n, time.monotonic_ns() // nanoseconds_per_tick, np.uint64))

        return run

    return bind


def _cache_operation(encoded: Encoded) -> Run:
    return lambda group: None


_WIDTHS = {0: 1, 1: 2, 2: 4, 3: 8, 4: 16}


def _suffix(count: int) -> str:
    return "dword" if count == 1 else f"dwordx{count}"


SMEM: dict[int, Row] = {
    **{opcode: Row(f"s_load_{_suffix(count)}", _load(count)) for opcode, count in _WIDTHS.items()},
    **{8 + opcode: Row(f"s_buffer_load_{_suffix(count)}", _buffer_load(count)) for opcode, count in _WIDTHS.items()},
    32: Row("s_dcache_inv", _cache_operation),
    33: Row("s_dcache_wb", _cache_operation),
    34: Row("s_dcache_inv_vol", _cache_operation),
    35: Row("s_dcache_wb_vol", _cache_operation),
    36: Row("s_memtime", _clock(1)),
    37: Row("s_memrealtime", _clock(10)),
}
