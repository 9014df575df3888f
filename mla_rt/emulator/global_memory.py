"""FLAT encoding: global_* loads, stores, atomics and LDS-DMA; flat_* instructions on global addresses.

Loads and stores work at any byte alignment, as on hardware in the unaligned mode that ROCm sets; atomics must be naturally aligned.
Scratch is not emulated.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .atomics import Atomic
from .instruction import Encoded, Row, Run, UnsupportedEncoding
from .lds import dma_store
from .state import Group
from .transfer import (
    ATOMICS,
    NARROW_LOADS,
    NARROW_STORES,
    WIDTHS,
    data_register,
    load_narrow,
    place_narrow,
    run_atomic,
    store_narrow,
    store_registers,
)

_FLAT_SEGMENT, _SCRATCH_SEGMENT = 0, 1
_NO_SGPR = 0x7F


def _address_reader(encoded: Encoded) -> Callable[[Group], np.ndarray]:
    """Byte address of each lane, uint64 [waves, 64]: a 64-bit VGPR pair, or a 64-bit SGPR pair plus an unsigned 32-bit VGPR."""
    if encoded.seg == _SCRATCH_SEGMENT:
        raise UnsupportedEncoding("scratch memory is not emulated")
    register, scalar, offset = encoded.addr, encoded.saddr, np.uint64(encoded.offset & 0xFFFFFFFFFFFFFFFF)
    if encoded.seg == _FLAT_SEGMENT or scalar == _NO_SGPR:

        def read(group: Group) -> np.ndarray:
            address = group.read_vgpr(register + 1).astype(np.uint64)
            address <<= np.uint64(32)
            address |= group.read_vgpr(register)
            address += offset
            return address

        return read

    def read_with_base(group: Group) -> np.ndarray:
        return group.read_vgpr(register).astype(np.uint64) + (group.read_sgpr64(scalar) + offset)[:, None]

    return read_with_base


def _load(count: int) -> Callable[[Encoded], Run]:
    def bind(encoded: Encoded) -> Run:
        address, destination = _address_reader(encoded), data_register(encoded, encoded.vdst)

        def run(group: Group) -> None:
            memory = group.state.memory
            offset = memory.check(group, address(group), group.mask, 4 * count, "read")
            for i, value in enumerate(memory.cells.load_dwords(offset, count)):
                group.write_vgpr(destination + i, value)

        return run

    return bind


def _load_narrow(nbytes: int, signed: bool, half: int | None) -> Callable[[Encoded], Run]:
    def bind(encoded: Encoded) -> Run:
        address, destination = _address_reader(encoded), data_register(encoded, encoded.vdst)

        def run(group: Group) -> None:
            memory = group.state.memory
            offset = memory.check(group, address(group), group.mask, nbytes, "read")
            value = load_narrow(memory.cells, offset, nbytes)
            old = value if half is None else group.read_vgpr(destination)
            group.write_vgpr(destination, place_narrow(value, old, nbytes, signed, half))

        return run

    return bind


def _store(count: int) -> Callable[[Encoded], Run]:
    def bind(encoded: Encoded) -> Run:
        address, source = _address_reader(encoded), data_register(encoded, encoded.data)

        def run(group: Group) -> None:
            memory = group.state.memory
            offset = memory.check(group, address(group), group.mask, 4 * count, "write")
            store_registers(group, memory.cells, offset, source, count, group.mask)

        return run

    return bind


def _store_narrow(nbytes: int, half: int) -> Callable[[Encoded], Run]:
    def bind(encoded: Encoded) -> Run:
        address, source = _address_reader(encoded), data_register(encoded, encoded.data)

        def run(group: Group) -> None:
            memory = group.state.memory
            offset = memory.check(group, address(group), group.mask, nbytes, "write")
            store_narrow(group, memory.cells, offset, source, nbytes, half, group.mask)

        return run

    return bind


def _load_to_lds(nbytes: int, signed: bool = False) -> Callable[[Encoded], Run]:
    """LDS-DMA. The immediate offset counts on both sides, in the global address and in the LDS address."""

    def bind(encoded: Encoded) -> Run:
        address, immediate = _address_reader(encoded), encoded.offset
        if encoded.seg == _FLAT_SEGMENT:
            raise UnsupportedEncoding("LDS-DMA from the flat segment")

        def run(group: Group) -> None:
            memory = group.state.memory
            offset = memory.check(group, address(group), group.mask, nbytes, "read")
            if nbytes >= 4:
                values = memory.cells.load_dwords(offset, nbytes // 4)
            else:
                value = load_narrow(memory.cells, offset, nbytes)
                values = [place_narrow(value, value, nbytes, signed, None)]
            dma_store(group, immediate, values, group.mask)

        return run

    return bind


def _atomic(atomic: Atomic) -> Callable[[Encoded], Run]:
    size = atomic.dtype.itemsize

    def bind(encoded: Encoded) -> Run:
        address = _address_reader(encoded)
        source = data_register(encoded, encoded.data)
        sources = tuple(source + i * size // 4 for i in range(atomic.operands))
        destination = data_register(encoded, encoded.vdst) if encoded.sc0 else None

        def run(group: Group) -> None:
            memory = group.state.memory
            offset = memory.check(group, address(group), group.mask, size, "atomic", align=size)
            with memory.exclusive:
                run_atomic(group, memory.cells, offset, atomic, sources, destination, group.mask)

        return run

    return bind


FLAT: dict[int, Row] = {
    **{opcode: Row(f"global_{name}", _load_narrow(nbytes, signed, half)) for opcode, (name, nbytes, signed, half) in NARROW_LOADS.items()},
    **{20 + i: Row(f"global_load_{width}", _load(i + 1)) for i, width in enumerate(WIDTHS)},
    **{opcode: Row(f"global_{name}", _store_narrow(nbytes, half)) for opcode, (name, nbytes, half) in NARROW_STORES.items()},
    **{28 + i: Row(f"global_store_{width}", _store(i + 1)) for i, width in enumerate(WIDTHS)},
    38: Row("global_load_lds_ubyte", _load_to_lds(1)),
    39: Row("global_load_lds_sbyte", _load_to_lds(1, signed=True)),
    40: Row("global_load_lds_ushort", _load_to_lds(2)),
    41: Row("global_load_lds_sshort", _load_to_lds(2, signed=True)),
    42: Row("global_load_lds_dword", _load_to_lds(4)),
    125: Row("global_load_lds_dwordx4", _load_to_lds(16)),
    126: Row("global_load_lds_dwordx3", _load_to_lds(12)),
    **{opcode: Row(f"global_{name}", _atomic(atomic)) for opcode, (name, atomic) in ATOMICS.items()},
}
