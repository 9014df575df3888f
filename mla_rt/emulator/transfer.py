"""What the global, buffer and LDS instructions share: how data moves between registers and memory cells, and the rows they have in common."""

from __future__ import annotations

import numpy as np

from . import atomics
from .atomics import Atomic
from .instruction import Encoded
from .memory import Cells
from .state import Group


def data_register(encoded: Encoded, register: int) -> int:
    """Index of the first register of a data operand: the acc bit selects the accumulator half of the file."""
    return encoded.accum_offset + register if encoded.acc else register


def of_active(group: Group, values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """The values of the lanes of `mask`, one-dimensional in lane order, wave after wave."""
    return values.ravel() if group.exec_full and mask is group.mask else values[mask]


def place_narrow(value: np.ndarray, old: np.ndarray, nbytes: int, signed: bool, half: int | None) -> np.ndarray:
    """A loaded 8- or 16-bit `value` (uint32, zero-extended) as its destination dword.

    half: None fills the dword; 0 or 1 fills that 16-bit half and keeps the other half of `old`.
    """
    if signed:
        value = value.astype(np.int8 if nbytes == 1 else np.int16).astype(np.int32).view(np.uint32)
    if half is None:
        return value
    if half == 0:
        return old & np.uint32(0xFFFF0000) | value & np.uint32(0xFFFF)
    return old & np.uint32(0xFFFF) | value << np.uint32(16)


def load_narrow(cells: Cells, offset: np.ndarray, nbytes: int) -> np.ndarray:
    return cells.load_u8(offset) if nbytes == 1 else cells.load_u16(offset)


def store_narrow(group: Group, cells: Cells, offset: np.ndarray, register: int, nbytes: int, half: int, mask: np.ndarray) -> None:
    """Store the low 8 or 16 bits of the given half of a register."""
    value = of_active(group, group.read_vgpr(register), mask) >> np.uint32(16 * half)
    (cells.store_u8 if nbytes == 1 else cells.store_u16)(of_active(group, offset, mask), value)


def store_registers(group: Group, cells: Cells, offset: np.ndarray, register: int, count: int, mask: np.ndarray) -> None:
    """Store `count` consecutive registers of the lanes of `mask`."""
    cells.store_dwords(of_active(group, offset, mask), [of_active(group, group.read_vgpr(register + i), mask) for i in range(count)])


def run_atomic(
    group: Group, cells: Cells, offset: np.ndarray, atomic: Atomic, sources: tuple[int, ...], destination: int | None, mask: np.ndarray
) -> None:
    """Apply an atomic for the lanes of `mask`: its operands begin at the registers `sources`, what was found goes to `destination`."""
    size = atomic.dtype.itemsize
    operands = [of_active(group, _read_cell(group, source, size), mask) for source in sources]
    found = atomics.apply(cells.u32 if size == 4 else cells.u64, of_active(group, offset // size, mask), atomic, *operands)
    if destination is None:
        return
    parts = np.zeros(mask.shape + (size // 4,), np.uint32)
    parts[mask] = found.view(np.uint32).reshape(len(found), size // 4)
    for i in range(size // 4):
        group.write_vgpr(destination + i, parts[..., i], mask)


def _read_cell(group: Group, register: int, size: int) -> np.ndarray:
    low = group.read_vgpr(register)
    return low if size == 4 else low | group.read_vgpr(register + 1).astype(np.uint64) << np.uint64(32)


# Opcodes shared by the FLAT and MUBUF formats.
WIDTHS = ("dword", "dwordx2", "dwordx3", "dwordx4")  # loads from opcode 20, stores from 28
NARROW_LOADS: dict[int, tuple[str, int, bool, int | None]] = {  # name, bytes, signed, half
    16: ("load_ubyte", 1, False, None),
    17: ("load_sbyte", 1, True, None),
    18: ("load_ushort", 2, False, None),
    19: ("load_sshort", 2, True, None),
    32: ("load_ubyte_d16", 1, False, 0),
    33: ("load_ubyte_d16_hi", 1, False, 1),
    34: ("load_sbyte_d16", 1, True, 0),
    35: ("load_sbyte_d16_hi", 1, True, 1),
    36: ("load_short_d16", 2, False, 0),
    37: ("load_short_d16_hi", 2, False, 1),
}
NARROW_STORES: dict[int, tuple[str, int, int]] = {  # name, bytes, half
    24: ("store_byte", 1, 0),
    25: ("store_byte_d16_hi", 1, 1),
    26: ("store_short", 2, 0),
    27: ("store_short_d16_hi", 2, 1),
}
_INTEGER_ORDER = ("swap", "cmpswap", "add", "sub", "smin", "umin", "smax", "umax", "and", "or", "xor", "inc", "dec")
ATOMICS: dict[int, tuple[str, Atomic]] = {
    **{64 + i: (f"atomic_{name}", atomics.INTEGER[32][name]) for i, name in enumerate(_INTEGER_ORDER)},
    **{96 + i: (f"atomic_{name}_x2", atomics.INTEGER[64][name]) for i, name in enumerate(_INTEGER_ORDER)},
    77: ("atomic_add_f32", atomics.ADD_F32),
    78: ("atomic_pk_add_f16", atomics.PK_ADD_F16),
    79: ("atomic_add_f64", atomics.ADD_F64),
    80: ("atomic_min_f64", atomics.MIN_F64),
    81: ("atomic_max_f64", atomics.MAX_F64),
    82: ("atomic_pk_add_bf16", atomics.PK_ADD_BF16),
}
