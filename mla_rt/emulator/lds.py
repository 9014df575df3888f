"""DS encoding: LDS reads, writes, atomics, transposed reads and lane exchanges; the LDS side of LDS-DMA.

An access outside the workgroup's LDS is a fault here, though hardware reads zero and drops writes: no kernel means to do that.
Dwords must be 4-byte aligned (wider accesses need no more, as hardware splits them), atomics and transposed reads naturally.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from . import atomics
from .atomics import Atomic
from .instruction import Encoded, Row, Run, UnsupportedEncoding
from .memory import Cells
from .state import LANES, M0, Group
from .transfer import data_register, load_narrow, place_narrow, run_atomic, store_narrow, store_registers


def _cells(group: Group) -> Cells:
    return Cells(group.state.lds.reshape(-1).view(np.uint8))


def _locate(group: Group, address: np.ndarray, mask: np.ndarray, nbytes: int, access: str, align: int) -> np.ndarray:
    """Offsets (int64 [waves, 64]) into `_cells` of the LDS byte addresses (int64) of the lanes of `mask`; inactive lanes get their row's start."""
    if mask is not group.mask or not group.exec_full:
        address = np.where(mask, address, 0)
    limit = group.state.lds_bytes
    if int(address.max()) + nbytes > limit or int(address.min()) < 0:
        bad = mask & ((address + nbytes > limit) | (address < 0))
        if bad.any():
            raise group.fault(f"LDS {access} of {nbytes} bytes outside the workgroup's {limit} bytes", bad, address)
    if align > 1 and int(np.bitwise_or.reduce(address, axis=None)) & (align - 1):
        raise group.fault(f"LDS {access} of {nbytes} bytes not aligned to {align}", mask & (address & (align - 1) != 0), address)
    for observer in group.state.observers:
        observer.lds(group, address, mask, nbytes, access)
    return address + (group.workgroup * (group.state.lds.shape[1] * 4))[:, None]


def _address(group: Group, register: int, offset: int) -> np.ndarray:
    # The 32-bit sum wraps: the compiler folds constants into the offset without knowing the sign of the rest.
    return (group.read_vgpr(register) + np.uint32(offset)).astype(np.int64)


def _idle(group: Group) -> bool:
    return not group.exec_full and not group.mask.any()


def _bind(run_with: Callable[[Encoded], Run]) -> Callable[[Encoded], Run]:
    """A DS instruction does nothing where no lane is active, even in a kernel without LDS; GDS does not exist here."""

    def bind(encoded: Encoded) -> Run:
        if encoded.gds:
            raise UnsupportedEncoding("GDS access")
        inner = run_with(encoded)

        def run(group: Group) -> None:
            if not _idle(group):
                inner(group)

        return run

    return bind


def _offset16(encoded: Encoded) -> int:
    return encoded.offset0 | encoded.offset1 << 8


def _read(count: int) -> Callable[[Encoded], Run]:
    def bind(encoded: Encoded) -> Run:
        register, offset, destination = encoded.addr, _offset16(encoded), data_register(encoded, encoded.vdst)

        def run(group: Group) -> None:
            where = _locate(group, _address(group, register, offset), group.mask, 4 * count, "read", 4)
            for i, value in enumerate(_cells(group).load_dwords(where, count)):
                group.write_vgpr(destination + i, value)

        return run

    return _bind(bind)


def _read_narrow(nbytes: int, signed: bool, half: int | None = None) -> Callable[[Encoded], Run]:
    def bind(encoded: Encoded) -> Run:
        register, offset, destination = encoded.addr, _offset16(encoded), data_register(encoded, encoded.vdst)

        def run(group: Group) -> None:
            where = _locate(group, _address(group, register, offset), group.mask, nbytes, "read", nbytes)
            value = load_narrow(_cells(group), where, nbytes)
            old = value if half is None else group.read_vgpr(destination)
            group.write_vgpr(destination, place_narrow(value, old, nbytes, signed, half))

        return run

    return _bind(bind)


def _write(count: int) -> Callable[[Encoded], Run]:
    def bind(encoded: Encoded) -> Run:
        register, offset, source = encoded.addr, _offset16(encoded), data_register(encoded, encoded.data0)

        def run(group: Group) -> None:
            where = _locate(group, _address(group, register, offset), group.mask, 4 * count, "write", 4)
            store_registers(group, _cells(group), where, source, count, group.mask)

        return run

    return _bind(bind)


def _write_narrow(nbytes: int, half: int = 0) -> Callable[[Encoded], Run]:
    def bind(encoded: Encoded) -> Run:
        register, offset, source = encoded.addr, _offset16(encoded), data_register(encoded, encoded.data0)

        def run(group: Group) -> None:
            where = _locate(group, _address(group, register, offset), group.mask, nbytes, "write", nbytes)
            store_narrow(group, _cells(group), where, source, nbytes, half, group.mask)

        return run

    return _bind(bind)


def _read2(count: int, stride: int) -> Callable[[Encoded], Run]:
    """Two reads of `count` dwords, at offset0 and offset1 in units of `stride` bytes."""

    def bind(encoded: Encoded) -> Run:
        register, destination = encoded.addr, data_register(encoded, encoded.vdst)
        offsets = (encoded.offset0 * stride, encoded.offset1 * stride)

        def run(group: Group) -> None:
            cells = _cells(group)
            values = []
            for offset in offsets:
                where = _locate(group, _address(group, register, offset), group.mask, 4 * count, "read", 4)
                values += cells.load_dwords(where, count)
            for i, value in enumerate(values):  # after both reads: the destination may be the address
                group.write_vgpr(destination + i, value)

        return run

    return _bind(bind)


def _write2(count: int, stride: int) -> Callable[[Encoded], Run]:
    def bind(encoded: Encoded) -> Run:
        register = encoded.addr
        sources = (data_register(encoded, encoded.data0), data_register(encoded, encoded.data1))
        offsets = (encoded.offset0 * stride, encoded.offset1 * stride)

        def run(group: Group) -> None:
            for offset, source in zip(offsets, sources, strict=True):
                where = _locate(group, _address(group, register, offset), group.mask, 4 * count, "write", 4)
                store_registers(group, _cells(group), where, source, count, group.mask)

        return run

    return _bind(bind)


def _atomic(atomic: Atomic, returns: bool) -> Callable[[Encoded], Run]:
    size = atomic.dtype.itemsize

    def bind(encoded: Encoded) -> Run:
        register, offset = encoded.addr, _offset16(encoded)
        first = data_register(encoded, encoded.data0)
        # DS compare-and-swap has the value to compare in data0 and the new one in data1, the other way round than global memory's.
        sources = (first,) if atomic.operands == 1 else (data_register(encoded, encoded.data1), first)
        destination = data_register(encoded, encoded.vdst) if returns else None

        def run(group: Group) -> None:
            where = _locate(group, _address(group, register, offset), group.mask, size, "atomic", size)
            run_atomic(group, _cells(group), where, atomic, sources, destination, group.mask)

        return run

    return _bind(bind)


def transpose_lanes(data: np.ndarray, bits: int) -> np.ndarray:
    """The lane map of the transposed reads: uint32 [waves, 64, dwords] as each lane's own address gave it, to what each lane receives.

    In each group of 16 lanes, with the `bits`-wide elements e[] numbered in lane order, lane t receives e[t], e[16 + t], e[32 + t], …
    """
    waves, _, dwords = data.shape
    elements = dwords * 32 // bits
    if bits in (8, 16):
        items = data.view(np.uint8 if bits == 8 else np.uint16).reshape(waves, 4, elements, 16)
        return np.ascontiguousarray(items.swapaxes(2, 3)).view(np.uint32).reshape(data.shape)
    flat = np.unpackbits(data.view(np.uint8), axis=-1, bitorder="little").reshape(waves, 4, elements, 16, bits)
    return np.packbits(np.ascontiguousarray(flat.swapaxes(2, 3)).reshape(waves, LANES, -1), axis=-1, bitorder="little").view(np.uint32)


def _read_transposed(bits: int, dwords: int) -> Callable[[Encoded], Run]:
    def bind(encoded: Encoded) -> Run:
        register, offset, destination = encoded.addr, _offset16(encoded), data_register(encoded, encoded.vdst)
        align = 8 if dwords == 2 else 4

        def run(group: Group) -> None:
            active = group.mask.sum(axis=1)
            partial = (active > 0) & (active < LANES)
            if partial.any():
                raise group.fault("transposed LDS read with only some lanes active", ~group.mask & partial[:, None])
            where = _locate(group, _address(group, register, offset), group.mask, 4 * dwords, "transposed read", align)
            data = np.stack(_cells(group).load_dwords(where, dwords), axis=-1)
            result = transpose_lanes(data, bits)
            for i in range(dwords):
                group.write_vgpr(destination + i, result[..., i])

        return run

    return _bind(bind)


def _bpermute(encoded: Encoded) -> Run:
    """Each lane reads data0 of the lane that its address names; a lane outside EXEC supplies 0."""
    register, offset = encoded.addr, _offset16(encoded)
    source, destination = data_register(encoded, encoded.data0), data_register(encoded, encoded.vdst)

    def run(group: Group) -> None:
        lane = (_address(group, register, offset) >> 2) & (LANES - 1)
        group.write_vgpr(destination, np.take_along_axis(_offered(group, source), lane, axis=1))

    return run


def _permute(encoded: Encoded) -> Run:
    """Each active lane sends data0 to the lane that its address names; the highest sender wins, a lane that nobody names gets 0."""
    register, offset = encoded.addr, _offset16(encoded)
    source, destination = data_register(encoded, encoded.data0), data_register(encoded, encoded.vdst)

    def run(group: Group) -> None:
        lane = (_address(group, register, offset) >> 2) & (LANES - 1)
        target = lane + np.arange(group.n)[:, None] * LANES
        received = np.zeros(group.n * LANES, np.uint32)
        received[target[group.mask]] = group.read_vgpr(source)[group.mask]
        group.write_vgpr(destination, received.reshape(group.n, LANES))

    return run


def _swizzle(encoded: Encoded) -> Run:
    """Each lane reads the lane that a fixed pattern names: a permutation of each quad, or and/or/xor masks on the lane number in 32 lanes."""
    pattern, source, destination = _offset16(encoded), encoded.addr, data_register(encoded, encoded.vdst)
    lane = np.arange(LANES)
    if pattern >= 0xC000:
        raise UnsupportedEncoding(f"ds_swizzle_b32 pattern {pattern:#x} (rotate or FFT)")
    if pattern & 0x8000:
        lane = (lane & ~3) | (pattern >> 2 * (lane & 3) & 3)
    else:
        lane = (lane & ~31) | ((lane & pattern & 31 | pattern >> 5 & 31) ^ (pattern >> 10 & 31))

    def run(group: Group) -> None:
        group.write_vgpr(destination, _offered(group, source)[:, lane])

    return run


def _offered(group: Group, register: int) -> np.ndarray:
    value = group.read_vgpr(register)
    return value if group.exec_full else np.where(group.mask, value, np.uint32(0))


def dma_store(group: Group, immediate: int, values: list[np.ndarray], mask: np.ndarray) -> None:
    """The LDS side of LDS-DMA: lane n's dwords (uint32 [waves, 64] each) go to M0 + immediate + n * stride, stride 16 bytes for 3 or 4 dwords.

    The lane is the physical one: lanes outside `mask` leave holes. A byte outside the workgroup's LDS is a fault (hardware drops it).
    """
    if not mask.any():
        return
    stride = 16 if len(values) > 2 else 4
    base = (group.read_sgpr(M0) & ~np.uint32(3)).astype(np.int64) + immediate
    where = _locate(group, base[:, None] + np.arange(LANES) * stride, mask, 4 * len(values), "DMA write", 4)
    group.write_lds_dma(_cells(group), where, values, mask)


_INTEGER_ATOMICS = {  # opcode of the 32-bit form without return: operation, name; with return +32, 64 bits +64
    0: ("add", "add", "u"),
    1: ("sub", "sub", "u"),
    2: ("rsub", "rsub", "u"),
    3: ("inc", "inc", "u"),
    4: ("dec", "dec", "u"),
    5: ("smin", "min", "i"),
    6: ("smax", "max", "i"),
    7: ("umin", "min", "u"),
    8: ("umax", "max", "u"),
    9: ("and", "and", "b"),
    10: ("or", "or", "b"),
    11: ("xor", "xor", "b"),
    16: ("cmpswap", "cmpst", "b"),
}


def _integer_atomic_rows() -> dict[int, Row]:
    rows = {}
    for opcode, (operation, name, kind) in _INTEGER_ATOMICS.items():
        for bits, first in ((32, 0), (64, 64)):
            atomic = atomics.INTEGER[bits][operation]
            rows[first + opcode] = Row(f"ds_{name}_{kind}{bits}", _atomic(atomic, returns=False))
            rows[first + opcode + 32] = Row(f"ds_{name}_rtn_{kind}{bits}", _atomic(atomic, returns=True))
    rows[45] = Row("ds_wrxchg_rtn_b32", _atomic(atomics.INTEGER[32]["swap"], returns=True))
    rows[109] = Row("ds_wrxchg_rtn_b64", _atomic(atomics.INTEGER[64]["swap"], returns=True))
    return rows


DS: dict[int, Row] = {
    **_integer_atomic_rows(),
    18: Row("ds_min_f32", _atomic(atomics.MIN_F32, returns=False)),
    19: Row("ds_max_f32", _atomic(atomics.MAX_F32, returns=False)),
    21: Row("ds_add_f32", _atomic(atomics.ADD_F32, returns=False)),
    23: Row("ds_pk_add_f16", _atomic(atomics.PK_ADD_F16, returns=False)),
    24: Row("ds_pk_add_bf16", _atomic(atomics.PK_ADD_BF16, returns=False)),
    50: Row("ds_min_rtn_f32", _atomic(atomics.MIN_F32, returns=True)),
    51: Row("ds_max_rtn_f32", _atomic(atomics.MAX_F32, returns=True)),
    53: Row("ds_add_rtn_f32", _atomic(atomics.ADD_F32, returns=True)),
    82: Row("ds_min_f64", _atomic(atomics.MIN_F64, returns=False)),
    83: Row("ds_max_f64", _atomic(atomics.MAX_F64, returns=False)),
    92: Row("ds_add_f64", _atomic(atomics.ADD_F64, returns=False)),
    114: Row("ds_min_rtn_f64", _atomic(atomics.MIN_F64, returns=True)),
    115: Row("ds_max_rtn_f64", _atomic(atomics.MAX_F64, returns=True)),
    124: Row("ds_add_rtn_f64", _atomic(atomics.ADD_F64, returns=True)),
    183: Row("ds_pk_add_rtn_f16", _atomic(atomics.PK_ADD_F16, returns=True)),
    184: Row("ds_pk_add_rtn_bf16", _atomic(atomics.PK_ADD_BF16, returns=True)),
    13: Row("ds_write_b32", _write(1)),
    14: Row("ds_write2_b32", _write2(1, 4)),
    15: Row("ds_write2st64_b32", _write2(1, 256)),
    30: Row("ds_write_b8", _write_narrow(1)),
    31: Row("ds_write_b16", _write_narrow(2)),
    54: Row("ds_read_b32", _read(1)),
    55: Row("ds_read2_b32", _read2(1, 4)),
    56: Row("ds_read2st64_b32", _read2(1, 256)),
    57: Row("ds_read_i8", _read_narrow(1, signed=True)),
    58: Row("ds_read_u8", _read_narrow(1, signed=False)),
    59: Row("ds_read_i16", _read_narrow(2, signed=True)),
    60: Row("ds_read_u16", _read_narrow(2, signed=False)),
    61: Row("ds_swizzle_b32", _bind(_swizzle)),
    62: Row("ds_permute_b32", _bind(_permute)),
    63: Row("ds_bpermute_b32", _bind(_bpermute)),
    77: Row("ds_write_b64", _write(2)),
    78: Row("ds_write2_b64", _write2(2, 8)),
    79: Row("ds_write2st64_b64", _write2(2, 512)),
    84: Row("ds_write_b8_d16_hi", _write_narrow(1, half=1)),
    85: Row("ds_write_b16_d16_hi", _write_narrow(2, half=1)),
    86: Row("ds_read_u8_d16", _read_narrow(1, signed=False, half=0)),
    87: Row("ds_read_u8_d16_hi", _read_narrow(1, signed=False, half=1)),
    88: Row("ds_read_i8_d16", _read_narrow(1, signed=True, half=0)),
    89: Row("ds_read_i8_d16_hi", _read_narrow(1, signed=True, half=1)),
    90: Row("ds_read_u16_d16", _read_narrow(2, signed=False, half=0)),
    91: Row("ds_read_u16_d16_hi", _read_narrow(2, signed=False, half=1)),
    118: Row("ds_read_b64", _read(2)),
    119: Row("ds_read2_b64", _read2(2, 8)),
    120: Row("ds_read2st64_b64", _read2(2, 512)),
    222: Row("ds_write_b96", _write(3)),
    223: Row("ds_write_b128", _write(4)),
    224: Row("ds_read_b64_tr_b4", _read_transposed(4, 2)),
    225: Row("ds_read_b96_tr_b6", _read_transposed(6, 3)),
    226: Row("ds_read_b64_tr_b8", _read_transposed(8, 2)),
    227: Row("ds_read_b64_tr_b16", _read_transposed(16, 2)),
    254: Row("ds_read_b96", _read(3)),
    255: Row("ds_read_b128", _read(4)),
}
