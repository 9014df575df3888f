"""MUBUF encoding: loads, stores, atomics and LDS-DMA through a buffer resource (V#), with its range check.

The resource is taken as raw memory: formats, swizzling and cache hints are not modelled; a swizzled resource, or one that adds the thread id,
is a fault. Lanes out of range load 0 (LDS-DMA writes that 0), and neither store nor take part in atomics. The scalar offset does not take part
in the range check, as the ISA guide has it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .atomics import Atomic
from .instruction import Encoded, Row, Run, UnsupportedEncoding
from .lds import dma_store
from .operands import scalar_u32
from .state import Group
from .transfer import ATOMICS, NARROW_LOADS, NARROW_STORES, WIDTHS, data_register, load_narrow, place_narrow, run_atomic, store_narrow

_RAW_FORMAT = np.uint32(0xF << 15)  # data format field of word 3: zero means an unbound resource, which loads 0
_ADD_THREAD_ID = np.uint32(1 << 23)
_SWIZZLE = np.uint32(1 << 31)


@dataclass(frozen=True)
class Access:
    """Where the lanes of one instruction access.

    address: uint64 [waves, 64]; offset: the byte offset of the raw range check, int64 [waves, 64]; size: num_records, int64 [waves, 1];
    outside: bool [waves, 64], lanes whose index is out of range or whose resource is unbound; structured: bool [waves, 1], where the index
    alone decides.
    """

    address: np.ndarray
    offset: np.ndarray
    size: np.ndarray
    outside: np.ndarray
    structured: np.ndarray

    def inside(self, start: int, nbytes: int) -> np.ndarray:
        """Lanes whose bytes start..start+nbytes-1 of the access are in range."""
        return ~self.outside & (self.structured | (self.offset + (start + nbytes) <= self.size))


def _access_reader(encoded: Encoded, align: int) -> Callable[[Group], Access]:
    """`align`: what hardware rounds addresses down to: 4 for dwords, 1 for narrower accesses."""
    resource, immediate = encoded.srsrc << 2, encoded.offset
    scalar = scalar_u32(encoded.soffset)
    index_register = encoded.vaddr if encoded.idxen else None
    offset_register = encoded.vaddr + encoded.idxen if encoded.offen else None

    def read(group: Group) -> Access:
        high, records, word3 = (group.read_sgpr(resource + i)[:, None] for i in (1, 2, 3))
        if (high & _SWIZZLE).any() or (word3 & _ADD_THREAD_ID).any():
            raise group.fault("buffer resource with swizzling or thread id, which is not emulated")
        base = group.read_sgpr64(resource)[:, None] & np.uint64(0xFFFFFFFFFFFF)
        stride = (high >> np.uint32(16) & np.uint32(0x3FFF)).astype(np.int64)
        index = np.zeros((group.n, 1), np.int64) if index_register is None else group.read_vgpr(index_register).astype(np.int64)
        lane_offset = np.zeros((group.n, 1), np.uint32) if offset_register is None else group.read_vgpr(offset_register)
        # In the sum of the lane's offset and the immediate, 32 bits wrap.
        offset = (lane_offset + np.uint32(immediate)).astype(np.int64) & -align
        structured = (stride != 0) & (index_register is not None)
        size = records.astype(np.int64)
        outside = structured & (index >= size) | (word3 & _RAW_FORMAT == 0)
        total = offset + index * stride
        start = base + (scalar(group).astype(np.uint64) & np.uint64(2**32 - align))[:, None]
        shape = group.mask.shape
        address = np.broadcast_to(start + total.view(np.uint64), shape)
        return Access(address, np.broadcast_to(total, shape), size, np.broadcast_to(outside, shape), structured)

    return read


def _load_values(group: Group, access: Access, count: int) -> list[np.ndarray]:
    """`count` dwords of each active lane; 0 where a dword is out of range."""
    memory, values = group.state.memory, []
    whole = access.inside(0, 4 * count)
    if (whole | ~group.mask).all():
        return memory.cells.load_dwords(memory.check(group, access.address, group.mask, 4 * count, "read"), count)
    for i in range(count):
        mask = group.mask & access.inside(4 * i, 4)
        offset = memory.check(group, access.address + np.uint64(4 * i), mask, 4, "read")
        values.append(np.where(mask, memory.cells.load_dwords(offset, 1)[0], np.uint32(0)))
    return values


def _load_one(group: Group, access: Access, nbytes: int, signed: bool) -> np.ndarray:
    """An 8- or 16-bit value of each active lane, extended to 32 bits; 0 out of range."""
    mask = group.mask & access.inside(0, nbytes)
    memory = group.state.memory
    value = load_narrow(memory.cells, memory.check(group, access.address, mask, nbytes, "read"), nbytes)
    return np.where(mask, place_narrow(value, value, nbytes, signed, None), np.uint32(0))


def _load(count: int) -> Callable[[Encoded], Run]:
    def bind(encoded: Encoded) -> Run:
        read_access, destination = _access_reader(encoded, 4), data_register(encoded, encoded.vdata)
        if encoded.lds:
            if count == 2:
                raise UnsupportedEncoding("LDS-DMA of 8 bytes")
            return lambda group: dma_store(group, encoded.offset, _load_values(group, read_access(group), count), group.mask)

        def run(group: Group) -> None:
            for i, value in enumerate(_load_values(group, read_access(group), count)):
                group.write_vgpr(destination + i, value)

        return run

    return bind


def _load_narrow(nbytes: int, signed: bool, half: int | None) -> Callable[[Encoded], Run]:
    def bind(encoded: Encoded) -> Run:
        read_access, destination = _access_reader(encoded, 1), data_register(encoded, encoded.vdata)
        if encoded.lds:
            if half is not None:
                raise UnsupportedEncoding("LDS-DMA of a d16 load")
            return lambda group: dma_store(group, encoded.offset, [_load_one(group, read_access(group), nbytes, signed)], group.mask)

        def run(group: Group) -> None:
            value = _load_one(group, read_access(group), nbytes, signed)
            group.write_vgpr(destination, value if half is None else place_narrow(value, group.read_vgpr(destination), nbytes, signed, half))

        return run

    return bind


def _store(count: int) -> Callable[[Encoded], Run]:
    def bind(encoded: Encoded) -> Run:
        read_access, source = _access_reader(encoded, 4), data_register(encoded, encoded.vdata)
        _refuse_lds(encoded)

        def run(group: Group) -> None:
            access = read_access(group)
            # Lanes that are wholly in range store at once, dwords of the others one by one.
            whole = group.mask & access.inside(0, 4 * count)
            _store_dwords(group, access, whole, range(count), source)
            rest = group.mask & ~whole
            if rest.any():
                for i in range(count):
                    _store_dwords(group, access, rest & access.inside(4 * i, 4), range(i, i + 1), source)

        return run

    return bind


def _store_dwords(group: Group, access: Access, mask: np.ndarray, dwords: range, source: int) -> None:
    memory = group.state.memory
    offset = memory.check(group, access.address + np.uint64(4 * dwords.start), mask, 4 * len(dwords), "write")
    memory.cells.store_dwords(offset[mask], [group.read_vgpr(source + i)[mask] for i in dwords])


def _store_narrow(nbytes: int, half: int) -> Callable[[Encoded], Run]:
    def bind(encoded: Encoded) -> Run:
        read_access, source = _access_reader(encoded, 1), data_register(encoded, encoded.vdata)
        _refuse_lds(encoded)

        def run(group: Group) -> None:
            access, memory = read_access(group), group.state.memory
            mask = group.mask & access.inside(0, nbytes)
            store_narrow(group, memory.cells, memory.check(group, access.address, mask, nbytes, "write"), source, nbytes, half, mask)

        return run

    return bind


def _atomic(atomic: Atomic) -> Callable[[Encoded], Run]:
    size = atomic.dtype.itemsize

    def bind(encoded: Encoded) -> Run:
        read_access, first = _access_reader(encoded, 4), data_register(encoded, encoded.vdata)
        _refuse_lds(encoded)
        sources = tuple(first + i * size // 4 for i in range(atomic.operands))

        def run(group: Group) -> None:
            access, memory = read_access(group), group.state.memory
            mask = group.mask & access.inside(0, size)
            offset = memory.check(group, access.address, mask, size, "atomic", align=size)
            with memory.exclusive:
                run_atomic(group, memory.cells, offset, atomic, sources, first if encoded.sc0 else None, mask)

        return run

    return bind


def _refuse_lds(encoded: Encoded) -> None:
    if encoded.lds:
        raise UnsupportedEncoding("LDS-DMA of a buffer store or atomic")


def _cache_operation(encoded: Encoded) -> Run:
    """Write-back and invalidation: caches are not modelled."""
    return lambda group: None


MUBUF: dict[int, Row] = {
    **{opcode: Row(f"buffer_{name}", _load_narrow(nbytes, signed, half)) for opcode, (name, nbytes, signed, half) in NARROW_LOADS.items()},
    **{20 + i: Row(f"buffer_load_{width}", _load(i + 1)) for i, width in enumerate(WIDTHS)},
    **{opcode: Row(f"buffer_{name}", _store_narrow(nbytes, half)) for opcode, (name, nbytes, half) in NARROW_STORES.items()},
    **{28 + i: Row(f"buffer_store_{width}", _store(i + 1)) for i, width in enumerate(WIDTHS)},
    40: Row("buffer_wbl2", _cache_operation),
    41: Row("buffer_inv", _cache_operation),
    **{opcode: Row(f"buffer_{name}", _atomic(atomic)) for opcode, (name, atomic) in ATOMICS.items()},
}
